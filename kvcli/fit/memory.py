"""Estimate the memory of a run by component, and the largest context that fits. All figures are bytes or tokens."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from kvcli.engine.resources import WIDE, captured_bytes, captured_sizes, new_kv_bytes, working_bytes
from kvcli.errors import KvcliError
from kvcli.files import private_folder, write_private
from kvcli.fit import cuda_overhead
from kvcli.fit.run_log import FOLDER, digest
from kvcli.fit.weights import BYTES
from kvcli.kernels.attend.cpu import MANY
from kvcli.kv.cache.level import SLACK
from kvcli.kv.cache.precision_budget import PLACED, WORTH
from kvcli.kv.capacity import EVERY
from kvcli.kv.footprint import STEP
from kvcli.kv.out_of_memory import CacheFull
from kvcli.kv.slots import AttentionParams, LayerShape, Window, windows_of
from kvcli.kv.tiers.device_tables import MOST_ROWS
from kvcli.settings.schema import size_of
from kvcli.version import __version__

if TYPE_CHECKING:
    from kvcli.fit.available_memory import AvailableMemory
    from kvcli.fit.weights import Weights
    from kvcli.kv.cache.precision_budget import PrecisionBudget
    from kvcli.kv.capacity import CacheCapacity
    from kvcli.models.shape import Shape
    from kvcli.settings.schema import Order

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
    """Slots per head, by tier."""

    settled: int  # the most slots at a compression point
    fresh: int  # slots added between two compression points
    nbytes: Callable[[int], int]  # slots on the device -> bytes there
    stored: int = 0  # slots in all tiers, if a policy demotes
    moved: int = 0  # of `stored`: the most slots in lower tiers; this peak is later than the top tier's
    drops: bool = False  # slots that fit no lower tier are evicted

    @property
    def most(self) -> int:
        return self.settled + self.fresh


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Capacity limits of the tiers, equal to those of a KV cache, so that a plan refuses what the cache refuses."""

    room: Callable[[int, int], CacheCapacity]  # tokens of a pass, free bytes if no size is given -> capacity
    free: int  # bytes of the device for the whole plan
    host: int = 0  # bytes of host memory beside it

    def spread(self, held: HeldSlots, chunk: int, beside: int) -> KVPlacement:
        """Place the slots, on the device first; `beside`: bytes of all else that the plan needs on the device."""
        room, whole = self.room(chunk, max(0, self.free - beside)), held.nbytes(held.most)
        cap = size_of(room.memory.device) if room.memory.device != "auto" else room.free
        try:
            most = room.max_slots
        except CacheFull:  # too small even for the slots between two compression points
            return KVPlacement(min(whole, cap), over=max(1, whole - cap))
        if most is None:
            return KVPlacement(whole)
        stored = max(held.settled, min(held.stored, most) if held.drops else held.stored)
        over = max(0, stored - most) * room.narrow
        here = (room.on_device or 0) * (SLACK + 1) // SLACK + room.between  # before the oldest slots are demoted
        device = min(whole, cap, held.nbytes(room.always + here + STEP))
        left = max(0, whole + (stored - held.settled) * room.narrow - device - over)  # in the size of lower tiers
        left = max(left, min(held.moved, stored) * room.narrow)
        host = min(left, room.in_host * room.narrow)
        away = left // room.narrow * (room.far - room.index)
        return KVPlacement(device + away, host, (left - host) * room.wide // room.narrow, over)


GIB = 1 << 30
POSITION = 4  # bytes of a slot's position


@dataclass(frozen=True, slots=True)
class DraftModelNeed:
    """Memory of a draft model in bytes. It is loaded after the target model, and their passes alternate."""

    stored: Callable[[int], int]  # with n tokens: its weights and KV cache
    working: Callable[[int], int]  # with n tokens: the memory that its passes compute with
    loading: int = 0  # peak while it loads, beside the target model
    mapped: int = 0  # of `loading`: reclaimable pages


@dataclass(frozen=True, slots=True)
class RunShape:
    """All that determines the memory of a run, beside the model."""

    device: str  # cpu, cuda, mps
    number: int  # bytes per number of the model's dtype
    kv_number: int  # bytes per stored KV number, for the newest tokens
    # bytes of a layer with so many slots per head, so many of them just stored
    layer: Callable[[LayerShape, int, int], int]
    index: Callable[[int, int], int]  # for the same slots: bytes of the sparse attention index of all layers
    caps: TierLimits
    chunk: int  # tokens per prefill chunk
    rows: int  # rows of a decoding pass, at most
    slots: Callable[[int], int]  # of n tokens, the slots per head that the policy keeps
    reading: Callable[[int], int]  # of n tokens, the slots per head during prefill, not counting the running chunk
    again: Callable[[int], int]  # of n tokens, the extra rows that run after prefill
    judging: Callable[[int], int]  # of n tokens, the bytes for scoring them, beside a pass
    between: int | None  # compression interval while answering, in tokens; None: the policy never evicts
    answer: int  # most tokens of one answer: sliding layers evict slots below their window at the next prefill
    tables: Callable[[int], int]  # bytes of host memory that the drafter's tables of n tokens take
    copied: Callable[[int], int]  # of n slots, the slots per head that the drafter's view copies
    second: DraftModelNeed | None  # the draft model
    lower: int | None  # bytes on the device per demoted slot, all layers; None: slots are evicted instead
    spends: PrecisionBudget | None  # precision budget of a policy; None: no budget
    always: int  # protected tokens, in full precision whatever the budget is
    texts: int  # sequences that share the free bytes
    drops: bool  # slots that fit no lower tier are evicted
    base: int  # bytes of the program; on a GPU, the excess of earlier runs over their estimates
    is_uneven: bool = False  # heads keep different numbers of slots, in full precision
    is_packed: bool = False  # linear layers run on quantized weights
    is_native: bool = False  # attention runs on native kernels
    is_fused: bool = False  # the whole pass runs on fused GPU kernels
    draws: bool = False  # the next token is sampled on the device
    records: bool = False  # passes are captured and replayed
    on_card: int | None = None  # decoder layers on a GPU, the last ones; None: all of the model
    of_layers: int = 0  # decoder layers of the model
    checkpoints: int = 0  # saved recurrent states, if layers have one
    check: bool = True  # compare with the stock model after loading
    order: Order = "chunks"  # chunked or layer-wise prefill
    prunes: bool = False  # prompt tokens are pruned between layers
    behind: Callable[[int], int] = lambda n: 0  # of n tokens, the deferred ones: one hidden state each instead of KV


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


def _waiting(shape: Shape, run: RunShape, context: int, held: int) -> int:
    """Return the rows that wait between layers in layer-wise prefill, without those that the last layer's KV replaces:
    its input rows are freed as it stores KV, and the system allocates that KV only as it is written."""
    of, window = stored(shape)[-1]
    is_brought = run.device == "cpu" and run.lower is None
    last = of.numbers * min(held, window or held) * run.kv_number if is_brought else 0
    return max(1, context - last // (shape.hidden * run.number))


def need(shape: Shape, weights: Weights, run: RunShape, context: int) -> Need:
    """Return the memory that a sequence of `context` tokens needs."""
    chunk = min(run.chunk, context)
    held = settled = run.slots(context)
    if run.between is not None:  # new slots are stored before the policy evicts others
        held = min(context, max(held + max(chunk, run.between), run.reading(context) + chunk))
        settled = min(context, max(settled, run.reading(context)))
    fresh = max(chunk, run.between or EVERY)
    moved, known = 0, held  # slots below the top tier at peak; slots in the sparse attention index
    if run.lower is not None:
        moved, known = context - held, context - run.slots(context)
    below = shape.layers - (shape.layers if run.on_card is None else run.on_card)  # layers on the CPU
    sizes = partial(
        working_bytes,
        shape,
        chunk=chunk,
        rows=run.rows,
        slots=held + moved,
        number=run.number,
        kv_number=run.kv_number,
        is_native=run.is_native,
        waiting=_waiting(shape, run, context, held) if run.order == "layers" else 0,
    )
    working = sizes(
        device=run.device, is_fused=run.is_fused, draws=run.draws, largest=weights.largest if run.is_packed else 0
    )
    if run.device == "cpu" and run.number == 2 and not run.is_native:
        uneven = sum(of.kv_heads for of in shape.stores if of.numbers) if run.is_uneven else 0
        working += product_bytes(run.rows, run.slots(context), uneven, is_packed=run.is_packed)
    working += run.judging(context)
    if run.second is not None:
        working = max(working, run.second.working(context))
    copied = run.copied(held)
    view = kv_bytes(shape, copied, run.kv_number) + copied * sum(of.numbers > 0 for of in shape.stores) * POSITION
    on_cpu = run.device == "cpu"
    draft = view + (run.tables(context) if on_cpu else 0) + (run.second.stored(context) if run.second else 0)

    # a layer's capacity is limited to the most slots an answer needs, plus these
    spare = MOST_ROWS if run.records else 0

    def top(layers: Sequence[tuple[LayerShape, int | None]], here: int) -> int:
        alike = Counter(layers).items()
        each = ((n, of, window and Window(window).most(run.answer, chunk)) for (of, window), n in alike)
        return sum(n * run.layer(of, min(here, most or here) + spare, fresh) for n, of, most in each)

    def nbytes(here: int) -> int:
        lower = (moved + 2 * STEP) * (run.lower or 0)  # with spare capacity, which grows as in the top tier
        found = top(stored(shape)[below:], here) + lower + run.index(known, fresh)
        return found if most is None else min(found, most + newest)

    is_all = run.lower is not None  # all slots stay stored at a compression point
    spread = (
        HeldSlots(held, 0, nbytes, context, known, run.drops) if is_all else HeldSlots(settled, held - settled, nbytes)
    )
    state = shape.folds.nbytes(run.number)
    working += state + shape.folds.layers * shape.folds.taped * run.rows * run.number  # new states of a pass
    behind = run.behind(context) * shape.hidden * run.number + state * (1 + run.checkpoints)
    remembered = 0 if run.spends is None else WORTH * run.spends.heads * context
    if run.spends is not None:
        behind += remembered
        working = max(working, PLACED * run.spends.heads * context)
    on_card, on_host = (weights.memory, 0) if run.on_card is None else weights.split(run.on_card, shape.is_tied)
    base = run.base
    if run.records:
        number, kv_number = run.number, run.kv_number
        base += cuda_overhead.captured(shape.layers, len(captured_sizes(run.rows))) + captured_bytes(
            shape, rows=run.rows, slots=held + moved, number=number, kv_number=kv_number, draws=run.draws
        )
    beside = base + on_card + draft + working + behind
    newest, budget = top(stored(shape)[below:], min(held, fresh + STEP)), 0
    # KV of a running pass is added on top, once per sequence, as the cache plan does (kv/cache/plan.py)
    if run.spends is not None:
        each = (run.caps.free - (beside - working - remembered)) // run.texts - working - newest
        budget = replace(run.spends, free=max(0, each)).most(context)
    most = None if run.spends is None or run.spends.is_late else budget
    short = 0 if most is None or run.spends is None else max(0, run.always * run.spends.of_token - most)
    places = run.caps.spread(spread, chunk, beside)
    # a growing layer is copied, so it exists twice; no pass computes then
    if run.device == "cuda" and below < shape.layers:
        grown = places.device // (shape.layers - below)
        working = max(working, new_kv_bytes(shape, chunk, run.kv_number) + grown)
    of_host = top(stored(shape)[:below], spread.most), sizes(device="cpu") if below else 0
    loading, mapped = loading_bytes(shape, weights, run.number, run.device, check=run.check)
    loading -= on_host
    least = loading - mapped
    over = places.over + short
    if on_host:
        over += max(0, on_host + sum(of_host) + places.host - run.caps.host)
    if run.second is not None:
        beside = weights.memory + run.second.loading
        loading, least = max(loading, beside), max(least, beside - run.second.mapped)
    return Need(
        context=context,
        base=base,
        weights=on_card,
        kv=places.device + behind,
        draft=draft,
        working=working,
        loading=run.base + loading,
        mapped=loading - least,
        host=places.host + of_host[0],
        disk=places.disk,
        over=over,
        short=short,
        host_weights=on_host,
        host_working=of_host[1],
        budget=budget,
    )


def loading_bytes(shape: Shape, weights: Weights, number: int, device: str, *, check: bool) -> tuple[int, int]:
    """Return the most bytes that loading takes, and how many of them are reclaimable pages."""
    on_cpu = device == "cpu"
    mapped = weights.files if on_cpu else 0
    # unconverted weights are used from the mapped file; converted weights exist beside the file until all are loaded
    whole = weights.loaded if on_cpu else weights.memory
    checked = check_bytes(shape, number) if check else 0
    return whole + mapped + max(checked, weights.packing), mapped  # on a GPU too


def largest(shape: Shape, weights: Weights, run: RunShape, room: int, most: int) -> int:
    """Return the longest context, at most `most` tokens, whose need is within `room`; 0 = none fits."""

    def fits(n: int) -> bool:
        found = need(shape, weights, run, n)
        return found.least <= room and not found.over

    if not most or not fits(1):
        return 0
    low, high = 1, most + 1  # the need grows with the context, so bisection finds the limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
