"""Verification: which guessed rows the model agrees with, by sampling first and matching after.

At each node the sampler draws the next token as if nothing had been guessed; if a child of the node carries that token
the walk goes on there, otherwise it ends. The text therefore never depends on the guesses (rule D of Leviathan-style
schemes; SpecInfer, arXiv 2305.09781, describes the tree walk).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvcli.engine.rows import Rows


def accepted_path(rows: Rows, drawn: Callable[[int], int], stop: Collection[int] = ()) -> tuple[list[int], list[int]]:
    """`drawn(row)`: what the sampler draws behind a row -> the rows of the longest path of guesses that equals it,
    row 0 first, and as many new ids; the last draw is the bonus token. Ends at the first of `stop`.
    """
    below = rows.children()
    path, new = [0], [drawn(0)]
    while new[-1] not in stop:
        match = next((row for row in below[path[-1]] if rows.ids[row] == new[-1]), None)
        if match is None:
            break
        path.append(match)
        new.append(drawn(match))
    return path, new
