"""Models, KV caches and generation sessions for tests, by name: a change of a constructor touches this file alone."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from kvcli.assemble import view
from kvcli.engine.drafting.drafter import Drafter, ModelPair
from kvcli.engine.hf.lm import LM
from kvcli.engine.hf.rope import rotaries
from kvcli.engine.loading.open_lm import install_kernels, wrap_lm
from kvcli.engine.prefill.layer_by_layer import LayerByLayer
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.kv.cache.draft_and_full import DraftAndFullCache
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.cache.precision_budget import keys_in, unit
from kvcli.kv.cache.tiered_cache import TieredCache
from kvcli.kv.formats.block_format import BlockFormat
from kvcli.kv.formats.format import FormatContext
from kvcli.kv.formats.kivi import Kivi
from kvcli.kv.offload.host_access import AutoAccess, CpuAttention, StreamedCopy, Way, ZeroCopyKernel
from kvcli.kv.offload.transfer import bus_of
from kvcli.kv.slots import KVCache, LayerShape, Tier, Window, alike, windows_of
from kvcli.kv.sparse.index import PageIndex
from kvcli.kv.sparse.pages import PageBudget
from kvcli.kv.sparse.sparse_tier import SparseCache, SparseTier
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.tiers.disk import ExtentTier, SlotFile
from kvcli.kv.tiers.host import HostTier, Mappings
from kvcli.kv.tiers.quantized import QuantizedTier
from kvcli.methods.drafts.off import Off
from kvcli.methods.formats.cskv import Cskv
from kvcli.methods.formats.freqkv import FreqKV
from kvcli.methods.formats.gear import Gear
from kvcli.methods.formats.mustafar import Mustafar
from kvcli.methods.formats.qaq import Qaq
from kvcli.methods.formats.rotatekv import RotateKV
from kvcli.methods.formats.squat import Squat
from kvcli.methods.formats.subgen import SubGen
from kvcli.methods.formats.turboquant import TurboQuant
from kvcli.methods.formats.zipcache import ZipCache
from kvcli.methods.sparse.certified import Certified
from kvcli.methods.sparse.cluster import Cluster
from kvcli.methods.sparse.lowrank import LowRank
from kvcli.methods.sparse.minmax import MinMax
from kvcli.methods.sparse.segments import SegmentCache, SegmentTier
from kvcli.methods.sparse.sketch import Sketch
from kvcli.methods.sparse.xattention import XAttention
from kvcli.settings.schema import Kv
from tests import families, hybrids
from tests.fake_bus import FakeBus
from tests.fake_device import Rounding

Of = LM | tuple[int, int, int] | Sequence[LayerShape]  # a model; layers, KV heads and head size; or layer by layer
LOADING = inspect.signature(wrap_lm).parameters.keys() - {"model"}

# sparse attention over the whole KV cache; "chosen once" by the first row after a compression point
INDEXES: dict[str, PageIndex] = {"minmax": MinMax(page=3), "sketch": Sketch(page=3), "certified": Certified(page=3)}
INDEXES |= {"cluster": Cluster(window=6, size=3), "lowrank": LowRank(page=3, rank=5), "chosen once": Sketch(page=3)}
# old slots in other formats, in four bits, or in fewer numbers
FORMS: dict[str, BlockFormat] = {
    "before": Kivi("before"),
    "zipcache": ZipCache(keys="separable"),
    "qaq": Qaq(outliers=0.1),
}
FORMS |= {"gear": Gear("before", 0.5, 1), "squat": Squat(), "rotatekv": RotateKV(), "mustafar": Mustafar()}
FORMS |= {"turboquant": TurboQuant()}
FORMS |= {"freqkv": FreqKV(), "subgen": SubGen(centers=2, samples=2), "cskv": Cskv(k_rank=3, v_rank=2)}
# old slots in host memory
WAYS: dict[str, Way] = {"by query": CpuAttention, "by kernel": ZeroCopyKernel}
WAYS |= {"by stream": StreamedCopy, "by rule": AutoAccess}
BITS = (8, 4, 2)  # of levels that a policy places slots on
PACKED: dict[str, tuple[int, int, str]] = {"packed_8": (8, 8, "none"), "packed_4_2": (4, 2, "hadamard")}
PACKED |= {"packed_16_4": (16, 4, "none")}


def model(name: str = "llama", dtype: torch.dtype = torch.float32, *, kernels: bool = False, **changes: Any) -> LM:
    """A tiny random model of a family; `changes` of its config, or what `wrap_lm` is told. `kernels`: with ours."""
    loading = {key: changes.pop(key) for key in LOADING & changes.keys()}
    build = hybrids.build if name in hybrids.HYBRIDS else families.build
    found = wrap_lm(build(name, dtype, **changes), **loading)
    if kernels:
        install_kernels(found)
    return found


def session(
    lm: LM, kv: KVCache | None = None, drafter: Drafter | None = None, sampler: Sampler | None = None, **options: Any
) -> GenerationSession:
    """An empty session: over a dense cache, without drafts, greedy, and with the view that the drafter asks for.

    `reusing`, `pruning`: settings of methods; `pair`: the models that they get; `by_layers`: layer-wise prefill.
    """
    kv, drafter = dense(lm) if kv is None else kv, Off() if drafter is None else drafter
    methods, pair = [options.pop(name, None) for name in ("reusing", "pruning")], options.pop("pair", ModelPair(lm, lm))
    by_layers = options.pop("by_layers", False) and methods[1] is None
    companions = [*(of.companion(pair) for of in methods if of is not None), *([LayerByLayer(lm)] if by_layers else [])]
    companions += options.pop("companions", [])
    options = {"view": view(lm, kv, drafter), **options}
    return GenerationSession(lm, kv, drafter, sampler or Sampler(), companions=companions, **options)


def _sizes(of: Of, dtype: torch.dtype | None) -> tuple[Sequence[LayerShape], torch.dtype, torch.device]:
    if isinstance(of, LM):
        return of.shapes, dtype or of.dtype, of.device
    sizes = [size for size in of if isinstance(size, int)]
    return alike(*sizes) if sizes else of, dtype or torch.float64, torch.device("cpu")  # type: ignore[return-value]


def windows(lm: LM, back: int | None = None) -> Mapping[int, Window]:
    """The sliding windows of a model; `back`: tokens behind them that may be undone."""
    found = windows_of(lm.shapes, lm.attention_params)
    return found if back is None else {at: Window(of.size, back=back) for at, of in found.items()}


def dense(of: Of, dtype: torch.dtype | None = None, **options: Any) -> Dense:
    return Dense(*_sizes(of, dtype), **options)


def quantized(
    of: Of, bits: tuple[int, int] = (8, 8), dtype: torch.dtype | None = None, **options: Any
) -> QuantizedTier:
    """`bits`: of keys and of values."""
    return QuantizedTier(*_sizes(of, dtype), k_bits=bits[0], v_bits=bits[1], **options)


def disk(
    of: Of, dtype: torch.dtype | None = None, most: int = 1 << 26, writes: int = 1 << 30, **options: Any
) -> ExtentTier:
    return ExtentTier(SlotFile(*_sizes(of, dtype)[:2], most, writes, **options))


def tiered(
    of: Of, *below: TierLevel, dtype: torch.dtype | None = None, step: int = Dense.STEP, **limits: Any
) -> TieredCache:
    """Levels below a dense top, whose `limits` are given."""
    return TieredCache(dense(of, dtype, step=step), below, **limits)


def cache(name: str, of: Of, dtype: torch.dtype | None = None) -> KVCache:
    """A KV cache by name, empty. The names are those of `INDEXES`, `FORMS`, `WAYS`, `PACKED` and those here."""
    small: dict[str, Any] = {"dtype": dtype, "holds": 7, "group": 5, "sinks": 2}
    shapes, stored, device = _sizes(of, dtype)
    top, recalled = dense(of, dtype), range(1, len(shapes))

    def sparse(tier: Any, index: PageIndex) -> SparseTier:
        return SparseTier(tier, index, PageBudget(0.1, 4, 2, 3), recalled, source=tier)

    def far(tier: Any, bus: Any) -> TierLevel:
        host = HostTier(tier, device, WAYS[name], lambda _: bus)
        return TierLevel(host, attend_async=host.attend_async)

    def coded(form: BlockFormat) -> Tier:
        assert isinstance(of, LM), "a format is of a model"
        return form.tier(
            FormatContext(shapes, stored, of.attention_params, partial(rotaries, of)),
            device,
            Kv(k_bits=4, v_bits=4, group=5),
        )

    if name in INDEXES:
        epsilon = 0.3 if name == "certified" else None
        how: dict[str, Any] = {"epsilon": epsilon, "source": top, "is_shared": name == "chosen once"}
        return SparseCache(top, INDEXES[name], PageBudget(0.1, 4, 2, 5), recalled, **how)
    if name in FORMS:
        return tiered(of, TierLevel(coded(FORMS[name])), **small)
    if name in WAYS:
        bus = FakeBus() if device.type == "cpu" else bus_of(device)
        tier = (
            QuantizedTier(shapes, stored, k_bits=8, v_bits=8, group=5)
            if name == "by query"
            else ExtentTier(Mappings(shapes, stored, bus))
        )
        return tiered(of, far(tier, bus), **small)
    if name in PACKED:
        *bits, rotate = PACKED[name]
        return tiered(
            of, TierLevel(quantized(of, bits, dtype, group=4, rotate=rotate)), **small | {"holds": 6, "group": 4}
        )
    match name:
        case "dense":
            return top
        case "given":  # sliding layers evict what they hide
            assert isinstance(of, LM)
            return dense(of, dtype, windows=windows(of, back=1))
        case "segments" | "segments below":  # rows of a prompt select
            layers, budget = range(1, len(shapes)), PageBudget(0.0, 4, 2, 5)
            sparse_of: dict[str, Any] = {
                "index": XAttention(page=4, stride=2),
                "budget": budget,
                "layers": layers,
                "mass": 0.5,
            }
            if name == "segments":
                return SegmentCache(top, source=top, **sparse_of)
            below = quantized(of, dtype=dtype, group=4)
            return tiered(of, TierLevel(SegmentTier(below, source=below, **sparse_of)), **small | {"group": 4})
        case "rebuilt":  # as in ShadowKV
            return tiered(of, TierLevel(sparse(coded(Cskv(k_rank=3, v_rank=0)), LowRank(page=3, rank=5))), **small)
        case "disk":
            return tiered(of, TierLevel(disk(of, dtype)), **small)
        case "halves":
            return tiered(of, TierLevel(quantized(of, dtype=dtype, group=4, halves=True)), **small)
        case "turned":
            return tiered(of, TierLevel(quantized(of, (4, 8), dtype, group=5, rotate="hadamard")), **small)
        case "checked":  # two KV caches, of which a smaller one drafts
            return DraftAndFullCache(top, cache("turned", of, dtype))
        case "rungs" | "rungs recalled":  # on which a policy places slots; in the last of them rows find a part again
            rungs = [TierLevel(quantized(of, (keys_in(n), n), dtype, group=16), group=unit(n, 16)) for n in BITS]
            found = [TierLevel(sparse(disk(of, dtype), Sketch(page=3)))] if name == "rungs recalled" else []
            return tiered(of, *rungs, *found, dtype=dtype)
        # what a policy drops lies below: in full, in pages of which rows read a part, in 8 bits
        case "demoted":
            return tiered(of, TierLevel(dense(of, dtype, step=8)), dtype=dtype, demotes=True)
        case "recalled":
            return tiered(of, TierLevel(sparse(dense(of, dtype, step=8), Sketch(page=3))), dtype=dtype, demotes=True)
        case "lowered":
            return tiered(of, TierLevel(quantized(of, dtype=dtype, group=4)), dtype=dtype, demotes=True)
        case "two_dense":
            return tiered(of, TierLevel(dense(of, dtype, step=5)), dtype=dtype, holds=7, group=4, sinks=2)
        case "rounding":
            return tiered(of, TierLevel(Rounding(shapes, stored)), dtype=dtype, step=8, holds=5, group=3, sinks=1)
        case "three":
            below = TierLevel(Rounding(shapes, stored), 8, 4), TierLevel(HostTier(dense(of, dtype), "cpu"))
            return tiered(of, *below, dtype=dtype, holds=4, group=4, sinks=3)
        case "on_disk":
            return tiered(of, TierLevel(disk(of, dtype)), dtype=dtype, holds=6, group=2)
    raise KeyError(name)
