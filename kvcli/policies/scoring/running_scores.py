"""Accumulated scores of the tokens of a sequence: one number per layer, head and position."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.hf.lm import LM
    from kvcli.kv.snapshot import SnapshotReader, State


@dataclass(slots=True)
class RunningScores:
    """Accumulated scores of one sequence of the model `lm`."""

    lm: LM
    total: dict[int, Tensor] = field(default_factory=dict)  # layer -> [K, T]
    last: dict[int, int] = field(default_factory=dict)  # layer -> position of the last query added

    def snapshot(self) -> State:
        """Return the scores by layer."""
        return {str(i): {"total": total, "last": self.last.get(i, -1)} for i, total in self.total.items()}

    def restore(self, given: SnapshotReader) -> None:
        """Load the scores of a snapshot."""
        from kvcli.kv.snapshot import SnapshotMismatch

        for i, shape in enumerate(self.lm.shapes):
            if str(i) in given:
                one = given.part(str(i))
                total = one.floats("total", shape.n_kv_heads, None)
                if total.shape[1] > given.n:
                    raise SnapshotMismatch("there are numbers for more tokens than the text has")
                self.total[i] = total.to(self.lm.device)
                self.last[i] = one.number("last", given.n - 1, least=-1)
