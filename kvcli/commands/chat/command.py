"""`kvcli chat`: one question with -p or from a pipe, an interactive chat on a terminal."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from os.path import expanduser
from typing import TYPE_CHECKING

import typer

from kvcli.commands.common import flags as o
from kvcli.commands.common.inputs import tell
from kvcli.commands.common.load_model import MemoryWishes
from kvcli.errors import BadInput, DoesNotFit, ExitStatus, UsageError
from kvcli.models.grammar import Grammar
from kvcli.settings.small_file import Unfit, parse_object, read_small

if TYPE_CHECKING:
    from kvcli.api import Turn
    from kvcli.chat.document_pack import Pack
    from kvcli.chat.model import Chat, Model
    from kvcli.chat.saved_chats import SavedChat
    from kvcli.commands.chat.repl import Repl
    from kvcli.commands.common.inputs import Question
    from kvcli.commands.common.load_model import CheckedRun
    from kvcli.commands.common.run_setup import Setup
    from kvcli.engine.sequence.constraint import Constraint
    from kvcli.environment import Environment
    from kvcli.render.terminal.screen import Screen
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

        if turn.finish != "length" or is_whole(self.constraint, turn.ids, self.stops):
            return ""
        return f"the answer reached its length limit before it was complete {self.name}; use a larger --max-new-tokens"


def constrain(model: Model, grammar: Grammar, screen: Screen) -> AnswerConstraint:
    """Constrain the model's answers to the grammar."""
    from kvcli.render.turn.turn_view import busy_word

    with busy_word(screen, "reading the vocabulary"):
        return AnswerConstraint(grammar.name, model.constraint(grammar), model.lm.stop_ids)


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
        return read_small(world.cwd / os.path.expanduser(name), LARGEST)
    except Unfit as error:
        raise BadInput(f"{name} {error}", code=code) from None


# The --pack option: the pack's model and settings, and options that may be combined with it.


def pack_of(world: Environment, typed: str, others: Sequence[object], flags: str) -> Pack:
    """Open the pack, which has its own documents. Raises UsageError if one of the options `others` is typed too."""
    from kvcli.chat.document_pack import open_pack

    if any(others):
        raise UsageError(
            f"--pack excludes {flags}: the pack contains its documents",
            try_=["--pack NAME.kvs alone", "kvcli pack FILE... -o NAME.kvs, with all files and the system text"],
        )
    return open_pack(world.cwd / expanduser(typed))


def packed_model(world: Environment, packed: Pack) -> str:
    """Return the model that made the pack. Raises BadInput if the model is not known here."""
    from kvcli.commands.chat.save_chat import known_here

    return known_here(world, packed.about.model, packed.folder.name, "packs")


def profile_of(setup: Setup, packed: Pack | None) -> Profile:
    """Return the profile typed, or else that of the pack with the settings of its KV cache, which are printed.

    Raises BadInput if the options typed contradict the settings of the pack.
    """
    if packed is None:
        return setup.profile()
    setup.usual, setup.packed = packed.about.profile, packed.about.settings
    profile = setup.profile()
    packed.refuse_under(profile)
    if setup.taken:
        said = ", ".join(f"{key}={value}" for key, value in setup.taken.items())
        tell(setup.world, f"settings from {packed.folder.name}: {said}")
    return profile


app = typer.Typer(add_completion=False)

ALONE = "--file, --system, --continue, --resume and --dry-run"


@app.command()
def chat(
    context: typer.Context,
    model: o.ModelName = None,
    prompt: o.Prompt = None,
    file: o.File = None,
    pack: o.Pack = None,
    system: o.System = None,
    system_file: o.SystemFile = None,
    continue_: o.Continue = False,
    resume: o.Resume = None,
    no_save: o.NoSave = False,
    max_new_tokens: o.Most = None,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    min_p: o.MinP = None,
    repetition_penalty: o.Penalty = None,
    seed: o.Seed = None,
    greedy: o.Greedy = False,
    schema: o.Schema = None,
    grammar: o.Rules = None,
    json_object: o.JsonObject = False,
    stats: o.Figures = None,
    stream: o.Lines = False,
    ctx: o.Ctx = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    quant: o.Quant = None,
    budget: o.Budget = None,
    spec: o.Spec = None,
    draft: o.Draft = None,
    exact: o.Exact = False,
    force: o.Force = False,
    allow_pickle: o.Pickle = False,
    dry_run: o.DryRun = False,
) -> int:
    """Chat with a model, or ask one question with -p or through a pipe.

    The answer goes to stdout, everything else to stderr. "KV" in the figures
    is the KV cache: keys and values of all tokens, computed only once.
    """
    from kvcli.commands.common.inputs import STDIN, files_of, read_question
    from kvcli.commands.common.run_setup import Setup
    from kvcli.commands.models.suggest_model import find_model, tell_toy

    world: Environment = context.obj
    if stream and not world.options.json:
        raise UsageError("--stream needs --json", try_=["--json --stream"])
    others = [file, system, system_file, continue_, resume, dry_run]
    packed = pack_of(world, pack, others, ALONE) if pack is not None else None
    file = files_of(world, file or [])
    with open_saved_chat(world, continue_, resume, no_save) as opened:
        named = model
        if named is None and packed is not None:
            named = packed_model(world, packed)
        if named is None and opened is not None:
            from kvcli.commands.chat.save_chat import model_of

            named = model_of(world, opened)
        setup = Setup(world, named, o.profile_flags(context.params), exact, is_typed=model is not None)
        saves = not no_save and setup.keeps_chats
        find_model(setup, file)
        rules = read_grammar(world, schema, grammar, json_object)
        profile = profile_of(setup, packed)
        if dry_run:
            from kvcli.commands.chat.dry_run import print_plan

            return print_plan(setup, profile, file)
        setup.look(profile)
        question = read_question(world, prompt, file, system, system_file)
        if packed is not None:
            question = about_pack(question, packed)
        find_model(setup, [d.name for d in question.documents if d.name == STDIN])
        if question.text is not None and not question.documents:
            tell_toy(setup)
        wanted = MemoryWishes(force, ctx == "max")
        return answer(setup, profile, question, stats, stream, wanted, opened, saves, rules, packed)


def about_pack(question: Question, packed: Pack) -> Question:
    """Return the question with the documents and the system text of the pack."""
    if question.documents:
        raise UsageError("--pack excludes documents from standard input", try_=["kvcli chat ... </dev/null"])
    return replace(question, documents=tuple(packed.documents), system=packed.chat.system)


@contextmanager
def open_saved_chat(world: Environment, latest: bool, name: str | None, no_save: bool) -> Iterator[SavedChat | None]:
    """Yield the saved chat to continue, if there is one. It is locked until the end, except with --no-save."""
    if latest and name is not None:
        raise UsageError("--continue and --resume exclude each other", try_=["only one of them"])
    if not latest and name is None:
        yield None
        return
    from kvcli.commands.chat.save_chat import reopen, saved_chats_of

    opened = reopen(saved_chats_of(world), world, name, is_locked=not no_save)
    with closing(opened):
        yield opened


def answer(
    setup: Setup,
    profile: Profile,
    question: Question,
    stats: o.StatsMode | None,
    stream: bool,
    wanted: MemoryWishes,
    opened: SavedChat | None = None,
    saves: bool = False,
    rules: Grammar | None = None,
    packed: Pack | None = None,
) -> int:
    """Load the model and answer one question, or start the interactive chat."""
    from kvcli.commands.chat.save_chat import about, save_kv_cache, saved_chats_of, try_save
    from kvcli.commands.common.load_model import load_model
    from kvcli.render.terminal.screen import Screen

    world = setup.world
    screen = Screen.of(world, stats or ("live" if world.is_tty("stderr") else "turn"))
    setup.reuses = setup.keeps_chats  # --no-save saves nothing, but uses the prefix cache
    run, text_session = load_model(setup, profile, wanted, screen)
    from kvcli.chat.model import Chat

    talk = Chat(text_session, saved_chats=saved_chats_of(world), is_locked=True, called=setup.lasting_name)
    with ExitStack() as ends:
        ends.callback(lambda: talk.text_session.close())  # /model may have changed the session
        ends.callback(talk.close)
        if packed is not None:
            packed.refuse_other(text_session.session, text_session.profile)
            text_session.pack = packed
        begin(world, talk, question, opened, saves)
        again = text_session.why_again() if opened else ()
        for note in (*run.notes, *text_session.cautions, *text_session.info.notes, *again):
            tell(world, note)
        answer_constraint = constrain(text_session.model, rules, screen) if rules is not None else None
        if question.text is None:
            del text_session  # so that only the chat refers to the weights
            return converse(setup, run, talk, screen, saves, answer_constraint, rules)
        if opened is not None:
            tell(world, f"continues {about(talk)}")
        try:
            return ask_once(world, run, talk, question.text, screen, stream, answer_constraint)
        finally:
            note = try_save(talk) if saves else ""
            if not note and talk.saved_chat is not None and world.options.verbose:
                note = f"saved as {talk.saved_chat.name}"
            screen.note(note)
            screen.note(save_kv_cache(talk.text_session) if saves else "")


def begin(world: Environment, talk: Chat, question: Question, opened: SavedChat | None, saves: bool) -> None:
    """Prepare the chat: a saved chat, options that override its settings, and documents that are new to it."""

    if opened is not None:
        talk.take(opened)
        if not saves:
            talk.close()
    if question.system is not None:
        talk.system = question.system

    for document in question.documents:
        if talk.place(document) is None:
            talk.attach(document)
        else:
            tell(world, f"{document.name} is attached already")


def ask_once(
    world: Environment,
    run: CheckedRun,
    talk: Chat,
    text: str,
    screen: Screen,
    stream: bool,
    answer_constraint: AnswerConstraint | None = None,
) -> int:
    """Answer one question. Ctrl-C ends the answer after the current pass; the text so far is kept."""
    from kvcli.commands.common.exits import Interrupt

    profile, constraint = run.profile, answer_constraint.constraint if answer_constraint is not None else None
    with Interrupt(world.clock) as cancel, closing(talk.stream(text, cancel=cancel, constraint=constraint)) as events:
        if world.options.json:
            from kvcli.commands.common.turn_json import Run, print_events, print_turn

            under = Run(
                profile.name,
                profile.spec.method,
                profile.hash,
                talk.text_session.promise,
                cautions=talk.text_session.cautions,
                notes=talk.notes,
            )
            turn = (print_events if stream else print_turn)(world, events, talk.text_session.info, under)
        else:
            from kvcli.render.turn.status_row import RowOptions
            from kvcli.render.turn.turn_view import show_turn

            for note in talk.notes:
                screen.note(note)
            talk.tell = screen.note
            turn = show_turn(events, screen, RowOptions(profile.name, stopping=cancel))
    missed = answer_constraint.missed(turn) if answer_constraint is not None else ""
    for note in filter(None, (turn.stats.approx, missed, run.record(profile, turn))):
        tell(world, note)
    usual = ExitStatus.BAD_OUTPUT if missed else ExitStatus.OK
    return {"interrupted": ExitStatus.INTERRUPTED, "loop": ExitStatus.BAD_OUTPUT}.get(turn.finish, usual)


def converse(
    setup: Setup,
    run: CheckedRun,
    talk: Chat,
    screen: Screen,
    saves: bool,
    answer_constraint: AnswerConstraint | None = None,
    rules: Grammar | None = None,
) -> int:
    """Run the interactive chat."""
    from kvcli.commands.chat.repl import run_repl
    from kvcli.commands.chat.save_chat import about
    from kvcli.commands.chat.slash import SLASH
    from kvcli.commands.common.load_model import load_model
    from kvcli.commands.models.suggest_model import find_model
    from kvcli.models.machine import threads
    from kvcli.render.summarize.notes import size
    from kvcli.render.turn.turn_summary import HeaderFacts, header
    from kvcli.version import __version__

    world, profile = setup.world, run.profile

    def after_turn(turn: Turn | None) -> None:
        if turn is not None:
            screen.note(answer_constraint.missed(turn) if answer_constraint is not None else "")
            screen.note(run.record(talk.text_session.profile, turn))

    def change(repl: Repl, name: str) -> None:
        nonlocal setup, run, answer_constraint
        wanted = replace(setup, model=name, is_typed=True, found=None, most=0, settled={})
        find_model(wanted, [document.name for document in talk.documents], may_ask=False)
        under = wanted.resolve(repl.profile_name, [*repl.given, *repl.said])
        try:
            run, text_session = load_model(wanted, under, MemoryWishes(), screen)
        except DoesNotFit as error:
            error.try_ = (f"/exit, then kvcli chat {talk.goes_on if talk.is_saved else ''} -m {name}", *error.try_)
            raise
        answer_constraint = constrain(text_session.model, rules, screen) if rules is not None else None
        repl.profiles = setup = wanted
        repl.constraint = answer_constraint.constraint if answer_constraint is not None else None
        talk.go_to(text_session, setup.lasting_name)
        for note in (*run.notes, *text_session.cautions, *text_session.info.notes):
            screen.note(note)

    text_session = talk.text_session
    if not screen.quiet:
        opening = HeaderFacts(
            __version__,
            profile.name,
            text_session.promise,
            context=text_session.limit,
            estimate=run.estimate,
            threads=threads(),
            draft=text_session.drafts_by,
        )
        lines = header(text_session.info, opening, screen.err.width)
        lines += [f"answers are constrained to {answer_constraint.name}"] if answer_constraint is not None else []
        lines += [f"continues {about(talk)}"] if talk.messages else []
        lines += [f"attached {d.name} · {size(d)}" for d in talk.documents]
        for line in lines:
            screen.err.line((line, ""))
    del text_session
    return run_repl(
        talk,
        screen,
        world,
        SLASH,
        saves=saves,
        profiles=setup,
        profile=profile.name,
        sets=world.options.set,
        history=world.paths.state / "history" if saves else None,
        after_turn=after_turn,
        constraint=answer_constraint.constraint if answer_constraint is not None else None,
        change_model=change,
        before_file=lambda name: find_model(setup, [name], may_ask=False),
    )
