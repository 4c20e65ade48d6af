"""The interactive chat: a prompt, streamed answers, and slash commands, until the user leaves."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event as Flag
from typing import TYPE_CHECKING

from kvcli.api import Cancel, Event, Turn
from kvcli.chat.conversation import Chat
from kvcli.commands.chat import line_editor
from kvcli.commands.chat.save_chat import save_kv_cache, try_save
from kvcli.commands.chat.slash_table import SlashTable
from kvcli.commands.common.document_files import find_files, read_files
from kvcli.commands.common.exits import Interrupt, machine_gave_out
from kvcli.commands.common.inputs import well_formed
from kvcli.documents import Document
from kvcli.documents.decode import decode
from kvcli.environment import Environment
from kvcli.errors import BadInput, ExitStatus, KvcliError
from kvcli.render.terminal.errors import print_error, print_warning
from kvcli.render.terminal.screen import Screen, echo
from kvcli.render.terminal.terminal import folded, text_width
from kvcli.render.turn.status_row import ProcessMemory, RowOptions
from kvcli.render.turn.turn_view import show_turn

if TYPE_CHECKING:
    from kvcli.commands.chat.tools import ChatTools
    from kvcli.commands.common.load_model import CheckedRun
    from kvcli.engine.sequence.constraint import Constraint

LEAVE_WITHIN = 2.0  # seconds between two Ctrl-C at the prompt that end the chat
HINT = "Ctrl-D or /exit to leave"


class Repl:
    """An interactive chat on a terminal."""

    def __init__(
        self,
        chat: Chat,
        screen: Screen,
        world: Environment,
        commands: SlashTable,
        *,
        profiles: CheckedRun,
        profile: str = "",
        sets: Sequence[str] = (),
        after_turn: Callable[[Turn | None], None] | None = None,
        memory: Callable[[], ProcessMemory | None] | None = None,
        read: Callable[[str], list[Document]] | None = None,
        change_model: Callable[[Repl, str], None] | None = None,
        history: Path | None = None,
        saves: bool = False,
        constraint: Constraint | None = None,
        tools: ChatTools | None = None,
    ) -> None:
        """`read` returns the documents of a name (default: as files are read); `change_model` changes the model of the
        chat; `after_turn` receives the last turn. `saves`: save the chat before each prompt. `memory` is shown in the
        live row (default: the process's RSS). `constraint` restricts every answer. `tools` run the calls of an answer.
        """
        self.saves, self.constraint, self.tools = saves, constraint, tools
        self.chat, self.screen, self.world, self.commands = chat, screen, world, commands
        self.profiles, self.profile_name = profiles, profile
        self.given, self.said = list(sets), list[str]()  # KEY=VALUE of the command line, and of /set
        self.memory, self.change_model = memory, change_model
        self.after_turn = after_turn
        self.read = read or (lambda name: read_files(world, find_files(world, [name])))
        self.reader = line_editor.reader(world, commands, self._words(), history)
        self.last: Turn | None = None
        self.is_over = False
        self.draft = ""  # a question stopped before its answer began, shown again at the prompt
        self._told: set[str] = set()  # notes already shown
        self._left_at: float | None = None  # time of the last Ctrl-C at the prompt

    # --- the loop

    def run(self) -> ExitStatus:
        """Run the chat until the user leaves."""
        while not self.is_over:
            self.say("")
            line = self._read()
            if line.strip():
                with echo(self.screen.stdin, on=False):
                    self.handle(line)
                    self.save()
        if self.saves and self.chat.is_saved and not self.screen.quiet:
            self.screen.err.line((f"saved; to continue: kvcli chat {self.chat.goes_on}", "dim"))
        return ExitStatus.OK

    def _read(self) -> str:
        default, self.draft = self.draft, ""
        try:
            with in_background(self.chat.text_session.idle, self._report):
                line = self.reader.read(default)
        except EOFError:
            self.is_over = True
            return ""
        except KeyboardInterrupt:
            now = self.world.clock()
            if self._left_at is not None and now - self._left_at < LEAVE_WITHIN:
                self.is_over = True
            else:
                self._left_at = now
                self.screen.err.line((HINT, "dim"))
            return ""
        self._left_at = None
        return line

    def save(self) -> None:
        """Save changes since the last save, if this chat is to be saved."""
        for note in (try_save(self.chat), save_kv_cache(self.chat.text_session)) if self.saves else ():
            if note:
                self.warn(note)

    def handle(self, line: str) -> None:
        """Ask a question or run a slash command. No error in it ends the chat."""
        try:
            well_formed(line, "what was typed")
            if line.startswith("//"):
                self.ask(line[1:])
            elif line.startswith("/"):
                name, _, argument = line[1:].strip().partition(" ")
                self.commands.find(name).run(self, argument.strip())
            else:
                self.ask(line)
        except KvcliError as error:
            print_error(self.screen.err, self.commands.reworded(error))
        except KeyboardInterrupt:
            self.say("stopped")
        except Exception as error:  # a bug of kvcli must not end the chat
            self._report(error)

    def _report(self, error: Exception) -> None:
        lines = ["the chat did not change"]
        if self.world.options.verbose > 1:
            lines += "".join(traceback.format_exception(error)).rstrip().split("\n")
        words = str(error).split("\n")[0]
        known = machine_gave_out(error) or KvcliError(f"{type(error).__name__}: {words}")
        known.lines += tuple(lines)
        print_error(self.screen.err, known)

    # --- turns

    def ask(self, text: str) -> None:
        """Ask a question. If it is stopped before the answer begins, the prompt shows it again."""
        n = len(self.chat.messages)
        self.turn(lambda **options: self.chat.stream(text, **options))
        if self.last is not None and self.last.finish == "interrupted" and len(self.chat.messages) == n:
            self.draft = text

    def turn(self, start: Callable[..., Iterator[Event]]) -> None:
        """Show the events that `start(cancel=..., constraint=...)` yields, stopping at Ctrl-C."""
        done: Turn | None = None
        with Interrupt(self.world.clock) as cancel:
            look = RowOptions(self.profile_name, self.memory, cancel)
            try:
                done = self.last = show_turn(start(cancel=cancel, constraint=self.constraint), self.screen, look)
                if self.tools is not None:

                    def again(results: list[str]) -> Turn:
                        return show_turn(self.chat.stream_results(results, cancel=cancel), self.screen, look)

                    done = self.last = self.tools.follow(done, again, cancel)
            except KeyboardInterrupt:
                self.say("stopped immediately; the chat is read again with the next question")
        for note in [*self.chat.notes, *([done.stats.approx] if done and done.stats.approx else [])]:
            if note not in self._told:
                self.screen.note(note)
                self._told.add(note)
        if self.after_turn is not None:
            self.after_turn(done)  # None: not finished, and the turn before is already noted

    def last_turn(self, what: str) -> Turn:
        """Return the last finished turn. Raises an error that names the purpose `what` if there is none."""
        if self.last is None:
            raise BadInput(f"no {what} yet: no question was asked", code="no_question")
        return self.last

    # --- settings

    @property
    def limit(self) -> int:
        """Tokens of the context window in use."""
        return self.chat.text_session.limit

    @property
    def settings(self) -> str:
        """The profile and the last setting of each key on top."""
        last = {item.partition("=")[0]: item for item in (*self.given, *self.said)}
        return " with ".join(filter(None, [self.profile_name, ", ".join(last.values())]))

    def reconfigure(self, name: str, said: Sequence[str]) -> None:
        """Continue under another profile with the same weights. If it is refused, nothing has changed."""
        before = self.chat.text_session
        changed = before.with_profile(self.profiles.resolve(name, [*self.given, *said]))
        is_kept = changed.take_cache(before)
        if before.pack is not None and not before.pack.differs(changed.session, changed.profile):
            changed.pack = before.pack
        self.chat.text_session = changed
        before.close()  # its remaining KV cannot be used under the other profile
        self.profile_name, self.said = name, list(said)
        again = "; the chat is read again with it" if self.chat.messages and not is_kept else ""
        self.say(f"{self.settings} from the next question on{again}")
        for note in changed.cautions:
            self.screen.note(note)

    # --- showing

    def say(self, text: str) -> None:
        """Print a line on stderr, wrapped at the terminal width."""
        self.screen.err.lines(folded(text, self.screen.err.width))

    def warn(self, text: str) -> None:
        print_warning(self.screen.err, text)

    def listing(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print names at the left with sentences beside them, or below them on a narrow terminal."""
        err = self.screen.err
        left = max(text_width(name) for name, _ in rows) + 2
        beside = err.width - left - 1 >= 36
        for name, text in rows:
            indent = left if beside else 4
            first, *more = folded(text, err.width, indent)
            if beside:
                err.line((name + " " * (left - text_width(name)), "cyan"), (first, ""))
            else:
                err.line((name, "cyan"))
                more.insert(0, first)
            for part in more:
                err.line((" " * indent + part, ""))

    # --- the user's editor

    def edit_text(self, text: str) -> str:
        """Return the text after editing in the user's $EDITOR."""
        environ = self.world.environ
        command = shlex.split(environ.get("VISUAL") or environ.get("EDITOR") or "vi")
        with tempfile.TemporaryDirectory(prefix="kvcli-") as folder:  # 0700
            file = Path(folder) / "question.md"
            file.write_text(text, encoding="utf-8")
            try:
                with echo(self.screen.stdin, on=True):
                    done = subprocess.run([*command, str(file)], check=False, env=dict(environ))
            except OSError as error:
                raise BadInput(
                    f"cannot start the editor {command[0]}: {error.strerror or error}",
                    code="no_editor",
                    try_=["export EDITOR=nano"],
                ) from None
            if done.returncode:
                raise BadInput(f"the editor {command[0]} ended with status {done.returncode}", code="editor_failed")
            return decode(file.read_bytes(), "the edited question")

    def _words(self) -> dict[str, line_editor.Words]:
        return {
            "profile": lambda: self.profiles.names(),
            "model": lambda: self.profiles.models(),
            "key": lambda: self.profiles.keys(),
            "think": lambda: (*self.chat.text_session.thinking_format().modes, "auto", "show", "hide"),
            "stats": lambda: ("live", "turn", "off", "last"),
            "chat": lambda: [entry.id for entry in self.chat.saved_chats.entries()],
            "command": lambda: tuple(self.commands),
            "document": lambda: [str(i + 1) for i in range(len(self.chat.documents))],
        }


@contextmanager
def in_background(work: Callable[[Cancel], object], tell: Callable[[Exception], object]) -> Iterator[None]:
    """Run `work` in a thread until the block ends; then `cancel()` is True. Its error goes to `tell` afterwards."""
    is_over = Flag()
    with ThreadPoolExecutor(1, "kvcli-idle") as pool:
        done = pool.submit(work, is_over.is_set)
        try:
            yield
        finally:
            is_over.set()
    if isinstance(error := done.exception(), Exception):
        tell(error)
