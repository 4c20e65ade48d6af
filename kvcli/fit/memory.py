"""What a run needs, by component, and the largest context in a given room. Bytes and tokens throughout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from kvcli.engine.forward_memory import captured_bytes, captured_sizes, new_kv_bytes, working_bytes
from kvcli.fit import cuda_overhead
from kvcli.fit.kv_placement import HeldSlots
from kvcli.fit.working_memory import check_bytes, product_bytes
from kvcli.kv.cache.precision_budget import PLACED, WORTH
from kvcli.kv.capacity import EVERY
from kvcli.kv.footprint import STEP
from kvcli.kv.sliding_windows import Window, windows_of
from kvcli.kv.slots import AttentionParams, LayerShape
from kvcli.kv.tiers.device_tables import MOST_ROWS

if TYPE_CHECKING:
    from kvcli.fit.kv_placement import TierLimits
    from kvcli.fit.weights import Weights
    from kvcli.kv.cache.precision_budget import PrecisionBudget
    from kvcli.models.shape import Shape
    from kvcli.settings.schema import Order

GIB = 1 << 30
POSITION = 4  # bytes of a slot's position


@dataclass(frozen=True, slots=True)
class DraftModelNeed:
    """A model that drafts, in bytes. It is loaded behind the other, and their passes take turns."""

    stored: Callable[[int], int]  # with n tokens, its weights, keys and values
    working: Callable[[int], int]  # what its passes compute with
    loading: int = 0  # while it is read, beside what is loaded
    mapped: int = 0  # of these, pages that the system takes back


@dataclass(frozen=True, slots=True)
class RunShape:
    """What decides how much memory a run takes, beside the model."""

    device: str  # cpu, cuda, mps
    number: int  # bytes of a number the model computes in
    kv_number: int  # bytes of a stored number, as the newest tokens have it
    layer: Callable[[LayerShape, int, int], int]  # bytes of one with so many slots a head, so many just stored
    index: Callable[[int, int], int]  # of the same slots in all layers, what recall knows them by
    caps: TierLimits
    chunk: int  # tokens read in one pass
    rows: int  # rows of a decoding pass, at most
    slots: Callable[[int], int]  # of n tokens, how many a head keeps
    reading: Callable[[int], int]  # of n tokens, how many a head holds while they are read, the last chunk aside
    again: Callable[[int], int]  # of n tokens, how many rows run once more behind them
    judging: Callable[[int], int]  # of n tokens, bytes that judging them takes beside a pass
    between: int | None  # tokens between two evictions while answering; None: nothing is ever forgotten
    answer: int  # tokens of one at most: sliding layers give back what they hide when the next text is read
    tables: Callable[[int], int]  # bytes of host memory in which the drafter remembers n tokens
    copied: Callable[[int], int]  # of n slots, how many a head the drafter's view keeps a copy of
    second: DraftModelNeed | None  # a model that drafts
    lower: int | None  # bytes on the device of a slot of all layers that a policy moves down; None: it is forgotten
    spends: PrecisionBudget | None  # what a policy may spend at a boundary; None: as many bytes as there are
    always: int  # tokens that it leaves whole, whatever there is to spend
    texts: int  # among which it divides what is free
    drops: bool  # what is moved down is forgotten after all where there is no room
    base: int  # of the program; on a GPU, what earlier runs took there beyond their estimates
    is_uneven: bool = False  # heads keep different numbers of slots, in full precision
    is_packed: bool = False  # linear layers run on packed weights
    is_native: bool = False  # and attention on kernels of its own
    is_fused: bool = False  # all of it on a GPU's own kernels
    draws: bool = False  # and so is the next token drawn
    records: bool = False  # passes are captured and replayed
    on_card: int | None = None  # decoder layers on a GPU, the last ones; None: all of the model
    of_layers: int = 0  # that the model has
    checkpoints: int = 0  # of states, where layers keep one
    check: bool = True  # compare with the stock model after loading
    order: Order = "chunks"  # what of a prompt is finished first
    prunes: bool = False  # some of its tokens go no further
    behind: Callable[[int], int] = lambda n: 0  # of n tokens, how many are kept as one hidden vector instead


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes by component for one context."""

    context: int
    base: int
    weights: int
    kv: int
    draft: int
    working: int
    loading: int  # at the highest moment of loading
    mapped: int  # of `loading`: pages of the weight files, which the system takes back when it needs them
    host: int = 0  # keys and values in host memory behind a GPU
    disk: int = 0  # and on the disk
    over: int = 0  # and those for which `[memory]` leaves no room
    short: int = 0  # of these, what always stays beyond `memory.budget`, however short a text is
    host_weights: int = 0  # of layers that run on the CPU behind a GPU, and of embeddings looked up there
    host_working: int = 0  # what these compute with
    budget: int = 0  # of `kv`, what a policy may spend at a boundary; 0: nothing says how much

    @property
    def running(self) -> int:
        return self.base + self.weights + self.kv + self.draft + self.working

    @property
    def peak(self) -> int:
        """The most that is resident at once."""
        return max(self.running, self.loading)

    @property
    def loading_peak(self) -> int:
        """What loading takes at its highest beyond all that runs later."""
        return self.peak - self.running

    @property
    def least(self) -> int:
        """What must be free: the peak without pages that the system takes back."""
        return max(self.running, self.loading - self.mapped)


def kv_bytes(shape: Shape, slots: int, number: float, *, windows: bool = False) -> int:
    """Keys and values of so many slots a head. `windows`: sliding layers keep their window alone, as tables say."""
    stored = shape.visible(slots) if windows else [slots] * shape.layers
    return int(sum(of.numbers * n for of, n in zip(shape.stores, stored, strict=True)) * number)


@lru_cache
def stored(shape: Shape) -> tuple[tuple[LayerShape, int | None], ...]:
    """What each layer stores as a store is told of it, and the window of the rows that look furthest back in it."""
    shapes = [LayerShape(of.kv_heads, of.key, of.value, of.shares, rank=of.rank) for of in shape.stores]
    windows = windows_of(shapes, [AttentionParams(1.0, window=window) for window in shape.windows])
    return tuple((of, windows[i].size if i in windows else None) for i, of in enumerate(shapes))


def _waiting(shape: Shape, run: RunShape, context: int, held: int) -> int:
    """Rows that wait between layers beside what these hold: what the last one is given goes as it stores, in memory
    that the system brings as it is written."""
    of, window = stored(shape)[-1]
    is_brought = run.device == "cpu" and run.lower is None
    last = of.numbers * min(held, window or held) * run.kv_number if is_brought else 0
    return max(1, context - last // (shape.hidden * run.number))


def need(shape: Shape, weights: Weights, run: RunShape, context: int) -> Need:
    """What a text of `context` tokens needs."""
    chunk = min(run.chunk, context)
    held = settled = run.slots(context)
    if run.between is not None:  # what pushes others out is stored before they are forgotten
        held = min(context, max(held + max(chunk, run.between), run.reading(context) + chunk))
        settled = min(context, max(settled, run.reading(context)))
    fresh = max(chunk, run.between or EVERY)
    moved, known = 0, held  # below the top while most is in it; by recall, if there is any
    if run.lower is not None:
        moved, known = context - held, context - run.slots(context)
    below = shape.layers - (shape.layers if run.on_card is None else run.on_card)  # layers, on the CPU
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

    spare = MOST_ROWS if run.records else 0  # a layer never has more room than an answer may need, and these

    def top(layers: Sequence[tuple[LayerShape, int | None]], here: int) -> int:
        alike = Counter(layers).items()
        each = ((n, of, window and Window(window).most(run.answer, chunk)) for (of, window), n in alike)
        return sum(n * run.layer(of, min(here, most or here) + spare, fresh) for n, of, most in each)

    def nbytes(here: int) -> int:
        lower = (moved + 2 * STEP) * (run.lower or 0)  # with spare room, in which the top grew as well
        found = top(stored(shape)[below:], here) + lower + run.index(known, fresh)
        return found if most is None else min(found, most + newest)

    is_all = run.lower is not None  # stored, at a boundary too
    spread = (
        HeldSlots(held, 0, nbytes, context, known, run.drops) if is_all else HeldSlots(settled, held - settled, nbytes)
    )
    state = shape.folds.nbytes(run.number)
    working += state + shape.folds.layers * shape.folds.taped * run.rows * run.number  # what a pass makes of it
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
    if (
        run.spends is not None
    ):  # what a pass adds comes on top, for each text its own, as a store has it (kv/cache/plan.py)
        each = (run.caps.free - (beside - working - remembered)) // run.texts - working - newest
        budget = replace(run.spends, free=max(0, each)).most(context)
    most = None if run.spends is None or run.spends.is_late else budget
    short = 0 if most is None or run.spends is None else max(0, run.always * run.spends.of_token - most)
    places = run.caps.spread(spread, chunk, beside)
    if run.device == "cuda" and below < shape.layers:  # a layer that grows is there twice, while nothing is computed
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
    """The most that loading takes, and how much of it are pages that the system takes back."""
    on_cpu = device == "cpu"
    mapped = weights.files if on_cpu else 0
    # unchanged numbers are used where they are mapped; changed ones exist beside their file until all are read
    whole = weights.loaded if on_cpu else weights.memory
    checked = check_bytes(shape, number) if check else 0
    return whole + mapped + max(checked, weights.packing), mapped  # wherever it is packed


def largest(shape: Shape, weights: Weights, run: RunShape, room: int, most: int) -> int:
    """The longest context, at most `most` tokens, whose need is within `room`; 0 = none."""

    def fits(n: int) -> bool:
        found = need(shape, weights, run, n)
        return found.least <= room and not found.over

    if not most or not fits(1):
        return 0
    low, high = 1, most + 1  # the need grows with the context, so halving finds the edge
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
