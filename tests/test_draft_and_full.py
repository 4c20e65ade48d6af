"""Lossy profiles made exact: what they keep of a KV cache drafts, and the whole of it writes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from kvcli.assemble import exactness_label, session
from kvcli.commands.common.run_setup import refuse_inexact
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.stats import Stats
from kvcli.errors import BadConfig
from kvcli.kv.cache.draft_and_full import DraftAndFullCache
from kvcli.kv.slots import nbytes
from kvcli.settings.profile import Profile, load_profile
from tests import families, make

NEW = 40
CHECKED = [
    "exactness=exact",
    "spec.method=self",
    "spec.adaptive=false",
    "spec.copies=false",
    "spec.branches=1",
    "prefill.chunk=37",
]
# as shipped they keep more than these short texts have
SMALL = {
    "balanced": ["kv.residual=20", "kv.group=16"],
    "lean": ["kv.residual=20", "kv.group=16"],
    "snap": ["policy.keep=0.2"],
    "streaming": ["policy.sinks=2", "policy.window=16", "policy.compression_interval=16"],
    "fastgen": ["policy.keep=0.2"],
    "max-context": ["kv.residual=20", "kv.group=16", "memory.host=0GiB"],
}


@cache
def lm() -> LM:
    return make.model("llama", torch.bfloat16, kernels=True)


def profile(name: str, *sets: str) -> Profile:
    return load_profile(name, sets=[*SMALL.get(name, ()), *CHECKED, *sets])


def written(under: Profile, n: int = 150) -> tuple[GenerationSession, Stats]:
    found, stats = session(lm(), under), Stats()
    run_to_end(found.read(families.prompt(n)))
    for step in iterate_events(found.stream(NEW)):
        stats.add_step(step)
    return found, stats


@cache
def plain(sampling: str) -> list[int]:
    return written(load_profile("exact", sets=[sampling]))[0].ids


@pytest.mark.parametrize("sampling", ["sample.temperature=0", "sample.temperature=0.9"])
@pytest.mark.parametrize("name", SMALL)
def test_the_text_is_that_of_the_whole_kv_cache(name: str, sampling: str) -> None:
    under = profile(name, sampling)
    found, stats = written(under)
    assert found.ids == plain(sampling)
    assert stats.draft_tokens > 0
    assert not found.approximations
    assert exactness_label(lm(), under) == "bit-exact"
    assert nbytes(found.cache).keys() == {"cpu", "draft"}


def test_drafts_come_of_what_is_kept() -> None:
    """All of it is as good as the whole KV cache; of next to nothing drafts fail."""
    all_of_it = written(profile("streaming", "policy.window=400"))[1]
    nothing = written(profile("streaming", "policy.sinks=0", "policy.window=1", "policy.compression_interval=4"))[1]
    assert all_of_it.acceptance_rate == 1
    assert nothing.acceptance_rate < 0.9


def test_the_whole_kv_cache_gives_back_what_windows_hide() -> None:
    sliding = make.model("gemma3", torch.bfloat16)
    taken = []
    for under in (load_profile("exact", sets=["prefill.chunk=37"]), profile("streaming", "policy.window=64")):
        found = session(sliding, under)
        run_to_end(found.read(families.prompt(600)))
        taken.append(nbytes(found.cache)["cpu"])
    assert taken[0] == taken[1]


def test_exact_says_what_to_type_and_takes_it() -> None:
    with pytest.raises(BadConfig) as refused:
        refuse_inexact(load_profile("snap"))
    assert "--set exactness=exact --set spec.method=self" in refused.value.try_
    refuse_inexact(profile("snap"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"exactness": "exact"}, 'with spec.method = "self"'),
        ({"exactness": "certified", "spec": {"method": "self"}}, "which evicts tokens"),
        (
            {"exactness": "exact", "spec": {"method": "self"}, "prune": {"method": "lazy"}},
            "drops tokens of a prompt",
        ),
        (
            {
                "exactness": "exact",
                "spec": {"method": "self"},
                "memory": {"evicted": "demote"},
                "kv": {"k_bits": 8, "v_bits": 8},
            },
            '"exact" needs a full KV cache that verifies drafts',
        ),
    ],
)
def test_what_cannot_be_checked_is_refused_with_what_would_do(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadConfig) as refused:
        load_profile("snap").replace(**changes)
    assert said in str(refused.value) + "".join(refused.value.lines)


class Noted:
    """A store that writes down what it is asked, and answers with its name."""

    dtype, changes, batch_variant_reason = torch.float64, 3, "whole"

    def __init__(self, name: str, calls: list[Any]) -> None:
        self._name, self._calls = name, calls

    def __getattr__(self, verb: str) -> Any:
        def asked(*of: Any) -> str:
            self._calls.append((self._name, verb, *of))
            return self._name

        return asked


class NotedKept(Noted):
    dtype, changes, batch_variant_reason = torch.bfloat16, 4, "kept"


@pytest.mark.parametrize(
    ("verb", "of", "who"),
    [
        ("reaches", (5,), "whole"),
        ("newest", (1, 9), "kept"),
        ("slots", (1,), "kept"),
        ("n_slots", (1,), "kept"),
        ("evict_except", (1, "mask"), "kept"),
        ("append", (1, "k", "v", 7), "both"),
        ("take", (1, "slots"), "both"),
        ("crop", (5,), "both"),
        ("reserve", (5, (0, 1)), "both"),
    ],
)
def test_the_whole_kv_cache_says_what_rows_find_and_the_other_what_policies_judge(
    verb: str, of: tuple[Any, ...], who: str
) -> None:
    calls: list[Any] = []
    both: Any = DraftAndFullCache(Noted("whole", calls), NotedKept("kept", calls))  # type: ignore[arg-type]
    answer = getattr(both, verb)(*of)
    asked = ["whole", "kept"] if who == "both" else [who]
    assert calls == [(name, verb, *of) for name in asked]
    assert answer == (None if who == "both" else who)


def test_compression_points_reach_both_kv_caches_and_masks_the_one_they_are_of() -> None:
    calls: list[Any] = []
    both: Any = DraftAndFullCache(Noted("whole", calls), NotedKept("kept", calls))  # type: ignore[arg-type]
    assert both.compress(["mask"], 9, iter([0, 2])) == "kept"
    assert calls == [("whole", "compress", (), 9, [0, 2]), ("kept", "compress", ["mask"], 9, [0, 2])]
    assert (both.dtype, both.batch_variant_reason, both.changes) == (torch.float64, "whole", 7)
    assert both.device_tables(1)
