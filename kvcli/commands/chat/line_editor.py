"""The line a user types in the chat: editing, history, completion, and texts of several lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Protocol, cast

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth, create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style

from kvcli.commands.chat.slash import COMMANDS
from kvcli.environment import Environment
from kvcli.files import append, private_folder
from kvcli.safe_output import SafeStream, neutralise

PROMPT, MORE = "> ", ". "
BLOCK = '"""'
STYLE = Style.from_dict({"prompt": "bold ansicyan", "more": "ansibrightblack"})
Words = Callable[[], Sequence[str]]


class LineReader(Protocol):
    """Where questions come from. Raises EOFError at the end and KeyboardInterrupt for Ctrl-C."""

    def read(self, default: str = "") -> str: ...


def reader(world: Environment, words: dict[str, Words], history: Path | None) -> LineReader:
    """An editor on a terminal that can move its cursor, plain lines on one that cannot."""
    if world.environ.get("TERM") == "dumb":
        return Plain(world)
    return Editor(world, words, history)


def unblocked(text: str) -> str:
    '''The text without the `"""` around it.'''
    text = text.strip()
    if text.startswith(BLOCK):
        text = text.removeprefix(BLOCK).removesuffix(BLOCK).strip("\n")
    return text


def is_open(text: str) -> bool:
    '''Whether a `"""` block was begun and not ended.'''
    text = text.strip()
    return text.startswith(BLOCK) and not (len(text) >= 2 * len(BLOCK) and text.endswith(BLOCK))


class Plain:
    """Lines as they come, for TERM=dumb."""

    def __init__(self, world: Environment) -> None:
        self.world = world

    def read(self, default: str = "") -> str:
        text = self._line(PROMPT)
        while is_open(text):
            text += "\n" + self._line(MORE)
        return unblocked(text)

    def _line(self, prompt: str) -> str:
        self.world.stderr.write(prompt)
        self.world.stderr.flush()
        line = self.world.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")


class Editor:
    """prompt_toolkit's line editor with our keys."""

    def __init__(self, world: Environment, words: dict[str, Words], history: Path | None) -> None:
        screen = world.stdout if world.is_tty("stdout") else world.stderr
        # an editor moves the cursor as it likes: it gets the bare stream, and its texts are made harmless one by one
        output = create_output(cast("SafeStream", screen).stream)
        output.write = _harmless(output.write)  # type: ignore[assignment, method-assign]
        if isinstance(output, Vt100_Output):
            # asking the terminal where its cursor is only serves menus, and the reply may land in what is typed
            output.enable_cpr = False
        self.session: PromptSession[str] = PromptSession(
            history=open_history(history),
            completer=SlashCompleter(words, world.cwd),
            complete_while_typing=False,
            # a menu would keep empty lines below the prompt for itself
            complete_style=CompleteStyle.READLINE_LIKE,
            key_bindings=_keys(),
            multiline=True,
            enable_suspend=True,
            prompt_continuation=[("class:more", MORE)],
            style=STYLE,
            color_depth=None if world.has_color("stdout") else ColorDepth.DEPTH_1_BIT,
            input=create_input(world.stdin),
            output=output,
        )

    def read(self, default: str = "") -> str:
        return unblocked(self.session.prompt([("class:prompt", PROMPT)], default=default))


def _harmless(write: Callable[[str], None]) -> Callable[[str], None]:
    """For names that a folder offers as completions: those of others, with what they like in them."""
    return lambda text: write("\r\n".join(map(neutralise, text.split("\r\n"))))


def _keys() -> KeyBindings:
    """Enter sends unless a block is open; Alt-Enter begins a line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer: Buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def open_history(path: Path | None) -> History:
    """The history file, readable by its owner only; kept in memory where there is none or it cannot be written."""
    if path is None:
        return InMemoryHistory()
    try:
        private_folder(path.parent)
        append(path, "")
        path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return KeptHistory(str(path))


class KeptHistory(FileHistory):
    """The file of prompt_toolkit's form, written through our door. A line that cannot be kept is remembered for now."""

    def store_string(self, string: str) -> None:
        lines = "".join(f"+{line}\n" for line in string.split("\n"))
        with suppress(OSError):
            append(Path(str(self.filename)), f"\n# {datetime.now()}\n{lines}")


class SlashCompleter(Completer):
    """Slash commands, and what their arguments can be. `words` gives the choices by kind."""

    def __init__(self, words: dict[str, Words], folder: Path) -> None:
        self.words = words
        self.paths = PathCompleter(expanduser=True, get_paths=lambda: [str(folder)])

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or text.startswith("//") or "\n" in text:
            return
        name, space, argument = text[1:].partition(" ")
        if not space:
            # a space goes in as well where an argument follows
            names = sorted(n + " " * bool(c.usage) for c in COMMANDS.values() for n in (c.name, *c.also))
            yield from _matching(name, names)
            return
        kind = next((c.completes for c in COMMANDS.values() if name in (c.name, *c.also)), "")
        if kind == "path":
            yield from self.paths.get_completions(Document(argument.lstrip()), complete_event)
        elif kind and " " not in argument:
            yield from _matching(argument, self.words.get(kind, tuple)())


def _matching(begun: str, words: Iterable[str]) -> Iterable[Completion]:
    return (
        Completion(word, start_position=-len(begun), display=word.rstrip()) for word in words if word.startswith(begun)
    )
