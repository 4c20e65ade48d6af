"""Recorder of the queries of accepted rows that a policy needs at compression points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.kv.snapshot import SnapshotReader, State

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.rows import Rows


class QueryRecorder:
    """The latest `recent` queries, and those at the probed positions of the last prompt, per layer."""

    def __init__(self, recent: int, probes: Callable[[int], Iterable[int]]) -> None:
        self.recent, self.probes = recent, probes
        self.pos: list[int] = []  # positions of the recorded queries, rising
        self._q: list[Tensor] = []  # per layer [H, len(pos), D]
        self._probed: set[int] = set()
        self._any = False

    def __bool__(self) -> bool:
        """True if queries of this sequence were ever recorded, even if they have been dropped."""
        return self._any

    def clear(self) -> None:
        self.pos, self._q, self._any = [], [], False

    def forget(self) -> None:
        """Drop the probed queries, except the latest `recent`."""
        first = max(0, len(self.pos) - self.recent)
        self._q = [q[:, first:].clone() for q in self._q] if first < len(self.pos) else []
        self.pos, self._probed = self.pos[first:], set()

    def begin(self, n: int) -> None:
        """Prepare for a prefill after which the sequence has n tokens stored."""
        self._probed = set(self.probes(n))

    def rows_to_record_in_chunk(self, start: int, n: int) -> list[int]:
        """Return which of n rows from position `start` on to record."""
        first = max(0, n - self.recent)
        return sorted({p - start for p in self._probed if start <= p < start + first} | set(range(first, n)))

    def rows_to_record_in_tree(self, tree: int) -> range:
        """Return which rows of a draft tree to record: all of them, because any may be accepted."""
        return range(tree if self.recent else 0)

    def take(self, rows: Rows, recorded_rows: Sequence[int], queries: Sequence[Tensor], path: Sequence[int]) -> None:
        """Store the queries of accepted rows among `hear`; `queries`: per layer [H, len(hear), D]."""
        if not recorded_rows or not (self.recent or self._probed):
            return
        at = {row: i for i, row in enumerate(recorded_rows)}
        taken = [row for row in path if row in at]
        pos = self.pos + [rows.pos[row] for row in taken]
        late = len(pos) - self.recent
        stay = [i for i, at_pos in enumerate(pos) if i >= late or at_pos in self._probed]
        rows_taken, rows_stay = _run([at[row] for row in taken]), _run(stay)
        fresh = [q[:, rows_taken] for q in queries]
        old = self._q or [q[:, :0] for q in fresh]
        self._q = [_taken(torch.cat((a, b), 1), rows_stay) for a, b in zip(old, fresh, strict=True)]
        self.pos = [pos[i] for i in stay]
        self._any = self._any or bool(pos)

    def state(self) -> State:
        """Return a snapshot of the recorded queries."""
        of_layers: State = {str(layer): q for layer, q in enumerate(self._q)}
        return {"any": self._any, "pos": torch.tensor(self.pos, dtype=torch.int32), "q": of_layers}

    def restore(self, given: SnapshotReader, lm: LM, dtype: torch.dtype) -> None:
        """Restore a snapshot of a sequence of this model, in the cache's dtype. Raises SnapshotMismatch."""
        self.clear()
        pos = given.positions("pos", None)
        for layer, (heads, shape) in enumerate(zip(lm.heads, lm.shapes, strict=True) if len(pos) else ()):
            q = given.part("q").tensor(str(layer), dtype, heads, len(pos), shape.k_dim)
            self._q.append(q.to(lm.device))
        self.pos, self._any = pos.tolist(), bool(given.number("any", 1))

    def of(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries q [H, w, D] of a layer and their positions [w]; an empty q like `like` [.., D] if there
        are none."""
        if not self.pos:
            return like[:, :0], torch.zeros(0, dtype=torch.int64, device=like.device)
        return self._q[layer], torch.tensor(self.pos, device=self._q[layer].device)


def _taken(q: Tensor, rows: slice | list[int]) -> Tensor:
    """Return a copy of these rows of q [H, n, D], because a slice would keep the whole tensor alive."""
    return q[:, rows].clone() if isinstance(rows, slice) else q[:, rows]


def _run(rows: Sequence[int]) -> slice | list[int]:
    """Return consecutive rows as a slice: indexing with a list would wait for the device."""
    is_run = not rows or rows[-1] - rows[0] == len(rows) - 1
    return slice(rows[0], rows[-1] + 1) if rows and is_run else slice(0) if is_run else [*rows]
