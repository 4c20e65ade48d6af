"""Deferred tokens, which stopped before a layer and may be revived later: LazyLLM's Aux Cache (arXiv 2407.14057).

The rows of a layer are a subset of those of the layer below, so a token has KV in its lowest layers and in none above.
Its depth and one hidden state, the input of the next layer, are all that is stored.

The paper's rows attend only to the tokens selected for their step. KV of tokens that are not selected rests here, so
the KV cache of a layer has only what its rows attend to; it returns as it is when its token is selected again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.engine.prefill.layerwise import ActiveRows
from kvcli.engine.sequence.commit import commit
from kvcli.kv.slots import Usage, layer_groups
from kvcli.kv.snapshot import SnapshotMismatch, SnapshotReader, State
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.views.borrowing import PositionMaskedCache
from kvcli.methods.prune.pruned_prefill import PrunedPrefill

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.engine.forward_request import ForwardResult, Passes
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.policy import CompressionPoint
    from kvcli.engine.prefill.layerwise import LayerwisePrefill, Stopped
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.kv.slots import KVCache
    from kvcli.methods.prune.protected_tokens import PruneSettings

AT_ONCE = 256  # tokens revived together up to the last layer: each has a mask over all slots
DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64  # of resting KV, by number in a snapshot


class AuxCache(PrunedPrefill):
    """Pruned prefill whose deferred tokens may be revived. For each it has the layer where it stopped and its hidden
    state there."""

    may_revive = True

    def __init__(
        self,
        pair: ModelPair,
        pruning: PruneSettings,
        interval: int,
        cuts: Iterable[int],
        revival: Callable[[LM, KVCache, AuxCache], Choose],
        *,
        revives_before_prompt: bool,
        selects: bool = False,
    ) -> None:
        """`interval`: tokens of an answer between two revival passes, in which `revival` makes the function that
        selects tokens before the layers `cuts`. `revives_before_prompt`: all tokens are revived before the next prompt.
        `selects`: rows attend to selected tokens only, from the last token of a prompt on. Raises BadModel if rows
        cannot be stopped between the layers, or if no layer can score tokens.
        """
        super().__init__(pair, pruning)
        self._interval, self._cuts, self._revival = interval, cuts, revival
        self._revives_before_prompt = revives_before_prompt
        self._selects = selects
        self._resting: Dense | None = None  # KV of computed tokens that rows now do not attend to; None = never any
        self._at: Stopped = {}  # positions rise
        self.is_torn = False  # a revival failed midway: layers do not have the KV of the same tokens

    def __len__(self) -> int:
        return sum(len(pos) for pos, _ in self._at.values())

    @property
    def positions(self) -> list[int]:
        """Positions of all deferred tokens, rising."""
        return sorted(p for pos, _ in self._at.values() for p in pos)

    @property
    def layers(self) -> Iterable[int]:
        """Layers before which deferred tokens stopped."""
        return self._at.keys()

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

    def reaches(self, n: int, of: int) -> int:
        """Return n, or 0 if tokens before n may lack KV."""
        return super().reaches(n, of) if not self.is_torn else 0

    def rewind(self, n: int, of: int) -> None:
        """Abandon a prompt under way. Drop all deferred tokens of a sequence that begins anew."""
        super().rewind(n, of)
        if not n:
            self._at, self._resting, self.is_torn = {}, None, False

    def finish(self, text: GenerationSession, prompt: LayerwisePrefill) -> None:
        """Add the tokens that the prefill deferred."""
        super().finish(text, prompt)
        self.add(prompt.stopped)

    def complete(self, text: GenerationSession) -> Passes[None]:
        """Return resting KV, and revive all tokens before the prefill of another prompt, if the settings say so."""
        self._return_all(text.cache)
        if self._revives_before_prompt:
            yield from self.revive_all(text.cache, text.ids)

    def next_point(self, n: int, n_prompt: int) -> float:
        """Return the token count of the next revival: a multiple of the interval, from the start of the answer on."""
        until = self._interval - (n - n_prompt) % self._interval
        is_due = self.has_deferred if self._selects else bool(self)
        return n + until if is_due else super().next_point(n, n_prompt)

    def compress(self, point: CompressionPoint) -> Passes[None]:
        """Revive the tokens that the pending token attends to, at this point of an answer. The pending token runs in
        the same pass; its KV is not committed. Later rows begin at the first token that remains."""
        n = len(point.ids)
        is_due = (
            self.has_deferred and point.phase != "reading" if self._selects else self and point.phase == "answering"
        )
        if is_due and not (n - point.n_prompt) % self._interval:
            self.is_torn = self._selects  # if the pass fails midway, layers differ in what is selected
            choose = self._revival(self._lm, point.kv, self)
            ids = [*point.ids, point.pending]
            yield from RevivalPass(self._lm, point.kv, ids, self, self._cuts, [n]).run(choose)
        point.end = min([point.end, *self.positions[:1]])

    def revive_all(self, kv: KVCache, ids: Sequence[int]) -> Passes[None]:
        """Revive all tokens up to the last layer, oldest first."""
        self._return_all(kv)
        while some := set(self.positions[:AT_ONCE]):
            yield from RevivalPass(self._lm, kv, ids, self).run(partial(self._onward, some))

    def _onward(self, some: set[int], layer: int, live: ActiveRows, pos: Sequence[int]) -> Selection:
        return pos, [p for p in self.at(layer) if p in some], None

    def rest_except(self, kv: KVCache, layer: int, selected: Tensor) -> None:
        """Leave the KV of the selected positions [n] bool in this layer; that of others rests until it is selected."""
        if self._resting is None:
            self._resting = Dense(self._lm.shapes, kv.dtype, self._lm.device, step=Dense.STEP // 4)
        stay, back = (selected.to(of.device)[of.long()] for of in (kv.slots(layer).pos, self._resting.slots(layer).pos))
        returning = self._resting.evict_except(layer, ~back)
        self._resting.take(layer, kv.evict_except(layer, stay))
        kv.take(layer, returning)

    def _return_all(self, kv: KVCache) -> None:
        resting, self._resting = self._resting, None
        if resting is not None:
            for layer in self._lm.storing:
                kv.take(layer, resting.slots(layer))

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

    def snapshot(self) -> State:
        """Return the deferred tokens by layer."""
        layers: dict[str, State] = {}
        for layer, (pos, vectors) in self._at.items():
            layers[str(len(layers))] = {"layer": layer, "pos": torch.tensor(pos, dtype=torch.int32), "x": vectors}
        found = {**super().snapshot(), "aux_cache": layers}
        if self._resting is None:
            return found
        return found | {"resting": self._resting.snapshot(), "resting_dtype": DTYPES.index(self._resting.dtype)}

    def restore(self, given: SnapshotReader) -> None:
        """Restore a snapshot. Raises SnapshotMismatch."""
        super().restore(given)
        width = self._lm.model.config.get_text_config().hidden_size
        starts = {group.start for group in layer_groups(self._lm.shapes)[1:]}
        for one in given.part("aux_cache").parts(self._lm.n_layers):
            pos = one.positions("pos", None).tolist()
            layer = one.number("layer", self._lm.n_layers - 1)
            if layer not in starts or pos != sorted(set(pos)) or not self.depth.keys().isdisjoint(pos):
                raise SnapshotMismatch("no token stops at that layer")
            vectors = one.tensor("x", self._lm.dtype, len(pos), width)
            self._put(layer, pos, vectors.to(self._lm.device, copy=True))
        if "resting" in given:
            dtype = DTYPES[given.number("resting_dtype", len(DTYPES) - 1)]
            self._resting = Dense(self._lm.shapes, dtype, self._lm.device, step=Dense.STEP // 4)
            self._resting.restore(given.part("resting"))

    def usage(self) -> list[Usage]:
        """Return the bytes of hidden states, by the layer before which tokens stopped, and of resting KV."""
        resting = self._resting.usage() if self._resting is not None else ()
        stopped = [Usage(layer, "deferred", len(pos), x.nbytes) for layer, (pos, x) in self._at.items()]
        return [*stopped, *(replace(use, tier="deferred") for use in resting)]


# Revival of deferred tokens, in one pass for the layers between two at which tokens are selected or stopped. Each row
# attends only to positions before its own.


# positions that continue, positions to revive, and the positions [n] bool to which rows attend from here on (None = as
# in the layer below)
Selection = tuple[Sequence[int], Sequence[int], Tensor | None]
Choose = Callable[[int, ActiveRows, Sequence[int]], Selection]  # a layer, the rows that reached it, their positions


class RevivalPass:
    """A revival pass of deferred tokens. The new KV is committed after the last layer. Layers with no active rows are
    skipped, and the last ones also if only tokens run there whose KV is not committed."""

    def __init__(
        self,
        lm: LM,
        kv: KVCache,
        ids: Sequence[int],
        aux_cache: AuxCache,
        cuts: Iterable[int] = (),
        pos: Sequence[int] = (),
    ) -> None:
        """`cuts`: layers before which tokens are selected. `pos`: rising positions in `ids` of tokens that start at the
        first layer; their KV is not committed."""
        self._lm, self._kv, self._ids, self._aux_cache = lm, kv, ids, aux_cache
        self._starts = sorted({0, *cuts, *aux_cache.layers})
        self._pos, self._hidden = list(pos), torch.empty(0)  # positions and hidden states of active rows
        self._guests = len(pos)  # number of tokens in `pos`, the newest rows
        self._came = set[int]()
        self._stopped: Stopped = {}
        self._selected: Tensor | None = None  # positions to which rows attend in the current layers; None = all
        self._made: list[tuple[Rows, ForwardResult]] = []

    def run(self, choose: Choose) -> Passes[None]:
        """Run the passes, then commit the new KV."""
        for layers in map(range, self._starts, [*self._starts[1:], self._lm.n_layers]):
            if layers.start:
                self._enter(layers, choose)
            n, is_last = len(self._pos), layers.stop == self._lm.n_layers
            if not n or (is_last and n == self._guests):
                continue
            rows = replace(Rows.chain([self._ids[p] for p in self._pos], 0), pos=list(self._pos))
            given = self._hidden if layers.start else None
            result = yield ForwardRequest(
                self._lm, rows, PositionMaskedCache(self._kv), record_queries=[n - 1], layers=layers, hidden=given
            )
            self._made.append((rows, result))
            if result.hidden is not None:
                self._hidden = result.hidden
        self._store()

    def _enter(self, layers: range, choose: Choose) -> None:
        layer, pos, hidden = layers.start, self._pos, self._hidden
        fresh, queries = None, None
        if self._made and pos:
            result = self._made[-1][1]
            fresh, queries = result.fresh[layer - 1], result.queries[-1]
        on, back, selected = choose(layer, ActiveRows(range(len(pos)), fresh, queries), pos)
        self._selected = selected if selected is not None else self._selected
        if self._selected is not None:
            for each in (each for each in self._lm.storing if each in layers):
                self._aux_cache.rest_except(self._kv, each, self._selected)
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

    def _store(self) -> None:
        """Commit the new KV. An error here leaves the cache inconsistent (`is_torn`), because only some
        layers have the KV of revived tokens."""
        self._aux_cache.is_torn = True
        for rows, result in self._made:
            commit(self._kv, rows, result, range(rows.n_rows - self._guests))
        self._aux_cache.remove(self._came)
        self._aux_cache.add(self._stopped)
        self._aux_cache.is_torn = False
