"""What sessions guarantee beside the text: storage, when the KV cache may change, where turns may stop (I3, I4)."""

from __future__ import annotations

import copy

import pytest
import torch

from kvcli import assemble
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.forward_request import Draft, ForwardResult, LookaheadRows, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.policy.policy import LayerContext, PolicyRequirements, ProtectedTokens
from kvcli.engine.sequence.session import GenerationSession
from kvcli.kv.slots import Slots
from kvcli.methods.drafts.off import Off
from tests import drafters, families, make
from tests.policies import KeepAll, Ragged, Recent

torch.set_num_threads(1)
TINY = make.model()


def session(drafter: object = None, **options: object) -> GenerationSession:
    return make.session(TINY, drafter=drafter, **options)  # type: ignore[arg-type]


def truth(n: int) -> list[int]:
    s = session()
    run_to_end(s.read(families.prompt(12)))
    list(iterate_events(s.stream(n)))
    return s.ids


TRUTH = truth(40)


def test_the_kv_cache_changes_only_at_compression_points() -> None:
    s = session(drafters.Right(TRUTH, 97, -1), policy=Recent(), every=8)
    run_to_end(s.read(families.prompt(12)))
    for step in iterate_events(s.stream(26)):
        before = s.committed - len(step.path)
        assert before // 8 == (s.committed - 1) // 8, "a draft crossed a compression point"
        held = s.cache.slots(0).n_slots
        if s.committed % 8:
            assert held == min(15, 12 - 1) + s.committed - 11 if s.committed < 16 else held >= 15 + s.committed % 8
    assert len(s.ids) == 12 + 26


def test_a_pass_refuses_to_commit_across_a_compression_point() -> None:
    s = session()
    s.next_compression_at = 2
    made = ForwardResult(torch.empty(0), lambda row: 0, lambda row: [], (), ())
    with pytest.raises(AssertionError, match="compression point"):
        s._commit(Rows.chain([1, 2, 3], 0), (), made, [0, 1, 2])


def test_a_draft_deeper_than_the_room_is_refused() -> None:
    class Deep(Off):
        def propose(self, ids: object, room: int, context: object) -> Draft:
            return Draft.chain([5] * (room + 1))

    s = session(Deep(), every=8, policy=Recent())
    run_to_end(s.read(families.prompt(4)))
    with pytest.raises(AssertionError, match="deeper"):
        run_to_end(s.step())


def test_right_drafts_end_where_the_window_does() -> None:
    short = copy.copy(TINY)
    short.limit = 30
    s = make.session(short, make.dense(TINY), drafters.Right(TRUTH, 97, -1))
    run_to_end(s.read(families.prompt(12)))
    passes = []
    while s.committed < short.limit:
        passes.append(run_to_end(s.step()))
    assert max(max(step.rows.pos) for step in passes) == short.limit - 1
    assert s.ids == TRUTH[: short.limit + 1]


def test_what_a_guard_covers_stays_whatever_the_policy_says() -> None:
    class Nothing(KeepAll):
        def requirements(self, lm: LM) -> PolicyRequirements:
            return PolicyRequirements(guard=ProtectedTokens(sinks=2, recent=3))

        def mask(self, s: Slots, at: LayerContext) -> torch.Tensor:
            return s.pos < 0

    s = session(policy=Nothing(), every=8)
    run_to_end(s.read(families.prompt(13)))
    assert {tuple(pos.tolist()) for pos in s.cache.slots(0).pos} == {(0, 1, 9, 10, 11)}


def test_a_turn_ends_at_its_length_at_a_stop_token_and_when_cancelled() -> None:
    s = session(drafters.Right(TRUTH, 97, -1))
    run_to_end(s.read(families.prompt(12)))
    list(iterate_events(s.stream(5)))
    assert s.ids == TRUTH[:17]
    stop = TRUTH[20]
    list(iterate_events(s.stream(20, stop={stop})))
    assert s.ids == TRUTH[: TRUTH.index(stop, 17) + 1]
    asked = iter([False, False, True])
    s = session()
    run_to_end(s.read(families.prompt(12)))
    assert len(list(iterate_events(s.stream(20, cancel=lambda: next(asked))))) == 2


def test_no_queries_of_a_rewound_text_reach_a_policy() -> None:
    s = session(policy=Ragged(recent=12), every=20)
    run_to_end(s.read(families.prompt(1)))  # nothing to read, so nothing is evicted before token 20
    list(iterate_events(s.stream(19)))
    text = s.ids[:15]
    s.resume(text)
    run_to_end(s.read(text[len(s.ids) :]))
    fresh = session(policy=Ragged(recent=12), every=20)
    run_to_end(fresh.read(text))
    for ours, theirs in zip(s.query_recorder._q, fresh.query_recorder._q, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_text_that_was_not_read_to_its_end_cannot_be_continued() -> None:
    s = session(chunk=3)
    next(iter(iterate_events(s.read(TRUTH[:12]))))
    with pytest.raises(AssertionError, match="not prefilled"):
        run_to_end(s.step())


def test_lookahead_rows_read_what_the_drafters_policy_keeps() -> None:
    """A lookahead row at the pending token's place sees what plain decoding sees if the view keeps all, else less."""

    class Scouting(Off):
        def propose(self, ids: object, room: int, context: object) -> Draft:
            same = LookaheadRows([int(ids[-1])], [0], torch.ones(1, 1, dtype=torch.bool), [0])  # type: ignore[index]
            return Draft([], [], same)

    found = {}
    for policy in (None, KeepAll(), Recent(last=3)):
        s = session(Scouting())
        s.stored_kv.view = policy and assemble.compact_view(s.lm, s.cache, policy, 8)
        run_to_end(s.read(families.prompt(40)))
        step = run_to_end(s.step())
        assert step.path == [0]
        assert step.new == [TRUTH_40]
        found[type(policy).__name__] = step.logits[1]
    torch.testing.assert_close(found["KeepAll"], found["NoneType"])
    assert not torch.allclose(found["Recent"], found["KeepAll"], atol=1e-2)


def _next_after(n: int) -> int:
    s = session()
    run_to_end(s.read(families.prompt(n)))
    return run_to_end(s.step()).new[0]


TRUTH_40 = _next_after(40)
