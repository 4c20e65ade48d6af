"""Rows: the tokens of one forward pass, laid out as a draft tree followed by lookahead rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Hears = Literal["", "queries", "hidden"]  # tensors of a step's tree rows that the drafter needs


@dataclass(frozen=True, slots=True)
class LookaheadRows:
    """Lookahead rows, which are not verified and serve the drafter only (FAFO's fumbling, Lookahead's Jacobi
    window)."""

    ids: list[int]  # F tokens
    offset: list[int]  # position minus the pending token's position, one per row
    sees: Tensor  # [F, F] bool: row i attends to row j
    wanted: list[int]  # rows whose logits the drafter needs, rising; the output layer runs only for these


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposal of a drafter: a tree of draft tokens below the pending token.

    `parent[i]` is an index into `ids`, or -1 for a child of the pending token; a parent comes before its children.
    Siblings have different ids.
    """

    ids: list[int]
    parent: list[int]
    lookahead: LookaheadRows | None = None
    needs: Hears = ""  # tensors of the tree rows to return, in `Step.queries` or `Step.hidden`
    ahead: int = 0  # without draft tokens: passes of one row that follow unless the answer ends; as in Rows

    @staticmethod
    def none(ahead: int = 0) -> Draft:
        return Draft([], [], ahead=ahead)

    @staticmethod
    def chain(ids: Sequence[int]) -> Draft:
        """Return a draft without branches."""
        return Draft(list(ids), list(range(-1, len(ids) - 1)))

    def depth(self) -> list[int]:
        """Return the depth of each node: 1 for a child of the pending token."""
        depth: list[int] = []
        for p in self.parent:
            depth.append(1 if p < 0 else depth[p] + 1)
        return depth


@dataclass(frozen=True, slots=True)
class Rows:
    """The N tokens of one forward pass, in host memory. A pass copies to the device what it needs there."""

    ids: Sequence[int]  # N
    pos: Sequence[int]  # N, absolute; a range for a chain
    sees: Tensor | None  # [N, N] bool on the CPU, row i attends to row j of the pass; None = causal chain
    tree: int  # rows [0:tree] are the draft tree, row 0 the pending token; the rest are lookahead rows
    parent: tuple[int, ...]  # [tree], -1 for row 0
    wanted: tuple[int, ...] = ()  # lookahead rows whose logits are wanted, after the tree's
    ahead: int = 0  # following passes, each of the one sampled row, unless the answer ends

    @property
    def want(self) -> list[int]:
        """Rows whose logits are computed: the tree's, then the wanted lookahead rows."""
        return [*range(self.tree), *self.wanted]

    @property
    def n_rows(self) -> int:
        return len(self.ids)

    @staticmethod
    def chain(ids: Sequence[int], start: int, ahead: int = 0) -> Rows:
        """Return rows for consecutive tokens at positions start, start + 1, ...: prefill, or one plain decoding row."""
        n = len(ids)
        return Rows(ids, range(start, start + n), sees=None, tree=n, parent=tuple(range(-1, n - 1)), ahead=ahead)

    @staticmethod
    def build(pending: int, at: int, draft: Draft) -> Rows:
        """Return rows for the pending token at position `at`, the draft's tree below it, then its lookahead rows."""
        if not draft.ids and draft.lookahead is None:
            return Rows.chain([pending], at, draft.ahead)
        parent = [-1, *(p + 1 for p in draft.parent)]  # node i of the draft is row i + 1
        is_chain = all(p == i - 1 for i, p in enumerate(parent))
        if is_chain and draft.lookahead is None:
            return Rows.chain([pending, *draft.ids], at)
        tree = len(parent)
        offset = [0, *draft.depth()]
        ids = [pending, *draft.ids]
        n = tree + (len(draft.lookahead.ids) if draft.lookahead is not None else 0)
        sees = np.zeros((n, n), dtype=np.bool_)  # numpy is faster: updating one row in torch takes six times as long
        sees.flat[:: n + 1] = True  # like `eye`, in a fifth of the time
        for row, p in enumerate(parent[1:], start=1):
            sees[row] |= sees[p]
        if draft.lookahead is not None:
            sees[tree:, 0] = True  # a lookahead row attends to the pending token, never to a draft token
            sees[tree:, tree:] = draft.lookahead.sees
            ids, offset = ids + draft.lookahead.ids, offset + draft.lookahead.offset
        return Rows(
            ids=ids,
            pos=[at + i for i in offset],
            sees=torch.from_numpy(sees),
            tree=tree,
            parent=tuple(parent),
            wanted=tuple(tree + i for i in draft.lookahead.wanted) if draft.lookahead else (),
        )

    def only(self, rows: Sequence[int]) -> Rows:
        """Return only these rows of a chain, in rising order. With gaps the result has no parents."""
        assert self.sees is None, "rows of a tree go together"
        return Rows(_picked(self.ids, rows), _picked(self.pos, rows), sees=None, tree=len(rows), parent=())

    def children(self) -> list[list[int]]:
        """Return the child rows of each tree row: children()[i] lists those whose parent is row i."""
        below: list[list[int]] = [[] for _ in range(self.tree)]
        for row, p in enumerate(self.parent):
            if p >= 0:
                below[p].append(row)
        return below

    def ancestors(self, row: int) -> list[int]:
        """Return the tree rows that a row attends to: itself and its ancestors, nearest first."""
        found = []
        while row >= 0:
            found.append(row)
            row = self.parent[row]
        return found


def _picked(of: Sequence[int], rows: Sequence[int]) -> Sequence[int]:
    """Select elements. A range of consecutive rows is sliced, so that the positions of a chain remain a range."""
    return of[rows.start : rows.stop] if isinstance(rows, range) else [of[row] for row in rows]
