"""Build the document that `kvcli fit` prints from plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcli.fit.advice import binding, changes
from kvcli.fit.explain import budget, parts
from kvcli.fit.plan import Plan, PlannedModel, chosen
from kvcli.fit.preflight import Preflight, gib
from kvcli.fit.speed import speed, split
from kvcli.schemas.fit import CalibrationDocument, FitChange, FitDocument, FitPlan, FitRuns
from kvcli.settings.profile import Profile
from kvcli.version import __version__


def document(
    outlook: Preflight,
    plans: Sequence[Plan],
    others: Mapping[str, Profile],
    calibrations: Mapping[str, CalibrationDocument],
    context: int | None,
    notes: Sequence[str],
    host: CalibrationDocument | None = None,
    *,
    explains: bool = False,
    has_map: bool = False,
) -> FitDocument:
    """Build the document from at least one plan.

    `calibrations`: measured times by profile name, if any; `host`: those of the CPU beside a GPU. `explains`: list the
    memory components of each plan and the settings that reduce them. `has_map`: a head map of the model exists.
    """
    subject, first = outlook.subject, plans[0]
    dates = [found.date for found in calibrations.values()]
    return FitDocument.from_attributes(
        subject,
        subject.shape,
        first.room,
        kvcli=__version__,
        model=outlook.name,
        ctx=context,
        free_bytes=first.room.available,
        plans=[
            _entry(outlook, plan, others, calibrations.get(plan.profile.name), host).model_copy(
                update={
                    "budget": (spent := budget(plan, has_map, calibrations.get(plan.profile.name))),
                    "parts": parts(plan, subject) if explains and spent is None else None,
                }
            )
            for plan in plans
        ],
        described=first.room.is_described,
        calibrated=min(dates, default=None),
        notes=[*notes_of(subject, first), *notes, *dict.fromkeys(outlook.notes)],
    )


def _entry(
    outlook: Preflight,
    plan: Plan,
    others: Mapping[str, Profile],
    calibration: CalibrationDocument | None,
    host: CalibrationDocument | None,
) -> FitPlan:
    need, past = plan.need, plan.facts.beyond
    away = {"host": need.host + need.host_weights + need.host_working, "disk": need.disk}
    tried = [] if plan.fits else changes(outlook.subject, plan, others, outlook.found, plan.facts)
    return FitPlan.from_attributes(
        need, plan, plan.profile, profile=plan.profile.name, profile_hash=plan.profile.hash, ctx=need.context,
        kv_tiers={plan.room.kind: need.kv} | {k: n for k, n in (("host", need.host), ("disk", need.disk)) if n},
        kv_per_token=plan.per_token, loading=need.loading_peak, needed=plan.least, max_ctx=plan.most,
        correction=past.middle, runs=FitRuns.from_attributes(past) if past.runs else None,
        binding=None if plan.fits else binding(plan), order=plan.run.order, chosen=chosen(plan),
        places={plan.room.kind: need.running} | {place: n for place, n in away.items() if n}, split=split(plan, host),
        changes=[FitChange(type=c.type, total=c.total, ctx=c.context) for c in tried],
        speed=speed(plan, outlook.subject.shape, calibration, host), budget=None, parts=None,
    )  # fmt: skip


def notes_of(subject: PlannedModel, plan: Plan) -> list[str]:
    """Return notes about a model that its figures do not show."""
    return [*_model_notes(subject), *_packing_notes(subject, plan)]


def _packing_notes(subject: PlannedModel, plan: Plan) -> list[str]:
    packing, kind, notes = subject.packing, plan.room.kind, []
    if packing.unpacks(kind):
        sizes = f"{gib(subject.files)} GiB takes {gib(plan.run.weights.loaded)} GiB dequantized"
        notes.append(f"its weights are quantized as {packing.method}: {sizes}")
    if not plan.room.is_described and (missing := packing.missing(kind)):
        notes.append(f"loading it needs packages that are not installed: {', '.join(missing)}")
    return notes


def _model_notes(subject: PlannedModel) -> list[str]:
    shape, notes = subject.shape, []
    if shape.is_endless:
        notes.append(f"config.json states no context limit; {shape.limit:,} tokens are assumed")
    if subject.is_guess:
        notes.append("its weight quantization is unknown: weights are counted unquantized")
    windows = [w for w in shape.windows if w is not None]
    if windows:
        notes.append(
            f"{len(windows)} of {shape.layers} layers see only the last {max(windows):,} tokens; "
            "their KV is stored for all tokens nevertheless"
        )
    if shape.experts:
        notes.append(f"all {shape.experts} experts are in memory; each token uses {shape.active} of them")
    return notes
