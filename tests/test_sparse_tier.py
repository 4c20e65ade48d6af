"""Sparse attention: bounds are bounds, certificates hold, rows choose alone, and any drafter gives the plain text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvcli import assemble
from kvcli.bench.profile_side import plain
from kvcli.engine.drafting.drafter import Drafter
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.errors import KvcliError
from kvcli.kernels.attend.reference import attend as specified
from kvcli.kernels.merge_attention import PartialAttention, merge_attention
from kvcli.kernels.native import native
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.cache.tiered_cache import TieredCache
from kvcli.kv.slots import AttentionParams, KVCache, Slots, nbytes
from kvcli.kv.sparse.index import PageIndex, scale_and_softcap
from kvcli.kv.sparse.pages import PageBudget, Pages
from kvcli.kv.sparse.sparse_tier import SparseCache, SparseTier, _choose
from kvcli.kv.tiers.dense import Dense
from kvcli.methods.drafts.off import Off
from kvcli.methods.sparse import cluster
from kvcli.methods.sparse.certified import Certified
from kvcli.methods.sparse.cluster import Cluster, clusters
from kvcli.methods.sparse.lowrank import LowRank
from kvcli.methods.sparse.minmax import MinMax
from kvcli.methods.sparse.sketch import Sketch
from kvcli.settings.profile import Profile, load_profile
from tests import families, make
from tests.covering import pairs
from tests.exact import table as exactness
from tests.policies import Ragged, masks
from tests.reference import AnyTierSource

torch.set_num_threads(1)
K, G, D = 2, 3, 16
H = K * G
INDEXES: dict[str, PageIndex] = {"minmax": MinMax(page=3), "sketch": Sketch(page=3), "certified": Certified(page=3)}
INDEXES |= {"cluster": Cluster(window=15, size=3), "lowrank": LowRank(page=3, rank=8)}
BOUNDS = {name: index for name, index in INDEXES.items() if index.is_bound}
SMALL = PageBudget(fraction=0.1, floor=7, sinks=2, recent=5)
SIGHTS = [AttentionParams(0.25), AttentionParams(0.4, softcap=9.0)]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def fill(kv: Dense | SparseTier, n: int, start: int = 0, seed: int = 0, sharp: float = 3.0) -> None:
    """Keys with a few loud channels, as models have them; token t is the same however the filling is cut."""
    loud = 1 + 4 * (randn(K, 1, D, seed=99).abs() > 1.5)
    for at in range(start, start + n):
        k, v = (randn(K, 1, D, seed=1000 * seed + 2 * at + i) for i in (0, 1))
        kv.append(0, (k * loud * sharp / 2).to(kv.dtype), v.to(kv.dtype), at)


def recall(
    index: PageIndex, budget: PageBudget = SMALL, dtype: torch.dtype = torch.float64, **more: Any
) -> SparseCache:
    dense = make.dense((1, K, D), dtype)
    return SparseCache(dense, index, budget, [0], source=AnyTierSource(dense), **more)


def filled(index: PageIndex, n: int, budget: PageBudget = SMALL, **more: Any) -> SparseCache:
    kv = recall(index, budget, **more)
    fill(kv, n)
    kv.compress()
    return kv


def rows(n: int, seed: int = 5, sharp: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return randn(H, n, D, seed=seed, dtype=dtype) * sharp


def at(kv: SparseTier, n: int) -> range:
    return range(kv.n_slots(0), kv.n_slots(0) + n)


def mass(parts: list[PartialAttention]) -> Tensor:
    return torch.stack([p.lse for p in parts]).logsumexp(0)


def missed(kv: SparseTier, q: Tensor, params: AttentionParams) -> Tensor:
    """[H, N]: the share of softmax mass, of all that is stored, that the rows did not read."""
    pos = at(kv, q.shape[1])
    return 1 - (mass(kv.attend(0, q, params, pos)) - mass(kv._tier.attend(0, q, params, pos))).exp()


def keep_uneven(layer: int, s: Slots) -> Tensor:
    """Heads that hold different numbers of slots, and different ones."""
    return torch.stack([s.pos[j] % (5 - 2 * j) != 1 for j in range(s.pos.shape[0])])


# ---- the index ----


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(sorted(BOUNDS)),
    page=st.integers(1, 5),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    params=st.sampled_from(SIGHTS),
    size=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_no_page_holds_more_mass_than_its_bound(
    seed: int, name: str, page: int, dtype: torch.dtype, params: AttentionParams, size: float
) -> None:
    index = replace(INDEXES[name], page=page)  # type: ignore[type-var]
    k = (randn(K, 7, page, D, seed=seed) * (1 + 9 * (randn(D, seed=seed) > 1)) * size).to(dtype)
    q = randn(K, 4, D, seed=seed + 1, dtype=dtype)
    shared = index.learn(k.flatten(1, 2))
    got = index.score(q, index.summarize(k, shared), shared, params).double()
    score = scale_and_softcap(torch.einsum("krd,kpsd->krps", q.double(), k.double()), params)
    true = score.logsumexp(3)
    terms = torch.einsum("krd,kpsd->krps", q.double().abs(), k.double().abs()).max()  # a small sum may be of large ones
    assert bool((got >= true - 1e-6 * (1 + params.scale * terms)).all()), "rounded sums in float32, no more"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_certificate_holds_along_the_rounding_error_itself(dtype: torch.dtype) -> None:
    """There the bound is as tight as its error norm: one that was rounded to nearest is too small half of the time."""
    index = Certified(page=1)
    k = randn(1, 400, 1, 4, dtype=dtype)
    codes, scale, _ = index.summarize(k, ())
    error = k.double() - codes.double() * scale.double().unsqueeze(-1)  # [1, P, 1, D]
    q = (error / error.norm(dim=-1, keepdim=True).clamp_min(1e-30)).squeeze(2)  # [1, P, D], a query for each key
    got = index.score(q, index.summarize(k, ()), (), AttentionParams(1.0)).double().diagonal(dim1=1, dim2=2)
    true = torch.einsum("krd,krd->kr", q, k.double().squeeze(2))
    assert bool((got >= true).all())


def test_certified_bounds_are_much_tighter_than_minima_and_maxima() -> None:
    k, q = randn(1, 500, 4, 64), randn(1, 9, 64, seed=1)
    true = scale_and_softcap(torch.einsum("krd,kpsd->krps", q, k), AttentionParams(0.125)).logsumexp(3)
    loose, tight = (
        (index.score(q, index.summarize(k, ()), (), AttentionParams(0.125)) - true).mean()
        for index in (MinMax(page=4), Certified(page=4))
    )
    assert tight < 0.1 * loose


def test_a_sketch_ranks_pages_nearly_as_the_keys_do() -> None:
    loud = 1 + 9 * (randn(64, seed=3) > 1.5)
    k, q = (randn(1, 500, 4, 64) + 2) * loud, randn(1, 9, 64, seed=1)
    true = scale_and_softcap(torch.einsum("krd,kpsd->krps", q, k), AttentionParams(0.125)).logsumexp(3)
    agree = []
    for index in (Sketch(page=4), MinMax(page=4)):
        shared = index.learn(k.flatten(1, 2))
        scored = index.score(q, index.summarize(k, shared), shared, AttentionParams(0.125))
        both = torch.stack((scored[0], true[0]))
        agree.append(float(torch.stack([torch.corrcoef(both[:, i])[0, 1] for i in range(9)]).mean()))
    assert agree[0] > 0.9 > agree[1]


def test_clusters_are_those_of_k_means_and_have_the_scores_of_their_means() -> None:
    """By the definition (arXiv 2412.03213), a key at a time; each key's mean is the one that it points along most."""
    k, q, n = randn(1, 24, D, seed=4), randn(1, 3, D, seed=5), 4
    means = [k[0, i * 24 // n] for i in range(n)]
    for _ in range(8):
        of = [max(range(n), key=lambda c: float(torch.cosine_similarity(key, means[c], 0))) for key in k[0]]
        means = [
            torch.stack(mine).mean(0)
            if (mine := [key for key, c in zip(k[0], of, strict=True) if c == i])
            else means[i]
            for i in range(n)
        ]
    got, where = clusters(k, n)
    assert where[0].tolist() == of
    assert len(set(of)) == n
    torch.testing.assert_close(got[0], torch.stack(means))
    index, turned = Cluster(window=24, size=24 // n), torch.stack((-k, k), 1)  # a window of the opposite keys before it
    score = index.score(q, index.summarize(turned, ()), (), AttentionParams(0.5))
    want = 0.5 * q @ torch.stack([means[c] for c in of]).T.unsqueeze(0)
    torch.testing.assert_close(score, torch.cat((-want, want), 2))


def test_low_rank_scores_are_those_of_the_singular_values_that_count() -> None:
    """By torch's decomposition (arXiv 2410.21465): keys of the best rank-4 approximation; at full rank the keys."""
    k, q = randn(K, 60, D, seed=6) * (1 + 9 * (randn(D, seed=7) > 0.5)), randn(K, 3, D, seed=8)
    for rank in (4, D):
        u, s, vt = torch.linalg.svd(k, full_matrices=False)
        near = u[..., :rank] * s[:, None, :rank] @ vt[:, :rank]
        index = LowRank(page=5, rank=rank)
        shared = index.learn(k)
        score = index.score(q, index.summarize(k.view(K, 12, 5, D), shared), shared, AttentionParams(0.5))
        want = (0.5 * q @ near.transpose(1, 2)).view(K, 3, 12, 5).logsumexp(3)
        torch.testing.assert_close(score, want)
    assert not torch.allclose(near, u[..., :4] * s[:, None, :4] @ vt[:, :4])


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor)]
        self.numel = max([self.numel, *(t.untyped_storage().nbytes() // t.element_size() for t in made)])
        return out


def test_a_window_is_clustered_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    k, n = randn(K, 600, D), 50
    means, of = clusters(k, n)
    monkeypatch.setattr(cluster, "AT_ONCE", 64 * n)  # blocks of 64 keys, and one of 24
    with Largest() as made:
        got, where = clusters(k, n)
    assert torch.equal(where, of)
    torch.testing.assert_close(got, means)
    assert made.numel <= max(K * 64 * n, k.numel())


def test_the_longest_window_takes_no_more_at_once_than_a_block() -> None:
    with Largest() as made:
        clusters(randn(1, 32768, 4, dtype=torch.float32), 256)
    assert made.numel == cluster.AT_ONCE  # of 8 million pairs


def test_rows_that_choose_slot_by_slot_do_so_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    store = recall(Cluster(window=15, size=3))
    store.append(0, randn(K, 150, D), randn(K, 150, D, seed=1), 0)
    store.compress()
    rows, sight = randn(H, 90, D, seed=2), AttentionParams(0.25)

    def read() -> tuple[Tensor, int]:
        with Largest() as made:
            return merge_attention(store.attend(0, rows, sight, range(150, 240))), made.numel

    (whole, most), few = read(), 2 * H * 150
    monkeypatch.setattr("kvcli.kv.sparse.sparse_tier.SCORES", few)
    got, made = read()
    torch.testing.assert_close(got, whole)
    assert made <= rows.numel() < 64 * H * 150 <= most


def test_whole_clusters_are_read_and_the_last_one_is_cut() -> None:
    n, budget = 4, PageBudget(fraction=0.1, floor=9, sinks=0, recent=0)
    kv = filled(Cluster(window=28, size=28 // n), 90, budget)
    kv.attend(0, rows(1), AttentionParams(0.25), at(kv, 1))
    for j in range(K):
        of = pages(kv).kept[1][j].long()
        of = (of + n * torch.arange(3).unsqueeze(1)).flatten()
        read = kv._chosen[0][j]
        assert int(read.sum()) == 9
        cut = [c for c in set(of.tolist()) if 0 < int(read[of == c].sum()) < int((of == c).sum())]
        assert len(cut) <= 1
        for c in cut:
            assert read[of == c].int().diff().le(0).all(), "its first ones"


# ---- what is read ----


def chosen_by_definition(
    kv: SparseTier, index: PageIndex, q: Tensor, params: AttentionParams, budget: PageBudget
) -> Tensor:
    """[K, N, S] bool over the slots of the store at a compression point, one row and head at a time."""
    s = kv.slots(0)
    group, n_slots = H // K, int((s.pos >= 0).sum(1).max())
    read = torch.zeros(K, q.shape[1], s.n_slots, dtype=torch.bool)
    newest = int(s.pos.max())
    learned = index.learn(torch.stack([s.k[j, : n_slots // index.page * index.page] for j in range(K)]))
    for j in range(K):
        held = [i for i in range(s.n_slots) if s.pos[j, i] >= 0]
        pages = [held[a : a + index.page] for a in range(0, len(held) - index.page + 1, index.page)]
        shared = tuple(t[j : j + 1] for t in learned)
        kept = index.summarize(torch.stack([s.k[j, p] for p in pages]).unsqueeze(0), shared)
        grains = [
            page[a : a + index.selection_unit] for page in pages for a in range(0, index.page, index.selection_unit)
        ]
        free = [
            i
            for i, grain in enumerate(grains)
            if all(s.pos[j, a] >= budget.sinks and s.pos[j, a] <= newest - budget.recent for a in grain)
        ]
        most = math.ceil(max(budget.floor, budget.fraction * n_slots) / index.selection_unit)
        for n in range(q.shape[1]):
            score = index.score(q[j * group : (j + 1) * group, n].unsqueeze(0), kept, shared, params)[0]  # [G, P]
            share = torch.softmax(score, -1).amax(0)
            best = sorted(free, key=lambda i: -float(share[i]))[:most]
            for i, grain in enumerate(grains):
                read[j, n, grain] = i in best or i not in free
            read[j, n, held[len(pages) * index.page :]] = True
    return read


@pytest.mark.parametrize("params", SIGHTS)
# what a sketch learns of unequal heads depends on how they are padded
@pytest.mark.parametrize(("name", "uneven"), [(n, u) for n in INDEXES for u in (False, True) if n in BOUNDS or not u])
@pytest.mark.parametrize("n", [1, 5, 70])
def test_rows_read_the_pages_with_the_best_scores_and_nothing_else(
    name: str, n: int, uneven: bool, params: AttentionParams
) -> None:
    kv = filled(INDEXES[name], 83)
    if uneven:
        kv.compress(masks(kv, keep_uneven))
    q, s = rows(n), kv.slots(0)
    read = chosen_by_definition(kv, INDEXES[name], q, params, SMALL)
    assert not bool(read[:, 0].all())
    want, lse = specified(q, s.k, s.v, params.scale, params.softcap, read, s.n_slots)
    (part,) = kv.attend(0, q, params, at(kv, n))
    torch.testing.assert_close(part.out, want)
    torch.testing.assert_close(part.lse, lse)


@pytest.mark.parametrize("name", BOUNDS)
def test_where_a_head_has_fewer_pages_to_choose_from_than_others_it_reads_no_others(name: str) -> None:
    """Those behind its end, say, which others have."""
    kv = filled(INDEXES[name], 83)
    kv.compress(masks(kv, lambda _, s: torch.stack([s.pos[0] >= 0, s.pos[1] % 8 == 0])))
    its = pages(kv)
    most, left = its.most, its.open.sum(1).tolist()
    assert left[1] < most < left[0]
    q, s = rows(5), kv.slots(0)
    score = INDEXES[name].score(q.view(K, G * 5, D), its.kept, its.shared, AttentionParams(0.25)).view(K, G, 5, -1)
    chosen = _choose(score, its, -math.inf)
    assert (chosen.sum(2) - its.always.sum(1, keepdim=True)).tolist() == [[most] * 5, [left[1]] * 5]
    read = chosen_by_definition(kv, INDEXES[name], q, AttentionParams(0.25), SMALL)
    want, lse = specified(q, s.k, s.v, 0.25, 0.0, read, s.n_slots)
    (part,) = kv.attend(0, q, AttentionParams(0.25), at(kv, 5))
    torch.testing.assert_close(part.out, want)
    torch.testing.assert_close(part.lse, lse)


@pytest.mark.parametrize("name", INDEXES)
@pytest.mark.parametrize("uneven", [False, True])
def test_a_budget_that_covers_everything_reads_everything(name: str, uneven: bool) -> None:
    for budget in (replace(SMALL, floor=75), replace(SMALL, fraction=1.0), replace(SMALL, recent=1000)):
        kv = filled(INDEXES[name], 83, budget)
        if uneven:
            kv.compress(masks(kv, keep_uneven))
        fill(kv, 4, start=83)
        q = rows(3)
        got, want = (merge_attention(store.attend(0, q, AttentionParams(0.3), at(kv, 3))) for store in (kv, kv._tier))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", INDEXES)
def test_sinks_the_newest_and_what_came_since_are_always_read(name: str) -> None:
    kv = filled(INDEXES[name], 83)
    fill(kv, 6, start=83)
    s = kv._tier.slots(0)
    s.v.copy_(0 * s.v)
    always = [0, 1, *range(78, 89)]
    s.v[:, always, 0] = 1
    read = kv.attend(
        0, rows(1), AttentionParams(0.01), at(kv, 1)
    )  # flat scores: every slot that is read gives about the same
    of_all = kv._tier.attend(0, rows(1), AttentionParams(0.01), at(kv, 1))
    count = {"read": mass(read).exp(), "all": mass(of_all).exp()}
    weight = [merge_attention(read)[..., 0] * count["read"], merge_attention(of_all)[..., 0] * count["all"]]
    torch.testing.assert_close(*weight)
    assert bool((count["read"] < 0.6 * count["all"]).all())


READERS = [*((name, None) for name in INDEXES), *((name, 0.2) for name in BOUNDS)]


@pytest.mark.parametrize(("name", "epsilon"), READERS)
def test_a_row_chooses_for_itself(name: str, epsilon: float | None) -> None:
    kv = filled(INDEXES[name], 83, epsilon=epsilon)
    q = rows(5)
    together = merge_attention(kv.attend(0, q, AttentionParams(0.3), at(kv, 5)))
    for i in range(5):
        alone = merge_attention(kv.attend(0, q[:, i : i + 1], AttentionParams(0.3), at(kv, 5)[i : i + 1]))
        torch.testing.assert_close(alone, together[:, i : i + 1])


@pytest.mark.parametrize(("name", "epsilon"), READERS)
def test_the_choice_does_not_depend_on_what_was_stored_since_the_compression_point(
    name: str, epsilon: float | None
) -> None:
    kv, q = filled(INDEXES[name], 83, epsilon=epsilon), rows(2)
    (before,) = kv.attend(0, q, AttentionParams(0.3), at(kv, 2))
    fill(kv, 9, start=83)
    after, since = kv.attend(0, q, AttentionParams(0.3), at(kv, 2))
    torch.testing.assert_close(after.out, before.out)
    torch.testing.assert_close(after.lse, before.lse)
    assert bool((since.lse > -torch.inf).all())
    kv.compress()
    (settled,) = kv.attend(0, q, AttentionParams(0.3), at(kv, 2))
    assert not torch.allclose(settled.lse, after.lse)


@pytest.mark.parametrize("name", INDEXES)
def test_windows_and_prompts_read_everything(name: str) -> None:
    kv = filled(INDEXES[name], 83)
    q, pos = rows(4), at(kv, 4)
    for window in (1, 20, 1000):
        sight = AttentionParams(0.3, window=window)
        torch.testing.assert_close(
            merge_attention(kv.attend(0, q, sight, pos)), merge_attention(kv._tier.attend(0, q, sight, pos))
        )
    whole, part = (merge_attention(store.attend(0, q, AttentionParams(0.3), pos)) for store in (kv._tier, kv))
    assert not torch.allclose(part, whole)
    torch.testing.assert_close(merge_attention(kv.attend(0, q, AttentionParams(0.3, is_prompt=True), pos)), whole)


@pytest.mark.parametrize("name", INDEXES)
def test_the_first_row_behind_a_compression_point_may_choose_for_all_until_the_next(name: str) -> None:
    kv, own = (filled(INDEXES[name], 83, is_shared=shared) for shared in (True, False))
    q = rows(5)
    guesses = replace(AttentionParams(0.3), is_draft=True)
    read = [store.attend(0, rows(1, seed=8), guesses, at(store, 1))[0] for store in (kv, own)]
    torch.testing.assert_close(read[0].lse, read[1].lse)  # for themselves, and without a say
    first = merge_attention(kv.attend(0, q[:, :1], AttentionParams(0.3), at(kv, 1)))
    torch.testing.assert_close(first, merge_attention(own.attend(0, q[:, :1], AttentionParams(0.3), at(kv, 1))))
    chosen = kv._chosen[0].clone()
    fill(kv, 1, start=83)
    alone = [kv.attend(0, q[:, i : i + 1], AttentionParams(0.3), [84])[0] for i in range(1, 5)]
    assert torch.equal(kv._chosen[0], chosen)
    assert not torch.equal(own._pages[0].kept[0], torch.empty(0))
    drafted = filled(INDEXES[name], 83, is_shared=True)
    (together,) = drafted.attend(0, q, AttentionParams(0.3), at(drafted, 5))
    for i in range(1, 5):
        torch.testing.assert_close(together.out[:, i : i + 1], alone[i - 1].out)
        torch.testing.assert_close(together.lse[:, i : i + 1], alone[i - 1].lse)
    (each,) = own.attend(0, q, AttentionParams(0.3), at(own, 5))
    assert not torch.allclose(each.lse, together.lse)
    kv.compress()
    kv.attend(0, q[:, 4:], AttentionParams(0.3), at(kv, 1))
    assert not torch.equal(kv._chosen[0], chosen)


def test_what_seems_to_hold_little_is_left_out() -> None:
    """By an independent sum: of the pages that are chosen without a cutoff, those above the share stay."""
    index, q, sight = INDEXES["sketch"], rows(1, sharp=4.0), AttentionParams(0.25)
    kv = filled(index, 83)
    kv.attend(0, q, sight, at(kv, 1))
    p = pages(kv)
    score = index.score(q.view(K, G, D), p.kept, p.shared, sight)  # [K, G, P]
    share = torch.softmax(score, -1).amax(1)
    middle = float(share[kv._chosen[0] & p.open].median()) * 1.001
    cut = filled(index, 83, cutoff=middle)
    cut.attend(0, q, sight, at(cut, 1))
    want = kv._chosen[0] & (share >= middle) | p.always
    assert torch.equal(cut._chosen[0], want)
    assert 0 < int((want & p.open).sum()) < int((kv._chosen[0] & p.open).sum())


# ---- certificates ----


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(sorted(BOUNDS)),
    epsilon=st.sampled_from([0.0, 0.001, 0.05, 0.5]),
    sharp=st.floats(0.1, 6),
    params=st.sampled_from(SIGHTS),
    uneven=st.booleans(),
)
def test_a_certified_row_never_misses_more_than_epsilon(
    seed: int, name: str, epsilon: float, sharp: float, params: AttentionParams, uneven: bool
) -> None:
    kv = recall(BOUNDS[name], epsilon=epsilon)
    fill(kv, 61, seed=seed % 7)
    kv.compress(masks(kv, keep_uneven) if uneven else ())
    fill(kv, seed % 5, start=61)
    q = rows(4, seed=seed, sharp=sharp)
    assert float(missed(kv, q, params).max()) <= epsilon + 1e-9
    pos, v = at(kv, 4), kv.slots(0).v.norm(dim=2).max()
    error = merge_attention(kv.attend(0, q, params, pos)) - merge_attention(kv._tier.attend(0, q, params, pos))
    assert float(error.norm(dim=2).max()) <= 2 * epsilon * v + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_certificates_hold_in_the_numbers_that_models_use(dtype: torch.dtype) -> None:
    kv = recall(Certified(page=4), epsilon=0.02, dtype=dtype)
    fill(kv, 200, sharp=2.0)
    kv.compress()
    shares = []
    for seed in range(20):
        q, s = rows(3, seed=seed, sharp=4.0, dtype=dtype), kv.slots(0)
        _, full = specified(q.double(), s.k.double(), s.v.double(), 0.25, 0.0, None, s.n_slots)
        shares.append(1 - (mass(kv.attend(0, q, AttentionParams(0.25), at(kv, 3))).double() - full).exp())
    assert float(torch.stack(shares).max()) <= 0.02 + 1e-4
    assert 0 < kv.tally.streamed < kv.tally.asked


def test_peaked_heads_pass_and_spread_ones_read_everything() -> None:
    streamed = []
    for sharp in (0.1, 16.0):
        kv = filled(Certified(page=3), 120, epsilon=0.05)
        kv.attend(0, rows(20, sharp=sharp), AttentionParams(0.25), at(kv, 20))
        streamed.append(kv.tally.streamed / kv.tally.asked)
    assert streamed[0] == 1.0
    assert streamed[1] < 0.5


def test_keys_that_are_not_finite_are_not_certified() -> None:
    kv = recall(Certified(page=3), epsilon=0.5)
    fill(kv, 60)
    kv._tier.slots(0).k[:, 30, 2] = torch.inf
    kv.compress()
    kv.attend(0, rows(2, sharp=8.0), AttentionParams(0.25), at(kv, 2))
    assert kv.tally.streamed == kv.tally.asked > 0


# ---- compression points ----


def pages(kv: SparseTier) -> Pages:
    return kv._pages[0]


def same_pages(a: SparseTier, b: SparseTier) -> None:
    for x, y in zip(pages(a).tensors, pages(b).tensors, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, 90), min_size=1, max_size=8), name=st.sampled_from(sorted(BOUNDS)))
def test_pages_added_at_compression_points_are_those_made_at_once(cuts: list[int], name: str) -> None:
    grown = recall(INDEXES[name])
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), 97], strict=True):
        fill(grown, end - start, start=start)
        grown.compress()
    same_pages(grown, filled(INDEXES[name], 97))


@pytest.mark.parametrize(
    "index", [*(LowRank(page=n, rank=rank) for n, rank in ((1, 8), (2, 16), (3, 1))), Cluster(window=15, size=3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 128])
def test_a_page_is_summarized_alike_whichever_come_with_it(index: PageIndex, dtype: torch.dtype, dim: int) -> None:
    if native() is None:
        pytest.skip("without native kernels products round by the number of pages")
    k = randn(K, 41, index.page, dim, dtype=dtype)
    shared = index.learn(k.flatten(1, 2))
    whole = index.summarize(k, shared)
    for first, last in [(0, 1), (0, 2), (3, 10), (40, 41)]:
        some = index.summarize(k[:, first:last], shared)
        assert all(torch.equal(a, b[:, first:last]) for a, b in zip(some, whole, strict=True))


@pytest.mark.parametrize("name", BOUNDS)  # a sketch keeps what it learned of the longer text
@pytest.mark.parametrize("n", [0, 3, 40, 78, 82, 83, 100])
@pytest.mark.parametrize("uneven", [False, True])
def test_an_undo_leaves_the_pages_of_what_remains(name: str, n: int, uneven: bool) -> None:
    kv = filled(INDEXES[name], 83)
    fresh = recall(INDEXES[name])
    fill(fresh, min(n, 83))
    if uneven:
        kv.compress(masks(kv, keep_uneven))
        fresh.compress(masks(fresh, keep_uneven))
    kv.crop(n)
    for store in (kv, fresh):
        fill(store, 80, start=n, seed=3)
        store.compress()
    same_pages(kv, fresh)
    q = rows(3)
    got, want = (merge_attention(store.attend(0, q, AttentionParams(0.3), at(store, 3))) for store in (kv, fresh))
    torch.testing.assert_close(got, want)


def test_a_sketch_learns_anew_while_it_knows_little() -> None:
    kv = recall(Sketch(page=3))
    fill(kv, 12)
    kv.compress()
    few = pages(kv).shared
    fill(kv, 71, start=12)
    kv.compress()
    assert not torch.equal(pages(kv).shared[0], few[0])
    same_pages(kv, filled(Sketch(page=3), 83))


@pytest.mark.parametrize("name", INDEXES)
def test_slots_demoted_in_a_tiered_cache_join_the_pages(name: str) -> None:
    kv, whole = recall(INDEXES[name]), filled(INDEXES[name], 83)
    s = whole.slots(0)
    for a, b in ((0, 40), (40, 83)):
        kv.take(0, Slots(s.k[:, a:b], s.v[:, a:b], s.pos[:, a:b]))
    q = rows(3)
    if not pages(kv).shared:  # which knows what the first of them taught
        same_pages(kv, whole)
    (part,) = kv.attend(0, q, AttentionParams(0.3), at(kv, 3))
    assert part.lse.shape == (H, 3)
    assert not torch.allclose(part.out, merge_attention(kv._tier.attend(0, q, AttentionParams(0.3), at(kv, 3))))


def test_empty_slots_inside_a_page_weigh_nothing() -> None:
    """No tier of ours has any there, but positions may say so."""
    s = filled(MinMax(page=4), 40).slots(0)
    pos = s.pos.clone()
    pos[0, 5], pos[1, 8:12] = -1, -1
    holed = Slots(s.k.masked_fill((pos < 0).unsqueeze(2), 1e6), s.v, pos)

    class Holed(AnyTierSource):
        def __init__(self) -> None:
            self._tier = self  # type: ignore[assignment]

        def slots(self, layer: int) -> Slots:
            return holed

    for index in (MinMax(page=4), Certified(page=4)):
        p = Pages(index, SMALL)
        p.settle(0, Holed())
        assert p.held.sum(1).tolist() == [10, 9]
        assert not bool(p.held[1, 2])
        score = index.score(rows(1).view(K, G, D), p.kept, p.shared, AttentionParams(0.25))
        assert float(score[0].abs().max()) < 1e3


def test_bytes_are_what_the_tensors_hold() -> None:
    kv = recall(Certified(page=4), dtype=torch.float32)
    fill(kv, 400)
    kv.compress()
    held = nbytes(kv)
    assert set(held) == {"cpu", "index"}
    assert held["index"] == sum({t.data_ptr(): t.untyped_storage().nbytes() for t in pages(kv).tensors}.values())
    kv.attend(0, rows(1, dtype=torch.float32), AttentionParams(0.3), at(kv, 1))
    assert nbytes(kv)["index"] == held["index"] + K * 100, "and which pages were chosen"
    payload = K * 400 * (D + 4)
    assert payload <= held["index"] <= payload + K * 100 * (4 + 4 + 1 + 1) + 200
    kv.crop(0)
    kv.compress()
    assert nbytes(kv)["index"] < 200


# ---- profiles ----


def profile(exactness: str = "approx", **recall: Any) -> Profile:
    return load_profile("exact").replace(exactness=exactness, sparse=recall, prefill={"chunk": 16})


@pytest.mark.parametrize(
    ("exactness", "method", "is_kept"),
    [
        ("exact", "none", True),
        ("exact", "minmax", False),
        ("exact", "sketch", False),
        ("exact", "certified", False),
        ("certified", "minmax", False),
        ("certified", "sketch", False),
        ("certified", "certified", True),
        ("approx", "minmax", True),
        ("approx", "certified", True),
    ],
)
def test_an_exactness_that_sparse_attention_breaks_is_refused_by_name(
    exactness: str, method: str, is_kept: bool
) -> None:
    if is_kept:
        assert profile(exactness, method=method).sparse.method == method
        return
    with pytest.raises(KvcliError) as refused:
        profile(exactness, method=method)
    told = "\n".join([str(refused.value), *refused.value.lines])
    assert f'"{exactness}" is impossible' in told
    assert "sparse.method" in told


def test_a_profile_reads_through_its_table() -> None:
    model = exactness.lm("dense", "fp32")
    small = {"page": 3, "floor": 4, "sinks": 1, "recent": 4, "selection_interval": 8, "dense_layers": 1}
    session = assemble.session(model, profile("certified", method="certified", epsilon=0.25, **small))
    run_to_end(session.read(exactness.prompt()))
    list(iterate_events(session.stream(30)))
    assert session.compression_interval == 8
    assert {use.layer for use in session.cache.usage() if use.tier == "index"} == {1, 2}
    whole = assemble.session(exactness.lm("sliding", "fp32"), profile(method="sketch", dense_layers=0))
    assert {use.layer for use in whole.cache.usage() if use.tier == "index"} == {1}, "gemma's other layers slide"


def test_a_profile_says_who_chooses_and_what_is_too_little() -> None:
    model, small = (
        exactness.lm("dense", "fp32"),
        {"floor": 4, "sinks": 1, "recent": 4, "selection_interval": 8, "dense_layers": 1},
    )
    tallies = []
    for more in ({}, {"choice": "interval"}, {"cutoff": 0.2}):
        session = assemble.session(model, profile(method="lowrank", page=3, rank=5, **small, **more))
        run_to_end(session.read(exactness.prompt()))
        list(iterate_events(session.stream(16)))
        assert isinstance(session.cache, SparseTier)
        tallies.append(session.cache.tally)
    each, shared, cut = tallies
    assert shared.asked == each.asked
    assert shared.again > each.again
    assert cut.pages < each.pages


def test_clusters_divide_their_window() -> None:
    with pytest.raises(KvcliError) as refused:
        profile(method="cluster", window=50, size=16)
    assert "window = 50 is no multiple of size = 16" in "\n".join([str(refused.value), *refused.value.lines])


@pytest.mark.parametrize("method", INDEXES)
def test_the_plan_of_memory_counts_the_index(method: str) -> None:
    sizes = {"window": 40, "size": 4} if method == "cluster" else {"page": 4}
    chosen = profile(method=method, floor=64, dense_layers=0, **sizes).sparse.settings
    store = make.dense((1, K, D), torch.float32)
    kv = chosen.bind(store, store, [AttentionParams(0.25)])
    store.append(0, randn(K, 4000, D, dtype=torch.float32), randn(K, 4000, D, dtype=torch.float32), 0)
    kv.compress()
    kv.attend(0, rows(1, dtype=torch.float32), AttentionParams(0.25), [4000])
    assert nbytes(kv)["index"] == pytest.approx(K * 4000 * chosen.index_bytes(D, 4).slot, rel=0.01)


def test_the_baseline_of_a_benchmark_attends_to_all() -> None:
    assert plain(profile(method="sketch")).sparse.method == "none"


# ---- whole texts ----


def past(
    model: LM, index: PageIndex, budget: PageBudget, epsilon: float | None, on_ladder: bool, is_shared: bool = False
) -> KVCache:
    """Sparse attention in all layers but the first: over the whole KV cache, or the lower level of a tiered cache."""
    shape, layers = (model.shapes, model.dtype), range(1, model.n_layers)
    dense = Dense(*shape)
    how = {"epsilon": epsilon, "is_shared": is_shared, "source": AnyTierSource(dense)}
    if not on_ladder:
        return SparseCache(dense, index, budget, layers, **how)
    below = SparseTier(dense, index, budget, layers, **how)
    return TieredCache(Dense(*shape), [TierLevel(below)], holds=9, sinks=1)


@cache
def text(
    name: str, dtype: str, sampler: str, uneven: bool, drafter: str, on_ladder: bool = False, shared: bool = False
) -> tuple[list[int], KVCache]:
    model = exactness.lm("dense", dtype)
    epsilon = 0.3 if name == "certified" else None
    kv = past(model, INDEXES[name], replace(SMALL, floor=4), epsilon, on_ladder, shared)
    drafts: Callable[[list[int]], Drafter] = exactness.DRAFTERS.get(drafter, lambda _: Off())
    tool = drafts(text(name, dtype, sampler, uneven, "off", on_ladder, shared)[0] if drafter != "off" else [])
    policy = Ragged() if uneven else None
    session = make.session(model, kv, tool, exactness.SAMPLERS[sampler], policy=policy, every=11, chunk=13)
    run_to_end(session.read(exactness.prompt()))
    list(iterate_events(session.stream(exactness.NEW, stop={exactness.STOP})))
    return session.ids, kv


PLACES = ("alone", "unequal heads", "below a rung")


@pytest.mark.parametrize(
    ("name", "where", "dtype", "drafter", "sampler"),
    pairs(product(INDEXES, PLACES, exactness.DTYPES, exactness.DRAFTERS, ("greedy", "sampled"))),
)
def test_any_drafter_gives_the_text_of_plain_decoding(
    name: str, where: str, dtype: str, drafter: str, sampler: str
) -> None:
    asked, below = (name, dtype, sampler, where == "unequal heads"), where == "below a rung"
    want, _ = text(*asked, "off", on_ladder=below)
    assert text(*asked, drafter, on_ladder=below)[0] == want


@pytest.mark.parametrize(
    ("name", "on_ladder", "dtype", "drafter"),
    pairs(product(INDEXES, (False, True), exactness.DTYPES, exactness.DRAFTERS)),
)
def test_any_drafter_gives_the_text_of_plain_decoding_where_one_row_chooses_for_all(
    name: str, on_ladder: bool, dtype: str, drafter: str
) -> None:
    asked = name, dtype, "greedy", False
    want, _ = text(*asked, "off", on_ladder, True)
    assert text(*asked, drafter, on_ladder, True)[0] == want


@pytest.mark.parametrize("name", INDEXES)
def test_the_table_reads_a_part_and_changes_the_text(name: str) -> None:
    assert text(name, "fp64", "greedy", False, "off", on_ladder=True)[0] != exactness.plain(
        "dense", "all", "greedy", "fp64"
    )
    ids, kv = text(name, "fp64", "greedy", False, "off")
    assert isinstance(kv, SparseTier)
    assert kv.tally.pages > 0
    if name == "certified":
        assert 0 < kv.tally.streamed < kv.tally.asked
    assert ids != exactness.plain("dense", "all", "greedy", "fp64")


@pytest.mark.parametrize("name", INDEXES)
def test_a_fork_goes_on_alike(name: str) -> None:
    model = exactness.lm("dense", "fp64")
    kv = past(model, INDEXES[name], SMALL, 0.3 if name == "certified" else None, False)
    session = make.session(model, kv, every=7)
    run_to_end(session.read(families.prompt(60)))
    list(iterate_events(session.stream(10)))
    other = session.fork()
    for each in (session, other):
        list(iterate_events(each.stream(20)))
    assert other.ids == session.ids
    assert other.cache.slots(1).k.data_ptr() != session.cache.slots(1).k.data_ptr()


@pytest.mark.parametrize("name", BOUNDS)  # what a sketch learned depends on where the first compression points were
def test_an_undone_turn_leaves_no_trace(name: str) -> None:
    model = exactness.lm("dense", "fp64")
    first, second = families.prompt(60), families.prompt(90, seed=1)
    texts = []
    for with_undo in (False, True):
        kv = past(model, INDEXES[name], SMALL, 0.3 if name == "certified" else None, False)
        session = make.session(model, kv, every=7, chunk=1000)
        if with_undo:
            run_to_end(session.read(first))
            list(iterate_events(session.stream(10)))
            assert session.resume(second) >= 59
        run_to_end(session.read(second[len(session.ids) :]))
        list(iterate_events(session.stream(20)))
        texts.append(session.ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", INDEXES)
def test_a_prompt_is_stored_as_if_nothing_were_left_out(name: str) -> None:
    model, stores = exactness.lm("dense", "fp64"), []
    for with_recall in (False, True):
        kv = make.dense(model)
        read = SparseCache(kv, INDEXES[name], SMALL, range(model.n_layers), source=kv) if with_recall else kv
        run_to_end(make.session(model, read, chunk=13).read(families.prompt(90)))
        stores.append(kv.slots(2))
    torch.testing.assert_close(stores[0].k, stores[1].k)
