"""Build the KV cache of a profile: one dense tier, or a tiered cache that `[kv]` quantizes and `[memory]` offloads.

If `memory.evicted` is "demote", the policy chooses the slots to demote to the first lower level. If there is no
lower level, sparse attention gets one on the same device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import psutil
import torch

from kvcli.errors import BadConfig
from kvcli.kernels import dispatch, triton_support
from kvcli.kernels.rope import Rotary
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.cache.precision_budget import PrecisionBudget, keys_in, unit
from kvcli.kv.cache.tiered_cache import TieredCache
from kvcli.kv.capacity import CacheCapacity, CacheFootprint
from kvcli.kv.footprint import STEP
from kvcli.kv.formats.block_format import BlockFormat
from kvcli.kv.formats.format import FormatContext
from kvcli.kv.formats.kivi import Kivi
from kvcli.kv.offload.host_access import Way
from kvcli.kv.slots import AttentionParams, KVCache, LayerShape, Tier, params_of_storing_layers, windows_of
from kvcli.kv.sparse.page_source import PageTier
from kvcli.kv.sparse.settings import SparseMethod
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.tiers.host import PIECE, HostTier
from kvcli.models.machine import kept_free
from kvcli.settings.profile import tier_effects
from kvcli.settings.schema import Kv, Memory, size_of


@dataclass(frozen=True)
class CachePlan:
    """Settings, model sizes and memory from which a KV cache is built."""

    shapes: Sequence[LayerShape]  # by layer
    dtype: torch.dtype  # data type of newly committed rows
    device: torch.device  # device of the model
    kv: Kv
    memory: Memory
    recall: SparseMethod  # sparse attention for the levels below the top, or for a single tier
    attention_params: Sequence[AttentionParams]  # by layer
    chunk: int  # most tokens of one prefill pass
    held: int = 0  # device bytes of the KV cache that this one replaces
    working: int = 0  # device bytes of a forward pass, KV aside
    form: BlockFormat = field(default_factory=Kivi)  # format of quantized slots
    # rotary embeddings of the layers, for formats that need them
    rotaries: Callable[[], Sequence[Rotary | None]] = tuple
    spare: int = 0  # device bytes shared by sequences whose budget is "fit"

    def store(self) -> KVCache:
        """Build the KV cache. Raises BadConfig or CacheFull if the settings cannot be met."""
        if self.device.type == "cpu":
            self._refuse_host()
        self._check_steps()
        if not tier_effects(self.kv, self.form, self.memory):
            dense = self._dense(self.device)
            return self.recall.bind(dense, dense, self._attention_params)
        top, below = self._dense(self.device, STEP), list[TierLevel]()
        if self.memory.spends:
            units = ((bits, unit(bits, self.kv.group)) for bits in self.memory.bits)
            below += [TierLevel(self._packed(self.device, bits), group=group) for bits, group in units]
        if self.is_packed:
            below.append(self._level(self._packed(self.device), self.room.on_device, self.kv.group))
        if self.room.host_bytes:
            below.append(self._far_level(self._host(), self.room.in_host, self.kv.group))
        if size_of(self.memory.disk):
            disk = self._disk()
            if self.device.type == "cpu":
                below.append(self._level(disk, self.room.on_disk))
            else:
                below.append(self._far_level(self._far(disk), self.room.on_disk))
        if self.memory.demotes and not below:
            self._refuse_all_alike()
            below.append(
                TierLevel(self.recall.bind_tier(self._dense(self.device, STEP), self._attention_params), name="demoted")
            )
        # with a precision budget the policy chooses the slots of each level
        on_device = None if self.memory.spends else self.room.on_device
        cache = TieredCache(
            top,
            below,
            holds=self.kv.residual if self.footprint.is_packed_by_age else on_device,
            group=self.kv.group if below and not self.memory.spends else 1,
            sinks=self.kv.sinks,
            demotes=self.memory.demotes and not self.memory.spends,
            evicts_oldest=self.memory.drops and not self.memory.spends,  # as above
        )
        return cache if below else self.recall.bind(cache, top, self._attention_params)

    def _level(self, tier: PageTier, holds: int | None, group: int = 1) -> TierLevel:
        return TierLevel(self.recall.bind_tier(tier, self._attention_params), holds, group)

    def _far_level(self, tier: HostTier, holds: int | None, group: int = 1) -> TierLevel:
        """Return a level in host memory. If it is read in full, its attention runs in parallel with the device's."""
        later = None if self.recall.layers(self._attention_params) else tier.attend_async
        return replace(self._level(tier, holds, group), attend_async=later)

    def _refuse_host(self) -> None:
        steps = [step for step in self.memory.fallbacks if step.startswith("memory.host")]
        if steps or (self.memory.host != "auto" and size_of(self.memory.host)):
            asked = f"memory.fallbacks has {steps[0]}" if steps else f"memory.host = {self.memory.host}"
            raise BadConfig(
                f"{asked}, but the KV cache is in host memory already",
                code="no_host_tier",
                lines=["the model runs on the CPU, where tiers differ in bits only"],
                try_=["--set memory.host=0GiB", "--set kv.k_bits=8 --set kv.v_bits=8", "--set memory.disk=8GiB"],
            )

    def _refuse_all_alike(self) -> None:
        if not self.recall.describe_read:
            raise BadConfig(
                'memory.evicted = "demote" needs a lower tier or sparse attention',
                code="no_lower_tier",
                lines=["tokens in the same tier that every token reads are not evicted"],
                try_=["--set sparse.method=sketch", "--set kv.k_bits=8 --set kv.v_bits=8", "--set memory.disk=8GiB"],
            )

    def _check_steps(self) -> None:
        """Check that fallback steps that quantize suit the model, before memory runs out."""
        for kv in self._packings():
            replace(self, kv=kv)._packed(self.device)

    @property
    def batch_variant_reason(self) -> str:
        """Name of the setting that makes attention over the cache batch variant; "" if it is batch invariant.

        All possible tiers are checked, because a fallback step of `memory.fallbacks` may quantize later.
        """
        found = next(filter(None, (tier.batch_variant_reason for tier in self._tiers())), "")
        return "memory.bits" if self.memory.spends and found == "kv.k_bits" else found

    def _tiers(self) -> Iterator[Tier]:
        """Yield one tier of each kind that the settings allow, even without capacity for it."""
        yield self._dense(self.device)
        for kv in (self.kv, *self._packings()):
            if self.form.is_active(kv):
                yield replace(self, kv=kv)._packed(self.device)
        for bits in self.memory.bits if self.memory.spends else ():
            yield self._packed(self.device, bits)
        if size_of(self.memory.disk):
            yield self._disk()

    def _packings(self) -> Iterator[Kv]:
        """Yield `[kv]` as changed by each step of `memory.fallbacks` that quantizes."""
        for step in self.memory.fallbacks:
            key, _, value = step.partition("=")
            if key in ("kv.k_bits", "kv.v_bits"):
                bits: dict[str, Any] = {key.removeprefix("kv."): int(value)}
                yield replace(self.kv, **bits)

    @property
    def _attention_params(self) -> list[AttentionParams | None]:
        """Attention parameters of storing layers, None for other layers."""
        return params_of_storing_layers(self.attention_params, self.shapes)

    @property
    def is_packed(self) -> bool:
        return self.form.is_active(self.kv)

    @cached_property
    def room(self) -> CacheCapacity:
        """Capacity of the KV cache under these settings on this machine."""
        is_gpu, free = self.device.type == "cuda", int(psutil.virtual_memory().available)
        host = free - kept_free(free) if is_gpu else 0
        reserved = card = 0
        if is_gpu:
            free, card = map(int, torch.cuda.mem_get_info(self.device))
            reserved = self.working + 2 * PIECE  # a forward pass, and the buffers for offloaded slots
        free += self.held
        return self.footprint.capacity(self.chunk, max(0, free - kept_free(free, card) - reserved), host)

    @cached_property
    def footprint(self) -> CacheFootprint:
        """Memory of the KV cache by slots."""
        of_model = self.shapes, self.attention_params, self.dtype.itemsize, self.device.type
        return CacheFootprint(self.kv, self.form, self.memory, self.recall, *of_model)

    def _dense(self, device: torch.device, step: int = Dense.STEP) -> Dense:
        return Dense(self.shapes, self.dtype, device, step=step, windows=windows_of(self.shapes, self.attention_params))

    @cached_property
    def spending(self) -> PrecisionBudget:
        """Precision budget of `memory.budget`."""
        # a prefill chunk before its slots are assigned to levels
        newest = self.chunk * sum(shape.slot_bytes(self.dtype.itemsize) for shape in self.shapes)
        free = self.footprint.fit_bytes(self.spare, self.working + newest)
        return self.footprint.budget(free, has_more=self.room.has_more, holds=self.room.elsewhere)

    def _packed(self, device: torch.device, bits: int | None = None) -> PageTier:
        """Return a quantized tier of `bits`; None = the bits of `[kv]`."""
        of_rung: dict[str, Any] = {"k_bits": keys_in(bits), "v_bits": bits} if bits else {}
        kv = replace(self.kv, **of_rung)
        return self.form.tier(FormatContext(self.shapes, self.dtype, self.attention_params, self.rotaries), device, kv)

    def _host(self) -> HostTier:
        from kvcli.kv.offload.transfer import bus_of
        from kvcli.kv.tiers.disk import ExtentTier
        from kvcli.kv.tiers.host import Mappings

        if self.is_packed:
            return self._far(self._packed(torch.device("cpu")))
        return self._far(ExtentTier(Mappings(self.shapes, self.dtype, bus_of(self.device))))

    def _far(self, tier: PageTier) -> HostTier:
        from kvcli.kv.tiers.host import HostTier

        return HostTier(tier, self.device, self._way())

    def _way(self) -> Way:
        """Return how rows read slots in host memory. Raises BadConfig if `memory.host_access` is not possible."""
        from kvcli.kv.offload.host_access import AutoAccess, CpuAttention, StreamedCopy
        from kvcli.kv.offload.link_rates import rates

        asked, unserved = self.memory.host_access, self._unserved()
        why = "quantized KV is read by the CPU" if self.is_packed else unserved if asked == "zero-copy" else ""
        if why and asked in ("zero-copy", "stream"):
            raise BadConfig(
                f'memory.host_access = "{asked}" cannot be used here: {why}',
                code="no_such_reach",
                try_=["--set memory.host_access=auto"],
            )
        if asked == "cpu" or self.is_packed:
            return CpuAttention
        if asked == "stream":
            return StreamedCopy
        return partial(AutoAccess, unserved=unserved, rates=partial(rates, self.device) if asked == "auto" else None)

    def _unserved(self) -> str:
        """Return why no device kernel can read host memory in this data type; "" if one can."""
        if why := triton_support.why_not(self.device, self.dtype):
            return why
        bends = {params.softcap > 0 for params in self.attention_params}
        kinds = [dispatch.choose("attend", self.device.type, self.dtype, bend) for bend in bends]
        if not all(kind.__module__.endswith(".fused") for kind in kinds):
            return "attention has no kernel for it"
        fits = import_module(kinds[0].__module__).fits
        return (
            "" if all(fits(shape.k_dim, shape.v_dim) for shape in self.shapes) else "no kernel has heads of this size"
        )

    def _disk(self) -> PageTier:
        from kvcli.kv.tiers.disk import LARGEST, ExtentTier, SlotFile

        most, writes = size_of(self.memory.disk), size_of(self.memory.disk_writes)
        longest = None if self.device.type == "cpu" else LARGEST
        return ExtentTier(SlotFile(self.shapes, self.dtype, most, writes, longest=longest))
