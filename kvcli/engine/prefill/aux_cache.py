"""Deferred tokens, which stopped before a layer and may be revived later: LazyLLM's Aux Cache (arXiv 2407.14057).

The rows of a layer are a subset of those of the layer below, so a token has KV in its lowest layers and in none above.
Its depth and one hidden state, the input of the next layer, are all that is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvcli.engine.forward_request import ForwardRequest, ForwardResult, Passes, Rows
from kvcli.engine.sequence.commit import commit
from kvcli.kernels.attend import attend
from kvcli.kv.slots import AttentionParams, KVCache, Usage, attend_new_only, layer_groups
from kvcli.kv.snapshot import SnapshotMismatch, SnapshotReader, State
from kvcli.kv.tiers.device_tables import DeviceCache

if TYPE_CHECKING:
    from kvcli.engine.forward_request import NewKV
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.policy import ProtectedTokens
    from kvcli.kernels.attend_invariant import NewRows
    from kvcli.kernels.merge_attention import PartialAttention
    from kvcli.kv.footprint import Footprint, ModelSizes

# Protocol of prompt pruning: which tokens continue between layers, and the data to select them by.


@dataclass(frozen=True, slots=True)
class ActiveRows:
    """The rows that reached a layer, all of which ran through the layer below."""

    rows: Sequence[int]  # rising
    fresh: NewKV | None  # new KV of the layer below; None before the first layer, or if it is committed already
    queries: Tensor | None  # [H, n, D], queries of the recorded rows there


# For one prompt: a layer and the rows that reached it -> the rows that continue, at least one and all recorded ones;
# None = all. A deferred row runs through none of the later layers (LazyLLM, arXiv 2407.14057).
Pruner = Callable[[int, ActiveRows], Sequence[int] | None]

# a layer, the rows that reached it and their positions -> positions that continue, and positions to revive
Choose = Callable[[int, ActiveRows, Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class PromptPruning(Protocol):
    """Protocol of the `[prune]` table of a profile, shared by all sequences."""

    @property
    def describe_read(self) -> str:
        """Describe how much of a long prompt runs through all layers, in words; "" = all of it."""

    def describe(self, lm: LM) -> str:
        """Describe the effect on prompts of this model, in words; "" = none. Raises BadModel if the model is not
        supported."""

    @property
    def n_scoring_rows(self) -> int:
        """Number of newest rows whose queries score the others."""

    @property
    def compression_interval(self) -> int | None:
        """Tokens of an answer between two compression points that may revive tokens; None = deferred tokens are
        dropped."""

    @property
    def revives_before_prompt(self) -> bool:
        """True if all deferred tokens are revived before the next prefill."""

    def footprint(self, n: int, of: ModelSizes) -> Footprint:
        """Return the most bytes of hidden states of deferred tokens, of n."""

    @property
    def guard(self) -> ProtectedTokens:
        """Tokens that run through every layer whatever their score."""

    def group_size(self, n: int, chunk: int) -> int:
        """Return how many of the n remaining prompt tokens are scored together."""

    def bind(
        self, lm: LM, cache: KVCache, rows: Rows, must: set[int], part: int
    ) -> Passes[Pruner | None] | Pruner | None:
        """Return the pruner for a prefill of these rows, perhaps after a scoring pass; None = all rows continue.

        `must`: rows that run through every layer: protected and recorded ones. `part`: most rows of a pass.
        """

    def bind_revival(self, lm: LM, cache: KVCache, aux_cache: AuxCache) -> Choose:
        """Return the function that selects tokens to revive in a pass of the newest token (`RevivalPass`). Called only
        if `compression_interval` is not None."""


AT_ONCE = 256  # tokens revived together up to the last layer: each has a mask over all slots


class AuxCache:
    """Aux cache of one sequence (LazyLLM): for each deferred token, the layer where it stopped and its hidden state
    there."""

    def __init__(self, lm: LM, pruning: PromptPruning | None) -> None:
        self._lm, self._pruning = lm, pruning
        self._at: Stopped = {}  # positions rise
        self.is_torn = False  # a revival failed midway: only some layers have the KV of the revived tokens

    def __len__(self) -> int:
        return sum(len(pos) for pos, _ in self._at.values())

    @property
    def positions(self) -> list[int]:
        """Positions of all deferred tokens, rising."""
        return sorted(p for pos, _ in self._at.values() for p in pos)

    @property
    def depth(self) -> Mapping[int, int]:
        """Number of layers with KV, by position."""
        return {p: layer for layer, (pos, _) in self._at.items() for p in pos}

    def at(self, layer: int) -> list[int]:
        """Return the positions of the tokens that stopped before this layer, rising."""
        return self._at[layer][0] if layer in self._at else []

    def hidden(self, layer: int, pos: Sequence[int]) -> Tensor:
        """Return the hidden states [n, E] of tokens that stopped before this layer."""
        stopped, vectors = self._at[layer]
        index = {p: i for i, p in enumerate(stopped)}
        return vectors[[index[p] for p in pos]]

    def clear(self) -> None:
        """Drop all deferred tokens, for a new sequence."""
        self._at, self.is_torn = {}, False

    # ---- a prompt ----

    @property
    def may_revive(self) -> bool:
        """True if deferred tokens may be revived later."""
        return self._pruning is not None and self._pruning.compression_interval is not None

    def before_prompt(self, kv: KVCache, ids: Sequence[int]) -> Passes[None]:
        """Revive all tokens before the prefill of another prompt, if pruning says so."""
        if self._pruning is not None and self._pruning.revives_before_prompt:
            yield from self.revive_all(kv, ids)

    # ---- revival ----

    @property
    def compression_interval(self) -> int | None:
        """Tokens of an answer between two compression points that may revive tokens; None = tokens are never
        revived."""
        return self._pruning.compression_interval if self._pruning is not None and self else None

    def revive(self, kv: KVCache, ids: Sequence[int], written: int) -> Passes[None]:
        """Revive the tokens that the pending token attends to, at this point of the answer. The pending token runs in
        the same pass; its KV is not committed."""
        if self._pruning is None or self.compression_interval is None or written % self.compression_interval:
            return
        revival_pass = RevivalPass(self._lm, kv, ids, self, [len(ids) - 1])
        yield from revival_pass.go(self._pruning.bind_revival(self._lm, kv, self))
        revival_pass.store()

    def revive_all(self, kv: KVCache, ids: Sequence[int]) -> Passes[None]:
        """Revive all tokens up to the last layer, oldest first."""
        while some := set(self.positions[:AT_ONCE]):
            revival_pass = RevivalPass(self._lm, kv, ids, self)
            yield from revival_pass.go(partial(self._onward, some))
            revival_pass.store()

    def _onward(
        self, some: set[int], layer: int, live: ActiveRows, pos: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        return pos, [p for p in self.at(layer) if p in some]

    def remove(self, came: set[int]) -> None:
        """Remove revived tokens."""
        for layer, (pos, vectors) in list(self._at.items()):
            stay = [i for i, p in enumerate(pos) if p not in came]
            self._put(layer, [pos[i] for i in stay], vectors[stay])

    def add(self, stopped: Stopped) -> None:
        """Add deferred tokens."""
        for layer, (pos, vectors) in stopped.items():
            both, joined = [*self.at(layer), *pos], vectors
            if layer in self._at:
                joined = torch.cat((self._at[layer][1], vectors))
            self._put(layer, sorted(both), joined[sorted(range(len(both)), key=both.__getitem__)])

    def _put(self, layer: int, pos: list[int], vectors: Tensor) -> None:
        self._at[layer] = pos, vectors
        if not pos:
            del self._at[layer]

    def state(self) -> State:
        """Return a snapshot; between passes only."""
        found: dict[str, State] = {}
        for layer, (pos, vectors) in self._at.items():
            found[str(len(found))] = {"layer": layer, "pos": torch.tensor(pos, dtype=torch.int32), "x": vectors}
        return found

    def restore(self, given: SnapshotReader) -> None:
        """Restore a snapshot. Raises SnapshotMismatch."""
        self.clear()
        width = self._lm.model.config.get_text_config().hidden_size
        starts = {group.start for group in layer_groups(self._lm.shapes)[1:]}
        for one in given.parts(self._lm.n_layers):
            pos = one.positions("pos", None).tolist()
            layer = one.number("layer", self._lm.n_layers - 1)
            if layer not in starts or pos != sorted(set(pos)) or not self.depth.keys().isdisjoint(pos):
                raise SnapshotMismatch("no token stops at that layer")
            vectors = one.tensor("x", self._lm.dtype, len(pos), width)
            self._put(layer, pos, vectors.to(self._lm.device, copy=True))

    def usage(self) -> list[Usage]:
        """Return the bytes, by the layer before which the tokens stopped."""
        return [Usage(layer, "deferred", len(pos), x.nbytes) for layer, (pos, x) in self._at.items()]


# Run tokens through the model one layer per pass, so that deferred tokens (LazyLLM) can join at the layer where they
# stopped. Each row attends only to positions before its own.


Stopped = dict[int, tuple[list[int], Tensor]]  # layer before which they stopped -> positions, hidden states [n, E]


class RevivalPass:
    """A revival pass of deferred tokens. The new KV is committed after the last layer. Layers with no active rows are
    skipped."""

    def __init__(self, lm: LM, kv: KVCache, ids: Sequence[int], aux_cache: AuxCache, pos: Sequence[int] = ()) -> None:
        """`pos`: rising positions in `ids` of tokens that start at the first layer; their KV is not committed."""
        self._lm, self._kv, self._ids, self._aux_cache = lm, kv, ids, aux_cache
        self._pos, self._hidden = list(pos), torch.empty(0)  # positions and hidden states of active rows
        self._guests = len(pos)  # number of tokens in `pos`, the newest rows
        self._came, self._stopped = set[int](), Stopped()
        self._made: list[tuple[Rows, ForwardResult]] = []

    def go(self, choose: Choose) -> Passes[None]:
        """Run one pass per layer."""
        for layers in layer_groups(self._lm.shapes):
            if layers.start:
                self._enter(layers.start, choose)
            if not (n := len(self._pos)):
                continue
            rows = replace(Rows.chain([self._ids[p] for p in self._pos], 0), pos=list(self._pos))
            given = self._hidden if layers.start else None
            result = yield ForwardRequest(
                self._lm, rows, PositionMaskedCache(self._kv), record_queries=[n - 1], layers=layers, hidden=given
            )
            self._made.append((rows, result))
            if result.hidden is not None:
                self._hidden = result.hidden

    def _enter(self, layer: int, choose: Choose) -> None:
        pos, hidden = self._pos, self._hidden
        fresh, queries = None, None
        if self._made and pos:
            result = self._made[-1][1]
            fresh, queries = result.fresh[layer - 1], result.queries[-1]
        on, back = choose(layer, ActiveRows(range(len(pos)), fresh, queries), pos)
        stay = set(on)
        if out := [i for i, p in enumerate(pos) if p not in stay]:
            self._stopped[layer] = [pos[i] for i in out], hidden[out]
            at = [i for i, p in enumerate(pos) if p in stay]
            pos, hidden = [pos[i] for i in at], hidden[at]
        if back:
            vectors, both = self._aux_cache.hidden(layer, back), [*pos, *back]
            order = sorted(range(len(both)), key=both.__getitem__)
            pos, hidden = sorted(both), (torch.cat((hidden, vectors)) if self._pos else vectors)[order]
            self._came |= set(back)
        self._pos, self._hidden = pos, hidden

    def store(self) -> None:
        """Commit the new KV at the end. An error here leaves the cache inconsistent (`is_torn`), because only some
        layers have the KV of revived tokens."""
        self._aux_cache.is_torn = True
        for rows, result in self._made:
            commit(self._kv, rows, result, range(rows.n_rows - self._guests))
        self._aux_cache.remove(self._came)
        self._aux_cache.add(self._stopped)
        self._aux_cache.is_torn = False


class PositionMaskedCache:
    """A KV cache for rows that may be older than stored slots: each row attends only to positions before its own."""

    def __init__(self, store: KVCache) -> None:
        self._store, self.dtype = store, store.dtype

    def device_tables(self, rows: int, more: int = 0) -> DeviceCache:
        """Return the reason why passes over this cache are not captured."""
        return DeviceCache(why_not="revived tokens are older than stored ones")

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N]: one part over the cache, the others over the
        new KV."""
        s = self._store.slots(layer)
        rows = torch.tensor(pos, dtype=s.pos.dtype, device=s.pos.device).view(1, -1, 1)
        at = s.pos.unsqueeze(1)  # [K, 1, S]
        mask = (at >= 0) & (at < rows)
        if params.window is not None:
            mask &= at > rows - params.window
        return [attend(q, s.k, s.v, params.scale, softcap=params.softcap, mask=mask), *attend_new_only(q, params, own)]

    def usage(self) -> list[Usage]:
        """No memory: the slots belong to the wrapped cache."""
        return []
