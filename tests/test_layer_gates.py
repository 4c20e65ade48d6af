"""Rows that stay behind between layers: the same as rows hidden by a mask from there on, in every family."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.engine import Engine, generate_together, run, run_to_end
from kvcli.engine.forward import ForwardPass
from kvcli.engine.forward_request import ForwardRequest, ForwardResult, Passes, Rows
from kvcli.engine.hf import layer_gates
from kvcli.engine.hf.cache_shim import call
from kvcli.engine.hf.layer_gates import Gate
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading import open_lm
from kvcli.engine.loading.open_lm import wrap_lm
from kvcli.engine.policy.policy import CompressionPoint, Policy
from kvcli.engine.policy.policy_inputs import QueryRecorder
from kvcli.engine.prefill.layerwise import ActiveRows, LayerwisePrefill
from kvcli.engine.ranks import Ranks
from kvcli.engine.sequence.session import commit
from kvcli.engine.sequence.state import kinds_of
from kvcli.errors import BadModel, ExitStatus
from kvcli.kernels.attend.reference import attend
from kvcli.kv.slots import AttentionParams, KVCache, LayerShape
from kvcli.kv.tiers.dense import Dense
from kvcli.methods.policies.knorm import KNorm
from kvcli.methods.policies.streaming import StreamingLLM
from kvcli.methods.prune.aux_cache import AuxCache
from kvcli.methods.prune.lazy import LazyLLM
from tests import families, make
from tests.test_tiered_cache import LADDERS

N = 33  # rows of a prompt: three windows
HEAR = [28, 32]


class Anywhere(LazyLLM):
    """Settings for models of few layers, none of which LazyLLM would prune."""

    def describe(self, lm: LM) -> str:
        return ""

    def cuts(self, lm: LM) -> dict[int, float]:
        return dict.fromkeys(range(1, lm.n_layers), 0.5)


class Plan:
    """A pruner that has rows stop before some layers."""

    def __init__(self, stops: dict[int, set[int]]) -> None:
        self.stops = stops
        self.shown: list[ActiveRows] = []

    def __call__(self, layer: int, live: ActiveRows) -> list[int] | None:
        self.shown.append(live)
        return [row for row in live.rows if row not in out] if (out := self.stops.get(layer)) else None

    def live(self, n: int, layer: int) -> list[int]:
        """The rows of n that go through this layer."""
        return sorted(set(range(n)).difference(*(out for at, out in self.stops.items() if at <= layer)))


def plan(name: str = "from the second") -> Plan:
    first: dict[int, set[int]] = {0: {3, 7, 30}} if name == "from the first" else {}
    return Plan({**first, 1: {2, 5, 11, 12, 20}, 2: {0, 9, 31}})


class Hiding(ForwardPass):
    """All rows go through all layers; those that do by a plan do not see those that stop."""

    def __init__(self, feed: ForwardRequest, plan: Plan) -> None:
        super().__init__(feed)
        self._plan = plan

    def attend(self, layer: int, *args: Any) -> Tensor:
        n, live = self.rows.n_rows, self._plan.live(self.rows.n_rows, layer)
        sees = torch.ones(n, n, dtype=torch.bool).tril()
        sees[live] &= torch.isin(torch.arange(n), torch.tensor(live))
        self.rows, self._masks = replace(self.rows, tree_mask=sees), {}
        return super().attend(layer, *args)


# where rows may stop behind any layer, as layers share no keys, and all is computed in float64 with a mask of one's own
ANYWHERE = sorted(set(families.GATED) - {"gemma4_shared", "gemma3n", "mimo", *families.LATENT})


@cache
def lm(name: str) -> LM:
    return make.model(name, torch.float64)


def hidden(feed: ForwardRequest, plan: Plan) -> Hiding:
    """The pass with the plan's rows hidden by a mask."""
    masked = Hiding(feed, plan)
    call(feed.lm.model, feed.rows.ids, feed.rows.pos, [0], its_pass=masked)
    return masked


def past(model: LM, n: int, seed: int = 3) -> Dense:
    """Of n tokens."""
    kv, rows = make.dense(model), Rows.chain(families.prompt(n, seed=seed), 0)
    if n:
        commit(kv, rows, *run([ForwardRequest(model, rows, kv)]), range(n))
    return kv


def narrowed(kv: KVCache, model: LM, start: int, plan: Plan, part: int = 7, **more: Any) -> LayerwisePrefill:
    """A prompt behind what is stored."""
    return LayerwisePrefill(model, kv, Rows.chain(families.prompt(N), start), part, HEAR, plan, **more)


def to_its_end(prompt: LayerwisePrefill) -> Passes[None]:
    while not prompt.is_over:
        yield from prompt.step()


@pytest.mark.parametrize("name", families.GATED)
def test_idle_gates_change_nothing(name: str) -> None:
    model = make.model(name, torch.float64)
    feed = ForwardRequest(model, Rows.chain(families.prompt(N), 0), make.dense(model), want=range(N))
    (bare,) = run([feed])
    assert not any(isinstance(part.forward, Gate) for part in model.model.modules()), "nobody has asked for them"
    model.check_layer_gates()
    (gated,) = run([feed])
    assert sum(isinstance(part.forward, Gate) for part in model.model.modules()) == model.n_layers
    assert torch.equal(gated.logits, bare.logits)


@pytest.mark.parametrize("start", [0, 20])
@pytest.mark.parametrize("name_of_plan", ["from the first", "from the second"])
@pytest.mark.parametrize("name", ANYWHERE)
def test_rows_that_stop_are_rows_hidden_by_a_mask(name: str, name_of_plan: str, start: int) -> None:
    model, by = lm(name), plan(name_of_plan)
    kv, rows = past(model, start), Rows.chain(families.prompt(N), start)
    feed = ForwardRequest(model, rows, past(model, start), record_queries=HEAR)
    (whole,), masked = run([feed]), hidden(feed, by)
    run_to_end(to_its_end(prompt := narrowed(kv, model, start, by)))
    for layer in range(3):
        live = by.live(N, layer)
        slots = kv.slots(layer)
        assert slots.pos[0].tolist() == [*range(start), *(start + row for row in live)]
        torch.testing.assert_close(slots.k[:, start:], masked.fresh[layer].k[:, live], rtol=0, atol=1e-12)
        torch.testing.assert_close(slots.v[:, start:], masked.fresh[layer].v[:, live], rtol=0, atol=1e-12)
        torch.testing.assert_close(prompt.queries[layer], masked.queries[layer], rtol=0, atol=1e-12)
    assert (prompt.queries[2] - whole.queries[2]).abs().max() > 1e-3, "the rows mattered"


@pytest.mark.parametrize("name", ANYWHERE)
def test_rows_that_go_on_later_are_rows_that_others_did_not_see(name: str) -> None:
    """They see all that is older, and are seen from then on."""
    model, by = lm(name), plan()
    kv, behind = past(model, 20), Anywhere(scope="prefill+decode").companion(ModelPair(model, model))
    assert isinstance(behind, AuxCache)
    ids = [*families.prompt(20, seed=3), *families.prompt(N)]
    masked = hidden(ForwardRequest(model, Rows.chain(ids[20:], 20), past(model, 20)), by)
    run_to_end(to_its_end(prompt := narrowed(kv, model, 20, by, may_revive=True)))
    behind.add(prompt.stopped)
    run_to_end(behind.revive_all(kv, ids))
    whole = past(model, 20)
    commit(whole, Rows.chain(ids[20:], 20), made_of(masked), range(N))
    after = Rows.chain(families.prompt(5, seed=4), 20 + N)
    (found,), (expected,) = (run([ForwardRequest(model, after, each, want=range(5))]) for each in (kv, whole))
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-11)


def made_of(one: ForwardPass) -> ForwardResult:
    return ForwardResult(None, None, None, one.fresh, ())  # type: ignore[arg-type]


def test_a_pruner_gets_the_active_rows_and_their_recorded_queries() -> None:
    by = plan()
    run_to_end(to_its_end(prompt := narrowed(make.dense(lm("llama"), torch.float64), lm("llama"), 0, by)))
    assert [list(live.rows) for live in by.shown[1:]] == [by.live(N, layer) for layer in (0, 1)]
    assert by.shown[0].queries is None
    for layer, live in enumerate(by.shown[1:]):
        assert live.fresh is None, "it is stored"
        assert torch.equal(live.queries, prompt.queries[layer])


def test_rows_with_recorded_queries_may_not_stop() -> None:
    with pytest.raises(AssertionError, match="deferred a row"):
        run_to_end(to_its_end(narrowed(make.dense(lm("llama"), torch.float64), lm("llama"), 0, Plan({1: {28}}))))


@pytest.mark.parametrize("name", ANYWHERE)
def test_a_text_that_is_pruned_does_not_show_beside_others(name: str) -> None:
    model, works = lm(name), ((0, "from the first"), (11, "from the second"))
    feed = ForwardRequest(model, Rows.chain(families.prompt(9, seed=8), 0), past(model, 0), want=range(9))

    def prompts() -> tuple[list[Dense], list[Passes[None]]]:
        kvs = [past(model, start) for start, _ in works]
        each = zip(kvs, works, strict=True)
        return kvs, [to_its_end(narrowed(kv, model, start, plan(of))) for kv, (start, of) in each]

    (alone,), (kvs, one_by_one), (beside, side_by_side) = run([feed]), prompts(), prompts()
    for prompt in one_by_one:
        run_to_end(prompt)
    tickets = generate_together(whole(feed), *side_by_side)
    torch.testing.assert_close(tickets[0].result(), alone.logits, rtol=0, atol=1e-12)
    for expected, kv, ticket in zip(kvs, beside, tickets[1:], strict=True):
        ticket.result()
        for layer in range(3):
            assert torch.equal(kv.slots(layer).pos, expected.slots(layer).pos)
            torch.testing.assert_close(kv.slots(layer).v, expected.slots(layer).v, rtol=0, atol=1e-12)


@pytest.mark.parametrize("store", ["dense", *LADDERS, *make.PACKED])
def test_each_layer_stores_the_rows_that_reached_it(store: str) -> None:
    """And what is read next is what would be read if the others had been forgotten."""
    model, by = lm("gemma3"), plan("from the first")
    kv = make.cache(store, model)
    rows = Rows.chain(families.prompt(N), 0)
    masked = hidden(ForwardRequest(model, rows, past(model, 0)), by)
    run_to_end(to_its_end(narrowed(kv, model, 0, by, part=N)))
    for layer in range(3):
        assert kv.slots(layer).pos.sort().values.unique(dim=0).tolist() == [by.live(N, layer)]
    kv.crop(30)
    assert kv.slots(1).pos.max() < 30
    if store in make.PACKED or "round" in store or "three" in store:
        return  # which read something else than was stored
    expected = make.dense(model)
    commit(expected, rows, made_of(masked), range(N))
    expected.crop(30)
    for layer in range(3):
        expected.evict_except(layer, torch.isin(expected.slots(layer).pos, torch.tensor(by.live(N, layer))))
    after = Rows.chain(families.prompt(5, seed=4), 30)
    (found,), (hoped,) = (run([ForwardRequest(model, after, each, want=range(5))]) for each in (kv, expected))
    torch.testing.assert_close(found.logits, hoped.logits, rtol=0, atol=1e-12)


# ---- the law ----


def conversation(model: LM, pruning: LazyLLM | None) -> tuple[list[int], Tensor]:
    """Two turns of 20 tokens: the text, and the logits behind each token that was written."""
    session, logits = make.session(model, chunk=10, pruning=pruning), list[Tensor]()
    for seed in (1, 2):
        text = [*session.ids, *families.prompt(N, seed=seed)]
        while run_to_end(session.prefill_chunk(text)):
            pass
        logits += [run_to_end(session.step()).logits[0] for _ in range(20)]
    assert (session.approximations == {"forgotten"}) == (pruning is not None), "a pruner was there"
    return session.ids, torch.stack(logits)


@pytest.mark.parametrize(
    ("name", "within"),
    [*((name, 3e-7) for name in ("llama", "qwen2", "qwen3", "gpt_oss", "qwen3_moe")), ("gemma3", 1e-6)],
)
def test_with_every_ratio_one_logits_are_those_of_the_stock_model(name: str, within: float) -> None:
    """In float32: over a prompt, 20 tokens behind it and a second turn. Weights as they are initialized, which spread
    a rounding less than those of the other tests; Gemma's embeddings are scaled up by 7."""
    torch.manual_seed(0)
    stock, mine = (  # each by a config of its own, which says how it attends
        AutoModelForCausalLM.from_config(families.config_of(name), attn_implementation="eager").eval() for _ in range(2)
    )
    mine.load_state_dict(stock.state_dict())
    model, schedule = wrap_lm(mine), {"start_prune_layer": 0.4, "end_prune_layer": 0.7, "num_prune": 2}
    every = {"recent": 1, "sinks": 0, "min_prompt": 1}
    idle, half = (
        LazyLLM(**schedule, start_keep_ratio=ratio, end_keep_ratio=ratio, **every)  # type: ignore[arg-type]
        for ratio in (1.0, 0.5)
    )
    ids, logits = conversation(model, idle)
    theirs = call(stock, ids[:-1])[[*range(N - 1, N + 19), *range(2 * N + 19, 2 * N + 39)]]
    assert (logits - theirs).abs().max() <= within
    assert (conversation(model, half)[1] - theirs).abs().max() > 1e-5, "a token left behind shows"


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "gpt_oss", "qwen3_moe"])
def test_with_every_ratio_one_logits_are_those_of_no_pruner_to_the_bit(name: str) -> None:
    idle = LazyLLM(start_prune_layer=0.4, end_prune_layer=0.7, start_keep_ratio=1.0, end_keep_ratio=1.0, min_prompt=1)
    model = make.model(name, torch.float32)
    (ids, logits), (plain, expected) = conversation(model, idle), conversation(model, None)
    assert ids == plain
    assert torch.equal(logits, expected)


def test_whatever_the_schedule_each_token_goes_through_each_layer_once_at_most() -> None:
    """200 random ones: what is computed, and what is stored, is what the plan says."""
    model = make.model("llama", torch.float64, num_hidden_layers=5)
    lots = random.Random(0)
    for _ in range(200):
        n, part, start = lots.randint(2, 24), lots.randint(1, 25), lots.choice([0, 9])
        by = Plan({})
        for layer in range(1, 5):
            by.stops[layer] = {row for row in by.live(n - 1, layer) if lots.random() < 0.3}
        kv, rows, computed = past(model, start), Rows.chain(families.prompt(n), start), set[tuple[int, int]]()
        prompt = LayerwisePrefill(model, kv, rows, part, [n - 1], by)
        while not prompt.is_over:
            asks = prompt.step()
            feed = next(asks)
            assert feed.layers is not None
            mine = {(layer, pos) for layer in feed.layers for pos in feed.rows.pos}
            assert not mine & computed
            computed |= mine
            with pytest.raises(StopIteration):
                asks.send(run([feed])[0])
        masked = hidden(ForwardRequest(model, rows, past(model, start)), by)
        for layer in range(5):
            live, held = by.live(n, layer), kv.slots(layer)
            assert held.pos.unique(dim=0).tolist() == [[*range(start), *(start + row for row in live)]]
            assert {pos - start for at, pos in computed if at == layer} == set(live)
            torch.testing.assert_close(held.k[:, start:], masked.fresh[layer].k[:, live], rtol=0, atol=1e-11)


# ---- where it does not hold ----


@pytest.mark.parametrize("how", ["no gates", "past the gates"])
def test_a_model_whose_rows_cannot_be_stopped_is_refused_for_that_alone(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make.model("llama", id="mine", verify=True)
    if how == "no gates":
        monkeypatch.setattr(layer_gates, "install", lambda layers: None)
    else:
        carries(model)
    feed = ForwardRequest(model, Rows.chain(families.prompt(N), 0), make.dense(model), want=[32])

    def refused() -> Passes[BadModel]:
        try:
            yield replace(feed, layers=range(1))
        except BadModel as error:
            return error
        raise AssertionError

    for _ in range(2):  # and is not forgotten
        many = Engine()
        ticket, beside = many.add(refused()), many.add(whole(feed))
        while many.step():
            pass
        error = ticket.result()
        assert (error.exit, error.code) == (ExitStatus.BAD_MODEL, "no_pruning")
        assert "mine (llama)" in error.message
        torch.testing.assert_close(beside.result(), run([feed])[0].logits)


def carries(model: LM) -> None:
    """Its second layer adds a little of what its first gave, beside what it is given."""
    first, second, _ = model.model.model.layers
    given = list[Tensor]()
    first.register_forward_hook(lambda _, args, out: given.append(out))
    second.register_forward_hook(lambda _, args, out: out + 0.1 * given[-1])


def whole(feed: ForwardRequest) -> Passes[Tensor]:
    made = yield feed
    return made.logits


def test_it_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, compare = [], open_lm.verify_partial_passes
    monkeypatch.setattr(open_lm, "verify_partial_passes", lambda lm: (asked.append(lm.info.id), compare(lm)))
    model = make.model("llama", id="mine", verify=True)
    feed = ForwardRequest(model, Rows.chain(families.prompt(N), 0), make.dense(model), want=[32])
    run([feed])
    assert not asked
    for _ in range(2):
        run([replace(feed, want=(), layers=range(1))])
    assert asked == ["mine"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", families.GATED)
def test_every_family_is_accepted(name: str, dtype: torch.dtype) -> None:
    make.model(name, dtype).check_layer_gates()


# ---- layers that are not alike ----

H = 6  # query heads
SHAPES = (LayerShape(3, 8, 12), LayerShape(1, 16, 4), LayerShape(3, 8, 12, shared_from=0), LayerShape(6, 5, 5))


def test_layers_of_any_shape_attend_and_store_and_share() -> None:
    """A pass in two chunks, against one attention over all that each row sees."""
    noise = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    n, kv = 13, Dense(SHAPES, torch.float64)
    q = [random(H, n, s.k_dim) for s in SHAPES]
    k, v = [random(s.n_kv_heads, n, s.k_dim) for s in SHAPES], [random(s.n_kv_heads, n, s.v_dim) for s in SHAPES]
    lm: Any = SimpleNamespace(
        shapes=SHAPES, n_layers=len(SHAPES), latents={}, dtype=torch.float64, is_row_invariant=True
    )
    found = []
    for at in (slice(0, 8), slice(8, n)):
        rows = Rows.chain([0] * n, 0).only(range(n)[at])
        one = ForwardPass(ForwardRequest(lm, rows, kv))
        its = [(k[layer][:, at], v[layer][:, at]) for layer in range(len(SHAPES))]
        its[2] = torch.zeros_like(its[2][0]), torch.zeros_like(its[2][1])  # whatever it hands over: it made none
        found.append(
            [
                one.attend(layer, q[layer][:, at], *its[layer], AttentionParams(0.3), None)
                for layer in range(len(SHAPES))
            ]
        )
        commit(kv, rows, made_of(one), range(rows.n_rows))
    for layer, shape in enumerate(SHAPES):
        source = layer if shape.shared_from is None else shape.shared_from
        out, _ = attend(q[layer], k[source], v[source], 0.3, 0.0, torch.ones(n, n, dtype=torch.bool).tril(), n)
        torch.testing.assert_close(torch.cat([outs[layer] for outs in found], 1), out)
        assert kv.slots(layer).pos[0].tolist() == list(range(n))
    assert [use.layer for use in kv.usage()] == [0, 1, 3]


@pytest.mark.parametrize(
    "policy", [KNorm(keep=0.5, sinks=1, recent=2, alloc="global"), StreamingLLM(sinks=1, window=4)]
)
def test_a_policy_judges_layers_of_any_shape_that_store_something(policy: Policy) -> None:
    kv, n = Dense(SHAPES, torch.float64), 13
    for layer, s in enumerate(SHAPES):
        if s.shared_from is None:
            kv.append(layer, torch.randn(s.n_kv_heads, n, s.k_dim), torch.randn(s.n_kv_heads, n, s.v_dim), 0)
    attention_params = [AttentionParams(0.3)] * len(SHAPES)
    lm: Any = SimpleNamespace(
        n_layers=len(SHAPES),
        shapes=SHAPES,
        attention_params=attention_params,
        sinks=[None] * len(SHAPES),
        ranks=Ranks(),
    )
    wants, nothing = policy.requirements(lm), kinds_of([], None, [])
    past = lm, kv, QueryRecorder(lm, kv.dtype), wants.guard, range(n), nothing
    masks = run_to_end(CompressionPoint(*past, "read", n, True, wants.policy_state()).ask(policy))
    assert [layer for layer, mask in enumerate(masks) if mask is None] == [2]
    assert kv.compress(masks)
    assert kv.n_slots(0) == kv.n_slots(2) < n
