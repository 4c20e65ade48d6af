"""The input of an eviction policy at a compression point, and the recorder of the queries that it asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import bool as bool_

from kvcli.engine.forward_request import Passes, await_passes
from kvcli.engine.policy.policy import LayerContext, Phase, Policy, PolicyRequirements, ProtectedTokens
from kvcli.errors import BadModel
from kvcli.kv.companion import Companion
from kvcli.kv.slots import KVCache, Masks, Slots
from kvcli.kv.snapshot import SnapshotReader, State

if TYPE_CHECKING:
    from kvcli.engine.forward_request import Rows
    from kvcli.engine.hf.lm import LM

# Recorder of the queries of accepted rows that a policy needs at compression points.


class QueryRecorder(Companion):
    """Queries by layer, of the newest `recent_queries` accepted rows and of probed positions of the last prompt."""

    def __init__(self, lm: LM, dtype: torch.dtype, wants: PolicyRequirements) -> None:
        """`dtype`: that of the KV cache."""
        self._lm, self._dtype, self._wants = lm, dtype, wants
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

    def compress(self, point: CompressionPoint) -> None:
        """Drop probed queries once the prompt is read."""
        if point.phase == "read" and not self._wants.lasting:
            self.forget()

    def forget(self) -> None:
        """Drop the probed queries, except those of the newest `recent_queries` rows."""
        first = max(0, len(self.pos) - self._wants.recent_queries)
        self._q = [q[:, first:].clone() for q in self._q] if first < len(self.pos) else []
        self.pos, self._probed = self.pos[first:], set()

    def begin(self, n: int) -> None:
        """Prepare for a prefill after which the sequence has n tokens stored."""
        self._probed = set(self._wants.probes(n))

    def rows_to_record_in_chunk(self, start: int, n: int) -> list[int]:
        """Return which of n rows from position `start` on to record."""
        first = max(0, n - self._wants.recent_queries)
        return sorted({p - start for p in self._probed if start <= p < start + first} | set(range(first, n)))

    def rows_to_record_in_tree(self, tree: int) -> range:
        """Return which rows of a draft tree to record: all of them, because any may be accepted."""
        return range(tree if self._wants.recent_queries else 0)

    def take(self, rows: Rows, recorded_rows: Sequence[int], queries: Sequence[Tensor], path: Sequence[int]) -> None:
        """Store the queries of accepted rows among `recorded_rows`; `queries`: per layer [H, len(recorded_rows), D]."""
        if not recorded_rows or not (self._wants.recent_queries or self._probed):
            return
        at = {row: i for i, row in enumerate(recorded_rows)}
        accepted = [row for row in path if row in at]
        pos = self.pos + [rows.pos[row] for row in accepted]
        late = len(pos) - self._wants.recent_queries
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


@dataclass(slots=True)
class CompressionPoint:
    """The input of a policy at a compression point: a sequence between two passes, with the slots to choose from."""

    lm: LM
    kv: KVCache
    query_recorder: QueryRecorder
    guard: ProtectedTokens
    ids: Sequence[int]
    kinds: Tensor  # [T] int8, by position; [0] if the policy does not need kinds
    phase: Phase
    n_prompt: int  # as in LayerContext
    is_whole: bool  # no policy has evicted or moved a slot so far, and no pruner has deferred a token
    policy_state: Any  # the policy's state for this sequence
    pending: int = 0  # id of the pending token
    end: int = 0  # lowest position of later rows
    masks: Masks = ()  # what the policy selected
    _protected: dict[int, Tensor] = field(default_factory=dict)  # by layer, of those requested so far

    @property
    def layers(self) -> range:
        return range(self.lm.n_layers)

    @property
    def full_layers(self) -> list[int]:
        """Layers that a policy compresses: they store slots, and no sliding window evicts them."""
        layers = zip(self.lm.attention_params, self.lm.shapes, strict=True)
        return [i for i, (params, shape) in enumerate(layers) if params.window is None and shape.shared_from is None]

    def layer(self, i: int) -> tuple[Slots, LayerContext]:
        """Return the slots of one layer, which may be a copy. Process one layer after the other."""
        slots = self.kv.slots(i)
        if rank := self.lm.shapes[i].rank:
            slots = replace(slots, v=slots.k[..., :rank])
        self._protected[i] = protected = self.guard.covers(slots.pos, self.kinds)
        recorded = self.query_recorder.of(i, slots.k)
        of_text = self.phase, len(self.ids), self.n_prompt, recorded, self.kinds, protected, self.policy_state
        return slots, LayerContext.of(self.lm, i, *of_text)

    def ask(self, policy: Policy) -> Passes[Masks]:
        """Return the masks of the policy with the protected tokens added."""
        masks = yield from await_passes(policy.select(self))
        return [None if mask is None else _guarded(mask, self._protected[i]) for i, mask in enumerate(masks)]


def _guarded(mask: Tensor, protected: Tensor) -> Tensor:
    """Add the protected slots to a mask; in a mask of levels they get level 0."""
    return mask | protected if mask.dtype is bool_ else mask.masked_fill(protected, 0)
