"""Live output during a turn: the row of figures, the prefill bar, the loading message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import psutil

from kvcli.api import Read
from kvcli.engine.stats import FEW, Stats
from kvcli.render.terminal import terminal as f
from kvcli.render.terminal.terminal import Span, text_width

HERTZ = 8  # redraws a second
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
NARROWEST = 40  # columns; no live output below this
CTX_HIGH, MEMORY_HIGH = 0.85, 0.90
BAR = 28  # columns of the prefill bar on a terminal of 80


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of the process."""

    kind: str  # RAM | GPU
    used: int  # bytes
    limit: int = 0  # bytes, 0 = unknown


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Fields of the status row besides the figures of the turn."""

    profile: str = ""
    memory: Callable[[], ProcessMemory | None] | None = None  # called from the timer thread; None: the process's RSS
    stopping: Callable[[], bool] | None = None  # True once Ctrl-C was pressed


@lru_cache(maxsize=1)
def _process() -> tuple[psutil.Process, int]:
    return psutil.Process(), psutil.virtual_memory().total


def process_memory() -> ProcessMemory:
    """Return the RSS of this process."""
    process, total = _process()
    return ProcessMemory("RAM", process.memory_info().rss, total)


def status_row(stats: Stats, look: RowOptions, memory: ProcessMemory | None, width: int) -> list[Span]:
    """Return the row at `width` columns, or [] below NARROWEST. Fields are dropped in the order of the loop."""
    if width < NARROWEST:
        return []
    fields = _fields(stats, look, memory)
    for dropped in ("", "profile", "ctx", "memory", "kv", "tokens", "approx"):
        fields.pop(dropped, None)
        spans = _joined(fields)
        # two columns stay free: one so that no row ends in the last column, one as a margin
        if text_width("".join(text for text, _ in spans)) <= width - 2:
            return spans
    return spans


def _fields(stats: Stats, look: RowOptions, memory: ProcessMemory | None) -> dict[str, list[Span]]:
    """Return the fields from left to right, each as spans."""
    fields: dict[str, list[Span]] = {}
    if look.stopping is not None and look.stopping():
        fields["stopping"] = [("stopping", "yellow")]
    if look.profile:
        fields["profile"] = [(look.profile, "cyan")]
    if stats.approx:
        fields["approx"] = [("approx", "yellow")]
    fields["tokens"] = [(f"{f.count(stats.new)}", ""), (" tok", "dim")]
    speed = f.rate(stats.decode_tok_s).removesuffix(" tok/s") if stats.new >= FEW else "–"
    fields["speed"] = [(speed, ""), (" tok/s", "dim")]
    if stats.drafted_passes:
        fields["drafting"] = [_per_pass(stats), (" tok/pass", "dim")]
    if stats.kv_bytes:
        fields["kv"] = [("KV ", "dim"), (f.tiers(stats.kv), ""), *_factor(stats)]
    if stats.limit:
        fields["ctx"] = [("context ", "dim"), _context(stats)]
    if memory is not None:
        style = "yellow" if memory.limit and memory.used > MEMORY_HIGH * memory.limit else ""
        fields["memory"] = [(f"{memory.kind} ", "dim"), (f.long_size(memory.used), style)]
    return fields


def _joined(fields: dict[str, list[Span]]) -> list[Span]:
    spans: list[Span] = [(" ", "")]
    for field in fields.values():
        spans += [("" if len(spans) == 1 else "  ", ""), *field]
    return spans


def _per_pass(stats: Stats) -> Span:
    """Return tokens per pass, which limits the speedup; yellow if plain decoding is faster."""
    gain = stats.vs_plain
    return f"{stats.tokens_per_pass:.2f}", "yellow" if gain is not None and gain < 1 else ""


def _factor(stats: Stats) -> list[Span]:
    """Return the ratio of the 16-bit size of the same slots to their size."""
    factor = stats.kv_fp16 / stats.kv_bytes
    return [(f" ({factor:.1f}× smaller)", "")] if factor >= 1.05 else []


def _context(stats: Stats) -> Span:
    share = stats.context / stats.limit
    return f.percent(share), "red" if share >= 1 else "yellow" if share > CTX_HIGH else ""


def reading_bar(read: Read, width: int, since: float = 0.0) -> list[Span]:
    """Return `⠹ reading 1,480 of 1,912 tokens ━━━━━╺━━  77 %  1,760 tok/s  0:00`, or as much of it as fits.

    The spinner depends on `since`, the seconds so far, because the bar does not move during a long chunk.
    """
    share = read.done / read.total if read.total else 1.0
    speed = (read.done - read.cached) / read.seconds if read.seconds > 0 else 0.0
    word: list[Span] = [
        (spinner(since), "cyan"),
        (" reading ", "dim"),
        (f"{f.count(read.done)} of {f.count(read.total)}", ""),
    ]
    tokens: list[Span] = [(" tokens", "dim")]
    cached: list[Span] = [(f" ({f.count(read.cached)} cached)", "dim")] if read.cached else []
    end: list[Span] = [(f"  {100 * share:.0f} %", "")]
    pace: list[Span] = []
    if speed > 0 and read.done - read.cached >= FEW:
        pace = [(f"  {speed:,.0f} tok/s  {f.clock((read.total - read.done) / speed)}", "dim")]
    for spans in (word + tokens + cached + end + pace, word + cached + end + pace, word + end + pace, word + end):
        room = width - 3 - text_width("".join(text for text, _ in spans))
        if room >= 8:
            at = spans.index(end[0])
            return [*spans[:at], (" ", ""), *_bar(share, min(room, max(BAR, width // 3))), *spans[at:]]
    return [span for span in word + end if width >= NARROWEST]


def _bar(share: float, width: int) -> Sequence[Span]:
    """Draw a bar in half columns, as Rich does."""
    halves = round(share * 2 * width)
    full, half = divmod(halves, 2)
    done = "━" * full + ("╸" if half else "")
    rest = width - len(done)
    # a gap before the remaining part keeps the end visible without colour
    left = ("╺" if not half and full else "━") + "━" * (rest - 1) if rest > 0 else ""
    return [(done, "cyan"), (left, "dim")]


def fetching_bar(word: str, done: int, total: int, since: float, width: int) -> list[Span]:
    """Return `⠹ fetching smollm2-135m  34.1 MiB of 88.6 MiB ━━━━━╺━━  38 %`, or as much of it as fits."""
    share = min(1.0, done / total) if total else 1.0
    start: list[Span] = [(spinner(since), "cyan"), (f" {word} ", "dim")]
    sizes: list[Span] = [(f" {f.long_size(done)} of {f.long_size(total)} ", "")]
    end: list[Span] = [(f"  {100 * share:.0f} %", "")]
    for spans in (start + sizes, start, start[:1]):
        room = width - 2 - text_width("".join(text for text, _ in spans + end))
        if room >= 8:
            return [*spans, *_bar(share, min(room, max(BAR, width // 3))), *end]
    return end


def busy(word: str, since: float, width: int) -> list[Span]:
    """Return `⠹ loading demo  1.2 s`, for work of unknown length."""
    time = f"  {since:.1f} s" if since >= 1 else ""
    spans: list[Span] = [(spinner(since), "cyan"), (f" {word}", ""), (time, "dim")]
    return spans if text_width("".join(text for text, _ in spans)) < width else []


def spinner(since: float) -> str:
    """Return the current glyph, a new one for each redraw."""
    return SPINNER[int(since * HERTZ) % len(SPINNER)]
