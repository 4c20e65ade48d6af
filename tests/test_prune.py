"""Tokens of a prompt that stay behind on their way through the layers (LazyLLM)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import count, pairwise

import pytest
import torch

from kvcli.engine.engine import Engine, generate_together, iterate_events, run, run_to_end
from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession, commit
from kvcli.engine.sequence.state import PUNCT, QUESTION, SPECIAL, SYSTEM, KindSpan
from kvcli.errors import BadConfig, BadModel
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.cache.tiered_cache import TieredCache
from kvcli.kv.slots import KVCache
from kvcli.kv.tiers.dense import Dense
from kvcli.methods.prune import layer_pruner
from kvcli.methods.prune.chunked import Chunked
from kvcli.methods.prune.cut import SingleCut
from kvcli.methods.prune.lazy import LazyLLM
from kvcli.methods.prune.protected_tokens import PruneSettings
from kvcli.methods.prune.random import Random
from kvcli.settings.profile import Profile
from tests import families, make
from tests.policies import Recent

torch.set_num_threads(1)
N = 45


@cache
def lm(name: str, dtype: torch.dtype = torch.float64) -> LM:
    return make.model(name, dtype)


def store(model: LM, n: int) -> Dense:
    kv, rows = make.dense(model), Rows.chain(families.prompt(n, seed=7), 0)
    if n:
        commit(kv, rows, *run([ForwardRequest(model, rows, kv)]), range(n))
    return kv


def session(model: LM, pruning: PruneSettings | None, chunk: int = 16, **more: object) -> GenerationSession:
    return make.session(model, chunk=chunk, pruning=pruning, **more)  # type: ignore[arg-type]


def settings(**changes: object) -> LazyLLM:
    usual = {"start_prune_layer": 0.4, "end_prune_layer": 0.7, "num_prune": 2, "recent": 3, "sinks": 1, "min_prompt": 8}
    return LazyLLM(**{**usual, **changes})  # type: ignore[arg-type]


def read(s: GenerationSession, ids: list[int]) -> GenerationSession:
    s.start_answer(ids, Sampler())
    while run_to_end(s.prefill_chunk(ids)):
        pass
    return s


def said(s: GenerationSession, ids: list[int], n: int = 20) -> list[int]:
    read(s, ids)
    list(iterate_events(s.stream(n)))
    return s.ids[len(ids) :]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "qwen3"])
def test_with_all_kept_nothing_changes(name: str) -> None:
    idle = settings(start_keep_ratio=1.0, end_keep_ratio=1.0)
    ids = families.prompt(N)
    first = said(session(lm(name), None), ids)
    s = session(lm(name), idle)
    assert said(s, ids) == first
    turn = [*ids, *first, *families.prompt(30, seed=4)]
    assert said(s, turn) == said(session(lm(name), None), turn)


@pytest.mark.parametrize("chunk", [7, 16, 100])
def test_those_that_the_end_looks_at_go_on(chunk: int) -> None:
    """By hand: the rule of the paper over the stored keys of the layer below."""
    model, ids = lm("llama"), families.prompt(N + 1)
    lazy = settings(start_keep_ratio=0.6, end_keep_ratio=0.3)
    s = session(model, lazy, chunk)
    run_to_end(s.read(ids))
    live = list(range(N))
    full = session(model, None, 100)
    run_to_end(full.prefill_chunk(ids))
    cuts = lazy.cuts(model)
    for layer in range(model.n_layers):
        if layer in cuts:
            (made,) = run([ForwardRequest(model, Rows.chain(ids[:N], 0), make.dense(model), record_queries=[N - 1])])
            if layer == min(cuts):  # below the first cut the pruned pass is the plain one
                q, k = made.queries[layer - 1][:, 0], full.cache.slots(layer - 1).k
                group = q.shape[0] // k.shape[0]
                scores = (
                    torch.stack([q[h] @ k[h // group].T for h in range(q.shape[0])])
                    * model.attention_params[layer - 1].scale
                )
                mass = scores.softmax(-1).mean(0)
                best = mass.argsort(descending=True, stable=True)[: math.ceil(cuts[layer] * N)].tolist()
                live = sorted({*best, 0, N - 3, N - 2, N - 1})
                assert s.cache.slots(layer).pos[0].tolist() == live
        held = s.cache.slots(layer).pos
        assert bool((held == held[:1]).all())
        assert set(held[0].tolist()) <= set(live)
        live = held[0].tolist()
    assert len(live) < N / 2 + 4


def test_the_head_that_most_looks_in_any_of_several_layers_decides() -> None:
    """By hand: a token's score is its highest attention from any head of the layers between two cuts."""
    model, ids = make.model("llama", torch.float64, num_hidden_layers=6), families.prompt(N + 1)
    one = {
        "start_prune_layer": 0.5,
        "end_prune_layer": 0.5,
        "num_prune": 1,
        "start_keep_ratio": 0.2,
        "end_keep_ratio": 0.2,
    }
    (made,) = run([ForwardRequest(model, Rows.chain(ids[:N], 0), make.dense(model), record_queries=[N - 1])])
    shares = []
    for layer in range(3):
        q, k = made.queries[layer], made.fresh[layer].k.repeat_interleave(2, 0)
        shares.append((q @ k.transpose(1, 2) * model.attention_params[layer].scale)[:, 0].softmax(-1))
    for depth in (1, 2, 9):
        s = session(model, settings(**one, recent=1, sinks=0, heads="max", score_layers=depth), 16)
        read(s, ids)
        best = torch.cat(shares[-depth:]).amax(0).argsort(descending=True)[: math.ceil(0.2 * N)].tolist()
        assert s.cache.slots(3).pos[0].tolist() == sorted({*best, N - 1})


@pytest.mark.parametrize("method", ["lazy", "random", "cut", "cut, again", "chunked"])
def test_template_system_text_and_question_go_through_every_layer(method: str) -> None:
    """By the kind of an id, and by where they stand; what is neither may stay behind."""
    model, ids = lm("llama"), families.prompt(N)
    table = torch.zeros(model.vocab, dtype=torch.int8)
    table[ids[17]] = SPECIAL
    spans = [KindSpan(4, 7, SYSTEM), KindSpan(29, 31, QUESTION), KindSpan(21, 23, PUNCT)]
    wanted = {17, 4, 5, 6, 29, 30}
    held = {}
    for protect in (True, False):
        s = session(model, replace(METHODS[method], protect=protect), 64, kinds=table)
        s.start_answer(ids, Sampler(), spans=spans)
        while run_to_end(s.prefill_chunk(ids)):
            pass
        held[protect] = set(s.cache.slots(model.n_layers - 1).pos[0].tolist())
    assert wanted <= held[True]
    assert not wanted <= held[False]
    assert not {21, 22} <= held[True] & held[False]


def test_neighbours_share_the_highest_score_among_them() -> None:
    """Where one goes on, so do those beside it, as far as there is room."""
    ids = families.prompt(N + 1)
    lone, pooled = (session(lm("llama"), settings(start_keep_ratio=0.4, end_keep_ratio=0.4, pool=p)) for p in (1, 5))
    runs = []
    for s in (lone, pooled):
        run_to_end(s.read(ids))
        held = s.cache.slots(2).pos[0].tolist()
        runs.append(sum(b - a > 1 for a, b in pairwise(held)))
    assert runs[1] < runs[0]


def test_a_bound_on_what_is_lost_keeps_more() -> None:
    ids = families.prompt(N + 1)
    few, many = (
        session(lm("llama"), settings(end_keep_ratio=0.1)),
        session(lm("llama"), settings(end_keep_ratio=0.1, mass=0.95)),
    )
    for s in (few, many):
        run_to_end(s.read(ids))
    last = lm("llama").n_layers - 1
    assert few.cache.n_slots(last) < many.cache.n_slots(last) <= N


def test_short_prompts_and_later_questions_are_read_whole() -> None:
    model = lm("llama")
    s = session(model, settings(min_prompt=40))
    said(s, families.prompt(N), 5)
    assert s.approximations == {"forgotten"}
    missing = s.committed - s.cache.n_slots(model.n_layers - 1)
    assert missing > 0
    turn = [*s.ids, *families.prompt(9, seed=8)]
    assert said(s, turn, 1)
    assert s.committed - s.cache.n_slots(model.n_layers - 1) == missing
    assert said(session(model, settings(min_prompt=99)), families.prompt(N)) == said(
        session(model, None), families.prompt(N)
    )


def test_going_back_reads_again() -> None:
    s = session(lm("llama"), settings())
    ids = families.prompt(N)
    first = said(s, ids, 5)
    assert s.start_answer(ids[: N - 5], Sampler()) == 0
    assert said(s, ids, 5) == first


def test_queries_of_a_policy_are_recorded_beside() -> None:
    s = session(lm("llama"), settings(), policy=Recent(20), every=4)
    assert len(said(s, families.prompt(N))) == 20


def test_beside_other_texts_it_reads_as_alone() -> None:
    model, ids = lm("llama"), families.prompt(N)
    alone = said(session(model, settings()), ids)
    works = [session(model, settings()), session(model, None), session(model, None)]

    def work(s: GenerationSession, ids: list[int]):  # type: ignore[no-untyped-def]
        yield from s.read(ids)
        yield from s.stream(20)

    engine = Engine()
    texts = [ids, families.prompt(12, seed=5), families.prompt(30, seed=6)]
    for s, text in zip(works, texts, strict=True):
        engine.add(work(s, text))
    while engine.step():
        pass
    assert works[0].ids[N:] == alone
    for s, text in zip(works[1:], texts[1:], strict=True):
        assert s.ids[len(text) :] == said(session(model, None), text)


@contextmanager
def breaking(kv: KVCache, nth: int) -> Iterator[None]:
    """Storing runs out of memory, that time."""
    calls = count(1)
    whole = {name: getattr(kv, name) for name in ("append", "take")}

    def broken(name: str) -> Callable[..., None]:
        def store(*args: object) -> None:
            if next(calls) == nth:
                raise MemoryError
            whole[name](*args)

        return store

    for name in whole:
        setattr(kv, name, broken(name))
    try:
        yield
    finally:
        for name in whole:
            delattr(kv, name)


def test_a_pass_that_breaks_leaves_the_kv_cache_as_it_was() -> None:
    model, ids = lm("llama"), families.prompt(N)
    s = session(model, settings(), 7)
    with breaking(s.cache, 9), pytest.raises(MemoryError):
        run_to_end(s.read(ids))
    assert s.committed == 0
    assert not any(s.cache.n_slots(layer) for layer in range(model.n_layers))
    assert said(s, ids) == said(session(model, settings(), 7), ids)


def test_a_model_whose_layers_all_slide_is_refused_before_anything_is_read() -> None:
    with pytest.raises(BadModel, match="prune") as caught:
        session(lm("mistral"), settings())
    assert caught.value.code == "no_pruning"


def test_where_tokens_go_on_is_said_with_layers_that_were_moved_and_who_always_does() -> None:
    assert settings().describe(lm("llama")) == (
        "of a prompt of 8 tokens or more 70% continue from layer 1, 34% continue from layer 2; "
        "the first 1 and the newest 3, the template, the system text and the question always do"
    )
    moved = settings().describe(lm("gemma3"))  # which sees all of a text in its layer 1 alone
    assert "34% continue from layer 2 (not 1, 2, because the layer below must attend to the whole text)" in moved


def test_a_pass_that_breaks_among_others_is_made_again_as_it_was() -> None:
    model, ids = lm("llama"), families.prompt(N)
    first, second = session(model, settings(), 7), session(model, settings(), 7)
    whole, calls = second.cache.attend, 0

    def attend(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise MemoryError
        return whole(*args)  # type: ignore[arg-type]

    second.cache.attend = attend  # type: ignore[method-assign, assignment]
    alone = said(session(model, settings(), 7), ids)
    generate_together(*(answered(s, ids) for s in (first, second)))
    assert first.ids[N:] == second.ids[N:] == alone


def answered(s: GenerationSession, ids: list[int]):  # type: ignore[no-untyped-def]
    yield from s.read(ids)
    yield from s.stream(20)


def test_what_stayed_behind_is_missing_where_a_policy_moves_things_down() -> None:
    """Such a store forgets nothing, and still has not what it was never given."""
    model, ids = lm("llama"), families.prompt(N)
    top, below = (make.dense(model) for _ in range(2))
    kv = TieredCache(top, [TierLevel(below)], demotes=True)
    s = make.session(model, kv, chunk=16, pruning=settings(), policy=Recent(20), every=4)
    said(s, ids)
    assert not kv.forgets
    assert s.approximations == {"forgotten"}
    assert s.start_answer(ids[: N - 5], Sampler()) == 0


METHODS = {  # of which as many go on as they say, whatever they judge by
    "lazy": settings(),
    "random": Random(start_prune_layer=0.4, end_prune_layer=0.7, num_prune=2, recent=3, sinks=1, min_prompt=8),
    "cut": SingleCut(layer=0.5, keep=0.4, recent=3, sinks=1, min_prompt=8),
    "cut, again": SingleCut(layer=0.5, keep=0.4, recent=3, sinks=1, min_prompt=8, again=True),
    "chunked": Chunked(start_prune_layer=0.4, end_prune_layer=0.7, num_prune=2, recent=3, sinks=1, min_prompt=8),
}


@pytest.mark.parametrize("chunk", [16, 100])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("method", METHODS)
def test_layers_hold_ever_fewer_and_answers_go_on(method: str, name: str, chunk: int) -> None:
    s = session(lm(name), METHODS[method], chunk)
    assert len(said(s, families.prompt(N), 5)) == 5
    held = [set(s.cache.slots(layer).pos[0].tolist()) & set(range(N - 1)) for layer in range(s.lm.n_layers)]
    assert all(upper <= lower for lower, upper in pairwise(held))
    assert (len(held[0]) == N - 1) == (method != "cut, again")
    assert {0, N - 4, N - 3, N - 2} <= held[-1]
    assert len(held[-1]) < 0.8 * N
    assert s.approximations == {"forgotten"}


@pytest.mark.parametrize("method", ["cut", "cut, again"])
def test_one_cut_lets_on_whom_the_window_looks_at(method: str) -> None:
    """By hand: the newest rows' mean attention in the layer below, the highest of each one's neighbours."""
    model, ids = lm("llama"), families.prompt(N + 1)
    cut = METHODS[method]
    s = session(model, cut, 100)
    read(s, ids)
    below = 1  # of three layers the second is the first that fewer reach
    rows = Rows.chain(ids[:N], 0)
    (made,) = run([ForwardRequest(model, rows, make.dense(model), record_queries=range(N - 8, N))])
    q, k = made.queries[below - 1], made.fresh[below - 1].k.repeat_interleave(2, 0)
    scores = (q @ k.transpose(1, 2)) * model.attention_params[below - 1].scale
    scores = scores.masked_fill(torch.arange(N) > torch.arange(N - 8, N).view(-1, 1), -torch.inf)
    mass = scores.softmax(-1).mean((0, 1))
    pooled = torch.stack([mass[max(0, i - 3) : i + 4].max() for i in range(N)])
    best = pooled.argsort(descending=True, stable=True)[: math.ceil(0.4 * N)].tolist()
    live = sorted({*best, 0, *range(N - 8, N)})
    assert s.cache.slots(below).pos[0].tolist() == live
    assert s.cache.slots(0).pos[0].tolist() == (live if method == "cut, again" else list(range(N)))


def test_read_again_they_see_each_other_and_nobody_else() -> None:
    model, ids = lm("llama"), families.prompt(N + 1)
    s = session(model, METHODS["cut, again"], 7)
    read(s, ids)
    on = s.cache.slots(0).pos[0].tolist()
    (made,) = run([ForwardRequest(model, Rows.chain(ids[:N], 0).only(on), make.dense(model))])
    for layer in range(model.n_layers):
        torch.testing.assert_close(s.cache.slots(layer).v, made.fresh[layer].v, rtol=0, atol=1e-12)


def test_a_chunk_is_judged_by_its_own_end() -> None:
    """So what comes later changes nothing of it."""
    ids = families.prompt(N)
    short, long = (session(lm("llama"), METHODS["chunked"], 16) for _ in range(2))
    for s, text in ((short, ids[:17]), (long, ids)):
        while s.committed < 16:
            run_to_end(s.prefill_chunk(text))
        assert s.committed == 16
    for layer in range(3):
        assert torch.equal(short.cache.slots(layer).pos, long.cache.slots(layer).pos)
        torch.testing.assert_close(short.cache.slots(layer).k, long.cache.slots(layer).k, rtol=0, atol=1e-12)


def test_shares_of_those_on_their_way_compound() -> None:
    halves = {"start_keep_ratio": 0.5, "end_keep_ratio": 0.5, "recent": 1, "sinks": 0}
    for ratio_of, upper in (("prompt", 22), ("current", 12)):
        s = session(lm("llama"), settings(ratio_of=ratio_of, **halves))
        read(s, families.prompt(45))
        n = [s.cache.n_slots(layer) for layer in range(3)]
        assert n[0] == 44
        assert n[1] - 22 in (0, 1), "the newest goes on in any case"
        assert n[2] - upper in (-1, 0, 1)


@pytest.mark.parametrize("mass", [0.5, 0.9, 0.99])
def test_no_more_attention_is_dropped_than_was_allowed(mass: float) -> None:
    ids, n_cuts = families.prompt(N + 1), 0
    low = settings(start_keep_ratio=0.05, end_keep_ratio=0.05, mass=mass, recent=1, sinks=0)
    highest = layer_pruner.highest

    def checked(scores: torch.Tensor, n: int, share: float) -> list[int]:
        nonlocal n_cuts
        n_cuts += 1
        found = highest(scores, n, share)
        assert scores[found].sum() >= mass * scores.sum()
        assert len(found) == n or scores[found[:-1]].sum() < mass * scores.sum()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_pruner, "highest", checked)
        read(session(lm("llama"), low), ids)
    assert n_cuts == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"end_prune_layer": 0.2}, "end_prune_layer = 0.2 is below start_prune_layer"),
        ({"end_keep_ratio": 0.8}, "end_keep_ratio = 0.8 is above start_keep_ratio"),
        ({"revive_max": 3}, 'prune.revive_max: revive_max has no effect with scope = "prefill"'),
        ({"method": "cut", "pool": 4}, "pool = 4"),
        ({"pool": 4}, "pool = 4"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(BadConfig) as refused:
        Profile.load("lazy").replace(prune={"method": "lazy", **settings})
    assert said in " ".join(refused.value.lines)


@pytest.mark.parametrize(
    ("other", "changes"),
    [
        ("policy.name", {"policy": {"name": "window"}}),
        ("sparse.method", {"sparse": {"method": "sketch"}}),
        ("kv.v_bits", {"kv": {"v_bits": 8}}),
        ("memory.disk", {"memory": {"disk": "1GiB"}}),
        ("memory.fallbacks", {"memory": {"fallbacks": ["kv.v_bits=4"]}}),
        ("prune.revive_interval", {"prune": {"revive_interval": 1}}),
    ],
)
def test_what_those_who_come_back_cannot_read_is_refused(other: str, changes: dict[str, dict[str, object]]) -> None:
    prune = {"method": "lazy", "scope": "prefill+decode", **changes.get("prune", {})}
    assert Profile.load("lazy").replace(prune=prune | {"revive_interval": 2}).prune.compression_interval == 2
    with pytest.raises(BadConfig) as refused:
        Profile.load("lazy").replace(**{**changes, "prune": prune})
    assert other in " ".join(refused.value.lines)


def test_a_vector_dearer_than_what_it_spares_is_said() -> None:
    """One KV head of 16 in each of two layers takes 64 numbers, and a hidden vector 48 or 160."""
    back = settings(scope="prefill+decode")
    told = []
    for hidden in (48, 160):
        model = make.model("llama", num_hidden_layers=8, num_key_value_heads=1, hidden_size=hidden)
        told.append(back.describe(model))
        assert "spares" not in settings().describe(model)
    assert "to save" not in told[0]
    assert "takes 160 numbers to save 64" in told[1]
