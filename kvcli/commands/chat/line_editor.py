"""Line editor of the chat: editing, history, completion, and texts of several lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import cast

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

from kvcli.commands.chat.slash_table import SlashTable
from kvcli.environment import Environment
from kvcli.files import append, private_folder
from kvcli.safe_output import SafeStream, neutralise

PROMPT, MORE = "> ", ". "
BLOCK = '"""'
STYLE = Style.from_dict({"prompt": "bold ansicyan", "more": "ansibrightblack"})
Words = Callable[[], Sequence[str]]


def reader(world: Environment, commands: SlashTable, words: dict[str, Words], history: Path | None) -> Editor | Plain:
    """Return an editor on a terminal that can move its cursor, else a reader of plain lines.

    Their `read` raises EOFError at the end and KeyboardInterrupt for Ctrl-C.
    """
    if world.environ.get("TERM") == "dumb":
        return Plain(world)
    return Editor(world, commands, words, history)


def unblocked(text: str) -> str:
    '''Return the text without the `"""` around it.'''
    text = text.strip()
    if text.startswith(BLOCK):
        text = text.removeprefix(BLOCK).removesuffix(BLOCK).strip("\n")
    return text


def is_open(text: str) -> bool:
    '''True if a `"""` block was begun and not ended.'''
    text = text.strip()
    return text.startswith(BLOCK) and not (len(text) >= 2 * len(BLOCK) and text.endswith(BLOCK))


class Plain:
    """Reader of plain lines, for TERM=dumb."""

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
    """The line editor of prompt_toolkit, with key bindings of kvcli."""

    def __init__(self, world: Environment, commands: SlashTable, words: dict[str, Words], history: Path | None) -> None:
        screen = world.stdout if world.is_tty("stdout") else world.stderr
        # the editor needs the raw stream to move the cursor, so its texts are escaped one by one
        output = create_output(cast("SafeStream", screen).stream)
        output.write = _harmless(output.write)  # type: ignore[assignment, method-assign]
        if isinstance(output, Vt100_Output):
            # the cursor position is needed for menus only, and the terminal's reply may mix with typed text
            output.enable_cpr = False
        self.session: PromptSession[str] = PromptSession(
            history=open_history(history),
            completer=SlashCompleter(commands, words, world.cwd),
            complete_while_typing=False,
            # a menu would reserve empty lines below the prompt
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
    """Escape control characters in texts, because completions contain file names of other people.

    The editor moves the cursor with whole texts of line ends, and from the last column with a carriage return.
    """
    return lambda text: write(text if text == "\r" else "\r\n".join(map(neutralise, text.split("\r\n"))))


def _keys() -> KeyBindings:
    """Return key bindings: Enter sends unless a block is open; Alt-Enter begins a new line."""
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
    """Open the history file, readable by its owner only; without a writable file, use memory."""
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
    """A history file in the format of prompt_toolkit, readable by its owner only. Unwritable lines stay in memory."""

    def store_string(self, string: str) -> None:
        lines = "".join(f"+{line}\n" for line in string.split("\n"))
        with suppress(OSError):
            append(Path(str(self.filename)), f"\n# {datetime.now()}\n{lines}")


class SlashCompleter(Completer):
    """Completer of slash commands and their arguments. `words` gives the choices by kind of argument."""

    def __init__(self, commands: SlashTable, words: dict[str, Words], folder: Path) -> None:
        self.commands, self.words = commands, words
        self.paths = PathCompleter(expanduser=True, get_paths=lambda: [str(folder)])

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or text.startswith("//") or "\n" in text:
            return
        name, space, argument = text[1:].partition(" ")
        if not space:
            # insert a space too if an argument follows
            names = sorted(n + " " * bool(c.usage) for c in self.commands.values() for n in (c.name, *c.also))
            yield from _matching(name, names)
            return
        kind = next((c.completes for c in self.commands.values() if name in (c.name, *c.also)), "")
        if kind == "path":
            yield from self.paths.get_completions(Document(argument.lstrip()), complete_event)
        elif kind and " " not in argument:
            yield from _matching(argument, self.words.get(kind, tuple)())


def _matching(begun: str, words: Iterable[str]) -> Iterable[Completion]:
    return (
        Completion(word, start_position=-len(begun), display=word.rstrip()) for word in words if word.startswith(begun)
    )
