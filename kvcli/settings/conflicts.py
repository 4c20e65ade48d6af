"""Conflicts between settings, keys without effect, and settings that a device does not support."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvcli.settings.profile import EFFECTS, KV_OF_ALL, LOSSY, NOT_WHOLE, SMALLER, WORDS, Conflict, Needs
from kvcli.settings.schema import METHOD_TABLES

if TYPE_CHECKING:
    from kvcli.settings.profile import Profile

PROMISES = ("exact", "certified", "approx")  # values of `exactness`, the strictest first


def clashes(profile: Profile) -> list[Conflict]:
    """Conflicts between settings of a profile."""
    found = promise_clashes(profile)
    found += memory_clashes(profile)
    found += form_clashes(profile)
    found += demotion_clashes(profile)
    found += budget_clashes(profile)
    found += idle_keys(profile)
    found += unread_keys(profile)
    found += order_clashes(profile)
    found += need_clashes(profile)
    return found


def promise_clashes(profile: Profile) -> list[Conflict]:
    """Conflicts of `exactness` with settings of cache, policy and prefill that change the text more than it allows."""
    promised, kv = profile.exactness, profile.kv
    if promised == "approx":
        return []
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
    return [Conflict("exactness", key, f'"{promised}" is impossible', because) for key, because in breaks.items()]


def need_clashes(profile: Profile) -> list[Conflict]:
    """Conflicts of the needs of methods with the effects of other settings."""
    return [
        Conflict(key, other, f"{json.dumps(profile.values[key])} needs {needs.words}", f"which {WORDS[effect]}")
        for key, needs in _needs(profile)
        for effect in EFFECTS
        if effect in needs.absent
        for other in profile.effects.get(effect, ())
    ]


def _needs(profile: Profile) -> list[tuple[str, Needs]]:
    """Needs of the methods of a profile, and of settings that no method fills, each with its key."""
    of = {table: (key, getattr(profile, table).settings) for table, (key, _) in METHOD_TABLES.items()}
    found = [
        (f"{table}.{needs.key or key}", needs)
        for table, (key, method) in of.items()
        if (needs := getattr(method, "needs", None)) is not None
    ]
    if "condenses" in profile.effects:
        found.append(("context.on_overflow", Needs(NOT_WHOLE | {"degrades", "prunes", "reuses"}, KV_OF_ALL)))
    if profile.is_checked:  # the compressed cache and the full one have separate budgets; neither may change
        found.append(("exactness", Needs(frozenset({"demotes", "degrades"}), "a full KV cache that verifies drafts")))
    return found


def order_clashes(profile: Profile) -> list[Conflict]:
    """Conflicts of `prefill.order`: a policy scores after each chunk, so it needs chunks; a pruner needs layers. And of
    revived tokens: some passes must be free of drafts."""
    key, order, prunes = "prefill.order", profile.prefill.order, bool(profile.prune.describe_read)
    if order == "chunks" and prunes:
        return [Conflict(key, "prune.method", '"chunks" is impossible', "which scores the whole prompt between layers")]
    if order == "layers" and "evicts" in profile.effects and not prunes:
        return [Conflict(key, "policy.name", '"layers" is impossible', "which scores at the end of each chunk")]
    if profile.prune.compression_interval == 1 and "drafts" in profile.effects:
        return [Conflict("spec.method", "prune.revive_interval", "each pass revives, none drafts", "which is 1")]
    return []


def memory_clashes(profile: Profile) -> list[Conflict]:
    """Conflicts of `[kv]` and `[memory]`: fallback steps must have an effect."""
    found, memory = list[Conflict](), profile.memory
    bits = {f"kv.{key}": getattr(profile.kv, key) for key in ("k_bits", "v_bits")}
    set_by = dict.fromkeys(bits, "")  # an earlier step, or the profile
    below = any(step.startswith(("memory.host", "memory.disk=")) for step in memory.fallbacks)
    if memory.host_access != "auto" and not (below or "offloads" in profile.effects):
        because = f"which is {memory.host}, so host memory holds no KV"
        found.append(Conflict("memory.host_access", "memory.host", f'"{memory.host_access}" has no effect', because))
    for step in memory.fallbacks:
        key, _, value = step.partition("=")
        frees_nothing = f'"{step}" frees nothing'
        if key == "kv.residual" and min(bits.values()) == 16 and not profile.kv_format.is_active(profile.kv):
            found.append(Conflict("memory.fallbacks", "kv.k_bits", frees_nothing, "so the step quantizes nothing"))
        if key in bits and int(value) >= bits[key]:
            there, n = ("memory.fallbacks" if set_by[key] else key), bits[key]
            because = f'whose step "{set_by[key]}" comes before it' if set_by[key] else f"which is {n} already"
            found.append(Conflict("memory.fallbacks", there, frees_nothing, because))
        elif key in bits:
            bits[key], set_by[key] = int(value), step
    if memory.fallbacks and memory.on_oom == "fail":
        found.append(Conflict("memory.fallbacks", "memory.on_oom", "no step is ever taken", 'which is "fail"'))
    return found


def form_clashes(profile: Profile) -> list[Conflict]:
    """Conflicts of `[kv_format]` with unsupported keys of `[kv]`, and with policies whose heads evict apart."""
    form, key = profile.kv_format, "kv_format.method"
    cannot = f'"{form.method}" is impossible'
    if form.rope == "before" and not _packs(profile):
        idle = '"before" has no effect while kv.k_bits and kv.v_bits are 16'
        return [Conflict("kv_format.rope", "kv.k_bits", idle, "so nothing is quantized")]
    values = profile.values
    found = [
        Conflict(key, other, f"{cannot} with {other} = {json.dumps(values[other])}", because)
        for other, because in form.unsupported_keys(profile.kv).items()
    ]
    for step in profile.memory.fallbacks:
        bits, _, value = step.partition("=")
        if _packs_more(step) and not found:
            packed: dict[str, Any] = {bits.removeprefix("kv."): int(value)}
            refused = form.unsupported_keys(replace(profile.kv, **packed))
            if bits in refused:
                found.append(Conflict("memory.fallbacks", key, f'"{step}" frees nothing', f'which is "{form.method}"'))
            else:
                found += [
                    Conflict(
                        "memory.fallbacks", other, f'"{step}" cannot be taken with {other} = {values[other]}', because
                    )
                    for other, because in refused.items()
                ]
    return found


def demotion_clashes(profile: Profile) -> list[Conflict]:
    """Conflicts of `memory.evicted`: demotion needs a policy that evicts, a lower tier, and a known capacity."""
    memory, packs, key = profile.memory, profile.kv_format.is_active(profile.kv), "memory.evicted"
    if not memory.demotes:
        return []
    away, caps = (list(profile.effects.get(name, ())) for name in ("offloads", "caps"))
    found = []
    if "evicts" not in profile.effects:
        found.append(Conflict(key, "policy.name", '"demote" moves nothing', "which evicts nothing"))
    if not (packs or away or profile.sparse.describe_read):
        because = 'so nothing reads moved tokens: set sparse.method = "sketch", kv.v_bits = 8 or memory.disk = "8GiB"'
        found.append(Conflict(key, "sparse.method", '"demote" has no tier to move to', because))
    budgets = caps + (away if packs else [])
    if (packs or not away) and budgets:
        because = "and kept and evicted tokens cannot share one device budget: leave it out"
        found.append(Conflict(key, budgets[0], '"demote" is impossible', because))
    for step in memory.fallbacks:
        if step.startswith(("kv.", "memory.")):
            because = 'which is "demote": evicted tokens would mix with others in lower tiers'
            found.append(Conflict("memory.fallbacks", key, f'"{step}" cannot be taken', because))
    return found


def budget_clashes(profile: Profile) -> list[Conflict]:
    """Conflicts of `memory.budget` and `memory.max_loss`: one policy spends them, on its levels, in one cache."""
    memory, key, spends = profile.memory, "memory.budget", profile.policy.method == "budget"
    bits, fresh = json.dumps(list(memory.bits)), type(memory)().bits
    if memory.sequences > 1 and memory.budget != "fit":
        because = f'which is "{memory.budget}": only "fit" is divided'
        return [Conflict("memory.sequences", key, f"{memory.sequences} has no effect", because)]
    if not memory.spends:
        because = 'which is "": set memory.budget to "6GiB", "25%" or "fit", or memory.max_loss to 0.02'
        found = [Conflict("policy.name", key, '"budget" has nothing to spend', because)] if spends else []
        return found + (
            [Conflict("memory.bits", key, f"{bits} has no effect", because)] if memory.bits != fresh else []
        )
    asked = json.dumps(memory.budget)
    if not memory.budget:
        key, asked = "memory.max_loss", f"{memory.max_loss}"
    away = profile.effects.get("offloads", ())
    packs = [name for name in profile.effects.get("quantizes", ()) if name.startswith("kv.")]
    steps = [step for step in memory.fallbacks if step.startswith(("kv.", "memory."))]
    is_other = profile.kv_format.method != METHOD_TABLES["kv_format"][1] or profile.kv_format.rope == "before"
    is_whole_first = profile.prefill.order == "layers" and memory.budget[-1:] not in ("", "%")
    others = {
        "policy.name": "" if spends else 'which spends no bytes: set policy.name = "budget"',
        packs[0] if packs else "": "which quantizes by age: leave it out, and set memory.bits = [4] for 4 bits alone",
        "memory.host": "beside memory.disk: tokens beyond the budget go to one tier, so leave one out"
        if len(away) == 2
        else "",
        "kv_format.method": "whose bytes a budget does not count: leave [kv_format] out" if is_other else "",
        "memory.device": "which is a second limit of one device: leave it out" if memory.device != "auto" else "",
        "sparse.method": 'which has no lower tier to read: set memory.disk = "8GiB"'
        if "selects" in profile.effects and not away
        else "",
        "exactness": 'which is "exact": a full KV cache takes more than a budget' if profile.is_checked else "",
        "memory.fallbacks": f'whose step "{steps[0]}" changes what the budget assigned: leave it out' if steps else "",
        "prefill.order": "which needs the full KV cache first: leave it out, or give a share" if is_whole_first else "",
    }
    cannot = f"{asked} is impossible"
    found = [Conflict(key, other, cannot, because) for other, because in others.items() if other and because]
    if not memory.bits or list(memory.bits) != sorted(set(memory.bits), reverse=True):
        found.append(
            Conflict("memory.bits", key, f"{bits} are not in falling order", "which is spent from more bits to fewer")
        )
    return found


def cautions(profile: Profile, device: str) -> list[str]:
    """Notes on settings that have no effect on a device of this type, one line each."""
    found = []
    if profile.memory.host == "auto" and device != "cuda":
        found.append("memory.host = auto has no effect: without a GPU the KV cache is in host memory already")
    return found


def idle_keys(profile: Profile) -> list[Conflict]:
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
    eight = kv.k_bits == kv.v_bits == 8
    acts["split_codes"] = (
        eight,
        "kv.k_bits" if kv.k_bits != 8 else "kv.v_bits",
        "not both are 8",
        "so no code can be split",
    )
    plain = type(kv)()
    return [
        Conflict(f"kv.{key}", other, f"{json.dumps(getattr(kv, key))} has no effect while {vain}", because)
        for key, (does, other, vain, because) in acts.items()
        if not does and getattr(kv, key) != getattr(plain, key)
    ]


def unread_keys(profile: Profile) -> list[Conflict]:
    """Keys of `[spec]` that its method ignores because of other keys, if their value was changed. Keys of shipped
    profiles are not reported, because other settings may be laid over such a profile."""
    spec = profile.spec
    found = []
    for key, other in spec.ignored_keys().items():
        setting, value = profile.settings.get(("spec", key)), getattr(spec, key)
        if setting is not None and setting.origin.level != "built-in" and value != getattr(type(spec.settings), key):
            why = f"{json.dumps(value)} has no effect while spec.{other} is {json.dumps(getattr(spec, other))}"
            found.append(Conflict(f"spec.{key}", f"spec.{other}", why, "so nothing reads it: leave it out"))
    return found


def _packs(profile: Profile) -> bool:
    """True if KV is quantized, now or by a fallback step."""
    return bool(profile.kv_format.is_active(profile.kv)) or any(map(_packs_more, profile.memory.fallbacks))


def _packs_more(step: str) -> bool:
    """True if this step of `memory.fallbacks` quantizes keys or values."""
    return step.startswith(("kv.k_bits", "kv.v_bits"))
