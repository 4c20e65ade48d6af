"""Rows that stay behind between layers: the same as rows hidden by a mask from there on, in every family."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvcli.drafts.off import Off
from kvcli.engine import gate
from kvcli.engine.boundary import Boundary
from kvcli.engine.by_layers import ByLayers
from kvcli.engine.engine import Engine, call, drive, run
from kvcli.engine.feed import Asks, Feed, Made
from kvcli.engine.forward import Pass
from kvcli.engine.gate import Gate, Live
from kvcli.engine.heard import Heard
from kvcli.engine.kinds import kinds_of
from kvcli.engine.lm import LM
from kvcli.engine.policy import Policy
from kvcli.engine.rows import Draft, Rows, Scouts
from kvcli.engine.sample import Sampler
from kvcli.engine.session import Session, commit
from kvcli.errors import BadModel, ExitStatus
from kvcli.kernels.attend.reference import attend
from kvcli.kv.dense import Dense
from kvcli.kv.slots import LayerShape, Sight
from kvcli.policies.knorm import KNorm
from kvcli.policies.window import Window
from kvcli.prune.lazy import Lazy
from tests import families
from tests.test_ladder import LADDERS, PACKED

N = 33  # rows of a prompt: three windows


@dataclass(frozen=True)
class Plan:
    """Rows that are dropped before a layer, and those that come back into one."""

    drops: dict[int, set[int]]
    returns: dict[int, set[int]] = field(default_factory=dict)

    def live(self, n: int, layer: int) -> list[int]:
        """The rows of n that go on into this layer."""
        found = set(range(n))
        for before in range(layer + 1):
            found = found - self.drops.get(before, set()) | self.returns.get(before, set())
        return sorted(found)


# some are dropped at once, as what an earlier pass left behind would be
PLANS = {
    "narrowing": Plan({1: {2, 3, 5, 11, 12, 20}, 2: {0, 9, 31}}),
    "and back": Plan({0: {3, 7, 30}, 1: {2, 5, 11, 12, 20}, 2: {9}}, {1: {7}, 2: {2, 5, 30}}),
}


class Fixed:
    """The pruner of a plan. Not the plan itself: it remembers what it left behind."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.behind = plan, dict[int, Tensor]()
        self.seen: list[Live] = []

    def before(self, layer: int, live: Live) -> list[int] | None:
        self.seen.append(live)
        return [row for row in live.rows if row not in drops] if (drops := self.plan.drops.get(layer)) else None

    def left(self, layer: int, rows: Sequence[int], hidden: Tensor) -> None:
        assert set(rows) == self.plan.drops[layer]
        self.behind |= zip(rows, hidden.clone(), strict=True)

    def revive(self, layer: int) -> tuple[list[int], Tensor] | None:
        if not (rows := sorted(self.plan.returns.get(layer, ()), reverse=True)):  # in any order
            return None
        return rows, torch.stack([self.behind.pop(row) for row in rows])


class Hiding(Pass):
    """All rows go through all layers; others do not see those that the plan drops."""

    is_gated = True

    def __init__(self, feed: Feed, plan: Plan) -> None:
        super().__init__(feed)
        self._plan, self._behind, self._layer = plan, dict[int, Tensor](), 0

    def narrow(self, layer: int, hidden: Tensor) -> Tensor:
        self._layer, self._seen, hidden = layer, {}, hidden.clone()
        self._behind |= {row: hidden[row].clone() for row in self._plan.drops.get(layer, ())}
        for row in self._plan.returns.get(layer, ()):
            hidden[row] = self._behind[row]
        return hidden

    def _sees(self, window: int | None, device: torch.device) -> Tensor:
        sees, n = super()._sees(window, device), self.n_rows
        shown = torch.zeros(n, dtype=torch.bool)
        shown[self._plan.live(n, self._layer)] = True
        return (torch.ones(n, n).tril().bool() if sees is None else sees) & (shown | torch.eye(n, dtype=torch.bool))


@cache
def lm(name: str) -> LM:
    return LM.of(families.build(name, torch.float64))


def hidden(feed: Feed, plan: Plan) -> tuple[Tensor, Hiding]:
    """Logits of the wanted rows with the plan's rows hidden by a mask, and the pass."""
    masked = Hiding(feed, plan)
    return call(feed.lm.model, feed.rows.ids, feed.rows.pos, feed.want, kvcli_pass=masked), masked


def read(model: LM, n: int, seed: int = 3) -> Dense:
    """A past of n tokens."""
    kv, rows = Dense(model.shapes, model.dtype), Rows.chain(families.prompt(n, seed=seed), 0)
    if n:
        commit(kv, rows, *run([Feed(model, rows, kv)]), range(n))
    return kv


@pytest.mark.parametrize("name", families.FAMILIES)
def test_idle_gates_change_nothing(name: str) -> None:
    model = LM.of(families.build(name, torch.float64))
    feed = Feed(model, Rows.chain(families.prompt(N), 0), Dense(model.shapes, model.dtype), want=range(N))
    (bare,) = run([feed])
    assert not any(isinstance(part.forward, Gate) for part in model.model.modules()), "nobody has asked for them"
    model.meet_gates()
    (gated,) = run([feed])
    assert sum(isinstance(part.forward, Gate) for part in model.model.modules()) == model.n_layers
    assert torch.equal(gated.logits, bare.logits)


@pytest.mark.parametrize("past", [0, 20])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", families.FAMILIES)
def test_rows_that_stay_behind_are_rows_hidden_by_a_mask(name: str, plan: str, past: int) -> None:
    model = lm(name)
    rows, kv = Rows.chain(families.prompt(N), past), read(model, past)
    feed = Feed(model, rows, kv, want=[4, 29, 32], hear=[28, 32])
    (whole,) = run([feed])
    (made,) = run([narrow(feed, PLANS[plan])])
    expected, masked = hidden(feed, PLANS[plan])
    torch.testing.assert_close(made.logits, expected, rtol=0, atol=1e-12)
    assert (made.logits - whole.logits).abs().max() > 1e-3, "the rows mattered"
    for layer in range(3):
        live = PLANS[plan].live(N, layer)
        assert list(made.fresh[layer].rows or range(N)) == live
        torch.testing.assert_close(made.fresh[layer].k, masked.fresh[layer].k[:, live], rtol=0, atol=1e-12)
        torch.testing.assert_close(made.queries[layer], masked.queries[layer], rtol=0, atol=1e-12)


def narrow(feed: Feed, plan: Plan) -> Feed:
    return Feed(feed.lm, feed.rows, feed.past, feed.view, feed.want, hear=feed.hear, pruner=Fixed(plan))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_a_tree_with_scouts_is_narrowed_as_a_chain_is(name: str) -> None:
    scouts = Scouts([5, 6, 7], [1, 2, 2], torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool), [2])
    rows = Rows.build(9, 20, Draft([11, 12, 13, 14], [-1, -1, 0, 2], scouts))
    plan = Plan({1: {2, 6}, 2: {5}}, {2: {2}})
    feed = Feed(lm(name), rows, read(lm(name), 20), want=[0, 4, 7])
    (made,) = run([narrow(feed, plan)])
    torch.testing.assert_close(made.logits, hidden(feed, plan)[0], rtol=0, atol=1e-12)


def test_a_pruner_is_shown_what_the_layer_before_made() -> None:
    feed = Feed(lm("llama"), Rows.chain(families.prompt(N), 0), read(lm("llama"), 0), want=[32], hear=[32])
    pruner = Fixed(PLANS["and back"])
    (made,) = run([Feed(feed.lm, feed.rows, feed.past, want=[32], hear=[32], pruner=pruner)])
    assert [list(live.rows) for live in pruner.seen[1:]] == [pruner.plan.live(N, layer) for layer in (0, 1)]
    assert (pruner.seen[0].fresh, pruner.seen[0].queries) == (None, None)
    for layer, live in enumerate(pruner.seen[1:]):
        assert live.fresh is made.fresh[layer]
        assert torch.equal(live.queries, made.queries[layer])


@pytest.mark.parametrize("wanted", [{"want": [20]}, {"want": [32], "hear": [20]}], ids=str)
def test_rows_that_are_wanted_or_heard_may_not_stay_behind(wanted: dict[str, Any]) -> None:
    feed = Feed(lm("llama"), Rows.chain(families.prompt(N), 0), read(lm("llama"), 0), **wanted)
    with pytest.raises(AssertionError, match="go through every layer"):
        run([narrow(feed, PLANS["narrowing"])])


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_text_that_is_pruned_does_not_show_beside_others(name: str) -> None:
    model = lm(name)
    feeds = [Feed(model, Rows.chain(families.prompt(4, seed=5), 20), read(model, 20, 7), want=range(4), hear=[1])]
    for past, plan in ((0, "and back"), (11, "narrowing")):
        feed = Feed(model, Rows.chain(families.prompt(N, seed=past), past), read(model, past), want=[32], hear=[32])
        feeds.append(narrow(feed, PLANS[plan]))
    feeds.append(Feed(model, Rows.chain(families.prompt(9, seed=8), 0), read(model, 0), want=range(9)))
    for feed, made in zip(feeds, run(feeds), strict=True):
        (alone,) = run([feed])
        torch.testing.assert_close(made.logits, alone.logits, rtol=0, atol=1e-12)
        for layer in range(3):
            assert made.fresh[layer].rows == alone.fresh[layer].rows
            torch.testing.assert_close(made.fresh[layer].v, alone.fresh[layer].v, rtol=0, atol=1e-12)


@pytest.mark.parametrize("store", ["dense", *LADDERS, *PACKED])
def test_each_layer_stores_the_rows_that_reached_it(store: str) -> None:
    """And what is read next is what would be read if the others had been forgotten."""
    model, plan = lm("gemma3"), PLANS["and back"]
    make = (LADDERS | PACKED).get(store)
    one = model.shapes[0]
    kv = make((model.n_layers, one.n_kv_heads, one.k_dim), model.dtype) if make else Dense(model.shapes, model.dtype)
    rows = Rows.chain(families.prompt(N), 0)
    feed = Feed(model, rows, kv, want=[32])
    masked = hidden(feed, plan)[1]
    commit(kv, rows, *run([narrow(feed, plan)]), range(N))
    for layer in range(3):
        assert kv.slots(layer).pos.sort().values.unique(dim=0).tolist() == [plan.live(N, layer)]
    kv.settle()
    for layer in range(3):
        assert kv.slots(layer).pos.sort().values.unique(dim=0).tolist() == [plan.live(N, layer)]
    kv.crop(30)
    assert kv.slots(1).pos.max() < 30
    if store in PACKED or "round" in store or "three" in store:
        return  # which read something else than was stored
    whole = Dense(model.shapes, model.dtype)
    commit(whole, rows, Made(None, None, None, masked.fresh, ()), range(N))  # type: ignore[arg-type]
    whole.crop(30)
    for layer in range(3):
        whole.keep(layer, torch.isin(whole.slots(layer).pos, torch.tensor(plan.live(N, layer))))
    after = Rows.chain(families.prompt(5, seed=4), 30)
    (found,), (expected,) = (run([Feed(model, after, past, want=range(5))]) for past in (kv, whole))
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-12)


# ---- the law ----


def conversation(model: LM, pruning: Lazy | None) -> tuple[list[int], Tensor]:
    """Two turns of 20 tokens: the text, and the logits behind each token that was written."""
    kv = Dense(model.shapes, model.dtype)
    session, logits = Session(model, kv, Off(), Sampler(), chunk=10, pruning=pruning), list[Tensor]()
    for seed in (1, 2):
        text = [*session.ids, *families.prompt(N, seed=seed)]
        while drive(session.chunk(text)):
            pass
        logits += [drive(session.step()).logits[0] for _ in range(20)]
    assert (session.lost == {"forgotten"}) == (pruning is not None), "a pruner was there"
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
    model, schedule = LM.of(mine), {"start_prune_layer": 0.4, "end_prune_layer": 0.7, "num_prune": 2}
    every = {"recent": 1, "sinks": 0, "least": 1}
    idle, half = (
        Lazy(**schedule, start_keep_ratio=ratio, end_keep_ratio=ratio, **every)  # type: ignore[arg-type]
        for ratio in (1.0, 0.5)
    )
    ids, logits = conversation(model, idle)
    theirs = call(stock, ids[:-1])[[*range(N - 1, N + 19), *range(2 * N + 19, 2 * N + 39)]]
    assert (logits - theirs).abs().max() <= within
    assert (conversation(model, half)[1] - theirs).abs().max() > 1e-5, "a token left behind shows"


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "gpt_oss", "qwen3_moe"])
def test_with_every_ratio_one_logits_are_those_of_no_pruner_to_the_bit(name: str) -> None:
    idle = Lazy(start_prune_layer=0.4, end_prune_layer=0.7, start_keep_ratio=1.0, end_keep_ratio=1.0, least=1)
    model = LM.of(families.build(name, torch.float32))
    (ids, logits), (plain, expected) = conversation(model, idle), conversation(model, None)
    assert ids == plain
    assert torch.equal(logits, expected)


def test_whatever_the_schedule_each_token_goes_through_each_layer_once_at_most() -> None:
    """200 random ones, with tokens that come back: what is stored, and what is computed, is what the plan says."""
    model = LM.of(families.build("llama", torch.float64, num_hidden_layers=5))
    lots = random.Random(0)
    for _ in range(200):
        n, part, past = lots.randint(2, 24), lots.randint(1, 25), lots.choice([0, 9])
        plan, behind = Plan({}), set[int]()
        for layer in range(1, 5):
            live = [row for row in range(n - 1) if row not in behind]
            plan.drops[layer] = {row for row in live if lots.random() < 0.4}
            plan.returns[layer] = {row for row in behind if lots.random() < 0.3}
            behind = behind - plan.returns[layer] | plan.drops[layer]
        plan = Plan({at: rows for at, rows in plan.drops.items() if rows}, plan.returns)
        kv, rows, computed = read(model, past), Rows.chain(families.prompt(n), past), set[tuple[int, int]]()
        prompt = ByLayers(model, kv, rows, part, [n - 1], Fixed(plan))
        while not prompt.is_over:
            asks = prompt.go_on()
            feed = next(asks)
            assert feed.layers is not None
            mine = {(layer, pos) for layer in feed.layers for pos in feed.rows.pos}
            assert not mine & computed
            computed |= mine
            with pytest.raises(StopIteration):
                asks.send(run([feed])[0])
        for layer in range(5):
            live = [past + row for row in plan.live(n, layer)]
            assert kv.slots(layer).pos.sort().values.unique(dim=0).tolist() == [[*range(past), *live]]
            assert {pos for at, pos in computed if at == layer} == set(live)
        masked = hidden(Feed(model, rows, read(model, past), want=[n - 1]), plan)[1]
        for layer in range(5):
            held = kv.slots(layer)
            for pos in (held.pos[0] >= past).nonzero()[:, 0].tolist():
                row = int(held.pos[0, pos]) - past
                torch.testing.assert_close(held.k[:, pos], masked.fresh[layer].k[:, row], rtol=0, atol=1e-5)


# ---- where it does not hold ----


@pytest.mark.parametrize("how", ["no gates", "unknown rows"])
def test_a_model_whose_rows_cannot_be_narrowed_is_refused_for_pruning_alone(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LM.of(families.build("llama"), id="mine", verify=True)
    if how == "no gates":
        monkeypatch.setattr(gate, "install", lambda layers: None)
    else:
        monkeypatch.setattr(gate, "_CARRY", {"position_ids": -1})
    feed = Feed(model, Rows.chain(families.prompt(N), 0), Dense(model.shapes, model.dtype), want=[32])

    def refused() -> Asks[BadModel]:
        try:
            yield narrow(feed, PLANS["narrowing"])
        except BadModel as error:
            return error
        raise AssertionError

    many = Engine()
    ticket, beside = many.add(refused()), many.add(whole(feed))
    while many.round():
        pass
    error = ticket.result()
    assert (error.exit, error.code) == (ExitStatus.BAD_MODEL, "no_pruning")
    assert "mine (llama)" in error.message
    torch.testing.assert_close(beside.result(), run([feed])[0].logits)


def whole(feed: Feed) -> Asks[Tensor]:
    made = yield feed
    return made.logits


def test_it_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcli.engine import seam

    asked, compare = [], seam.compare_narrowed
    monkeypatch.setattr(seam, "compare_narrowed", lambda lm, name: (asked.append(name), compare(lm, name)))
    model = LM.of(families.build("llama"), id="mine", verify=True)
    feed = Feed(model, Rows.chain(families.prompt(N), 0), Dense(model.shapes, model.dtype), want=[32])
    run([feed])
    assert not asked
    for _ in range(2):
        run([narrow(feed, PLANS["narrowing"])])
    assert asked == ["mine"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_family_is_accepted(name: str, dtype: torch.dtype) -> None:
    LM.of(families.build(name, dtype)).meet_gates()


# ---- layers that are not alike ----

H = 6  # query heads
SHAPES = (LayerShape(3, 8, 12), LayerShape(1, 16, 4), LayerShape(3, 8, 12, shares=0), LayerShape(6, 5, 5))


def test_layers_of_any_shape_attend_and_store_and_share() -> None:
    """A pass in two chunks, the second narrowed, against one attention over all that each row sees."""
    noise = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    n, kv = 13, Dense(SHAPES, torch.float64)
    q = [random(H, n, s.k_dim) for s in SHAPES]
    k, v = [random(s.n_kv_heads, n, s.k_dim) for s in SHAPES], [random(s.n_kv_heads, n, s.v_dim) for s in SHAPES]
    plan = Plan({2: {3}})  # of the second chunk's rows, between a layer and the one that shares its slots
    found = []
    for a, b in ((0, 8), (8, n)):
        rows = Rows.chain([0] * (b - a), a)
        lm: Any = SimpleNamespace(shapes=SHAPES, n_layers=len(SHAPES))
        one = Pass(Feed(lm, rows, kv, pruner=Fixed(plan) if a else None))
        outs = []
        for layer in range(len(SHAPES)):
            one.narrow(layer, torch.zeros(len(one.live or rows.ids), 1))
            at = [a + row for row in one.live or range(b - a)]
            its = k[layer][:, at], v[layer][:, at]
            if SHAPES[layer].shares is not None:  # whatever the layer hands over: it made none
                its = torch.zeros_like(its[0]), torch.zeros_like(its[1])
            outs.append(one.attend(layer, q[layer][:, at], *its, Sight(0.3), None))
        found.append(outs)
        commit(kv, rows, Made(None, None, None, one.fresh, ()), range(b - a))  # type: ignore[arg-type]
    for layer, shape in enumerate(SHAPES):
        source = layer if shape.shares is None else shape.shares
        at = [p for p in range(n) if layer < 2 or p != 8 + 3]
        sees = torch.tensor([[j <= i for j in at] for i in at])
        out, _ = attend(q[layer][:, at], k[source][:, at], v[source][:, at], 0.3, 0.0, sees, len(at))
        torch.testing.assert_close(torch.cat([outs[layer] for outs in found], 1), out)
        assert kv.slots(layer).pos[0].tolist() == (list(range(n)) if source < 2 else at)
    assert [use.layer for use in kv.usage()] == [0, 1, 3]


@pytest.mark.parametrize("policy", [KNorm(keep=0.5, sinks=1, guard=2, alloc="global"), Window(sinks=1, window=4)])
def test_a_policy_judges_layers_of_any_shape_that_store_something(policy: Policy) -> None:
    kv, n = Dense(SHAPES, torch.float64), 13
    for layer, s in enumerate(SHAPES):
        if s.shares is None:
            kv.append(layer, torch.randn(s.n_kv_heads, n, s.k_dim), torch.randn(s.n_kv_heads, n, s.v_dim), 0)
    sights = [Sight(0.3)] * len(SHAPES)
    lm: Any = SimpleNamespace(n_layers=len(SHAPES), shapes=SHAPES, sights=sights, sinks=[None] * len(SHAPES))
    wants, nothing = policy.wants(lm), kinds_of([], None, [])
    past = lm, kv, Heard(0, lambda n: ()), wants.guard, range(n), nothing
    masks = drive(Boundary(*past, "read", n, True, wants.memory()).ask(policy))
    assert [layer for layer, mask in enumerate(masks) if mask is None] == [2]
    assert kv.settle(masks)
    assert kv.n_slots(0) == kv.n_slots(2) < n
