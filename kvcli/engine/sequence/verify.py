"""Verification of draft tokens: sample first, then match.

At each node the sampler draws the next token as if there were no draft. If a child of the node has that token,
verification continues there; otherwise it ends. So the text never depends on the draft tokens (rule D of
Leviathan-style schemes; SpecInfer, arXiv 2305.09781, describes the tree walk).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvcli.engine.rows import Rows


def accepted_path(rows: Rows, drawn: Callable[[int], int], stop: Collection[int] = ()) -> tuple[list[int], list[int]]:
    """Return the accepted rows, row 0 first, and one new id per row; the last id is the bonus token.

    `drawn(row)` is the token sampled after a row. The path ends at the first of `stop`.
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
