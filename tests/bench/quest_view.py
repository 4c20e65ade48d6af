"""What a selection of a cache view by Quest costs, with bounds kept per page and with bounds made anew from all keys.

    python tests/bench/quest_view.py [--contexts 1024,4096,16384] [--rows 16] [--heads 3] [--head-dim 64] [--out FILE]

Between two selections of one layer 32 tokens are stored, as the default of `spec.refresh` has it. "keys kept" and "keys
anew" count the keys of a head that bounds are computed from. "selection" is the time of one with bounds kept over one
with bounds made anew, the copy of the selected slots included; "ms anew" is for scale. Each repetition stores tokens,
so contexts grow by 32 per repetition.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.kv.slots import Slots, alike
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.views.view import CompactView, Selection
from kvcli.methods.policies.quest import Quest
from tests.bench.harness import Ints, Rows, in_turns, measurement, quotients, seconds
from tests.policies import moment

NEW = 32  # tokens between two selections


class Side:
    """A view over a KV cache of its own, and the keys that its selections read."""

    def __init__(self, context: int, heads: int, head_dim: int, *, is_kept: bool) -> None:
        self._cache, self._is_kept, self.keys = Dense(alike(1, heads, head_dim), torch.float32), is_kept, 0
        self._random = torch.Generator().manual_seed(0)
        self._cache.append(0, *(self._made(heads, context, head_dim) for _ in "kv"), 0)
        self._view = CompactView(self._cache, self._pick, NEW, self._cache._shapes)
        self.select(0)

    def _made(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random)

    def _pick(self, layer: int, q: Tensor, s: Slots, last: Selection) -> Tensor:
        last = last if self._is_kept else Selection()
        self.keys = s.n_slots - last.n
        return Quest().mask(s, moment(s, q, policy_state=last))

    def select(self, rows: int) -> float:
        """Store tokens, then attend with so many rows per KV head, which selects. Seconds of the latter."""
        heads, n, head_dim = self._cache.slots(0).k.shape
        self._cache.append(0, *(self._made(heads, NEW, head_dim) for _ in "kv"), n)
        q = self._made(3 * heads, max(1, rows), head_dim)
        return seconds(partial(self._view._refresh, 0, q))


@measurement("Selecting {rows} rows' view by Quest: bounds kept per page over bounds made anew")
def quest_view(
    contexts: Ints = (1024, 4096, 16384), rows: int = 16, heads: int = 3, head_dim: int = 64, reps: int = 15
) -> Rows:
    for context in contexts:
        sides = {name: Side(context, heads, head_dim, is_kept=name == "kept") for name in ("kept", "anew")}
        took = in_turns({name: partial(side.select, rows) for name, side in sides.items()}, reps, warmup=3)
        yield {
            "context": context,
            "keys anew": sides["anew"].keys,
            "keys kept": sides["kept"].keys,
            "selection": quotients(took["kept"], took["anew"], 3),
            "ms anew": round(1000 * median(took["anew"]), 3),
        }


if __name__ == "__main__":
    quest_view.main()
