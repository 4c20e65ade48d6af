"""Sparse attention over tiers: a few slots are read as in the plain way, and any drafter gives the plain text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcli import assemble
from kvcli.chat.model import Model
from kvcli.engine.drafting.drafter import Drafter
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.kernels.merge_attention import merge_attention
from kvcli.kernels.rope import Rotary, rotate
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.cache.tiered_cache import TieredCache
from kvcli.kv.capacity import CacheCapacity
from kvcli.kv.formats.format import FormatContext
from kvcli.kv.slots import AttentionParams, Slots, alike, nbytes
from kvcli.kv.sparse.index import PageIndex
from kvcli.kv.sparse.page_source import PageTier
from kvcli.kv.sparse.pages import PageBudget
from kvcli.kv.sparse.sparse_tier import SparseTier
from kvcli.kv.tiers.host import HostTier
from kvcli.methods.drafts.off import Off
from kvcli.methods.formats.cskv import Cskv
from kvcli.methods.sparse.certified import Certified
from kvcli.methods.sparse.cluster import Cluster
from kvcli.methods.sparse.lowrank import LowRank
from kvcli.methods.sparse.minmax import MinMax
from kvcli.methods.sparse.sketch import Sketch
from kvcli.settings.profile import Profile, load_profile
from kvcli.settings.schema import Kv, Memory
from tests import families, make, small_tokenizers
from tests.covering import pairs
from tests.exact import table as exactness
from tests.policies import KeepAll, Ragged
from tests.reference import AnyTierSource

torch.set_num_threads(1)
K, D, L = 2, 16, 2
H = 2 * K
BIG = 1 << 30
Shape = tuple[int, int, int]
SHELVES: dict[str, Callable[[make.Of], PageTier]] = {
    "dense": partial(make.dense, step=8),
    **{
        f"packed_{k_bits}" + (f"_{v_bits}" if v_bits != 8 else ""): partial(
            make.quantized, bits=(k_bits, v_bits), group=4, rotate="hadamard" if v_bits == 2 else "none"
        )
        for k_bits, v_bits in ((8, 8), (4, 2), (16, 4), (2, 16))
    },
    "host": lambda of: HostTier(make.quantized(of, (4, 4), group=4), "cpu"),
    "disk": make.disk,
}
SMALL = PageBudget(fraction=0.1, floor=4, sinks=2, recent=3)
INDEXES: dict[str, PageIndex] = {"minmax": MinMax(page=3), "sketch": Sketch(page=3), "certified": Certified(page=3)}
INDEXES |= {"cluster": Cluster(window=6, size=3), "lowrank": LowRank(page=3, rank=8)}


class Shown(AnyTierSource):
    """By the slots that a tier shows; how far their numbers are final the tier alone knows."""

    def __init__(self, tier: PageTier) -> None:
        super().__init__(tier)
        self.n_stable = tier.n_stable  # type: ignore[method-assign]


def some(n: int, at: int = 0, dtype: torch.dtype = torch.float64) -> Slots:
    g = torch.Generator().manual_seed(at)
    k, v = torch.randn(2, K, n, D, generator=g, dtype=torch.float64).to(dtype).unbind(0)
    return Slots(k, v, torch.arange(at, at + n).expand(K, -1))


def uneven(s: Slots) -> Tensor:
    return torch.stack([s.pos[j] % (4 - j) != 1 for j in range(K)])


def holed(tier: PageTier) -> None:
    """Slots that came at several times, some of them forgotten again, different ones in each head."""
    for at, n in ((0, 130), (130, 150), (280, 21)):
        tier.take(1, some(n, at))
    tier.evict_except(1, uneven(tier.slots(1)))
    tier.take(1, some(9, 301))


@pytest.mark.parametrize("is_holed", [False, True])
@pytest.mark.parametrize("name", SHELVES)
def test_a_few_slots_are_those_that_the_tier_shows(name: str, is_holed: bool) -> None:
    tier = SHELVES[name]((L, K, D))
    if is_holed:
        holed(tier)
    else:
        tier.take(1, some(61))
    plain, s = AnyTierSource(tier), tier.slots(1)
    assert torch.equal(tier.positions(1), s.pos)
    index = torch.randint(-1, s.n_slots, (K, 40), generator=torch.Generator().manual_seed(1))
    index[:, 5:8] = -1
    got, want = tier.gather(1, index), plain.gather(1, index)
    assert torch.equal(got.pos, want.pos)
    full = want.pos >= 0
    assert bool(full.any())
    assert torch.equal(got.k[full], want.k[full])
    assert torch.equal(got.v[full], want.v[full])
    assert bool(got.k.isfinite().all() & got.v.isfinite().all())
    for head in range(K):
        one, all_ = (source.head(1, head, s.n_slots - 3) for source in (tier, plain))
        held = all_.pos[0] >= 0
        n = one.n_slots  # a head need not be padded to the longest
        assert not bool(held[n:].any())
        assert torch.equal(one.pos[0], all_.pos[0, :n])
        assert torch.equal(one.k[0, held[:n]], all_.k[0, held])
        assert torch.equal(one.v[0, held[:n]], all_.v[0, held])


@pytest.mark.parametrize("epsilon", [None, 0.1])
@pytest.mark.parametrize("name", SHELVES)
def test_a_tier_read_in_its_own_way_is_read_as_in_the_plain_one(name: str, epsilon: float | None) -> None:
    parts = []
    for own in (True, False):
        tier = SHELVES[name]((L, K, D))
        kv = SparseTier(tier, Certified(page=3), SMALL, [1], epsilon=epsilon, source=tier if own else Shown(tier))
        holed(kv)
        q = torch.randn(H, 5, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        q *= torch.tensor([0.1, 9, 1, 12, 9]).unsqueeze(1)  # flat rows read everything where that is asked of them
        parts.append(merge_attention(kv.attend(1, q, AttentionParams(0.3), range(400, 405))))
        whole = merge_attention(tier.attend(1, q, AttentionParams(0.3), range(400, 405)))
        assert not torch.allclose(parts[-1], whole), "a part was read"
        prompt = merge_attention(kv.attend(1, q, AttentionParams(0.3, is_prompt=True), range(400, 405)))
        assert torch.equal(prompt, whole)
        assert 0 < kv.tally.streamed < kv.tally.asked if epsilon else not kv.tally.streamed
    torch.testing.assert_close(parts[0], parts[1])


def scores(kv: SparseTier) -> tuple[Tensor, Tensor]:
    """[n] each: the bounds of all pages for some rows, and the log of the mass that they hold."""
    q = 5 * torch.randn(K, 6, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    p, s, sight = kv._pages[1], kv._tier.slots(1), AttentionParams(0.3)
    if not p.kept:
        return torch.empty(0), torch.empty(0)
    n, page = p.held.shape[1], kv._index.page
    true = (q @ s.k.transpose(1, 2) * sight.scale).masked_fill(s.pos.unsqueeze(1) < 0, -torch.inf)
    true = torch.nn.functional.pad(true, (0, n * page), value=-torch.inf)[..., : n * page]
    held = p.held.unsqueeze(1).expand(-1, q.shape[1], -1)
    return kv._index.score(q, p.kept, p.shared, sight)[held], true.unflatten(2, (n, page)).logsumexp(3)[held]


OPS = [("take", 45), ("take", 60), ("keep", 1), ("take", 29), ("crop", 31), ("take", 22), ("keep", 2), ("keep", 3)]
OPS += [("crop", 5), ("take", 40), ("crop", 50), ("take", 90), ("crop", 0)]


@pytest.mark.parametrize("index", ["minmax", "certified"])
@pytest.mark.parametrize("bits", [16, 8, 4, 2])
def test_bounds_hold_whatever_was_stored_forgotten_and_undone(bits: int, index: str) -> None:
    tier = make.quantized((L, K, D), (bits, 8), group=8)
    kv, n, judged = SparseTier(tier, INDEXES[index], SMALL, [1], source=tier), 0, 0
    for op, x in OPS:
        if op == "take":
            kv.take(1, some(x, n))
            n += x
        elif op == "keep":
            kv.evict_except(1, torch.rand(K, tier.n_slots(1), generator=torch.Generator().manual_seed(x)) < 0.6)
        else:
            n = max(0, n - x)
            kv.crop(n)
        bound, true = scores(kv)
        assert bool((bound >= true - 1e-4).all()), op
        judged += bound.shape[0]
    assert judged > 1000


def test_a_group_that_falls_apart_at_an_undo_is_summarized_anew() -> None:
    """Older keys wait behind newer ones after an eviction: an undo packs what is left of the newer ones with them."""
    tier = make.quantized((L, K, D), (2, 8), group=8)
    kv = SparseTier(tier, Certified(page=3), SMALL, [1], source=tier)
    kv.take(1, some(40))
    at = torch.arange(40).expand(K, -1)
    kv.evict_except(1, (at >= 16) | (at % 8 < 3))
    assert tier.positions(1)[0, 16:].tolist() == [*range(32, 40), 0, 1, 2, 8, 9, 10]
    kv.crop(35)
    assert tier.positions(1)[0, 16:].tolist() == [32, 33, 34, 0, 1, 2, 8, 9, 10]
    assert kv._pages[1].whole.tolist() == [8] * K
    bound, true = scores(kv)
    assert bool((bound >= true - 1e-4).all())


@pytest.mark.parametrize("bits", [16, 8, 4, 2])
def test_pages_reach_as_far_as_numbers_are_final(bits: int) -> None:
    tier = make.quantized((L, K, D), (bits, 8), group=8)
    kv = SparseTier(tier, Certified(page=3), SMALL, [1], source=tier)
    kv.take(1, some(45))
    p = kv._pages[1]
    assert p.whole.tolist() == [(40 if bits < 8 else 45) // 3] * K
    assert p.behind()[0].tolist() == list(range(int(p.whole[0]) * 3, 45)), "what waits is read"


def test_what_a_pass_read_of_a_far_tier_is_fetched_once() -> None:
    tier = SHELVES["host"]((L, K, D))
    kv = SparseTier(tier, MinMax(page=3), SMALL, [1], source=tier)
    plain = SparseTier(tier, MinMax(page=3), SMALL, [1], source=Shown(tier))
    holed(kv)
    plain._learn([1])
    g, base = torch.Generator().manual_seed(3), torch.randn(H, 1, D, dtype=torch.float64)
    for n in (1, 4, 1, 70, 2):
        q = base + 0.5 * torch.randn(H, n, D, generator=g, dtype=torch.float64)
        got, want = (
            merge_attention(one.attend(1, q, AttentionParams(0.3), range(400, 400 + n))) for one in (kv, plain)
        )
        torch.testing.assert_close(got, want)
    near = kv._near
    assert near is not None
    assert 0 < near.asked - near.found < 0.6 * near.asked
    assert nbytes(kv)["near"] == near.nbytes(1) > 0
    kv.take(1, some(5, 310))
    assert nbytes(kv)["near"] == 0
    assert plain._near is None


def test_what_a_drafted_row_read_is_near_when_its_token_comes() -> None:
    """As SpeCache fetches by a draft of the next token."""
    guess = torch.randn(H, 2, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    fetched = []
    for drafted in (1, 2):
        tier = SHELVES["host"]((L, K, D))
        kv = SparseTier(tier, LowRank(page=3, rank=8), SMALL, [1], source=tier)
        holed(kv)
        kv.attend(1, guess[:, :drafted], AttentionParams(0.3), range(400, 400 + drafted))
        assert kv._near is not None
        before = kv._near.asked - kv._near.found
        kv.attend(1, guess[:, 1:], AttentionParams(0.3), [401])
        fetched.append(kv._near.asked - kv._near.found - before)
    assert fetched[0] > fetched[1] == 0


def test_keys_are_rebuilt_from_a_few_directions_and_values_fetched_as_they_are() -> None:
    """ShadowKV: of the pages that rows choose, keys from low-rank ones before the rotary embedding."""
    rank, g, n, rotary = 3, 20, 60, Rotary(0.5 ** torch.arange(D // 2))
    noise = torch.Generator().manual_seed(1)
    k, v = (torch.randn(K, n, D, generator=noise).bfloat16().float() for _ in "kv")
    pos = torch.arange(n, dtype=torch.int32).expand(K, -1)
    of = FormatContext(alike(L, K, D), torch.float32, [AttentionParams(0.3)] * L, lambda: [rotary] * L)
    coded = Cskv(k_rank=rank, v_rank=0).tier(of, torch.device("cpu"), Kv(group=g))
    host = HostTier(coded, "cpu")
    kv = SparseTier(host, LowRank(page=2, rank=4), SMALL, [1], source=host)
    kv.take(1, Slots(rotate(k, pos, rotary), v, pos))
    at = torch.tensor([[1, 20, 43], [59, 2, 21]])
    got = host.gather(1, at)
    rebuilt = []
    for a in range(0, n, g):  # of a block the best product of this rank, over both heads
        u, size, w = torch.linalg.svd(k[:, a : a + g].transpose(0, 1).flatten(1), full_matrices=False)
        rebuilt.append((u[:, :rank] * size[:rank] @ w[:rank]).view(g, K, D).transpose(0, 1))
    turned = rotate(torch.cat(rebuilt, 1), pos, rotary)
    for head in range(K):
        torch.testing.assert_close(got.k[head], turned[head, at[head]], atol=0.03, rtol=5e-3)
        assert torch.equal(got.v[head], v[head, at[head]])
    q = torch.randn(H, 4, D, generator=noise)
    part, whole = (merge_attention(one.attend(1, q, AttentionParams(0.3), range(60, 64))) for one in (kv, host))
    assert not torch.allclose(part, whole), "a part was read"
    assert nbytes(coded)["packed"] < 0.75 * n * K * 2 * D * 2  # bytes in 16 bits


@pytest.mark.parametrize("name", SHELVES)
@pytest.mark.parametrize("n", [0, 3, 133, 200, 280, 301])
def test_an_undo_leaves_what_was_learned_of_what_remains(name: str, n: int) -> None:
    """Few bits may be rounded anew when a group falls apart: then its pages are known by their first rounding."""
    tier = SHELVES[name]((L, K, D))
    kv = SparseTier(tier, MinMax(page=3), SMALL, [1], source=tier)
    holed(kv)
    kv.crop(n)
    fresh = SparseTier(tier, MinMax(page=3), SMALL, [1], source=tier)
    fresh._learn([1])
    for each in (kv, fresh):
        assert each._pages[1].reads_all == (n <= 3)
    for a, b in ((kv._pages[1].first, fresh._pages[1].first), (kv._pages[1].last, fresh._pages[1].last)):
        if n > 3:
            assert torch.equal(a, b)


# ---- whole texts ----


def ladder(of: LM, index: str, levels: str) -> TieredCache:
    def read(shelf: str) -> SparseTier:
        tier, epsilon = SHELVES[shelf](of), 0.3 if index == "certified" else None
        return SparseTier(tier, INDEXES[index], SMALL, range(1, of.n_layers), epsilon=epsilon, source=tier)

    three = levels == "three"
    upper = [TierLevel(read(shelf), 14, 4) for shelf in ("packed_8", "host") if three]
    return make.tiered(of, *upper, TierLevel(read("disk" if three else levels)), holds=5, group=4, sinks=1)


RUNGS = {"packed_8": "certified", "packed_4_2": "sketch", "host": "minmax", "disk": "certified", "three": "minmax"}
POLICIES: dict[str, Any] = {"all": None, "ragged": Ragged()}


@cache
def lm(dtype: str) -> LM:
    return exactness.lm("dense", dtype)


def decode(levels: str, policy: str, sampler: str, dtype: str, drafter: Drafter) -> tuple[list[int], TieredCache]:
    model = lm(dtype)
    kv = ladder(model, RUNGS[levels], levels)
    session = make.session(model, kv, drafter, exactness.SAMPLERS[sampler], policy=POLICIES[policy], every=8, chunk=13)
    run_to_end(session.read(exactness.prompt()))
    list(iterate_events(session.stream(exactness.NEW, stop={exactness.STOP})))
    return session.ids, kv


@cache
def plain(levels: str, policy: str, sampler: str, dtype: str) -> list[int]:
    return decode(levels, policy, sampler, dtype, Off())[0]


@pytest.mark.parametrize(
    ("levels", "policy", "drafter", "sampler", "dtype"),
    pairs(product(RUNGS, POLICIES, exactness.DRAFTERS, ("greedy", "sampled"), exactness.DTYPES)),
)
def test_any_drafter_gives_the_text_of_plain_decoding(
    levels: str, policy: str, drafter: str, sampler: str, dtype: str
) -> None:
    want = plain(levels, policy, sampler, dtype)
    assert decode(levels, policy, sampler, dtype, exactness.DRAFTERS[drafter](want))[0] == want


@pytest.mark.parametrize("levels", RUNGS)
def test_every_level_below_is_read_in_part(levels: str) -> None:
    """Or the table above would compare tiered caches that read everything."""
    _, kv = decode(levels, "all", "greedy", "fp64", Off())
    read = [rung.tier for rung in kv._levels[1:]]
    assert all(isinstance(tier, SparseTier) and tier.tally.pages for tier in read)


@pytest.mark.parametrize("policy", [None, KeepAll(), Ragged()])
@pytest.mark.parametrize("levels", [None, "disk"])
def test_a_prompt_is_stored_as_if_nothing_were_left_out(levels: str | None, policy: Any) -> None:
    model, stores = lm("fp64"), []
    small = {"page": 3, "floor": 4, "sinks": 1, "recent": 4, "selection_interval": 8, "dense_layers": 0}
    for method in ("none", "minmax"):
        settings = small if method != "none" else {}
        profile = load_profile("exact").replace(exactness="approx", sparse={"method": method} | settings)
        recall = profile.sparse.settings
        low = make.disk(model)
        dense = make.dense(model)
        kv = recall.bind(dense, dense, model.attention_params)
        if levels:
            kv = TieredCache(
                dense, [TierLevel(recall.bind_tier(low, model.attention_params))], holds=5, group=4, sinks=1
            )
        session = make.session(model, kv, policy=policy, chunk=13, every=8)
        run_to_end(session.read(families.prompt(90)))
        stores.append(kv.slots(2))
    a, b = stores
    assert torch.equal(a.pos, b.pos)
    torch.testing.assert_close(a.k, b.k)


def test_a_policy_may_evict_below_what_sparse_attention_reads() -> None:
    ids, kv = decode("disk", "ragged", "greedy", "fp64", Off())
    assert len(ids) == len(exactness.prompt()) + exactness.NEW
    assert kv.n_slots(1) < len(ids) - 5


# ---- profiles ----


def profile(**changes: Any) -> Profile:
    return load_profile("exact").replace(exactness="approx", **changes)


RECALL = {
    "method": "minmax",
    "page": 3,
    "floor": 4,
    "sinks": 1,
    "recent": 4,
    "selection_interval": 8,
    "dense_layers": 1,
}


@pytest.mark.parametrize(
    "other",
    [
        {"kv": {"k_bits": 8, "v_bits": 8, "residual": 8, "group": 4}},
        {"memory": {"disk": "1GiB", "device": "350KiB"}, "prefill": {"chunk": 16}},
        {"memory": {"device": "1GiB"}},
        {"memory": {"host": "auto"}},
    ],
)
def test_a_profile_reads_a_part_of_any_tiered_cache(other: dict[str, dict[str, object]]) -> None:
    model = lm("fp32")
    session = assemble.session(model, profile(sparse=RECALL, **other))
    run_to_end(session.read(families.prompt(400)))
    list(iterate_events(session.stream(12)))
    index = {use.layer for use in session.cache.usage() if use.tier == "index" and use.nbytes > 100}
    assert index == set(range(1, model.n_layers))


def test_steps_that_make_tiers_may_be_taken_while_a_part_is_read() -> None:
    steps = ["kv.v_bits=8", "kv.k_bits=4", "memory.disk=1GiB"]
    assert profile(sparse=RECALL, memory={"fallbacks": steps}).memory.fallbacks == tuple(steps)


def test_max_context_loads_without_a_gpu_and_says_what_it_does_not_do() -> None:
    small = {"residual": 16, "group": 16}
    shipped = load_profile("max-context").replace(kv=small, sparse={"floor": 64})
    model = Model(
        make.model("llama", vocab_size=2048, head_dim=16, max_position_embeddings=1024),
        small_tokenizers.demo(),
        shipped,
    )
    turn = model.generate(families.prompt(300, 2048), max_new_tokens=20)
    assert len(turn.ids) == 20
    assert set(nbytes(model.text_session.session.cache)) == {"cpu", "packed", "index"}
    (caution,) = model.cautions
    assert "memory.host = auto" in caution
    assert model.with_profile(load_profile("exact")).cautions == []


# ---- room ----


def room(index: int, **memory: str) -> CacheCapacity:
    return CacheCapacity(
        memory=Memory(**memory),  # type: ignore[arg-type]
        layers=[250] * 4,
        wide=1000,
        narrow=250,
        index=index,
        far=index,
        between=100,
        newest=64,
        always=20,
        is_packed=True,
        free=0,
        host=0,
    )


def test_the_index_of_what_lies_below_takes_its_room_on_the_device() -> None:
    gib = 1 << 30
    without, with_ = (room(index, device="1GiB", host="2GiB") for index in (0, 50))
    assert without.in_host == with_.in_host == 2 * gib // 250
    assert without.on_device == (gib - 100_000) // 250 * 16 // 17
    assert with_.on_device == (gib - 100_000 - 50 * with_.in_host) // 300 * 16 // 17


def test_where_the_index_would_fill_the_device_less_lies_below() -> None:
    found = room(50, device="1GiB", host="100GiB", disk="1TiB")
    left = (1 << 30) - 100_000
    assert found.in_host == left // 2 // 50
    assert found.on_disk == 1
    assert found.on_device is not None
    assert found.on_device * 300 + (found.in_host + 1) * 50 <= left
    assert found.on_device > left // 2 // 300 * 15 // 17
