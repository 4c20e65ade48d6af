"""Tables of the chat: drafting statistics, KV cache content, and use of the context window."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from itertools import zip_longest
from typing import Any

from kvcli.documents import listed
from kvcli.engine.stats import Stats
from kvcli.render.terminal import terminal as f
from kvcli.render.terminal.terminal import folded, text_width
from kvcli.render.turn.turn_summary import joined

LONGEST = 14  # columns of the longest bar
TALLEST = 12  # lines of the histogram
GAP = 2  # columns between two table columns
WIDEST = 10_000  # width of an unlimited table
SIDE_BY_SIDE = 76  # columns from which the two blocks of /spec are side by side


def spec_table(stats: Stats, width: int) -> list[str]:
    """Return acceptance of the turn: acceptance length, accepted draft tokens per pass, and by draft position."""
    if not stats.drafted_passes:
        why = f"; drafting was paused for {f.count(stats.paused_passes)}" if stats.paused_passes else ""
        return [f"no pass carried a draft ({f.count(stats.passes)} passes{why})"]
    bare = stats.passes - stats.drafted_passes
    said = f"drafting: {f.percent(stats.drafted_share)} of passes, acceptance length {stats.mean_acceptance_length:.2f}"
    gained = f"→ {stats.tokens_per_pass:.2f} tokens per pass"
    passes = f"({f.count(stats.passes)} passes, {f.count(bare)} without a draft)"
    first = joined(
        [f"{said} {gained}" if text_width(said + gained) + 1 < width else said, passes], width, between="     "
    )
    if gained not in first[0]:
        first.insert(1, gained)
    histogram = _histogram(stats.histogram)
    column = max(map(text_width, histogram)) + 4 if width >= SIDE_BY_SIDE else 0
    beside = [*_positions(stats.per_position, min(width, 120) - column), ""]
    for line in _drafts(stats):
        parts = folded(line[12:], width, column + 12)
        beside += [f"{line[:12] if i == 0 else '':12}{part}" for i, part in enumerate(parts)]
    if not column:
        return [*first, *histogram, "", *beside]
    pairs = zip_longest(histogram, beside, fillvalue="")
    return [*first, *((left + " " * (column - text_width(left)) + right).rstrip() for left, right in pairs)]


def _histogram(counts: Sequence[int]) -> list[str]:
    shown = [*counts[: TALLEST - 1], sum(counts[TALLEST - 1 :])] if len(counts) > TALLEST else counts
    top, digits = max(shown), len(str(len(shown) - 1))
    rows = []
    for i, n in enumerate(shown):
        # one block per pass while that fits, so that small counts can be counted
        size = n if top <= LONGEST else round(n * LONGEST / top)
        bar = "█" * size or ("▏" if n else "")
        label = "accepted" if i == 0 else "or more" if i == TALLEST - 1 and len(counts) > TALLEST else ""
        rows.append(f"{label:<8} {i:>{digits + 1}}  {bar} {n}" if n else f"{label:<8} {i:>{digits + 1}}  0")
    return rows


def _positions(taken: Sequence[float], width: int) -> list[str]:
    """Return the share of accepted draft tokens at each position, for as many positions as fit."""
    label, column, more = 10, 6, ""
    if label + column * len(taken) >= width:
        fit = max(1, (width - label - 1 - len("  and 99 more")) // column)
        taken, more = taken[:fit], f"  and {len(taken) - fit} more"
    if not taken:
        return ["no draft token was accepted"]
    return [
        "position  " + "".join(f"{i:>{column}}" for i in range(1, len(taken) + 1)),
        "accepted  " + "".join(f"{f.percent(share):>{column}}" for share in taken) + more,
    ]


def _drafts(stats: Stats) -> list[str]:
    taken = f"{f.count(stats.accepted_tokens)} of {f.count(stats.draft_tokens)} ({f.percent(stats.acceptance_rate)})"
    paused = f"{f.count(stats.paused_passes)} passes"
    sources = " · ".join(f"{name} {f.count(n)}" for name, n in stats.sources.items() if n)
    lookahead = f", {f.count(stats.lookahead_rows)} lookahead rows in all" if stats.lookahead_rows else ""
    free = f"; up to {stats.free_rows} take at most 10% longer" if stats.free_rows else ""
    return [
        f"drafts      {taken} accepted",
        *([f"sources     {sources}"] if sources else []),
        *([f"model       {stats.drafts_by}"] if stats.drafts_by else []),
        f"rows        {stats.rows_per_pass:.1f} per pass{lookahead}{free}",
        *([f"lookahead   paused: {stats.lookahead_why}"] if stats.lookahead_why else []),
        f"paused      {paused}" + (f": {stats.paused_why}" if stats.paused_why else ""),
    ]


def kv_table(rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return bytes by layer and tier, header first and total last.

    Equal layers share a line, which has the bytes of all. Columns are the keys of the given lines.
    """
    table = list(rows)
    if not table:
        return []
    keys = list(dict.fromkeys(key for row in table for key in row))
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in table:
        alike.setdefault(tuple(row.get(key) for key in keys if key != "layer"), []).append(row)
    shared = [
        {**group[0], "layer": listed([row["layer"] for row in group]), "nbytes": sum(row["nbytes"] for row in group)}
        for group in alike.values()
    ]
    body = [[_cell(key, row.get(key)) for key in keys] for row in shared]
    total = [f.long_size(sum(row.get(key) or 0 for row in table)) if _is_bytes(key) else "" for key in keys]
    names = ["bytes" if key == "nbytes" else key.replace("_", " ") for key in keys]
    return [names, *body, ["total" if i == 0 else t for i, t in enumerate(total)]]


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if _is_bytes(key) and isinstance(value, int):
        return f.long_size(value)
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f.count(value)
    return str(value)


def _is_bytes(key: str) -> bool:
    return "bytes" in key


def token_table(rows: Sequence[tuple[str, int]], limit: int, width: int) -> list[str]:
    """Return the context by message: tokens, share of the context window, and tokens left."""
    total = sum(n for _, n in rows)
    name_width = max(12, min(width - 24, max((text_width(name) for name, _ in rows), default=0)))
    lines = [_token_row(name, n, limit, name_width) for name, n in rows]
    lines.append(_token_row("total", total, limit, name_width))
    if limit:
        lines.append(f"{f.count(max(0, limit - total))} of {f.count(limit)} left")
    return lines


def _token_row(name: str, n: int, limit: int, width: int) -> str:
    name = clip(name, width)
    share = f"{100 * n / limit:>4.0f} %" if limit else ""
    return f"{name}{' ' * (width - text_width(name))}  {f.count(n):>9}  {share}".rstrip()


def clip(text: str, width: int) -> str:
    """Cut the text to at most `width` columns, with a mark at the cut."""
    if text_width(text) <= width:
        return text
    while text and text_width(text) > width - 1:
        text = text[:-1]
    return text + "…"


def columns(table: Sequence[Sequence[str]], width: int = 0, left: Iterable[int] = (0,)) -> list[str]:
    """Align cells in columns: those listed in `left` to the left, the others to the right.

    If the table is wider than `width` columns, words wrap inside their cells; 0 means no limit.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, GAP, 0, 0))
    for i, _ in enumerate(table[0] if table else ()):
        grid.add_column(justify="left" if i in left else "right", overflow="fold")
    for row in table:
        grid.add_row(*map(Text, row))
    console = Console(file=StringIO(), width=width or WIDEST, color_system=None, legacy_windows=False, _environ={})
    return ["".join(part.text for part in line).rstrip() for line in console.render_lines(grid, pad=False)]


def fitting(table: Sequence[Sequence[str]], width: int, drop: Iterable[str], *, wraps: bool = False) -> list[list[str]]:
    """Drop the named columns one after the other until the table fits into `width`.

    With `wraps`, columns are dropped only until no word would be cut; cells may then have several lines.
    """
    rows = [list(row) for row in table]
    for name in drop:
        if (least(rows) if wraps else widest(columns(rows))) <= width:
            break
        rows = [[cell for cell, head in zip(row, rows[0], strict=True) if head != name] for row in rows]
    return rows


def least(table: Sequence[Sequence[str]]) -> int:
    """Return the columns that a table needs if its cells wrap between words."""
    return sum(max(widest(cell.split()) for cell in column) + GAP for column in zip(*table, strict=True)) - GAP


def turned(table: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return a grid, transposed if its columns do not fit side by side."""
    lines = columns(table)
    return lines if widest(lines) < width else columns(list(zip(*table, strict=True)))


def widest(lines: Iterable[str]) -> int:
    return max(map(text_width, lines), default=0)
