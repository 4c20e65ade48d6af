"""The block tier: old slots in any KV format that quantizes and dequantizes blocks of slots.

Slots stay in full precision until `kv.group` of them make a block. An evicted slot becomes a hole. If less than half of
a block remains, its slots are dequantized and stay in full precision until a new block is full. Rows attend to
dequantized slots, one span at a time, by batch-invariant kernels. Keys may be quantized before the rotary embedding;
slots given to the tier and returned by it always have keys after rotary embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import WIDEST, NewRows, StoredKV, attend_part, serves
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kernels.rope import Rotary, rotate, unrotate
from kvcli.kv.slots import AttentionParams, LayerShape, Slots, Usage, attend_new_only, storing_layer_of, visible
from kvcli.kv.snapshot import SnapshotMismatch, SnapshotReader, State
from kvcli.kv.tiers.lossy import LossyTier, join_latent, split_latent

if TYPE_CHECKING:
    from kvcli.kv.formats.format import Codes
    from kvcli.settings.schema import Kv

SPAN = 4096  # most slots dequantized at once during attention


@dataclass(frozen=True)
class BlockCodec:
    """Quantizer of a layer: blocks of slots of `heads` heads together."""

    quantize: Callable[[Tensor, Tensor, Kv], Codes]  # as in `BlockFormat`, like the next one
    dequantize: Callable[[Codes, Kv, tuple[int, int], torch.dtype], tuple[Tensor, Tensor]]
    kv: Kv
    dims: tuple[int, int]  # elements of a key and of a value
    heads: int
    rotary: Rotary | None = None  # rotary embedding removed from keys before quantization; None = not removed
    dtype: torch.dtype = torch.float32  # data type of unquantized and dequantized slots

    def pack(self, k: Tensor, v: Tensor, pos: Tensor) -> Codes:
        """Quantize k [h, S, D], v [h, S, E] at pos [h, S], S whole blocks."""
        wide = torch.promote_types(k.dtype, torch.float32)
        k = k.to(wide) if self.rotary is None else unrotate(k.to(wide), pos, self.rotary)
        k, v = (blocked(t.to(wide), self.kv.group).transpose(0, 1).contiguous() for t in (k, v))  # [B, h, g, ..]
        return self.quantize(k, v, self.kv)

    def unpack(self, codes: Codes, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Dequantize blocks at pos [h, S] to k [h, S, D], v [h, S, E]; holes are finite too."""
        wide = torch.promote_types(self.dtype, torch.float32)
        k, v = (t.transpose(0, 1).flatten(1, 2) for t in self.dequantize(codes, self.kv, self.dims, wide))
        k = k if self.rotary is None else rotate(k, pos.clamp(min=0), self.rotary)
        return k.to(self.dtype), v.to(self.dtype)

    def layout(self, blocks: int) -> Codes:
        """Return the codes of n blocks as meta tensors. Quantizing zeros is far faster than a meta block."""
        k, v = (torch.zeros(1, self.heads, self.kv.group, d) for d in self.dims)
        return tuple(t.new_empty(blocks, *t.shape[1:], device="meta") for t in self.quantize(k, v, self.kv))


class HeadGroup:
    """Slots of heads that are quantized together: S per head, of which the last r are of an incomplete block."""

    def __init__(self, codec: BlockCodec, device: torch.device | str) -> None:
        self._codec, self._group = codec, codec.kv.group
        self.codes: Codes = tuple(torch.empty_like(t, device=device) for t in codec.layout(0))
        self.k, self.v = (torch.empty(codec.heads, 0, d, dtype=codec.dtype, device=device) for d in codec.dims)
        self.pos = torch.empty(codec.heads, 0, dtype=torch.int32, device=device)  # [h, S], -1 = hole
        self.has_holes = False

    @property
    def length(self) -> int:
        return self.pos.shape[1]

    @property
    def full(self) -> int:
        """Number of slots in blocks."""
        return self.length - self.k.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the group."""
        return [self.pos, self.k, self.v, *self.codes]

    def take(self, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Store k [h, M, D], v [h, M, E] at positions pos [h, M], none of them -1."""
        self._hold(
            self.codes,
            torch.cat([self.k, k.to(self.k.dtype)], 1),
            torch.cat([self.v, v.to(self.v.dtype)], 1),
            torch.cat([self.pos, pos.to(self.pos)], 1),
        )

    def evict_except(self, mask: Tensor) -> None:
        """Evict slots whose mask [h, S] is False."""
        full, h = self.full, self._codec.heads
        assert h == 1 or bool((mask == mask[:1]).all()), "heads of one block would differ in slots"
        left = blocked(mask[:, :full], self._group)  # [h, B, g]
        pos = blocked(self.pos[:, :full], self._group)
        stays = left.sum((0, 2)) * 2 >= h * self._group  # [B]
        loose = left & ~stays[:, None]
        touched = loose.any(2).any(0).nonzero().squeeze(1)
        moved = self._codec.unpack(tuple(t[touched] for t in self.codes), pos[:, touched].flatten(1))
        which = loose[:, touched].flatten(1)
        waits = mask[:, full:]
        k, v = (
            torch.cat([found[which].view(h, -1, t.shape[2]), t[waits].view(h, -1, t.shape[2])], 1)
            for found, t in zip(moved, (self.k, self.v), strict=True)
        )
        kept = torch.where(left, pos, -1)[:, stays].flatten(1)
        ends = [pos[loose].view(h, -1), self.pos[:, full:][waits].view(h, -1)]
        self._hold(tuple(t[stays] for t in self.codes), k, v, torch.cat([kept, *ends], 1))
        self.has_holes = not bool((self.pos >= 0).all())

    def numbers(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return dequantized k, v [h, last - first, ..], holes included; `first` starts a block."""
        g, end = self._group, min(last, self.full)
        blocks = slice(first // g, max(first, end + g - 1) // g)
        pos = self.pos[:, first : blocks.stop * g] if end > first else self.pos[:, :0]
        found = self._codec.unpack(tuple(t[blocks] for t in self.codes), pos)
        waits = slice(max(0, first - self.full), max(0, last - self.full))
        k, v = (
            torch.cat([a[:, : max(0, end - first)], b[:, waits]], 1)
            for a, b in zip(found, (self.k, self.v), strict=True)
        )
        return k, v

    def numbers_at(self, head: int, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return k, v [m, ..] of slots `at` [m] of one head; only their blocks are dequantized."""
        g, waits = self._group, at >= self.full
        blocks, order = torch.unique(at[~waits] // g, return_inverse=True)
        pos = blocked(self.pos[:, : self.full], g)[:, blocks].flatten(1)
        found = self._codec.unpack(tuple(t[blocks] for t in self.codes), pos)
        out = []
        for read, rest in zip(found, (self.k, self.v), strict=True):
            t = rest.new_empty(at.shape[0], rest.shape[2])
            t[~waits], t[waits] = read[head, order * g + at[~waits] % g], rest[head, at[waits] - self.full]
            out.append(t)
        return out[0], out[1]

    def state(self) -> State:
        """Return a snapshot: positions, codes and unquantized slots."""
        codes: State = {str(i): t for i, t in enumerate(self.codes)}
        return {"pos": self.pos.contiguous(), "k": self.k, "v": self.v, "codes": codes}

    def restore(self, given: SnapshotReader) -> None:
        """Restore a snapshot."""
        codec, here = self._codec, self.pos.device
        pos = given.positions("pos", codec.heads, None, least=-1)
        k = given.tensor("k", codec.dtype, codec.heads, None, codec.dims[0])
        v = given.tensor("v", codec.dtype, codec.heads, k.shape[1], codec.dims[1])
        full, rest = pos.shape[1] - k.shape[1], k.shape[1]
        if full % self._group or not 0 <= rest < self._group:
            raise SnapshotMismatch("its slots do not fill blocks")
        layout = codec.layout(full // self._group)
        part = given.part("codes")
        self.codes = tuple(part.like(str(i), t).to(here) for i, t in enumerate(layout))
        self.pos, self.k, self.v = pos.to(here), k.to(here), v.to(here)
        self.has_holes = not bool((pos >= 0).all())

    def _hold(self, codes: Codes, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Replace all slots and quantize full blocks of unquantized ones."""
        n = k.shape[1] // self._group * self._group
        if n:
            first = pos.shape[1] - k.shape[1]
            more = self._codec.pack(k[:, :n], v[:, :n], pos[:, first : first + n])
            codes = tuple(torch.cat([a, b.to(a.dtype)]) for a, b in zip(codes, more, strict=True))
            k, v = k[:, n:].clone(), v[:, n:].clone()
        # assigned together, because an allocation above may have failed
        self.codes, self.k, self.v, self.pos = codes, k, v, pos


class BlockTier(LossyTier):
    """A tier of quantized blocks. Lengths differ by head group."""

    def __init__(
        self,
        codecs: Mapping[int, BlockCodec],
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`codecs`: of the layers that store slots."""
        self.dtype, self.changes = dtype, 0
        self._shapes, self._holder = shapes, storing_layer_of(shapes)
        self._name = "packed" if torch.device(device).type == "cpu" else f"packed {torch.device(device).type}"
        self._bands = {
            layer: [HeadGroup(codec, device) for _ in range(shapes[layer].n_kv_heads // codec.heads)]
            for layer, codec in codecs.items()
        }
        group = next(iter(codecs.values())).kv.group
        self._span = max(1, SPAN // group) * group

    @property
    def batch_variant_reason(self) -> str:
        """Return "kv.dtype" if no batch-invariant kernel supports the data type."""
        likes = [join_latent(self._shapes[layer].rank, *bands[0].numbers(0, 0)) for layer, bands in self._bands.items()]
        return "" if all(serves(k, v) for k, v in likes) else "kv.dtype"

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N] over each span of slot indices."""
        layer = self._holder[layer]
        n = self.n_slots(layer)
        spans = (range(first, min(n, first + self._span)) for first in range(0, n, self._span))
        return [*(self._part(layer, span, q, params, pos) for span in spans), *attend_new_only(q, params, own)]

    def _part(
        self, layer: int, span: range, q: Tensor, params: AttentionParams, pos: Sequence[int]
    ) -> PartialAttention:
        s = self._numbers(layer, span)
        if not serves(q, s.v):
            return attend(q, s.k, s.v, params.scale, softcap=params.softcap, mask=visible(s.pos, pos, params.window))
        bands, n = self._bands[layer], len(span)
        window = WIDEST if params.window is None and any(band.has_holes for band in bands) else params.window
        starts = range(0, len(s.k) * n, n)
        lengths = [min(max(0, band.length - span.start), n) for band, _ in self._heads(layer)]
        k, v = s.each(lambda t: t.flatten(0, 1))
        return attend_part(
            q,
            StoredKV(k, v, s.pos.flatten(), starts, lengths, starts),
            pos,
            params.scale,
            window=window,
            softcap=params.softcap,
        )

    def take(self, layer: int, slots: Slots) -> None:
        """Store slots, keys after rotary embedding; slots with position -1 are skipped."""
        if not slots.n_slots:
            return
        assert layer in self._bands, "this layer stores no slots: it shares those of another layer"
        k, v = split_latent(self._shapes[layer].rank, slots)
        at = 0
        for band in self._bands[layer]:
            own = slice(at, at := at + band.pos.shape[0])
            is_stored = slots.pos[own] >= 0
            assert len(is_stored) == 1 or bool((is_stored == is_stored[:1]).all()), "heads of a block differ in slots"
            band.take(k[own, is_stored[0]], v[own, is_stored[0]], slots.pos[own, is_stored[0]])
        self._share(layer)
        self.changes += 1

    def n_slots(self, layer: int) -> int:
        """Return the number of slots of the longest head, holes included."""
        return max(band.length for band in self._bands[layer])

    def slots(self, layer: int) -> Slots:
        """Return a dequantized copy of the slots of a layer, padded to the longest head; holes have position -1."""
        return self._numbers(layer, range(self.n_slots(layer)))

    def positions(self, layer: int) -> Tensor:
        """Return pos [K, S] of all slots; holes and padding have -1."""
        return self._positions(layer, range(self.n_slots(layer)))

    def n_stable(self, layer: int, n: Tensor) -> Tensor:
        """Return [K]: how many of the first n [K] slots of each head are not quantized again without evictions."""
        ends = zip(self._heads(layer), n.tolist(), strict=True)
        return n.new_tensor([min(int(end), band.full) // band._group * band._group for (band, _), end in ends])

    def gather(self, layer: int, index: Tensor) -> Slots:
        """Return slots index [K, M] of each head, -1 = empty; only their blocks are dequantized."""
        k, v = (t.new_zeros(*index.shape, t.shape[2]) for t in self._likes(layer))
        pos = torch.full_like(index, -1, dtype=torch.int32)
        for j, (band, head) in enumerate(self._heads(layer)):
            is_stored = (index[j] >= 0) & (index[j] < band.length)
            at = index[j, is_stored]
            k[j, is_stored], v[j, is_stored] = band.numbers_at(head, at)
            pos[j, is_stored] = band.pos[head, at]
        return Slots(*join_latent(self._shapes[layer].rank, k, v), pos)

    def head(self, layer: int, head: int, n: int) -> Slots:
        """Return the first n slots of one head, dequantized."""
        band, j = list(self._heads(layer))[head]
        k, v = (t[j : j + 1] for t in band.numbers(0, n))
        return Slots(*join_latent(self._shapes[layer].rank, k, v), band.pos[j : j + 1, :n])

    def crop(self, n: int) -> None:
        """Remove every slot at position n or later."""
        for layer in self._bands:
            pos = self.positions(layer)
            if bool((pos >= n).any()):
                self._keep(layer, (pos >= 0) & (pos < n))

    def snapshot(self) -> State:
        """Return a snapshot by layer and head group."""
        return {
            str(layer): {str(i): band.state() for i, band in enumerate(bands)} for layer, bands in self._bands.items()
        }

    def restore(self, given: SnapshotReader) -> None:
        """Restore the codes, without quantizing again."""
        for layer, bands in self._bands.items():
            for i, band in enumerate(bands):
                band.restore(given.part(str(layer)).part(str(i)))
            self._share(layer)
        self.changes += 1

    def usage(self) -> list[Usage]:
        """Return slots and bytes of each layer: codes, positions, and slots of incomplete blocks."""
        found = []
        for layer, bands in self._bands.items():
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for b in bands for t in b.tensors}
            slots = max(int((band.pos >= 0).sum(1).max()) for band in bands)
            found.append(Usage(layer, self._name, slots, sum(storages.values()), "rounded" if slots else None))
        return found

    def _heads(self, layer: int) -> Iterator[tuple[HeadGroup, int]]:
        """Return for each KV head its head group and its index in the group."""
        return ((band, j) for band in self._bands[layer] for j in range(band.pos.shape[0]))

    def _likes(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return unquantized keys and values, for shape and data type."""
        return self._bands[layer][0].k, self._bands[layer][0].v

    def _positions(self, layer: int, span: range) -> Tensor:
        bands = self._bands[layer]
        pos = bands[0].pos.new_full((self._shapes[layer].n_kv_heads, len(span)), -1)
        for j, (band, head) in enumerate(self._heads(layer)):
            found = band.pos[head, span.start : span.stop]
            pos[j, : len(found)] = found
        return pos

    def _numbers(self, layer: int, span: range) -> Slots:
        """Return dequantized slots of a span that starts a block, padded."""
        pos = self._positions(layer, span)
        k, v = (t.new_zeros(*pos.shape, t.shape[2]) for t in self._likes(layer))
        at = 0
        for band in self._bands[layer]:
            own = slice(at, at := at + band.pos.shape[0])
            n = min(band.length, span.stop) - span.start
            if n > 0:
                k[own, :n], v[own, :n] = band.numbers(span.start, span.start + n)
        return Slots(*join_latent(self._shapes[layer].rank, k, v), pos)

    def _keep(self, layer: int, mask: Tensor) -> None:
        at = 0
        for band in self._bands[layer]:
            part = mask[at : (at := at + band.pos.shape[0]), : band.length]
            if not torch.equal(part, band.pos >= 0):
                band.evict_except(part)
        self._share(layer)
        self.changes += 1

    def _share(self, layer: int) -> None:
        """Share one row of positions between heads with the same slots, the usual case."""
        bands = self._bands[layer]
        first = bands[0].pos[:1]
        if all(band.length == first.shape[1] and bool((band.pos == first).all()) for band in bands):
            first = first.clone()
            for band in bands:
                band.pos = first.expand(band.pos.shape[0], -1)


def blocked(t: Tensor, group: int) -> Tensor:
    """Reshape t [h, S, ..] to blocks [h, B, g, ..]."""
    return t.reshape(t.shape[0], t.shape[1] // group, group, *t.shape[2:])
