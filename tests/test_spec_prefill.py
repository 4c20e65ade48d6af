"""Chunks of a prompt that a draft model chooses (SpecPrefill), and the second model that methods of a profile share."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvcli
from kvcli.demo.report import write_report
from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.errors import BadConfig, BadModel, ContextOverflow
from kvcli.methods.prune.spec_prefill import SpecPrefill
from kvcli.settings.profile import Profile, load_profile
from tests import families, make, small_tokenizers
from tests.bench.spec_prefill import chosen, importance

torch.set_num_threads(1)
PLAIN = SpecPrefill(model="small", keep=0.3, chunk=4, pool=3, recent=1, sinks=0, protect=False, min_prompt=8, ahead=0)
N = 61


@cache
def large() -> LM:
    return make.model("llama", torch.float64)


@cache
def small(name: str = "qwen2") -> LM:
    return make.model(name, torch.float64)


def session(pruning: SpecPrefill = PLAIN, draft: LM | None = None, **more: Any) -> GenerationSession:
    return make.session(large(), pruning=pruning, pair=ModelPair(large(), draft or small()), chunk=16, **more)


def read(s: GenerationSession, ids: list[int]) -> GenerationSession:
    s.start_answer(ids, Sampler())
    while run_to_end(s.prefill_chunk(ids)):
        pass
    return s


def stored(s: GenerationSession) -> list[int]:
    """Positions that the layers have, which are the same in all."""
    layers = [s.cache.slots(layer).pos for layer in range(s.lm.n_layers)]
    assert all(pos.tolist() == layers[0][:1].tolist() * len(pos) for pos in layers)
    found: list[int] = layers[0][0].tolist()
    return found


def by_reference(ids: list[int], draft: LM, of: SpecPrefill) -> Any:
    """Score of each token by the plain form of the rule (tests/bench/spec_prefill.py)."""
    other = SimpleNamespace(lm=draft, new_session=lambda: make.session(draft))
    return importance(other, of.ahead, ids, of.pool)


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
@pytest.mark.parametrize("ahead", [0, 3])
def test_chunks_are_those_of_the_reference(name: str, ahead: int) -> None:
    of, ids = replace(PLAIN, ahead=ahead), families.prompt(N, seed=5)
    want = chosen(by_reference(ids, small(name), of), of.keep, set(), of.chunk)
    assert stored(read(session(of, small(name)), ids)) == sorted({*want, N - 2} - {N - 1})
    assert len(want) < 0.4 * N


def test_a_later_prompt_is_judged_within_the_whole_text() -> None:
    ids = families.prompt(N, seed=5)
    s = read(session(), ids)
    list(iterate_events(s.stream(7)))
    earlier, text = len(s.ids), [*s.ids, *families.prompt(40, seed=8)]
    start = earlier - 1
    before = stored(s)
    read(s, text)
    scores = by_reference(text, small(), PLAIN)[start:]
    want = {start + row for row in chosen(scores, PLAIN.keep, set(), PLAIN.chunk)}
    assert stored(s) == sorted({*before, *want, len(text) - 2} - {len(text) - 1})
    alone = by_reference(text[start:], small(), PLAIN)
    assert chosen(alone, PLAIN.keep, set(), PLAIN.chunk) != chosen(scores, PLAIN.keep, set(), PLAIN.chunk)


def test_protected_tokens_are_read_beside_the_share() -> None:
    ids = families.prompt(N, seed=5)
    plain, guarded = stored(read(session(), ids)), stored(read(session(replace(PLAIN, sinks=3, recent=9)), ids))
    assert guarded == sorted({*plain, 0, 1, 2, *range(N - 10, N - 1)})


def test_with_all_kept_nothing_changes_and_short_prompts_are_read_whole() -> None:
    ids = families.prompt(N, seed=5)
    want = list(iterate_events(read(make.session(large(), chunk=16), ids).stream(12)))
    for of in (replace(PLAIN, keep=1.0), replace(PLAIN, min_prompt=N)):
        got = list(iterate_events(read(session(of), ids).stream(12)))
        assert [step.new for step in got] == [step.new for step in want]


def test_a_draft_model_with_recurrent_layers_chooses_too_and_one_that_answers_is_refused() -> None:
    hybrid = make.model("qwen3_5_text", torch.float64)
    assert len(stored(read(session(draft=hybrid), families.prompt(N, seed=5)))) < 0.4 * N
    with pytest.raises(BadModel, match="has recurrent layers: they read every token of a prompt"):
        make.session(hybrid, pruning=PLAIN)


def test_what_the_draft_model_cannot_read_is_refused_before_anything_is_stored() -> None:
    s, short = session(), small()
    limit, short.limit = short.limit, 40
    try:
        with pytest.raises(ContextOverflow, match="small reads at most 40 tokens, not 61") as found:
            read(s, families.prompt(N))
        assert "--set prune.method=none" in found.value.try_
        assert not s.committed
        assert stored(read(s, families.prompt(N)[:40]))
    finally:
        short.limit = limit


def test_another_tokenizer_is_refused() -> None:
    pair = ModelPair(large(), small(), small_tokenizers)  # type: ignore[arg-type]
    with pytest.raises(BadConfig, match=r"prune\.model = small has another tokenizer than") as found:
        PLAIN.companion(pair)
    assert found.value.code == "other_tokenizer"


OF_DEMO = {"exactness": "approx", "prune.method": "spec_prefill", "load.verify": False, "load.device": "cpu"}
PROMPT = "What is the reading of gauge Zemford? " * 12


def profile(**sets: object) -> Profile:
    return load_profile("exact").replace(**OF_DEMO | sets)


def test_methods_share_the_second_model_and_two_are_refused_by_name() -> None:
    drafts: dict[str, object] = {"spec.method": "model", "spec.model": "demo-small"}
    assert profile(**{"prune.model": "demo-small"}).second == profile(**{"prune.model": "demo-small"} | drafts).second
    assert profile(**{"prune.model": "demo-small"} | drafts).second_models.keys() == {"prune", "spec"}
    for changes in ({"prune.model": "demo"}, {"prune.model": "demo-small", "prune.quant": "int8"}):
        with pytest.raises(BadConfig, match="differ: one draft model is loaded") as found:
            _ = profile(**drafts | changes).second
        assert found.value.code == "two_draft_models"
        assert "--set prune.model=demo-small --set spec.model=demo-small" in found.value.try_
    with pytest.raises(BadConfig, match=r'prune\.method = "spec_prefill" needs a draft model'):
        _ = profile().second
    assert load_profile("exact").second is None


def test_drafts_of_the_same_model_change_no_text() -> None:
    with kvcli.load("demo", "exact", set=OF_DEMO | {"prune.model": "demo-small", "prune.min_prompt": 64}) as model:
        assert any("in chunks of 32 that the draft model attends to most" in said for said in model.cautions)
        want = model.generate(PROMPT, max_new_tokens=24)
        drafts = {"method": "model", "model": "demo-small", "adaptive": False, "copies": False}
        drafting = model.with_profile(model.profile.replace(spec=drafts))
        assert drafting._draft() is model._draft()
        got = drafting.generate(PROMPT, max_new_tokens=24)
        assert (got.ids, got.stats.approx) == (want.ids, want.stats.approx)
        assert "chosen by a draft model" in want.stats.approx
        assert got.stats.draft_tokens


def test_without_the_draft_model_all_is_read_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("kvcli.chat.model.load_draft_model", fails)
    with kvcli.load("demo", "exact", set=OF_DEMO | {"prune.model": "demo-small"}) as model:
        assert "prune.method is none: draft model demo-small cannot be loaded: out of memory" in model.cautions
        assert not model.profile.prune.describe_read


def test_a_chat_finds_what_the_draft_model_writes_of() -> None:
    """In a chat a prompt ends with the template; what asks for the fact are the tokens that are written after it."""
    changes = {
        "exactness": "approx",
        "prune.method": "spec_prefill",
        "prune.model": "demo-small",
        "prune.min_prompt": 64,
    }
    asked = f"{write_report(Random('q0'), 1500, 0.35).text}\n\n{{}}"
    found = {}
    for ahead in (0, 8):
        with kvcli.load("demo", profile="exact", set={**changes, "prune.ahead": ahead}) as model:
            found[ahead] = model.chat().send(asked.format("What is the stock of depot Danmar?")).text
    assert "83 carts of salt" in found[8]
    assert "83 carts of salt" not in found[0]
