"""Needs of methods against effects of other settings: which two keys of a profile exclude each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from kvcli.settings.conflicts import clashes
from kvcli.settings.profile import EFFECTS, NOT_WHOLE, WORDS, Effect, Method, Needs, Profile, Rules, load_profile
from kvcli.settings.schema import registries

SETS: dict[Effect, tuple[str, ...]] = {
    "quantizes": ("kv.k_bits=4",),
    "offloads": ("memory.disk=1GiB",),
    "caps": ("memory.device=1GiB",),
    "demotes": ("memory.evicted=demote", "policy.name=snap"),
    "spends": ("memory.max_loss=0.1", "policy.name=budget"),
    "evicts": ("policy.name=snap",),
    "selects": ("sparse.method=sketch",),
    "degrades": ('memory.fallbacks=["kv.v_bits=4"]',),
    "skims": ("sparse.method=xattention",),
    "prunes": ("prune.method=lazy",),
    "reuses": ("reuse.method=pie",),
    "condenses": ("context.on_overflow=compress",),
    "steps": ("reasoning_steps.method=lookahead", "reasoning_steps.model=demo"),
    "drafts": ("spec.method=ngram",),
    "views": ("spec.method=self",),
}


def unchecked(*sets: str) -> Profile:
    return load_profile("exact", sets=["exactness=approx", *sets], rules=Rules(registries()))


def pairs(profile: Profile) -> set[tuple[str, str]]:
    return {(found.key, found.other) for found in clashes(profile)}


def test_a_plain_profile_has_no_effect_and_each_effect_has_the_key_that_causes_it() -> None:
    assert set(unchecked().effects) == set()
    assert set(SETS) == set(EFFECTS) == set(WORDS)
    for effect, sets in SETS.items():
        assert sets[0].partition("=")[0] in unchecked(*sets).effects[effect]


@pytest.mark.parametrize(
    ("key", "sets", "absent"),
    [
        ("prune.scope", ("prune.method=lazy", "prune.scope=prefill+decode"), NOT_WHOLE | {"degrades"}),
        ("reuse.method", ("reuse.method=pie",), {"evicts", "prunes", "selects"}),
        ("reuse.method", ("reuse.method=blend",), {"evicts", "prunes", "selects"}),
        ("policy.name", ("policy.name=kvzip",), {"skims"}),
        ("policy.score", ("policy.name=budget", "memory.budget=25%"), {"skims"}),
        ("reasoning_steps.method", SETS["steps"], {"drafts", "evicts", "prunes"}),
        ("context.on_overflow", SETS["condenses"], NOT_WHOLE | {"degrades", "prunes", "reuses"}),
        ("kv_format.joint", ("kv_format.method=rotatekv", "kv.k_bits=4", "kv.v_bits=4"), {"evicts"}),
    ],
)
@pytest.mark.parametrize("effect", EFFECTS)
def test_a_need_excludes_its_effects_and_no_others(
    key: str, sets: tuple[str, ...], absent: frozenset[Effect], effect: Effect
) -> None:
    if {one.split("=")[0] for one in sets} & {one.split("=")[0] for one in SETS[effect]}:
        pytest.skip("the same key")
    if key.startswith("kv_format") and effect == "quantizes":
        pytest.skip("the format quantizes by itself")
    profile = unchecked(*sets, *SETS[effect])
    wanted = {(key, other) for one in absent if one in profile.effects for other in profile.effects[one]}
    found = {pair for pair in pairs(profile) if pair[0] == key}
    assert found == wanted
    assert bool(set(profile.effects) & set(absent)) == bool(found)


@dataclass(frozen=True)
class Needy:
    """A policy of another package that works with no drafts."""

    compression_interval: int = 8
    needs: ClassVar[Needs] = Needs(frozenset({"drafts"}), "one token per pass")


def test_a_method_of_another_package_says_what_it_needs() -> None:
    def with_needy(profile: Profile, **changes: Any) -> Profile:
        return replace(profile, policy=Method("needy", Needy()), **changes)

    assert pairs(with_needy(unchecked())) == set()
    drafted = with_needy(unchecked("spec.method=ngram"))
    (clash,) = clashes(drafted)
    assert (clash.key, clash.other) == ("policy.name", "spec.method")
    assert clash.message == '"needy" needs one token per pass'
