"""`kvcli chat`: one question with -p or from a pipe, an interactive chat on a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.api import MOST_TOP, Cancel, End, Events, Turn, turn_of
from kvcli.commands.common import flags as o
from kvcli.commands.common.inputs import Question, tell
from kvcli.commands.common.options import Options, choice, command, flag
from kvcli.environment import Environment
from kvcli.errors import BadInput, DoesNotFit, ExitStatus, UsageError
from kvcli.models.grammar import Grammar
from kvcli.settings.small_file import Unfit, parse_object, read_small

if TYPE_CHECKING:
    from kvcli.chat.conversation import Chat
    from kvcli.chat.document_pack import Pack
    from kvcli.chat.saved_chats import SavedChat
    from kvcli.chat.text_session import TextSession
    from kvcli.commands.chat.repl import Repl
    from kvcli.commands.chat.tools import ChatTools
    from kvcli.commands.common.load_model import CheckedRun, MemoryWishes
    from kvcli.commands.common.run_setup import Setup
    from kvcli.commands.summarize.options import SummarizeOptions
    from kvcli.documents import Document
    from kvcli.engine.sequence.constraint import Constraint
    from kvcli.settings.profile import Profile

# Structured output: the grammar of --schema, --grammar or --json-object, read before a model loads.
LARGEST = 1 << 20  # bytes of a schema or a grammar, at most


@dataclass(frozen=True, slots=True)
class AnswerConstraint:
    """The constraint on the answers of this run."""

    name: str
    constraint: Constraint
    stops: Collection[int]

    def missed(self, turn: Turn) -> str:
        """Return a note if the length limit cut the answer before it was complete; else ""."""
        from kvcli.engine.sequence.constraint import is_whole

        answer = turn.ids[turn.stats.thinking :]
        if turn.finish != "length" or is_whole(self.constraint, answer, self.stops):
            return ""
        return f"the answer reached its length limit before it was complete {self.name}; use a larger --max-new-tokens"


def read_grammar(world: Environment, schema: str | None, rules: str | None, json_object: bool) -> Grammar | None:
    """Return the grammar of the options, if there is one."""
    typed = [flag for flag, value in (("--schema", schema), ("--grammar", rules)) if value is not None]
    typed += ["--json-object"] if json_object else []
    if len(typed) > 1:
        raise UsageError(f"{' and '.join(typed)} exclude each other", try_=["only one of them"])
    if schema is not None:
        raw = _read(world, schema, "bad_schema")
        try:
            return Grammar.of_schema(parse_object(raw), schema)
        except Unfit as error:
            raise BadInput(f"{schema} {error}", code="bad_schema") from None
    if rules is not None:
        raw = _read(world, rules, "bad_grammar")
        try:
            return Grammar.of_text(raw.decode("utf-8-sig"), rules)
        except UnicodeDecodeError as error:
            raise BadInput(f"{rules} is not UTF-8: at byte {error.start:,}", code="bad_grammar") from None
    return Grammar.json_object() if json_object else None


def _read(world: Environment, name: str, code: str) -> bytes:
    try:
        return read_small(world.path(name), LARGEST)
    except Unfit as error:
        raise BadInput(f"{name} {error}", code=code) from None


# The --pack option: the pack's model and settings, and options that may be combined with it.


def pack_of(world: Environment, typed: str | None, others: Sequence[object], flags: str) -> Pack | None:
    """Open the pack, which has its own documents. Raises UsageError if one of the options `others` is typed too."""
    if typed is None:
        return None
    from kvcli.chat.document_pack import open_pack

    if any(others):
        raise UsageError(
            f"--pack excludes {flags}: the pack contains its documents",
            try_=["--pack NAME.kvs alone", "kvcli pack FILE... -o NAME.kvs, with all files and the system text"],
        )
    return open_pack(world.path(typed))


def setup_of(
    world: Environment, options: ChatOptions | SummarizeOptions, packed: Pack | None, opened: SavedChat | None = None
) -> Setup:
    """Return the setup of a run. If no model is typed, it is that of the pack or of the saved chat.

    Raises BadInput if that model is not known here.
    """
    from kvcli.commands.chat.save_chat import adapters_of, known_here, model_of
    from kvcli.commands.common.run_setup import Setup

    model, flags = options.model, o.profile_flags(options.values())
    if options.engine.typed.keys() & {"engine", "base_url", "key_file", "engine_timeout"}:
        from kvcli.commands.common.remote_setup import remote_setup

        return remote_setup(world, options, options.engine, flags)
    if model is None and packed is not None:
        model = known_here(world, packed.about.model, packed.folder.name, "packs")
    if model is None and opened is not None:
        model = model_of(world, opened)
        flags = adapters_of(opened) | flags
    return Setup(
        world,
        model,
        flags,
        options.run.exact,
        is_typed=options.model is not None,
        reuses=True,  # --no-save saves nothing, but uses the prefix cache
        pack=packed.about if packed is not None else None,
    )


def profile_of(setup: Setup, packed: Pack | None) -> Profile:
    """Return the profile typed, or else that of the pack with the settings of its KV cache, which are printed.

    Raises BadInput if the options typed contradict the settings of the pack.
    """
    if packed is None:
        return setup.profile
    packed.refuse_under(setup.profile)
    if setup.taken:
        tell(setup.world, f"settings from {packed.folder.name}: {', '.join(setup.taken)}")
    return setup.profile


app = typer.Typer(add_completion=False)

ALONE = "--file, --system, --continue, --resume and --dry-run"
_FILE = "Attach a file, a folder, '*.txt' or an https:// address; paper.pdf:3-9 for pages. Repeatable."
_WORDS = "A question, as -p, and files to attach, as -f."

_TOP_P = "Nucleus sampling: the smallest set of tokens with total probability F."
_STOP = "End the answer before this text. Repeatable."
_LOGPROBS = "With --json: log-probabilities of each token and of the N most likely ones, up to 20."
_SAMPLES = "Answer one question N times, with the next seed each; the answers are not saved in a chat."
_PENALTY = "Above 1, tokens that occurred before become less likely."


class QuestionOptions(Options, panel="The question"):
    prompt: str | None = choice(
        "-p", metavar="TEXT", help="Ask this question and exit; - reads it from standard input."
    )
    file: list[str] | None = choice("-f", metavar="PATH", help=_FILE)
    ocr: o.OcrMode = "auto"
    pack: str | None = choice(metavar="NAME.kvs", help="Ask about documents that kvcli pack saved.", rare=True)
    system: o.System = None
    system_file: o.SystemFile = None
    continue_: bool = flag("-c", help="Continue the latest chat.")
    resume: str | None = choice("-r", metavar="CHAT", help="Continue this saved chat: name, title or document.")
    no_save: bool = flag(help="Do not save this chat.")


class ToolOptions(Options, panel="Tools"):
    tools: str | None = choice(metavar="FILE", help="Functions that the model may call: a JSON list.")
    tool_command: str | None = choice(
        metavar="CMD", help="Run each call with this command, which reads it as JSON.", rare=True
    )
    tool_results: str | None = choice(metavar="FILE", help="Results of the last calls, as a JSON list.", rare=True)
    mcp: list[str] | None = choice(
        metavar="CMD", help="Start this MCP server, and offer its tools. Repeatable.", rare=True
    )


class AnswerOptions(Options, panel="The answer"):
    max_new_tokens: str | None = choice("-n", metavar="N", help="Maximum length in tokens; 4k = 4096.")
    temperature: float | None = choice("-t", metavar="F", help="0 = always the most likely token.")
    top_p: float | None = choice(metavar="F", help=_TOP_P, rare=True)
    top_k: int | None = choice(metavar="N", help="Sample from the N most likely tokens; 0 = all.", rare=True)
    min_p: float | None = choice(
        metavar="F", help="Drop tokens less likely than F times the most likely one.", rare=True
    )
    repetition_penalty: float | None = choice(metavar="F", help=_PENALTY, rare=True)
    stop: list[str] | None = choice(metavar="TEXT", help=_STOP, rare=True)
    seed: int | None = choice(metavar="N", help="Random seed.", rare=True)
    greedy: bool = flag(help="Always the most likely token: --temperature 0 without penalties.", rare=True)
    schema: str | None = choice(metavar="FILE", help="Constrain the answer to this JSON schema.")
    grammar: str | None = choice(metavar="FILE", help="Constrain the answer to this grammar, GBNF or Lark.", rare=True)
    json_object: bool = flag(help="Constrain the answer to a JSON object.", rare=True)
    show_thinking: bool = flag(help="Print what the model thinks, instead of one row about it.", rare=True)
    stats: o.Figures = None
    stream: bool = flag(help="With --json: one line for each event.", rare=True)
    logprobs: int | None = choice(metavar="N", help=_LOGPROBS, rare=True)
    samples: int = choice(default=1, metavar="N", help=_SAMPLES, rare=True)


class ChatOptions(Options, panel="The model"):
    model: o.ModelName = None
    words: Annotated[list[str] | None, typer.Argument(metavar="QUESTION", help=_WORDS)] = None
    question: QuestionOptions
    answer: AnswerOptions
    tools: ToolOptions
    run: o.RunOptions
    engine: o.EngineOptions
    dry_run: bool = flag(help="Print the settings and their memory; load nothing.", rare=True)


@command(app)
def chat(world: Environment, options: ChatOptions) -> int:
    """Chat with a model, or ask one question with -p or through a pipe.

    The answer goes to stdout, everything else to stderr. "KV" in the figures
    is the KV cache: keys and values of all tokens, computed only once.
    """
    from kvcli.commands.chat.tools import open_tools
    from kvcli.commands.chat.words import sort_words
    from kvcli.commands.common.document_files import ReadOptions, find_files, read_files, read_system
    from kvcli.commands.common.inputs import STDIN, Question, read_question
    from kvcli.commands.models.suggest_model import find_model, tell_toy

    asked, wanted, how = options.question, options.answer, ReadOptions(ocr=options.question.ocr)
    model, said, named = sort_words(world, options.model, options.words or [])
    if said and asked.prompt is not None:
        raise UsageError(f"there are two questions, {said!r} and that of -p", try_=["only one of them"])
    asked = replace(asked, prompt=said or asked.prompt)
    options = replace(options, model=model, question=asked)
    if wanted.stream and not world.options.json:
        raise UsageError("--stream needs --json", try_=["--json --stream"])
    if wanted.logprobs is not None and not (world.options.json and 0 <= wanted.logprobs <= MOST_TOP):
        raise UsageError(f"--logprobs needs --json and a number from 0 to {MOST_TOP}", try_=["--json --logprobs 5"])
    others = [asked.file or named, asked.system, asked.system_file, asked.continue_, asked.resume, options.dry_run]
    packed = pack_of(world, asked.pack, others, ALONE)
    files = find_files(world, asked.file or [], named)
    offered = options.tools
    with (
        open_saved_chat(world, asked) as opened,
        open_tools(world, offered.tools, offered.mcp or (), offered.tool_command) as tools,
    ):
        setup = find_model(setup_of(world, options, packed, opened), [file.name for file in files])
        grammar = read_grammar(world, wanted.schema, wanted.grammar, wanted.json_object)
        profile = profile_of(setup, packed)
        if options.dry_run:
            from kvcli.commands.chat.dry_run import print_plan

            return print_plan(setup, profile, read_files(world, files, how))
        setup.look(profile)
        question = Question(None, (), None)
        if offered.tool_results is None:
            documents, system = read_files(world, files, how), read_system(world, asked.system, asked.system_file)
            question = read_question(world, asked.prompt, documents, system)
        elif asked.prompt is not None or files:
            raise UsageError("--tool-results excludes --prompt and --file", try_=["only one of them"])
        if packed is not None:
            question = about_pack(question, packed)
        if wanted.samples != 1 and (wanted.samples < 1 or question.text is None or tools is not None):
            raise UsageError("--samples needs a question and no tools; it is 1 or more", try_=["-p TEXT --samples 4"])
        setup = find_model(setup, [d.name for d in question.documents if d.name == STDIN])
        if question.text is not None and not question.documents:
            tell_toy(setup)
        return ChatRun(options, setup, profile, grammar, opened, packed, tools).answer(question)


def about_pack(question: Question, packed: Pack) -> Question:
    """Return the question with the documents and the system text of the pack."""
    if question.documents:
        raise UsageError("--pack excludes documents from standard input", try_=["kvcli chat ... </dev/null"])
    return replace(question, documents=tuple(packed.documents), system=packed.chat.system)


@contextmanager
def open_saved_chat(world: Environment, options: QuestionOptions) -> Iterator[SavedChat | None]:
    """Yield the saved chat to continue, if there is one. It is locked until the end, except with --no-save."""
    if options.continue_ and options.resume is not None:
        raise UsageError("--continue and --resume exclude each other", try_=["only one of them"])
    if not options.continue_ and options.resume is None:
        yield None
        return
    from kvcli.commands.chat.save_chat import reopen, saved_chats_of

    opened = reopen(saved_chats_of(world), world, options.resume, is_locked=not options.no_save)
    with closing(opened):
        yield opened


class ChatRun:
    """One command line of `kvcli chat`: one question, or the interactive chat. `load` opens the model."""

    chat: Chat
    run: CheckedRun

    def __init__(
        self,
        options: ChatOptions,
        setup: Setup,
        profile: Profile,
        grammar: Grammar | None,
        opened: SavedChat | None,
        packed: Pack | None,
        tools: ChatTools | None,
    ) -> None:
        """`profile` is that of the command line; `opened` is the saved chat that continues."""
        from kvcli.render.terminal.screen import Screen

        self.setup, self.profile, self.grammar, self.opened, self.packed = setup, profile, grammar, opened, packed
        self.options, self.world = options, setup.world
        self.screen = Screen.of(self.world, options.answer.stats)
        self.screen.markdown = grammar is None
        self.screen.shows_thinking = options.answer.show_thinking
        self.saves = not options.question.no_save and setup.keeps
        self.held: AnswerConstraint | None = None
        self.tools = tools

    @property
    def constraint(self) -> Constraint | None:
        return self.held.constraint if self.held is not None else None

    def answer(self, question: Question) -> int:
        """Load the model and answer one question, or start the interactive chat."""
        from kvcli.chat.conversation import Chat
        from kvcli.commands.chat.save_chat import about, save_kv_cache, saved_chats_of, try_save
        from kvcli.commands.chat.tools import read_results
        from kvcli.commands.common.load_model import MemoryWishes

        wanted = MemoryWishes(self.options.run.force, self.options.run.ctx == "max")
        text_session = self.load(self.setup, self.profile, wanted)
        chats, name = saved_chats_of(self.world), self.setup.lasting_name
        chat = self.chat = Chat(text_session, saved_chats=chats, is_locked=True, called=name)
        with ExitStack() as ends:
            ends.callback(lambda: chat.text_session.close())  # /model may have changed the session
            ends.callback(chat.close)
            if self.packed is not None:
                self.packed.refuse_other(text_session.session, text_session.profile)
                text_session.pack = self.packed
            if self.tools is not None:
                text_session.model.call_syntax()  # refuses a template without tool calls
                chat.tools = self.tools.definitions
            self.begin(question)
            for note in (*self.run.notes, *(text_session.why_again() if self.opened else ())):
                tell(self.world, note)
            self.constrain(text_session)
            del text_session  # so that only the chat refers to the weights
            file = self.options.tools.tool_results
            results = read_results(self.world, file) if file is not None else None
            if question.text is None and results is None:
                return self.converse()
            if self.opened is not None:
                tell(self.world, f"continues {about(chat)}")
            try:
                return self.ask(results or question.text or "")
            finally:
                note = try_save(chat) if self.saves else ""
                if not note and chat.saved_chat is not None and self.world.options.verbose:
                    note = f"saved as {chat.saved_chat.name}"
                self.screen.note(note)
                self.screen.note(save_kv_cache(chat.text_session) if self.saves else "")

    def load(self, setup: Setup, profile: Profile, wanted: MemoryWishes) -> TextSession:
        """Return a session of the model of `setup`."""
        from kvcli.commands.common.load_model import load_model

        self.run, text_session = load_model(setup, profile, wanted, self.screen)
        return text_session

    def constrain(self, session: TextSession) -> None:
        """Constrain the answers of the session's model to the grammar of the options, if there is one."""
        if self.grammar is not None:
            from kvcli.render.turn.turn_view import busy_word

            with busy_word(self.screen, "reading the vocabulary"):
                constraint = session.model.constraint(self.grammar)
            self.held = AnswerConstraint(self.grammar.name, constraint, session.model.lm.stop_ids)

    def begin(self, question: Question) -> None:
        """Prepare the chat: a saved chat, options that override its settings, and documents that are new to it."""
        if self.opened is not None:
            self.chat.take(self.opened)
            if not self.saves:
                self.chat.close()
        if question.system is not None:
            self.chat.system = question.system or None  # -s "" removes that of a saved chat
        for document in question.documents:
            if self.chat.place(document) is None:
                self.chat.attach(document)
            else:
                tell(self.world, f"{document.name} is attached already")
        self.chat.notes += self.world.file_notes

    def ask(self, asked: str | list[str]) -> int:
        """Answer one question, or the results of tool calls. Ctrl-C ends the answer after the current pass; the text
        so far is kept.
        """
        from kvcli.commands.common.exits import Interrupt

        chat, wanted = self.chat, self.options.answer
        with Interrupt(self.world.clock) as cancel:
            options: dict[str, Any] = {"cancel": cancel, "constraint": self.constraint}
            options |= {} if wanted.logprobs is None else {"top_logprobs": wanted.logprobs}

            def show(asked: str | list[str]) -> Turn:
                if isinstance(asked, str):
                    answer = chat.stream(asked, **options)
                else:
                    answer = chat.stream_results(asked, **options)
                return self._shown(answer, cancel)

            if wanted.samples > 1 and isinstance(asked, str):
                found = 0
                for number, answer in enumerate(chat.samples(asked, wanted.samples, **options), 1):
                    if number > 1 and not self.world.options.json:
                        self.world.stdout.write("\n")
                    found = self._ended(self._shown(answer, cancel), number) or found
                return found
            turn = show(asked)
            if self.tools is not None:
                turn = self.tools.follow(turn, show, cancel)
        return self._ended(turn)

    @property
    def _is_whole(self) -> bool:
        """True if the output is one JSON document for each answer, at its end."""
        return self.world.options.json and not self.options.answer.stream

    def _ended(self, turn: Turn, number: int = 1) -> int:
        """Print what follows an answer, and return the exit code."""
        profile, chat, session = self.run.profile, self.chat, self.chat.text_session
        if self._is_whole:
            from kvcli.commands.common.turn_json import print_turn, run_of

            run = replace(run_of(profile, session, chat.notes), number=number)
            print_turn(self.world, [End(turn)], session.info, run)
        elif turn.tool_calls and not self.world.options.json and not self.world.is_tty("stdout"):
            from kvcli.chat.transcript import openai_form
            from kvcli.commands.common.output import print_json

            calls = [openai_form(call, as_text=True) for call in turn.tool_calls]
            print_json(self.world, {"finish_reason": "tool_calls", "tool_calls": calls})
        missed = self.held.missed(turn) if self.held is not None else ""
        for note in filter(None, (turn.stats.approx, missed, self.run.record(profile, turn))):
            tell(self.world, note)
        usual = ExitStatus.BAD_OUTPUT if missed else ExitStatus.OK
        return {"interrupted": ExitStatus.INTERRUPTED, "loop": ExitStatus.BAD_OUTPUT}.get(turn.finish, usual)

    def _shown(self, answer: Events, cancel: Cancel) -> Turn:
        """Run an answer, and show its events: as JSON lines, or on the screen. One JSON document is printed later."""
        with closing(answer) as events:  # type: ignore[type-var]
            return turn_of(events) if self._is_whole else self._show(events, cancel)

    def _show(self, events: Events, cancel: Cancel) -> Turn:
        chat, session, profile = self.chat, self.chat.text_session, self.run.profile
        if self.world.options.json:
            from kvcli.commands.common.turn_json import print_events, run_of

            return print_events(self.world, events, session.info, run_of(profile, session, chat.notes))
        from kvcli.render.turn.status_row import RowOptions
        from kvcli.render.turn.turn_view import show_turn

        for note in chat.notes:
            self.screen.note(note)
        chat.tell = self.screen.note
        return show_turn(events, self.screen, RowOptions(profile.name, stopping=cancel))

    def converse(self) -> int:
        """Run the interactive chat."""
        from kvcli.commands.chat.repl import Repl
        from kvcli.commands.chat.slash import SLASH

        if not self.screen.quiet:
            self.screen.err.lines(self.opening())
        repl = Repl(
            self.chat,
            self.screen,
            self.world,
            SLASH,
            saves=self.saves,
            profiles=self.run,
            profile=self.run.profile.name,
            sets=self.world.options.set,
            history=self.world.paths.state / "history" if self.saves else None,
            after_turn=self.after_turn,
            constraint=self.constraint,
            tools=self.tools,
            change_model=self.change_model,
            read=self.read,
        )
        return repl.run()

    def opening(self) -> list[str]:
        """Return the lines before the first prompt: the model, its memory, and what the chat begins with."""
        from kvcli.commands.chat.save_chat import about
        from kvcli.models.machine import threads
        from kvcli.render.summarize.notes import size
        from kvcli.render.turn.turn_summary import HeaderFacts, header
        from kvcli.version import __version__

        session = self.chat.text_session
        opening = HeaderFacts(
            __version__, self.run.profile.name, session.promise, context=session.limit, estimate=self.run.estimate,
            threads=threads(), draft=session.drafts_by,
        )  # fmt: skip
        return [
            *header(session.info, opening, self.screen.err.width),
            *([f"answers are constrained to {self.held.name}"] if self.held is not None else []),
            *([f"continues {about(self.chat)}"] if self.chat.messages else []),
            *(f"attached {document.name} · {size(document)}" for document in self.chat.documents),
        ]

    def after_turn(self, turn: Turn | None) -> None:
        """Note what the last turn of the interactive chat lacks, and log its memory."""
        if turn is not None:
            self.screen.note(self.held.missed(turn) if self.held is not None else "")
            self.screen.note(self.run.record(self.chat.text_session.profile, turn))

    def read(self, name: str) -> list[Document]:
        """Return the documents of a name that /file gets, with the options of the command line."""
        from kvcli.commands.common.document_files import ReadOptions, find_files, read_files
        from kvcli.commands.models.suggest_model import find_model

        find_model(self.setup, [name], may_ask=False)
        return read_files(self.world, find_files(self.world, [name]), ReadOptions(ocr=self.options.question.ocr))

    def change_model(self, repl: Repl, name: str) -> None:
        """Continue the interactive chat with another model. If it cannot be loaded, nothing has changed."""
        from kvcli.commands.common.load_model import MemoryWishes
        from kvcli.commands.models.suggest_model import find_model

        wanted = replace(self.setup, model=name, is_typed=True)
        wanted = find_model(wanted, [document.name for document in self.chat.documents], may_ask=False)
        try:
            profile = wanted.resolve(repl.profile_name, [*repl.given, *repl.said])
            text_session = self.load(wanted, profile, MemoryWishes())
        except DoesNotFit as error:
            saved = self.chat.goes_on if self.chat.is_saved else ""
            error.try_ = (f"/exit, then kvcli chat {saved} -m {name}", *error.try_)
            raise
        self.constrain(text_session)
        self.setup, repl.profiles = wanted, self.run
        repl.constraint = self.constraint
        self.chat.go_to(text_session, wanted.lasting_name)
        for note in self.run.notes:
            self.screen.note(note)
