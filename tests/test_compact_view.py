"""The fast view equals the reference, whatever happens to the store below it."""

from __future__ import annotations

import copy

import pytest
import torch

from kvcli.kernels.merge_attention import merge_attention
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.cache.tiered_cache import TieredCache
from kvcli.kv.slots import AttentionParams, Slots, alike
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.views.view import CompactView
from kvcli.methods.policies.quest import Quest
from kvcli.methods.policies.streaming import StreamingLLM
from tests import make
from tests.policies import moment
from tests.reference import GatheredView

LAYERS, HEADS, DIM = 2, 2, 8
RANDOM = torch.Generator().manual_seed(0)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=RANDOM)


def grown(kv: Dense, n: int, start: int = 0) -> None:
    for layer in range(LAYERS):
        kv.append(layer, rand(HEADS, n, DIM), rand(HEADS, n, DIM), start)


def pick(policy):
    return lambda layer, q, s, last: policy.mask(s, moment(s, q, layer, policy_state=last))


def pair(policy, every: int) -> tuple[Dense, CompactView, GatheredView]:
    kv = make.dense((LAYERS, HEADS, DIM), torch.float32)
    shapes = alike(LAYERS, HEADS, DIM)
    return kv, CompactView(kv, pick(policy), every, shapes), GatheredView(kv, pick(policy))


def same(front: CompactView, view: GatheredView, at: int) -> None:
    q, pos = rand(4, 3, DIM), torch.arange(at, at + 3)
    for layer in range(LAYERS):
        want, got = (v.attend(layer, q, AttentionParams(0.3), pos) for v in (view, front))
        torch.testing.assert_close(merge_attention(got), merge_attention(want))


@pytest.mark.parametrize("policy", [StreamingLLM(sinks=2, window=9), Quest(page=4, pages=3, sinks=2, recent=5)])
def test_chosen_anew_each_token_it_is_the_reference(policy):
    kv, front, view = pair(policy, every=1)
    for n in range(0, 60, 3):
        grown(kv, 3, n)
        same(front, view, n + 3)


def test_between_two_choices_new_tokens_join():
    kv, front, _ = pair(StreamingLLM(sinks=2, window=6), every=10)
    grown(kv, 30)
    q = rand(4, 1, DIM)
    front.attend(0, q, AttentionParams(1.0), [30])
    grown(kv, 4, 30)
    front.attend(0, q, AttentionParams(1.0), [34])
    assert front._copy.slots(0).pos[0].tolist() == [0, 1, *range(24, 34)]
    grown(kv, 7, 34)
    front.attend(0, q, AttentionParams(1.0), [41])
    assert front._copy.slots(0).pos[0].tolist() == [0, 1, *range(35, 41)]


@pytest.mark.parametrize("change", ["crop", "keep", "ragged"])
def test_what_is_forgotten_below_is_forgotten_here(change: str):
    kv, front, view = pair(StreamingLLM(sinks=1, window=50), every=1000)
    grown(kv, 40)
    same(front, view, 40)
    if change == "crop":
        kv.crop(20)
        grown(kv, 20, 20)  # as many slots as before, with other keys
    else:
        mask = torch.ones(HEADS, 40, dtype=torch.bool)
        mask[:, 5:10] = False
        if change == "ragged":
            mask[0, 10:20] = False
        for layer in range(LAYERS):
            kv.evict_except(layer, mask)
    same(front, view, 40)
    grown(kv, 3, 40)
    same(front, view, 43)


def test_slots_that_hold_nothing_are_never_read():
    """FAFO's released code lets rows attend ten zero slots; here every one that holds nothing is poisoned."""
    kv, front, view = pair(StreamingLLM(sinks=2, window=6), every=8)
    grown(kv, 30)
    same(front, view, 30)
    for dense in (kv, front._copy):
        for slab in dense._slabs.values():
            for t in (slab.k, slab.v):
                t.view(len(slab.lengths), -1, t.shape[1])[:, slab.length :] = 1e4
    same(front, view, 30)


def test_an_empty_store_has_nothing_to_show():
    kv, front, _ = pair(StreamingLLM(), every=8)
    assert front.attend(0, rand(4, 1, DIM), AttentionParams(1.0), [0]) == []
    assert sum(use.nbytes for use in front.usage()) == sum(use.nbytes for use in kv.usage())


def test_quest_reads_the_page_that_the_query_wants():
    kv = make.dense((1, HEADS, DIM), torch.float32)
    k = 0.01 * rand(HEADS, 64, DIM)
    q = rand(4, 1, DIM)
    k[0, 21] = 3 * q[0, 0]  # head 0 of two; queries 0 and 1 are its group
    kv.append(0, k, rand(HEADS, 64, DIM), 0)
    mask = Quest(page=8, pages=1, sinks=1, recent=2).mask(kv.slots(0), moment(kv.slots(0), q))
    assert mask[0].nonzero().flatten().tolist() == [0, *range(16, 24), 62, 63]
    assert mask[1].sum() <= 8 + 3


def bounds_by_loop(s: Slots, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of Quest's bounds, key by key: minimum and maximum [K, P, D] of each page."""
    low = torch.full((s.k.shape[0], int(s.pos.max()) // page + 1, s.k.shape[2]), torch.inf)
    high = -low
    for head, row in enumerate(s.pos.tolist()):
        for slot, pos in enumerate(row):
            if pos >= 0:
                low[head, pos // page] = torch.minimum(low[head, pos // page], s.k[head, slot])
                high[head, pos // page] = torch.maximum(high[head, pos // page], s.k[head, slot])
    return low, high


def test_bounds_kept_per_page_are_those_of_all_keys_whatever_happens_to_the_cache():
    policy, selections = Quest(page=4, pages=3, sinks=2, recent=5), 0

    def compared(layer, q, s, last):
        nonlocal selections
        found = policy.mask(s, moment(s, q, layer, policy_state=last))
        assert torch.equal(found, policy.mask(s, moment(s, q, layer)))
        assert all(map(torch.equal, last.summary, bounds_by_loop(s, 4)))
        selections += 1
        return found

    lower = make.dense((LAYERS, HEADS, DIM), torch.float32)
    for kv in (
        make.dense((LAYERS, HEADS, DIM), torch.float32),
        TieredCache(make.dense((LAYERS, HEADS, DIM), torch.float32), [TierLevel(lower, 1 << 20)], holds=20),
    ):
        view = CompactView(kv, compared, 3, alike(LAYERS, HEADS, DIM))

        def read(view: CompactView, at: int) -> None:
            for layer in range(LAYERS):
                view.attend(layer, rand(4, 3, DIM), AttentionParams(0.3), [at, at + 1, at + 2])

        def write(n: int, at: int, kv=kv, view=view) -> None:
            for start in range(at, at + n, 3):
                grown(kv, 3, start)
                read(view, start + 3)

        write(60, 0)
        fork = copy.deepcopy(view)
        write(6, 60)
        grown(fork._store, 6, 60)  # other tokens than in the first sequence
        read(fork, 66)
        kv.crop(31)  # other tokens at the positions of former ones
        write(12, 31)
        uneven = torch.ones(HEADS, kv.n_slots(0), dtype=torch.bool)
        uneven[0, 3:17] = uneven[1, 8:11] = False
        kv.compress([uneven] * LAYERS, 43)
        write(12, 43)
        read(view.rebind(fork._store), 66)
        tables = sum(use.nbytes for use in view.usage()) - sum(use.nbytes for use in view._copy.usage())
        assert tables == LAYERS * 2 * HEADS * 14 * DIM * 4, "pages of 55 tokens, minima and maxima"
    assert selections > 120


def test_keys_that_are_in_the_bounds_are_not_read_again():
    kv, view, _ = pair(Quest(page=4, pages=3, sinks=0, recent=1), every=4)
    grown(kv, 40)
    view.attend(0, rand(4, 1, DIM), AttentionParams(1.0), [40])
    before = view._last[0].summary[0].clone()
    grown(kv, 4, 40)
    kv.slots(0).k[:, :40] = torch.nan
    view.attend(0, rand(4, 1, DIM), AttentionParams(1.0), [44])
    low = view._last[0].summary[0]
    assert torch.equal(low[:, :10], before)
    assert torch.equal(low[:, 10], kv.slots(0).k[:, 40:].amin(1))


def test_a_page_that_a_head_has_lost_is_not_chosen():
    kv = make.dense((1, HEADS, DIM), torch.float32)
    kv.append(0, rand(HEADS, 64, DIM), rand(HEADS, 64, DIM), 0)
    held = torch.ones(HEADS, 64, dtype=torch.bool)
    held[0, :8] = False  # its padding must not pass for the first page
    kv.evict_except(0, held)
    s = kv.slots(0)
    mask = Quest(page=8, pages=2, sinks=0, recent=1).mask(s, moment(s, rand(4, 1, DIM)))
    assert mask.sum(1).min() >= 16


def test_over_another_store_it_shows_that_one():
    kv, front, view = pair(StreamingLLM(sinks=2, window=90), every=50)
    grown(kv, 40)
    same(front, view, 40)
    other = make.dense((LAYERS, HEADS, DIM), torch.float32)
    grown(other, 40)
    moved, reference = front.rebind(other), view.rebind(other)
    same(moved, reference, 40)
    grown(other, 2, 40)
    same(moved, reference, 42)
    kv.crop(0)
    same(moved, reference, 42)


def test_the_bound_of_a_page_is_above_every_score_in_it():
    k, q = rand(HEADS, 64, DIM), rand(4, 5, DIM)
    rows = q.reshape(HEADS, -1, DIM)
    pages = k.reshape(HEADS, 8, 8, DIM)
    low, high = pages.amin(2), pages.amax(2)
    bound = rows.clamp(min=0) @ high.transpose(1, 2) + rows.clamp(max=0) @ low.transpose(1, 2)
    score = (rows @ k.transpose(1, 2)).reshape(HEADS, -1, 8, 8).amax(3)
    assert bool((bound >= score - 1e-5).all())
