"""One layer whose heads hold different slots: they lie end to end, each with a length of its own.

What one head forgets is free for good: a layer takes the bytes of its slots, one position each, and a little spare
room per head. Heads of about the same length get the same room and are read as one batch, without a mask; others one
by one.
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
    """Where each head lies."""

    start: list[int]  # by head, in slots
    room: list[int]  # by head, slots it can hold
    order: list[int]  # heads as they lie: those of equal room side by side
    total: int  # slots of all heads

    @staticmethod
    def of(lengths: Sequence[int], step: int, least: int = 0) -> HeadExtents:
        """Room for these lengths and some more, and for at least `least` slots a head."""
        room = [max(least, room_of(n, step)) for n in lengths]
        order = sorted(range(len(room)), key=lambda head: room[head])
        start, total = [0] * len(room), 0
        for head in order:
            start[head], total = total, total + room[head]
        return HeadExtents(start, room, order, total)

    def runs(self) -> list[list[int]]:
        """Heads of equal room, as they lie."""
        return [list(heads) for _, heads in groupby(self.order, key=lambda head: self.room[head])]


class RaggedLayer:
    """Keys and values of heads of unequal length. Spare room is read along and therefore holds finite numbers."""

    def __init__(self, slots: Slots, step: int) -> None:
        """Copies `slots`, which may have empty ones anywhere. `step`: what a head's room is a multiple of, at most."""
        n_kv, device = slots.pos.shape[0], slots.k.device
        self._step = step
        self.k, self.v = slots.each(lambda t: t.new_zeros(0, t.shape[2]))
        self.pos = torch.zeros(0, dtype=torch.int32, device=device)
        self._lengths = [0] * n_kv
        self._extents = HeadExtents.of(self._lengths, step)
        self._highest, self._ordered = -1, True  # as in a slab; in order if every head is
        self._lying: DeviceLayer | None = None  # the same
        self._lay(HeadExtents.of((slots.pos >= 0).sum(1).tolist(), step))
        self.take(slots)

    @staticmethod
    def made(given: SnapshotReader, shape: LayerShape, like: Tensor, step: int) -> RaggedLayer:
        """From what `state` gave; `like`: numbers of the type and on the device."""
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
        """What each head holds."""
        held = (self.head(head, n) for head, n in enumerate(self._lengths))
        return {
            str(i): {"k": s.k[0], **({} if s.v is s.k else {"v": s.v[0]}), "pos": s.pos[0]} for i, s in enumerate(held)
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
        """All that takes memory."""
        both = [self.k] if self.v is self.k else [self.k, self.v]
        return [*both, self.pos, self._ends, self._order, self._back]

    def attend(
        self, q: Tensor, sight: AttentionParams, rows: Sequence[int], own: NewRows | None
    ) -> list[PartialAttention]:
        """q [H, N, D] of rows at positions `rows` [N] -> parts over the slots and their pass."""
        if serves(q, self.v):
            window, softcap, is_prompt = sight.window, sight.softcap, sight.is_prompt
            return [
                attend_stored_and_new(
                    q, self.run(), own, rows, sight.scale, window=window, softcap=softcap, is_prompt=is_prompt
                )
            ]
        return [*self._apart(q, sight, rows), *attend_new_only(q, sight, own)]

    def run(self) -> StoredKV:
        """The slots where they lie."""
        return StoredKV(self.k, self.v, self.pos, self._extents.start, self._lengths, self._extents.start)

    def _apart(self, q: Tensor, sight: AttentionParams, rows: Sequence[int]) -> list[PartialAttention]:
        """Over the slots alone: at most one part."""
        if not self.length:
            return []
        as_they_lie = self._moved(q, self._order)
        group, first, parts = q.shape[0] // len(self._lengths), 0, list[PartialAttention]()
        for heads in self._runs:
            mine = as_they_lie[first * group : (first + len(heads)) * group]  # [n * G, N, D]
            first += len(heads)
            if sight.window is None:
                parts.append(self._whole(mine, heads, sight))
            else:
                each = (mine[i * group : (i + 1) * group] for i in range(len(heads)))
                parts += [self._near(of, head, sight, rows) for of, head in zip(each, heads, strict=True)]
        if len(parts) == 1:
            return parts
        out, lse = torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts])
        return [PartialAttention(self._moved(out, self._back), self._moved(lse, self._back))]

    def append(self, k: Tensor, v: Tensor, start: int) -> None:
        """k, v [K, M, D] at positions from `start` on, M > 0; every head takes all of them."""
        m = k.shape[1]
        self._make_room([n + m for n in self._lengths])
        at = (self._ends.unsqueeze(1) + torch.arange(m, device=k.device)).flatten()
        self._put(at, k.flatten(0, 1), v.flatten(0, 1), run_of(start, m, len(self._lengths), k.device).flatten())
        self.grew(m, start)

    def fixed(self, rows: int, more: int = 0) -> DeviceLayer:
        """Where a device finds the slots, and room for `rows` behind those of each head, as `grow_size` makes it."""
        wants = [grow_size(n, rows, more, self._step) if self._lying is None else rows for n in self._lengths]
        if any(n + m > room for n, m, room in zip(self._lengths, wants, self._extents.room, strict=True)):
            self._lay(HeadExtents.of([n + grow_size(n, rows, more, self._step) for n in self._lengths], self._step))
        if self._lying is None:
            start = self._extents.start
            self._lying = DeviceLayer.of(self.k, self.v, self.pos, start, start, max(self._extents.room))
        self._lying.tell(self._lengths)
        return self._lying

    def grew(self, n: int, start: int) -> None:
        """n slots more are in place in all heads, at positions from `start` on."""
        self._ends += n
        self._lengths = [length + n for length in self._lengths]
        self._ordered &= start > self._highest
        self._highest = max(self._highest, start + n - 1)

    def take(self, slots: Slots) -> bool:
        """Store these as well, whichever each head brings; always True."""
        pos = slots.pos.cpu()
        count = (pos >= 0).sum(1).tolist()
        if any(count):
            self._make_room([n + m for n, m in zip(self._lengths, count, strict=True)])
            self._add(slots, pos, self._lengths)
        return True

    def refill(self, slots: Slots) -> bool:
        """Hold these, a copy, in place of all, where passes were recorded over it; False, and nothing done, elsewhere
        or where they do not suit it."""
        pos = slots.pos.cpu()
        count, room = (pos >= 0).sum(1).tolist(), self._extents.room
        if self._lying is None or not all(stays(n, most, self._step) for n, most in zip(count, room, strict=True)):
            return False
        was = self._lengths
        self._add(slots, pos, [0] * len(count))
        for start, n, end in zip(self._extents.start, count, was, strict=True):
            self.v[start + n : start + end] = 0  # spare room is read, and NaN or infinity would outlive its slot
        self._lying.synced_length += 1  # what lies there is another past, though it were as long
        return True

    def _add(self, slots: Slots, pos: Tensor, lengths: list[int]) -> None:
        """These behind the first so many of each head, for which there is room; `pos` on the host."""
        held, device = pos >= 0, self.pos.device
        count = held.sum(1)
        ends = torch.tensor([start + n for start, n in zip(self._extents.start, lengths, strict=True)])
        at = (ends.unsqueeze(1) + held.cumsum(1) - 1)[held].to(device)
        moved = slots.k[held], slots.v[held], pos[held].to(device)
        behind = (ends + count).to(device)  # together: memory may run out before anything has changed
        self._put(at, *moved)
        if not any(lengths):
            self._highest, self._ordered = -1, True
        self._ends = behind
        self._lengths = [n + m for n, m in zip(lengths, count.tolist(), strict=True)]
        self._ordered &= int(pos[held].min()) > self._highest
        self._ordered &= all(rises(one[mask]) for one, mask in zip(pos, held, strict=True))
        self._highest = max(self._highest, int(pos.max()))

    def slots(self) -> Slots:
        """What is held: a copy, padded to the longest head."""
        return self.gather(self._all())

    def positions(self) -> Tensor:
        """The same, positions alone."""
        at, full = self._places(self._all())
        return self.pos[at].masked_fill(~full, -1)

    def gather(self, index: Tensor) -> Slots:
        """A copy of slots index [K, M]."""
        at, full = self._places(index)
        return Slots(*self._held.each(lambda t: t[at]), self.pos[at].masked_fill(~full, -1))

    def head(self, head: int, n: int) -> Slots:
        """As views."""
        piece = slice(self._extents.start[head], self._extents.start[head] + min(n, self._lengths[head]))
        return Slots(*self._held.each(lambda t: t[piece].unsqueeze(0)), self.pos[piece].unsqueeze(0))

    def newest(self, n: int) -> Slots:
        """The last n of each head, as a copy."""
        if n > min(self._lengths):
            return last(self.slots(), n)
        at = self._ends.unsqueeze(1) - n + torch.arange(n, device=self.pos.device)
        return Slots(*self._held.each(lambda t: t[at]), self.pos[at])

    def crop(self, n: int) -> bool:
        """Never in place: heads may agree once the newest are gone."""
        return False

    def evict_below(self, low: int) -> bool:
        """Never in place."""
        return False

    def reserve(self, n: int) -> None:
        """Room for n slots a head."""
        if n > min(self._extents.room):
            self._lay(HeadExtents.of(self._lengths, self._step, n))

    def _whole(self, q: Tensor, heads: list[int], sight: AttentionParams) -> PartialAttention:
        """q [n * G, N, D] over heads of equal room: views of where they lie."""
        first, room = self._extents.start[heads[0]], self._extents.room[heads[0]]
        piece = slice(first, first + room * len(heads))
        k, v = (t[piece].view(len(heads), room, t.shape[1]) for t in (self.k, self.v))
        return attend(q, k, v, sight.scale, softcap=sight.softcap, length=[self._lengths[head] for head in heads])

    def _near(self, q: Tensor, head: int, sight: AttentionParams, rows: Sequence[int]) -> PartialAttention:
        """q [G, N, D] over what a sliding window shows of one head."""
        assert sight.window is not None
        first, end = self._extents.start[head], self._extents.start[head] + self._lengths[head]
        stored = self.pos[first:end].cpu().numpy()
        start, mask = seen(stored, rows, sight.window, self._ordered, q.device)
        k, v = (t[first + start : end].unsqueeze(0) for t in (self.k, self.v))
        return attend(q, k, v, sight.scale, softcap=sight.softcap, mask=mask)

    def _moved(self, t: Tensor, order: Tensor) -> Tensor:
        """t [H, ...] with KV heads, each with its group, in this order."""
        if self._in_order:
            return t
        return t.view(len(self._lengths), -1, *t.shape[1:])[order].flatten(0, 1)

    @property
    def _held(self) -> Slots:
        """Where they lie: k, v [T, ..], pos [T]."""
        return Slots(self.k, self.v, self.pos)

    def _put(self, at: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> None:
        self.k.index_copy_(0, at, k.to(self.k.dtype))
        if self.v is not self.k:
            self.v.index_copy_(0, at, v.to(self.v.dtype))
        self.pos.index_copy_(0, at, pos.to(torch.int32))

    def _put_head(self, head: int, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Slots [S, ..] of a head that has none, and room for them."""
        first, n = self._extents.start[head], len(pos)
        for to, of in ((self.k, k), (self.v, v), (self.pos, pos)):
            to[first : first + n] = of
        self._lengths[head] = n
        self._ends[head] += n
        self._ordered &= rises(pos)
        self._highest = max(self._highest, int(pos.max()) if n else -1)

    def _all(self) -> Tensor:
        """[K, S]: the index of every slot, as far as the longest head goes."""
        return torch.arange(self.length, device=self.pos.device).expand(len(self._lengths), -1)

    def _places(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Where slots index [K, M] of each head lie, and whether there are such [K, M]."""
        full = (index >= 0) & (index < self._ends.new_tensor(self._lengths).unsqueeze(1))
        return self._ends.new_tensor(self._extents.start).unsqueeze(1) + index * full, full

    def _make_room(self, lengths: list[int]) -> None:
        if any(n > room for n, room in zip(lengths, self._extents.room, strict=True)):
            self._lay(HeadExtents.of(lengths, self._step))

    def _lay(self, extents: HeadExtents) -> None:
        """Move what is held to where `extents` says."""
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
        back = order.argsort()  # heads in their own order again
        self.k, self.v, self.pos, self._ends, self._lying = (
            k,
            v,
            pos,
            ends,
            None,
        )  # together: memory may have run out between them
        self._order, self._back, self._in_order = order, back, extents.order == sorted(extents.order)
        self._extents, self._runs = extents, extents.runs()


def room_of(n: int, step: int) -> int:
    """Room for a head of n slots: half a unit to one and a half more, in units that grow with n up to step / 4."""
    most = max(1, step // 4)
    unit = max(min(most, 16), min(most, 1 << max(0, (n // 32).bit_length() - 1)))  # n / 64 to n / 32
    return -(-(n + unit // 2) // unit) * unit
