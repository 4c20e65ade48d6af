"""Errors, warnings and notes: the event, the numbers, and last the command that helps."""

from __future__ import annotations

from collections.abc import Sequence

from kvcli.errors import KvcliError
from kvcli.render.terminal.terminal import Span, Terminal, folded, text_width

COLUMN = 80  # the code is at the right edge, but at most in this column
GAP = "   ·   "
TRY = "  try: "


def print_error(err: Terminal, error: KvcliError) -> None:
    """Print `error: ...  [code]`, the lines with the numbers, and `try:` lines if there are any."""
    _block(err, "error", "red", "\n".join([error.message, *error.lines]), error.code)
    _attempts(err, error.try_)


def print_warning(err: Terminal, text: str) -> None:
    """Print a problem that the user should fix, although the work continued."""
    _block(err, "warning", "yellow", text)


def print_note(err: Terminal, text: str) -> None:
    """Print a fact that the user should know."""
    _block(err, "note", "cyan", text)


def _block(err: Terminal, word: str, style: str, text: str, code: str = "") -> None:
    first, *lines = text.split("\n")
    for row in _headline(word, style, first, code, err.width):
        err.line(*row)
    for line in lines:
        for part in folded(line, err.width, 2):
            err.line((f"  {part}", ""))


def _headline(word: str, style: str, message: str, code: str, width: int) -> list[list[Span]]:
    """Return the message with its code at the right edge if it fits, or else after the message's last line."""
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
    """Print hints on one line if they fit, or else below each other; never wrapped, so that they can be copied."""
    if not items:
        return
    together = GAP.join(items)
    rows = [together] if text_width(TRY + together) < err.width else items
    for i, row in enumerate(rows):
        err.line((TRY if i == 0 else " " * len(TRY), "green" if i == 0 else ""), (row, ""))
