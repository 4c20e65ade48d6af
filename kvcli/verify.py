"""Verification: which guessed rows the model agrees with, by sampling first and matching after.

At each node the sampler draws the next token as if nothing had been guessed; if a child of the node carries that token
the walk goes on there, otherwise it ends. The text therefore never depends on the guesses (rule D of Leviathan-style
schemes; SpecInfer, arXiv 2305.09781, describes the tree walk).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvcli.rows import Rows
from kvcli.sample import Sampler, Seen


def exact(rows: Rows, logits: Tensor, sampler: Sampler, seen: Seen) -> tuple[list[int], list[int]]:
    """logits [tree, V] -> the rows of the longest path of guesses that equals what the sampler draws, row 0 first, and
    as many new ids; the last draw is the bonus token.
    """
    ids: list[int] = rows.ids[: rows.tree].tolist()
    below = rows.children()
    # on a CPU a draw takes as long for each row as for one, and most guesses are not reached
    if sampler.needs_text or (sampler.temperature and logits.device.type == "cpu"):
        draw = _by_path(rows, logits, sampler, seen)
    else:
        drawn: list[int] = sampler(logits[: rows.tree], rows.pos[: rows.tree]).tolist()  # waits for the pass

        def draw(row: int, _: list[int]) -> int:
            return drawn[row]

    path, new = [0], [draw(0, [])]
    while True:
        match = next((row for row in below[path[-1]] if ids[row] == new[-1]), None)
        if match is None:
            return path, new
        path.append(match)
        new.append(draw(match, new))


def _by_path(rows: Rows, logits: Tensor, sampler: Sampler, seen: Seen) -> Callable[[int, list[int]], int]:
    """Draw row by row: the penalty of a guess must know the guesses above it, and only those."""

    def draw(row: int, above: list[int]) -> int:
        mask = seen.mask
        if above:
            mask = mask.clone()
            mask[above] = True
        return int(sampler(logits[row : row + 1], rows.pos[row : row + 1], mask)[0])

    return draw
