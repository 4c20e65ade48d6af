"""Draft model that keeps the chunks to which the target model attends (SpecExtend, arXiv 2505.20776).

Its KV cache has the first tokens, the newest tokens, and the chunks with the highest attention mass of the last
accepted token; the chunks are chosen again from time to time. Other chunks are kept in a chunk store or prefilled when
they are first chosen, so a new choice costs a copy. The chunks determine which draft tokens are accepted, and never the
answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.drafts.draft_models.separate_model import SeparateDraftModel
from kvcli.engine.forward_request import ChosenRows, ForwardRequest, NeededTensors, Passes, RanRow, Rows
from kvcli.engine.sequence.commit import commit
from kvcli.kernels.attention_mass import attention_mass
from kvcli.kernels.rope import rotate, unrotate
from kvcli.kv.slots import AttentionParams, KVCache, LayerShape, Slots, Usage
from kvcli.kv.tiers.dense import Dense

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import DraftContext
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.stats import Step

# Chunk scores: attention of the target model's last accepted token to each chunk (SpecExtend's cross-model retrieval).
# The paper makes the last layer of the pass dense for all rows. Here the softmax of one row is computed after the pass,
# over the stored keys: this needs memory for one row, works with every KV format, and changes no bit of the pass.

STAYS = 1.1  # a stored chunk is replaced by one with more than this multiple of its score


@dataclass(frozen=True, slots=True)
class Query:
    """Query vectors of one accepted row, by layer."""

    of: Mapping[int, Tensor]  # [H, 1, D]
    at: int  # position of the row


def relevance(
    kv: KVCache, attention_params: Mapping[int, AttentionParams], query: Query, first: int, size: int
) -> list[float]:
    """Return the attention mass of the row on each whole chunk of `size` tokens after the `first` tokens, summed over
    all heads of the layers in `attention_params`. Slots that are not in the cache have none."""
    n = max(0, query.at + 1 - first) // size
    total: Tensor | None = None
    for layer, params in attention_params.items():
        s, q = kv.slots(layer), query.of[layer]
        at = torch.tensor([query.at], device=q.device)
        mass = attention_mass(q, at, s.k, s.pos, params.scale, softcap=params.softcap, window=params.window)  # [K, S]
        chunk = (s.pos - first).div(size, rounding_mode="floor").long()
        chunk = chunk.where((chunk >= 0) & (chunk < n), n)  # slots outside of all chunks are summed in one more entry
        if total is None:
            total = mass.new_zeros(n + 1)
        total.index_add_(0, chunk.flatten(), mass.flatten())
    return [] if total is None else total[:n].tolist()


def best(score: Sequence[float], among: Sequence[int], held: Collection[int], most: int) -> list[int]:
    """Return the `most` chunks with the highest scores, best first; of equal ones the newest come first."""

    def worth(chunk: int) -> tuple[float, int]:
        seen = score[chunk] if chunk < len(score) else 0.0
        return seen * (STAYS if chunk in held else 1.0), chunk

    return sorted(among, key=worth, reverse=True)[:most]


# KV of a sequence by chunk, stored beside the draft model's cache, to restore evicted chunks without a pass.


# k [K, S, D], v [K, S, E] of one layer; keys are stored before rotary embedding if positions are contiguous
KV = tuple[Tensor, Tensor]


class ChunkStore:
    """Chunks of `size` tokens by number, on any device. A chunk is one tensor over all layers and is copied at once."""

    def __init__(self, shapes: Sequence[LayerShape], size: int, device: torch.device | str) -> None:
        """`shapes`: of the layers that store KV."""
        self._shapes, self._size, self._device = shapes, size, device
        self._held: dict[int, Tensor] = {}  # [F]
        self._end = 0  # upper bound of the chunk numbers

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._held

    def put(self, first: int, layers: Sequence[KV]) -> None:
        """Store the chunks from number `first` on; every layer has the same tokens, in whole chunks."""
        held = [t for of, kv in zip(self._shapes, layers, strict=True) for t in kv[: _tensors(of)]]
        rows = [t.view(len(t), -1, self._size, t.shape[2]).movedim(1, 0).flatten(1) for t in held]
        for chunk, one in enumerate(torch.cat(rows, 1).to(self._device), first):
            self._held[chunk], self._end = one, max(self._end, chunk)

    def of(self, chunks: Sequence[int], device: torch.device) -> list[KV]:
        """Return these chunks, at least one, concatenated per layer."""
        held = torch.stack([self._held[chunk] for chunk in chunks]).to(device)  # [M, F]
        each = [(s.n_kv_heads, self._size, dim) for s in self._shapes for dim in (s.k_dim, s.v_dim)[: _tensors(s)]]
        parts = torch.split(held, [a * b * c for a, b, c in each], 1)
        flat = iter([part.view(-1, *of).movedim(0, 1).flatten(1, 2) for part, of in zip(parts, each, strict=True)])
        return [(k := next(flat), k if of.rank else next(flat)) for of in self._shapes]

    def crop(self, n: int) -> None:
        """Remove chunk n and all after it."""
        if n <= self._end:
            self._held = {chunk: one for chunk, one in self._held.items() if chunk < n}
            self._end = n - 1

    def usage(self) -> list[Usage]:
        """Memory of all layers as one entry."""
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in self._held.values()}
        size = sum(storage.nbytes() for storage in storages.values())
        return [Usage(0, "draft chunks", len(self._held) * self._size, size)] if size else []


def _tensors(of: LayerShape) -> int:
    """Return the number of stored tensors: keys and values, or one latent that is both."""
    return 1 if of.rank else 2


# Triggers that decide when chunks are scored again.

LEAST, MOST = 2, 32  # engine steps between two scorings
FALL = 0.15  # drop of the recent acceptance rate of first draft tokens below the long-term one
DOUBT = 0.5  # share of the average confidence below which the draft model counts as unsure
TRIED, WAITED = 3, 8  # scorings without effect, each watched for WAITED steps, after which only periodic ones remain


class Trigger:
    """Trigger: observes every step and decides when the next scoring is due. The first one is due at once, and with
    this trigger the others after a fixed number of steps."""

    def __init__(self, rounds: int) -> None:
        """`rounds`: engine steps from one scoring to the next, at least."""
        self._rounds, self._since = rounds, math.inf

    @property
    def is_near(self) -> bool:
        """True if a scoring may be due after the coming step."""
        return self._since + 1 >= self._rounds

    @property
    def is_due(self) -> bool:
        return self._since >= self._rounds

    def think(self, sure: float) -> None:
        """Record the draft model's probability of the coming step's first draft token."""

    def observe(self, was_right: bool | None) -> None:
        """Record if the first draft token of a finished step was accepted; None = there was none."""
        self._since += 1

    def looked(self) -> None:
        """Record that chunks were scored."""
        self._since = 0


class Adaptive(Trigger):
    """Trigger that is due when acceptance drops or the draft model is unsure, and periodically in any case.

    SpecExtend announces an adaptive trigger without a description. In its tables a fixed period of 4 or 128 rounds
    differs by a hundredth, so this trigger reacts to sudden drops only.
    """

    def __init__(self) -> None:
        super().__init__(LEAST)
        self._short = self._long = self._sure = 0.0
        self._heard = 0  # steps with a draft token
        self._misses = 0  # in a row
        self._is_lost = False
        self._before, self._rose = 0.0, True  # acceptance at the last scoring; was it higher since?
        self._vain = 0  # scorings in a row that were triggered and changed nothing

    @property
    def is_due(self) -> bool:
        if self._since >= MOST:
            return True
        if not super().is_due or self._vain >= TRIED:
            return False
        return self._is_lost or self._misses >= 2 or self._short < self._long - FALL

    def think(self, sure: float) -> None:
        self._is_lost = sure < DOUBT * self._sure
        self._sure = 0.9 * self._sure + 0.1 * sure if self._sure else sure

    def observe(self, was_right: bool | None) -> None:
        self._since += 1
        if was_right is None:
            return
        if not self._heard:
            self._short = self._long = float(was_right)
        self._heard += 1
        self._short, self._long = 0.7 * self._short + 0.3 * was_right, 0.97 * self._long + 0.03 * was_right
        self._misses = 0 if was_right else self._misses + 1
        self._rose |= self._since <= WAITED and self._short > self._before

    def looked(self) -> None:
        self._vain = 0 if self._rose else self._vain + 1
        self._rose = self._since >= MOST  # a periodic scoring was not triggered, so it cannot fail
        self._since, self._before, self._misses, self._is_lost = 0, self._short, 0, False


def trigger(setting: str) -> Trigger:
    """Return the trigger of the setting `spec.retrieval`."""
    return Adaptive() if setting == "adaptive" else Trigger(int(setting.partition(":")[2]))


SPARE = 2  # chunks by which the newest tokens may grow before chunks are chosen again
LEFT = 96  # tokens of context before chunks that are prefilled separately
AT_ONCE = 4  # chunks prefilled separately before one draft
ALIKE = 0.9  # share of the chosen chunks' score already in the cache from which on no copy is made


def scored_layers(target: LM, layers: int) -> dict[int, AttentionParams]:
    """Return the last `layers` layers of the target model, of those with full attention if it has any."""
    whole = [layer for layer, params in enumerate(target.attention_params) if params.window is None]
    return {layer: target.attention_params[layer] for layer in (whole or range(target.n_layers))[-layers:]}


class ChunkRetrievalModel(SeparateDraftModel):
    """Draft model whose cache has the first `sinks` tokens, the chosen chunks, and the sequence from `_solid` on
    without holes; at most `working` tokens, draft tokens aside."""

    def __init__(
        self,
        lm: LM,
        working: int,
        sinks: int,
        *,
        sees: int | None,
        closes: bool,
        size: int,
        recent: int,
        attention_params: Mapping[int, AttentionParams],
        trigger: Callable[[], Trigger],
        is_far: bool = False,
    ) -> None:
        """Parameters beside those of `SeparateDraftModel`: `size`, tokens of a chunk; `recent`, newest tokens kept;
        `attention_params`, target layers whose queries are recorded; `is_far`, whether other chunks are on the host."""
        self._size, self._recent, self._attention_params, self._new_trigger = size, recent, attention_params, trigger
        self._most = (working - sinks - recent - size) // size - SPARE  # chunks beside the newest tokens
        assert self._most > 0, "working is too small for chunks"
        self._is_far, self._working = is_far, working
        super().__init__(lm, working, sinks, sees=sees, closes=closes)

    def discard_cache(self) -> None:
        super().discard_cache()
        shapes = [self.lm.shapes[layer] for layer in self._layers]
        self._chunks = ChunkStore(shapes, self._size, "cpu" if self._is_far else self.lm.device)
        self._held: Collection[int] = ()  # chunks that are whole in the cache after the first tokens
        self._ask()

    def usage(self) -> list[Usage]:
        return [*super().usage(), *self._chunks.usage()]

    # ---- the sequence and its scores ----

    def start(self, ids: Sequence[int]) -> None:
        self._ask()
        super().start(ids)

    def _ask(self) -> None:
        """Reset the scores: no chunk of this sequence is scored yet."""
        self._trigger = self._new_trigger()
        self._query: Query | None = None  # queries of the last accepted row, until they are used for scoring
        self._context: DraftContext | None = None  # cache of the target model in the running step
        self._score: Sequence[float] = ()  # scores by chunk, of the last scoring

    def _cut(self, n: int) -> None:
        self._chunks.crop(self._number(n))
        if self._sinks <= n < self._solid:
            self._return_to(n)
        super()._cut(n)
        self._held = self._held if self._n else ()

    @property
    def needs(self) -> NeededTensors:
        return NeededTensors(queries=len(self._text) > self._working and self._trigger.is_near)

    def bind(self, context: DraftContext | None) -> None:
        self._context = context

    def extend(self, new: Sequence[int]) -> None:
        super().extend(new)
        self._context = None  # the cache is no longer that of the sequence

    def _looks(self) -> bool:
        """Score the chunks if due and the last accepted token's query is recorded; True if chunks may change."""
        past, query = self._context, self._query
        if past is None or query is None or query.at != len(self._text) - 2 or not self._trigger.is_due:
            return False
        score = relevance(past.cache, self._attention_params, query, self._sinks, self._size)
        self._score = self.lm.ranks.reduce(torch.tensor(score, dtype=torch.float64)).tolist()
        self._trigger.looked()
        return self._n > self._sinks

    def observe(self, step: Step) -> None:
        row = step.path[-1]
        if step.queries:
            of = {layer: step.queries[layer][:, row : row + 1].clone() for layer in self._attention_params}
            self._query = Query(of, step.rows.pos[row])
        self._trigger.observe(step.n_accepted > 0 if step.n_drafted else None)

    # ---- passes ----

    def draft_ahead(self, rows: ChosenRows, want: int = 1, most: float = math.inf) -> Passes[Sequence[RanRow]]:
        """Run the first pass alone, because the host reads how sure the draft model is."""
        self._cut(len(self._text) - 1)
        if self._looks():
            yield from self._choose()
        found = yield from super().draft_ahead((), want, most)
        of_last = found[0][0].hook_output(want - 1)
        scores = of_last[len(of_last) // 2 :]
        self._trigger.think(1 / sum(exp(score - scores[0]) for score in scores))
        if want == 1 and self._looks():  # the draft model is unsure: choose chunks before it drafts, not after
            self._cut(len(self._text) - 1)
            yield from self._choose()
            found = yield from super().draft_ahead(())
        return found

    def _choose(self) -> Passes[None]:
        """Choose the chunks with the highest scores, prefill the missing ones, and rebuild the cache."""
        self._shelve()
        first, most = self._tail(self.n_uncovered)
        among = range(max(0, self._number(first)))
        wanted = best(self._score, among, self._held, most)
        for some in _runs(sorted([chunk for chunk in wanted if chunk not in self._chunks][:AT_ONCE])):
            yield from self._study(some)
        chosen = best(self._score, [chunk for chunk in among if chunk in self._chunks], self._held, most)
        known = sum(self._score[chunk] for chunk in chosen if chunk in self._held)
        if known < ALIKE * sum(self._score[chunk] for chunk in chosen):
            self._lay(chosen, first)

    def _study(self, chunks: range) -> Passes[None]:
        """Prefill these chunks separately, after the first tokens of the sequence and a few tokens before them."""
        first, end = (self._sinks + at * self._size for at in (chunks.start, chunks.stop))
        left = max(self._sinks, first - LEFT)
        apart = Dense(self.lm.shapes, self.lm.dtype, self.lm.device)
        for layer in self._layers:
            s = self._kv.slots(layer)
            k, v, pos = (t[:, : self._sinks] for t in (s.k, s.v, s.pos))
            apart.put(layer, Slots(k.clone(), v.clone(), pos.clone()))
        known = [min(i, self.lm.vocab - 1) for i in self._text[left:end]]
        rows = Rows.chain(known, left if self._turns is None else self._sinks)
        commit(apart, rows, (yield ForwardRequest(self.lm, rows, apart, is_prompt=True)), range(rows.n_rows))
        self._chunks.put(chunks.start, [self._raw(apart, layer, end - first, 0) for layer in self._layers])

    # ---- the tokens that are kept ----

    def _number(self, at: int) -> int:
        """Return the number of the chunk that contains position `at`, or the next one if `at` is a chunk's end."""
        return (at - self._sinks) // self._size

    def _tail(self, room: int) -> tuple[int, int]:
        """Return the first of the newest tokens to keep, and how many chunks fit beside them and `room` more tokens."""
        has = max(0, self._working - self._sinks - room)
        first = self._sinks + max(0, self._number(self._n - min(self._recent, has))) * self._size
        while self._n - first > has:
            first += self._size
        first = min(max(first, self._solid), self._n)
        return first, max(0, min(self._most, (has - (self._n - first)) // self._size))

    def _make_room(self, n: int) -> None:
        if self._kv.n_slots(self._layers[0]) + n > self._working:
            self._shelve()
            first, most = self._tail(n)
            among = [chunk for chunk in range(max(0, self._number(first))) if chunk in self._chunks]
            self._lay(best(self._score, among, self._held, most), first)

    def _pass_over(self, most: float) -> Passes[None]:
        if self.n_uncovered > most:
            self._shelve()
            self._held = () if most >= self._newest else self._held
        yield from super()._pass_over(most)

    def _settle(self, newest: float) -> None:
        self._shelve()
        if self._kv.n_slots(self._layers[0]) > self._sinks + newest:
            self._held = ()
        super()._settle(newest)

    def _shelve(self) -> None:
        """Store the chunks that the cache holds without holes and the chunk store lacks."""
        first = max(0, -((self._sinks - self._solid) // self._size))
        new = [chunk for chunk in range(first, self._number(self._n)) if chunk not in self._chunks]
        for some in _runs(new):
            behind = self._n - self._sinks - some.stop * self._size
            n = len(some) * self._size
            self._chunks.put(some.start, [self._raw(self._kv, layer, n, behind) for layer in self._layers])

    def _raw(self, kv: Dense, layer: int, n: int, behind: int) -> KV:
        """Return n slots with `behind` slots after them; keys before rotary embedding if positions are contiguous."""
        s = kv.slots(layer)
        at = slice(s.n_slots - behind - n, s.n_slots - behind)
        k, rotary = s.k[:, at], self._turns[layer] if self._turns is not None else None
        return (k if rotary is None else unrotate(_wide(k), s.pos[:, at], rotary).to(k.dtype)), s.v[:, at]

    def _lay(self, chosen: Sequence[int], first: int) -> None:
        """Rebuild the cache from the first tokens, these chunks, and the sequence from `first` on."""
        chosen, size, sinks = sorted(chosen), self._size, self._sinks
        gap = first - sinks - len(chosen) * size if self._turns is not None else 0
        starts = torch.tensor([sinks + chunk * size for chunk in chosen], dtype=torch.int32, device=self.lm.device)
        pos = (starts.unsqueeze(1) + torch.arange(size, dtype=torch.int32, device=self.lm.device)).flatten()  # [C]
        if self._turns is not None:
            pos = torch.arange(sinks, sinks + pos.shape[0], dtype=torch.int32, device=self.lm.device)
        held = self._chunks.of(chosen, self.lm.device) if chosen else []
        for i, layer in enumerate(self._layers):
            s = self._kv.slots(layer)
            tail = s.n_slots - (self._n - first)
            parts = [(s.k[:, :sinks], s.v[:, :sinks], s.pos[:, :sinks])]
            rotary = self._turns[layer] if self._turns is not None else None
            if held:
                (k, v), at = held[i], pos.expand(s.pos.shape[0], -1)
                parts.append((k if rotary is None else rotate(_wide(k), at, rotary).to(k.dtype), v, at))
            k, at = s.k[:, tail:], s.pos[:, tail:]
            if self._turns is not None and gap != self._gap:
                k, at = self._moved(k, at, rotary, gap - self._gap)
            parts.append((k, s.v[:, tail:], at))
            self._kv.put(layer, Slots(*(torch.cat(each, 1) for each in zip(*parts, strict=True))))
        self._held, self._solid, self._gap = frozenset(chosen), first, gap

    def _return_to(self, n: int) -> None:
        """Handle a rewind into the chosen chunks: restore the last whole chunks of the sequence, if they are stored."""
        end = self._number(n)
        near = range(max(0, end - math.ceil(self._recent / self._size)), end)
        if not near or not all(chunk in self._chunks for chunk in near):
            return
        self._n = self._solid = self._sinks + end * self._size
        among = [chunk for chunk in range(near.start) if chunk in self._chunks]
        self._lay([*best(self._score, among, self._held, self._most), *near], self._n)


def _runs(chunks: Sequence[int]) -> Iterator[range]:
    """Split rising numbers into ranges without gaps."""
    first = 0
    for i, chunk in enumerate(chunks):
        if i + 1 == len(chunks) or chunks[i + 1] != chunk + 1:
            yield range(chunks[first], chunk + 1)
            first = i + 1


def _wide(k: Tensor) -> Tensor:
    return k.to(torch.promote_types(k.dtype, torch.float32))
