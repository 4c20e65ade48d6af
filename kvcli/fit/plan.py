"""Plan a model under a profile on a device: memory needed, if it fits, and the longest context."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from kvcli.assemble import may_split
from kvcli.engine.resources import captured_bytes, working_bytes
from kvcli.errors import BadInput, KvcliError
from kvcli.fit import cuda_overhead, memory, weights
from kvcli.fit.available_memory import AvailableMemory
from kvcli.fit.memory import BASE, is_fused, is_native
from kvcli.fit.run_log import NOTHING, Beyond
from kvcli.kv.cache.precision_budget import PrecisionBudget
from kvcli.kv.footprint import Footprint
from kvcli.kv.slots import POSITION
from kvcli.models.adapters import find_adapter
from kvcli.models.catalog import CatalogModel
from kvcli.models.checkpoint import CheckpointFormat
from kvcli.models.refusals import refuse_quant, refuse_split
from kvcli.models.shape import Shape, of_source
from kvcli.models.source import Source
from kvcli.settings.profile import Profile
from kvcli.settings.schema import NUMBERS, Memory
from kvcli.settings.values import BY, DEFAULT


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model described by its files, or by its config alone."""

    name: str
    shape: Shape
    held: tuple[weights.CheckpointTensor, ...]
    dtype: str  # dtype that it computes in, unless load.dtype is given
    packing: CheckpointFormat  # format of its weight files
    is_assumed: bool  # tensor sizes are computed from the config, because there are no files
    is_guess: bool  # and the quantization of its weights is unknown
    files: int  # bytes
    path: str = ""  # folder of the files
    # MLA latents are expanded where weights stay quantized, because the weights that expand latents are quantized
    is_expanded: bool = False
    weights: tuple[str, ...] = ()  # paths of the weight files

    def on(self, kind: str) -> Shape:
        """Return the shape of the model on a device of this kind."""
        return self.shape.expanded if self.is_expanded and self.packing.stays(kind) else self.shape

    @property
    def number(self) -> int:
        return weights.BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class MeasuredFacts:
    """Measured or external facts that go into every estimate."""

    base: int = BASE  # bytes of the program, in host memory
    beyond: Beyond = NOTHING  # excess of earlier runs on this kind of device over their estimates
    find: Callable[[str], PlannedModel] | None = None  # finds the draft model by name; None = its sizes cannot be known


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan for one profile and one context."""

    run: memory.PlannedRun
    need: memory.Need
    facts: MeasuredFacts
    most: int  # the longest context that fits, at most the model's limit
    whole_with: str = ""  # settings for fewer bits of KV, with which all layers would be on the GPU; "" = none

    @property
    def profile(self) -> Profile:
        return self.run.profile

    @property
    def room(self) -> AvailableMemory:
        return self.run.room

    @property
    def limit(self) -> int:
        """Context limit of the model."""
        return self.run.shape.limit

    @property
    def per_token(self) -> int:
        """Bytes of KV of an old token."""
        cache = self.run.cache
        return sum(cache.old_slots) - POSITION * sum(of.numbers > 0 for of in cache.shapes)

    @property
    def total(self) -> int:
        """Peak bytes: the sum of the components."""
        return self.need.peak

    @property
    def least(self) -> int:
        """Bytes that must be free."""
        return self.need.least

    @property
    def spending(self) -> PrecisionBudget | None:
        """The precision budget (`memory.budget`) at this context; None: no budget."""
        return self.run.spends and replace(self.run.spends, free=self.need.budget)

    @property
    def usable(self) -> int:
        """Bytes of the device that a plan may use."""
        return self.room.usable

    @property
    def fits(self) -> bool:
        return self.least <= self.usable and not self.need.over and self.need.context <= self.limit

    @property
    def fits_card(self) -> bool:
        """True if the device has enough memory for its components, whatever the host has."""
        return self.least <= self.usable

    @property
    def missing(self) -> int:
        """Bytes that are missing; 0 if the plan fits."""
        return max(0, self.least - self.usable, self.need.over)


def subject_of(source: Source) -> PlannedModel:
    """Describe a model by its files. Without files, assume the tensors of a model with gated MLPs."""
    shape = of_source(source)
    held = weights.of_files(source)
    shape = replace(shape, is_tied=shape.is_tied or not _has_head(source))
    stated = str(
        source.config.get("dtype") or source.config.get("torch_dtype") or source.text_config.get("dtype") or ""
    )
    dtype = stated.removeprefix("torch.") or source.dtype.lower()
    dtype = dtype if dtype in weights.BYTES else "bfloat16"
    packing = CheckpointFormat.of(source.config)
    packed = weights.packed_bytes(packing.settings) if packing.stays("cpu") else None
    assumed = held or weights.of_shape(shape, weights.BYTES[dtype], packed)
    files = source.nbytes or sum(h.nbytes for h in assumed)
    is_guess = not held and packing.stays("cpu") and packed is None
    is_expanded = weights.expands_packed(source)
    about = not held, is_guess, files, str(source.path), is_expanded, tuple(str(file.path) for file in source.files)
    return PlannedModel(source.id, shape, assumed, dtype, packing, *about)


def listed(known: CatalogModel) -> PlannedModel:
    """Describe a model of the catalog by the sizes in its entry, for a model that is not on this machine."""
    shape, held = known.shape, list(weights.of_shape(known.shape))
    vocab = shape.vocab * shape.hidden * (1 if shape.is_tied else 2)

    def beside(numbers: int, packs: bool) -> None:
        """Add tensors that `of_shape` does not know: recurrent layers, shared experts, embeddings per layer."""
        rows = max(0, numbers) // shape.hidden // shape.layers
        one = weights.CheckpointTensor((rows, shape.hidden), 2 * rows * shape.hidden, packs)
        held.extend(replace(one, layer=i if packs else None) for i in range(shape.layers if rows else 0))

    experts = [h for h in held if h.of_experts]
    over = sum(prod(h.shape) for h in held) - known.linear - vocab
    for h in experts[: max(0, over) // experts[0].matrix if experts else 0]:
        held.remove(h)  # the first layers of some models have no experts
    beside(known.linear + vocab - sum(prod(h.shape) for h in held), True)
    beside(known.parameters - known.linear - vocab, False)
    size = sum(h.nbytes for h in held)
    if parts := {kind: n / size for kind in ("cpu", "cuda") if (n := known.on(kind).quantized)}:
        stays = [{kind: int(h.nbytes * part) for kind, part in parts.items()} for h in held]
        held = [replace(h, is_gguf=True, stays=of, of_experts=False) for h, of in zip(held, stays, strict=True)]
    return PlannedModel(known.id, shape, tuple(held), "bfloat16", CheckpointFormat(), True, False, known.download)


def plan(
    subject: PlannedModel, profile: Profile, room: AvailableMemory, context: int | None, facts: MeasuredFacts
) -> Plan:
    """Plan a model. `context` None: the profile's context window; if auto, the model's limit or the most that fits."""
    load, whole = profile.load, profile.verifying_profile
    number = subject.number if load.dtype == "auto" else weights.BYTES[load.dtype]
    kv_number = number if profile.kv.dtype == "auto" else weights.BYTES[profile.kv.dtype]
    given, shape = subject.packing.stays(room.kind), subject.on(room.kind)
    refuse_quant(subject.name, load.quant, room.kind, is_quantized=given)
    is_whole = load.layers_on_gpu == load.experts_on_gpu == "auto" and not room.unserved
    weigh = partial(weights.weigh, number=number, quant=load.quant, device=room.kind, given=given, head=load.head)
    heavy = weigh(subject.held, shape, is_whole=is_whole)
    split = load.layers_on_gpu, load.experts_on_gpu, load.embeddings
    refuse_split(*split, room.kind, is_quantized=given, folds=bool(shape.folds.layers))
    by_kernels = is_native(shape, subject.dtype if load.dtype == "auto" else load.dtype, room.kind)
    heavy = heavy.with_adapters(sum(find_adapter(text).file.nbytes for text in load.adapters), number)
    heavy = heavy.beside(weights.panels(shape, number)) if by_kernels and room.kind == "cpu" else heavy
    run = memory.PlannedRun(
        profile,
        shape,
        heavy,
        room,
        number,
        cache=memory.cache_footprint(whole, shape, kv_number, room.kind),
        draft_cache=replace(memory.cache_footprint(profile, shape, kv_number, room.kind), memory=Memory())
        if profile.is_checked
        else None,
        second=_second(subject, profile, room, facts),
        base=max(0, _base(room, facts) + facts.beyond.middle),
        host=max(0, room.host - facts.base),
        is_native=by_kernels,
        chunk=profile.prefill.chunk,
    )
    limit = profile.context.limit
    asked = context or (shape.limit if limit == "auto" else limit)
    run, most = _ordered(_by_room(run, asked), asked)
    if context is None:
        context = (most or shape.limit) if limit == "auto" else limit
    if context < 1:
        raise BadInput("a context has at least one token", code="bad_length")
    return Plan(run, memory.need(run, context), facts, most)


def _base(room: AvailableMemory, facts: MeasuredFacts) -> int:
    """Return the program's bytes: the process on a CPU, library workspaces on a GPU."""
    if room.kind != "cuda":
        return facts.base if room.kind == "cpu" else 0
    return cuda_overhead.libraries(room.capability, room.total)


def _by_room(run: memory.PlannedRun, asked: int) -> memory.PlannedRun:
    """Return the run with the largest prefill chunk that a GPU has room for, if the profile leaves the chunk open."""
    if run.room.kind != "cuda" or run.profile.origins["prefill.chunk"] != DEFAULT.name:
        return run
    least = run.profile.sparse.segment
    tried = [replace(run, chunk=chunk) for chunk in (run.chunk, *cuda_overhead.CHUNKS) if least <= chunk <= run.chunk]
    most = cuda_overhead.working_most(run.room.available)
    return next((one for one in tried if memory.need(one, asked).working <= most), tried[-1])


def _ordered(run: memory.PlannedRun, asked: int) -> tuple[memory.PlannedRun, int]:
    """Return the run with its prefill order, and the longest context that fits in this order.

    Neither order is faster (tests/bench/reading_order.py), and chunked prefill can continue after an interruption.
    Layer-wise prefill is chosen only if a pruner needs it, or if it lets `asked` tokens, or at least more tokens, fit.
    """
    by_layers, profile = replace(run, order="layers"), run.profile
    order = "layers" if profile.prune.describe_read else profile.prefill.order
    if order == "layers":
        return by_layers, memory.largest(by_layers)
    most = memory.largest(run)
    needs_chunks = profile.policy.compression_interval is not None or profile.sparse.segment > 0
    is_fixed = order == "chunks" or needs_chunks or run.on_card is not None
    if is_fixed or most >= min(asked, run.shape.limit):
        return run, most
    more = memory.largest(by_layers)
    return (by_layers, more) if more > most else (run, most)


def _second(
    target: PlannedModel, profile: Profile, room: AvailableMemory, facts: MeasuredFacts
) -> memory.DraftModelNeed | None:
    """Return the memory of the draft model; None = there is none."""
    wanted, methods = profile.second, [getattr(profile, table) for table in profile.second_models]
    if wanted is None or facts.find is None:
        return None
    subject = facts.find(wanted.model)
    number = subject.number if profile.load.dtype == "auto" else weights.BYTES[profile.load.dtype]
    given = subject.packing.stays(room.kind)
    refuse_quant(subject.name, wanted.quant, room.kind, is_quantized=given)
    of_run = partial(weights.weigh, number=number, quant=wanted.quant, device=room.kind, given=given)
    heavy = of_run(subject.held, subject.shape, is_whole=not room.unserved)
    shape, is_shared = subject.shape, subject.path == target.path and wanted.quant == profile.load.quant
    loading, mapped = memory.loading_bytes(shape, heavy, number, room.kind, check=profile.load.verify)
    is_here = is_native(shape, subject.dtype if profile.load.dtype == "auto" else profile.load.dtype, room.kind)
    is_captured = is_fused(shape, number, room) and profile.load.graphs == "auto" and not shape.folds.layers
    folds, sizes = shape.folds, memory.sizes(shape, number, number, room.kind)

    def footprint(n: int) -> Footprint:
        return sum((of.draft_footprint(n, sizes) for of in methods), Footprint())

    def stored(n: int) -> int:
        of = footprint(n)
        weight = (0 if is_shared else heavy.memory) + folds.layers * folds.taped * of.rows * number
        kept = cuda_overhead.captured(shape.layers, len(of.captured)) + captured_bytes(
            shape, of.captured, slots=of.slots, number=number, kv_number=number, draws=True
        )
        return weight + of.beside + memory.kv_bytes(shape, of.slots, number) + (kept if is_captured else 0)

    def working(n: int) -> int:
        of = footprint(n)
        return working_bytes(
            shape, chunk=of.chunk, rows=of.rows, slots=of.slots, number=number, kv_number=number, device=room.kind,
            is_native=is_here, is_fused=is_fused(shape, number, room),
        )  # fmt: skip

    return memory.DraftModelNeed(stored, working, 0 if is_shared else loading, 0 if is_shared else mapped)


def torch_dtype(subject: PlannedModel, profile: Profile) -> str:
    """Return the dtype that the model computes in, in torch's spelling."""
    stated = subject.dtype if profile.load.dtype == "auto" else profile.load.dtype
    name = NUMBERS.get(stated, stated)
    return name if "float" in name else f"float{name[1:]}"  # f32, in the spelling of safetensors


def _has_head(source: Source) -> bool:
    names = [name for file in source.files for name in file.tensors]
    return not names or any(name.endswith("lm_head.weight") for name in names)


# Fit a model on a GPU that is too small: quantize its weights first, then run some layers on the CPU.
#
# Settings that the user gave are never changed. The GPU keeps the last layers and the head. A forward pass then crosses
# to the GPU only once and without waiting, and tokens are sampled where the logits are. The embeddings leave the GPU
# first, because a pass reads only a few of their rows.

WINDOW = 8192  # tokens that a split is planned for when no context window is requested


def plan_on(
    subject: PlannedModel, profile: Profile, room: AvailableMemory, context: int | None, facts: MeasuredFacts
) -> Plan:
    """Plan as `plan` does, but choose open settings so that the model fits a GPU; `plan.profile` records the choice.

    If nothing fits, return the last plan that was tried.
    """
    found = plan(subject, profile, room, context, facts)
    if room.kind == "cpu" and profile.load.quant != "none" and profile.origins["load.quant"].startswith("built-in "):
        kept = plan(subject, profile.changed({"load": {"quant": "none"}}, BY), room, context, facts)
        is_near = 10 * kept.run.weights.memory <= 11 * found.run.weights.memory
        return kept if is_near and any("cpu" in h.stays for h in subject.held) else found
    if room.kind != "cuda" or _is_enough(found, context):
        return found
    for other in _smaller(subject, profile, room):
        profile, found = other, plan(subject, other, room, context, facts)
        if _is_enough(found, context):
            return found
    if profile.load.layers_on_gpu != "auto" or subject.packing.stays("cuda"):
        return found
    if subject.shape.experts and not room.unserved and profile.origins["load.experts_on_gpu"] == DEFAULT.name:

        def tried(n: int) -> Plan:
            return plan(subject, profile.changed({"load": {"experts_on_gpu": n}}, BY), room, context, facts)

        n = bisect(range(subject.shape.layers), 0, key=lambda n: 0 if _is_enough(tried(n), context) else 1) - 1
        if n >= 0:
            return tried(n)
    if (split := _split(subject, profile, room, context, facts)) is None:
        return found
    for bits in (8, 4):
        fewer = profile.replace(exactness="approx", kv={"k_bits": bits, "v_bits": bits})
        with suppress(KvcliError):  # the profile cannot have these bits
            if bits < profile.kv.k_bits and _is_enough(plan(subject, fewer, room, context, facts), context):
                return replace(
                    split, whole_with=f"--set exactness=approx --set kv.k_bits={bits} --set kv.v_bits={bits}"
                )
    return split


def chosen(found: Plan) -> dict[str, int | str]:
    """Return dotted key -> value for each setting that the plan chose because the profile leaves it open."""
    profile, run, made = found.profile, found.run, dict[str, int | str]()
    for key, origin in profile.origins.items():
        if origin == BY and isinstance(value := profile.values[key], int | str):
            made[key] = value
    if run.chunk != profile.prefill.chunk:
        made["prefill.chunk"] = run.chunk
    if run.order == "layers" and profile.prefill.order == "auto" and not profile.prune.describe_read:
        made["prefill.order"] = run.order
    return made


def told(found: Plan) -> list[str]:
    """Describe the choices that the user should know, with the option to type for another choice."""
    device, made = found.room.device, chosen(found)
    said = []
    if (quant := made.get("load.quant")) == "none":
        said.append("weights keep the bits of their file, because --quant int8 would save little memory")
    elif quant:
        why = f"in full precision they do not fit on {device}"
        said.append(f"weights in {quant}: {why} (--quant none keeps full precision and runs some layers on the CPU)")
    if (n := made.get("load.experts_on_gpu")) is not None:
        said.append(f"experts lie in host memory but for {n} layers, because more does not fit on {device}")
    if made.get("load.embeddings") == "host":
        more = " and the output layer is in 8 bits" if "load.head" in made else ""
        said.append(f"embeddings lie in host memory{more}, because more does not fit on {device}")
    if (n := found.run.on_card) is not None and "load.layers_on_gpu" in made:
        of = found.run.shape.layers
        below = of - n
        what = f"embeddings and the first {below} of {of} layers" if below else "embeddings"
        said.append(f"{what} run on the CPU, because more does not fit on {device}")
        said[-1] += f" (all of it does with {found.whole_with})" if found.whole_with else ""
    if made.get("prefill.order"):
        said.append("prompts are read layer by layer, because less fits in chunks")
    return said


def _is_enough(found: Plan, context: int | None) -> bool:
    """True if the plan fits; without a requested context window, it must also leave tokens for an answer."""
    if context is not None or found.profile.context.limit != "auto":
        return found.fits
    return found.most >= min(found.profile.context.reserve + 1, found.limit)


def _smaller(subject: PlannedModel, profile: Profile, room: AvailableMemory) -> Iterator[Profile]:
    """Yield profiles that take less of a GPU's memory, each with the changes before it."""
    if subject.packing.stays("cuda"):
        return
    if profile.origins["load.quant"] == DEFAULT.name:
        yield (profile := profile.changed({"load": {"quant": "int4"}}, BY))
    if room.unserved or profile.load.layers_on_gpu != "auto" or profile.origins["load.embeddings"] != DEFAULT.name:
        return
    if not subject.shape.is_tied or profile.load.head != "none":
        yield (profile := profile.changed({"load": {"embeddings": "host"}}, BY))
    if profile.origins["load.head"] == DEFAULT.name and profile.load.quant != "none":  # which asks for full precision
        yield profile.changed({"load": {"embeddings": "host", "head": "int8"}}, BY)


def _split(
    subject: PlannedModel, profile: Profile, room: AvailableMemory, context: int | None, facts: MeasuredFacts
) -> Plan | None:
    """Return the plan with as many layers on the GPU as fit, or None if no number of layers fits."""
    layers, limit, window = subject.shape.layers, subject.shape.limit, profile.context.limit

    def tried(on_card: int, context: int | None) -> Plan:
        ends = (
            {"embeddings": "device"} if profile.origins["load.embeddings"] == BY else {}
        )  # they leave with the layers
        return plan(subject, profile.changed({"load": {"layers_on_gpu": on_card, **ends}}, BY), room, context, facts)

    # rows of a split model cannot be stopped between layers
    if profile.prune.describe_read or profile.prefill.order == "layers" or profile.load.experts_on_gpu != "auto":
        return None
    if subject.shape.folds.layers:  # recurrent states are on one device
        return None
    if window != "auto":
        context = context or window
    for asked in [context] if context else [min(limit, WINDOW), min(limit, profile.context.reserve + 1)]:
        if not (whole := tried(layers, asked)).run.weights.layers:
            return None
        if whole.fits:
            return tried(layers, context)
        low, high = 0, layers if may_split(profile) else 1
        while high - low > 1:  # fewer layers need less GPU memory and more host memory
            middle = (low + high) // 2
            low, high = (middle, high) if tried(middle, asked).fits_card else (low, middle)
        if low and tried(low, asked).fits:
            return tried(low, context)
    return None
