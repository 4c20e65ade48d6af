"""Estimate the memory of a run by component, and the largest context that fits. All figures are bytes or tokens."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import psutil

from kvcli.engine.resources import WIDE, captured_bytes, captured_sizes, new_kv_bytes, working_bytes
from kvcli.errors import KvcliError
from kvcli.files import private_folder, write_private
from kvcli.fit import cuda_overhead
from kvcli.fit.available_memory import AvailableMemory
from kvcli.fit.run_log import FOLDER, digest
from kvcli.fit.weights import BYTES, Weights
from kvcli.kernels.attend.cpu import MANY
from kvcli.kv.cache.level import SLACK
from kvcli.kv.cache.precision_budget import PLACED, WORTH, PrecisionBudget
from kvcli.kv.capacity import EVERY, CacheCapacity, CacheFootprint
from kvcli.kv.footprint import STEP, Footprint, ModelSizes
from kvcli.kv.out_of_memory import CacheFull
from kvcli.kv.slots import AttentionParams, LayerShape, Window, windows_of
from kvcli.kv.tiers.device_tables import MOST_ROWS
from kvcli.models.shape import Shape
from kvcli.settings.profile import TIERS, Method, Profile
from kvcli.settings.schema import Order, size_of
from kvcli.version import __version__

# Memory of the program without a model. It is measured, because builds of torch differ by hundreds of MiB.


# Bytes that a command allocates between its imports and the end of its answer, apart from the model and its KV cache:
# threads, compiled products, library pages that load late. Resident memory, like the peak that it is compared with.
AFTER = 40 << 20
CODE = "from kvcli.fit.memory import here; print(here())"
BASE = 463 << 20  # the whole program, if it was never measured: torch 2.13 for CPUs, transformers 5, Linux


def here() -> int:
    """Return the bytes of this process after all imports that an answer needs, with the documents loaded so far."""
    import kvcli.chat.model
    import kvcli.engine.loading.open_lm  # noqa: F401

    return int(psutil.Process().memory_info().rss) + AFTER


def elsewhere(cache: Path) -> int:
    """Measure the bytes in a separate process, once for each build of torch; the cache folder stores the figure."""
    file = cache / FOLDER / f"program-{build()}"
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # never measured, or damaged
        found = measured()
    try:
        private_folder(file.parent)
        write_private(file, f"{found}\n")
    except OSError:  # disk full: the next run measures again
        pass
    return found


def measured() -> int:
    """Measure the bytes in a separate process that imports everything and ends."""
    root = Path(__file__).parents[2]  # of a checkout that is not installed
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, cwd=root)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:]
        raise KvcliError("a bare process could not be measured", code="no_peak", lines=said, try_=["kvcli doctor"])
    return int(done.stdout.split()[-1])


def build() -> str:
    """Return a digest of the versions that determine the program's memory, without importing torch."""
    found = find_spec("torch")
    stated = Path(found.origin).with_name("version.py") if found is not None and found.origin else Path()
    about = stated.read_text(encoding="utf-8") if stated.is_file() else ""  # versions of torch and CUDA, and the commit
    return digest(sys.version, stated, about, version("transformers"), __version__)


# Find the attention kernels that serve a model, and the memory of libraries and of the check after loading.


# Products of 16-bit matrices on a CPU: oneDNN compiles a kernel for each new shape and caches the last thousand.
PRODUCT = 2 * (1 << 20) // 3  # bytes of one kernel
KEPT = 1024
LINEAR = 6  # shapes of linear layers in a decoder
WIDTHS = 5  # draft sizes that a short answer uses, beside plain passes
AGAIN = 2  # of these, the draft sizes that run with all heads of unequal length

CHECK = 16  # rows that are compared with the stock model after loading


WIDEST = 256  # head size


def is_native(shape: Shape, dtype: str, device: str) -> bool:
    """True if native kernels serve attention of this type; they store no scores and compile nothing."""
    import torch

    from kvcli.kernels.attend_invariant import why_not

    kinds = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
    kind = kinds.get(dtype, torch.float32 if BYTES[dtype] == WIDE else torch.float16)
    return not any(why_not(kind, torch.device(device), of.key, of.value) for of in set(shape.stores))


def is_fused(shape: Shape, number: int, room: AvailableMemory) -> bool:
    """True if a GPU's fused kernels serve the model."""
    return (
        room.kind == "cuda"
        and not room.unserved
        and number == 2
        and all(size <= WIDEST and not size % 16 for of in shape.stores for size in (of.key, of.value))
    )


def product_bytes(rows: int, slots: int, uneven: int, *, is_packed: bool) -> int:
    """Return the bytes of oneDNN kernels for 16-bit products on a CPU without native kernels, beside plain passes.

    `uneven`: number of heads that differ in length, about `slots` each; `is_packed`: linear layers have other kernels.
    """
    drafts = min(rows - 1, WIDTHS)
    count = 0 if is_packed else LINEAR * drafts
    if slots >= MANY:  # two products per head, for scores and sums; shorter heads use another method
        count += 2 * uneven * (AGAIN if drafts else 1)
    return PRODUCT * min(KEPT, count)


def check_bytes(shape: Shape, number: int) -> int:
    """Return the bytes of the comparison after loading: logits of both models, and a float64 copy of each."""
    return CHECK * shape.vocab * (2 * number + 2 * 2 * WIDE)


# Divide the KV cache among device, host memory and disk as `[memory]` says.


@dataclass(frozen=True, slots=True)
class KVPlacement:
    """Bytes of KV in each place."""

    device: int
    host: int = 0  # host memory, beside a GPU
    disk: int = 0
    over: int = 0  # bytes that fit nowhere


@dataclass(frozen=True, slots=True)
class HeldSlots:
    """Slots per head of a sequence at the peak."""

    context: int  # tokens of the sequence
    chunk: int  # tokens of a prefill pass, at most
    kept: int  # slots that the policy keeps
    settled: int  # the most slots of the top tier at a compression point
    top: int  # the most slots of the top tier, with those stored between two compression points
    fresh: int  # slots stored between two compression points, at most
    stored: int = 0  # slots of all tiers, if a policy demotes
    demoted: int = 0  # of these: the most below the top tier; this peak is later than the top tier's


def place(room: CacheCapacity, held: HeldSlots, nbytes: Callable[[int], int], *, drops: bool) -> KVPlacement:
    """Place the slots, on the device first, within the limits that the KV cache has.

    `nbytes`: slots on the device -> bytes there. `drops`: slots that fit no lower tier are evicted.
    """
    whole = nbytes(held.top)
    cap = size_of(room.memory.device) if room.memory.device != "auto" else room.free
    try:
        most = room.max_slots
    except CacheFull:  # too small even for the slots between two compression points
        return KVPlacement(min(whole, cap), over=max(1, whole - cap))
    if most is None:
        return KVPlacement(whole)
    stored = max(held.settled, min(held.stored, most) if drops else held.stored)
    over = max(0, stored - most) * room.narrow
    here = (room.on_device or 0) * (SLACK + 1) // SLACK + room.between  # before the oldest slots are demoted
    device = min(whole, cap, nbytes(room.always + here + STEP))
    left = max(0, whole + (stored - held.settled) * room.narrow - device - over)  # in the size of lower tiers
    left = max(left, min(held.demoted, stored) * room.narrow)
    host = min(left, room.in_host * room.narrow)
    away = left // room.narrow * (room.far - room.index)
    return KVPlacement(device + away, host, (left - host) * room.wide // room.narrow, over)


GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DraftModelNeed:
    """Memory of a draft model in bytes. It is loaded after the target model, and their passes alternate."""

    stored: Callable[[int], int]  # with n tokens: its weights and KV cache
    working: Callable[[int], int]  # with n tokens: the memory that its passes compute with
    loading: int = 0  # peak while it loads, beside the target model
    mapped: int = 0  # of `loading`: reclaimable pages


@dataclass(frozen=True)
class PlannedRun:
    """A profile on a model and a device, for which `need` adds up the memory of any context."""

    profile: Profile
    shape: Shape
    weights: Weights
    room: AvailableMemory
    number: int  # bytes per number of the model's dtype
    cache: CacheFootprint  # the KV cache whose tokens are the answer's
    draft_cache: CacheFootprint | None  # the compressed KV cache that drafts beside a full one
    second: DraftModelNeed | None
    base: int  # bytes of the program; on a GPU, the excess of earlier runs over their estimates
    host: int  # bytes of host memory beside a GPU
    is_native: bool  # attention runs on native kernels
    chunk: int  # tokens per prefill chunk
    order: Order = "chunks"  # chunked or layer-wise prefill

    @cached_property
    def sizes(self) -> ModelSizes:
        """Sizes of the model that footprints depend on."""
        return sizes(self.shape, self.number, self.cache.number, self.room.kind)

    @cached_property
    def policy(self) -> Method:
        """Policy of the cache whose tokens are the answer's."""
        return self.profile.verifying_profile.policy

    @property
    def on_card(self) -> int | None:
        """Decoder layers on a GPU, the last ones; None: all of the model."""
        n = self.profile.load.layers_on_gpu
        return None if n == "auto" else min(n, self.shape.layers)

    @property
    def far_experts(self) -> int:
        """Bytes of experts in host memory that a GPU reads."""
        n = self.profile.load.experts_on_gpu
        if n == "auto" or self.room.kind != "cuda":
            return 0
        return sum(self.weights.experts[: max(0, self.shape.layers - n)])

    @property
    def rows(self) -> int:
        """Rows of a decoding pass, at most."""
        return int(max(self.profile.spec.rows, self.profile.reasoning_steps.rows, self.profile.decode.rows))

    @property
    def draws(self) -> bool:
        """True if the next token is sampled on the device. The model's own sampling settings are not known here."""
        return self.profile.sample.temperature == 0

    @cached_property
    def is_fused(self) -> bool:
        """True if the whole pass runs on fused GPU kernels."""
        return is_fused(self.shape, self.number, self.room)

    @cached_property
    def records(self) -> bool:
        """True if passes are captured and replayed: the device must find the whole KV cache by itself."""
        profile, lower = self.profile, (TIERS - {"caps"}) | {"selects", "skims"}
        is_whole = not lower & profile.effects.keys() and not profile.is_checked
        is_allowed = profile.load.graphs == "auto" and profile.load.layers_on_gpu == "auto"
        folds = self.shape.folds
        return self.is_fused and (folds.is_by_row or not folds.layers) and is_whole and is_allowed

    @property
    def always(self) -> int:
        """Protected tokens, in full precision whatever the budget is."""
        return self.policy.sinks + self.policy.recent if self.profile.memory.spends else 0

    @cached_property
    def spends(self) -> PrecisionBudget | None:
        """Precision budget of `memory.budget` without free bytes, which depend on the context; None: no budget."""
        if not self.profile.memory.spends:
            return None
        room = self.cache.capacity(self.profile.prefill.chunk, self.room.usable, self.room.host)
        try:
            holds = room.elsewhere
        except CacheFull:  # the plan reports it for the device
            holds = 0
        return self.cache.budget(0, has_more=room.has_more, holds=holds)

    def held(self, context: int) -> HeldSlots:
        """Return the slots per head of a sequence of `context` tokens."""
        chunk, every = min(self.chunk, context), self.policy.compression_interval
        of: Footprint = self.policy.footprint(context)
        top = settled = of.slots
        if every is not None:  # new slots are stored before the policy evicts others
            top = min(context, max(of.slots + max(chunk, every), of.peak + chunk))
            settled = min(context, max(of.slots, of.peak))
        fresh = max(chunk, every or EVERY)
        if self.profile.memory.demotes:  # all slots stay stored at a compression point
            return HeldSlots(context, chunk, of.slots, top, top, fresh, context, context - of.slots)
        return HeldSlots(context, chunk, of.slots, settled, top, fresh)

    def pass_bytes(self, held: HeldSlots, device: str) -> int:
        """Return the memory that a pass of the model's layers on a device of this kind computes with."""
        is_here = device == self.room.kind
        return working_bytes(
            self.shape, chunk=held.chunk, rows=self.rows, slots=held.stored or held.top, number=self.number,
            kv_number=self.cache.number, device=device, is_native=self.is_native, is_fused=is_here and self.is_fused,
            draws=is_here and self.draws,
            largest=self.weights.largest if is_here and self.profile.load.quant != "none" else 0,
            waiting=self._waiting(held) if self.order == "layers" else 0,
        )  # fmt: skip

    def recorded_bytes(self, held: HeldSlots) -> int:
        """Return the bytes of captured passes on a GPU."""
        if not self.records:
            return 0
        sizes = (*captured_sizes(self.rows), *self.profile.spec.footprint(held.context, self.sizes).captured)
        work = captured_bytes(
            self.shape,
            sizes,
            slots=held.stored or held.top,
            number=self.number,
            kv_number=self.cache.number,
            draws=self.draws,
        )
        return cuda_overhead.captured(self.shape.layers, len(sizes)) + work

    def _waiting(self, held: HeldSlots) -> int:
        """Return the rows that wait between layers in layer-wise prefill, without those that the last layer's KV
        replaces: its input rows are freed as it stores KV, and the system allocates that KV only as it is written."""
        of, window = stored(self.shape)[-1]
        is_brought = self.room.kind == "cpu" and not self.profile.memory.demotes
        last = of.numbers * min(held.top, window or held.top) * self.cache.number if is_brought else 0
        return max(1, held.context - last // (self.shape.hidden * self.number))

    def product_bytes(self, held: HeldSlots) -> int:
        """Return the bytes of oneDNN kernels on a CPU without native kernels."""
        if self.room.kind != "cpu" or self.number != 2 or self.is_native:
            return 0
        is_uneven = self.policy.footprint(0).is_uneven and not self.cache.is_packed_by_age
        uneven = sum(of.kv_heads for of in self.shape.stores if of.numbers) if is_uneven else 0
        return product_bytes(self.rows, held.kept, uneven, is_packed=self.profile.load.quant != "none")

    def top_bytes(self, layers: slice, slots: int, held: HeldSlots) -> int:
        """Return the bytes of KV in these layers for `slots` slots per head.

        Sliding layers evict slots below their window at the next prefill, and hold the most slots that an answer needs.
        """
        found, spare = 0, MOST_ROWS if self.records else 0
        for (of, window), n in Counter(stored(self.shape)[layers]).items():
            most = window and Window(window).most(self.profile.sample.max_new_tokens, held.chunk)
            found += n * self.cache.layer_bytes(of, min(slots, most or slots) + spare, held.fresh)
        return found

    def draft_bytes(self, held: HeldSlots) -> int:
        """Return the bytes of a drafter: cache view, tables, draft model and its KV."""
        context, spec = held.context, self.profile.spec
        of: Footprint = spec.footprint(context, self.sizes)
        found: int = of.beside + (of.host if self.room.kind == "cpu" else 0)
        found += spec.view_slots(held.top) * sum(of.slot_bytes(self.cache.number) for of in self.cache.shapes)
        if self.second is not None:
            found += self.second.stored(context)
        if self.draft_cache is not None:
            policy, chunk = self.profile.policy, self.profile.prefill.chunk
            fresh = max(chunk, policy.compression_interval or EVERY)
            kept = policy.footprint(context)
            most = min(context, max(kept.slots + fresh, kept.peak + chunk))
            found += sum(self.draft_cache.layer_bytes(of, most, fresh) for of in self.draft_cache.shapes)
            found += self.draft_cache.index_bytes(most, fresh)
        return found


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes by component, for one context."""

    context: int
    base: int
    weights: int
    kv: int
    draft: int
    working: int
    loading: int  # peak while loading
    mapped: int  # of `loading`: pages of the weight files, which the system reclaims when needed
    host: int = 0  # KV in host memory, beside a GPU
    disk: int = 0  # KV on disk
    over: int = 0  # KV for which `[memory]` has no room
    short: int = 0  # of `over`: protected tokens beyond `memory.budget`, however short the sequence is
    host_weights: int = 0  # layers that run on the CPU beside a GPU, and embeddings looked up there
    host_working: int = 0  # memory that these layers compute with
    budget: int = 0  # of `kv`: the precision budget at a compression point; 0: no budget

    @property
    def running(self) -> int:
        return self.base + self.weights + self.kv + self.draft + self.working

    @property
    def peak(self) -> int:
        """The most bytes that are resident at once."""
        return max(self.running, self.loading)

    @property
    def loading_peak(self) -> int:
        """Bytes of the loading peak beyond all that runs later."""
        return self.peak - self.running

    @property
    def least(self) -> int:
        """Bytes that must be free: the peak without reclaimable pages."""
        return max(self.running, self.loading - self.mapped)


def kv_bytes(shape: Shape, slots: int, number: float, *, windows: bool = False) -> int:
    """Return the KV bytes of so many slots per head. `windows`: sliding layers keep only their window."""
    stored = shape.visible(slots) if windows else [slots] * shape.layers
    return int(sum(of.numbers * n for of, n in zip(shape.stores, stored, strict=True)) * number)


@lru_cache
def stored(shape: Shape) -> tuple[tuple[LayerShape, int | None], ...]:
    """Return for each layer its shape as a KV cache gets it, and its largest attention window; None = no window."""
    shapes = [LayerShape(of.kv_heads, of.key, of.value, of.shares, rank=of.rank) for of in shape.stores]
    windows = windows_of(shapes, [AttentionParams(1.0, window=window) for window in shape.windows])
    return tuple((of, windows[i].size if i in windows else None) for i, of in enumerate(shapes))


def sizes(shape: Shape, number: int, kv_number: int, kind: str) -> ModelSizes:
    """Return the sizes of a model that footprints depend on. `kind`: type of the device."""
    last = next((of.slot_bytes(kv_number) for of, _ in reversed(stored(shape)) if of.numbers), 0)
    token = new_kv_bytes(shape, 1, kv_number)
    return ModelSizes(shape.heads, shape.hidden, number, last, token, shape.folds.nbytes(number), kind)


def cache_footprint(profile: Profile, shape: Shape, number: int, kind: str) -> CacheFootprint:
    """Return the footprint of a profile's KV cache on a device of this kind. `number`: bytes of an element."""
    of_model = [of for of, _ in stored(shape)], [AttentionParams(1.0, window=size) for size in shape.windows]
    tables = profile.kv, profile.kv_format.settings, profile.memory, profile.sparse.settings
    return CacheFootprint(*tables, *of_model, number, kind)


def need(run: PlannedRun, context: int) -> Need:
    """Return the memory that a sequence of `context` tokens needs."""
    profile, shape, weights, device = run.profile, run.shape, run.weights, run.room.kind
    held, folds = run.held(context), shape.folds
    below = 0 if run.on_card is None else shape.layers - run.on_card  # layers on the CPU
    here = slice(below, None)
    draft, working = run.draft_bytes(held), run.pass_bytes(held, device) + run.product_bytes(held)
    working += profile.policy.footprint(context, run.sizes).scratch
    if run.second is not None:
        working = max(working, run.second.working(context))
    working += folds.nbytes(run.number) + folds.layers * folds.taped * run.rows * run.number  # new states of a pass
    beside = profile.prune.footprint(context, run.sizes).beside  # bytes beside the slots of the KV cache
    beside += folds.nbytes(run.number) * (1 + profile.memory.checkpoints)
    away = run.far_experts + (weights.embeddings if profile.load.embeddings == "host" and device == "cuda" else 0)
    on_card, on_host = (weights.memory - away, away)
    if run.on_card is not None:
        on_card, on_host = weights.split(run.on_card, shape.is_tied)
    base = run.base + run.recorded_bytes(held)
    newest, budget, most, short = run.top_bytes(here, min(held.top, held.fresh + STEP), held), 0, None, 0
    if run.spends is not None:
        working = max(working, PLACED * run.spends.heads * context)
        # KV of a running pass is added on top, once per sequence, as the cache plan does (kv/cache/plan.py)
        free = run.cache.fit_bytes(run.room.usable - base - on_card - draft - beside, working + newest)
        budget = replace(run.spends, free=free).most(context)
        if not run.spends.is_late:
            most, short = budget, max(0, run.always * run.spends.of_token - budget)
        beside += WORTH * run.spends.heads * context

    def nbytes(slots: int) -> int:
        indexed = held.demoted if profile.memory.demotes else held.top
        found = run.top_bytes(here, slots, held) + run.cache.index_bytes(indexed, held.fresh)
        if profile.memory.demotes:  # with spare capacity, which grows as in the top tier
            found += (held.stored - held.top + 2 * STEP) * run.cache.demoted_slot
        return found if most is None else min(found, most + newest)

    left = max(0, run.room.usable - base - on_card - draft - working - beside)
    places = place(run.cache.capacity(held.chunk, left, run.room.host), held, nbytes, drops=profile.memory.drops)
    # a growing layer is copied, so it exists twice; no pass computes then
    if device == "cuda" and below < shape.layers:
        grown = places.device // (shape.layers - below)
        working = max(working, new_kv_bytes(shape, held.chunk, run.cache.number) + grown)
    host_kv, host_working = run.top_bytes(slice(below), held.top, held), run.pass_bytes(held, "cpu") if below else 0
    loading, mapped = loading_bytes(shape, weights, run.number, device, check=profile.load.verify)
    loading -= on_host
    least = loading - mapped
    over = places.over + short
    if on_host:
        over += max(0, on_host + host_kv + host_working + places.host - run.host)
    if run.second is not None:
        both = weights.memory + run.second.loading
        loading, least = max(loading, both), max(least, both - run.second.mapped)
    return Need(
        context=context, base=base, weights=on_card, kv=places.device + beside, draft=draft, working=working,
        loading=run.base + loading, mapped=loading - least, host=places.host + host_kv, disk=places.disk, over=over,
        short=short, host_weights=on_host, host_working=host_working, budget=budget,
    )  # fmt: skip


def loading_bytes(shape: Shape, weights: Weights, number: int, device: str, *, check: bool) -> tuple[int, int]:
    """Return the most bytes that loading takes, and how many of them are reclaimable pages."""
    on_cpu = device == "cpu"
    mapped = weights.files if on_cpu else 0
    # unconverted weights are used from the mapped file; converted weights exist beside the file until all are loaded
    whole = weights.loaded if on_cpu else weights.memory
    checked = check_bytes(shape, number) if check else 0
    return whole + mapped + max(checked, weights.packing), mapped  # on a GPU too


def largest(run: PlannedRun) -> int:
    """Return the longest context that fits, at most the model's limit; 0 = none fits."""

    def fits(n: int) -> bool:
        found = need(run, n)
        return found.least <= run.room.usable and not found.over

    if not fits(1):
        return 0
    low, high = 1, run.shape.limit + 1  # the need grows with the context, so bisection finds the limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
