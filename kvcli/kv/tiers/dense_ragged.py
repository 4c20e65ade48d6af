"""Layout of a dense layer whose heads have different slots: head extents one after another, each of its own length.

Evicted slots free memory: a layer takes the bytes of its slots, one position per slot, and a little spare capacity per
head. Heads of about the same length get the same capacity and are read as one batch without a mask; other heads are
read one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import NewRows, StoredKV, attend_stored_and_new, serves
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import AttentionParams, LayerShape, Slots, attend_new_only, last, run_of
from kvcli.kv.snapshot import SnapshotReader, State
from kvcli.kv.tiers.dense_uniform import rises, seen
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
        room = [max(least, room_of(n, step)) for n in lengths]
        order = sorted(range(len(room)), key=lambda head: room[head])
        start, total = [0] * len(room), 0
        for head in order:
            start[head], total = total, total + room[head]
        return HeadExtents(start, room, order, total)

    def runs(self) -> list[list[int]]:
        """Return groups of heads of equal capacity, in buffer order."""
        return [list(heads) for _, heads in groupby(self.order, key=lambda head: self.room[head])]


class RaggedLayer:
    """Keys and values of heads of unequal length. Attention also reads spare capacity, which is therefore finite."""

    def __init__(self, slots: Slots, step: int) -> None:
        """Copy `slots`, which may contain empty slots. The capacity of a head is a multiple of at most `step` slots."""
        n_kv, device = slots.pos.shape[0], slots.k.device
        self._step = step
        self.k, self.v = slots.each(lambda t: t.new_zeros(0, t.shape[2]))
        self.pos = torch.zeros(0, dtype=torch.int32, device=device)
        self._lengths = [0] * n_kv
        self._extents = HeadExtents.of(self._lengths, step)
        self._highest, self._ordered = -1, True  # as in UniformLayer; ordered if every head is
        self._lying: DeviceLayer | None = None  # as in UniformLayer
        self._lay(HeadExtents.of((slots.pos >= 0).sum(1).tolist(), step))
        self.take(slots)

    @staticmethod
    def made(given: SnapshotReader, shape: LayerShape, like: Tensor, step: int) -> RaggedLayer:
        """Restore a layer from a snapshot; `like` has the data type and device."""
        n_kv = shape.n_kv_heads
        found = [given.part(str(head)) for head in range(n_kv)]
        k = like.new_empty(n_kv, 0, shape.k_dim)
        v = k if shape.rank else like.new_empty(n_kv, 0, shape.v_dim)
        new = RaggedLayer(Slots(k, v, torch.empty(n_kv, 0, dtype=torch.int32, device=like.device)), step)
        new._make_room([len(one.positions("pos", None)) for one in found])
        for head, one in enumerate(found):
            pos = one.positions("pos", None)
            k = one.tensor("k", like.dtype, len(pos), shape.k_dim)
            v = k if shape.rank else one.tensor("v", like.dtype, len(pos), shape.v_dim)
            new._put_head(head, k, v, pos)
        return new

    def state(self) -> State:
        """Return a snapshot, by head."""
        slots = (self.head(head, n) for head, n in enumerate(self._lengths))
        return {
            str(i): {"k": s.k[0], **({} if s.v is s.k else {"v": s.v[0]}), "pos": s.pos[0]} for i, s in enumerate(slots)
        }

    @property
    def length(self) -> int:
        """Slots of the longest head."""
        return max(self._lengths)

    @property
    def total(self) -> int:
        """Slots of all heads."""
        return sum(self._lengths)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the layer."""
        both = [self.k] if self.v is self.k else [self.k, self.v]
        return [*both, self.pos, self._ends, self._order, self._back]

    def attend(
        self, q: Tensor, params: AttentionParams, rows: Sequence[int], own: NewRows | None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions `rows` [N] over slots and new KV."""
        if serves(q, self.v):
            window, softcap, is_prompt = params.window, params.softcap, params.is_prompt
            return [
                attend_stored_and_new(
                    q, self.run(), own, rows, params.scale, window=window, softcap=softcap, is_prompt=is_prompt
                )
            ]
        return [*self._apart(q, params, rows), *attend_new_only(q, params, own)]

    def run(self) -> StoredKV:
        """Return the stored slots in place."""
        return StoredKV(self.k, self.v, self.pos, self._extents.start, self._lengths, self._extents.start)

    def _apart(self, q: Tensor, params: AttentionParams, rows: Sequence[int]) -> list[PartialAttention]:
        """Return partial attention over the stored slots alone: at most one part."""
        if not self.length:
            return []
        as_they_lie = self._moved(q, self._order)
        group, first, parts = q.shape[0] // len(self._lengths), 0, list[PartialAttention]()
        for heads in self._runs:
            queries = as_they_lie[first * group : (first + len(heads)) * group]  # [n * G, N, D]
            first += len(heads)
            if params.window is None:
                parts.append(self._whole(queries, heads, params))
            else:
                each = (queries[i * group : (i + 1) * group] for i in range(len(heads)))
                parts += [self._near(of, head, params, rows) for of, head in zip(each, heads, strict=True)]
        if len(parts) == 1:
            return parts
        out, lse = torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts])
        return [PartialAttention(self._moved(out, self._back), self._moved(lse, self._back))]

    def append(self, k: Tensor, v: Tensor, start: int) -> None:
        """Store k, v [K, M, D] in all heads at positions from `start` on, M > 0."""
        m = k.shape[1]
        self._make_room([n + m for n in self._lengths])
        at = (self._ends.unsqueeze(1) + torch.arange(m, device=k.device)).flatten()
        self._put(at, k.flatten(0, 1), v.flatten(0, 1), run_of(start, m, len(self._lengths), k.device).flatten())
        self.grew(m, start)

    def device_tables(self, rows: int, more: int = 0) -> DeviceLayer:
        """Return device tables of the slots, with capacity for `rows` more per head (see `grow_size`)."""
        wants = [grow_size(n, rows, more, self._step) if self._lying is None else rows for n in self._lengths]
        if any(n + m > room for n, m, room in zip(self._lengths, wants, self._extents.room, strict=True)):
            self._lay(HeadExtents.of([n + grow_size(n, rows, more, self._step) for n in self._lengths], self._step))
        if self._lying is None:
            start = self._extents.start
            self._lying = DeviceLayer.of(self.k, self.v, self.pos, start, start, max(self._extents.room))
        self._lying.tell(self._lengths)
        return self._lying

    def grew(self, n: int, start: int) -> None:
        """Count n slots that are already written in all heads, at positions from `start` on."""
        self._ends += n
        self._lengths = [length + n for length in self._lengths]
        self._ordered &= start > self._highest
        self._highest = max(self._highest, start + n - 1)

    def take(self, slots: Slots) -> bool:
        """Store slots that may differ by head. Always returns True."""
        pos = slots.pos.cpu()
        count = (pos >= 0).sum(1).tolist()
        if any(count):
            self._make_room([n + m for n, m in zip(self._lengths, count, strict=True)])
            self._add(slots, pos, self._lengths)
        return True

    def refill(self, slots: Slots) -> bool:
        """Replace all slots in place by a copy of `slots`, so that captured passes stay valid. Returns False, changing
        nothing, if no pass was captured over the layer or `slots` does not fit its layout."""
        pos = slots.pos.cpu()
        count, room = (pos >= 0).sum(1).tolist(), self._extents.room
        if self._lying is None or not all(stays(n, most, self._step) for n, most in zip(count, room, strict=True)):
            return False
        was = self._lengths
        self._add(slots, pos, [0] * len(count))
        for start, n, end in zip(self._extents.start, count, was, strict=True):
            # attention reads spare capacity, in which NaN or infinity of old slots would remain
            self.v[start + n : start + end] = 0
        self._lying.synced_length += 1  # the slots changed, even if the lengths did not
        return True

    def _add(self, slots: Slots, pos: Tensor, lengths: list[int]) -> None:
        """Write slots after the first `lengths` slots of each head, within capacity; `pos` is on the host."""
        is_stored, device = pos >= 0, self.pos.device
        count = is_stored.sum(1)
        ends = torch.tensor([start + n for start, n in zip(self._extents.start, lengths, strict=True)])
        at = (ends.unsqueeze(1) + is_stored.cumsum(1) - 1)[is_stored].to(device)
        moved = slots.k[is_stored], slots.v[is_stored], pos[is_stored].to(device)
        behind = (ends + count).to(device)  # allocated before any change, because memory may run out
        self._put(at, *moved)
        if not any(lengths):
            self._highest, self._ordered = -1, True
        self._ends = behind
        self._lengths = [n + m for n, m in zip(lengths, count.tolist(), strict=True)]
        self._ordered &= int(pos[is_stored].min()) > self._highest
        self._ordered &= all(rises(one[mask]) for one, mask in zip(pos, is_stored, strict=True))
        self._highest = max(self._highest, int(pos.max()))

    def slots(self) -> Slots:
        """Return a copy of the stored slots, padded to the longest head."""
        return self.gather(self._all())

    def positions(self) -> Tensor:
        """Return pos [K, S], -1 = empty."""
        at, full = self._places(self._all())
        return self.pos[at].masked_fill(~full, -1)

    def gather(self, index: Tensor) -> Slots:
        """Return a copy of slots index [K, M]."""
        at, full = self._places(index)
        return Slots(*self._held.each(lambda t: t[at]), self.pos[at].masked_fill(~full, -1))

    def head(self, head: int, n: int) -> Slots:
        """Return the first n slots of one head as views."""
        piece = slice(self._extents.start[head], self._extents.start[head] + min(n, self._lengths[head]))
        return Slots(*self._held.each(lambda t: t[piece].unsqueeze(0)), self.pos[piece].unsqueeze(0))

    def newest(self, n: int) -> Slots:
        """Return a copy of the last n slots of each head."""
        if n > min(self._lengths):
            return last(self.slots(), n)
        at = self._ends.unsqueeze(1) - n + torch.arange(n, device=self.pos.device)
        return Slots(*self._held.each(lambda t: t[at]), self.pos[at])

    def crop(self, n: int) -> bool:
        """Return False: never in place, because heads may have the same slots without the newest ones."""
        return False

    def evict_below(self, low: int) -> bool:
        """Return False: never in place."""
        return False

    def reserve(self, n: int) -> None:
        """Allocate capacity for n slots per head."""
        if n > min(self._extents.room):
            self._lay(HeadExtents.of(self._lengths, self._step, n))

    def _whole(self, q: Tensor, heads: list[int], params: AttentionParams) -> PartialAttention:
        """Return partial attention of q [n * G, N, D] over all slots of heads of equal capacity, read as views."""
        first, room = self._extents.start[heads[0]], self._extents.room[heads[0]]
        piece = slice(first, first + room * len(heads))
        k, v = (t[piece].view(len(heads), room, t.shape[1]) for t in (self.k, self.v))
        return attend(q, k, v, params.scale, softcap=params.softcap, length=[self._lengths[head] for head in heads])

    def _near(self, q: Tensor, head: int, params: AttentionParams, rows: Sequence[int]) -> PartialAttention:
        """Return partial attention of q [G, N, D] over the slots of one head inside a sliding window."""
        assert params.window is not None
        first, end = self._extents.start[head], self._extents.start[head] + self._lengths[head]
        stored = self.pos[first:end].cpu().numpy()
        start, mask = seen(stored, rows, params.window, self._ordered, q.device)
        k, v = (t[first + start : end].unsqueeze(0) for t in (self.k, self.v))
        return attend(q, k, v, params.scale, softcap=params.softcap, mask=mask)

    def _moved(self, t: Tensor, order: Tensor) -> Tensor:
        """Reorder t [H, ...] by KV head (with its query heads)."""
        if self._in_order:
            return t
        return t.view(len(self._lengths), -1, *t.shape[1:])[order].flatten(0, 1)

    @property
    def _held(self) -> Slots:
        """Buffers of all heads: k, v [T, ..], pos [T]."""
        return Slots(self.k, self.v, self.pos)

    def _put(self, at: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> None:
        self.k.index_copy_(0, at, k.to(self.k.dtype))
        if self.v is not self.k:
            self.v.index_copy_(0, at, v.to(self.v.dtype))
        self.pos.index_copy_(0, at, pos.to(torch.int32))

    def _put_head(self, head: int, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Write slots [S, ..] of an empty head with enough capacity."""
        first, n = self._extents.start[head], len(pos)
        for to, of in ((self.k, k), (self.v, v), (self.pos, pos)):
            to[first : first + n] = of
        self._lengths[head] = n
        self._ends[head] += n
        self._ordered &= rises(pos)
        self._highest = max(self._highest, int(pos.max()) if n else -1)

    def _all(self) -> Tensor:
        """Return [K, S]: slot indices up to the longest head."""
        return torch.arange(self.length, device=self.pos.device).expand(len(self._lengths), -1)

    def _places(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the buffer indices of slots index [K, M] of each head, and a mask [K, M] of existing slots."""
        full = (index >= 0) & (index < self._ends.new_tensor(self._lengths).unsqueeze(1))
        return self._ends.new_tensor(self._extents.start).unsqueeze(1) + index * full, full

    def _make_room(self, lengths: list[int]) -> None:
        if any(n > room for n, room in zip(lengths, self._extents.room, strict=True)):
            self._lay(HeadExtents.of(lengths, self._step))

    def _lay(self, extents: HeadExtents) -> None:
        """Move the stored slots to new extents."""
        k, v = self._held.each(lambda t: t.new_zeros(extents.total, t.shape[1]))
        pos = self.pos.new_full((extents.total,), -1)
        for head, n in enumerate(self._lengths):
            if n:
                to, of = extents.start[head], self._extents.start[head]
                for new, old in ((k, self.k), (v, self.v), (pos, self.pos)):
                    new[to : to + n] = old[of : of + n]
        starts = torch.tensor(extents.start, device=pos.device)
        ends = starts + torch.tensor(self._lengths, device=pos.device)
        order = torch.tensor(extents.order, device=pos.device)
        back = order.argsort()  # back to head order
        # assigned together, because an allocation above may have failed
        self.k, self.v, self.pos, self._ends, self._lying = k, v, pos, ends, None
        self._order, self._back, self._in_order = order, back, extents.order == sorted(extents.order)
        self._extents, self._runs = extents, extents.runs()


def room_of(n: int, step: int) -> int:
    """Return the capacity of a head of n slots: n plus 1/2 to 3/2 units; a unit grows with n up to step / 4."""
    most = max(1, step // 4)
    unit = max(min(most, 16), min(most, 1 << max(0, (n // 32).bit_length() - 1)))  # n / 64 to n / 32
    return -(-(n + unit // 2) // unit) * unit
