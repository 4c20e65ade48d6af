"""The run of `kvcli summarize`: summaries of the documents, or their plans or text, printed or written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, cast

from kvcli.commands.chat.save_chat import said_of
from kvcli.commands.common.exits import Interrupt, insisting
from kvcli.commands.common.load_model import CheckedRun, MemoryWishes, load_model, outlook_of
from kvcli.commands.common.run_setup import Setup, refuse_beyond
from kvcli.commands.common.turn_json import run_of
from kvcli.commands.fit import others_of
from kvcli.commands.summarize.documents import InputDocument, InputDocuments, facts
from kvcli.documents import marked, notes_of, with_documents
from kvcli.errors import BadInput, ContextOverflow, EngineUnreachable, ExitStatus, KvcliError, UsageError
from kvcli.render.summarize.notes import about_file, hung, notes, plan_lines, stopped, stretch, totals
from kvcli.render.summarize.view import SummaryView
from kvcli.render.terminal.errors import print_error
from kvcli.render.terminal.terminal import Terminal
from kvcli.render.turn.status_row import RowOptions
from kvcli.render.turn.turn_summary import joined
from kvcli.render.turn.turn_view import busy_word, show_summary
from kvcli.schemas.turn import TurnDocument, error_document
from kvcli.summarize.ahead import Ahead
from kvcli.summarize.cache import Cache
from kvcli.summarize.document import extract_document, plan_document, summary_document
from kvcli.summarize.events import Event, PartEnded
from kvcli.summarize.parts import AsRead, names_of
from kvcli.summarize.plan import Plan, PlanWindow, make_plan, most_of
from kvcli.summarize.run import asked_parts, summarize
from kvcli.summarize.wording import Wording, wording_of

if TYPE_CHECKING:
    from kvcli.api import Turn
    from kvcli.chat.document_pack import Pack
    from kvcli.chat.text_session import TextSession
    from kvcli.commands.summarize.options import SummarizeOptions
    from kvcli.commands.summarize.output import SummaryOutput
    from kvcli.fit.plan import Plan as Fitted
    from kvcli.fit.preflight import Preflight
    from kvcli.render.terminal.screen import Screen
    from kvcli.schemas.fit import PassTime
    from kvcli.settings.profile import Profile
    from kvcli.summarize.ahead import Asked
    from kvcli.summarize.request import Request
    from kvcli.summarize.result import Summary


class EmptySummary(KvcliError):
    code, exit = "nothing_said", ExitStatus.BAD_OUTPUT


class SummaryRun:
    """One command line of `kvcli summarize`. `status` is its exit code so far."""

    run: CheckedRun  # once the model is loaded
    text_session: TextSession
    ahead: Ahead | None = None  # answers about further parts, with --parallel

    def __init__(
        self,
        options: SummarizeOptions,
        setup: Setup,
        profile: Profile,
        request: Request,
        documents: InputDocuments,
        out: SummaryOutput,
        screen: Screen,
        packed: Pack | None = None,
    ) -> None:
        """`packed` is the pack that the documents come from, if not from files."""
        self.options, self.setup, self.profile, self.request = options, setup, profile, request
        self.documents, self.out, self.screen, self.packed = documents, out, screen, packed
        self.each, self.world = options.documents.each, setup.world
        self.wanted = MemoryWishes(options.run.force, options.run.ctx == "max")
        self.cancel = Interrupt(self.world.clock)  # active while the model works; before that Ctrl-C ends the command
        self.status = int(ExitStatus.OK)

    # --- what the run does

    def start(self) -> int:
        """Make all summaries, or print their plans with --dry-run; returns the exit code."""
        self.refuse_early()
        self.tell_failed()
        if not self.documents.given:
            return self.status
        if self.options.dry_run:
            self.print_plans()
            return self.status
        for one, name in zip(self.documents.given, self.names(self.documents.given), strict=True):
            for note in one.document.notes:
                self.tell(f"{name}: {note}")
        status = self.summarize()
        if status != ExitStatus.INTERRUPTED:
            self.out.close()
        elif self.world.options.json:
            raise KeyboardInterrupt  # reported as an error
        return status

    def print_text(self) -> int:
        """Print the documents as in a prompt, for --extract-only; returns the exit code."""
        self.tell_failed()
        given = self.documents.given
        if self.out.form == "json":
            self.out.json(extract_document(facts(given), self.documents.documents, self.world.file_notes))
        for one in given:
            document = one.document
            for note in notes_of(document):
                self.tell(note)
            if self.out.form != "json":
                if len(given) > 1:
                    self.out.begin(one.heading)
                text = document.text if document.unit == "line" else marked(document.unit, document.sections)
                self.out.text(text if text.endswith("\n") else text + "\n")
        self.out.close()
        return self.status

    def refuse_early(self) -> None:
        """Refuse requests that the model cannot follow, before minutes of loading, if the model's files are here."""
        try:
            found = self.setup.fetch(self.profile)
        except KvcliError:
            return  # missing or damaged files: loading reports them
        wording_of(found).refuse(self.request, self.setup.name)

    def summarize(self) -> int:
        """Load the model and make all summaries; returns the exit code."""
        wording = self.open()
        session, parts = self.text_session, self.options.parts
        if not session.info.limit:
            way = "--ctx N, as its server was started"
            raise UsageError(f"{session.info.id} does not tell its context window", code="unknown_window", try_=[way])
        with session:
            if self.packed is not None:
                self.packed.refuse_other(session.session, session.profile)
                session.pack = self.packed
            for note in self.run.notes:
                self.tell(note)
            wording.refuse(self.request, session.info.id)
            window = PlanWindow.of(session, () if parts.on is not None else self.setup.pass_times(session.model))
            self.cache = Cache.of(self.world.paths.cache, session.info, self.run.profile, is_fresh=parts.no_cache)
            plans = [cache(partial(self.plan, given, window, wording)) for given in self.groups]
            with self.several(plans) as self.ahead:
                for given, plan in zip(self.groups, plans, strict=True):
                    self.begin(given)
                    with self.attempt(given):
                        self.summarize_one(given, plan, window)
                    if self.cancel():
                        return ExitStatus.INTERRUPTED
        return self.status

    def open(self) -> Wording:
        """Load the model, here or with --on in workers of a Ray cluster. Return its wording."""
        if (on := self.options.parts.on) is None:
            self.run, self.text_session = load_model(self.setup, self.profile, self.wanted, self.screen)
            return wording_of(self.text_session.info)
        from kvcli.commands.summarize.on_ray import open_ray

        with insisting(), busy_word(self.screen, f"loading {self.setup.name}"):
            session = open_ray(on, self.setup.lasting_name, self.profile, self.options.parts.parallel)
        self.text_session = cast("TextSession", session)
        self.run = CheckedRun(self.setup, session.profile, notes=session.cautions)
        return session.wording

    @contextmanager
    def several(self, plans: Sequence[Callable[[], Plan]]) -> Iterator[Ahead | None]:
        """Open the sessions of --parallel, which answer about parts of all plans; None = one answer at a time."""

        def prompts() -> Iterator[Asked]:
            for given, plan in zip(self.groups, plans, strict=True):
                of = self.text_session, [one.document for one in given]
                with suppress(KvcliError):  # reported when its turn comes
                    yield from asked_parts(*of, self.cache, self.cancel, plan())

        with ExitStack() as ends:
            sessions = [self.text_session]
            for _ in range(max(self.options.parts.parallel, sessions[0].n_workers) - 1):
                sessions.append(ends.enter_context(self.text_session.with_profile(self.text_session.profile)))
                sessions[-1].pack = self.packed
            yield Ahead(sessions, prompts(), self.cancel, self.save_kv_cache) if len(sessions) > 1 else None

    def plan(self, given: Sequence[InputDocument], window: PlanWindow, wording: Wording) -> Plan:
        return make_plan([one.document for one in given], self.request, window, wording, self.read)

    def begin(self, given: Sequence[InputDocument]) -> None:
        """Begin the output of one summary, with a heading if there are several."""
        if self.each and (len(self.groups) > 1 or self.out.folder is not None):
            self.out.begin(given[0].heading)

    def summarize_one(self, given: Sequence[InputDocument], make: Callable[[], Plan], window: PlanWindow) -> None:
        """Make one summary, from its plan to its last note."""
        documents = [one.document for one in given]
        with busy_word(self.screen, "counting tokens"):
            plan = make()
            said = self.plan_words(given, plan, window, self.screen.err.width) if self.tells else []
        self.screen.err.lines(said)
        look = RowOptions(self.run.profile.name, stopping=self.cancel)
        view = SummaryView(self.screen, look, plan, self.out.live(), tells=self.tells)
        view.ahead = self.ahead
        of = self.text_session, documents
        events = summarize(*of, cache=self.cache, cancel=self.cancel, plan=plan, ahead=self.ahead)
        with self.cancel, view.running(), closing(cast("Generator[Event]", events)):
            for event in events:
                view.on(event)
                if self.ahead is None and isinstance(event, PartEnded) and not event.answered.is_cached:
                    self.save_kv_cache(self.text_session, event.answered.turn)
        if view.summary is None:
            if view.stopped and self.tells:
                words = stopped(view.stopped, no_cache=self.cache.is_fresh)
                self.screen.err.lines(joined([words], self.screen.err.width))
            return
        self.finish(given, view.summary, view.told)

    def save_kv_cache(self, session: TextSession, turn: Turn) -> None:
        """Save the KV cache of a part for later runs, before the next part of the session replaces it."""
        if self.packed is not None and turn.stats.cached < self.packed.about.tokens:
            self.tell(f"{self.packed.folder.name} was read again: the question merges with the last token of its text")
        self.tell(said_of(session.keep(self.cancel)))

    def finish(self, given: Sequence[InputDocument], summary: Summary, told: Collection[str] = ()) -> None:
        """Output the document, the notes that are not `told` yet and the figures, and log the memory."""
        session = self.text_session
        if not summary.points:
            is_loop = any(answered.turn.finish == "loop" for answered in summary.turns)
            raise EmptySummary(
                f"{session.info.id} wrote no summary",
                lines=["its answer repeated itself" if is_loop else "its answer is empty"],
                try_=["-m with another model", "--no-cache"],
            )
        under = run_of(self.run.profile, session)
        turns = [TurnDocument.of(answered.turn, session.info, under) for answered in summary.turns]
        made = summary_document(summary, facts(given, session.tokenizer), turns)
        made.notes += self.world.file_notes
        if not self.each:
            made.notes += [f"{name} is not in the summary: {error.message}" for name, error in self.documents.failed]
        self.out.end(made, summary.points)
        named = {name: one.document for name, one in zip(self.names(given), given, strict=True)}
        for note in notes(summary, named, cited=self.request.cite):
            if note not in told:
                self.tell(note)
        fresh = [answered.turn for answered in summary.turns if not answered.is_cached]
        if self.tells and self.screen.stats != "off":
            if len(fresh) == 1 and len(summary.turns) == 1:
                show_summary(replace(fresh[0], finish="stop"), self.screen)  # a note says that it was cut
            elif fresh:
                self.screen.err.lines(joined(totals(summary), self.screen.err.width, indent="  "), "dim")
        if any(answered.turn.finish == "loop" for answered in summary.turns):
            self.status = self.status or ExitStatus.BAD_OUTPUT
        for turn in fresh if self.ahead is None else ():  # the estimate is of one text
            self.tell(self.run.record(self.run.profile, turn))

    # --- --dry-run: the tokenizer is loaded, the weights are not

    def print_plans(self) -> None:
        """Print a plan for each group of documents that would become one summary."""
        window, wording = look(self.setup, self.profile, self.wanted)
        wording.refuse(self.request, self.setup.name)
        for given in self.groups:
            with self.attempt(given):
                plan = self.plan(given, window, wording)
                if self.out.form == "json":
                    self.out.json(plan_document(plan, facts(given, window.tokenizer), self.world.file_notes))
                else:
                    self.print_plan(given, plan, window)

    def plan_words(self, given: Sequence[InputDocument], plan: Plan, window: PlanWindow, width: int) -> list[str]:
        """Return the files and the plan as lines."""
        named = zip(given, self.names(given), strict=True)
        sources = [about_file(name, one.document, one.document.tokens(window.tokenizer)) for one, name in named]
        return [*(line for words in sources for line in hung(words, width)), *plan_lines(plan, width)]

    def print_plan(self, given: Sequence[InputDocument], plan: Plan, window: PlanWindow) -> None:
        out = Terminal.of(self.world, "stdout")
        lines = self.plan_words(given, plan, window, out.width)
        if len(plan.parts) > 1:
            for part, prompt in zip(plan.parts, plan.prompts, strict=True):
                lines.append(f"  part {part.number} · {stretch(part)} · {prompt:,} tokens")
        lines.append(f"  answer length up to {plan.answer:,} tokens · context window {plan.limit:,}")
        out.lines(lines)

    # --- the documents

    @property
    def groups(self) -> list[list[InputDocument]]:
        """Documents of each summary."""
        given = self.documents.given
        return [[one] for one in given] if self.each else [given]

    @property
    def read(self) -> AsRead | None:
        """Documents as in the prompt of the pack."""
        if self.packed is None:
            return None
        return AsRead(with_documents("", self.packed.documents), self.packed.chat.system)

    def names(self, given: Sequence[InputDocument]) -> list[str]:
        """Return the names of the documents of one summary: those of its citations, so no two are the same."""
        if self.each:
            return [one.heading for one in given]
        named = names_of([one.document for one in given])
        return [name or one.document.name for name, one in zip(named, given, strict=True)]

    # --- notes and errors

    @property
    def tells(self) -> bool:
        """True if notes are printed on stderr; with JSON they are in the document."""
        return not self.screen.quiet and not self.world.options.json

    def tell(self, text: str) -> None:
        if self.tells:
            self.screen.note(text)

    @contextmanager
    def attempt(self, given: Sequence[InputDocument]) -> Iterator[None]:
        """Run one summary in the block. With --each, an error is reported and the other summaries continue."""
        try:
            yield
        except (BadInput, ContextOverflow, EmptySummary, EngineUnreachable) as error:
            if not self.each:
                raise
            error.message = f"{given[0].heading}: {error.message}"
            self.failed(error)

    def failed(self, error: KvcliError) -> None:
        """Report the error of one file. The other files continue, and the first error gives the exit code."""
        self.status = self.status or int(error.exit)
        in_lines = self.out.form == "json" and self.each
        if in_lines:
            self.out.json(error_document(error), counts=False)
        if not in_lines or self.out.file is not None:
            print_error(self.screen.err, error)

    def tell_failed(self) -> None:
        """Report unreadable files. With JSON, if no file could be read, one error document stands for all."""
        failed = [error for _, error in self.documents.failed]
        if failed and not self.documents.given and self.out.form == "json":
            first, *others = failed
            first.lines = (*first.lines, *(error.message for error in others))
            raise first
        for error in failed:
            self.failed(error)


def look(setup: Setup, profile: Profile, wanted: MemoryWishes) -> tuple[PlanWindow, Wording]:
    """Return the facts about the model that a plan needs, from its files."""
    from kvcli.engine.loading.weights import keeps_quantized
    from kvcli.models.gguf.convert import convert_if_needed
    from kvcli.models.thinking import thinking_format
    from kvcli.models.tokenizer import load_tokenizer

    setup.world.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    found = setup.fetch(profile)
    outlook = outlook_of(setup, found)
    refuse_beyond(profile, outlook.subject.shape.limit, setup.name)
    fitted, note = outlook.fitted(profile, lambda: others_of(setup), force=wanted.force, whole=wanted.whole)
    profile = fitted.profile
    keeps_on = keeps_quantized(profile.load, found)
    found = convert_if_needed(found, profile.load.dtype, setup.world.paths.cache, keeps_on=keeps_on)
    tokenizer = load_tokenizer(found, profile.load.trust_remote_code)
    most = outlook.subject.shape.limit
    asked = profile.context.limit
    limit = fitted.need.context if note else most if asked == "auto" else min(int(asked), most)
    passes = _passes(setup, outlook, fitted)
    foretell, drafts = partial(outlook.estimate_peak, profile), profile.spec.method != "off"
    variables = thinking_format(tokenizer).variables(profile.thinking.mode)
    window = PlanWindow(tokenizer, limit, most_of(profile), passes, foretell, most, drafts, variables)
    return window, wording_of(found)


def _passes(setup: Setup, outlook: Preflight, fitted: Fitted) -> list[PassTime]:
    """Return pass times measured by `kvcli bench --calibrate` or by an earlier run."""
    from kvcli.fit.calibrate import fingerprint_in, known_times
    from kvcli.fit.run_log import machine_fingerprint

    cache, machine = setup.world.paths.cache, machine_fingerprint(fitted.room.device, fitted.profile.load.threads)
    key = fingerprint_in(fitted, outlook.subject, setup.name, cache)
    return known_times(cache, machine, key, outlook.notes.append) or []
