"""Fit a model on a GPU that is too small: quantize its weights first, then run some layers on the CPU.

Settings that the user gave are never changed. The GPU keeps the last layers and the head. A forward pass then crosses
to the GPU only once and without waiting, and tokens are sampled where the logits are. The embeddings leave the GPU
first, because a pass reads only a few of their rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.assemble import may_split
from kvcli.fit.plan import MeasuredFacts, Plan, PlannedModel, plan
from kvcli.settings.settings import BY, DEFAULT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcli.fit.available_memory import AvailableMemory
    from kvcli.settings.profile import Profile

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
        return kept if any(h.stays for h in subject.held) and kept.weights.memory <= found.weights.memory else found
    if room.kind != "cuda" or _is_enough(found, context):
        return found
    for other in _packed(subject, profile):
        profile, found = other, plan(subject, other, room, context, facts)
    if _is_enough(found, context) or profile.load.layers_on_gpu != "auto" or subject.packing.stays("cuda"):
        return found
    return _split(subject, profile, room, context, facts) or found


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
        said.append("weights keep the bits of their file, because --quant int8 takes more memory")
    elif quant:
        why = f"in full precision they do not fit on {device}"
        said.append(f"weights in {quant}: {why} (--quant none keeps full precision and runs some layers on the CPU)")
    if (n := found.run.on_card) is not None and "load.layers_on_gpu" in made:
        below = found.run.of_layers - n
        what = f"embeddings and the first {below} of {found.run.of_layers} layers" if below else "embeddings"
        said.append(f"{what} run on the CPU, because more does not fit on {device}")
    if made.get("prefill.order"):
        said.append("prompts are read layer by layer, because less fits in chunks")
    return said


def _is_enough(found: Plan, context: int | None) -> bool:
    """True if the plan fits; without a requested context window, it must also leave tokens for an answer."""
    if context is not None or found.profile.context.limit != "auto":
        return found.fits
    return found.most >= min(found.profile.context.reserve + 1, found.limit)


def _packed(subject: PlannedModel, profile: Profile) -> Iterator[Profile]:
    if profile.origins["load.quant"] == DEFAULT.name and not subject.packing.stays("cuda"):
        yield profile.changed({"load": {"quant": "int4"}}, BY)


def _split(
    subject: PlannedModel, profile: Profile, room: AvailableMemory, context: int | None, facts: MeasuredFacts
) -> Plan | None:
    """Return the plan with as many layers on the GPU as fit, or None if no number of layers fits."""
    layers, limit, window = subject.shape.layers, subject.shape.limit, profile.context.limit

    def tried(on_card: int, context: int | None) -> Plan:
        return plan(subject, profile.changed({"load": {"layers_on_gpu": on_card}}, BY), room, context, facts)

    # rows of a split model cannot be stopped between layers
    if profile.prune.describe_read or profile.prefill.order == "layers":
        return None
    if subject.shape.folds.layers:  # recurrent states are on one device
        return None
    if window != "auto":
        context = context or window
    for asked in [context] if context else [min(limit, WINDOW), min(limit, profile.context.reserve + 1)]:
        if not (whole := tried(layers, asked)).weights.layers:
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
