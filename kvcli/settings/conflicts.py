"""Conflicts between settings, keys without effect, and settings that a device does not support."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvcli.settings.profile import Conflict
from kvcli.settings.schema import METHODS, size_of

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
    found += return_clashes(profile)
    found += reuse_clashes(profile)
    found += overflow_clashes(profile)
    found += check_clashes(profile)
    found += step_clashes(profile)
    return found


def promise_clashes(profile: Profile) -> list[Conflict]:
    """Conflicts of `exactness` with settings of cache, policy and prefill that change the text more than it allows."""
    promised, kv, recall, rounds = profile.exactness, profile.kv, profile.sparse, "which rounds keys and values"
    if promised == "approx":
        return []
    could = '; with spec.method = "self" that only guesses, and the whole past writes'
    could = could if promised == "exact" and not profile.spec.checks else ""
    packed = [key for key in ("kv.k_bits", "kv.v_bits") if getattr(kv, key.removeprefix("kv.")) < 16]
    shrinks = {
        **dict.fromkeys(packed or ["kv_format.method"] * bool(profile.kv_format.is_active(kv)), rounds + could),
        "memory.fallbacks": any(map(_packs_more, profile.memory.fallbacks)) and rounds,
        "policy.name": profile.policy.compression_interval is not None and "which forgets part of the text" + could,
        "sparse.method": PROMISES.index(promised) < PROMISES.index(recall.exactness_label)
        and "which reads a part of what is stored" + could,
    }
    breaks = {
        "kv.dtype": kv.dtype not in ("auto", profile.load.dtype) and "which may round keys and values",
        **({} if profile.is_checked else shrinks),
        "prune.method": bool(profile.prune.describe_read) and "which leaves tokens of a prompt behind",
        "reuse.method": bool(profile.reuse.describe_reused) and "which takes over what was read behind another text",
        "context.on_overflow": profile.context.on_overflow == "compress"
        and "which forgets part of a chat that outlives its window",
        "reasoning_steps.method": bool(profile.reasoning_steps.takes) and "which takes steps that another model wrote",
    }
    cannot = f'"{promised}" cannot be kept'
    return [Conflict("exactness", key, cannot, because) for key, because in breaks.items() if because]


def check_clashes(profile: Profile) -> list[Conflict]:
    """Conflicts of a compressed cache that drafts with the full cache that verifies: both use separate budgets, and
    neither may change during an answer."""
    if not profile.is_checked:
        return []
    cannot, found = "cannot be kept where a whole past checks what a smaller one guesses", list[Conflict]()
    if profile.memory.demotes:
        found.append(Conflict("memory.evicted", "exactness", f'"demote" {cannot}', 'which is "exact"'))
    for step in profile.memory.fallbacks:
        if step.startswith(("kv.", "memory.")):
            found.append(Conflict("memory.fallbacks", "exactness", f'"{step}" {cannot}', 'which is "exact"'))
    return found


def step_clashes(profile: Profile) -> list[Conflict]:
    """Conflicts of `[reasoning_steps]` with drafting, query-scoring policies, and reviving pruners."""
    if not profile.reasoning_steps.takes:
        return []
    others = {
        "spec.method": profile.spec.method != "off" and "which drafts token by token what is written by steps",
        "policy.name": profile.policy.compression_interval is not None and "which judges by the rows of each pass",
        "prune.method": bool(profile.prune.describe_read) and "which has tokens of the prompt come back between passes",
    }
    cannot = f'"{profile.reasoning_steps.method}" cannot be kept'
    return [Conflict("reasoning_steps.method", other, cannot, because) for other, because in others.items() if because]


def overflow_clashes(profile: Profile) -> list[Conflict]:
    """Conflicts of a chat whose beginning is compressed: compression needs the full cache, as it was stored."""
    if profile.context.on_overflow != "compress":
        return []
    key, cannot = "context.on_overflow", '"compress" cannot be kept'
    others = {
        **_shapes(profile),
        "prune.method": bool(profile.prune.describe_read),
        "reuse.method": bool(profile.reuse.describe_reused),
    }
    because = "and what is made smaller is a whole past, as it was stored"
    return [Conflict(key, other, cannot, because) for other, is_set in others.items() if is_set]


def _shapes(profile: Profile) -> dict[str, bool]:
    """Settings that store less of a cache, elsewhere or in another format, and whether each is set."""
    kv, memory = profile.kv, profile.memory
    return {
        "policy.name": profile.policy.compression_interval is not None,
        "sparse.method": bool(profile.sparse.describe_read),
        **{f"kv.{key}": getattr(kv, key) < 16 for key in ("k_bits", "v_bits")},
        "kv_format.method": bool(profile.kv_format.is_active(kv)) and min(kv.k_bits, kv.v_bits) == 16,
        "memory.device": memory.device != "auto",
        **{f"memory.{key}": _is_there(getattr(memory, key)) for key in ("host", "disk")},
        "memory.fallbacks": any(not step.startswith(("prefill", "context")) for step in memory.fallbacks),
    }


def return_clashes(profile: Profile) -> list[Conflict]:
    """Conflicts of revived tokens: each must attend to all older tokens, and some passes must be free of drafts."""
    prune, found = profile.prune, list[Conflict]()
    if prune.compression_interval is None:
        return []
    cannot, because = '"prefill+decode" cannot be kept', "and who comes back reads all that is older, as it was stored"
    found += [Conflict("prune.scope", other, cannot, because) for other, is_set in _shapes(profile).items() if is_set]
    if prune.compression_interval == 1 and profile.spec.method != "off":
        found.append(Conflict("spec.method", "prune.revive_interval", "no pass has room for a guess", "which is 1"))
    return found


def order_clashes(profile: Profile) -> list[Conflict]:
    """Conflicts of `prefill.order`: a policy scores after each chunk, so it needs chunks; a pruner needs layers."""
    key, order, prunes = "prefill.order", profile.prefill.order, bool(profile.prune.describe_read)
    if order == "chunks" and prunes:
        return [Conflict(key, "prune.method", '"chunks" cannot be kept', "which judges a whole prompt between layers")]
    if order == "layers" and profile.policy.compression_interval is not None and not prunes:
        return [Conflict(key, "policy.name", '"layers" cannot be kept', "which judges at the end of each chunk")]
    return []


def reuse_clashes(profile: Profile) -> list[Conflict]:
    """Conflicts of `[reuse]` with eviction, pruning and sparse attention: it needs a full cache of all tokens."""
    if not profile.reuse.describe_reused:
        return []
    cannot, others = (
        "nothing can be taken over",
        {
            "policy.name": profile.policy.compression_interval is not None and "which lets tokens go",
            "prune.method": profile.prune.describe_read and "which leaves tokens behind",
            "sparse.method": profile.sparse.selection_interval is not None and "whose index is made of what is read",
        },
    )
    return [Conflict("reuse.method", key, cannot, because) for key, because in others.items() if because]


def memory_clashes(profile: Profile) -> list[Conflict]:
    """Conflicts of `[kv]` and `[memory]`: fallback steps must have an effect."""
    found, memory = list[Conflict](), profile.memory
    bits = {f"kv.{key}": getattr(profile.kv, key) for key in ("k_bits", "v_bits")}
    set_by = dict.fromkeys(bits, "")  # an earlier step, or the profile
    below = any(step.startswith(("memory.host", "memory.disk=")) for step in memory.fallbacks)
    if memory.host_access != "auto" and not (below or _is_there(memory.host) or _is_there(memory.disk)):
        because = f"which is {memory.host}, so there is nothing to reach"
        found.append(Conflict("memory.host_access", "memory.host", f'"{memory.host_access}" changes nothing', because))
    for step in memory.fallbacks:
        key, _, value = step.partition("=")
        frees_nothing = f'"{step}" frees nothing'
        if key == "kv.residual" and min(bits.values()) == 16 and not profile.kv_format.is_active(profile.kv):
            found.append(
                Conflict("memory.fallbacks", "kv.k_bits", frees_nothing, "so nothing is packed when it is taken")
            )
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
    cannot = f'"{form.method}" cannot be kept'
    if form.rope == "before" and not _packs(profile):
        idle = '"before" changes nothing while kv.k_bits and kv.v_bits are 16'
        return [Conflict("kv_format.rope", "kv.k_bits", idle, "so nothing is packed")]
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
    if form.is_joint and profile.policy.compression_interval is not None:
        because = "whose heads let go of different tokens, and heads are written together: set kv_format.joint = 1"
        found.append(Conflict(key, "policy.name", cannot, because))
    return found


def demotion_clashes(profile: Profile) -> list[Conflict]:
    """Conflicts of `memory.evicted`: demotion needs a policy that evicts, a lower tier, and a known capacity."""
    memory, packs, key = profile.memory, profile.kv_format.is_active(profile.kv), "memory.evicted"
    if not memory.demotes:
        return []
    away = [f"memory.{name}" for name in ("host", "disk") if _is_there(getattr(memory, name))]
    found = []
    if profile.policy.compression_interval is None:
        found.append(Conflict(key, "policy.name", '"demote" moves nothing', "which lets nothing go"))
    if not (packs or away or profile.sparse.describe_read):
        because = 'so nothing is read otherwise: set sparse.method = "sketch", kv.v_bits = 8 or memory.disk = "8GiB"'
        found.append(Conflict(key, "sparse.method", '"demote" has no tier to move to', because))
    budgets = (["memory.device"] if memory.device != "auto" else []) + (away if packs else [])
    if (packs or not away) and budgets:
        because = "and what a policy keeps and lets go of share one device, which is not divided: leave it out"
        found.append(Conflict(key, budgets[0], '"demote" cannot be kept', because))
    for step in memory.fallbacks:
        if step.startswith(("kv.", "memory.")):
            because = 'which is "demote": what was let go cannot be told from the rest in other tiers'
            found.append(Conflict("memory.fallbacks", key, f'"{step}" cannot be taken', because))
    return found


def budget_clashes(profile: Profile) -> list[Conflict]:
    """Conflicts of `memory.budget` and `memory.max_loss`: one policy spends them, on its levels, in one cache."""
    memory, key, spends = profile.memory, "memory.budget", profile.policy.method == "budget"
    bits, fresh = json.dumps(list(memory.bits)), type(memory)().bits
    if memory.sequences > 1 and memory.budget != "fit":
        because = f'which is "{memory.budget}": only "fit" is divided'
        return [Conflict("memory.sequences", key, f"{memory.sequences} changes nothing", because)]
    if not memory.spends:
        because = 'which is "": set memory.budget to "6GiB", "25%" or "fit", or memory.max_loss to 0.02'
        found = [Conflict("policy.name", key, '"budget" has nothing to spend', because)] if spends else []
        return found + (
            [Conflict("memory.bits", key, f"{bits} changes nothing", because)] if memory.bits != fresh else []
        )
    asked = json.dumps(memory.budget)
    if not memory.budget:
        key, asked = "memory.max_loss", f"{memory.max_loss}"
    is_away = _is_there(memory.host) or _is_there(memory.disk)
    packs = [f"kv.{name}" for name in ("k_bits", "v_bits") if getattr(profile.kv, name) < 16]
    steps = [step for step in memory.fallbacks if step.startswith(("kv.", "memory."))]
    is_other = profile.kv_format.method != METHODS["kv_format"][1] or profile.kv_format.rope == "before"
    is_whole_first = profile.prefill.order == "layers" and memory.budget[-1:] not in ("", "%")
    others = {
        "policy.name": "" if spends else 'which spends no bytes: set policy.name = "budget"',
        packs[0] if packs else "": "which rounds by age: leave it out, and set memory.bits = [4] for four bits alone",
        "memory.host": "beside memory.disk: what there is no room for goes to one place, so leave one out"
        if _is_there(memory.host) and _is_there(memory.disk)
        else "",
        "kv_format.method": "whose bytes a budget does not count: leave [kv_format] out" if is_other else "",
        "memory.device": "which is a second size of one place: leave it out" if memory.device != "auto" else "",
        "sparse.method": 'which finds nothing further away: set memory.disk = "8GiB"'
        if profile.sparse.describe_read and not is_away
        else "",
        "exactness": 'which is "exact": a whole past takes more than a budget' if profile.is_checked else "",
        "memory.fallbacks": f'whose step "{steps[0]}" moves what the budget placed: leave it out' if steps else "",
        "prefill.order": "which places nothing before all is stored: leave it out, or give a share"
        if is_whole_first
        else "",
    }
    cannot = f"{asked} cannot be kept"
    found = [Conflict(key, other, cannot, because) for other, because in others.items() if other and because]
    if not memory.bits or list(memory.bits) != sorted(set(memory.bits), reverse=True):
        found.append(
            Conflict("memory.bits", key, f"{bits} are no falling rungs", "which is spent from rung to rung: [8, 4, 2]")
        )
    return found


def cautions(profile: Profile, device: str) -> list[str]:
    """Notes on settings that have no effect on a device of this type, one line each."""
    found = []
    if profile.memory.host == "auto" and device != "cuda":
        found.append("memory.host = auto holds nothing here: without a GPU keys and values are in host memory already")
    return found


def idle_keys(profile: Profile) -> list[Conflict]:
    """Unused keys of `[kv]` for quantizing or moving KV, in a profile that never quantizes or moves any."""
    kv, memory = profile.kv, profile.memory
    packs = _packs(profile) or memory.spends
    moves = _is_there(memory.host) or _is_there(memory.disk)
    moves = moves or any(step.startswith("memory.") for step in memory.fallbacks)
    moves = moves or memory.device != "auto"  # its budget counts the KV in the top tier
    bits, sizes = "kv.k_bits and kv.v_bits are 16", "[memory] has no budget"
    packing = (packs, "kv.k_bits", bits, "so nothing is packed")
    moving = (packs or moves, "kv.k_bits", f"{bits} and {sizes}", "so nothing is packed, and nothing moves")
    acts = {"rotate": packing, "residual": packing, "group": moving, "sinks": moving}
    if memory.demotes:
        chosen = "memory.evicted", 'memory.evicted is "demote"', "so the policy says what moves"
        acts |= {"residual": (False, *chosen), "sinks": (moves, *chosen)}
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
        Conflict(f"kv.{key}", other, f"{json.dumps(getattr(kv, key))} changes nothing while {vain}", because)
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
        if setting is not None and not setting.is_shipped and value != getattr(type(spec.settings), key):
            why = f"{json.dumps(value)} changes nothing while spec.{other} is {json.dumps(getattr(spec, other))}"
            found.append(Conflict(f"spec.{key}", f"spec.{other}", why, "so nothing reads it: leave it out"))
    return found


def _is_there(size: str) -> bool:
    """True if a size of `[memory]` enables its tier."""
    return size == "auto" or size_of(size) > 0


def _packs(profile: Profile) -> bool:
    """True if KV is quantized, now or by a fallback step."""
    return bool(profile.kv_format.is_active(profile.kv)) or any(map(_packs_more, profile.memory.fallbacks))


def _packs_more(step: str) -> bool:
    """True if this step of `memory.fallbacks` quantizes keys or values."""
    return step.startswith(("kv.k_bits", "kv.v_bits"))
