"""Log-probabilities of tokens: the model's own, the same bits in any company, and refused where there are none.

tests/exact holds those of drafted texts and of texts side by side to those of plain decoding.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvcli
from kvcli.api import End, Text, Thought, TokenScore, turn_of
from kvcli.chat.scores import refuse_scores
from kvcli.chat.text_session import TextSession
from kvcli.engine.sequence.token_scores import BLOCK, score_tokens
from kvcli.errors import BadInput
from kvcli.models.grammar import Grammar
from tests import test_out_of_memory as out_of_memory
from tests.test_thinking import loaded


@cache
def demo() -> Any:
    return kvcli.load("demo", profile="exact")


QUESTION = "Hello, who are you? List the boxes: box 1, box 2, box 3, box 4."


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scores_are_the_log_softmax_with_ties_by_id(dtype: torch.dtype) -> None:
    logits = (torch.randn(BLOCK + 3, 301, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    logits[1, 7:20] = logits[1].max() + 1  # equal ones
    logits[2, 5], logits[2, 6], logits[2, 9:] = 0.0, -0.0, -torch.inf
    ids = torch.arange(len(logits)) + 30
    ids[2] = 4
    found = score_tokens(logits, ids, 20)
    logp = torch.log_softmax(logits.double(), dim=-1)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :20]
    assert torch.equal(found[:, 1:21].long(), order)
    torch.testing.assert_close(found[:, 0], logp.gather(-1, ids.unsqueeze(-1))[:, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[:, 21:], logp.gather(-1, order), rtol=0, atol=1e-12)
    for row in (0, 1, 2, BLOCK, BLOCK + 2):
        assert torch.equal(score_tokens(logits[row : row + 1], ids[row : row + 1], 20)[0], found[row])
    assert torch.equal(score_tokens(logits, ids, 0)[:, 0], found[:, 0])
    assert score_tokens(logits[:, :3], ids * 0, 20).shape == (len(logits), 1 + 2 * 3)


@pytest.mark.parametrize("sample", [{}, {"temperature": 0.9, "seed": 3, "top_k": 20, "repetition_penalty": 1.2}])
def test_scores_are_raw_and_in_every_event(sample: dict[str, Any]) -> None:
    """Behind a prompt and its answer, the answer's tokens are of a prompt, too, with the same bits."""
    events = list(demo().stream(QUESTION, max_new_tokens=12, ignore_eos=True, top_logprobs=4, **sample))
    turn = events[-1].turn
    assert [score.id for score in turn.scores] == list(turn.ids)
    assert all(
        len(score.top) == 4 and score.top == tuple(sorted(score.top, key=lambda t: -t[1])) for score in turn.scores
    )
    assert tuple(score for e in events if isinstance(e, Text | Thought) for score in e.scores) == turn.scores
    prompt = demo().encode(QUESTION)
    again = demo().generate([*prompt, *turn.ids], 1, top_logprobs=4, prompt_logprobs=True)
    assert again.stats.cached == 0
    assert again.prompt_scores[0] == TokenScore(prompt[0], None)
    assert [score.id for score in again.prompt_scores] == [*prompt, *turn.ids]
    assert again.prompt_scores[len(prompt) :] == turn.scores


def test_scores_are_those_of_the_row_under_any_profile_and_in_company() -> None:
    how = {"max_new_tokens": 40, "top_logprobs": 5, "ignore_eos": True, "stop_loops": 0}
    want = demo().generate(QUESTION, **how)
    texts = [
        demo().open(profile=name, set={"spec.adaptive": False} if name != "exact" else {})
        for name in ("exact", "ngram", "fafo")
    ]
    tasks = kvcli.generate_together(*(text.answer(QUESTION, **how) for text in texts))
    turns = [task.result() for task in tasks]
    assert turns[1].stats.accepted_tokens + turns[2].stats.accepted_tokens > 0
    assert [turn.scores == want.scores for turn in turns] == [True] * 3


def test_a_prompt_is_scored_in_any_chunks_and_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    long = QUESTION * 9
    whole = demo().open().generate(long, 1, prompt_logprobs=True, top_logprobs=1).prompt_scores
    monkeypatch.setattr("kvcli.chat.scores.ROWS", 7)
    texts = [demo().open(), demo().open(profile="ngram")]
    rows = [text.session.chunk_rows for text in texts]
    asked = {"max_new_tokens": 2, "prompt_logprobs": True, "top_logprobs": 1}
    tasks = kvcli.generate_together(*(text.answer(long, **asked) for text in texts))
    assert [task.result().prompt_scores == whole for task in tasks] == [True, True]
    assert [text.session.chunk_rows for text in texts] == rows


def test_scores_of_a_prompt_change_no_answer_under_a_profile_that_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcli.chat.scores.ROWS", 7)
    turns = [
        demo().open("lean", {"kv.residual": 16, "kv.group": 16}).generate(QUESTION * 5, 4, top_logprobs=1, **how)
        for how in ({}, {"prompt_logprobs": True})
    ]
    assert turns[0].scores == turns[1].scores


def test_nothing_is_scored_unless_asked() -> None:
    turn = demo().generate("Hello", 3)
    assert turn.scores == turn.prompt_scores == ()
    assert demo().generate("Hello", 3, prompt_logprobs=True).scores == ()


def test_a_constrained_answer_has_the_scores_of_the_free_model() -> None:
    pytest.importorskip("llguidance")
    free = demo().generate("Hello", 1, top_logprobs=20)
    held = demo().generate(
        "Hello", 6, top_logprobs=20, constraint=demo().constraint(Grammar.of_schema({"enum": ["no"]}))
    )
    assert held.scores[0].top == free.scores[0].top
    assert held.scores[0].id not in [token for token, _ in free.scores[0].top[:1]]
    assert held.scores[0].logprob < free.scores[0].top[0][1]


def test_the_forced_end_of_a_thought_has_no_score(tmp_path: Any) -> None:
    with loaded(tmp_path, "qwen3", profile="ngram", thinking_max_tokens=4) as model:
        events = list(model.chat().stream("2+2?", max_new_tokens=7, top_logprobs=0))
        turn = events[-1].turn
        assert [score.id for score in turn.scores] == list(turn.ids)
        assert [at for at, score in enumerate(turn.scores) if score.logprob is None] == [*range(4, turn.stats.thinking)]
        said = tuple(score for e in events if isinstance(e, Text | Thought) for score in e.scores)
        assert said == turn.scores[:-1]  # no text comes with the stop token


@pytest.mark.parametrize("at", [7, 40])
def test_tokens_of_a_pass_that_ran_out_of_memory_are_scored(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out while a pass is committed, and after its tokens were added."""
    how = {"max_new_tokens": 20, "top_logprobs": 2}
    want = out_of_memory.model().generate(out_of_memory.text(), **how)
    text: TextSession = out_of_memory.model(memory={"fallbacks": ["prefill.chunk=-50%", "prefill.chunk=-50%"]})
    out_of_memory.failing(text, monkeypatch, at)
    calls, real = iter(range(10**9)), type(text.session.drafter).observe

    def observe(drafter: Any, step: Any) -> Any:
        if next(calls) == 5:
            raise MemoryError("full")
        return real(drafter, step)

    monkeypatch.setattr(type(text.session.drafter), "observe", observe)
    turn = text.generate(out_of_memory.text(), **how)
    assert len(turn.stats.shortages) == 2
    assert (turn.ids, turn.scores) == (want.ids, want.scores)


@pytest.mark.parametrize(
    ("settings", "options", "says"),
    [
        ({}, {"top_logprobs": 21}, "0 to 20"),
        ({}, {"top_logprobs": -1}, "0 to 20"),
        ({"prefill.order": "layers"}, {"prompt_logprobs": True}, "--set prefill.order=chunks"),
        ({"prune.method": "random", "exactness": "approx"}, {"prompt_logprobs": True}, "--set prune.method=none"),
    ],
)
def test_scores_that_do_not_exist_are_refused(settings: dict[str, Any], options: dict[str, Any], says: str) -> None:
    session = demo().open(set=settings)
    with pytest.raises(BadInput) as caught:
        session.generate("Hello", 2, **options)
    assert any(says in way for way in caught.value.try_)
    assert caught.value.code == ("bad_logprobs" if says == "0 to 20" else "no_logprobs")
    if "prompt_logprobs" in options:
        assert len(session.generate("Hello", 2, top_logprobs=1).scores) == 2


@pytest.mark.parametrize(("top", "of_prompt", "condensed", "says"), [(0, False, 0, "steps"), (None, True, 4, "drop")])
def test_tokens_of_another_model_and_condensed_ids_have_no_scores(
    top: int | None, of_prompt: bool, condensed: int, says: str
) -> None:
    of = SimpleNamespace
    profile = of(
        name="mine",
        reasoning_steps=of(takes="steps"),
        decode=of(writer=None),
        prune=of(describe_read=""),
        reuse=of(describe_reused=""),
        prefill=of(order="chunks"),
    )
    with pytest.raises(BadInput, match="profile mine") as caught:
        refuse_scores(of(condensed=condensed), profile, top, of_prompt)
    assert says in caught.value.try_[0]


@pytest.mark.parametrize("profile", ["fafo", "kvzip"])
def test_samples_are_the_answers_of_their_seeds_and_read_the_prompt_once(profile: str) -> None:
    how: dict[str, Any] = {"temperature": 1.5, "max_new_tokens": 8, "top_logprobs": 1, "ignore_eos": True}
    with demo().open(profile=profile) as session, demo().open(profile=profile) as alone:
        turns = [turn_of(events) for events in session.samples(QUESTION, 3, seed=7, **how)]
        want = [alone.generate(QUESTION, seed=7 + i, **how) for i in range(3)]
        assert [(turn.ids, turn.scores) for turn in turns] == [(turn.ids, turn.scores) for turn in want]
        assert len({turn.ids for turn in turns}) == 3
        assert turns[0].stats.cached == 0
        assert {turn.stats.cached for turn in turns[1:]} == {len(demo().encode(QUESTION)) - 1}
        with pytest.raises(BadInput, match="temperature is 0") as caught:
            next(session.samples(QUESTION, 3, temperature=0.0))
        assert caught.value.code == "same_samples"


def test_samples_after_a_cancel_or_an_error_are_none() -> None:
    with demo().open() as session:
        turns = [turn_of(events) for events in session.samples("Hello", 3, temperature=1.0, cancel=lambda: True)]
        assert [turn.finish for turn in turns] == ["interrupted"]
        with pytest.raises(BadInput, match="top_logprobs"):
            [turn_of(events) for events in session.samples("Hello", 3, temperature=1.0, top_logprobs=99)]


def test_the_end_of_a_stream_is_the_turn_with_scores() -> None:
    *_, end = demo().stream("Hello", max_new_tokens=2, top_logprobs=0)
    assert isinstance(end, End)
    assert [score.top for score in end.turn.scores] == [(), ()]
