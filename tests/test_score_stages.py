"""What happens to scores, who shares, what is one unit, and whose queries vote: each by its published rule."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcli import assemble
from kvcli.engine.drafting.drafter import Drafter
from kvcli.engine.engine import iterate_events, run, run_to_end
from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.policy.policy_inputs import ProjectedValueNorms
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.sequence.state import END, QUESTION, SHOT, TOOLS, KindSpan
from kvcli.errors import KvcliError
from kvcli.kv.slots import Slots
from kvcli.methods.drafts.off import Off
from kvcli.methods.policies.snapkv import Snap
from kvcli.policies.scoring import budget_split, score_stages, selection, token_units
from kvcli.settings.profile import load_profile
from tests import drafters, families, make
from tests.covering import pairs
from tests.policies import moment

torch.set_num_threads(1)
TINY = make.model("llama", torch.float64)
SLIDING = make.model("gemma3", torch.float64)
L, K = TINY.n_layers, TINY.n_kv_heads
SMALL: dict[str, Any] = {"sinks": 2, "recent": 5}
SNAP: dict[str, Any] = {"name": "snap", **SMALL, "queries": 4, "pool": 3}


def session(lm: LM = TINY, drafter: Drafter | None = None, **more: Any) -> GenerationSession:
    profile = load_profile("exact").replace(exactness="approx", policy={**SNAP, **more}, prefill={"chunk": 64})
    policy, kv = profile.policy.settings, make.dense(lm)
    return make.session(
        lm, kv, drafter, Sampler(temperature=0.8, seed=3), policy=policy, every=policy.compression_interval, chunk=64
    )


def held(s: GenerationSession) -> list[list[list[int]]]:
    return [[pos[pos >= 0].tolist() for pos in s.cache.slots(layer).pos] for layer in range(s.lm.n_layers)]


def slots(k: Tensor, v: Tensor | None = None) -> Slots:
    return Slots(k, k if v is None else v, torch.arange(k.shape[1]).expand(k.shape[0], -1))


# --- what happens to scores


def test_values_are_weighed_by_what_each_head_adds_to_the_stream() -> None:
    v = torch.randn(K, 7, TINY.head_dim, dtype=torch.float64)
    weight = TINY.model.model.layers[1].self_attn.o_proj.weight  # [E, H * D]
    group = TINY.n_heads // K
    for order in (1, 2):
        found = ProjectedValueNorms(TINY, "it")(1, v, order)
        for h in range(TINY.n_heads):
            part = weight[:, h * TINY.head_dim : (h + 1) * TINY.head_dim]
            want = torch.stack([(part @ one).norm(p=order) for one in v[h // group]])
            torch.testing.assert_close(found[h // group, h % group], want)


def test_quantized_projections_weigh_as_what_they_stand_for() -> None:
    lm = make.model("llama", hidden_size=96, intermediate_size=96, head_dim=24, quant="int8")
    v = torch.randn(lm.n_kv_heads, 5, 24)
    module = lm.attentions[0].o_proj
    group = lm.n_heads // lm.n_kv_heads
    assert not isinstance(module, torch.nn.Linear)
    for h in range(lm.n_heads):
        alone = torch.zeros(5, lm.n_heads * 24)
        alone[:, h * 24 : (h + 1) * 24] = v[h // group]
        want = (module(alone.to(lm.dtype)) - module(torch.zeros_like(alone[:1]))).norm(p=1, dim=1)
        torch.testing.assert_close(
            ProjectedValueNorms(lm, "it")(0, v, 1)[h // group, h % group], want, rtol=0.02, atol=1e-3
        )


def test_half_goes_by_attention_and_half_by_attention_times_what_values_add() -> None:
    """CriticalKV: of four, two by score; the others by (score + 1e-4) x the mean of their heads' norms."""
    score = torch.tensor([[0.30, 0.25, 0.10, 0.09, 0.08, 0.07, 0.06, 0.05]], dtype=torch.float64)
    norm = torch.tensor([[[0.1, 0.1, 1, 1, 1, 5, 1, 9], [0.1, 0.1, 1, 1, 1, 5, 3, 9]]], dtype=torch.float64)
    s = slots(torch.zeros(1, 8, 3))
    memory = SimpleNamespace(outward=lambda layer, v, order: norm if order == 1 else None)
    found = score_stages.critical(score, s, moment(s, policy_state=memory), torch.tensor([4]))
    assert selection.uniform(found, s.pos, 4)[0].nonzero().flatten().tolist() == [0, 1, 5, 7]
    torch.testing.assert_close(found[0, 2:], (score[0, 2:] + 1e-4) * torch.tensor([1.0, 1, 1, 5, 2, 9]).double())


def test_the_best_damp_whoever_is_like_them() -> None:
    """GraphKV: a third of four damps; the second best is the best's twin, and goes for one that is like none."""
    k = torch.eye(6, dtype=torch.float64)[None, [0, 0, 1, 2, 3, 4]]
    score = torch.tensor([[0.9, 0.8, 0.5, 0.4, 0.1, 0.0]], dtype=torch.float64)
    s = slots(k)
    found = score_stages.graph(score, s, moment(s), torch.tensor([4]))
    assert selection.uniform(score, s.pos, 4)[0].tolist() == [True] * 4 + [False] * 2
    assert selection.uniform(found, s.pos, 4)[0].tolist() == [True, False, True, True, True, False]


def test_each_source_damps_its_nearest_once_and_sources_each_other() -> None:
    """GraphKV: s_j times the product of 1 - e_ij over the other sources that have it among their nearest."""
    noise = torch.Generator().manual_seed(3)
    k = torch.randn(2, 13, 3, dtype=torch.float64, generator=noise)
    score = torch.rand(2, 13, dtype=torch.float64, generator=noise)
    s, counts = slots(k), torch.tensor([10, 13])
    found = score_stages.graph(score, s, moment(s), counts)
    for head, count in enumerate(counts.tolist()):
        sources = score[head].argsort(descending=True)[: int(0.3 * count)].tolist()
        want = score[head].clone()
        for i in sources:
            cosine = torch.cosine_similarity(k[head, i], k[head], dim=1)
            near = sorted((j for j in range(13) if j != i), key=lambda j: -cosine[j])[: score_stages.NEAR]
            for j in near:
                want[j] *= 1 - cosine[j].clamp(0, 1)
        torch.testing.assert_close(found[head], want)
        assert any(want[i] < score[head, i] for i in sources)


def test_a_head_keeps_what_its_scores_won_and_chooses_by_more() -> None:
    """CriticalKV with AdaKV: heads compete by attention alone, whatever their values weigh."""
    shared, weighed = (session(keep=0.3, alloc="ada", post=post) for post in ("none", "critical"))
    for each in (shared, weighed):
        run_to_end(each.read(families.prompt(161)))
    counts = [[[len(head) for head in layer] for layer in held(each)] for each in (shared, weighed)]
    assert counts[0] == counts[1]
    assert len({n for layer in counts[0] for n in layer}) > 1
    assert held(shared) != held(weighed)


@pytest.mark.parametrize("each", [8, 4])
def test_representatives_stand_for_what_goes(each: int) -> None:
    """KVCrush: a quarter of the places goes to the middles of groups, by how many heads disagree with most.

    What a head says of a token is whether it is in the better half, however little the head keeps.
    """
    score = torch.zeros(3, 16, dtype=torch.float64)
    score[:, :8] = torch.arange(80, 72, -1, dtype=torch.float64)  # the better half of all heads
    score[1, 8:10] = 100.0  # the second head would have two of the others
    s = slots(torch.zeros(3, 16, 2))
    found = score_stages.crush(score, s, moment(s), torch.full((3,), each))
    kept = [row.nonzero().flatten().tolist() for row in selection.uniform(found, s.pos, each)]
    says, places = selection.uniform(score, s.pos, 8), each // 4
    rest = [p for p in range(16) if p not in range(each - places)]
    most = [sum(bool(says[h, p]) for p in rest) * 2 > len(rest) for h in range(3)]
    order = sorted(rest, key=lambda p: (sum(bool(says[h, p]) != most[h] for h in range(3)), p))
    size = len(order) // places
    middles = [order[at * len(order) // places + size // 2] for at in range(places)]
    assert kept[0] == sorted([*range(each - places), *middles])
    assert torch.isposinf(found).sum(1).tolist() == [each] * 3


def test_representatives_take_no_place_of_what_is_protected() -> None:
    score = torch.arange(16, dtype=torch.float64).expand(2, -1).clone()
    score[:, :6] = torch.inf
    s = slots(torch.zeros(2, 16, 2))
    for count, competing in ((7, 0), (10, 1)):  # a quarter of the places that are open
        found = score_stages.crush(score, s, moment(s), torch.full((2,), count))
        assert torch.isposinf(found).sum(1).tolist() == [count if competing else 6] * 2


def test_each_paragraph_keeps_its_share() -> None:
    """Fair eviction: of 9 places, 2 are protected; paragraphs of 8, 4 and 2 tokens get 4, 2 and 1, each its best."""
    score = torch.tensor([[torch.inf, 9, 8, 7, 6, 5, 4, 3, 2, 11, 10, 1, 0, 0.5, 0.4, torch.inf]], dtype=torch.float64)
    kinds = torch.zeros(16, dtype=torch.int8)
    kinds[[9, 13]] = SHOT
    s = slots(torch.zeros(1, 16, 2))
    found = score_stages.fair(score, s, moment(s, kinds=kinds), torch.tensor([9]))
    assert selection.uniform(found, s.pos, 9)[0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 9, 10, 13, 15]
    assert selection.uniform(score, s.pos, 9)[0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 9, 10, 15]


@pytest.mark.parametrize("name", ["critical", "graph", "crush"])
def test_stages_change_what_is_kept_and_not_how_much(name: str) -> None:
    plain, s = session(keep=0.3, alloc="uniform"), session(keep=0.3, alloc="uniform", post=name)
    for each in (plain, s):
        run_to_end(each.read(families.prompt(161)))
    counts = [[len(head) for head in layer] for layer in held(s)]
    assert counts == [[48] * K] * L
    assert held(s) != held(plain)
    assert all({0, 1, *range(155, 160)} <= set(head) for layer in held(s) for head in layer)


# --- who shares


def test_every_layer_keeps_what_holds_one_level() -> None:
    """PrefixKV: the fewest that hold the same share everywhere, and they sum to the budget."""
    curves = [[0.9, 0.95, 0.98, 1.0], [0.4, 0.7, 0.9, 1.0], [0.25, 0.5, 0.75, 1.0]]
    assert selection.prefix(curves, 7, 0) == [1, 3, 3]  # level 0.75: 0.9, 0.9, 0.75
    assert selection.prefix(curves, 12, 0) == [4, 4, 4]
    assert selection.prefix(curves, 99, 0) == [4, 4, 4]
    assert selection.prefix(curves, 8, 2) == [2, 3, 3]
    assert selection.prefix(curves, 3, 2) == [2, 2, 2], "what stays anyhow is more"
    r = torch.Generator().manual_seed(1)
    many = [(torch.rand(97, generator=r) ** p).sort(descending=True).values.cumsum(0) for p in (1, 3, 9)]
    shares_ = [(one / one[-1]).tolist() for one in many]
    for total in range(3, 292):
        counts = selection.prefix(shares_, total, 1)
        assert sum(counts) == total
        low = min(c[n - 1] for c, n in zip(shares_, counts, strict=True) if n < 97) if total < 291 else 1.0
        assert all(n == 1 or c[n - 2] <= low for c, n in zip(shares_, counts, strict=True)), "no layer has one too many"


def test_layers_share_by_what_their_heads_hold() -> None:
    flat, steep = torch.ones(2, 20).double(), 0.5 ** torch.arange(20).expand(2, -1).double()
    pos = torch.arange(20).expand(2, -1)
    masks = list(budget_split.prefix([(flat, pos), (steep, pos)], 5, 20))
    assert [m.sum(1).tolist() for m in masks] == [[9, 9], [1, 1]]  # 9 of 20 hold 0.45, and the first of the other 0.5


# --- units


def test_no_unit_is_cut_by_the_budget() -> None:
    s = session(keep=0.4, unit=16, alloc="uniform")
    run_to_end(s.read(families.prompt(201)))
    for head in (head for layer in held(s) for head in layer):
        chunks = [sum(p // 16 == c for p in head) for c in range(1, 195 // 16)]
        assert set(chunks) <= {0, 16}
        assert 16 in chunks


def test_sentences_and_examples_are_units() -> None:
    kinds = torch.zeros(9, dtype=torch.int8)
    kinds[[1, 5, 6]] = END
    cpu = torch.device("cpu")
    assert token_units.numbered("sentence", kinds, 9, cpu).tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2]
    kinds[[0, 3]] = SHOT
    assert token_units.numbered("shot", kinds, 9, cpu).tolist() == [1, 1, 1, 2, 2, 2, 2, 2, 2]
    score = torch.tensor([[4.0, 2.0, 0.0, 1.0, 5.0]])
    pos, among = torch.arange(5).view(1, -1), torch.tensor([[True, True, True, True, False]])
    unit = torch.tensor([0, 0, 0, 1, 1])
    assert token_units.chunked(score, pos, unit, among).tolist() == [[2.0, 2.0, 2.0, 1.0, 5.0]]
    mask = torch.tensor([[True, True, False, True, False]])
    assert token_units.uncut(mask, pos, unit, among).tolist() == [[False, False, False, True, False]]


@pytest.mark.parametrize("unit", ["shot", "sentence"])
def test_of_a_text_that_is_one_unit_as_much_stays_as_of_any(unit: str) -> None:
    s = session(keep=0.4, unit=unit, alloc="uniform")
    run_to_end(s.read(families.prompt(161)))
    assert {len(head) for layer in held(s) for head in layer} == {64}


def test_a_text_that_is_forked_weighs_values_by_the_same_weights() -> None:
    s = session(post="critical")
    assert s.fork().policy_record.state.outward is s.policy_record.state.outward  # type: ignore[union-attr]


@pytest.mark.parametrize("unit", ["shot", "sentence"])
def test_examples_stay_whole_and_the_answer_is_apart(unit: str) -> None:
    s = session(keep=0.4, unit=unit, keep_new=9, compression_interval=7)
    starts = [2, 30, 47, 90, 120]
    s.kind_spans = [KindSpan(at, at + 1, SHOT) if unit == "shot" else KindSpan(at - 1, at, END) for at in starts]
    run_to_end(s.read(families.prompt(161)))
    kept = held(s)
    for head in (head for layer in kept for head in layer):
        for a, b in zip(starts, [*starts[1:], 155], strict=True):
            assert len({p in head for p in range(a, b)}) == 1
    list(iterate_events(s.stream(40)))
    for before, now in zip(kept, held(s), strict=True):
        assert [[p for p in head if p < 160] for head in now] == before


@pytest.mark.parametrize("alloc", ["uniform", "ada", "pyramid", "global", "prefix"])
def test_layers_keep_what_the_first_of_them_does(alloc: str) -> None:
    s, alone = session(keep=0.3, reuse_layers=2, alloc=alloc), session(keep=0.3, alloc=alloc)
    for each in (s, alone):
        run_to_end(each.read(families.prompt(161)))
    assert held(s)[0] == held(s)[1] != held(s)[2]
    assert held(alone)[0] != held(alone)[1]
    if alloc in ("uniform", "ada"):
        assert held(s)[0] == held(alone)[0]


# --- the answer's region


def test_the_region_of_the_answer_grows_in_equal_steps() -> None:
    """SCOPE, adaptive: from the newest alone, one more each (T - newest) / (most - newest) tokens."""
    policy = Snap(sinks=2, recent=5, keep_new=9, grow_new=45)
    assert [policy.room_new(n) for n in (0, 5, 14, 15, 25, 35, 45, 99)] == [5, 5, 5, 6, 7, 8, 9, 9]
    s = session(keep=1.0, keep_new=9, grow_new=45, compression_interval=10)
    run_to_end(s.read(families.prompt(41)))
    sizes = []
    for _ in range(5):
        list(iterate_events(s.stream(10)))
        sizes.append({sum(p >= 40 for p in head) for layer in held(s) for head in layer})
    assert sizes == [{5}, {6}, {7}, {8}, {9}]


# --- queries of a provisional answer


def test_queries_of_a_greedy_answer_vote() -> None:
    ids = families.prompt(61)
    s = session(keep=0.3, lookahead=4, alloc="uniform")
    run_to_end(s.read(ids))

    kv, queries, text = make.dense(TINY), [], ids[:60]
    (made,) = run([ForwardRequest(TINY, Rows.chain(text, 0), kv, want=[59], record_queries=range(60))])
    stored = made.fresh
    for _ in range(4):  # the newest stored token, and three that follow
        n = len(text)
        (made,) = run([ForwardRequest(TINY, Rows.chain(text, 0), kv, want=[n - 1], record_queries=[n - 1])])
        queries.append(made.queries)
        text = [*text, int(made.logits[0].argmax())]
    for layer in range(L):
        k = stored[layer].k
        past = Slots(k, stored[layer].v, torch.arange(60).expand(K, -1))
        q = torch.cat([one[layer] for one in queries], 1)
        at = moment(past, q, layer, q_pos=torch.arange(59, 63), scale=TINY.attention_params[layer].scale)
        guarded = (past.pos < 2) | (past.pos >= 55)
        score = Snap(queries=4, pool=3).score(past, at).masked_fill(guarded, torch.inf)
        want = selection.uniform(score, past.pos, 18)
        assert held(s)[layer] == [row.nonzero().flatten().tolist() for row in want]
    heard = session(keep=0.3, alloc="uniform")
    run_to_end(heard.read(ids))
    assert held(heard) != held(s)


def test_a_provisional_answer_leaves_nothing_behind() -> None:
    s, plain = session(keep=1.0, lookahead=5), session(keep=1.0)
    for each in (s, plain):
        run_to_end(each.read(families.prompt(61)))
        list(iterate_events(each.stream(9)))
    assert (s.ids, held(s)) == (plain.ids, held(plain))


# --- protection


@pytest.mark.parametrize("what", ["tools", "question"])
@pytest.mark.parametrize("name", ["snap", "keydiff"])
def test_what_tools_said_and_the_last_question_stay_at_six_percent(name: str, what: str) -> None:
    span = KindSpan(60, 70, TOOLS) if what == "tools" else KindSpan(140, 151, QUESTION)
    key = "protect" if what == "tools" else "protect_question"
    only = {} if name == "snap" else {"queries": None, "pool": None}
    for is_on in (True, False):
        more = {k: v for k, v in {**SNAP, "name": name, "keep": 0.06, key: is_on, **only}.items() if v is not None}
        profile = load_profile("exact").replace(exactness="approx", policy=more, prefill={"chunk": 64})
        s = assemble.session(TINY, profile)
        s.kind_spans = [span]
        run_to_end(s.read(families.prompt(401)))
        stays = {*range(span.start, span.end)}
        assert all(stays <= set(head) for layer in held(s) for head in layer) == is_on
        assert (QUESTION in s.marks) == (is_on and what == "question")


# --- with drafters, and refusals

VARIANTS: dict[str, dict[str, Any]] = {
    "critical": {"post": "critical"},
    "graph": {"post": "graph", "alloc": "prefix"},
    "crush": {"post": "crush", "alloc": "global"},
    "fair": {"post": "fair", "alloc": "ada"},
    "ahead": {"lookahead": 5},
    "grows": {"grow_new": 30},
    "reuse": {"unit": 4, "reuse_layers": 2},
}
DRAFTERS: dict[str, Any] = {
    "right": lambda truth: drafters.Right(truth, 97, -1),
    "bush": lambda truth: drafters.Bush(truth, 97, -1),
}


def spoken(name: str, lm: LM, drafter: Drafter) -> list[int]:
    """Two turns of a chat."""
    s = session(lm, drafter, keep=0.4, keep_new=9, compression_interval=7, **VARIANTS[name])
    run_to_end(s.read(families.prompt(60, seed=2)))
    list(iterate_events(s.stream(30)))
    run_to_end(s.read(families.prompt(9)))
    list(iterate_events(s.stream(12)))
    return s.ids


@cache
def plainly(name: str, is_full: bool) -> list[int]:
    return spoken(name, TINY if is_full else SLIDING, Off())


@pytest.mark.parametrize(("name", "is_full", "drafter"), pairs(product(VARIANTS, (True, False), DRAFTERS)))
def test_any_drafter_gives_the_text_of_plain_decoding(name: str, is_full: bool, drafter: str) -> None:
    want = plainly(name, is_full)
    assert spoken(name, TINY if is_full else SLIDING, DRAFTERS[drafter](want)) == want


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"post": "graph", "unit": 4}, "it needs unit = 1"),
    ({"name": "keydiff", "post": "critical"}, 'post = "critical" needs scores that add up'),
    ({"name": "knorm", "alloc": "prefix"}, 'alloc = "prefix" needs scores that add up'),
    ({"grow_new": 100}, "grow_new = 100 needs recent < keep_new < grow_new"),
    ({"alloc": "headmap", "headmap": "x", "reuse_layers": 2}, "reuse_layers = 2"),
    ({"unit": "word"}, "unit"),
]


@pytest.mark.parametrize(("policy", "says"), WRONG)
def test_settings_that_cannot_be_kept_are_refused_by_name(policy: dict[str, Any], says: str) -> None:
    with pytest.raises(KvcliError) as refused:
        load_profile("exact").replace(exactness="approx", policy={"name": "snap", **policy})
    assert says in "\n".join([str(refused.value), *refused.value.lines])


def test_models_that_cannot_be_judged_so_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    latent = make.model("youtu")
    with pytest.raises(KvcliError) as found:
        session(latent, post="critical")
    assert found.value.code == "policy_unsupported"
    shared = make.model("gemma4_shared")
    with pytest.raises(KvcliError, match="those of others"):
        assemble.session(
            shared, load_profile("exact").replace(exactness="approx", policy={"name": "kvzip", "plus": True})
        )
    uneven = (replace(TINY.shapes[0], n_kv_heads=K + 1), *TINY.shapes[1:])
    monkeypatch.setattr(TINY, "shapes", uneven)
    with pytest.raises(KvcliError, match="uneven"):
        Snap(reuse_layers=2).requirements(TINY)
