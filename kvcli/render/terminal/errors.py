"""Errors, warnings and notes: what happened, the numbers, and last what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from kvcli.errors import KvcliError
from kvcli.render.terminal.terminal import Span, Terminal, text_width
from kvcli.render.terminal.wrap import folded

COLUMN = 80  # the code stands at the right edge, but not further out than this
GAP = "   ·   "
TRY = "  try: "


def print_error(err: Terminal, error: KvcliError) -> None:
    """`error: ...  [code]`, the lines with the numbers, and `try:` where there is something to try."""
    _block(err, "error", "red", "\n".join([error.message, *error.lines]), error.code)
    _attempts(err, error.try_)


def print_warning(err: Terminal, text: str) -> None:
    """Something the user should change, though the work went on."""
    _block(err, "warning", "yellow", text)


def print_note(err: Terminal, text: str) -> None:
    """Something the user should know."""
    _block(err, "note", "cyan", text)


def _block(err: Terminal, word: str, style: str, text: str, code: str = "") -> None:
    first, *lines = text.split("\n")
    for row in _headline(word, style, first, code, err.width):
        err.line(*row)
    for line in lines:
        for part in folded(line, err.width, 2):
            err.line((f"  {part}", ""))


def _headline(word: str, style: str, message: str, code: str, width: int) -> list[list[Span]]:
    """The message, with its code at the right edge if it fits there and on the message's last line otherwise."""
    label = f"{word}: "
    first, *more = folded(message, width, len(label))
    rows: list[list[Span]] = [[(label, style), (first, "bold")]]
    rows += [[(" " * len(label), ""), (line, "bold")] for line in more]
    if not code:
        return rows
    tag = f"[{code}]"
    used = text_width("".join(text for text, _ in rows[-1]))
    free = min(width - 1, COLUMN) - used - len(tag)
    if free >= 2:
        rows[-1].append((" " * free + tag, "dim"))
    elif width - 1 - used - len(tag) >= 1:
        rows[-1].append((f" {tag}", "dim"))
    else:
        rows.append([(f"  {tag}", "dim")])
    return rows


def _attempts(err: Terminal, items: Sequence[str]) -> None:
    """On one line if they fit, else one under the other; never folded, so that they can be copied."""
    if not items:
        return
    together = GAP.join(items)
    rows = [together] if text_width(TRY + together) < err.width else items
    for i, row in enumerate(rows):
        err.line((TRY if i == 0 else " " * len(TRY), "green" if i == 0 else ""), (row, ""))
