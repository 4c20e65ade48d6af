"""Steps of a second model: accepted or replaced, and where nothing but the same is accepted the text is the model's."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import pytest
import torch

from kvcli import load
from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.engine import generate_together, run_to_end
from kvcli.engine.forward_request import Passes
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import install_kernels, wrap_lm
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.errors import BadConfig, BadInput
from kvcli.kernels.native import native, why_not
from kvcli.kv.footprint import ModelSizes
from kvcli.kv.tiers.dense import Dense
from kvcli.methods.answer_writer import answer_writer
from kvcli.methods.steps.judge import Judge
from kvcli.methods.steps.lookahead_reasoning import CHECKPOINTS, LookaheadReasoning
from kvcli.methods.steps.step_writer import Writer
from kvcli.models.retokenizer import TokenMapping
from kvcli.settings.profile import Profile
from tests import families, make, small_tokenizers

NEW, STOP = 60, 96
SAMPLERS = {"greedy": Sampler(), "drawn": Sampler(temperature=0.5, top_k=24, seed=3)}
FAMILIES = ["llama", "gemma3", "gpt_oss"]  # plain, with windows, with sinks
STEPS = {"method": "lookahead", "model": "demo"}


@cache
def lm(family: str = "llama", dtype: torch.dtype = torch.float64) -> LM:
    found = make.model(family, dtype)
    if dtype != torch.float64:
        install_kernels(found)
    return found


@cache
def near(dtype: torch.dtype) -> LM:
    """The model with other weights: often of the same mind, and not always."""
    model, noise = families.build("llama", dtype), torch.Generator().manual_seed(7)
    for weight in model.parameters():
        weight.add_(torch.randn(weight.shape, generator=noise, dtype=torch.float64).to(dtype) * 0.01)
    found = wrap_lm(model)
    if dtype != torch.float64:
        install_kernels(found)
    return found


def opened(model: LM, sampler: Sampler, kv: Dense | None = None) -> GenerationSession:
    return make.session(model, kv, sampler=sampler, chunk=13)


def writer(draft: LM, **settings: Any) -> Writer:
    """Steps end at every third token or so."""
    return Writer(LookaheadReasoning(**settings), opened(draft, Sampler()), lambda ids: ids[-1] % 3 == 0)


def written(model: LM, sampler: Sampler, by: Writer | None) -> Passes[list[int]]:
    session = opened(model, sampler)
    text = families.prompt(40)
    while (yield from session.prefill_chunk(text)):
        pass
    while (left := 40 + NEW - len(session.ids)) > 0 and session.ids[-1] != STOP:
        yield from (by.step(session, {STOP}, left) if by is not None else session.step({STOP}, left))
        assert session.committed == len(session.ids) - 1 == session.cache.n_slots(0)
    assert len(session.ids) <= 40 + NEW
    return session.ids


@cache
def plain(family: str, sampler: str, dtype: torch.dtype) -> list[int]:
    return run_to_end(written(lm(family, dtype), SAMPLERS[sampler], None))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float64, {"judge": "exact"}),
        (torch.float64, {"judge": "likely", "likely": 1.0}),
        (torch.float64, {"alike": 1.0}),
        pytest.param(torch.bfloat16, {"alike": 1.0}, marks=pytest.mark.skipif(native() is None, reason=why_not())),
    ],
    ids=str,
)
def test_where_only_the_same_is_accepted_the_text_is_the_models_own(
    dtype: torch.dtype, settings: dict[str, Any], sampler: str
) -> None:
    by = writer(near(dtype), ahead=4, tokens=7, **settings)
    assert run_to_end(written(lm("llama", dtype), SAMPLERS[sampler], by)) == plain("llama", sampler, dtype)
    assert 0 < by.same == by.accepted < by.drafted, "some were, some were not"


@pytest.mark.parametrize("family", FAMILIES)
def test_with_windows_and_sinks_too_by_a_model_of_other_words(family: str) -> None:
    by = writer(make.model("qwen2", torch.float64, vocab_size=91), alike=1.0, tokens=6)
    assert run_to_end(written(lm(family), SAMPLERS["greedy"], by)) == plain(family, "greedy", torch.float64)
    by = writer(lm(family), alike=1.0, tokens=6)
    assert run_to_end(written(lm(family), SAMPLERS["greedy"], by)) == plain(family, "greedy", torch.float64)
    assert by.same == by.accepted == by.drafted > 9, "of its own steps a model takes all"


def test_states_of_a_smaller_hybrid_count_and_are_those_that_were_planned() -> None:
    draft = make.model("lfm2", torch.float64)
    by = writer(draft, ahead=2, tokens=3)
    run_to_end(written(lm(), SAMPLERS["greedy"], by))
    layer = {use.layer: use.nbytes for use in by.usage() if use.slots == 0}
    one = dict.fromkeys(layer, 0)
    for (of, _), t in draft.recurrent_layers.like.tensors:
        one[of] += t.nbytes
    planned = LookaheadReasoning().draft_footprint(0, ModelSizes(state=1)).beside
    assert layer
    assert all(one[of] <= layer[of] <= (planned - 1) * one[of] for of in layer)
    assert CHECKPOINTS == planned - 2 == by._draft.states._most


def test_texts_side_by_side_do_not_know_of_each_other() -> None:
    each = [written(lm(), SAMPLERS[name], writer(near(torch.float64), alike=1.0)) for name in SAMPLERS]
    assert [done.result() for done in generate_together(*each)] == [
        plain("llama", name, torch.float64) for name in SAMPLERS
    ]


@pytest.mark.parametrize("settings", [{"alike": 0.0}, {"judge": "likely", "likely": 0.0}], ids=str)
def test_where_all_is_accepted_the_text_is_the_other_models_but_for_what_follows_a_round(
    settings: dict[str, Any],
) -> None:
    other, by = near(torch.float64), writer(near(torch.float64), ahead=2, tokens=4, **settings)
    text = run_to_end(written(lm(), SAMPLERS["greedy"], by))
    assert by.accepted == by.drafted > by.same
    session, differs = opened(other, Sampler()), 0
    run_to_end(session.read(text))
    for at in reversed(range(40, len(text))):
        session.rewind(at)
        differs += run_to_end(session.step()).new[0] != text[at]
    assert text != plain("llama", "greedy", torch.float64)
    assert differs <= by.drafted / 2, "one token a round is the model's"


def test_a_step_that_is_refused_is_the_models_own() -> None:
    """Each token of the text is one of the two models' first choice, and a judge that accepts some is in between."""
    by = writer(near(torch.float64), ahead=3, tokens=8, judge="alike", alike=0.5)
    text = run_to_end(written(lm(), SAMPLERS["greedy"], by))
    assert by.same < by.accepted < by.drafted
    sessions = [opened(model, Sampler()) for model in (lm(), near(torch.float64))]
    for session in sessions:
        run_to_end(session.read(text))
    for at in reversed(range(40, len(text))):
        for session in sessions:
            session.rewind(at)
        assert text[at] in [run_to_end(session.step()).new[0] for session in sessions], at


@pytest.mark.parametrize("alpha", [0.05, 0.3])
def test_the_share_of_wrong_steps_stays_below_what_was_chosen(alpha: float) -> None:
    """Whatever the steps are: here all those are wrong that the judge is surest of, and later all are."""
    settings, random = LookaheadReasoning(judge="likely", likely=0.2, alpha=alpha, audit=3), Random(5)
    judge, wrong, n = Judge(settings), 0, 0
    for at in range(6000):
        likelihood = random.random()
        before = judge.threshold
        if judge.looks(lambda p=likelihood: p) is None:
            is_wrong = likelihood > 0.6 or at > 4000
            assert judge.compares([1, 2], [3, 4] if is_wrong else [1, 2]) is not is_wrong
            wrong += is_wrong
        if judge.threshold != before:
            n += 1
            assert wrong <= alpha * n + (1 + settings.rate - settings.likely) / settings.rate
    assert n == 2000
    assert wrong > 0


def says(error: BadConfig | BadInput) -> str:
    return "\n".join([error.message, *error.lines, *error.try_])


def test_it_is_never_exact_and_refuses_what_it_cannot_keep() -> None:
    with pytest.raises(BadConfig) as caught:
        Profile.load("exact").replace(reasoning_steps=STEPS)
    assert '"exact" is impossible' in says(caught.value)
    for others in ({"spec": {"method": "ngram"}}, {"policy": {"name": "window"}}):
        with pytest.raises(BadConfig) as caught:
            Profile.load("exact").replace(exactness="approx", reasoning_steps=STEPS, **others)
        assert '"lookahead" needs' in says(caught.value)
    with pytest.raises(BadConfig) as caught:
        Profile.load("exact").replace(exactness="approx", reasoning_steps={"method": "lookahead", "alpha": 0.1})
    assert 'judge = "likely"' in says(caught.value)
    with pytest.raises(BadConfig) as caught:
        load("demo", "exact", {"exactness": "approx", "reasoning_steps.method": "lookahead"})
    assert "--set reasoning_steps.model=MODEL" in says(caught.value)
    with pytest.raises(BadInput) as refused:
        run_to_end(written(lm(), Sampler(repetition_penalty=1.2), writer(lm())))
    assert "--set sample.repetition_penalty=1" in says(refused.value)
    by_steps = Profile.load("exact").replace(exactness="approx", reasoning_steps=STEPS)
    words, its = small_tokenizers.demo(), small_tokenizers.metaspace()
    with pytest.raises(BadConfig) as caught:
        answer_writer(by_steps, lm(), ModelPair(lm(), lm(), TokenMapping(words, its)), words)
    assert caught.value.code == "other_tokenizer"
    with pytest.raises(BadConfig) as caught:
        load("demo").under(by_steps).new_session()
    assert caught.value.code == "only_answers"


def test_an_answer_by_steps_says_so() -> None:
    """The bundled model writes ahead for itself."""
    steps = {
        "exactness": "approx",
        "spec.method": "off",
        "reasoning_steps.method": "lookahead",
        "reasoning_steps.model": "demo",
    }
    ask = "Repeat after me: one two three four five."
    with load("demo", "exact", {"sample.temperature": 0.0}) as model:
        want = model.generate(ask, max_new_tokens=40)
        with model.open(set=steps | {"sample.temperature": 0.0}) as text:
            turn = text.generate(ask, max_new_tokens=40)
    assert turn.ids == want.ids
    assert "takes steps of demo" in turn.stats.approx
    assert turn.stats.accepted_tokens == turn.stats.draft_tokens > 0
    assert turn.stats.kv["draft"] > 0
    assert text.promise == "approx"
