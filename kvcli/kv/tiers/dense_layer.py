"""A dense layer: keys and values of all heads in full precision, in one buffer with an extent for each head.

While all heads have the same slots, their extents are equal and they share one row of positions. Once they differ, each
head has positions of its own and an extent of its own size, so that evicted slots free memory: a layer takes the bytes
of its slots and a little spare capacity per head. Heads of about the same length get the same capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import add, gt

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import BLOCK, NewRows, StoredKV, attend_stored_and_new, serves
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import AttentionParams, LayerShape, Slots, attend_new_only, last, window_start, zeros_on_demand
from kvcli.kv.snapshot import SnapshotReader, State
from kvcli.kv.tiers.device_tables import DeviceLayer, grow_size, stays


@dataclass(frozen=True, slots=True)
class HeadExtents:
    """Position of each head in the buffer."""

    start: list[int]  # by head, in slots
    room: list[int]  # by head, capacity in slots
    order: list[int]  # heads in buffer order: heads of equal capacity are adjacent
    total: int  # slots of all heads

    @staticmethod
    def of(lengths: Sequence[int], step: int, least: int = 0) -> HeadExtents:
        """Compute extents with spare capacity for heads of these lengths, at least `least` slots each."""
        return HeadExtents.laid([max(least, room_of(n, step)) for n in lengths])

    @staticmethod
    def laid(room: list[int]) -> HeadExtents:
        """Compute extents of these capacities."""
        order = sorted(range(len(room)), key=lambda head: room[head])
        start, total = [0] * len(room), 0
        for head in order:
            start[head], total = total, total + room[head]
        return HeadExtents(start, room, order, total)

    def runs(self) -> list[list[int]]:
        """Return groups of heads of equal capacity, in buffer order."""
        return [list(heads) for _, heads in groupby(self.order, key=lambda head: self.room[head])]


class DenseLayer:
    """Keys and values of all heads. Attention also reads the spare capacity of each, which is therefore finite.

    Positions are on the host for any device, so that finding the start of a sliding window needs no synchronization.
    """

    k: Tensor  # [T, D], of all heads
    v: Tensor  # [T, E]; if values equal keys (MLA), `k` itself
    pos: Tensor  # int32 on the CPU: [room] if the heads have the same slots, else [T] beside `k`; written by `_note`

    def __init__(self, slots: Slots, step: int, slides: bool = False) -> None:
        """Keep the keys and values of `slots` if all heads have the same ones; copy others, which may be empty slots.

        `step`: slots by which the layer grows. `slides`: it has a sliding window, so its first slot may not be the
        first token.
        """
        self._step, self._slides = step, slides
        self._lies: StoredKV | None = None  # last result of `run`: the buffers, None after they are replaced
        self._lying: DeviceLayer | None = None  # last result of `device_tables`
        self._there: Tensor | None = None  # `pos` on the device of the keys, if it was read there
        self._unsent = 0  # newest slots of each head whose positions are not in `_there` yet
        self._unnoted = 0  # newest slots of each head whose positions, up to `_highest`, are not in `pos` yet
        self._highest, self.ordered = -1, True  # position; positions increase with the slot index in every head
        # evicted slots before the first; the other slots keep their place in the blocks of batch-invariant kernels
        self.gone = 0
        n_kv, pos = len(slots.pos), slots.pos.cpu()
        self.lengths, self.is_even = [0] * n_kv, agree(pos)  # slots by head; all heads have the same slots
        # if heads have the same slots: `k` and `v`, one if they are equal, as views [K, room, ..]
        self._by_head: list[Tensor] = []
        if self.is_even:
            self.k, self.v = slots.each(lambda t: t.contiguous().flatten(0, 1))
            self._by_head = [t.view(n_kv, slots.n_slots, t.shape[1]) for t, _ in self._pairs(self.k, self.v)]
            self._extents = HeadExtents.laid([slots.n_slots] * n_kv)
            self.pos = torch.empty(slots.n_slots, dtype=torch.int32)
            if slots.n_slots:
                self._came(pos)
        else:
            self.k, self.v = slots.each(lambda t: t.new_zeros(0, t.shape[2]))
            self._extents, self.pos = HeadExtents.laid([0] * n_kv), torch.empty(0, dtype=torch.int32)
            self._lay(HeadExtents.of((pos >= 0).sum(1).tolist(), step))
            self.take(slots)

    @staticmethod
    def made(given: SnapshotReader, shape: LayerShape, like: Tensor, step: int, slides: bool = False) -> DenseLayer:
        """Restore a layer from a snapshot; `like` has the data type and device."""
        n_kv = shape.n_kv_heads

        def read(part: SnapshotReader, *heads: int) -> tuple[Tensor, Tensor, Tensor]:
            pos = part.positions("pos", None).cpu()
            k = part.tensor("k", like.dtype, *heads, len(pos), shape.k_dim).to(like.device)
            v = k if shape.rank else part.tensor("v", like.dtype, *heads, len(pos), shape.v_dim).to(like.device)
            return k, v, pos

        if "pos" in given:
            k, v, pos = read(given, n_kv)
            layer = DenseLayer(Slots(k, v, pos.expand(n_kv, -1)), step, slides)
            layer.gone = given.number("gone", given.n) // BLOCK * BLOCK
            return layer
        ks, vs, each = zip(*(read(given.part(str(head))) for head in range(n_kv)), strict=True)
        k = like.new_empty(n_kv, 0, shape.k_dim)
        v = k if shape.rank else like.new_empty(n_kv, 0, shape.v_dim)
        layer = DenseLayer(Slots(k, v, torch.empty(n_kv, 0, dtype=torch.int32)), step, slides)
        layer._lay(HeadExtents.of([*map(len, each)], step), is_even=False)
        places = [torch.arange(at, at + len(its)) for at, its in zip(layer._extents.start, each, strict=True)]
        # keys and values are not padded: one long head would multiply their bytes
        layer._put(torch.cat(places).to(like.device), torch.cat(ks), torch.cat(vs))
        layer._came(pad_sequence([*each], True, -1))
        return layer

    def state(self) -> State:
        """Return a snapshot, by head if they differ."""
        if self.is_even:
            return {**_tree(self.slots(), slice(None)), "gone": self.gone}
        return {str(head): _tree(self.head(head, n), 0) for head, n in enumerate(self.lengths)}

    @property
    def length(self) -> int:
        """Slots of the longest head."""
        return max(self.lengths)

    @property
    def total(self) -> int:
        """Slots of all heads."""
        return sum(self.lengths)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the layer."""
        both = [self.k] if self.v is self.k else [self.k, self.v]
        return [*both, self.pos, *([] if self._there is None else [self._there])]

    def at(self, head: int = 0) -> np.ndarray:
        """Return the positions [S] of the stored slots of a head."""
        self._note()
        start, end = self._rows[0 if self.is_even else head]
        found: np.ndarray = self.pos.numpy()[start:end]
        return found

    @property
    def _pos_starts(self) -> list[int]:
        """Index of the first position of each head."""
        return [0] * len(self.lengths) if self.is_even else self._extents.start

    @property
    def _rows(self) -> list[tuple[int, int]]:
        """Start and end of each row of positions: one for all heads, or one for each."""
        if self.is_even:
            return [(0, self.lengths[0])]
        return [(start, start + n) for start, n in zip(self._extents.start, self.lengths, strict=True)]

    def _note(self) -> None:
        """Write all positions into `pos`. During decoding this is done only at compression points."""
        if n := self._unnoted:
            pos, new = self.pos.numpy(), np.arange(self._highest + 1 - n, self._highest + 1)
            for _, end in self._rows:
                pos[end - n : end] = new
            self._unnoted = 0

    def beside(self) -> Tensor:
        """Return `pos` on the device of the keys. Consecutive new positions, as in decoding, are computed there,
        without a copy or synchronization."""
        self._note()
        if self._there is None:
            self._there, self._unsent = torch.full_like(self.pos, -1, device=self.k.device), self.length
        if self._unsent and self._lying is not None:
            self._lying.synced_length += 1
        for start, end in self._rows if self._unsent else ():
            first = max(start, end - self._unsent)
            new, place = self.pos[first:end], self._there[first:end]
            if first < end and self.ordered and int(new[-1]) - int(new[0]) == end - first - 1:
                torch.arange(int(new[0]), int(new[-1]) + 1, out=place)
            else:
                place.copy_(new)
        self._unsent = 0
        return self._there

    def _pos_there(self) -> Tensor:
        """Return all positions on the device of the keys."""
        self._note()
        return self.pos if self.k.is_cpu else self.beside()

    def attend(
        self, q: Tensor, params: AttentionParams, rows: Sequence[int], own: NewRows | None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions `rows` [N] over slots and new KV."""
        if not serves(q, self.v):
            return [*self._apart(q, params, rows), *attend_new_only(q, params, own)]
        run = self.run() if any(self.lengths) else None
        if run is None and own is None:
            return []
        if run is not None and params.window is not None:
            run.pos = self._pos_there()
        window, softcap, is_prompt = params.window, params.softcap, params.is_prompt
        return [
            attend_stored_and_new(q, run, own, rows, params.scale, window=window, softcap=softcap, is_prompt=is_prompt)
        ]

    def run(self) -> StoredKV:
        """Return the stored slots in place, valid until the buffer changes."""
        if self._lies is None:
            self._lies = StoredKV(self.k, self.v, self.pos, self._extents.start, [], self._pos_starts)
        self._lies.lengths, self._lies.gone = self.lengths, self.gone
        return self._lies

    def _apart(self, q: Tensor, params: AttentionParams, rows: Sequence[int]) -> list[PartialAttention]:
        """Return partial attention over the stored slots alone: at most one part. Heads of equal capacity are read as a
        batch, unless their windows start at different slots."""
        if not self.length:
            return []
        runs = self._extents.runs() if params.window is None or self.is_even else [[i] for i in self._extents.order]
        if len(runs) == 1:
            return [self._read(q, runs[0], params, rows)]
        by_head = q.view(len(self.lengths), -1, *q.shape[1:])
        parts = [self._read(by_head[heads].flatten(0, 1), heads, params, rows) for heads in runs]
        back = np.argsort(self._extents.order).tolist()  # in buffer order until now
        out, lse = (torch.cat(each) for each in zip(*((p.out, p.lse) for p in parts), strict=True))
        return [PartialAttention(*(t.view(len(back), -1, *t.shape[1:])[back].flatten(0, 1) for t in (out, lse)))]

    def _read(self, q: Tensor, heads: list[int], params: AttentionParams, rows: Sequence[int]) -> PartialAttention:
        """Return partial attention of q [n * G, N, D] over the slots of n adjacent heads, read as views."""
        first, room, start, mask = self._extents.start[heads[0]], self._extents.room[heads[0]], 0, None
        k, v = (t[first : first + room * len(heads)].view(len(heads), room, t.shape[1]) for t in (self.k, self.v))
        if params.window is not None:
            start, mask = seen(self.at(heads[0]), rows, params.window, self.ordered, q.device)
        if start == 0 and mask is None:
            return attend(q, k, v, params.scale, softcap=params.softcap, length=[self.lengths[head] for head in heads])
        k, v = (t[:, start : self.lengths[heads[0]]] for t in (k, v))
        return attend(q, k, v, params.scale, softcap=params.softcap, mask=mask)

    def append(self, k: Tensor, v: Tensor, start: int) -> None:
        """Store k, v [K, M, D] in all heads at positions from `start` on, M > 0."""
        m = k.shape[1]
        self._make_room([n + m for n in self.lengths])
        if self._slides and self.is_even and not self.length:  # as if all earlier tokens had been stored and evicted
            self.gone = start // BLOCK * BLOCK
        if self.is_even:
            self._put_even(k, v, self.length)
        else:
            ends = torch.tensor([*map(add, self._extents.start, self.lengths)], device=self.k.device)
            at = (ends.unsqueeze(1) + torch.arange(m, device=ends.device)).flatten()
            self._put(at, k.flatten(0, 1), v.flatten(0, 1))
        self._longer(m, start)

    def _longer(self, n: int, start: int) -> None:
        """Count n slots that are already written in all heads, at positions from `start` on."""
        if start == self._highest + 1:
            self.lengths = [length + n for length in self.lengths]
            self._unnoted += n
            self._unsent += n
            self._highest += n
        else:
            self._came(torch.arange(start, start + n, dtype=torch.int32).expand(len(self.lengths), -1))

    def _came(self, pos: Tensor) -> None:
        """Count slots at positions pos [K, S], -1 = none, that are already written behind those of each head."""
        self._note()
        is_stored = pos >= 0
        for (_, end), its, mask in zip(self._rows, pos, is_stored, strict=False):
            new = its[mask]
            self.pos[end : end + len(new)] = new
            self.ordered &= rises(new) and (not len(new) or int(new[0]) > self._highest)
        count = is_stored.sum(1).tolist()
        self.lengths = [n + m for n, m in zip(self.lengths, count, strict=True)]
        self._unsent += max(count)
        self._highest = max(self._highest, int(pos.max()) if pos.numel() else -1)

    def device_tables(self, rows: int, more: int = 0) -> DeviceLayer:
        """Return device tables of the slots, with capacity for `rows` more per head (see `grow_size`)."""
        ahead = [n + grow_size(n, rows, more, self._step) for n in self.lengths]
        self._make_room(ahead if self._lying is None else [n + rows for n in self.lengths], ahead)
        if self._lying is None:
            start, room = self._extents.start, max(self._extents.room)
            self._lying = DeviceLayer.of(self.k, self.v, self.beside(), start, self._pos_starts, room)
        self._lying.tell(self.lengths)
        self.beside()
        return self._lying

    def grew(self, n: int, start: int) -> None:
        """Count n slots that a captured pass stored, by the tables of `device_tables`, at positions from `start` on."""
        self._longer(n, start)
        self._unsent = 0

    def refill(self, slots: Slots) -> bool:
        """Replace all slots in place by a copy of `slots`, so that captured passes stay valid. Returns False, changing
        nothing, if no pass was captured over the layer or `slots` does not fit its layout."""
        if self._lying is None:
            return False
        pos, was = slots.pos.cpu(), self.lengths
        count = (pos >= 0).sum(1).tolist()
        fits = all(stays(n, room, self._step) for n, room in zip(count, self._extents.room, strict=True))
        if not fits or (self.is_even and not agree(pos)):
            return False
        self._store(slots, pos, [0] * len(was))
        self.lengths, self._highest, self.ordered, self.gone = [0] * len(was), -1, True, 0
        self._unnoted = self._unsent = 0
        self._came(pos)
        for start, n, end in zip(self._extents.start, count, was, strict=True):
            # attention reads spare capacity, in which NaN or infinity of old slots would remain; under a mask keys too
            self.k[start + n : start + end] = self.v[start + n : start + end] = 0
        return True

    def take(self, slots: Slots) -> None:
        """Store slots that may differ by head."""
        pos = slots.pos.cpu()
        if self.is_even and not agree(pos):
            self._lay(HeadExtents.of(self.lengths, self._step), is_even=False)
        count = (pos >= 0).sum(1).tolist()
        if any(count):
            self._make_room([n + m for n, m in zip(self.lengths, count, strict=True)])
            self._store(slots, pos, self.lengths)
            self._came(pos)

    def _store(self, slots: Slots, pos: Tensor, lengths: list[int]) -> None:
        """Write keys and values after the first `lengths` slots of each head, within capacity; `pos` is on the host."""
        if self.is_even:
            return self._put_even(slots.k, slots.v, lengths[0])
        is_stored = pos >= 0
        ends = torch.tensor([start + n for start, n in zip(self._extents.start, lengths, strict=True)])
        at = (ends.unsqueeze(1) + is_stored.cumsum(1) - 1)[is_stored].to(self.k.device)
        self._put(at, *slots.each(lambda t: t[is_stored]))

    def _put_even(self, k: Tensor, v: Tensor, first: int) -> None:
        for t, new in zip(self._by_head, (k, v), strict=False):
            t[:, first : first + k.shape[1]] = new

    def _put(self, at: Tensor, k: Tensor, v: Tensor) -> None:
        for t, new in self._pairs(k, v):
            t.index_copy_(0, at, new.to(t.dtype))

    def _pairs(self, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the buffers of keys and of values, one if they are equal, each with its share of k and v."""
        return [(self.k, k)] if self.v is self.k else [(self.k, k), (self.v, v)]

    def slots(self) -> Slots:
        """Return the stored slots: views if heads have the same ones, else a copy padded to the longest head."""
        if not self.is_even:
            return self.gather(torch.arange(self.length, device=self.k.device).expand(len(self.lengths), -1))
        n = self.length
        pos = self._pos_there()[:n].expand(len(self.lengths), -1)
        return Slots(*Slots(self._by_head[0], self._by_head[-1], pos).each(lambda t: t[:, :n]), pos)

    def newest(self, n: int) -> Slots:
        """Return the last n slots of each head: views, or a copy if heads differ."""
        if self.is_even:
            s, first = self.slots(), max(0, self.length - n)
            return Slots(*s.each(lambda t: t[:, first:]), s.pos[:, first:])
        if n > min(self.lengths):
            return last(self.slots(), n)
        ends = torch.tensor(self.lengths, device=self.k.device)
        return self.gather(ends.unsqueeze(1) - n + torch.arange(n, device=ends.device))

    def positions(self) -> Tensor:
        """Return pos [K, S], -1 = empty."""
        if self.is_even:
            return self.slots().pos
        at, is_stored = self._places(torch.arange(self.length, device=self.k.device).expand(len(self.lengths), -1))
        return self._pos_there()[at].masked_fill(~is_stored, -1)

    def gather(self, index: Tensor) -> Slots:
        """Return a copy of slots index [K, M], -1 = empty."""
        at, is_stored = self._places(index)
        pos = self._pos_there()[index * is_stored if self.is_even else at].masked_fill(~is_stored, -1)
        held = Slots(self.k, self.v, pos)
        return Slots(*held.each(lambda t: t.index_select(0, at.flatten()).view(*at.shape, t.shape[1])), pos)

    def head(self, head: int, n: int) -> Slots:
        """Return the first n slots of one head as views."""
        n = min(n, self.lengths[head])
        mine, at = (slice(of[head], of[head] + n) for of in (self._extents.start, self._pos_starts))
        held = Slots(self.k, self.v, self._pos_there())
        return Slots(*held.each(lambda t: t[mine].unsqueeze(0)), held.pos[at].unsqueeze(0))

    def _places(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the buffer indices of slots index [K, M] of each head, and a mask [K, M] of existing slots."""
        start, length = torch.tensor([self._extents.start, self.lengths], device=index.device).unsqueeze(2)
        is_stored = (index >= 0) & (index < length)
        return start + index * is_stored, is_stored

    def crop(self, n: int) -> bool:
        """Remove positions n and later in place. Returns False and changes nothing if slots are out of order, or if
        heads differ: they may have the same slots without the newest ones."""
        if not (self.is_even and self.ordered):
            return False
        was, pos = self.length, self.at()
        left = int(np.searchsorted(pos, n))
        self.lengths, self._unsent = [left] * len(self.lengths), max(0, self._unsent - (was - left))
        # attention reads spare capacity, in which NaN or infinity of removed slots would remain
        self._by_head[-1][:, left:was] = 0
        self._highest = int(pos[left - 1]) if left else -1
        self.gone *= left > 0
        return True

    def evict_below(self, low: int) -> bool:
        """Evict whole blocks of slots at positions below `low`, hidden from all later rows. Returns False and changes
        nothing if slots are out of order or differ by head."""
        if not (self.is_even and self.ordered):
            return False
        if n := int(np.searchsorted(self.at(), low)) // BLOCK * BLOCK:
            self._lay(self._fit([length - n for length in self.lengths]), n)
            self.gone += n
        return True

    def reserve(self, n: int) -> None:
        """Allocate capacity for n slots per head."""
        if n > min(self._extents.room):
            self._lay(self._fit(self.lengths, n))

    def _make_room(self, lengths: list[int], ahead: list[int] | None = None) -> None:
        """Allocate capacity for `ahead` slots if that for `lengths` is not there. By default they are the same."""
        if any(map(gt, lengths, self._extents.room)):
            self._lay(self._fit(ahead or lengths))

    def _fit(self, lengths: list[int], least: int = 0) -> HeadExtents:
        """Return extents for heads of these lengths, at least `least` slots each."""
        if not self.is_even:
            return HeadExtents.of(lengths, self._step, least)
        return HeadExtents.laid([-(-max(*lengths, least) // self._step) * self._step] * len(lengths))

    def _lay(self, extents: HeadExtents, skip: int = 0, is_even: bool | None = None) -> None:
        """Move the slots of each head, without the first `skip`, to new extents. `is_even`: None = as before."""
        self._note()
        is_even, lengths = self.is_even if is_even is None else is_even, [n - skip for n in self.lengths]
        # memory that was in use before has its pages, which a growing layer gets back
        zeros = Tensor.new_zeros if any(lengths) else zeros_on_demand
        k, v = Slots(self.k, self.v, self.pos).each(lambda t: zeros(t, *(extents.total, t.shape[1])))
        pos = self.pos.new_full((extents.room[0] if is_even else extents.total,), -1)
        for to, of, at, n in zip(extents.start, self._extents.start, self._pos_starts, lengths, strict=True):
            for old, new in self._pairs(k, v):
                new[to : to + n] = old[of + skip : of + skip + n]
            first = 0 if is_even else to
            pos[first : first + n] = self.pos[at + skip : at + skip + n]
        # assigned together, because an allocation above may have failed
        self.k, self.v, self.pos, self._lies, self._lying, self._there = k, v, pos, None, None, None
        self._extents, self.lengths = extents, lengths
        if self.is_even and not is_even:
            self.is_even, self.gone = False, 0
        pairs = self._pairs(k, v) if is_even else []
        self._by_head = [t.view(len(lengths), extents.room[0], t.shape[1]) for t, _ in pairs]


def _tree(s: Slots, head: int | slice) -> State:
    return {"k": s.k[head], **({} if s.v is s.k else {"v": s.v[head]}), "pos": s.pos[0]}


def agree(pos: Tensor) -> bool:
    """True if all heads have the same slots in the same order, at positions pos [K, S], and none is empty."""
    return not pos.numel() or bool((pos == pos[:1]).all() and (pos >= 0).all())


def rises(pos: Tensor) -> bool:
    """True if positions [S] increase."""
    return bool((pos[1:] > pos[:-1]).all())


def seen(
    stored: np.ndarray, rows: Sequence[int], window: int, ordered: bool, device: torch.device
) -> tuple[int, Tensor | None]:
    """Return the first of the slots at positions `stored` [S] in the windows of rows at positions [N], and the mask
    [N, S - start] if the windows of the rows start at different slots.

    Reading only the window makes sliding-window layers cheap at long context; slots out of order are all read.
    """
    first, last = min(rows) - window + 1, max(rows) - window + 1  # first positions in the windows of the rows
    start = int(np.searchsorted(stored, first)) if ordered else 0
    if ordered and last <= max(first, int(stored[start]) if start < len(stored) else first):
        return start, None
    return start, torch.from_numpy(stored[start:]).to(device) > window_start(rows, window, device)


def room_of(n: int, step: int) -> int:
    """Return the capacity of a head of n slots: n plus 1/2 to 3/2 units; a unit grows with n up to step / 4."""
    most = max(1, step // 4)
    unit = max(min(most, 16), min(most, 1 << max(0, (n // 32).bit_length() - 1)))  # n / 64 to n / 32
    return -(-(n + unit // 2) // unit) * unit
