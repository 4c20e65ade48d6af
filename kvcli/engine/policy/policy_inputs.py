"""Inputs that eviction policies request: recorded queries, and norms of projected values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcli.errors import BadModel
from kvcli.kv.companion import Companion
from kvcli.kv.snapshot import SnapshotReader, State

if TYPE_CHECKING:
    from kvcli.engine.forward_request import Rows
    from kvcli.engine.hf.lm import LM

# Recorder of the queries of accepted rows that a policy needs at compression points.


class QueryRecorder(Companion):
    """Queries by layer, of the newest `recent_queries` accepted rows and of probed positions of the last prompt."""

    def __init__(
        self,
        lm: LM,
        dtype: torch.dtype,
        recent_queries: int = 0,
        probes: Callable[[int], Iterable[int]] = lambda n: (),
        *,
        lasting: bool = False,
    ) -> None:
        """`dtype`: that of the KV cache. `recent_queries`, `probes`, `lasting`: as in `PolicyRequirements`."""
        self._lm, self._dtype = lm, dtype
        self.recent_queries, self._probes, self._lasting = recent_queries, probes, lasting
        self.pos: list[int] = []  # positions of the recorded queries, rising
        self._q: list[Tensor] = []  # per layer [H, len(pos), D]
        self._probed: set[int] = set()
        self._any = False

    def __bool__(self) -> bool:
        """True if queries of this sequence were ever recorded, even if none is left."""
        return self._any

    def clear(self) -> None:
        self.pos, self._q, self._any = [], [], False

    def reaches(self, n: int, of: int) -> int:
        """Return n, or 0 if queries would have to be recorded again."""
        return n if n == of or not self else 0

    def rewind(self, n: int, of: int) -> None:
        """Drop all queries of a sequence that begins anew."""
        if not n:
            self.clear()

    def compress(self, point: Any) -> None:
        """Drop probed queries once the prompt is read."""
        if point.phase == "read" and not self._lasting:
            self.forget()

    def forget(self) -> None:
        """Drop the probed queries, except those of the newest `recent_queries` rows."""
        first = max(0, len(self.pos) - self.recent_queries)
        self._q = [q[:, first:].clone() for q in self._q] if first < len(self.pos) else []
        self.pos, self._probed = self.pos[first:], set()

    def begin(self, n: int) -> None:
        """Prepare for a prefill after which the sequence has n tokens stored."""
        self._probed = set(self._probes(n))

    def rows_to_record_in_chunk(self, start: int, n: int) -> list[int]:
        """Return which of n rows from position `start` on to record."""
        first = max(0, n - self.recent_queries)
        return sorted({p - start for p in self._probed if start <= p < start + first} | set(range(first, n)))

    def rows_to_record_in_tree(self, tree: int) -> range:
        """Return which rows of a draft tree to record: all of them, because any may be accepted."""
        return range(tree if self.recent_queries else 0)

    def take(self, rows: Rows, recorded_rows: Sequence[int], queries: Sequence[Tensor], path: Sequence[int]) -> None:
        """Store the queries of accepted rows among `recorded_rows`; `queries`: per layer [H, len(recorded_rows), D]."""
        if not recorded_rows or not (self.recent_queries or self._probed):
            return
        at = {row: i for i, row in enumerate(recorded_rows)}
        accepted = [row for row in path if row in at]
        pos = self.pos + [rows.pos[row] for row in accepted]
        late = len(pos) - self.recent_queries
        stay = [i for i, at_pos in enumerate(pos) if i >= late or at_pos in self._probed]
        rows_accepted, rows_stay = _run([at[row] for row in accepted]), _run(stay)
        new = [q[:, rows_accepted] for q in queries]
        old = self._q or [q[:, :0] for q in new]
        self._q = [_copied(torch.cat((a, b), 1), rows_stay) for a, b in zip(old, new, strict=True)]
        self.pos = [pos[i] for i in stay]
        self._any = self._any or bool(pos)

    def snapshot(self) -> State:
        """Return the recorded queries."""
        of_layers: State = {str(layer): q for layer, q in enumerate(self._q)}
        pos = torch.tensor(self.pos, dtype=torch.int32)
        return {"query_recorder": {"any": self._any, "pos": pos, "q": of_layers}}

    def restore(self, given: SnapshotReader) -> None:
        """Restore a snapshot. Raises SnapshotMismatch."""
        self.clear()
        lm, mine = self._lm, given.part("query_recorder")
        pos, of_layers = mine.positions("pos", None), mine.part("q")
        for layer, (heads, shape) in enumerate(zip(lm.heads, lm.shapes, strict=True) if len(pos) else ()):
            q = of_layers.tensor(str(layer), self._dtype, heads, len(pos), shape.k_dim)
            self._q.append(q.to(lm.device))
        self.pos, self._any = pos.tolist(), bool(mine.number("any", 1))

    def of(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries q [H, w, D] of a layer and their positions [w]; an empty q like `like` [.., D] if there
        are none."""
        if not self.pos:
            return like[:, :0], torch.zeros(0, dtype=torch.int64, device=like.device)
        return self._q[layer], torch.tensor(self.pos, device=self._q[layer].device)


def _copied(q: Tensor, rows: slice | list[int]) -> Tensor:
    """Return a copy of these rows of q [H, n, D], because a slice would keep the whole tensor alive."""
    return q[:, rows].clone() if isinstance(rows, slice) else q[:, rows]


def _run(rows: Sequence[int]) -> slice | list[int]:
    """Return consecutive rows as a slice: indexing with a list would wait for the device."""
    is_run = not rows or rows[-1] - rows[0] == len(rows) - 1
    return slice(rows[0], rows[-1] + 1) if rows and is_run else slice(0) if is_run else [*rows]


# Norms of values after the output projection of their head: what a slot's value can add to the residual stream.


NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")  # names of the output projection in transformers
BLOCK = 1024  # values projected at a time


class ProjectedValueNorms:
    """Norms of projected values. Weights are read when needed; quantized weights are dequantized."""

    def __init__(self, lm: LM, who: str) -> None:
        """`who`: the setting that needs the norms, as typed by the user. Raises BadModel if heads share what they
        store, or if there is no output projection per head."""
        self._modules = [_module(attends) for attends in lm.attentions]
        if None in self._modules or any(of.rank for of in lm.shapes):
            raise BadModel(
                f"{who} needs an output projection per head, and {lm.info.id} ({lm.info.family}) has none",
                code="policy_unsupported",
                lines=["its heads share latents, or the projection has another name"],
                try_=["leave it out", "--set policy.name=vatp, which uses the norm of values"],
            )
        self._heads, self._dtype = lm.heads, lm.dtype

    def __deepcopy__(self, memo: object) -> ProjectedValueNorms:
        """Return itself: the weights are the model's, and a forked sequence shares them."""
        return self

    def __call__(self, layer: int, v: Tensor, order: int) -> Tensor:
        """Return the norm (1 or 2) of each value after the output projection of each query head that reads it: v [K, S,
        D] -> [K, G, S]."""
        module = self._modules[layer]
        wide = torch.promote_types(v.dtype, torch.float32)
        (kv, n, d), group = v.shape, self._heads[layer] // v.shape[0]
        weight = _weight(module, kv * group * d, self._dtype, v.device).to(wide).view(kv, group, d, -1)  # [K, G, D, E]
        found = torch.zeros(kv, group, n, dtype=wide, device=v.device)
        for head in range(kv):
            for at in range(0, n, BLOCK):
                some = v[head, at : at + BLOCK].to(wide)
                for g, part in enumerate(weight[head]):
                    found[head, g, at : at + BLOCK] = (some @ part).norm(p=order, dim=1)
        return found


def _module(attends: Any) -> Any:
    return next((getattr(attends, name) for name in NAMES if hasattr(attends, name)), None)


def _weight(module: Any, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weight [width, E], computed from unit inputs because quantized weights can be read in no other way."""
    with torch.no_grad():
        each = torch.eye(width, dtype=dtype, device=device)
        found: Tensor = module(each) - module(torch.zeros_like(each[:1]))
        return found
