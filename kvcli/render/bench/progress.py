"""Progress bar of a benchmark. It is drawn between two runs and never during one, so that it costs them no time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvcli.render.terminal.screen import LiveRegion, Screen
from kvcli.render.terminal.tables import clip
from kvcli.render.terminal.terminal import Span, text_width
from kvcli.render.turn.status_row import NARROWEST

BAR = 24  # columns


class Bar:
    """Progress bar `━━━━━━╺━━━━━  25 %  ngram · summary 2,048` on stderr; hidden if stderr is no terminal."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.region = LiveRegion(screen.err) if screen.err.live and not screen.quiet else None

    def show(self, done: int, total: int, words: str) -> None:
        """Show the progress of the work; a total of 0 means that its length is unknown."""
        if self.region is None:
            return
        width = self.screen.err.width
        spans = row(done, total, words, width)
        self.region.draw([], [self.screen.err.paint(spans)] if spans else [])


def row(done: int, total: int, words: str, width: int) -> list[Span]:
    """Return the bar at this width, with as many of the words as fit."""
    if width < NARROWEST:
        return []
    if not total:
        return [(clip(f" {words} …", width - 2), "dim")]
    size = min(BAR, width // 3)
    full = size * done // total
    end = f"  {100 * done // total:>3} %  "
    rest = clip(words, width - 2 - size - text_width(end))
    return [("━" * full, "cyan"), ("━" * (size - full), "dim"), (end, ""), (rest, "dim")]


@contextmanager
def progress(screen: Screen) -> Iterator[Bar]:
    """Show a bar that is removed when the block is left, also by an exception."""
    bar = Bar(screen)
    try:
        yield bar
    finally:
        if bar.region is not None:
            bar.region.end()
