"""Rows: the tokens of one pass, laid out as a verified tree and, behind it, scouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Hears = Literal["", "queries", "hidden"]  # what of a step's tree rows its drafter wants to be told


@dataclass(frozen=True, slots=True)
class LookaheadRows:
    """Rows that nobody verifies, run for the drafter's benefit (FAFO's fumbling, Lookahead's window)."""

    ids: list[int]  # F tokens
    offset: list[int]  # position minus the pending token's position, one per scout
    sees: Tensor  # [F, F] bool: scout i attends scout j
    wanted: list[int]  # the scouts whose logits the drafter wants, rising; the head is not run for the others


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes: a tree of guesses below the pending token.

    `parent[i]` is an index into `ids`, or -1 for a child of the pending token; a parent comes before its children.
    Siblings carry different ids.
    """

    ids: list[int]
    parent: list[int]
    scouts: LookaheadRows | None = None
    needs: Hears = ""  # what is to be handed back of the tree's rows, by `Step.queries` or `Step.hidden`
    ahead: int = 0  # without guesses: how many passes of one row follow, unless the text ends before; as in Rows

    @staticmethod
    def none(ahead: int = 0) -> Draft:
        return Draft([], [], ahead=ahead)

    @staticmethod
    def chain(ids: Sequence[int]) -> Draft:
        """One guess after another."""
        return Draft(list(ids), list(range(-1, len(ids) - 1)))

    def depth(self) -> list[int]:
        """Depth of each node: 1 for a child of the pending token."""
        depth: list[int] = []
        for p in self.parent:
            depth.append(1 if p < 0 else depth[p] + 1)
        return depth


@dataclass(frozen=True, slots=True)
class Rows:
    """N tokens for one pass, as the host knows them: a pass puts on the device what it needs there."""

    ids: Sequence[int]  # N
    pos: Sequence[int]  # N, absolute; of a chain a range
    sees: Tensor | None  # [N, N] bool on the CPU, row i attends fresh row j; None = causal chain
    tree: int  # rows [0:tree] are the verified tree, row 0 the pending token; the rest are scouts
    parent: tuple[int, ...]  # [tree], -1 for row 0
    wanted: tuple[int, ...] = ()  # scout rows whose logits are wanted beside the tree's
    ahead: int = 0  # passes that follow, each of the one row that is drawn, unless the text ends before

    @property
    def want(self) -> list[int]:
        """Rows whose logits are computed: those of the tree, then the wanted scouts."""
        return [*range(self.tree), *self.wanted]

    @property
    def n_rows(self) -> int:
        return len(self.ids)

    @staticmethod
    def chain(ids: Sequence[int], start: int, ahead: int = 0) -> Rows:
        """A run of tokens at positions start, start + 1, ...: prefill, or one plain decoding row."""
        n = len(ids)
        return Rows(ids, range(start, start + n), sees=None, tree=n, parent=tuple(range(-1, n - 1)), ahead=ahead)

    @staticmethod
    def build(pending: int, at: int, draft: Draft) -> Rows:
        """The pending token at position `at`, the draft's tree below it, then its scouts."""
        if not draft.ids and draft.scouts is None:
            return Rows.chain([pending], at, draft.ahead)
        parent = [-1, *(p + 1 for p in draft.parent)]  # node i of the draft is row i + 1
        is_chain = all(p == i - 1 for i, p in enumerate(parent))
        if is_chain and draft.scouts is None:
            return Rows.chain([pending, *draft.ids], at)
        tree = len(parent)
        offset = [0, *draft.depth()]
        ids = [pending, *draft.ids]
        n = tree + (len(draft.scouts.ids) if draft.scouts is not None else 0)
        sees = np.zeros((n, n), dtype=np.bool_)  # numpy's: a row of torch takes six times as long
        sees.flat[:: n + 1] = True  # as `eye`, in a fifth of the time
        for row, p in enumerate(parent[1:], start=1):
            sees[row] |= sees[p]
        if draft.scouts is not None:
            sees[tree:, 0] = True  # a scout continues the text: it reads the pending token, never a guess
            sees[tree:, tree:] = draft.scouts.sees
            ids, offset = ids + draft.scouts.ids, offset + draft.scouts.offset
        return Rows(
            ids=ids,
            pos=[at + i for i in offset],
            sees=torch.from_numpy(sees),
            tree=tree,
            parent=tuple(parent),
            wanted=tuple(tree + i for i in draft.scouts.wanted) if draft.scouts else (),
        )

    def only(self, rows: Sequence[int]) -> Rows:
        """Of a chain these alone, rising. With gaps it has no parents to walk."""
        assert self.sees is None, "rows of a tree go together"
        return Rows(_picked(self.ids, rows), _picked(self.pos, rows), sees=None, tree=len(rows), parent=())

    def children(self) -> list[list[int]]:
        """children()[i] lists the tree rows whose parent is row i."""
        below: list[list[int]] = [[] for _ in range(self.tree)]
        for row, p in enumerate(self.parent):
            if p >= 0:
                below[p].append(row)
        return below

    def ancestors(self, row: int) -> list[int]:
        """Tree rows that this one sees: itself and its ancestors, the nearest first."""
        found = []
        while row >= 0:
            found.append(row)
            row = self.parent[row]
        return found


def _picked(of: Sequence[int], rows: Sequence[int]) -> Sequence[int]:
    """Of a run a run: that of a chain's positions stays a range."""
    return of[rows.start : rows.stop] if isinstance(rows, range) else [of[row] for row in rows]
