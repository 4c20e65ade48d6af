"""The block tier: a tier below the top, of slots that are quantized as they are stored, in any KV format.

Rows attend to dequantized slots, one span at a time, by batch-invariant kernels; a tier whose format has kernels reads
the codes (quantized.py). Keys may be quantized before the rotary embedding; slots given to the tier and returned by it
always have keys after rotary embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import WIDEST, NewRows, StoredKV, attend_part, serves
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kernels.rope import Rotary, rotate, unrotate
from kvcli.kv.slots import AttentionParams, LayerShape, Slots, Usage, attend_new_only, storing_layer_of, visible
from kvcli.kv.snapshot import SnapshotReader, State
from kvcli.kv.tiers.block_run import BlockRun, PartCodec, RunForm
from kvcli.kv.tiers.lower_tier import StoredBelow

if TYPE_CHECKING:
    from kvcli.kv.formats.format import Codes
    from kvcli.settings.schema import Kv

SPAN = 4096  # most slots dequantized at once during attention
AT_ONCE = 512  # most slots of which all heads are quantized at once: of more, head by head takes less memory


@dataclass(frozen=True)
class BlockCodec(PartCodec):
    """Quantizer of keys and values together, in blocks of slots of `heads` heads."""

    write: Callable[[Tensor, Tensor, Kv], Codes]  # `quantize` of a `BlockFormat`
    read: Callable[[Codes, Kv, tuple[int, int], torch.dtype], tuple[Tensor, Tensor]]  # its `dequantize`
    kv: Kv
    dims: tuple[int, int]  # elements of a key and of a value
    heads: int
    rotary: Rotary | None = None  # rotary embedding removed from keys before quantization; None = not removed
    dtype: torch.dtype = torch.float32  # data type of dequantized slots
    of: tuple[int, ...] = (0, 1)
    by_block: bool = True

    @property
    def form(self) -> RunForm:
        """Form of a layer of these blocks."""
        return RunForm((self,), self.dims, self.kv.group, self.dtype, self.heads)

    def quantize(self, given: Sequence[Tensor], pos: Tensor) -> Codes:
        k, v = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in given)
        k = k if self.rotary is None else unrotate(k, pos, self.rotary)
        blocks = len(k) // self.heads, self.heads, -1, self.kv.group
        # [B, h, g, ..]
        k, v = (t.reshape(*blocks, t.shape[2]).transpose(1, 2).flatten(0, 1).contiguous() for t in (k, v))
        return self.write(k, v, self.kv)

    def dequantize(self, codes: Codes, pos: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(self.dtype, torch.float32)
        k, v = (t.transpose(0, 1).flatten(1, 2) for t in self.read(codes, self.kv, self.dims, wide))
        k = k if self.rotary is None else rotate(k, pos.clamp(min=0), self.rotary)
        return k.to(self.dtype), v.to(self.dtype)

    def layout(self, n: int) -> Codes:
        # quantizing zeros is far faster than a meta block
        k, v = (torch.zeros(1, self.heads, self.kv.group, d) for d in self.dims)
        return tuple(t.new_empty(n, *t.shape[1:], device="meta") for t in self.write(k, v, self.kv))


class BlockTier(StoredBelow):
    """A tier of quantized slots. Lengths differ by run: a head, or heads that are quantized together."""

    UNCAPTURED = "no kernel reads this KV format (kv_format.method)"

    def __init__(
        self,
        forms: Mapping[int, RunForm],
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device | str,
        span: int = SPAN,
    ) -> None:
        """`forms`: of the layers that store slots. `span`: most slots that attention dequantizes at once."""
        self.dtype, self.changes = dtype, 0
        self._ranks, self._holder = [shape.rank for shape in shapes], storing_layer_of(shapes)
        self._name = "packed" if torch.device(device).type == "cpu" else f"packed {torch.device(device).type}"
        self._layers = {
            layer: [BlockRun(form, device) for _ in range(shapes[layer].n_kv_heads // form.heads)]
            for layer, form in forms.items()
        }
        self._none = {
            layer: tuple(torch.empty(shapes[layer].n_kv_heads, 0, d, dtype=dtype, device=device) for d in form.dims)
            for layer, form in forms.items()
        }
        group = next(iter(forms.values())).group
        self._span = max(1, span // group) * group

    @property
    def _storing(self) -> Iterable[int]:
        return self._layers

    @property
    def batch_variant_reason(self) -> str:
        """Return "kv.dtype" if no batch-invariant kernel supports the data type."""
        likes = (join_latent(self._ranks[layer], *none) for layer, none in self._none.items())
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
        s = self._numbers(layer, span, coarse=params.is_draft)
        if not serves(q, s.v):
            return attend(q, s.k, s.v, params.scale, softcap=params.softcap, mask=visible(s.pos, pos, params.window))
        n, starts = len(span), range(0, len(s.k) * len(span), len(span))
        lengths = [min(max(0, run.length - span.start), n) for run, _ in self._heads(layer)]
        k, v = s.each(lambda t: t.flatten(0, 1))
        run, window = StoredKV(k, v, s.pos.flatten(), starts, lengths, starts), self._window(layer, params.window)
        return attend_part(q, run, pos, params.scale, window=window, softcap=params.softcap)

    def take(self, layer: int, slots: Slots) -> None:
        """Quantize and store slots, keys after rotary embedding; slots with position -1 are skipped."""
        if not slots.n_slots:
            return
        assert layer in self._layers, "this layer stores no slots: it shares those of another layer"
        k, v = map(self._turned, split_latent(self._ranks[layer], slots))
        runs, pos = self._changing(layer), slots.pos.to(self._layers[layer][0].pos)
        is_stored, h = pos >= 0, runs[0].form.heads
        if slots.n_slots <= AT_ONCE and bool(is_stored.all()) and len({run.length - run.full for run in runs}) == 1:
            BlockRun.take(runs, k, v, pos)
        else:
            for run, mine, *given in zip(runs, *(torch.split(t, h) for t in (is_stored, k, v, pos)), strict=True):
                assert len(mine) == 1 or bool((mine == mine[:1]).all()), "heads of one block differ in slots"
                if bool(mine.any()):
                    BlockRun.take([run], *(t[:, mine[0]] for t in given))
        self._share(layer)

    def n_slots(self, layer: int) -> int:
        """Return the number of slots of the longest head, holes included."""
        return max(run.length for run in self._layers[self._holder[layer]])

    def slots(self, layer: int) -> Slots:
        """Return a dequantized copy of the slots of a layer, padded to the longest head; holes have position -1."""
        return self._numbers(layer, range(self.n_slots(layer)))

    def positions(self, layer: int) -> Tensor:
        """Return pos [K, S] of all slots; holes and padding have -1."""
        return self._positions(layer, range(self.n_slots(layer)))

    def n_stable(self, layer: int, n: Tensor) -> Tensor:
        """Return [K]: how many of the first n [K] slots of each head are not quantized again without evictions."""
        return n.new_tensor(
            [run.n_stable(int(end)) for (run, _), end in zip(self._heads(layer), n.tolist(), strict=True)]
        )

    def gather(self, layer: int, index: Tensor) -> Slots:
        """Return slots index [K, M] of each head, -1 = empty; only these, or their blocks, are dequantized."""
        k, v = (t.new_zeros(*index.shape, t.shape[2]) for t in self._none[layer])
        pos = torch.full_like(index, -1, dtype=torch.int32)
        for j, (run, head) in enumerate(self._heads(layer)):
            to = ((index[j] >= 0) & (index[j] < run.length)).nonzero().squeeze(1)
            at = index[j, to]
            found = (*map(self._turned, run.numbers_at(head, at)), run.pos[head, at])
            for there, new in zip((k, v, pos), found, strict=True):
                there[j].index_copy_(0, to, new.to(there))
        return Slots(*join_latent(self._ranks[layer], k, v), pos)

    def head(self, layer: int, head: int, n: int) -> Slots:
        """Return the first n slots of one head, dequantized."""
        run, j = list(self._heads(layer))[head]
        k, v = (self._turned(t[j : j + 1]).to(t.dtype) for t in run.numbers(0, n))
        return Slots(*join_latent(self._ranks[layer], k, v), run.pos[j : j + 1, :n])

    def snapshot(self) -> State:
        """Return a snapshot by layer and run."""
        return {str(i): {str(j): run.state() for j, run in enumerate(runs)} for i, runs in self._layers.items()}

    def restore(self, given: SnapshotReader) -> None:
        """Restore the codes, without quantizing again."""
        for layer in self._layers:
            for j, run in enumerate(self._changing(layer)):
                run.restore(given.part(str(layer)).part(str(j)))
            self._share(layer)

    def usage(self) -> list[Usage]:
        """Return slots and bytes of each layer: codes, positions, and waiting slots. Tensors that layers share count in
        the first of them."""
        found, known = [], set[int]()
        for layer, runs in self._layers.items():
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for r in runs for t in r.tensors}
            slots = max(int((run.pos >= 0).sum(1).max()) for run in runs)
            size = sum(n for at, n in storages.items() if at not in known)
            known |= storages.keys() - {0}
            found.append(Usage(layer, self._name, slots, size, "rounded" if slots else None))
        return found

    def _heads(self, layer: int) -> Iterator[tuple[BlockRun, int]]:
        """Return for each KV head its run and its index there."""
        return ((run, j) for run in self._layers[layer] for j in range(run.form.heads))

    def _window(self, layer: int, window: int | None) -> int | None:
        """Return the window, or if there is none but there are holes, one that hides only these."""
        return WIDEST if window is None and any(run.has_holes for run in self._layers[layer]) else window

    def _positions(self, layer: int, span: range) -> Tensor:
        runs = self._layers[self._holder[layer]]
        pos = runs[0].pos.new_full((sum(len(run.pos) for run in runs), len(span)), -1)
        at = 0
        for run in runs:
            found = run.pos[:, span.start : span.stop]
            pos[at : (at := at + len(found)), : found.shape[1]] = found
        return pos

    def _numbers(self, layer: int, span: range, *, coarse: bool = False) -> Slots:
        """Return dequantized slots of a span that starts a block, padded."""
        layer, at = self._holder[layer], 0
        pos = self._positions(layer, span)
        k, v = (t.new_zeros(*pos.shape, t.shape[2]) for t in self._none[layer])
        for run in self._layers[layer]:
            own, n = slice(at, at := at + len(run.pos)), min(run.length, span.stop) - span.start
            if n > 0:
                found = run.numbers(span.start, span.start + n, coarse=coarse)
                k[own, :n], v[own, :n] = map(self._turned, found)
        return Slots(*join_latent(self._ranks[layer], k, v), pos)

    def _keep(self, layer: int, mask: Tensor) -> None:
        at = 0
        for run in self._changing(layer):
            part = mask[at : (at := at + len(run.pos)), : run.length]
            if not torch.equal(part, run.pos >= 0):
                run.evict_except(part)
        self._share(layer)

    def _changing(self, layer: int) -> list[BlockRun]:
        """Return the runs of a layer, which are about to change."""
        self.changes += 1
        return self._layers[layer]

    def _share(self, layer: int) -> None:
        """Share one row of positions between heads and layers with the same slots, the usual case."""
        runs = self._layers[layer]
        row = runs[0].pos[:1]
        if all(run.pos is runs[0].pos or torch.equal(run.pos, row.expand(len(run.pos), -1)) for run in runs):
            others = (of[0].pos[:1] for i, of in self._layers.items() if i != layer and of[0].length)
            other = next(others, None)
            if other is not None and torch.equal(other, row):
                row = other
            elif len(runs[0].pos) > 1:
                row = row.clone()  # the memory of the other heads' rows is freed
            for run in runs:
                run.pos = row.expand(run.form.heads, -1)

    def _turned(self, t: Tensor) -> Tensor:
        """Transform keys or values [.., D] before they are quantized, and after they are dequantized."""
        return t


def split_latent(rank: int, s: Slots) -> tuple[Tensor, Tensor]:
    """Return the tensors stored as keys and as values. Of latents (rank > 0): the rotary part and the rest."""
    return (s.k[..., rank:], s.k[..., :rank]) if rank else (s.k, s.v)


def join_latent(rank: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Invert `split_latent`."""
    if not rank:
        return k, v
    both = torch.cat((v, k), 2)
    return both, both
