"""The dense tier: keys and values as the model made them, on any device, in one slab per layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.merge import Part
from kvcli.kv.slots import Choose, Sight, Slots, Usage, compact, empty_like, visible


@dataclass(slots=True)
class _Slab:
    """One layer's storage. While all heads hold the same slots, one row of positions serves them all."""

    k: Tensor  # [K, cap, D]
    v: Tensor  # [K, cap, D]
    pos: Tensor  # [1, cap] int32, or [K, cap] once heads differ; -1 = empty
    length: int = 0  # slots of the longest head
    lengths: Tensor | None = None  # [K] slots of each head; None = all `length`
    newest: int = -1  # the last position appended
    ordered: bool = True  # positions rise with the slot index in every head

    @property
    def tensors(self) -> list[Tensor]:
        """All that takes memory."""
        return [t for t in (self.k, self.v, self.pos, self.lengths) if t is not None]


class Dense:
    """Keys and values in full precision.

    Grows in small steps, one layer at a time: the spare room is read along with the slots (finite, hidden by their
    place), so there is little of it. Refuses nothing: any device, any float type.
    """

    STEP = 256  # slots; copying 16k slots every 256 tokens costs 0.3 % of decoding them

    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        step: int = STEP,
    ) -> None:
        """`step`: slots by which a layer grows."""
        self.dtype = dtype
        self.changes = 0
        self._step = step
        self._name = "cpu" if torch.device(device).type == "cpu" else torch.device(device).type
        self._slabs = [
            _Slab(
                k=torch.empty(n_kv_heads, 0, head_dim, dtype=dtype, device=device),
                v=torch.empty(n_kv_heads, 0, head_dim, dtype=dtype, device=device),
                pos=torch.empty(1, 0, dtype=torch.int32, device=device),
            )
            for _ in range(n_layers)
        ]

    def attend(self, layer: int, q: Tensor, sight: Sight, pos: Tensor) -> list[Part]:
        """q [H, N, D] of rows at positions pos [N] -> at most one part."""
        s = self._slabs[layer]
        if s.length == 0:
            return []
        start, mask = 0, None
        if s.lengths is not None or not s.ordered:
            mask = visible(s.pos[:, : s.length], pos, sight.window)
        elif sight.window is not None:
            start, mask = _recent(s, pos, sight.window)
        if start == 0 and mask is None:  # the slab in one piece: its spare room holds finite numbers
            return [attend(q, s.k, s.v, sight.scale, softcap=sight.softcap, length=s.length)]
        if mask is not None and mask.shape[0] == 1:
            mask = mask[0]
        k, v = s.k[:, start : s.length], s.v[:, start : s.length]
        return [attend(q, k, v, sight.scale, softcap=sight.softcap, mask=mask)]

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Store k, v [K, M, D] at positions pos [M]; every head takes all of them."""
        s = self._slabs[layer]
        m = pos.shape[0]
        if not m:
            return
        self._grow(s, s.length + m)
        s.ordered &= int(pos[0]) > s.newest
        s.newest = int(pos[-1])
        if s.lengths is None:
            s.k[:, s.length : s.length + m] = k
            s.v[:, s.length : s.length + m] = v
            s.pos[:, s.length : s.length + m] = pos
        else:
            at = s.lengths.unsqueeze(1) + torch.arange(m, device=pos.device)  # [K, M]
            wide = at.unsqueeze(-1).expand(-1, -1, k.shape[2])
            s.k.scatter_(1, wide, k.to(s.k.dtype))
            s.v.scatter_(1, wide, v.to(s.v.dtype))
            s.pos.scatter_(1, at, pos.to(s.pos.dtype).expand(at.shape[0], -1))
            s.lengths += m
        s.length += m

    def slots(self, layer: int) -> Slots:
        """What this layer holds, as views of the slab."""
        s = self._slabs[layer]
        pos = s.pos[:, : s.length].expand(s.k.shape[0], -1)
        return Slots(s.k[:, : s.length], s.v[:, : s.length], pos)

    def keep(self, layer: int, mask: Tensor) -> Slots:
        """Forget slots whose mask [K, S] is False and give their memory back; returns what fell out."""
        before = self.slots(layer)
        mask = mask & (before.pos >= 0)
        count = (before.pos >= 0).sum(1)
        left = mask.sum(1)
        if torch.equal(left, count):
            return empty_like(before)
        fell = compact(before, ~mask)
        self.put(layer, compact(before, mask))
        return fell

    def put(self, layer: int, slots: Slots) -> None:
        """Hold these slots instead; their tensors become the tier's own."""
        s = self._slabs[layer]
        same = bool((slots.pos == slots.pos[:1]).all())
        s.k, s.v = slots.k.contiguous(), slots.v.contiguous()
        s.pos = slots.pos[:1].to(torch.int32, copy=True) if same else slots.pos.to(torch.int32)
        s.length = slots.n_slots
        s.lengths = None if same else (slots.pos >= 0).sum(1)
        pos = s.pos[0, : s.length]
        s.newest = int(slots.pos.max()) if s.length else -1
        s.ordered = same and bool((pos[1:] > pos[:-1]).all())
        self.changes += 1

    def crop(self, n: int) -> None:
        """Forget every slot at position n or later, keeping the memory for what follows: an undo, not an eviction."""
        self.changes += 1
        for layer, s in enumerate(self._slabs):
            if s.lengths is None and s.ordered:
                was, s.length = s.length, int((s.pos[0, : s.length] < n).sum())
                s.v[:, s.length : was] = 0  # spare room is read, and NaN or infinity would outlive its text
                s.newest = int(s.pos[0, s.length - 1]) if s.length else -1
            else:
                self.keep(layer, self.slots(layer).pos < n)

    def reserve(self, n: int) -> None:
        """Room for n slots a head in all layers, so that reading that many moves nothing."""
        for s in self._slabs:
            self._grow(s, n)

    def settle(self, choose: Choose | None) -> None:
        """Evict, layer by layer, what `choose` does not keep."""
        if choose is not None:
            for layer in range(len(self._slabs)):
                self.keep(layer, choose(layer, self.slots(layer)))

    def usage(self) -> list[Usage]:
        """Slots and bytes of each layer, spare room included."""
        return [
            Usage(layer, self._name, s.length, sum(t.untyped_storage().nbytes() for t in s.tensors))
            for layer, s in enumerate(self._slabs)
        ]

    def _grow(self, s: _Slab, need: int) -> None:
        if need > s.k.shape[1]:
            _resize(s, -(-need // self._step) * self._step)


def _resize(s: _Slab, cap: int) -> None:
    def wider(t: Tensor, shape: tuple[int, ...]) -> Tensor:
        new = t.new_zeros(shape)  # spare room and empty slots are read under a mask, and a masked NaN is still a NaN
        new[:, : s.length] = t[:, : s.length]
        return new

    k = wider(s.k, (s.k.shape[0], cap, s.k.shape[2]))
    v = wider(s.v, (s.v.shape[0], cap, s.v.shape[2]))
    pos = s.pos.new_full((s.pos.shape[0], cap), -1)
    pos[:, : s.length] = s.pos[:, : s.length]
    s.k, s.v, s.pos = k, v, pos  # together: memory may have run out between them


def _recent(s: _Slab, pos: Tensor, window: int) -> tuple[int, Tensor | None]:
    """Where the window of a sliding layer starts in slots kept in order, and the mask of its ragged edge, if any.

    Reading only the window is what makes sliding layers cheap at long context.
    """
    first = int(pos.min()) - window + 1  # the earliest row's window opens here
    stored = s.pos[0, : s.length]
    start = int(torch.searchsorted(stored, first))
    if int(pos.max()) - window + 1 <= max(first, int(stored[start]) if start < s.length else first):
        return start, None
    return start, stored[start:].view(1, 1, -1) > (pos - window).view(1, -1, 1)
