"""Show a turn while it runs: the answer, a bar during prefill, and the row of figures below the answer."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from kvcli.api import End, Event, Live, Read, Text, Thought, ToolCall, Turn
from kvcli.engine.stats import Stats
from kvcli.render.terminal import terminal as f
from kvcli.render.terminal.screen import LiveRegion, Screen, echo, suspendable
from kvcli.render.terminal.terminal import Span, Wrapper, quoted, text_width
from kvcli.render.turn.answer_markdown import MarkdownWrapper
from kvcli.render.turn.status_row import HERTZ, RowOptions, busy, process_memory, reading_bar, spinner, status_row
from kvcli.render.turn.turn_summary import one_line_summary, summary
from kvcli.safe_output import Styled

PATIENCE = 0.3  # seconds of prefill before the bar is shown
CURSOR = "█"
STOPPED = " [stopped]"


def show_turn(events: Iterable[Event], screen: Screen, look: RowOptions | None = None) -> Turn:
    """Show the events as they arrive and return the finished turn, with its summary printed.

    If the stream raises, the text so far stays on the screen and the error is raised to the caller.
    """
    view = TurnView(screen, look or RowOptions())
    with view.running():
        try:
            for event in events:
                view.on(event)
        finally:
            # Ctrl-C may arrive outside the generator: closing the generator makes it keep the text so far
            close = getattr(events, "close", None)
            if close is not None:
                close()
    if view.turn is None:
        raise AssertionError("a stream ends with End")
    for words in [*view.turn.stats.shortages, *loop_notes(view.turn)]:
        screen.note(words)
    show_summary(view.turn, screen)
    return view.turn


def loop_notes(turn: Turn) -> list[str]:
    """Return advice for an answer that ended in a loop or in a thought."""
    if turn.loop is None:
        is_cut = turn.finish == "length" and turn.thinking and not turn.text.strip()
        return [f"all {len(turn.ids):,} tokens were used for thinking; a larger -n allows an answer"] * bool(is_cut)
    penalty = f"{turn.stats.sampling.get('frequency_penalty', 0.0) + 0.1:.2g}"
    more = f"--set sample.frequency_penalty={penalty} (in a chat /set frequency_penalty {penalty}) reduces repetition"
    return [f"stopped: {turn.loop}; {more}; or use another model; --set sample.stop_loops=0 turns this check off"]


def show_summary(turn: Turn, screen: Screen, *, always: bool = False) -> None:
    """Print a dim line on stderr, or all figures with -v, unless `--quiet`, `--stats off` or an empty turn."""
    if not always and (screen.quiet or screen.stats == "off" or not turn.stats.new):
        return
    screen.err.lines((summary if always or screen.verbose else one_line_summary)(turn, screen.err.width), "dim")


class TurnView:
    """View of one turn. The decoding thread calls `on`, which only stores; a timer thread calls `tick`, which draws."""

    def __init__(self, screen: Screen, look: RowOptions) -> None:
        self.screen = screen
        self.look = look
        self.turn: Turn | None = None
        self.stats: Stats | None = None
        self.read: Read | None = None
        self.said: deque[str] = deque()  # not drawn yet; a deque is safe for two threads
        self.has_said = False
        self.ended_line = True  # True if the answer's last character was a newline
        self.wrapper = MarkdownWrapper() if screen.markdown and screen.shared and screen.out.unicode else Wrapper()
        self.thought = Wrapper()
        self.is_thinking = False
        self.thought_before = 0, 0.0  # tokens and seconds of finished thoughts
        self.started = screen.clock()
        self.region = _region(screen)

    # --- events

    def on(self, event: Event) -> None:
        """Process one event."""
        if isinstance(event, Text):
            self._think("", whole=True)
            self._say(event.text)
        elif isinstance(event, Thought):
            self._think(event.text)
        elif isinstance(event, ToolCall):
            self._think(f"calls {event.name} {json.dumps(event.arguments, ensure_ascii=False)}\n", whole=True)
        elif isinstance(event, Live):
            self.stats = event.stats
        elif isinstance(event, Read):
            self.read = event
        elif isinstance(event, End):
            self.turn, self.stats = event.turn, event.turn.stats

    def _say(self, text: str) -> None:
        self.has_said = self.has_said or bool(text)
        self.ended_line = text.endswith("\n") if text else self.ended_line
        out = self.screen.out
        if self.region is not None and self.screen.shared:
            self.said.append(text)
        elif text:
            if self.screen.piped and self.region is not None:
                # `| tee` writes to the same terminal: rows would land on the answer
                self.region.end()
            out.write(text)

    def _think(self, text: str, *, whole: bool = False) -> None:
        """Print a thought in dim lines, on stderr or among the answer's: folded to a row at its end, or all of it."""
        self.is_thinking = self.is_thinking or bool(text)
        if not self.is_thinking:
            return
        if self.screen.shows_thinking:
            lines = self.thought.feed(text, self.screen.err.width - 1) if text else []
            lines += [rest] if whole and (rest := self.thought.rest()) else []
        else:
            lines = ["".join(word for word, _ in self._thinking("thought for"))] if whole else []
        if whole and self.stats is not None:
            self.is_thinking, self.thought_before = False, (self.stats.thinking, self.stats.thinking_seconds)
        if lines and not self.ended_line:
            self._say("\n")
        for line in lines if not self.screen.quiet else ():
            if self.region is not None and self.screen.shared:
                self.said.append(self.screen.err.paint([(line, "dim")]))
            else:
                self.screen.err.line((line, "dim"))

    def _thinking(self, word: str) -> list[Span]:
        """Return the time and the tokens of the running thought."""
        stats, (n, seconds) = self.stats or Stats(), self.thought_before
        took, tokens = f.seconds(stats.thinking_seconds - seconds), f.plural(stats.thinking - n, "token")
        return [(f"{word} ", "dim"), (took, ""), (f", {tokens}", "dim")]

    # --- drawing

    @contextmanager
    def running(self) -> Iterator[TurnView]:
        """Redraw from a timer thread inside the block; afterwards only the answer is left on the screen."""
        region, stdin = self.region, self.screen.stdin if self.region else None
        with echo(stdin, on=False), suspendable(region, stdin):
            try:
                with ticking(self.tick if region else None):
                    yield self
            finally:  # the timer has ended: a late tick would draw a permanent row
                self._finish()

    def tick(self) -> None:
        """Draw the text since the last tick."""
        if self.region is None:
            return
        width = self.region.terminal.width
        lines = self._take(width - 1)
        rows = list[Styled]()
        if self.screen.shared and self.has_said:
            *rows, tail = map(quoted, self.wrapper.rows(width - 1))
            cursor = self.screen.out.paint([(CURSOR, "")]) if text_width(tail) < width - 1 else ""
            rows.append(Styled(tail + cursor))
        rows += [self.region.terminal.paint(row) for row in self._rows(width)]
        self.region.draw(lines, rows)

    def _take(self, width: int) -> list[str]:
        lines = list[str]()
        while self.said:
            piece = self.said.popleft()
            styled = isinstance(piece, Styled)
            lines += [*self.wrapper.flush(width), piece] if styled else self.wrapper.feed(piece, width)
        return lines

    def _rows(self, width: int) -> list[list[Span]]:
        """Return the lines below the answer."""
        return [row for row in [self._below(width)] if row]

    def _below(self, width: int) -> list[Span]:
        """Return the prefill bar before the first token, and the row of figures after it."""
        waited = self.screen.clock() - self.started
        if self.screen.quiet:
            return []
        is_stopping = self.look.stopping is not None and self.look.stopping()
        if self.is_thinking and not self.screen.shows_thinking:
            row: list[Span] = [(spinner(waited), "cyan"), *self._thinking(" stopping" if is_stopping else " thinking")]
            return row if text_width("".join(word for word, _ in row)) < width else row[:1]
        if not self.has_said and not (self.stats and self.stats.new):
            if waited < PATIENCE:
                return []
            if is_stopping:
                return busy("stopping", waited, width)
            read = self.read or self._announced()
            return reading_bar(read, width, waited) if read.done < read.total else busy("reading", waited, width)
        if self.stats is None or self.screen.stats != "live":
            return []
        return status_row(self.stats, self.look, (self.look.memory or process_memory)(), width)

    def _announced(self) -> Read:
        """Return the progress before the first prefill chunk is done."""
        cached, prompt = (self.stats.cached, self.stats.prompt) if self.stats else (0, 0)
        return Read(cached, prompt, cached, 0.0)

    def _finish(self) -> None:
        """Remove the region and end the answer's line, with a mark if the answer was stopped."""
        self._think("", whole=True)
        stopped = self.has_said and (self.turn is None or self.turn.finish == "interrupted")
        out = self.screen.out
        mark = out.paint([(STOPPED, "dim")]) if stopped and out.is_tty else ""
        if self.region is not None and self.screen.shared:
            width = self.region.terminal.width
            lines = [*self._take(width - 1), *self.wrapper.flush(width - 1)]
            rest = self.wrapper.rest()
            if mark and text_width(rest) + len(STOPPED) >= width:
                lines, rest = [*lines, rest], ""
            self.region.close([*lines, Styled(quoted(rest) + mark)] if rest or mark else lines)
            return
        if self.region is not None:
            self.region.close()
        if mark or not self.ended_line:
            out.write(Styled(mark + "\n"))


def _region(screen: Screen) -> LiveRegion | None:
    """Return a region for answer and status row on one terminal, or for the row on stderr alone."""
    if screen.shared:
        return LiveRegion(screen.out, screen.err)
    if screen.err.live and not screen.quiet and not screen.out.is_tty:
        return LiveRegion(screen.err)
    return None


@contextmanager
def ticking(tick: Callable[[], None] | None) -> Iterator[None]:
    """Call `tick` HERTZ times a second from a thread, which has ended when the block is left."""
    if tick is None:
        yield
        return
    over = threading.Event()

    def loop(draw: Callable[[], None]) -> None:
        while not over.wait(1 / HERTZ):
            try:
                draw()
            except (OSError, ValueError):  # the terminal is closed; the main thread's last write reports it
                return

    thread = threading.Thread(target=loop, args=(tick,), name="kvcli-live", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Busy:
    """A row on the screen during a long operation."""

    def __init__(self, screen: Screen, look: Callable[[float, int], list[Span]]) -> None:
        """`look` draws the row, given the seconds so far and the columns of the terminal."""
        self.screen, self.look = screen, look
        self.region = LiveRegion(screen.err, screen.out) if screen.shared else LiveRegion(screen.err)
        self.started = screen.clock()

    def draw(self) -> None:
        row = self.screen.err.paint(self.look(self.screen.clock() - self.started, self.screen.err.width))
        self.region.draw([], [row] if row else [])

    def stop(self) -> None:
        """Remove the row early, before other output (for example a download) is written to the terminal."""
        self.region.end()


@contextmanager
def busy_word(
    screen: Screen, word: str, look: Callable[[float, int], list[Span]] | None = None
) -> Iterator[Busy | None]:
    """Show a message such as `loading demo` during a long operation, and remove it when the block is left.

    `look` draws a more detailed row, on terminals where rows can be redrawn.
    """
    if screen.quiet or not screen.err.live:
        if screen.err.is_tty and not screen.quiet:
            screen.err.line((f"{word} …", ""))
        yield None
        return
    shown = Busy(screen, look or partial(busy, word))
    shown.draw()
    with echo(screen.stdin, on=False), suspendable(shown.region, screen.stdin):
        try:
            with ticking(shown.draw):
                yield shown
        finally:
            shown.stop()
