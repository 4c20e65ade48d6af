"""Policies that keep what scores best: how much they keep of what, who always stays, and when."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcli import assemble
from kvcli.engine.drafting.drafter import Drafter
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.sequence.state import SYSTEM, KindSpan
from kvcli.errors import KvcliError
from kvcli.kv.out_of_memory import CacheFull
from kvcli.kv.slots import Slots, nbytes
from kvcli.kv.tiers.dense import Dense
from kvcli.methods.drafts.lookahead import Lookahead
from kvcli.methods.drafts.ngram import Ngram
from kvcli.methods.drafts.off import Off
from kvcli.methods.policies.keydiff import KeyDiff
from kvcli.methods.policies.kvzip import KVzip
from kvcli.methods.policies.snapkv import Snap
from kvcli.settings.profile import load_profile
from tests import drafters, families, make
from tests.covering import pairs
from tests.policies import kept, moment

torch.set_num_threads(1)
TINY = make.model()
SLIDING = make.model("gemma3")
L, K = TINY.n_layers, TINY.n_kv_heads
SMALL = {"sinks": 2, "recent": 5}
NAMES: dict[str, dict[str, Any]] = {
    "snap": {"queries": 4, "pool": 3},
    "expected": {"samples": 30, "horizon": 40},
    "keydiff": {},
    "curdkv": {"part": 4},
    "knorm": {},
    "lag": {"part": 8},
    "tova": {},
    "h2o": {"queries": 16, "compression_interval": 16},
    "vatp": {"queries": 4},
    "kvzip": {"piece": 40, "lead": 3},
}
ALLOCS = ("uniform", "ada", "pyramid", "headmap", "global")


def session(name: str, lm: LM = TINY, chunk: int = 64, **more: Any) -> GenerationSession:
    settings = {"name": name, **SMALL, **NAMES[name], **more}
    profile = load_profile("exact").replace(exactness="approx", policy=settings, prefill={"chunk": chunk})
    return assemble.session(lm, profile)


def held(s: GenerationSession) -> list[list[list[int]]]:
    """Positions by layer and head."""
    of = [s.cache.slots(layer).pos for layer in range(s.lm.n_layers)]
    return [[sorted(p for p in head.tolist() if p >= 0) for head in pos] for pos in of]


def heads(s: GenerationSession) -> Iterator[list[int]]:
    for layer in held(s):
        yield from layer


@pytest.fixture
def headmap(tmp_path: Path) -> str:
    path = tmp_path / "heads.tsv"
    path.write_text("\n".join("\t".join(str(layer * K + j + 1) for j in range(K)) for layer in range(L)))
    return str(path)


@pytest.mark.parametrize("alloc", ALLOCS)
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_compressed_to_the_share_that_was_asked_for(name: str, alloc: str, headmap: str) -> None:
    s = session(name, keep=0.3, alloc=alloc, **({"headmap": headmap} if alloc == "headmap" else {}))
    run_to_end(s.read(families.prompt(201)))

    counts = [len(head) for head in heads(s)]

    ends = {0, 1, *range(195, 200)}
    assert all(ends <= set(head) for head in heads(s)), "sinks and the newest stay"
    short = sum(max(0, len(ends) - count) for count in counts)
    assert short == 0
    assert sum(counts) == L * K * 60
    if alloc == "uniform":
        assert set(counts) == {60}
    if alloc == "pyramid":
        assert counts[0] > counts[-1]
    if alloc == "headmap":
        assert counts == sorted(counts)
        assert counts[-1] > counts[0]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_is_what_the_plan_of_memory_says(name: str) -> None:
    for share in ({"keep": 0.25}, {"budget": 30, "keep_new": 0}, {"keep": 1.0}, {"keep": 0.001}):
        for n in (1, 6, 150):
            s = session(name, **share)
            run_to_end(s.read(families.prompt(n + 1)))
            settings = load_profile("exact").replace(
                exactness="approx", policy={"name": name, **SMALL, **NAMES[name], **share}
            )
            assert sum(len(head) for head in heads(s)) == L * K * settings.policy.footprint(n).slots


def test_kept_shares_free_memory() -> None:
    def size(keep: float) -> int:
        s = session("keydiff", keep=keep, alloc="uniform")
        run_to_end(s.read(families.prompt(481)))
        return sum(nbytes(s.cache).values())

    assert size(0.25) <= 0.28 * size(1.0)


@pytest.mark.parametrize("alloc", ["uniform", "ada", "global"])
def test_the_system_prompt_stays_and_counts(alloc: str) -> None:
    for protect in (True, False):
        s = session("snap", keep=0.3, alloc=alloc, protect=protect)
        s.kind_spans = [KindSpan(20, 45, SYSTEM), KindSpan(90, 100, SYSTEM)]
        run_to_end(s.read(families.prompt(201)))
        assert all({*range(20, 45), *range(90, 100)} <= set(head) for head in heads(s)) == protect
        assert sum(len(head) for head in heads(s)) == L * K * 60


def test_what_is_protected_stays_beyond_the_budget() -> None:
    s = session("snap", keep=0.1)
    s.kind_spans = [KindSpan(20, 80, SYSTEM)]
    run_to_end(s.read(families.prompt(201)))
    assert {tuple(head) for head in heads(s)} == {(0, 1, *range(20, 80), *range(195, 200))}


@pytest.mark.parametrize("name", ["snap", "h2o", "expected", "keydiff", "lag"])
def test_the_answer_has_a_budget_of_its_own(name: str) -> None:
    every = 16
    s = session(name, keep=0.3, keep_new=20, compression_interval=every)
    run_to_end(s.read(families.prompt(121)))
    prompt = held(s)
    for _ in iterate_events(s.stream(100)):
        new = [[p for p in head if p >= 120] for head in heads(s)]
        assert [[[p for p in head if p < 120] for head in layer] for layer in held(s)] == prompt
        assert max(len(one) for one in new) < 20 + every
    assert {len(one) for one in new} == {20 + s.committed % every}
    assert all({*range(s.committed // every * every - 5, s.committed)} <= set(one) for one in new)
    assert any(one != list(range(s.committed - len(one), s.committed)) for one in new), "some older ones stayed"


def test_without_one_the_answer_stays_whole() -> None:
    s = session("snap", keep=0.3, compression_interval=8)
    run_to_end(s.read(families.prompt(121)))
    list(iterate_events(s.stream(60)))
    assert all(set(range(120, 180)) <= set(head) for head in heads(s))


@pytest.mark.parametrize("name", NAMES)
def test_a_later_prompt_is_compressed_with_what_came_since(name: str) -> None:
    s = session(name, keep=0.3, alloc="uniform", keep_new=0)
    run_to_end(s.read(families.prompt(121)))
    before = held(s)
    list(iterate_events(s.stream(20)))
    run_to_end(s.read(families.prompt(100, seed=5)))

    for layer, was in zip(held(s), before, strict=True):
        for head, old in zip(layer, was, strict=True):
            assert [p for p in head if p < 120] == old
            assert len([p for p in head if p >= 120]) == round(0.3 * 120)


def test_a_budget_is_of_all_prompts_together() -> None:
    s = session("snap", budget=40, alloc="uniform")
    run_to_end(s.read(families.prompt(121)))
    list(iterate_events(s.stream(20)))
    run_to_end(s.read(families.prompt(100, seed=5)))
    assert {len(head) for head in heads(s)} == {40}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "kvzip"])
@pytest.mark.parametrize("share", [{"keep": 0.25}, {"budget": 30}])
def test_compressing_each_chunk_bounds_memory_while_reading(name: str, share: dict[str, Any]) -> None:
    s = session(name, chunk=50, per_chunk=True, alloc="uniform", **share)
    for read in iterate_events(s.read(families.prompt(401))):
        most = share.get("budget") or round(0.25 * read)
        assert {len(head) for head in heads(s)} == {most}
    assert s.committed == 400


@pytest.mark.parametrize("alloc", ["ada", "pyramid", "headmap", "global"])
def test_each_chunk_is_compressed_to_the_share_of_what_was_read(alloc: str, headmap: str) -> None:
    more = {"headmap": headmap} if alloc == "headmap" else {}
    s = session("snap", chunk=50, per_chunk=True, keep=0.3, alloc=alloc, **more)
    for read in iterate_events(s.read(families.prompt(401))):
        assert sum(len(head) for head in heads(s)) == L * K * round(0.3 * read)
    assert s.committed == 400


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("alloc", ["ada", "global", "pyramid"])
def test_sliding_layers_are_left_whole(name: str, alloc: str) -> None:
    s = session(name, SLIDING, keep=0.3, alloc=alloc)
    run_to_end(s.read(families.prompt(121)))
    counts = [[len(head) for head in layer] for layer in held(s)]
    for layer, window in enumerate(SLIDING.windows):
        if window is None:
            assert sum(counts[layer]) == SLIDING.n_kv_heads * 36
        else:
            assert counts[layer] == [120] * SLIDING.n_kv_heads


@pytest.mark.parametrize("unit", [4, 16])
def test_chunks_stay_or_go_together(unit: int) -> None:
    s = session("snap", keep=0.4, unit=unit, alloc="uniform")
    run_to_end(s.read(families.prompt(201)))
    for head in heads(s):
        middle = [p for p in head if unit <= p < 195 // unit * unit]
        cut = [c for c in {p // unit for p in middle} if sum(p // unit == c for p in middle) < unit]
        assert not cut, "the budget cuts none"


@pytest.mark.parametrize("name", [n for n in NAMES if n != "kvzip"])
def test_the_order_of_slots_decides_nothing(name: str) -> None:
    r = torch.Generator().manual_seed(0)
    pos = torch.stack([torch.randperm(60, generator=r) for _ in range(K)])
    pos[1, ::7] = -1
    k, v = (torch.randn(K, 60, TINY.head_dim, generator=r, dtype=torch.float64) for _ in "kv")
    q = torch.randn(TINY.n_heads, 16, TINY.head_dim, generator=r, dtype=torch.float64)
    order = torch.randperm(60, generator=r)
    masks = []
    for s in (Slots(k, v, pos), Slots(k[:, order], v[:, order], pos[:, order])):
        policy = _settings(name, keep=0.4)
        wants = policy.requirements(TINY)
        guarded = wants.guard.covers(s.pos, torch.zeros(0, dtype=torch.int8))
        at = moment(s, q, phase="read", n_prompt=60, protected=guarded, policy_state=wants.policy_state())
        mask = kept(policy, s, at)
        assert bool((mask | ~guarded).all())
        assert not bool((mask & (s.pos < 0)).any())
        masks.append(mask)
    assert torch.equal(masks[0][:, order], masks[1])


def _settings(name: str, **more: Any) -> Any:
    profile = load_profile("exact").replace(exactness="approx", policy={"name": name, **SMALL, **NAMES[name], **more})
    return profile.policy.settings


DRAFTERS: dict[str, Any] = {
    "ngram": lambda truth: Ngram(adaptive=False).drafter(),
    "fafo": lambda truth: Lookahead(adaptive=False, view="stream", sinks=2, recent=5, refresh=3).drafter(),
    "right": lambda truth: drafters.Right(truth, 97, -1),
    "bush": lambda truth: drafters.Bush(truth, 97, -1),
}
ROWS = [*((name, "ada") for name in NAMES), ("snap", "uniform"), ("snap", "pyramid"), ("h2o", "global")]
EXACT = {True: make.model("llama", torch.float64), False: make.model("gpt_oss", torch.float64)}


@cache
def plainly(name: str, alloc: str, full: bool) -> list[int]:
    return spoken(name, alloc, full, Off())


def spoken(name: str, alloc: str, full: bool, drafter: Drafter) -> list[int]:
    """Two turns of a chat."""
    lm, new = EXACT[full], {} if name == "kvzip" else {"keep_new": 9, "compression_interval": 7}
    policy = _settings(name, keep=0.4, alloc=alloc, **new)
    s = make.session(
        lm,
        drafter=drafter,
        sampler=Sampler(temperature=0.8, seed=3),
        policy=policy,
        every=policy.compression_interval,
        chunk=19,
    )
    phrase = families.prompt(9)
    run_to_end(s.read(families.prompt(40, seed=2) + phrase + families.prompt(5, seed=3) + phrase[:6]))
    list(iterate_events(s.stream(30)))
    run_to_end(s.read(phrase))
    list(iterate_events(s.stream(12)))
    return s.ids


@pytest.mark.parametrize(
    ("name", "alloc", "full", "drafter"), pairs((*row, *rest) for row, *rest in product(ROWS, EXACT, DRAFTERS))
)
def test_any_drafter_gives_the_text_of_plain_decoding(name: str, alloc: str, full: bool, drafter: str) -> None:
    want = plainly(name, alloc, full)
    assert spoken(name, alloc, full, DRAFTERS[drafter](want)) == want


@pytest.mark.parametrize("name", NAMES)
def test_a_fork_and_an_undo_answer_alike(name: str) -> None:
    ids, s = families.prompt(90), session(name, keep=0.4)
    run_to_end(s.read(ids))
    other = s.fork()
    first = [token for step in iterate_events(s.stream(20)) for token in step.new]
    assert [token for step in iterate_events(other.stream(20)) for token in step.new] == first
    assert s.resume(ids) == 0, "something was forgotten, so all is read again"
    run_to_end(s.read(ids))
    assert [token for step in iterate_events(s.stream(20)) for token in step.new] == first


@pytest.mark.parametrize("name", NAMES)
def test_a_text_taken_back_before_anything_was_forgotten_competes_again(name: str) -> None:
    s, fresh = session(name, keep=0.9), session(name, keep=0.9)
    run_to_end(s.read(families.prompt(7)))
    s.resume(families.prompt(4))
    ids = families.prompt(120, seed=8)
    shared = s.resume(ids)
    run_to_end(s.read(ids[len(s.ids) :]))
    run_to_end(fresh.read(ids))
    assert shared == 0
    assert held(s) == held(fresh)


@pytest.mark.parametrize("where", ["_score", "_hold"])
@pytest.mark.parametrize("name", NAMES)
def test_a_compression_point_that_failed_half_way_is_made_again(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s, fresh = (session(name, alloc="uniform") for _ in range(2))
    for text in (s, fresh):
        run_to_end(text.read(families.prompt(60)))
        list(iterate_events(text.stream(3)))
        run_to_end(text.step(most=1))
    of = type(s.policy) if where == "_score" else Dense
    asked, real = list[object](), getattr(of, where)

    def failing(*args: Any) -> Any:
        asked.append(None)
        if len(asked) == 2:
            raise CacheFull("no room")
        return real(*args)

    monkeypatch.setattr(of, where, failing)
    with pytest.raises(CacheFull):
        run_to_end(s.read(families.prompt(60, seed=8)))
    run_to_end(s.compress_cache("read"))
    run_to_end(fresh.read(families.prompt(60, seed=8)))
    assert [[len(head) for head in layer] for layer in held(s)] == [
        [len(head) for head in layer] for layer in held(fresh)
    ]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": "h2o", "queries": 16, "compression_interval": 32}, "queries = 16 is less than compression_interval = 32"),
    ({"name": "snap", "pool": 4}, "pool = 4 has no middle"),
    ({"name": "snap", "budget": 10}, "budget = 10 is less than sinks + recent = 68"),
    ({"name": "snap", "keep_new": 10}, "keep_new = 10 is less than sinks + recent = 68"),
    ({"name": "snap", "alloc": "headmap"}, "needs headmap"),
    ({"name": "snap", "headmap": "x.tsv"}, "headmap"),
    ({"name": "kvzip", "per_chunk": True}, "per_chunk = true is impossible"),
    ({"name": "kvzip", "keep_new": 100}, "keep_new = 100 is impossible"),
    ({"name": "snap", "keep": 0.0}, "above 0 and at most 1"),
    ({"name": "snap", "keep": 1.5}, "above 0 and at most 1"),
]


@pytest.mark.parametrize(("policy", "says"), WRONG)
def test_settings_that_cannot_be_kept_are_refused_by_name(policy: dict[str, Any], says: str) -> None:
    with pytest.raises(KvcliError) as refused:
        load_profile("exact").replace(exactness="approx", policy=policy)
    assert says in "\n".join([str(refused.value), *refused.value.lines])


def test_expected_attention_refuses_a_model_whose_rotary_embedding_it_does_not_find(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcli.engine.hf.rope._WITHIN", {torch.float32: -1.0})  # nothing is near enough
    monkeypatch.setattr(TINY, "rotaries", None)  # as if nobody had asked
    with pytest.raises(KvcliError, match="does not find them") as refused:
        session("expected")
    assert refused.value.try_


def test_what_stays_is_said_in_words() -> None:
    assert Snap().footprint(0).says == "50% of a prompt, by attention from its end"
    assert (
        KeyDiff(budget=1024).footprint(0).says
        == "1,024 tokens per head of a prompt, by how much its keys differ from the others"
    )
    assert KVzip(keep=0.25).footprint(0).says == "25% of a prompt, by attention while the prompt is repeated"


@pytest.mark.parametrize("name", ["snap", "expected"])
def test_the_shipped_profiles_halve_a_prompt(name: str) -> None:
    profile = load_profile(name)
    assert profile.exactness == "approx"
    assert profile.policy.method == name
    assert profile.policy.footprint(10_000).slots == 5000
    s = assemble.session(TINY, profile)
    run_to_end(s.read(families.prompt(301)))
    assert sum(len(head) for head in heads(s)) == L * K * 150
    list(iterate_events(s.stream(8)))


def test_a_head_that_was_emptied_by_a_map_still_keeps_what_is_protected(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    rows = [[0.0] * K for _ in range(L)]
    rows[1][0] = 1.0
    path.write_text(f'{{"heads": {rows}}}')
    s = session("snap", keep=0.1, alloc="headmap", headmap=str(path), floor=0.0)
    run_to_end(s.read(families.prompt(201)))
    counts = [[len(head) for head in layer] for layer in held(s)]
    assert counts[1][0] == 20 * L * K - 7 * (L * K - 1)
    assert sum(map(sum, counts)) == 20 * L * K


BROKEN = {
    "missing": None,
    "words": "layer one\n",
    "ragged": "1 2\n1\n",
    "empty": "",
    "negative": "1 -2\n1 1\n",
    "nan": "1 nan\n1 1\n",
    "no heads": '{"rows": [[1]]}',
    "flat": '{"heads": [1, 2]}',
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_is_no_head_map_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "map"
    text = BROKEN[what]
    if text is not None:
        path.write_text(text)
    with pytest.raises(KvcliError, match="is no head map") as refused:
        session("snap", alloc="headmap", headmap=str(path))
    assert refused.value.code == "bad_headmap"


def test_moments_of_sliding_layers_are_judged_by_nobody() -> None:
    s = Slots(torch.randn(K, 9, 4), torch.randn(K, 9, 4), torch.arange(9).expand(K, -1))
    policy = Snap(**SMALL, keep=0.1)
    at = moment(s, phase="read", window=3, policy_state=policy.requirements(TINY).policy_state())
    assert kept(policy, s, at).all()
