"""The quantized tier: keys and values in 8, 4 or 2 bits, and attention that reads the codes directly.

4 and 2 bits follow KIVI (arXiv 2402.02750): keys are quantized per channel in groups of slots, because some channels
of keys are large in every slot; values per slot in groups of channels. 8 bits have one scale per slot, which is precise
enough and lets torch's integer products read the codes. The residual and the attention sinks are in a dense tier above.
Multiplying keys, values and queries by a Hadamard matrix (QuaRot, arXiv 2404.00456) spreads outliers over all channels
and does not change attention, apart from quantization error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvcli.errors import BadConfig
from kvcli.kernels import linear, triton_support
from kvcli.kernels.attend_invariant import NewRows, QuantizedKV, attend_quantized_part, serves, serves_packed
from kvcli.kernels.attend_quantized import PackedHead, PackedTable, attend_quantized, attend_table, table_of, why_not
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kernels.quantize_kv import Rounded, hadamard, pack_keys, pack_values, turned, unpack_keys, unpack_values
from kvcli.kv.formats.format import Codes
from kvcli.kv.slots import AttentionParams, LayerShape, attend_new_only, window_start
from kvcli.kv.tiers.block_run import BlockRun, PartCodec, RunForm
from kvcli.kv.tiers.block_tier import BlockTier
from kvcli.kv.tiers.device_tables import LowerLayer


@dataclass(frozen=True)
class KiviCodec(PartCodec):
    """Quantizer of the keys, or of the values, of one head. 4- and 2-bit keys are quantized by block, all else by slot:
    after evictions only these may be quantized again."""

    which: int  # 0 = keys, 1 = values
    bits: int
    group: int  # slots that share the scale of a channel in keys, channels that share one in values
    dim: int
    dtype: torch.dtype  # of dequantized slots, and of those of 16 bits
    halves: bool = False  # codes split into 4 upper and 4 lower bits

    splits = True

    @property
    def of(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.which,)

    @property
    def by_block(self) -> bool:  # type: ignore[override]
        return self.which == 0 and self.bits < 8

    @property
    def is_turned(self) -> bool:  # type: ignore[override]
        return self.which == 1 and self.bits == 8

    def quantize(self, given: Sequence[Tensor], pos: Tensor) -> Codes:
        x, pack = given[0].flatten(0, 1), pack_values if self.which else pack_keys
        codes = pack(x.to(self.dtype) if self.bits == 16 else x, self.bits, self.group, halves=self.halves).tensors
        if not self.by_block:
            return tuple(codes)
        return tuple(t.view(-1, self.group, t.shape[1]) if i in (0, 3) else t for i, t in enumerate(codes))

    def dequantize(self, codes: Codes, pos: Tensor) -> Sequence[Tensor]:
        like, r = torch.empty(0, dtype=self.dtype), self.rounded(codes)
        x = unpack_values(r, like, pos.shape[-1]) if self.which else unpack_keys(r, like)
        return [x.unsqueeze(0)]

    def coarse(self, codes: Codes) -> Codes:
        return codes[:3]

    def rounded(self, codes: Codes) -> Rounded:
        """Return codes as kernels read them."""
        return Rounded(self.bits, *(t.flatten(0, 1) if t.dim() == 3 else t for t in codes))

    @lru_cache(256)  # most heads of a cache are alike, and meta tensors are slow  # noqa: B019
    def layout(self, n: int) -> Codes:
        like = torch.empty(1, n * self.group if self.by_block else n, self.dim, dtype=self.dtype, device="meta")
        return self.quantize([like], like)


def packed_head(run: BlockRun, *, coarse: bool = False) -> PackedHead:
    """Return the slots of a head as kernels read them. `coarse`: only the upper bits of split codes."""
    keys, values = (
        part.rounded(part.coarse(codes) if coarse else codes)  # type: ignore[attr-defined]
        for part, codes in zip(run.form.parts, run.codes, strict=True)
    )
    rest = (
        run.waits[0][0] if run.waits else torch.empty(0, run.form.dims[0], dtype=run.form.dtype, device=run.pos.device)
    )
    return PackedHead(keys, rest, values, run.length)


def kivi_form(
    of: LayerShape, dtype: torch.dtype, k_bits: int, v_bits: int, group: int, *, halves: bool = False
) -> RunForm:
    """Return the form of a layer's heads."""
    each = zip((0, 1), (k_bits, v_bits), of.parts, strict=True)
    parts = tuple(KiviCodec(i, bits, group, dim, dtype, halves) for i, bits, dim in each)
    return RunForm(parts, of.parts, group, dtype)


class Hadamard:
    """Multiplication of keys, values or queries [.., D] by the Hadamard matrix of size D, its own inverse."""

    def __init__(self, sizes: Iterable[int], dtype: torch.dtype, device: torch.device | str) -> None:
        """`sizes`: possible D; none = no multiplication."""
        wide = torch.empty(0, dtype=torch.promote_types(dtype, torch.float32), device=device)
        self._turns = {d: hadamard(d, wide) for d in sizes}
        self._panels = {d: linear.pack(turn) for d, turn in self._turns.items() if not linear.why_not(turn)}

    def __call__(self, t: Tensor) -> Tensor:
        """Multiply; the result is batch invariant if native kernels support it."""
        if not self._turns:
            return t
        turn, panels = self._turns[t.shape[-1]], self._panels.get(t.shape[-1])
        return turned(t, turn) if panels is None else linear.linear(t.to(turn.dtype), panels, None, t.shape[-1])


@dataclass(slots=True, eq=False, weakref_slot=True)
class QuantizedLayer:
    """The heads of a layer, as a kernel on a device reads them by a table."""

    table: PackedTable
    turn: Hadamard

    @property
    def synced_length(self) -> int:
        return self.table.synced_length

    def attend(
        self, q: Tensor, pos: Sequence[int] | Tensor, scale: float, *, softcap: float, window: int | None
    ) -> PartialAttention:
        part = attend_table(self.turn(q), self.table, scale, pos, softcap=softcap, window=window)
        return PartialAttention(self.turn(part.out), part.lse)


class QuantizedTier(BlockTier):
    """A block tier whose codes kernels read. Settings that the layouts do not support raise BadConfig."""

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
        forms = {i: kivi_form(of, dtype, k_bits, v_bits, group, halves=halves) for i, of in own.items()}
        super().__init__(forms, shapes, dtype, device, span=1 << 30)  # latents are dequantized by layer
        self._tables: dict[int, QuantizedLayer | None] = {}  # by layer; without heads while they have changed
        self._runs: dict[tuple[int, bool], QuantizedKV] = {}  # by (layer, upper half of codes only)
        sizes = {d for of in own.values() for d in of.parts} if rotate == "hadamard" else ()
        self._turn = Hadamard(sizes, dtype, device)

    def __getstate__(self) -> dict[str, object]:
        """Return the state without cached tables, because these contain addresses of the original's tensors."""
        return {**self.__dict__, "_tables": {}, "_runs": {}}

    @property
    def batch_variant_reason(self) -> str:
        """Return "kv.dtype" or "kv.k_bits" (head size) if no batch-invariant kernel supports the tier, else ""."""
        each = self._none.items()
        if all(serves(torch.cat((k, v), 2), v) if self._ranks[i] else serves_packed(k, v) for i, (k, v) in each):
            return ""
        return "kv.k_bits" if any(t.shape[2] % 16 for _, none in each for t in none) else "kv.dtype"

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N]: at most one over slots, and one over new KV."""
        layer = self._holder[layer]
        if self._ranks[layer]:  # no kernel reads the codes of latents (MLA)
            return super().attend(layer, q, params, pos, own)
        if not self.n_slots(layer):
            return attend_new_only(q, params, own)
        runs, turned, coarse, softcap = self._layers[layer], self._turned(q), params.is_draft, params.softcap
        if serves_packed(q, self._none[layer][1]):
            run, window = self._run(layer, params.window, coarse=coarse)
            part = attend_quantized_part(turned.to(q.dtype), run, pos, params.scale, window=window, softcap=softcap)
        elif (table := self._table(layer)) is not None:
            part = table.attend(q, pos, params.scale, softcap=softcap, window=params.window)
            return [part, *attend_new_only(q, params, own)]
        else:
            heads, masks = self._packed(layer, coarse=coarse), [_seen(run, params.window, pos) for run in runs]
            part = attend_quantized(turned, heads, params.scale, self.dtype, softcap=softcap, masks=masks)
        return [PartialAttention(self._turned(part.out), part.lse), *attend_new_only(q, params, own)]

    def device_layer(self, layer: int) -> LowerLayer | str:
        return self._table(self._holder[layer]) or "no kernel reads this quantized KV on this device (kv.k_bits)"

    def _packed(self, layer: int, *, coarse: bool = False) -> list[PackedHead]:
        return [packed_head(run, coarse=coarse) for run in self._layers[layer]]

    def _table(self, layer: int) -> QuantizedLayer | None:
        """Return the table of the heads of a storing layer; None if no kernel reads them by a table."""
        if self._ranks[layer] or triton_support.why_not(self._none[layer][0].device, self.dtype):
            return None
        found = self._tables.get(layer)
        if layer not in self._tables or (found is not None and not found.table.heads):
            heads, runs = self._packed(layer), self._layers[layer]
            holes, pos = any(run.has_holes for run in runs), [run.pos[0] for run in runs]
            if why_not(heads):
                found = None
            elif found is None or not found.table.update(heads, pos, has_holes=holes):
                found = QuantizedLayer(table_of(heads, pos, has_holes=holes), self._turn)
            self._tables[layer] = found
        return found

    def _run(self, layer: int, window: int | None, *, coarse: bool) -> tuple[QuantizedKV, int | None]:
        """Return the heads in place, and the window; with holes and no window, one that hides only the holes."""
        runs, window = self._layers[layer], self._window(layer, window)
        first, lengths = runs[0].pos[0], [run.length for run in runs]
        if (found := self._runs.get((layer, coarse))) is None:
            found = QuantizedKV(self._packed(layer, coarse=coarse), first, [0] * len(runs))
            self._runs[layer, coarse] = found
        if window is None or all(run.pos.data_ptr() == first.data_ptr() for run in runs):
            return found, window
        starts = [sum(lengths[:j]) for j in range(len(runs))]
        return QuantizedKV(found.heads, torch.cat([run.pos[0] for run in runs]), starts), window

    def _changing(self, layer: int) -> list[BlockRun]:
        for coarse in (False, True):  # what was read keeps old tensors in memory
            self._runs.pop((layer, coarse), None)
        if (table := self._tables.pop(layer, None)) is not None:
            table.table.heads = table.table.pos = ()
            self._tables[layer] = table
        return super()._changing(layer)

    def _turned(self, t: Tensor) -> Tensor:
        return self._turn(t)


def _seen(run: BlockRun, window: int | None, rows: Sequence[int]) -> Tensor | None:
    """Return the mask [N, S] or [1, S] of the slots of a head that rows at positions [N] read; None = all."""
    is_stored = run.pos >= 0 if run.has_holes else None
    if window is None or not run.length:
        return is_stored
    near = run.pos > window_start(rows, window, run.pos.device)  # [N, S]
    near = near if is_stored is None else near & is_stored
    return None if bool(near.all()) else near


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
