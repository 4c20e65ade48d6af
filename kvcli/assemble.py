"""Build objects from a profile: KV cache, session, drafter, policies.

torch is imported only when something is built, so that a profile can be read and refused quickly.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from hashlib import sha256
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli.errors import BadConfig
from kvcli.methods.answer_writer import answer_writer as answer_writer
from kvcli.methods.answer_writer import writer_table as writer_table
from kvcli.settings.profile import ALTERED, TIERS, Profile
from kvcli.settings.resolve import method_class
from kvcli.settings.schema import METHOD_TABLES, NUMBERS, Memory, registries, size_of, texts_of

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.drafting.drafter import Costs, Drafter, ModelPair
    from kvcli.engine.forward_request import Passes
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.policy import PerLayerPolicy, Policy
    from kvcli.engine.sequence.sampler import Sampler
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.kv.cache.plan import CachePlan
    from kvcli.kv.companion import Companion
    from kvcli.kv.slots import KVCache, Slots
    from kvcli.kv.views.view import CompactView, Selection
    from kvcli.methods.reuse.span_reuse import SpanReuse
    from kvcli.prefix_cache.prefix_cache import CacheConditions

# tables that the content of a KV cache depends on
SHAPE = ("prefill", "prune", "reuse", "kv", "kv_format", "memory", "policy", "sparse")


def store(lm: LM, profile: Profile, held: int = 0) -> KVCache:
    """Return an empty KV cache as `[kv]` and `[memory]` specify; raises BadConfig or CacheFull if that is not possible.

    `held`: bytes of the cache that this one is to replace.
    """
    if any(shape.device for shape in lm.shapes) and not may_split(profile):
        raise BadConfig(
            "a model on two devices needs the full KV cache in full precision, without views",
            code="split_past",
            lines=[f"{lm.info.id}: {lm.info.backend}"],
            try_=["--set load.layers_on_gpu=auto", "-P ngram", "--device cpu"],
        )
    whole = plan(lm, profile.verifying_profile, held).store()
    if not profile.is_checked:
        return whole
    from kvcli.kv.cache.draft_and_full import DraftAndFullCache

    return DraftAndFullCache(whole, replace(plan(lm, profile), memory=Memory()).store())


def may_split(profile: Profile) -> bool:
    """True if the layers of a KV cache of this profile may be on two devices: one tier, without selection or
    rotation."""
    return not profile.effects.keys() & (ALTERED | {"condenses", "views"})


def adapted_profile(lm: LM, profile: Profile) -> Profile:
    """Return the profile as this model supports it; `Profile.adaptations` says what was changed for that, and why.

    With `spec.require_batch_invariance`, a profile drafts only if the model is batch invariant. Otherwise a row rounds
    differently next to other rows, and so does the KV of accepted draft tokens."""
    profile = _chained(profile) if lm.recurrent_layers else profile
    if not profile.spec.require_batch_invariance or not (by := _batch_variant_reason(lm, profile)):
        return profile
    why = f"no drafting: {by} a drafted token is rounded unlike one decoded alone"
    return profile.changed({"spec.method": "off"}, "the model", why)


def _chained(profile: Profile) -> Profile:
    """Return the profile with drafts without branches and no lookahead, as recurrent layers require."""
    spec, why = profile.spec, "this model has recurrent layers"
    others = [name for name in spec.sources if name != "lookahead"] if spec.method == "mix" else []
    if spec.method == "off":
        return profile
    if spec.method == "lookahead" or (spec.method == "mix" and not others):
        copies, said = {"method": "ngram", "branches": 1}, "prompt lookup drafts instead of lookahead"
        return profile.changed({"spec": copies}, "the model", f"{why}: {said}")
    mixed = {"sources": others} if spec.method == "mix" else {}
    said = "drafts are one chain, without lookahead"
    return profile.changed({"spec": {"branches": 1, **mixed}}, "the model", f"{why}: {said}")


def _batch_variant_reason(lm: LM, profile: Profile) -> str:
    """Return what makes a row depend on the number of rows in its pass, by more than float32 rounding; "" = nothing."""
    if lm.is_batch_variant:
        return f"in {lm.info.dtype}"
    if lm.max_invariant_rows is not None and profile.spec.rows > lm.max_invariant_rows:
        return f"in passes of more than {lm.max_invariant_rows} tokens ({profile.spec.method} has {profile.spec.rows})"
    wanted = plan(lm, profile.verifying_profile)
    by = wanted.batch_variant_reason if min(lm.dtype.itemsize, wanted.dtype.itemsize) < 4 else ""
    return by and f"under this {by}"


def exactness_label(lm: LM, profile: Profile) -> str:
    """Return the profile's `exactness`; in place of "exact", "bit-exact" where rows are batch invariant, and "exact up
    to 16-bit rounding" where drafted rows round differently."""
    if profile.exactness != "exact":
        return profile.exactness
    exceeds_invariant_rows = lm.max_invariant_rows is not None and profile.spec.rows > lm.max_invariant_rows
    if lm.is_row_invariant and not exceeds_invariant_rows:
        return "bit-exact"
    return (
        "exact up to 16-bit rounding"
        if profile.spec.method != "off" and (lm.is_batch_variant or exceeds_invariant_rows)
        else "exact"
    )


def refuse_across_ranks(lm: LM, profile: Profile) -> None:
    """Raise BadConfig for methods that need all heads in one process, if the model is split over several."""
    wrong = {
        f"policy.name = {profile.policy.method}": not profile.policy.splits_heads,
        f"kv_format.method = {profile.kv_format.method}": not profile.kv_format.splits_heads,
        f"reuse.method = {profile.reuse.method}": profile.reuse.describe_reused,
        f"reasoning_steps.method = {profile.reasoning_steps.method}": "reasoning_steps" in profile.second_models,
        f"spec.method = {profile.spec.method}": profile.spec.method == "mtp"
        or (profile.second is not None and profile.second.head != ""),
    }
    if found := [name for name, applies in wrong.items() if applies and lm.ranks.n > 1]:
        raise BadConfig(
            f"{found[0]} does not work in {lm.ranks.n} processes: it needs all heads of the model in one",
            code="no_ranks",
            lines=found[1:],
            try_=["-P exact", "-P snap", "one process, without torchrun"],
        )


def is_lossless(profile: Profile) -> bool:
    """True if the KV cache keeps all keys and values as computed, so that other sequences may continue from them."""
    return not profile.effects.keys() & ALTERED


def cache_conditions(profile: Profile) -> CacheConditions:
    """Return the settings that the content of a sequence's KV cache depends on, for the prefix cache."""
    from kvcli.prefix_cache.prefix_cache import CacheConditions
    from kvcli.settings.small_file import Unfit, read_small

    is_intact = is_lossless(profile)
    # a lossless cache has no KV format: entries saved before formats existed are still found
    say_so = {"kv.k_bits", "kv.v_bits", *(f"{t}.{one.key}" for t, one in METHOD_TABLES.items() if t != "kv_format")}
    found = {key: str(value) for key, value in profile.values.items() if key.partition(".")[0] in SHAPE}
    if name := found.get("policy.headmap"):  # the content of the file counts, not its name
        with suppress(Unfit):
            found["policy.headmap"] += f" {sha256(read_small(Path(expanduser(name)), 1 << 30)).hexdigest()}"
    settings = {key: value for key, value in found.items() if not is_intact or key in say_so}
    return CacheConditions(is_intact, settings, profile.prefix_cache.settings)


def loadable_conditions(profile: Profile) -> list[CacheConditions]:
    """Return the conditions of caches to load from: the profile's own and, if nothing but span reuse changes its KV,
    those without reuse."""
    alone = profile.replace(reuse={"method": "none"}) if profile.reuse.describe_reused else profile
    return [
        cache_conditions(profile),
        *([cache_conditions(alone)] if alone is not profile and is_lossless(alone) else []),
    ]


def chunk(lm: LM, profile: Profile) -> int:
    """Return the most tokens of a prefill pass: `prefill.chunk`, or the context window if that is smaller."""
    return min(profile.prefill.chunk, lm.limit if profile.context.limit == "auto" else int(profile.context.limit))


def plan(lm: LM, profile: Profile, held: int = 0) -> CachePlan:
    """Return the plan of the KV cache. `held`: bytes of the KV cache that it is to replace."""
    import torch

    from kvcli.engine.hf.rope import rotaries
    from kvcli.engine.resources import free_beside_weights, pass_bytes
    from kvcli.kv.cache import plan as tiers

    most, rows = chunk(lm, profile), max(profile.spec.rows, profile.reasoning_steps.rows, profile.decode.rows)
    is_fit = profile.memory.budget == "fit"  # it reserves memory for passes, on a CPU too
    kind = "cuda" if lm.is_on_accelerator else "cpu"
    dtype = lm.dtype if profile.kv.dtype == "auto" else getattr(torch, NUMBERS[profile.kv.dtype])
    return tiers.CachePlan(
        lm.shapes, dtype, lm.device, profile.kv, profile.memory, profile.sparse.settings, lm.attention_params, most,
        held, pass_bytes(lm, most, rows, dtype, kind) if lm.is_on_accelerator or is_fit else 0,
        profile.kv_format.settings, partial(rotaries, lm), free_beside_weights(lm) if is_fit else 0,
    )  # fmt: skip


def pool_bytes(lm: LM, profile: Profile) -> int:
    """Return the memory for the KV of all sequences: what is free beside the weights, without that of a pass."""
    from kvcli.engine.resources import free_beside_weights, pass_bytes

    kind, rows = "cuda" if lm.is_on_accelerator else "cpu", profile.spec.rows
    return max(0, free_beside_weights(lm) - pass_bytes(lm, chunk(lm, profile), rows, lm.dtype, kind))


def kv_bytes(lm: LM, profile: Profile, n: int, new: int, pair: ModelPair | None = None) -> int:
    """Return the most bytes of KV on the device that a sequence of n tokens needs, that of its drafter included. `new`:
    of these, tokens of the answer."""
    from kvcli.kv.capacity import EVERY
    from kvcli.kv.slots import windows_of

    checked = [profile.verifying_profile, profile] if profile.is_checked else [profile]
    draft, most = pair.draft if pair is not None and pair.draft is not lm else None, chunk(lm, profile)
    total = n * sum(shape.slot_bytes(draft.dtype.itemsize) for shape in draft.shapes) if draft is not None else 0
    for of in checked:
        its, kept, fresh = plan(lm, of).footprint, of.policy.footprint(n), max(most, compression_interval(of) or EVERY)
        top = (
            n if "evicts" not in of.effects or of.memory.demotes else min(n, max(kept.slots + fresh, kept.peak + most))
        )
        windows = windows_of(its.shapes, its.attention_params)
        for layer, shape in enumerate(its.shapes):
            slots = min(top, windows[layer].most(new, most)) if layer in windows else top
            total += its.layer_bytes(shape, slots, fresh)
        total += its.index_bytes(top, fresh)
        total += profile.spec.view_slots(top) * sum(shape.slot_bytes(its.number) for shape in its.shapes)
        if of.memory.device != "auto":
            total = min(total, size_of(of.memory.device))
    return total


def compression_interval(profile: Profile) -> int | None:
    """Return the compression interval: the policy's, else that of sparse attention, else that of a tiered cache; None =
    no compression point while decoding."""
    from kvcli.kv.capacity import EVERY

    wanted: int | None = profile.policy.compression_interval or profile.sparse.selection_interval
    return EVERY if wanted is None and TIERS & profile.effects.keys() else wanted


def session(
    lm: LM, profile: Profile, costs: Costs | None = None, kinds: bytes | None = None, pair: ModelPair | None = None
) -> GenerationSession:
    """Return an empty session of `lm` with the settings of the profile.

    `costs`: pass times on this machine, as the drafter's initial values; they never change the text. `kinds`: the kind
    of each id (kvcli.chat.transcript), for policies; None = all are text. `pair`: the model and the one that
    methods use beside it; None = none does.
    """
    import torch

    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.engine.hf.rope import rotaries
    from kvcli.engine.sequence.session import GenerationSession

    refuse_across_ranks(lm, profile)
    if profile.context.on_overflow == "compress":
        rotaries(lm)  # raises here, not when the context window is full
    kv, pair = store(lm, profile), pair or ModelPair(lm, lm)
    drafter: Drafter = profile.spec.drafter(lm.stop_ids, pair)
    if costs:
        drafter.expect(costs)
    return GenerationSession(
        lm, kv, drafter, sampler(lm, profile), view=view(lm, kv, drafter), chunk=chunk(lm, profile),
        policy=policy(lm, profile) if profile.policy.compression_interval is not None else None,
        every=compression_interval(profile), companions=companions(pair, profile),
        kinds=torch.frombuffer(bytearray(kinds), dtype=torch.int8) if kinds else None,
        checkpoints=profile.memory.checkpoints,
    )  # fmt: skip


def companions(pair: ModelPair, profile: Profile) -> list[Companion]:
    """Return the companions of a sequence that the profile's methods need, in the order of their effects."""
    from kvcli.engine.prefill.layer_by_layer import LayerByLayer

    made = [of.companion(pair) for of in (profile.reuse, profile.prune, profile.sparse)]
    by_layers = profile.prefill.order == "layers" and not profile.prune.describe_read
    return [*(one for one in made if one is not None), *([LayerByLayer(pair.target)] if by_layers else [])]


def policy(lm: LM, profile: Profile) -> Policy:
    """Return the policy of `[policy]`, with the precision levels that `memory.budget` is spent on."""
    chosen: Policy = profile.policy.settings
    if not profile.memory.spends:
        return chosen
    from kvcli.methods.policies.precision.policy import PrecisionBudgetPolicy

    return PrecisionBudgetPolicy(**vars(chosen), spending=plan(lm, profile).spending)


def can_condense(session: GenerationSession, end: int) -> bool:
    """True if the context window is large enough to score `end` tokens."""
    from kvcli.methods.policies.compress_prefix import fits_repetition

    return fits_repetition(session.lm.limit, end)


def condense(session: GenerationSession, end: int, most: int) -> Passes[bool]:
    """Compress the first `end` tokens of a sequence to `most` slots per head. False if that is not possible."""
    from kvcli.methods.policies.compress_prefix import compress_prefix

    return compress_prefix(session, end, most)


def span_reuse(session: GenerationSession, profile: Profile) -> SpanReuse | None:
    """Return the spans of other sequences that the current prompt loads; None = spans are not reused."""
    if not profile.reuse.describe_reused:
        return None
    from kvcli.methods.reuse.span_reuse import SpanReuse

    return session.find(SpanReuse)


def view(lm: LM, kv: KVCache, drafter: Drafter) -> CompactView | None:
    """Return the cache view of the drafter's lookahead rows; None = the whole cache, or no lookahead."""
    if (glance := drafter.view) is None:
        return None
    return compact_view(lm, kv, method_class(registries()["view"][glance.method])(**glance.settings), glance.every)


def compact_view(lm: LM, kv: KVCache, policy: PerLayerPolicy, every: int) -> CompactView:
    """Return a cache view: a dense copy of the slots of `kv` that `policy` keeps, selected again per `every` tokens."""
    from kvcli.engine.policy.policy import LayerContext
    from kvcli.kv.views.view import CompactView

    def pick(layer: int, q: Tensor, s: Slots, last: Selection) -> Tensor:
        now = int(s.pos.amax()) + 1  # the rows follow all stored slots
        recorded = q, s.pos.new_full((q.shape[1],), now).long()
        nothing = s.pos[0, :0], s.pos < s.pos  # no kinds, no protected slots
        return policy.mask(s, LayerContext.of(lm, layer, "answering", now, now, recorded, *nothing, last))

    return CompactView(kv, pick, every, lm.shapes, policy.reads_queries)


def sampler(lm: LM, profile: Profile) -> Sampler:
    """Return the sampler of the profile, with the model's own generation settings where the profile has none."""
    from kvcli.engine.sequence.sampler import Sampler

    chosen, found = profile.sample, dict[str, Any]()
    for key in {field.name for field in fields(Sampler)} & set(vars(chosen)):
        value = getattr(chosen, key)
        found[key] = lm.generation.get(key) if value is None else value
    # texts TOKEN+N or TOKEN-N; the last of a token counts
    bias = dict(re.split(r"(?=[+-])", text) for text in texts_of(chosen.logit_bias))
    if outside := [token for token in bias if int(token) >= lm.vocab]:
        raise BadConfig(
            f"sample.logit_bias has token {outside[0]}; the vocabulary of this model has {lm.vocab:,} tokens",
            code="unknown_token",
            try_=[f"sample.logit_bias without {outside[0]}"],
        )
    found["logit_bias"] = tuple((int(token), float(number)) for token, number in bias.items())
    made = Sampler(**{key: value for key, value in found.items() if value is not None})
    breakers = tuple(texts_of(chosen.dry_sequence_breakers))
    return replace(made, dry_breakers=lm.tokens_with(breakers)) if made.dry_multiplier else made


def idle_samplers(lm: LM, profile: Profile) -> list[str]:
    """Return notes on settings of `[sample]`, typed for this run or request, that have no effect beside the others."""
    typed = [keys[1] for keys, one in profile.settings.items() if keys[0] == "sample" and one.origin.level == "typed"]
    idle = sampler(lm, profile).idle
    return [f"sample.{key} has no effect while sample.{idle[key]} is 0" for key in typed if key in idle]
