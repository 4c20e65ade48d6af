"""Conflicts between settings, keys without effect, and settings that a device does not support."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvcli.settings.profile import ALTERED, EFFECTS, KV_OF_ALL, LOSSY, SMALLER, WORDS, Conflict, Needs, Profile
from kvcli.settings.schema import METHOD_TABLES, stepped

PROMISES = ("exact", "certified", "approx")  # values of `exactness`, the strictest first


def clashes(profile: Profile) -> list[Conflict]:
    """Conflicts between settings of a profile."""
    return [conflict for rule in RULES for conflict in rule(profile)]


def promise_clashes(profile: Profile) -> Iterator[Conflict]:
    """Conflicts of `exactness` with settings of cache, policy and prefill that change the text more than it allows."""
    promised, kv = profile.exactness, profile.kv
    if promised == "approx":
        return
    could = '; with spec.method = "self" it only drafts, and the full KV cache verifies'
    could = could if promised == "exact" and not profile.spec.checks else ""
    lossy = LOSSY - SMALLER if profile.is_checked else LOSSY
    if PROMISES.index(promised) >= PROMISES.index(profile.sparse.exactness_label):
        lossy -= {"selects"}
    breaks = {
        key: f"which {WORDS[effect]}" + could * (effect in SMALLER)
        for effect, keys in profile.effects.items()
        if effect in lossy
        for key in keys
    }
    if kv.dtype not in ("auto", profile.load.dtype):
        breaks["kv.dtype"] = "which may round keys and values"
    if any(map(_packs_more, profile.memory.fallbacks)) and not profile.is_checked:
        breaks["memory.fallbacks"] = "which rounds keys and values"
    for key, because in breaks.items():
        yield Conflict("exactness", key, f'"{promised}" is impossible', because)


def need_clashes(profile: Profile) -> Iterator[Conflict]:
    """Conflicts of the needs of methods with the effects of other settings."""
    for key, needs in _needs(profile):
        cannot = f"{json.dumps(profile.values[key])} needs {needs.words}"
        for effect in EFFECTS:
            if effect in needs.absent:
                for other in profile.effects.get(effect, ()):
                    yield Conflict(key, other, cannot, f"which {WORDS[effect]}")


def _needs(profile: Profile) -> Iterator[tuple[str, Needs]]:
    """Needs of the methods of a profile, and of settings that no method fills, each with its key."""
    for table, (key, _) in METHOD_TABLES.items():
        needs = getattr(getattr(profile, table).settings, "needs", None)
        if needs is not None:
            yield f"{table}.{needs.key or key}", needs
    if "condenses" in profile.effects:
        yield "context.on_overflow", Needs(ALTERED | {"degrades"}, KV_OF_ALL)
    if profile.is_checked:  # the compressed cache and the full one have separate budgets; neither may change
        yield "exactness", Needs(frozenset({"demotes", "degrades"}), "a full KV cache that verifies drafts")


def order_clashes(profile: Profile) -> Iterator[Conflict]:
    """Conflicts of `prefill.order`: a policy scores after each chunk, so it needs chunks; a pruner needs layers. And of
    revived tokens: some passes must be free of drafts. A segment of `[sparse]` is a pass over all layers."""
    key, order, prunes = "prefill.order", profile.prefill.order, "prunes" in profile.effects
    chunk, segment, cut = profile.prefill.chunk, profile.sparse.segment, "a pass has too few tokens"
    if segment > chunk:
        yield Conflict("prefill.chunk", "sparse.segment", cut, f"which needs {segment}")
    for step in (step for step in profile.memory.fallbacks if step.startswith("prefill.chunk")):
        before, chunk = chunk, stepped(chunk, step.partition("=")[2])
        if chunk < segment <= before:
            yield Conflict("memory.fallbacks", "sparse.segment", f'after "{step}" {cut}', f"which needs {segment}")
    if order == "layers" and segment:
        yield Conflict(key, "sparse.segment", '"layers" is impossible', "which selects after each chunk")
    if order == "chunks" and prunes:
        yield Conflict(key, "prune.method", '"chunks" is impossible', "which scores the whole prompt between layers")
    elif order == "layers" and "evicts" in profile.effects and not prunes:
        yield Conflict(key, "policy.name", '"layers" is impossible', "which scores at the end of each chunk")
    elif profile.prune.compression_interval == 1 and "drafts" in profile.effects:
        yield Conflict("spec.method", "prune.revive_interval", "each pass revives, none drafts", "which is 1")


def memory_clashes(profile: Profile) -> Iterator[Conflict]:
    """Conflicts of `[kv]` and `[memory]`: fallback steps must have an effect."""
    memory = profile.memory
    bits = {f"kv.{key}": getattr(profile.kv, key) for key in ("k_bits", "v_bits")}
    set_by = dict.fromkeys(bits, "")  # an earlier step, or the profile
    below = any(step.startswith(("memory.host", "memory.disk=")) for step in memory.fallbacks)
    if memory.host_access != "auto" and not (below or "offloads" in profile.effects):
        because = f"which is {memory.host}, so host memory holds no KV"
        yield Conflict("memory.host_access", "memory.host", f'"{memory.host_access}" has no effect', because)
    for step in memory.fallbacks:
        key, _, value = step.partition("=")
        frees_nothing = f'"{step}" frees nothing'
        if key == "kv.residual" and min(bits.values()) == 16 and not profile.kv_format.is_active(profile.kv):
            yield Conflict("memory.fallbacks", "kv.k_bits", frees_nothing, "so the step quantizes nothing")
        if key in bits and int(value) >= bits[key]:
            there, n = ("memory.fallbacks" if set_by[key] else key), bits[key]
            because = f'whose step "{set_by[key]}" comes before it' if set_by[key] else f"which is {n} already"
            yield Conflict("memory.fallbacks", there, frees_nothing, because)
        elif key in bits:
            bits[key], set_by[key] = int(value), step
    if memory.fallbacks and memory.on_oom == "fail":
        yield Conflict("memory.fallbacks", "memory.on_oom", "no step is ever taken", 'which is "fail"')


def form_clashes(profile: Profile) -> Iterator[Conflict]:
    """Conflicts of `[kv_format]` with unsupported keys of `[kv]`, and with policies whose heads evict apart."""
    form, key, values = profile.kv_format, "kv_format.method", profile.values
    if form.rope == "before" and not _packs(profile):
        idle = '"before" has no effect while kv.k_bits and kv.v_bits are 16'
        yield Conflict("kv_format.rope", "kv.k_bits", idle, "so nothing is quantized")
        return
    if unsupported := form.unsupported_keys(profile.kv):
        for other, because in unsupported.items():
            yield Conflict(
                key, other, f'"{form.method}" is impossible with {other} = {json.dumps(values[other])}', because
            )
        return
    for step in filter(_packs_more, profile.memory.fallbacks):
        bits, _, value = step.partition("=")
        packed: dict[str, Any] = {bits.removeprefix("kv."): int(value)}
        refused = form.unsupported_keys(replace(profile.kv, **packed))
        if bits in refused:
            yield Conflict("memory.fallbacks", key, f'"{step}" frees nothing', f'which is "{form.method}"')
            return
        for other, because in refused.items():
            cannot = f'"{step}" cannot be taken with {other} = {values[other]}'
            yield Conflict("memory.fallbacks", other, cannot, because)
        if refused:
            return


def demotion_clashes(profile: Profile) -> Iterator[Conflict]:
    """Conflicts of `memory.evicted`: demotion needs a policy that evicts, a lower tier, and a known capacity."""
    memory, packs, key = profile.memory, profile.kv_format.is_active(profile.kv), "memory.evicted"
    if not memory.demotes:
        return
    away, caps = (list(profile.effects.get(name, ())) for name in ("offloads", "caps"))
    if "evicts" not in profile.effects:
        yield Conflict(key, "policy.name", '"demote" moves nothing', "which evicts nothing")
    if not (packs or away or "selects" in profile.effects):
        because = 'so nothing reads moved tokens: set sparse.method = "sketch", kv.v_bits = 8 or memory.disk = "8GiB"'
        yield Conflict(key, "sparse.method", '"demote" has no tier to move to', because)
    budgets = caps + (away if packs else [])
    if (packs or not away) and budgets:
        because = "and kept and evicted tokens cannot share one device budget: leave it out"
        yield Conflict(key, budgets[0], '"demote" is impossible', because)
    for step in filter(_changes_cache, memory.fallbacks):
        because = 'which is "demote": evicted tokens would mix with others in lower tiers'
        yield Conflict("memory.fallbacks", key, f'"{step}" cannot be taken', because)


def budget_clashes(profile: Profile) -> Iterator[Conflict]:
    """Conflicts of `memory.budget` and `memory.max_loss`: one policy spends them, on its levels, in one cache."""
    memory, key, spends = profile.memory, "memory.budget", profile.policy.method == "budget"
    bits = json.dumps(list(memory.bits))
    if memory.sequences > 1 and memory.budget != "fit":
        because = f'which is "{memory.budget}": only "fit" is divided'
        yield Conflict("memory.sequences", key, f"{memory.sequences} has no effect", because)
        return
    if not memory.spends:
        because = 'which is "": set memory.budget to "6GiB", "25%" or "fit", or memory.max_loss to 0.02'
        if spends:
            yield Conflict("policy.name", key, '"budget" has nothing to spend', because)
        if memory.bits != type(memory)().bits:
            yield Conflict("memory.bits", key, f"{bits} has no effect", because)
        return
    asked = json.dumps(memory.budget)
    if not memory.budget:
        key, asked = "memory.max_loss", f"{memory.max_loss}"
    away = profile.effects.get("offloads", ())
    packed = next((name for name in profile.effects.get("quantizes", ()) if name.startswith("kv.")), "")
    step = next(filter(_changes_cache, memory.fallbacks), "")
    is_other = profile.kv_format.method != METHOD_TABLES["kv_format"][1] or profile.kv_format.rope == "before"
    is_whole_first = profile.prefill.order == "layers" and memory.budget[-1:] not in ("", "%")
    is_unread = {"selects", "skims"} & profile.effects.keys() and not away
    by_age = "which quantizes by age: leave it out, and set memory.bits = [4] for 4 bits alone"
    two_tiers = "beside memory.disk: tokens beyond the budget go to one tier, so leave one out"
    others = [
        (not spends, "policy.name", 'which spends no bytes: set policy.name = "budget"'),
        (bool(packed), packed, by_age),
        (len(away) == 2, "memory.host", two_tiers),
        (is_other, "kv_format.method", "whose bytes a budget does not count: leave [kv_format] out"),
        (memory.device != "auto", "memory.device", "which is a second limit of one device: leave it out"),
        (is_unread, "sparse.method", 'which has no lower tier to read: set memory.disk = "8GiB"'),
        (profile.is_checked, "exactness", 'which is "exact": a full KV cache takes more than a budget'),
        (bool(step), "memory.fallbacks", f'whose step "{step}" changes what the budget assigned: leave it out'),
        (is_whole_first, "prefill.order", "which needs the full KV cache first: leave it out, or give a share"),
    ]
    for is_set, other, because in others:
        if is_set:
            yield Conflict(key, other, f"{asked} is impossible", because)
    if not memory.bits or list(memory.bits) != sorted(set(memory.bits), reverse=True):
        because = "which is spent from more bits to fewer"
        yield Conflict("memory.bits", key, f"{bits} are not in falling order", because)


def cautions(profile: Profile, device: str) -> list[str]:
    """Notes on settings that have no effect on a device of this type, one line each."""
    if profile.memory.host == "auto" and device != "cuda":
        return ["memory.host = auto has no effect: without a GPU the KV cache is in host memory already"]
    return []


def idle_keys(profile: Profile) -> Iterator[Conflict]:
    """Unused keys of `[kv]` for quantizing or moving KV, in a profile that never quantizes or moves any."""
    kv, memory = profile.kv, profile.memory
    packs = _packs(profile) or memory.spends
    # the budget of `memory.device` counts the KV in the top tier
    moves = {"offloads", "caps"} & profile.effects.keys() or any(s.startswith("memory.") for s in memory.fallbacks)
    bits, sizes = "kv.k_bits and kv.v_bits are 16", "[memory] has no budget"
    packing = (packs, "kv.k_bits", bits, "so nothing is quantized")
    moving = (bool(packs or moves), "kv.k_bits", f"{bits} and {sizes}", "so nothing is quantized or moved")
    acts = {"rotate": packing, "residual": packing, "group": moving, "sinks": moving}
    if memory.demotes:
        chosen = "memory.evicted", 'memory.evicted is "demote"', "so the policy says what moves"
        acts |= {"residual": (False, *chosen), "sinks": (bool(moves), *chosen)}
    if memory.spends:
        chosen = "policy.name", 'policy.name is "budget"', "so the policy says what moves"
        acts |= {"residual": (False, *chosen), "sinks": (False, *chosen)}
    other = "kv.k_bits" if kv.k_bits != 8 else "kv.v_bits"
    acts["split_codes"] = (kv.k_bits == kv.v_bits == 8, other, "not both are 8", "so no code can be split")
    for key, (does, other, vain, because) in acts.items():
        value = getattr(kv, key)
        if not does and value != getattr(type(kv)(), key):
            yield Conflict(f"kv.{key}", other, f"{json.dumps(value)} has no effect while {vain}", because)


def unread_keys(profile: Profile) -> Iterator[Conflict]:
    """Keys of `[spec]` that its method ignores because of other keys, if their value was changed. Keys of shipped
    profiles are not reported, because other settings may be laid over such a profile."""
    spec = profile.spec
    for key, other in spec.ignored_keys().items():
        setting, value = profile.settings.get(("spec", key)), getattr(spec, key)
        if setting is not None and setting.origin.level != "built-in" and value != getattr(type(spec.settings), key):
            why = f"{json.dumps(value)} has no effect while spec.{other} is {json.dumps(getattr(spec, other))}"
            yield Conflict(f"spec.{key}", f"spec.{other}", why, "so nothing reads it: leave it out")


RULES: Sequence[Callable[[Profile], Iterator[Conflict]]] = (
    promise_clashes,
    memory_clashes,
    form_clashes,
    demotion_clashes,
    budget_clashes,
    idle_keys,
    unread_keys,
    order_clashes,
    need_clashes,
)


def _packs(profile: Profile) -> bool:
    """True if KV is quantized, now or by a fallback step."""
    return bool(profile.kv_format.is_active(profile.kv)) or any(map(_packs_more, profile.memory.fallbacks))


def _packs_more(step: str) -> bool:
    """True if this step of `memory.fallbacks` quantizes keys or values."""
    return step.startswith(("kv.k_bits", "kv.v_bits"))


def _changes_cache(step: str) -> bool:
    """True if this step of `memory.fallbacks` changes where or how the KV cache is stored."""
    return step.startswith(("kv.", "memory."))
