"""The quantized tier: keys and values in 8, 4 or 2 bits, and attention that reads the codes directly.

4 and 2 bits follow KIVI (arXiv 2402.02750): keys are quantized per channel in groups of slots, because some channels
of keys are large in every slot; values per slot in groups of channels. 8 bits have one scale per slot, which is precise
enough and lets torch's integer products read the codes. The residual and the attention sinks are in a dense tier above.
Multiplying keys, values and queries by a Hadamard matrix (QuaRot, arXiv 2404.00456) spreads outliers over all channels
and does not change attention, apart from quantization error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.errors import BadConfig
from kvcli.kernels import linear, triton_support
from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import (
    WIDEST,
    NewRows,
    QuantizedKV,
    StoredKV,
    attend_part,
    attend_quantized_part,
    serves,
    serves_packed,
)
from kvcli.kernels.attend_quantized import PackedHead, PackedTable, attend_quantized, attend_table, table_of, why_not
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kernels.quantize_kv import hadamard, turned
from kvcli.kv.slots import (
    AttentionParams,
    LayerShape,
    Slots,
    Usage,
    attend_new_only,
    storing_layer_of,
    visible,
    window_start,
)
from kvcli.kv.snapshot import SnapshotReader, State
from kvcli.kv.tiers.lossy import LossyTier, join_latent, split_latent
from kvcli.kv.tiers.quantized_head import Precision, QuantizedHead


class QuantizedTier(LossyTier):
    """A tier of quantized slots. Lengths differ by head, sizes by layer. Settings that the layouts do not support raise
    BadConfig.

    After evictions, 8-bit keys and values are not quantized again. 4- and 2-bit keys are, if less than half of their
    group remains.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        k_bits: int = 8,
        v_bits: int = 8,
        group: int = 64,
        rotate: str = "none",
        halves: bool = False,
    ) -> None:
        """`shapes`: by layer; a layer that reads another's slots stores none. `dtype`: of given slots and computation;
        `group`: elements that share a scale below 8 bits. `halves`: 8-bit codes are split into two 4-bit halves, of
        which drafting reads only the upper one (QuantSpec, arXiv 2502.10424)."""
        assert not halves or k_bits == v_bits == 8, "codes are split that do not have 8 bits"
        k_bits, v_bits = (4, 4) if halves else (k_bits, v_bits)
        own = {layer: of for layer, of in enumerate(shapes) if of.shared_from is None}
        for of in own.values():
            _check(of, k_bits, v_bits, rotate)
        self.dtype = dtype
        self.changes = 0
        self._name = "packed" if torch.device(device).type == "cpu" else f"packed {torch.device(device).type}"
        self._form = Precision(dtype, k_bits, v_bits, group, halves)
        self._empty = {
            layer: tuple(torch.empty(of.n_kv_heads, 0, d, dtype=dtype, device=device) for d in of.parts)
            for layer, of in enumerate(shapes)
        }
        self._own = {
            layer: [QuantizedHead(self._form, *of.parts, device) for _ in range(of.n_kv_heads)]
            for layer, of in own.items()
        }
        self._holder = storing_layer_of(shapes)
        self._ranks = [shapes[holder].rank for holder in self._holder]
        self._layers = {layer: self._own[holder] for layer, holder in enumerate(self._holder)}
        self._tables: dict[tuple[int, bool], PackedTable | None] = {}  # by (layer, upper half of codes only)
        self._runs: dict[tuple[int, bool], QuantizedKV] = {}  # by (layer, upper half of codes only)
        wide = torch.empty(0, dtype=torch.promote_types(dtype, torch.float32), device=device)
        sizes = {d for of in own.values() for d in of.parts} if rotate == "hadamard" else set()
        self._turns = {d: hadamard(d, wide) for d in sizes}
        self._panels = {d: linear.pack(turn) for d, turn in self._turns.items() if not linear.why_not(turn)}

    def __getstate__(self) -> dict[str, object]:
        """Return the state without cached tables, because these contain addresses of the original's tensors."""
        return {**self.__dict__, "_tables": {}, "_runs": {}}

    @property
    def batch_variant_reason(self) -> str:
        """Return "kv.dtype" or "kv.k_bits" (head size) if no batch-invariant kernel supports the tier, else ""."""
        each = self._empty.items()
        if all(serves(torch.cat((k, v), 2), v) if self._ranks[i] else serves_packed(k, v) for i, (k, v) in each):
            return ""
        return "kv.k_bits" if any(t.shape[2] % 16 for _, like in each for t in like) else "kv.dtype"

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N]: at most one over slots, and one over new KV."""
        layer = self._holder[layer]
        if not self.n_slots(layer):
            return attend_new_only(q, params, own)
        if self._ranks[layer]:
            return [self._unpacked(layer, q, params, pos), *attend_new_only(q, params, own)]
        if serves_packed(q, self._empty[layer][1]):
            run, window = self._run(layer, params.window, coarse=params.is_draft)
            turned = self._turned(q).to(q.dtype)
            part = attend_quantized_part(turned, run, pos, params.scale, window=window, softcap=params.softcap)
            return [PartialAttention(self._turned(part.out), part.lse), *attend_new_only(q, params, own)]
        if (table := self._table(layer, coarse=params.is_draft)) is not None:
            part = attend_table(self._turned(q), table, params.scale, pos, softcap=params.softcap, window=params.window)
            return [PartialAttention(self._turned(part.out), part.lse), *attend_new_only(q, params, own)]
        seen = [_seen(head, params.window, pos, coarse=params.is_draft) for head in self._layers[layer]]
        masks = [mask for _, mask in seen]
        part = attend_quantized(
            self._turned(q), [head for head, _ in seen], params.scale, self.dtype, softcap=params.softcap, masks=masks
        )
        return [PartialAttention(self._turned(part.out), part.lse), *attend_new_only(q, params, own)]

    def _unpacked(self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int]) -> PartialAttention:
        """Attend to latents (MLA) after dequantizing the whole layer, because no kernel reads their codes."""
        s = self._numbers(layer, coarse=params.is_draft)
        if serves(q, s.k):
            window = (
                WIDEST
                if params.window is None and any(head.has_holes for head in self._layers[layer])
                else params.window
            )
            k, n = s.k.flatten(0, 1), s.n_slots
            starts = range(0, len(s.k) * n, n)
            run = StoredKV(k, k, s.pos.flatten(), starts, [n] * len(s.k), starts)
            return attend_part(q, run, pos, params.scale, window=window, softcap=params.softcap)
        return attend(q, s.k, s.v, params.scale, softcap=params.softcap, mask=visible(s.pos, pos, params.window))

    def _table(self, layer: int, *, coarse: bool) -> PackedTable | None:
        """Return the cached address table of the heads; None if no kernel reads them by a table."""
        if triton_support.why_not(self._empty[layer][0].device, self.dtype):
            return None
        if (layer, coarse) not in self._tables:
            heads = self._layers[layer]
            codes = [head.since(0, coarse=coarse) for head in heads]
            holes = any(head.has_holes for head in heads)
            table = None if why_not(codes) else table_of(codes, [head.pos for head in heads], has_holes=holes)
            self._tables[layer, coarse] = table
        return self._tables[layer, coarse]

    def _run(self, layer: int, window: int | None, *, coarse: bool) -> tuple[QuantizedKV, int | None]:
        """Return the heads in place, and the window; with holes and no window, one that hides only the holes."""
        heads = self._layers[layer]
        if window is None and any(head.has_holes for head in heads):
            window = WIDEST
        first, lengths = heads[0].pos, [head.length for head in heads]
        if (run := self._runs.get((layer, coarse))) is None:
            run = QuantizedKV([head.since(0, coarse=coarse) for head in heads], first, [0] * len(heads))
            self._runs[layer, coarse] = run
        if window is None or all(head.pos is first for head in heads):
            return run, window
        starts = [sum(lengths[:j]) for j in range(len(heads))]
        return QuantizedKV(run.heads, torch.cat([head.pos for head in heads]), starts), window

    def take(self, layer: int, slots: Slots) -> None:
        """Quantize and store slots, keys after rotary embedding; slots with position -1 are skipped."""
        if not slots.n_slots:
            return
        assert layer in self._own, "this layer stores no slots: it shares those of another layer"
        self._forget_table(layer)
        k, v = map(self._turned, split_latent(self._ranks[layer], slots))
        is_stored = slots.pos >= 0
        whole = bool(is_stored.all())
        for j, head in enumerate(self._layers[layer]):
            at = slice(None) if whole else is_stored[j]
            if whole or bool(is_stored[j].any()):
                head.take(k[j, at], v[j, at], slots.pos[j, at])
        self._share(layer)
        self.changes += 1

    def n_slots(self, layer: int) -> int:
        """Return the number of slots of the longest head, holes included."""
        return max(head.length for head in self._layers[layer])

    def slots(self, layer: int) -> Slots:
        """Return a dequantized copy of the slots of a layer, padded to the longest head; holes have position -1."""
        return self._numbers(layer)

    def _numbers(self, layer: int, *, coarse: bool = False) -> Slots:
        pos = self.positions(layer)
        k, v = (like.new_zeros(*pos.shape, like.shape[2]) for like in self._empty[layer])
        for j, head in enumerate(self._layers[layer]):
            k[j, : head.length], v[j, : head.length] = (self._turned(t) for t in head.numbers(coarse=coarse))
        return Slots(*join_latent(self._ranks[layer], k, v), pos)

    def positions(self, layer: int) -> Tensor:
        """Return pos [K, S] of all slots; holes and padding have -1."""
        heads = self._layers[layer]
        pos = heads[0].pos.new_full((len(heads), self.n_slots(layer)), -1)
        for j, head in enumerate(heads):
            pos[j, : head.length] = head.pos
        return pos

    def n_stable(self, layer: int, n: Tensor) -> Tensor:
        """Return [K]: how many of the first n [K] slots of each head are not quantized again without evictions."""
        ends = zip(self._layers[layer], n.tolist(), strict=True)
        return n.new_tensor([head.final(int(end)) for head, end in ends])

    def gather(self, layer: int, index: Tensor) -> Slots:
        """Return slots index [K, M] of each head, -1 = empty; only these are dequantized."""
        k, v = (like.new_zeros(*index.shape, like.shape[2]) for like in self._empty[layer])
        pos = torch.full_like(index, -1, dtype=torch.int32)
        for j, head in enumerate(self._layers[layer]):
            is_stored = (index[j] >= 0) & (index[j] < head.length)
            at = index[j, is_stored]
            k[j, is_stored], v[j, is_stored] = (self._turned(t).to(t.dtype) for t in head.numbers_at(at))
            pos[j, is_stored] = head.pos[at]
        return Slots(*join_latent(self._ranks[layer], k, v), pos)

    def head(self, layer: int, head: int, n: int) -> Slots:
        """Return the first n slots of one head, dequantized."""
        of = self._layers[layer][head]
        k, v = (self._turned(t).to(t.dtype)[:n].unsqueeze(0) for t in of.numbers())
        return Slots(*join_latent(self._ranks[layer], k, v), of.pos[:n].unsqueeze(0))

    def crop(self, n: int) -> None:
        """Remove every slot at position n or later."""
        for layer, heads in self._own.items():
            late = [(head.pos >= n).any() for head in heads]
            if bool(torch.stack(late).any()):
                mask = torch.zeros(len(heads), self.n_slots(layer), dtype=torch.bool, device=heads[0].pos.device)
                for j, head in enumerate(heads):
                    mask[j, : head.length] = (head.pos >= 0) & (head.pos < n)
                self._keep(layer, mask)

    def snapshot(self) -> State:
        """Return a snapshot by layer and head."""
        return {
            str(layer): {str(j): head.state() for j, head in enumerate(heads)} for layer, heads in self._own.items()
        }

    def restore(self, given: SnapshotReader) -> None:
        """Restore the codes, without quantizing again."""
        self._tables.clear()
        self._runs.clear()
        for layer, heads in self._own.items():
            for j, head in enumerate(heads):
                head.restore(given.part(str(layer)).part(str(j)))
            self._share(layer)
        self.changes += 1

    def usage(self) -> list[Usage]:
        """Return slots and bytes of each layer: codes, scales, positions, and keys of incomplete groups. Tensors that
        layers share count in the first of them."""
        found, known = [], set[int]()
        for layer, heads in self._own.items():
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for h in heads for t in h.tensors}
            slots = max(int((head.pos >= 0).sum()) for head in heads)
            size = sum(n for at, n in storages.items() if at not in known)
            known |= storages.keys() - {0}
            found.append(Usage(layer, self._name, slots, size, "rounded" if slots else None))
        return found

    def _forget_table(self, layer: int) -> None:
        """Drop cached tables before heads change, because they keep the old tensors in memory."""
        for coarse in (False, True):
            self._tables.pop((layer, coarse), None)
            self._runs.pop((layer, coarse), None)

    def _keep(self, layer: int, mask: Tensor) -> None:
        self._forget_table(layer)
        for j, head in enumerate(self._layers[layer]):
            part = mask[j, : head.length]
            if not torch.equal(part, head.pos >= 0):
                head.evict_except(part)
        self._share(layer)
        self.changes += 1

    def _share(self, layer: int) -> None:
        """Share one row of positions between heads and layers with the same slots, the usual case."""
        first, *others = self._layers[layer]
        if all(torch.equal(head.pos, first.pos) for head in others):
            above = next((of[0].pos for i, of in self._own.items() if i != layer and len(of[0].pos)), first.pos)
            pos = above if torch.equal(above, first.pos) else first.pos
            for head in (first, *others):
                head.pos = pos

    def _turned(self, t: Tensor) -> Tensor:
        """Multiply t [.., D] by the Hadamard matrix, its own inverse; batch invariant if native kernels support it."""
        if not self._turns:
            return t
        turn, panels = self._turns[t.shape[-1]], self._panels.get(t.shape[-1])
        return turned(t, turn) if panels is None else linear.linear(t.to(turn.dtype), panels, None, t.shape[-1])


def _seen(
    head: QuantizedHead, window: int | None, rows: Sequence[int], *, coarse: bool
) -> tuple[PackedHead, Tensor | None]:
    """Return the slots of a head that rows at positions [N] read, and their mask [N, S] or [1, S], None = all."""
    if not head.length:
        return head.since(0, coarse=coarse), None
    is_stored = (head.pos >= 0).unsqueeze(0) if head.has_holes else None
    if window is None:
        return head.since(0, coarse=coarse), is_stored
    near = head.pos > window_start(rows, window, head.pos.device)  # [N, S]
    near = near if is_stored is None else near & is_stored
    if bool(near.all()):
        return head.since(0, coarse=coarse), None
    first = head.aligned(int(near.any(0).int().argmax())) if bool(near.any()) else head.length
    return head.since(first, coarse=coarse), near[:, first:]


def _check(of: LayerShape, k_bits: int, v_bits: int, rotate: str) -> None:
    for name, bits, dim in zip(("kv.k_bits", "kv.v_bits"), (k_bits, v_bits), of.parts, strict=True):
        if dim * bits % 8:
            why = f"its heads have {dim} numbers, and a byte holds {8 // bits}"
            raise BadConfig(
                f"{name} = {bits} does not fit this model: {why}", code="kv_bits", try_=[f"--set {name}=16"]
            )
    odd = [dim for dim in of.parts if dim & (dim - 1)]
    if rotate == "hadamard" and odd:
        raise BadConfig(
            f'kv.rotate = "hadamard" needs head sizes of a power of two, and this model has {odd[0]}',
            code="kv_rotate",
            try_=['--set kv.rotate="none"'],
        )
