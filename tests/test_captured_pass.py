"""Frames on a device that records (fake_graphs.py): the text of passes that run one operation at a time, one wait."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from inspect import unwrap
from itertools import product
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from kvcli.drafts.sources.logit_recycling import top
from kvcli.engine.cuda_graphs import captured_pass
from kvcli.engine.cuda_graphs.captured_pass import CapturedForward
from kvcli.engine.cuda_graphs.captured_passes import CapturedPasses, captured_passes
from kvcli.engine.cuda_graphs.pass_inputs import CapturedPart, PassShape
from kvcli.engine.drafting.draft_kv import DraftTreeKV
from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.engine import Engine, generate_together, run_to_end
from kvcli.engine.forward_request import LAST_STATE, Draft, NeededTensors
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import wrap_lm
from kvcli.engine.policy.policy import Policy
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.sequence.token_scores import score_tokens
from kvcli.engine.stats import Step
from kvcli.errors import BadModel, UsageError
from kvcli.kernels.append_kv import COLUMNS, addresses
from kvcli.kernels.attend_invariant.tables import Table
from kvcli.kv.slots import AttentionParams
from kvcli.kv.tiers.device_tables import MOST_ROWS, DeviceCache
from kvcli.methods.drafts.lookahead import Lookahead
from kvcli.methods.drafts.off import Off
from kvcli.methods.drafts.self_draft import SelfDraft
from kvcli.methods.policies.random import Random
from kvcli.methods.policies.snapkv import Snap
from tests import families, make
from tests.bench.waits import counted
from tests.covering import pinned
from tests.drafters import Bush, Right
from tests.fake_graphs import FakeGraphs, poison
from tests.policies import Ragged

SEEDED = Sampler(temperature=0.8, seed=5)
CUT = Sampler(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=-3)
PROMPT = [*families.prompt(17, seed=2), *(again := families.prompt(9)), *families.prompt(5, seed=3), *again[:6]]
NEW = 30


class Plain(nn.Module):
    """What stands for the experts of a family all of whose other parts are dense."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.nn.functional.silu(self.weight(x)), None


@cache
def lm(family: str) -> LM:
    model: Any = families.build(family.removesuffix("-dense"), torch.float64)
    if family.endswith("-dense"):
        for layer in model.model.layers:
            layer.mlp = Plain(model.config.hidden_size).double()
        families.sharpen(model)
    return wrap_lm(model)


def recorded(family: str) -> tuple[LM, FakeGraphs]:
    its, graphs = lm(family), FakeGraphs()
    its.remembers[CapturedPasses] = CapturedPasses(graphs)
    return its, graphs


def session(its: LM, drafter: Any = None, sampler: Sampler = SEEDED, policy: Policy | None = None) -> GenerationSession:
    every = None if policy is None else 7
    kv = make.dense(its, step=4, windows=make.windows(its))
    return make.session(its, kv, drafter, sampler, policy=policy, every=every, chunk=16)


def written(text: GenerationSession, new: int = NEW, stop: Sequence[int] = ()) -> list[int]:
    start = len(text.ids)
    for _ in iter(lambda: run_to_end(text.step(stop, start + new - len(text.ids))), None):
        if len(text.ids) == start + new or text.ids[-1] in stop:
            return text.ids[start:]
    raise AssertionError


@cache
def plain(family: str, sampler: Sampler, policy: Policy | None = None) -> list[int]:
    its = lm(family)
    its.remembers.pop(CapturedPasses, None)
    text = session(its, None, sampler, policy)
    run_to_end(text.read(PROMPT))
    return written(text)


DENSE = ("llama", "qwen3", "gemma2", "gemma3", "gpt_oss-dense", "phi3", "gemma4_shared", "youtu")


@pytest.mark.parametrize(("family", "drafts"), pinned(product(DENSE, ("off", "chain", "tree")), ("llama", "chain")))
def test_a_captured_pass_gives_the_text_of_single_operations(family: str, drafts: str) -> None:
    """Chains, trees and none, greedy and seeded, while layers grow and windows open."""
    sampler = {"off": CUT, "chain": Sampler(), "tree": SEEDED}[drafts]
    want = plain(family, sampler)
    its, graphs = recorded(family)
    truth = [*PROMPT, *want]
    drafter: Any = {"off": Off(), "chain": Right(truth, 97, 96), "tree": Bush(truth, 97, 96)}[drafts]
    text = session(its, drafter, sampler)
    run_to_end(text.read(PROMPT))
    assert written(text) == want
    assert captured_passes(its) is not None
    assert (dict(captured_passes(its).eager), captured_passes(its).why) == ({}, "")
    assert graphs.waits <= NEW if drafts == "off" else graphs.waits < NEW


def scored(step: Step) -> torch.Tensor:
    return score_tokens(step.logits[step.path], torch.tensor(step.new), 2)


@pytest.mark.parametrize("drafts", ["off", "tree"])
def test_a_captured_pass_gives_the_scores_of_single_operations(drafts: str) -> None:
    """No pass runs ahead over logits that are scored later."""
    each = []
    truth = [*PROMPT, *plain("llama", SEEDED)]
    for is_recorded in (False, True):
        its, graphs = recorded("llama")
        its.remembers = {CapturedPasses: captured_passes(its)} if is_recorded else {}
        texts = [session(its, Off() if drafts == "off" else Bush(truth, 97, 96)) for _ in range(2)]
        for text in texts:
            text.is_scored = True
        generate_together(*(text.read(PROMPT) for text in texts))
        engine, scores = Engine(), ([], [])
        for text, found in zip(texts, scores, strict=True):
            engine.add(text.stream(NEW), lambda step, found=found: found.extend(scored(step).tolist()))
        while engine.step():
            pass
        assert [text.ids for text in texts] == [truth] * 2
        each.append(torch.tensor(scores))
    assert each[1].shape == (2, NEW, 5)
    assert not captured_passes(its).eager
    assert graphs.waits <= NEW
    torch.testing.assert_close(*each)


class Hearing(Bush):
    """Is handed the hidden states of its rows."""

    def propose(self, ids: Sequence[int], room: int, past: object) -> Draft:
        return replace(super().propose(ids, room, past), needs=NeededTensors(LAST_STATE))

    def observe(self, step: Step) -> None:
        assert step.hidden is not None
        assert step.hidden.shape[0] == step.rows.tree
        super().observe(replace(step, hidden=step.hidden.clone()))  # they are the next pass's as well


def test_a_captured_pass_shows_the_states_of_single_operations() -> None:
    truth, each = [*PROMPT, *plain("gemma2", SEEDED)], []
    for is_recorded in (False, True):
        its, _ = recorded("gemma2")
        its.remembers = {CapturedPasses: captured_passes(its)} if is_recorded else {}
        drafter = Hearing(truth, 97, 96)
        text = session(its, drafter)
        run_to_end(text.read(PROMPT))
        assert written(text) == truth[len(PROMPT) :]
        assert captured_passes(its) is None or not captured_passes(its).eager
        each.append([step.hidden for step in drafter.steps])
    for alone, framed in zip(*each, strict=True):
        torch.testing.assert_close(alone, framed)


class NowAndThen(Right):
    """Is handed the queries of its rows, or their hidden states, at every other pass."""

    def __init__(self, truth: Sequence[int], hears: Any) -> None:
        super().__init__(truth, 97, 96)
        self.hears, self.heard = hears, list[Any]()

    def propose(self, ids: Sequence[int], room: int, past: object) -> Draft:
        return replace(super().propose(ids, room, past), needs=self.hears if len(self.heard) % 2 else NeededTensors())

    def observe(self, step: Step) -> None:
        given = step.queries if self.hears.queries else step.hidden
        self.heard.append(None if given is None else [t.clone() for t in given])


@pytest.mark.parametrize(
    "hears", [NeededTensors(queries=True), NeededTensors(LAST_STATE), NeededTensors((1, 0, -1))], ids=str
)
def test_a_pass_with_recorded_queries_has_a_capture_of_its_own(hears: Any) -> None:
    truth, each = [*PROMPT, *plain("llama", SEEDED)], []
    for is_recorded in (False, True):
        its, graphs = recorded("llama")
        its.remembers = {CapturedPasses: captured_passes(its)} if is_recorded else {}
        drafter = NowAndThen(truth, hears)
        text = session(its, drafter)
        run_to_end(text.read(PROMPT))
        assert written(text) == truth[len(PROMPT) :]
        assert captured_passes(its) is None or (graphs.replays and not captured_passes(its).eager)
        each.append(drafter.heard)
    assert [bool(given) for given in each[1]] == [bool(given) for given in each[0]]
    assert any(each[0])
    for alone, framed in zip(*each, strict=True):
        for one, other in zip(alone or (), framed or (), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("drafts", ["off", "tree"])
@pytest.mark.parametrize(
    "policy",
    [
        Ragged(),
        Random(budget=17, sinks=2, window=5),
        Snap(sinks=2, recent=5, keep=0.5, keep_new=9, compression_interval=7),
    ],
)
def test_compression_points_change_a_kv_cache_under_a_captured_pass(policy: Policy, drafts: str) -> None:
    """Heads that keep slots of their own, and a policy that hears queries of what is accepted."""
    want = plain("llama", SEEDED, policy)
    its, _ = recorded("llama")
    text = session(its, Bush([*PROMPT, *want], 97, 96) if drafts == "tree" else Off(), SEEDED, policy)
    run_to_end(text.read(PROMPT))
    assert written(text) == want
    assert captured_passes(its) is not None
    assert not captured_passes(its).eager


def test_a_long_answer_is_recorded_a_few_times_and_a_short_one_takes_little() -> None:
    """A layer that moves doubles, and never has more room than the answer may still need."""
    its, graphs = recorded("llama")
    text = session(its)
    run_to_end(text.read(PROMPT))
    began = len(text.ids)
    for most, times in ((9, 1), (300, 3)):
        before, end = graphs.recorded, len(text.ids) + most
        while len(text.ids) < end:
            run_to_end(text.step((), end - len(text.ids)))
            for held in text.cache._slabs.values():  # type: ignore[attr-defined]
                assert len(held.pos) < end + MOST_ROWS + 4
        assert graphs.recorded - before <= 4 * times, "a pass, what stores, draws, and goes on"
    assert len(text.ids) - began == 309


@pytest.mark.parametrize("policy", [Ragged(), Random(budget=17, sinks=2, window=5)])
def test_compression_points_have_nothing_recorded_again(policy: Policy) -> None:
    """What a policy leaves is as long as it was before, and lies where that lay."""
    its, graphs = recorded("llama")
    text = session(its, policy=policy)
    run_to_end(text.read(PROMPT))
    written(text, 15)
    before = graphs.recorded
    written(text, 28)
    assert graphs.recorded - before == 0


def test_a_text_that_ends_takes_its_captured_passes_along() -> None:
    its, _ = recorded("llama")
    texts = [session(its), session(its)]
    for text in texts:
        run_to_end(text.read(PROMPT))
        written(text, 3)
    assert captured_passes(its) is not None
    frames = [ref(frame) for frame in captured_passes(its)._passes.values()]
    assert [frame() is None for frame in frames] == [False, False]
    del text, texts[0]
    captured_passes(its).release()
    assert [frame() is None for frame in frames] == [True, False]


@pytest.mark.parametrize("side", ["dense, n-gram", "dense, fafo", "sliding", "dense, sampled"])
def test_a_step_waits_once_and_allocates_nothing(side: str) -> None:
    found = counted(side, 3, 4, is_recorded=True)
    assert (found["waits"], found["allocations"], found["eager"]) == (1, 0, {})


def test_a_pass_on_another_stream_is_refused() -> None:
    """A weight's counters of finished programs are of one stream (kernels/linear_skinny)."""
    text = session(wrap_lm(families.build("llama", torch.float64)))
    run_to_end(text.read(PROMPT))
    assert text.lm.stream == 0
    text.lm.stream = 7  # of the passes so far
    with pytest.raises(UsageError, match="this pass is on another") as told:
        run_to_end(text.step())
    assert told.value.code == "other_stream"


@pytest.mark.parametrize("side", ["dense, penalties", "dense, constraint"])
def test_what_is_drawn_apart_takes_no_further_wait_and_no_eager_pass(side: str) -> None:
    found = counted(side, 3, 4, is_recorded=True)
    assert (found["waits"], found["eager"]) == (1, {}), found["where"]


def test_plain_rows_run_before_they_are_asked_for_and_one_is_dropped_behind_a_stop() -> None:
    want = plain("llama", SEEDED)
    stop = want[12]
    end = want.index(stop) + 1
    its, graphs = recorded("llama")
    text = session(its)
    run_to_end(text.read(PROMPT))
    assert written(text, NEW, [stop]) == want[:end]
    frame = next(iter(captured_passes(its)._passes.values()))  # type: ignore[union-attr]
    assert frame._under_way is not None, "the token behind the stop was on its way"
    assert graphs.waits == end
    assert written(text, NEW - end) == want[end:]


def test_a_rewound_text_forgets_what_ran_ahead() -> None:
    """To where the device went on by itself, with another token and another seed."""
    its, _ = recorded("llama")
    text = session(its)
    run_to_end(text.read(PROMPT))
    first = written(text, 8)
    assert first == plain("llama", SEEDED)[:8]
    for back, token in ((1, 5), (3, 60), (7, 7)):
        begins = [*text.ids[:-back], token]
        text.resume(begins)
        run_to_end(text.read(begins[len(text.ids) :]))
        mine = written(text, 6)
        frames = its.remembers.pop(CapturedPasses)
        other = session(its)
        run_to_end(other.read(begins))
        assert mine == written(other, 6)
        its.remembers[CapturedPasses] = frames


def test_two_texts_side_by_side_and_in_turn() -> None:
    want, other = plain("gemma3", SEEDED), plain("gemma3", CUT)
    its, _ = recorded("gemma3")
    texts = [session(its, Bush([*PROMPT, *want], 97, 96)), session(its, None, CUT)]
    for text in texts:
        run_to_end(text.read(PROMPT))
    tasks = generate_together(texts[0].stream(9), texts[1].stream(9))
    assert all(task.error is None for task in tasks)
    for _ in range(5):  # what runs ahead of one does not disturb the other
        for text in texts:
            run_to_end(text.step())
    for text, truth in zip(texts, (want, other), strict=True):
        mine = text.ids[len(PROMPT) :][:NEW]
        assert mine == truth[: len(mine)]
        assert len(mine) >= 14
    assert captured_passes(its) is not None
    assert not captured_passes(its).eager


def test_two_texts_draft_by_themselves_side_by_side() -> None:
    """Rows of two draft trees share a captured pass, and lookahead rows of one text those of another without."""
    want = plain("gemma3", SEEDED)
    its, graphs = recorded("gemma3")
    drafts = SelfDraft(adaptive=False, depth=2), Lookahead(adaptive=False, view="stream", sinks=2, recent=5)
    texts = [session(its, of.drafter(pair=ModelPair(its, its))) for of in (drafts[0], *drafts)]
    for text in texts:
        run_to_end(text.read(PROMPT))
    assert all(task.error is None for task in generate_together(*(text.stream(9) for text in texts)))
    assert [text.ids[len(PROMPT) :][:9] for text in texts] == [want[:9]] * 3
    assert graphs.waits
    assert not captured_passes(its).eager  # type: ignore[union-attr]


def test_rows_of_draft_trees_say_what_they_say_by_single_operations() -> None:
    """Passes of several sizes, of which later ones are captured while the tree has rows; another tree; a commit."""
    said: list[list[Any]] = [[], []]
    for is_recorded, found in zip((False, True), said, strict=True):
        its, graphs = recorded("gemma3")
        its.remembers = {CapturedPasses: captured_passes(its)} if is_recorded else {}
        text, noise, buffers = session(its), random.Random(3), None
        run_to_end(text.read(PROMPT))
        for _ in range(2):
            tree = DraftTreeKV(its, text.cache, len(PROMPT) - 1, buffers=buffers)
            for n in (5, 12, 1, 3):
                parents = [noise.randrange(-1, len(tree) + i) for i in range(n)]
                found += run_to_end(tree.grow([noise.randrange(97) for _ in range(n)], parents, top))
            buffers = tree.buffers
        tree.commit_path(text.cache, tree.above(len(tree) - 1))
        found += [text.cache.slots(layer).k.flatten().tolist() for layer in range(its.n_layers)]
        assert not is_recorded or (graphs.waits == 8 and not captured_passes(its).eager)  # type: ignore[union-attr]
    for eager, captured in zip(*said, strict=True):
        assert captured == pytest.approx(eager)


def test_tokens_that_are_computed_again_are_read_by_nobody() -> None:
    want = plain("llama", SEEDED)
    its, graphs = recorded("llama")
    text = session(its)
    run_to_end(text.read(PROMPT))
    run_to_end(text.replay([*PROMPT, *want[:9]]))
    assert (graphs.waits, graphs.replays > 0) == (0, True)
    assert written(text, 5) == want[9:14]
    assert not captured_passes(its).eager  # type: ignore[union-attr]


class Few(Right):
    """Five rows, for which there is a captured pass of eight."""

    def propose(self, ids: Sequence[int], room: int, past: object) -> Draft:
        return Draft.chain(self.ahead(ids, min(4, room)))


@pytest.mark.parametrize(("most", "waits"), [(15, 2), (16, 1)])
def test_passes_that_are_too_wide_together_are_captured_apart(
    most: int, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unused rows count: with more than so many a row would not have the bits that it has alone."""
    want = plain("llama", SEEDED)
    its, graphs = recorded("llama")
    texts = [session(its, Few([*PROMPT, *want], 97, 96)) for _ in "ab"]
    for text in texts:
        run_to_end(text.read(PROMPT))
    monkeypatch.setattr(LM, "max_invariant_rows", property(lambda _: most))
    tasks = generate_together(*(text.step((), NEW) for text in texts))
    assert all(task.error is None for task in tasks)
    assert (graphs.waits, dict(captured_passes(its).eager)) == (waits, {})  # type: ignore[union-attr]
    for text in texts:
        assert text.ids[len(PROMPT) :] == want[:5]


def test_a_pass_that_there_was_no_memory_to_record_is_recorded_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    want = plain("llama", SEEDED)
    its, graphs = recorded("llama")
    text = session(its)
    run_to_end(text.read(PROMPT))

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as m:
        m.setattr(graphs, "record", full)
        assert written(text, 3) == want[:3]
    assert captured_passes(its) is not None
    assert (dict(captured_passes(its).eager), captured_passes(its).why, graphs.recorded) == (
        {"no memory to capture them": 3},
        "",
        0,
    )
    assert written(text, 5) == want[3:8]
    assert graphs.replays
    assert sum(captured_passes(its).eager.values()) == 3


def test_two_texts_that_run_ahead_take_turns() -> None:
    """Between a row's pass and its becoming a slot another captured pass runs, recorded earlier."""
    want = plain("llama", SEEDED)
    its, _ = recorded("llama")
    texts = [session(its), session(its)]
    for text in texts:
        run_to_end(text.read(PROMPT))
    for _ in range(9):
        for text in texts:
            run_to_end(text.step())
    for text in texts:
        mine = text.ids[len(PROMPT) :]
        assert mine == want[: len(mine)]


def test_a_fork_goes_its_own_way() -> None:
    its, _ = recorded("llama")
    text = session(its)
    run_to_end(text.read(PROMPT))
    written(text, 5)
    twin = text.fork()
    assert written(text, 9) == written(twin, 9) == plain("llama", SEEDED)[5:14]


def test_what_depends_on_the_text_is_drawn_apart() -> None:
    penalty = Sampler(temperature=0.7, repetition_penalty=1.3, seed=11)
    want = plain("llama", penalty)
    its, graphs = recorded("llama")
    text = session(its, Right([*PROMPT, *want], 97, 96), penalty)
    run_to_end(text.read(PROMPT))
    assert written(text) == want
    assert graphs.replays


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_model_that_asks_the_host_is_not_recorded_and_says_so(family: str) -> None:
    want = plain(family, SEEDED)
    its, _ = recorded(family)
    text = session(its)
    run_to_end(text.read(PROMPT))
    assert written(text) == want
    assert captured_passes(its) is not None
    assert set(captured_passes(its).eager) == {captured_passes(its).why}
    assert its.info.notes[-1].startswith("CUDA graphs are off: ")


def test_rope_tables_that_move_are_held_still() -> None:
    """As in releases of transformers that ask the device how far a text is."""
    its, _ = recorded("llama")
    rope = its.model.model.rotary_emb
    stock, kind = type(rope).forward, rope.rope_type
    own = unwrap(stock)

    def forward(self: nn.Module, x: Tensor, position_ids: Tensor) -> Any:
        assert int(torch.max(position_ids)) < 512
        return own(self, x, position_ids)

    forward.__wrapped__ = own  # type: ignore[attr-defined]
    want = plain("llama", SEEDED)
    its.remembers[CapturedPasses] = CapturedPasses(FakeGraphs())
    try:
        type(rope).forward, rope.rope_type = forward, "longrope"
        text = session(its)
        run_to_end(text.read(PROMPT))
        assert written(text) == want
        assert captured_passes(its).why == ""
        assert "forward" not in vars(rope)
    finally:
        type(rope).forward, rope.rope_type = stock, kind


def test_logits_that_are_no_numbers_end_the_text() -> None:
    its, _ = recorded("llama")
    text = session(its)
    run_to_end(text.read(PROMPT))
    written(text, 4)
    frame = next(iter(captured_passes(its)._passes.values()))  # type: ignore[union-attr]
    frame._under_way = None
    head = its.model.lm_head.weight
    kept = head.clone()
    try:
        poison(head)
        with pytest.raises(BadModel):
            run_to_end(text.step())
    finally:
        head.copy_(kept)
    assert written(text, 4) == plain("llama", SEEDED)[4:8]


# ---- the device of these tests is one that would notice ----


def test_a_number_of_the_host_is_the_one_that_was_recorded() -> None:
    graphs, at = FakeGraphs(), 1
    x = torch.arange(4.0)
    y, replay = graphs.record(lambda: x + at)
    at = 2
    x.add_(10)
    replay()
    assert y.tolist() == [11, 12, 13, 14]


def test_asking_the_host_is_refused_while_recording() -> None:
    x = torch.arange(4.0)
    for work in (lambda: int(x[1]), x.nonzero, lambda: x[x > 1], lambda: torch.tensor([1, 2])):
        with pytest.raises(RuntimeError, match="capturing"):
            FakeGraphs().record(work)


def test_numbers_arrive_when_they_are_waited_for() -> None:
    graphs = FakeGraphs()
    there, here = torch.ones(2), graphs.host(2, torch.float32)
    wait = graphs.fetch(there, here)
    assert here.isnan().all()
    there.zero_()
    wait()
    assert here.tolist() == [1, 1]


def test_what_is_recorded_later_is_spoilt_by_an_earlier_one_unless_apart() -> None:
    graphs, x = FakeGraphs(), torch.arange(4.0)
    for other, spoils in ((graphs, True), (graphs.apart(), False)):
        _, first = graphs.record(lambda: x + 1)
        second, again = other.record(lambda: x + 2)
        again()
        first()
        assert bool(second.isnan().all()) == spoils


def test_a_kv_cache_that_moved_under_a_captured_pass_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured pass goes on although its layers lie elsewhere: the text is another."""
    want = plain("llama", SEEDED)[:5]
    its, _ = recorded("llama")
    text = session(its)
    run_to_end(text.read(PROMPT))
    assert written(text, 5) == want
    frames = captured_passes(its)
    (frame,) = captured_passes(its)._passes.values()  # type: ignore[union-attr]
    monkeypatch.setattr(CapturedPasses, "_pass", lambda *_: frame)
    text.cache.reserve(400)
    begins = [*text.ids[:-3], 60, 7, 5]
    text.resume(begins)
    run_to_end(text.read(begins[len(text.ids) :]))
    its.remembers.pop(CapturedPasses, None)
    other = session(its)
    run_to_end(other.read(begins))
    want = written(other, 6)
    its.remembers[CapturedPasses] = frames
    assert written(text, 6) != want


@pytest.mark.parametrize(("d", "e"), [(8, 8), (8, 24)])
def test_keys_and_values_are_copied_only_where_they_lie_otherwise(
    d: int, e: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As kernels/append_kv asks for: one table has the strides of both, in rows."""
    its, n_kv, n = lm("llama"), 2, 3
    shared = SimpleNamespace(shared_from=None, rank=0)
    about = SimpleNamespace(n_layers=1, shapes=[shared], latents={})
    feed: Any = SimpleNamespace(lm=about, cache=SimpleNamespace(dtype=its.dtype), layers=None)
    numbers: Any = SimpleNamespace(ids=range(n), path_of=None, beside=(), tree=lambda path_of: None)
    table = Table(*(torch.zeros(4, size) for size in (d, e)), *(torch.zeros(4),) * 3)
    lying: Any = SimpleNamespace(table=table, room=4)
    monkeypatch.setattr(captured_pass, "attend_captured", lambda q, *_, **__: q)
    q = torch.zeros(4, n, d, dtype=its.dtype)
    apart = [torch.randn(n, n_kv, size, dtype=its.dtype).transpose(0, 1) for size in (d, e)]  # as models make them
    for k, v, is_copied in ((*apart, False), (apart[0], apart[1].contiguous(), True)):
        shape = PassShape(n, 1, 0, None, False, False, False, 0)
        way = CapturedForward(CapturedPart(feed, shape, (DeviceCache([lying]), DeviceCache())), numbers, None)
        way.attend(0, q, k, v, AttentionParams(1.0), None)
        fresh = way.fresh[0]
        assert [torch.equal(t, of) for t, of in ((fresh.k, k), (fresh.v, v))] == [True, True]
        assert (fresh.k.data_ptr() != k.data_ptr()) == is_copied
        held = Table(torch.zeros(4, d, dtype=its.dtype), torch.zeros(4, e, dtype=its.dtype), *(torch.zeros(4),) * 3)
        assert addresses([held], [(fresh.k, fresh.v)], its.device).shape == (1, COLUMNS)
