"""From a profile to live objects: the one file that knows every name, and every clash.

Imports torch only when something is built, so that a profile can be read and refused in a moment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.drafts.base import Costs, Drafter
    from kvcli.kv.front import Front
    from kvcli.kv.slots import Slots, Store
    from kvcli.kv.tiers import Plan
    from kvcli.model import LM
    from kvcli.policies.base import Policy
    from kvcli.profile import Clash, Profile
    from kvcli.sample import Sampler
    from kvcli.session import Session
    from kvcli.verify import Accept

# table -> name of a method -> where its dataclass lives; the dataclass is that table's schema
REGISTRIES: Mapping[str, Mapping[str, str]] = {
    "policy": {
        "none": "kvcli.policies.base:Everything",
        "window": "kvcli.policies.window:Window",
        "random": "kvcli.policies.random:Random",
        "fastgen": "kvcli.policies.fastgen:FastGen",
        "snap": "kvcli.policies.topk:Snap",
        "expected": "kvcli.policies.topk:Expected",
        "keydiff": "kvcli.policies.topk:KeyDiff",
        "knorm": "kvcli.policies.topk:KNorm",
        "lag": "kvcli.policies.topk:Lag",
        "tova": "kvcli.policies.topk:Tova",
        "h2o": "kvcli.policies.topk:H2O",
        "frequent": "kvcli.policies.topk:H2O",
        "kvzip": "kvcli.policies.kvzip:KVzip",
    },
    "recall": {
        "none": "kvcli.kv.recall_settings:Everything",
        "minmax": "kvcli.kv.recall_settings:MinMax",
        "sketch": "kvcli.kv.recall_settings:Sketch",
        "certified": "kvcli.kv.recall_settings:Certified",
    },
    "spec": {
        "off": "kvcli.drafts.base:Off",
        "ngram": "kvcli.drafts.ngram:Ngram",
        "lookahead": "kvcli.drafts.lookahead:Lookahead",
        "mix": "kvcli.drafts.mix:Mix",
    },
}


VIEWS = {"stream": "kvcli.policies.window:Window", "quest": "kvcli.policies.quest:Quest"}  # what scouts read
PROMISES = ("exact", "certified", "approx")  # of `exactness`, the strictest first
KV_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # kv.dtype -> torch's name


def clashes(profile: Profile) -> list[Clash]:
    """Settings that cannot both be kept. `exactness` promises what store, policy and prefill leave unchanged."""
    from kvcli.profile import Clash

    found = []
    if profile.exactness != "approx" and profile.kv.dtype not in ("auto", profile.load.dtype):
        cannot = f'"{profile.exactness}" cannot be kept'
        found.append(Clash("exactness", "kv.dtype", cannot, "which may round keys and values"))
    found += memory_clashes(profile)
    found += idle_keys(profile)
    if profile.exactness != "approx" and profile.policy.policy() is not None:
        because = "which forgets part of the text"
        found.append(Clash("exactness", "policy.name", f'"{profile.exactness}" cannot be kept', because))
    found += recall_clashes(profile)
    return found


def recall_clashes(profile: Profile) -> list[Clash]:
    """Of `[recall]`: what it promises."""
    from kvcli.profile import Clash

    found = []
    if PROMISES.index(profile.exactness) < PROMISES.index(profile.recall.promise):
        because = "which reads a part of what is stored"
        found.append(Clash("exactness", "recall.method", f'"{profile.exactness}" cannot be kept', because))
    return found


def memory_clashes(profile: Profile) -> list[Clash]:
    """Of `[kv]` and `[memory]`: packing rounds, and so do the steps that pack; a step must be one that can be taken."""
    from kvcli.profile import Clash

    found = []
    rounds, memory = "which rounds keys and values", profile.memory
    bits = {f"kv.{key}": getattr(profile.kv, key) for key in ("k_bits", "v_bits")}
    if profile.exactness != "approx":  # nothing bounds what rounding does
        cannot = f'"{profile.exactness}" cannot be kept'
        found += [Clash("exactness", key, cannot, rounds) for key, n in bits.items() if n < 16]
        if any(step.startswith(tuple(bits)) for step in memory.ladder):
            found.append(Clash("exactness", "memory.ladder", cannot, rounds))
    set_by = dict.fromkeys(bits, "")  # an earlier step, or the profile
    for step in memory.ladder:
        key, _, value = step.partition("=")
        frees_nothing = f'"{step}" frees nothing'
        if key == "kv.residual" and min(bits.values()) == 16:
            found.append(Clash("memory.ladder", "kv.k_bits", frees_nothing, "so nothing is packed when it is taken"))
        if key in bits and int(value) >= bits[key]:
            there, n = ("memory.ladder" if set_by[key] else key), bits[key]
            because = f'whose step "{set_by[key]}" comes before it' if set_by[key] else f"which is {n} already"
            found.append(Clash("memory.ladder", there, frees_nothing, because))
        elif key in bits:
            bits[key], set_by[key] = int(value), step
    if memory.ladder and memory.on_shortage == "fail":
        found.append(Clash("memory.ladder", "memory.on_shortage", "no step is ever taken", 'which is "fail"'))
    return found


def cautions(profile: Profile, device: str) -> list[str]:
    """What the user should know of a profile on a device of this type, one line each."""
    found = [profile.policy.caution] if profile.policy.caution else []
    if profile.memory.host == "auto" and device != "cuda":
        found.append("memory.host = auto holds nothing here: without a GPU keys and values are in host memory already")
    return found


def idle_keys(profile: Profile) -> list[Clash]:
    """Keys of `[kv]` that say how to pack or move, where nothing is ever packed or moved."""
    from kvcli.profile import Clash
    from kvcli.schema import size_of

    kv, memory = profile.kv, profile.memory
    packs = _packs(profile)
    moves = memory.host == "auto" or size_of(memory.host) or size_of(memory.disk)
    moves = moves or any(step.startswith("memory.") for step in memory.ladder)
    moves = moves or memory.device != "auto"  # its budget counts what stays in the top
    bits, sizes = "kv.k_bits and kv.v_bits are 16", "[memory] has no budget"
    packing = (packs, bits, "so nothing is packed")
    moving = (packs or moves, f"{bits} and {sizes}", "so nothing is packed, and nothing moves")
    acts = {"rotate": packing, "residual": packing, "group": moving, "sinks": moving}
    plain = type(kv)()
    return [
        Clash(f"kv.{key}", "kv.k_bits", f"{json.dumps(getattr(kv, key))} changes nothing while {vain}", because)
        for key, (does, vain, because) in acts.items()
        if not does and getattr(kv, key) != getattr(plain, key)
    ]


def _packs(profile: Profile) -> bool:
    """Is anything packed, now or when memory runs out?"""
    steps = [step.startswith(("kv.k_bits", "kv.v_bits")) for step in profile.memory.ladder]
    return min(profile.kv.k_bits, profile.kv.v_bits) < 16 or any(steps)


def store(lm: LM, profile: Profile, held: int = 0) -> Store:
    """An empty store as `[kv]` and `[memory]` want it; raises BadConfig or Shortage where that cannot be.

    `held`: bytes that a store takes which this one is to replace.
    """
    return plan(lm, profile, held).store()


def chunk(lm: LM, profile: Profile) -> int:
    """Tokens read in one pass, at most: no text is longer than its window."""
    return min(profile.prefill.chunk, lm.limit if profile.context.limit == "auto" else int(profile.context.limit))


def plan(lm: LM, profile: Profile, held: int = 0) -> Plan:
    """What its store is made for; `held` as above."""
    import torch

    from kvcli.kv import tiers

    dtype = lm.dtype if profile.kv.dtype == "auto" else getattr(torch, KV_DTYPES[profile.kv.dtype])
    return tiers.Plan(
        lm.n_layers,
        lm.n_kv_heads,
        lm.head_dim,
        dtype,
        lm.device,
        profile.kv,
        profile.memory,
        profile.recall.settings,
        lm.sights,
        chunk(lm, profile),
        held,
    )


def every(profile: Profile) -> int | None:
    """Tokens between two boundaries: the policy's, else recall's or a ladder's; None = the past never changes."""
    from kvcli.kv.room import EVERY
    from kvcli.kv.tiers import is_ladder

    wanted: int | None = profile.policy.every or profile.recall.every
    return EVERY if wanted is None and is_ladder(profile.kv, profile.memory) else wanted


def session(lm: LM, profile: Profile, costs: Costs | None = None, kinds: bytes | None = None) -> Session:
    """An empty session of `lm` as the profile wants it.

    `costs`: what passes take on this machine, for the drafter to start from; never changes the text. `kinds`: the kind
    of each id (kvcli.token_kinds), for policies; None = all are text.
    """
    import torch

    from kvcli.session import Session
    from kvcli.strict import Strict
    from kvcli.verify import exact

    kv = store(lm, profile)
    drafter: Drafter = profile.spec.drafter(lm.stop_ids)
    if costs:
        drafter.expect(costs)
    accept: Accept = exact
    if profile.spec.strict:
        drafter = accept = Strict(drafter)
    if (policy := profile.policy.policy()) is not None:
        policy.meet(lm)
    return Session(
        lm,
        kv,
        drafter,
        sampler(lm, profile),
        view=view(lm, kv, drafter),
        policy=policy,
        accept=accept,
        chunk=chunk(lm, profile),
        every=every(profile),
        kinds=torch.frombuffer(bytearray(kinds), dtype=torch.int8) if kinds else None,
    )


def view(lm: LM, kv: Store, drafter: Drafter) -> Front | None:
    """How the drafter's scouts read the past; None = all of it, or there are no scouts."""
    if (glance := drafter.view) is None:
        return None
    module, _, name = VIEWS[glance.kind].partition(":")
    return front(lm, kv, getattr(import_module(module), name)(**glance.settings), glance.every)


def front(lm: LM, kv: Store, policy: Policy, every: int) -> Front:
    """What `policy` keeps of `kv`, as a short dense copy chosen anew every `every` tokens."""
    from kvcli.kv.front import Front
    from kvcli.policies.base import Moment

    def pick(layer: int, q: Tensor, s: Slots) -> Tensor:
        now, sight = s.pos.amax().long() + 1, lm.sights[layer]  # the rows stand behind all that is stored
        nothing = s.pos < s.pos  # is protected, and no token is of a kind
        at = Moment(
            layer,
            lm.n_layers,
            "answering",
            int(now),
            q,
            now.expand(q.shape[1]),
            s.pos[0, :0],
            nothing,
            sight.scale,
            sight.softcap,
            sight.window,
            lm.sinks[layer],
        )
        return policy.keep(s, at)

    return Front(kv, pick, every, n_layers=lm.n_layers, n_kv_heads=lm.n_kv_heads, head_dim=lm.head_dim)


def sampler(lm: LM, profile: Profile) -> Sampler:
    """The profile's sampling, and the model's own generation settings where it says nothing."""
    from kvcli.sample import Sampler

    chosen = profile.sample
    wanted = {
        key: getattr(chosen, key) if getattr(chosen, key) is not None else lm.generation.get(key)
        for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    }
    return Sampler(**{key: value for key, value in wanted.items() if value is not None}, seed=chosen.seed)
