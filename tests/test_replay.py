"""Finding T by what predictions lose, and what policies are told of a text: learned sinks, kinds, probed queries."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcli.engine.engine import iterate_events, run, run_to_end
from kvcli.engine.forward_request import ForwardRequest, Passes, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import wrap_lm
from kvcli.engine.policy.policy import (
    CompressionPoint,
    LayerContext,
    PerLayerPolicy,
    PolicyRequirements,
    ProtectedTokens,
)
from kvcli.errors import BadConfig
from kvcli.kv.slots import Masks, Slots, compact
from kvcli.methods.policies.fastgen.policy import FastGen
from kvcli.methods.policies.fastgen.recovery import recover
from kvcli.policies.scoring.replay import Replay
from kvcli.settings.profile import load_profile
from tests import families, make
from tests.policies import KeepAll
from tests.test_fastgen import SMALL, count, lm, prompt, session

AUTO = dataclasses.replace(SMALL, recovery="auto", replay=12, kl_max=1.0)


# --- T by calibration


class Trial(PerLayerPolicy):
    """Keeps what `stay` says of positions [T], once the prompt is read, and notes what that loses."""

    replays = 9

    def __init__(self, stay: Tensor) -> None:
        self.stay, self.lost = stay, list[float]()

    def mask(self, s: Slots, at: LayerContext) -> Tensor:
        return (self.stay[s.pos.clamp(min=0).long()] | (at.phase == "reading")) & (s.pos >= 0)

    def select(self, at: CompressionPoint) -> Passes[Masks]:  # type: ignore[override]
        if at.phase == "read":
            replay = Replay(at, self.replays)
            for pick in (self.mask, lambda s, at: s.pos >= 0):
                self.lost.append((yield from replay.loss(pick)))
        return super().select(at)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_what_is_lost_is_the_kl_of_the_newest_tokens_by_the_kv_cache_that_is_left(family: str) -> None:
    model, ids = lm(family), prompt(60)
    n, start = len(ids) - 1, len(ids) - 1 - Trial.replays
    mask = torch.arange(n) % 3 != 1
    s = session(None, model, policy=(trial := Trial(mask)))
    run_to_end(s.read(ids))
    rows = Rows.chain(ids[start:n], start)

    def predicted(kept: Tensor | None) -> Tensor:
        full = session(None, model)
        run_to_end(full.read([*ids[:start], 0]))
        kv = make.dense(model)
        for layer in range(model.n_layers):
            held = full.cache.slots(layer)
            kv.put(layer, compact(held, held.pos >= 0 if kept is None else kept[held.pos.long()]))
        return run([ForwardRequest(model, rows, kv, want=range(rows.n_rows))])[0].logits.log_softmax(-1)

    whole, some = predicted(None), predicted(mask)
    want = float((whole.exp() * (whole - some)).sum(-1).mean())
    assert want > 0.01
    assert trial.lost[0] == pytest.approx(want, rel=1e-6)
    assert trial.lost[1] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("paper", [False, True])
def test_the_lowest_t_that_predicts_well_enough_is_found(paper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own = dataclasses.replace(
        FastGen(paper=True, compression_interval=3, sinks=2) if paper else SMALL, recovery="auto", replay=12
    )
    kept = []
    for most in (1e-9, 0.05, 1.0, 1e9):
        s = session(dataclasses.replace(own, kl_max=most), lm())
        lost: list[float] = []
        with monkeypatch.context() as patch:
            patch.setattr(Replay, "loss", noting(Replay.loss, lambda found: lost.append(found)))  # noqa: B023
            run_to_end(s.read(prompt()))
        assert min(lost) <= most or s.policy_record.state.recovery == 1.0
        kept.append(sum(count(s)))
    assert kept == sorted(kept, reverse=True)
    assert kept[0] == s.committed * s.lm.n_layers * s.lm.n_kv_heads, "nothing may be lost, so nothing is"
    assert kept[-1] < kept[0] / 2
    assert s.policy_record.state.recovery == 2.0**-6, "anything may be lost: as low as six halves go"


def noting(inner: Any, note: Any) -> Any:
    def loss(self: Replay, pick: Any) -> Passes[float]:
        found = yield from inner(self, pick)
        note(found)
        return found

    return loss


def test_what_is_tried_is_what_is_kept_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    s = session(dataclasses.replace(AUTO, kl_max=0.05), lm())
    heads, seen = s.policy_record.state, dict[int, Tensor]()
    tried = heads._tried

    def noted(slots: Slots, at: LayerContext) -> Tensor:
        seen[at.layer] = slots.pos[0][tried(slots, at)[0]]
        return tried(slots, at)

    heads._tried = noted
    low: list[tuple[float, dict[int, Tensor]]] = []
    monkeypatch.setattr(Replay, "loss", noting(Replay.loss, lambda found: low.append((heads.recovery, dict(seen)))))
    run_to_end(s.read(prompt()))
    (chosen,) = [masks for t, masks in low if t == heads.recovery]
    for layer, pos in chosen.items():
        held = s.cache.slots(layer).pos[0]
        assert sorted(held[held >= 0].tolist()) == sorted(pos.tolist())


def test_a_text_too_short_to_predict_again_stays_whole_and_another_text_begins_anew() -> None:
    s = session(AUTO, lm())
    run_to_end(s.read(prompt()[:2]))
    assert count(s) == [2] * 3
    s.rewind(0)
    run_to_end(s.read(prompt()))
    first = count(s)
    assert sum(first) < s.committed * 6
    s.rewind(0)
    run_to_end(s.read(prompt()))
    assert count(s) == first


def test_where_nothing_was_measured_nothing_is_predicted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []

    def counted(feed: ForwardRequest) -> ForwardRequest:
        passes.append(feed)
        return feed

    s = session(AUTO, lm())
    monkeypatch.setattr(
        "kvcli.policies.scoring.replay.ForwardRequest", lambda *args, **more: counted(ForwardRequest(*args, **more))
    )
    run_to_end(s.read(prompt()))
    assert len(passes) == 1 + 6, "once with everything, and six halves"
    list(iterate_events(s.stream(6)))
    run_to_end(s.read(families.prompt(5, seed=8)))
    assert len(passes) == 1 + 6, "too short to be measured"
    run_to_end(s.read(families.prompt(80, seed=8)))
    assert len(passes) == 2 * (1 + 6)


def test_a_budget_leaves_no_t_to_be_found() -> None:
    with pytest.raises(BadConfig) as caught:
        load_profile("fastgen").replace(policy={"recovery": "auto"})
    assert 'leaves nothing for recovery = "auto" to find' in "\n".join(caught.value.lines)
    found = load_profile("fastgen").replace(policy={"recovery": "auto", "keep": 0.0, "kl_max": 0.1, "replay": 32})
    assert (found.policy.recovery, found.policy.kl_max, found.policy.replay) == ("auto", 0.1, 32)


# --- what a policy is told


class Ear(KeepAll):
    """Keeps everything and notes each moment."""

    def __init__(self, **more: Any) -> None:
        self.heard: list[LayerContext] = []
        self.more = more

    def requirements(self, lm: LM) -> PolicyRequirements:
        return PolicyRequirements(probes=lambda n: range(0, n, 5), **self.more)

    def mask(self, s: Slots, at: LayerContext) -> Tensor:
        self.heard.append(at)
        return super().mask(s, at)


def test_learned_sinks_take_attention_from_what_heads_recover() -> None:
    model = sinking()
    s = session(None, model, policy=(ear := Ear()))
    run_to_end(s.read(prompt(60)))
    read = [at for at in ear.heard if at.phase == "read"]
    own = [layer.self_attn.sinks for layer in model.model.model.layers]
    assert [torch.equal(at.sink, each) for at, each in zip(read, own, strict=True)] == [True] * 3  # type: ignore[arg-type]
    at = read[1]
    assert at.window is None
    kinds = torch.zeros(59, dtype=torch.int8)
    found = recover(at.q, at.q_pos, slots := s.cache.slots(1), kinds, SMALL, at.scale, sink=at.sink)
    q, k = at.q.view(2, 2, -1, 16), slots.k  # [K, G, m, D]
    score = (q @ k.transpose(1, 2).unsqueeze(1)) * at.scale
    score = score.masked_fill(slots.pos[:, None, None] > at.q_pos.view(1, 1, -1, 1), -torch.inf)
    sink = at.sink.view(2, 2, 1, 1).expand(-1, -1, score.shape[2], 1)  # type: ignore[union-attr]
    p = torch.cat((score, sink.double()), 3).softmax(3)
    kept = at.q_pos.view(1, 1, -1, 1) - slots.pos[:, None, None] < SMALL.recent
    kept |= slots.pos[:, None, None] < SMALL.sinks
    want = (p[..., :-1] * kept).sum(-1) + p[..., -1]
    torch.testing.assert_close(found.mass[0], want, rtol=0, atol=1e-9)
    assert float(p[..., -1].mean()) > 0.05, "the sinks of this model matter"
    assert read[0].sink is not None
    assert lm().sinks == (None,) * 3


def test_fastgen_judges_by_the_sinks_of_the_layer() -> None:
    value = []
    for model in (sinking(), _deaf(sinking())):
        s = session(dataclasses.replace(SMALL, recovery=0.6), model)
        run_to_end(s.read(prompt()))
        value.append(s.policy_record.state._layers[1].value)
    aware, deaf = value
    assert bool((aware >= deaf - 1e-9).all())
    assert float((aware - deaf).max()) > 0.01


def sinking() -> LM:
    """A model whose learned sinks take a good part of its attention."""
    model = families.build("gpt_oss", torch.float64)
    for layer in model.model.layers:
        layer.self_attn.sinks += 4.0
    return wrap_lm(model)


def _deaf(model: LM) -> LM:
    """The same model, which says nothing of its sinks."""
    other = copy.copy(model)
    other.sinks = (None,) * model.n_layers
    return other


def test_kinds_are_told_only_to_who_asks() -> None:
    for more, told in (({}, 0), ({"kinds": True}, 59), ({"guard": ProtectedTokens(kinds=frozenset({4}))}, 59)):
        s = session(None, lm(), policy=(ear := Ear(**more)))
        run_to_end(s.read(prompt(60)))
        assert {at.kinds.shape[0] for at in ear.heard if at.phase == "read"} == {told}


@pytest.mark.parametrize(("more", "held"), [({}, []), ({"recent_queries": 4}, [55, 56, 57, 58])])
def test_probed_queries_go_when_the_prompt_is_read(more: dict[str, Any], held: list[int]) -> None:
    s = session(None, lm(), policy=(ear := Ear(**more)), every=3)
    run_to_end(s.read(prompt(60)))
    at = [at for at in ear.heard if at.phase == "read"][-1]
    assert at.q_pos.tolist() == sorted({*range(0, 59, 5), *held})
    assert s.query_recorder.pos == held
    list(iterate_events(s.stream(8)))
    assert ear.heard[-1].q_pos.shape[0] == len(held)
    assert s.rewind(30) == 0, "what a policy learned of a text cannot be taken back in part"


def test_probed_queries_stay_for_who_needs_them_longer() -> None:
    s = session(None, lm(), policy=(ear := Ear(lasting=True)), every=3)
    run_to_end(s.read(prompt(60)))
    list(iterate_events(s.stream(8)))
    assert ear.heard[-1].phase == "answering"
    assert ear.heard[-1].q_pos.tolist() == list(range(0, 59, 5))
    s = session(None, lm(), policy=KeepAll())
    run_to_end(s.read(prompt(60)))
    assert s.rewind(30) == 29, "who hears nothing can be taken back"


# --- keys that change nothing


@pytest.mark.parametrize("kv", [{"rotate": "hadamard"}, {"group": 32}, {"residual": 64}, {"sinks": 8}])
def test_keys_of_quantization_are_refused_where_nothing_is_quantized(kv: dict[str, Any]) -> None:
    base, (key,) = load_profile("exact"), kv
    with pytest.raises(BadConfig) as caught:
        base.replace(kv=kv)
    said = "\n".join(caught.value.lines)
    assert f"kv.{key}" in said
    assert "kv.k_bits" in said
    packed = {"kv": {**kv, "v_bits": 8}, "exactness": "approx"}
    stepped = {"kv": kv, "memory": {"fallbacks": ["kv.k_bits=8"]}, "exactness": "approx"}
    for good in (packed, stepped):
        assert getattr(base.replace(**good).kv, key) == kv[key]
    assert ("[memory] has no budget" in said) == (key in ("group", "sinks"))
    for memory in ({"disk": "1GiB"}, {"host": "auto"}, {"device": "1GiB"}, {"fallbacks": ["memory.disk=1GiB"]}):
        if key in ("group", "sinks"):  # these matter to tiers and budgets as well
            assert getattr(base.replace(kv=kv, memory=memory).kv, key) == kv[key]
        else:
            with pytest.raises(BadConfig):
                base.replace(kv=kv, memory=memory)
    assert getattr(load_profile("balanced", sets=[f"kv.{key}={kv[key]}"]).kv, key) == kv[key]
