"""The engine: what a pass breaks on reaches the work it concerns, and several texts share their passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from kvcli.engine import engine as module
from kvcli.engine import forward, step_time
from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.engine import Engine, iterate_events, run, run_to_end
from kvcli.engine.forward_request import Coroutine, ForwardRequest, ForwardResult, Passes, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.stats import Step
from kvcli.methods.drafts.model import SeparateModelDraft
from tests import families, make


@cache
def lm(name: str = "llama") -> LM:
    return make.model(name, torch.float64)


def session(name: str = "llama", chunk: int = 13) -> GenerationSession:
    model = lm(name)
    return make.session(model, chunk=chunk)


def answer(text: GenerationSession, ids: list[int], new: int) -> Coroutine[object, list[int]]:
    yield from text.read(ids)
    yield from text.stream(new)
    return text.ids


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass over a model."""
    counted: list[int] = []
    call = forward.call

    def noted(model: Any, ids: Any, *args: Any, **more: Any) -> Any:
        counted.append(len(ids))
        return call(model, ids, *args, **more)

    monkeypatch.setattr(forward, "call", noted)
    return counted


def test_rows_of_several_texts_are_as_of_each_alone() -> None:
    feeds = []
    for seed, n in ((1, 5), (2, 1), (3, 9)):
        text = session()
        run_to_end(text.read(families.prompt(20 + n, seed=seed)))
        rows = Rows.chain(families.prompt(n, seed=9), text.committed)
        feeds.append(ForwardRequest(text.lm, rows, text.cache, want=range(n), record_queries=range(0, n, 2)))
    together = run(feeds)
    for feed, made in zip(feeds, together, strict=True):
        (alone,) = run([feed])
        torch.testing.assert_close(made.logits, alone.logits)
        torch.testing.assert_close(made.fresh[1].k, alone.fresh[1].k)
        torch.testing.assert_close(made.queries[2], alone.queries[2])


def test_where_bits_hold_for_few_rows_they_have_passes_of_their_own(
    passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def feed(n: int, is_prompt: bool = False) -> ForwardRequest:
        text = session()
        return ForwardRequest(text.lm, Rows.chain(families.prompt(n), 0), text.cache, want=[n - 1], is_prompt=is_prompt)

    feeds = [feed(3), feed(40, is_prompt=True), feed(5), feed(30, is_prompt=True), feed(4), feed(9)]
    together = run(feeds)
    assert passes == [91]
    monkeypatch.setattr(LM, "max_invariant_rows", 8)
    apart = run(feeds)
    assert sorted(passes[1:]) == [4, 8, 9, 70]
    for one, other in zip(apart, together, strict=True):
        torch.testing.assert_close(one.logits, other.logits)


def test_passes_through_no_layer_are_of_two_kinds() -> None:
    """What is embedded, and norm and head behind the last layer: ranges without a number in them are equal."""
    text, ids = session(), families.prompt(5)
    rows, layers = Rows.chain(ids, 0), text.lm.n_layers
    (deep,) = run([ForwardRequest(text.lm, rows, text.cache, layers=range(layers))])
    ends = ForwardRequest(text.lm, rows, text.cache, want=[4], layers=range(layers, layers), hidden=deep.hidden)
    begins = ForwardRequest(text.lm, rows, text.cache, layers=range(0))
    (shown,), (said,) = run([begins]), run([ends])
    together = run([ends, begins])
    assert torch.equal(together[0].logits, said.logits)
    assert together[1].hidden is not None
    assert torch.equal(together[1].hidden, shown.hidden)


def test_texts_of_two_models_share_a_round(passes: list[int]) -> None:
    many, texts = Engine(), [("llama", 1), ("llama", 2), ("gemma3", 3), ("llama", 4)]
    tickets = [many.add(answer(session(name), families.prompt(20, seed=seed), 6)) for name, seed in texts]
    while many.step():
        pass
    shared = len(passes)
    alone = [run_to_end(answer(session(name), families.prompt(20, seed=seed), 6)) for name, seed in texts]
    assert [ticket.result() for ticket in tickets] == alone
    assert shared == 2 * (2 + 6)  # two chunks and six tokens, for each model


def test_a_prompt_among_texts_being_written_delays_them_by_a_chunk(passes: list[int]) -> None:
    many, said = Engine(rows=13), list[str]()
    many.add(answer(session(), families.prompt(30), 20), lambda event: said.append("long"))
    for _ in range(3):
        many.step()
    late = many.add(answer(session(), families.prompt(27), 1), lambda event: said.append("late"))
    more = many.add(answer(session(), families.prompt(27), 1))
    before = len(said)
    while not (late.is_over and more.is_over):
        many.step()
    assert max(passes[3:]) == 13 + 1  # one prompt's chunk, and a token of a text being written
    assert max(passes[5::2]) <= 2  # behind each chunk a round without one
    assert said[before:].count("long") >= 8  # a token each round
    assert 0 < said[before:].index("late") < 5


def test_a_short_question_is_answered_before_the_next_chunk_of_a_long_prompt(passes: list[int]) -> None:
    many, said = Engine(rows=13), list[object]()
    many.add(answer(session(), families.prompt(130), 1))
    many.step()
    many.add(answer(session(), families.prompt(6), 2), said.append)
    del passes[:]
    while len(said) < 3:  # it was read, and two tokens
        many.step()
    assert passes == [5, 1, 13 + 1]


def test_prompts_that_one_round_does_not_take_are_read_in_turns() -> None:
    many, said = Engine(rows=13), list[str]()
    for name in "abc":
        many.add(answer(session(), families.prompt(40), 1), lambda event, name=name: said.append(name))  # type: ignore[misc]
    for _ in range(6):
        many.step()
    assert said == list("abcabc")


def test_a_chunk_of_more_rows_than_a_round_takes_waits_for_nobody_to_end() -> None:
    many = Engine(rows=13)
    written = many.add(answer(session(), families.prompt(6), 60))
    large = many.add(answer(session(chunk=40), families.prompt(90), 1))
    for _ in range(12):
        many.step()
    assert large.is_over
    assert not written.is_over


def test_beside_texts_being_written_a_chunk_is_cut_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, steps, run = [0.0], list[list[int]](), module.run

    def timed(requests: Sequence[ForwardRequest], *more: Any) -> list[ForwardResult]:
        steps.append([request.rows.n_rows for request in requests])
        now[0] += sum(steps[-1]) * 0.01
        return run(requests, *more)

    def work(seed: int, n: int, new: int) -> Coroutine[object, list[int]]:
        return answer(make.session(model, chunk=64), families.prompt(n, seed=seed), new)

    model = make.model("llama", kernels=True)
    wants = [run_to_end(work(*of)) for of in ((1, 6, 12), (2, 200, 3))]
    monkeypatch.setattr(module, "run", timed)
    many = Engine(longest=0.25, clock=lambda: now[0])
    written = many.add(work(1, 6, 12))
    many.step()
    read = many.add(work(2, 200, 3))
    while many.step():
        pass
    assert [written.result(), read.result()] == wants
    among = [step for step in steps[1:] if step[1:]]
    assert among[0] == [1, step_time.LEAST]  # nothing is known yet
    assert max(among) == [1, 20]  # 210 of 250 ms; chunks end where they would
    assert sum(sum(step[1:]) for step in among[:4]) == 64
    assert [64] in steps  # nobody waits any more


def test_rows_that_attend_to_more_are_expected_to_take_longer() -> None:
    model = make.model("llama")

    def request(at: int) -> ForwardRequest:
        return ForwardRequest(model, Rows.chain([1], at), make.dense(model), is_prompt=True)

    took = step_time.StepTime(0.1 / step_time.FILLED)
    assert took.share(request(0)) == 1 / step_time.LEAST
    took.learn(0.02, [(request(0), 20)])
    assert took.share(request(0)) == pytest.approx(0.01)
    assert took.share(request(step_time.FLAT)) == pytest.approx(0.02)
    took.learn(0.05, [])  # decoding takes half of the step
    assert took.share(request(0)) == pytest.approx(0.02)
    assert took.share(request(0), used=0.05) == 1 / step_time.LEAST
    took.learn(0.0, [(request(0), 20)])  # a measurement that cannot be right counts in part
    assert took.share(request(0)) == pytest.approx(0.02 / step_time.SURE)


def test_draft_passes_of_one_text_cost_others_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, second, together = lm(), lm("gemma3"), list[tuple[LM, int]]()
    run = module.run

    def noted(requests: Sequence[ForwardRequest], *more: Any) -> list[ForwardResult]:
        together.extend((request.lm, len(requests)) for request in requests[:1])
        return run(requests, *more)

    monkeypatch.setattr(module, "run", noted)
    drafter = SeparateModelDraft(adaptive=False, depth=4, copies=False).drafter([], ModelPair(model, second))
    many = Engine(longest=60)
    first = many.add(answer(make.session(model, drafter=drafter), families.prompt(9), 9))
    other = many.add(answer(session(), families.prompt(9, seed=2), 9))
    while not (first.is_over or other.is_over):
        many.step()
    assert {n for of, n in together if of is model} == {2}  # each pass of the model is one of both
    assert len([n for of, n in together if of is second]) > 9


def test_a_step_hears_of_those_that_share_its_pass_and_how_long_passes_of_so_many_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, run, heard = [0.0], module.run, list[tuple[int, float | None] | None]()

    def timed(requests: Sequence[ForwardRequest]) -> Any:
        now[0] += sum(request.rows.n_rows for request in requests)
        return run(requests)

    def hears(said: object) -> None:
        if isinstance(said, Step):
            of = said.company
            heard.append(of and (of.n, of.timer and of.timer.plain))

    monkeypatch.setattr(module, "run", timed)
    many = Engine(clock=lambda: now[0])
    many.add(answer(session(), families.prompt(6), 9), hears)
    for _ in range(2):
        many.step()
    other = many.add(answer(session(), families.prompt(20, seed=2), 3))
    while not other.is_over:
        many.step()
    while many.step():
        pass
    # alone, with a chunk, alone, with the other chunk, with the other text, and alone again
    assert heard == [None, (1, None), None, (1, None), *[(2, 2.0)] * 3, None, None]


@pytest.mark.parametrize(("error", "passes"), [(MemoryError, [4, 2, 2, 1, 1]), (ValueError, [4, 1, 1, 1, 1])])
def test_a_pass_is_halved_where_memory_is_short_and_else_each_text_is_alone(
    error: type[Exception], passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, run = list[int](), module.run

    def breaks(requests: Sequence[ForwardRequest], *more: Any) -> list[ForwardResult]:
        ran.append(len(requests))
        if any(request.cache is bad.cache for request in requests):
            raise error
        return run(requests, *more)

    texts = [session() for _ in range(4)]
    bad = texts[3]
    many = Engine()
    tasks = [many.add(answer(text, families.prompt(6), 1)) for text in texts]
    monkeypatch.setattr(module, "run", breaks)
    many.step()
    assert ran == passes
    assert [type(task.error) for task in tasks] == [type(None)] * 3 + [error]


def test_an_outbox_that_fails_ends_its_own_text() -> None:
    ended, many = [], Engine()

    def work() -> Iterator[Any]:
        try:
            yield from session().read(families.prompt(40))
        finally:
            ended.append(True)

    broken = many.add(work(), lambda said: [][said])  # type: ignore[arg-type]
    other = many.add(answer(session(), families.prompt(9), 3))
    while many.step():
        pass
    with pytest.raises(IndexError):
        broken.result()
    assert ended == [True]
    assert other.result() == run_to_end(answer(session(), families.prompt(9), 3))


def test_what_breaks_a_pass_is_thrown_where_its_feed_came_from() -> None:
    text = session()
    run_to_end(text.read(families.prompt(9)))

    def mended() -> Passes[str]:
        yield ForwardRequest(text.lm, Rows.chain([1], 8), text.cache)  # while the others read
        try:
            yield ForwardRequest(text.lm, Rows.chain([1], 8), None)  # type: ignore[arg-type]
        except AttributeError:
            made = yield ForwardRequest(text.lm, Rows.chain([1], 8), text.cache, want=[0])
            return f"{made.logits.shape[0]} row"
        return "nothing broke"

    assert run_to_end(mended()) == "1 row"
    many = Engine()
    works = answer(session(), families.prompt(9), 3), mended(), answer(session(), families.prompt(9), 3)
    first, broke, last = [many.add(work) for work in works]  # type: ignore[var-annotated]
    while many.step():
        pass
    assert broke.result() == "1 row"
    assert first.result() == last.result() == run_to_end(answer(session(), families.prompt(9), 3))


def test_closing_the_events_closes_the_work() -> None:
    ended = []

    def work() -> Iterator[Any]:
        try:
            yield from session().read(families.prompt(40))
        finally:
            ended.append(True)

    saying = iterate_events(work())  # type: ignore[arg-type]
    next(saying)
    saying.close()
    assert ended == [True]
