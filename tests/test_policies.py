"""The policies: what each keeps, what it frees, and what a profile may promise with it."""

from __future__ import annotations

import pytest
import torch

from kvcli import assemble
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.policy.policy import Policy
from kvcli.engine.sequence.session import GenerationSession
from kvcli.errors import KvcliError
from kvcli.kv.slots import Slots, nbytes
from kvcli.methods.policies.keep_all import KeepAll
from kvcli.methods.policies.random import Random
from kvcli.methods.policies.streaming import StreamingLLM
from kvcli.settings.profile import Profile, load_profile
from tests import families, make
from tests.policies import moment

torch.set_num_threads(1)
TINY = make.model()


def slots(n: int, n_kv: int = 3) -> Slots:
    return Slots(torch.randn(n_kv, n, 5), torch.randn(n_kv, n, 5), torch.arange(n).expand(n_kv, -1))


def kept(policy: StreamingLLM | Random, s: Slots, layer: int = 0) -> list[list[int]]:
    mask = policy.mask(s, moment(s, layer=layer))
    return [pos[m].tolist() for pos, m in zip(s.pos, mask, strict=True)]


def session(**policy: object) -> GenerationSession:
    profile = load_profile("exact").replace(exactness="approx", policy=policy, prefill={"chunk": 16})
    return assemble.session(TINY, profile)


def test_a_window_keeps_the_first_and_the_newest() -> None:
    assert kept(StreamingLLM(sinks=2, window=3), slots(11)) == [[0, 1, 8, 9, 10]] * 3


@pytest.mark.parametrize("policy", [StreamingLLM(sinks=2, window=5), Random(budget=7, sinks=2, window=3)])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 23])
def test_the_plan_of_memory_is_what_is_kept(policy: StreamingLLM | Random, n: int) -> None:
    assert {len(pos) for pos in kept(policy, slots(n))} == {policy.footprint(n).slots}


def test_lots_differ_by_head_layer_and_seed_and_spare_both_ends() -> None:
    policy, s = Random(budget=11, sinks=2, window=3), slots(200)
    first = kept(policy, s)
    assert all(pos[:2] == [0, 1] and pos[-3:] == [197, 198, 199] for pos in first)
    assert len({tuple(pos) for pos in first + kept(policy, s, layer=1)}) == 6
    assert kept(Random(budget=11, sinks=2, window=3, seed=1), s) != first
    assert kept(policy, s) == first


def test_lots_do_not_depend_on_when_they_are_drawn() -> None:
    policy = Random(budget=9, sinks=1, window=2)
    at_once = kept(policy, slots(60, n_kv=1))[0]
    stepwise: list[int] = []
    for n in range(60):
        pos = torch.tensor([[*stepwise, n]])
        stepwise = kept(policy, Slots(torch.zeros(1, pos.shape[1], 5), torch.zeros(1, pos.shape[1], 5), pos))[0]
    assert stepwise == at_once


@pytest.mark.parametrize("policy", [{"name": "window", "sinks": 2, "window": 9}, {"name": "random", "budget": 80}])
def test_what_is_not_kept_is_freed(policy: dict[str, object]) -> None:
    s = session(**policy)
    full = assemble.session(TINY, load_profile("exact"))
    for each in (s, full):
        run_to_end(each.read(families.prompt(301)))
    slot = sum(nbytes(full.cache).values()) / -(-301 // 256) / 256
    assert sum(nbytes(s.cache).values()) <= slot * s_slots(policy) * 1.3
    list(iterate_events(s.stream(70)))
    assert s.cache.slots(0).n_slots <= s_slots(policy) + 64


def s_slots(policy: dict[str, object]) -> int:
    settings: Policy = load_profile("exact").replace(exactness="approx", policy=policy).policy.settings
    return settings.footprint(10_000).slots


def test_a_conversation_goes_on_from_what_is_left_and_an_undo_reads_anew() -> None:
    s = session(name="window", sinks=2, window=9)
    ids = families.prompt(60)
    run_to_end(s.read(ids))
    list(iterate_events(s.stream(5)))
    assert s.resume([*s.ids, 7, 8]) == s.committed == 64
    assert s.resume(ids[:50]) == 0
    short = session(name="window", sinks=2, window=900)
    run_to_end(short.read(ids))
    assert short.resume(ids[:50]) == 49, "nothing fell out, so nothing has to be read again"


EDGES = (
    {"name": "window", "sinks": 0, "window": 1, "compression_interval": 1},  # nothing but the token itself
    {"name": "window", "sinks": 50, "window": 1, "compression_interval": 7},  # more sinks than some prompts have tokens
    {"name": "window", "sinks": 2, "window": 9, "compression_interval": 1000},  # nothing falls out while answering
    {"name": "random", "budget": 1, "sinks": 0, "window": 1, "compression_interval": 1},
)


@pytest.mark.parametrize("policy", EDGES)
@pytest.mark.parametrize("n", [1, 3, 60])
def test_smallest_and_largest_settings_answer_and_an_undo_answers_alike(policy: dict[str, object], n: int) -> None:
    ids, s = families.prompt(n), session(**policy)
    run_to_end(s.read(ids))
    first = [token for step in iterate_events(s.stream(20)) for token in step.new]
    kept = s.resume(ids)
    assert kept in (0, n - 1)
    run_to_end(s.read(ids[len(s.ids) :]))
    assert [token for step in iterate_events(s.stream(20)) for token in step.new] == first


def test_a_fork_has_a_kv_cache_of_its_own() -> None:
    s = session(name="window", sinks=2, window=20)
    run_to_end(s.read(families.prompt(60)))
    other = s.fork()
    assert other.lm is s.lm
    before = s.cache.slots(0).pos.tolist()
    run_to_end(other.read(families.prompt(9, seed=4)))
    list(iterate_events(other.stream(6)))
    assert s.cache.slots(0).pos.tolist() == before
    assert len(s.ids) == 60
    again = s.fork()
    run_to_end(again.read(families.prompt(9, seed=4)))
    list(iterate_events(again.stream(6)))
    assert again.ids == other.ids


def test_settings_that_cannot_be_kept_are_refused_by_name() -> None:
    for exactness in ("exact", "certified"):
        with pytest.raises(KvcliError) as refused:
            load_profile("exact").replace(exactness=exactness, policy={"name": "window"})
        said = "\n".join(refused.value.lines)
        assert "exactness" in said
        assert "policy.name" in said
    with pytest.raises(KvcliError) as refused:
        load_profile("exact").replace(exactness="approx", policy={"name": "random", "budget": 5})
    assert "less than sinks + window" in "\n".join(refused.value.lines)
    assert KeepAll().compression_interval is None


def test_streaming_forgets_the_middle_and_says_so() -> None:
    profile: Profile = load_profile("streaming")
    assert profile.exactness == "approx"
    assert profile.policy.footprint(100_000).slots == 1024
