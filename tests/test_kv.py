"""Storage: slot order means nothing, bytes are those of the tensors, views and windows read what they say (I5, I8)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import astuple, replace

import psutil
import pytest
import torch
from torch import Tensor

from kvcli import assemble
from kvcli.errors import BadConfig
from kvcli.kernels.attend.reference import attend as specified
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import merge_attention
from kvcli.kv.capacity import CacheFootprint
from kvcli.kv.formats.kivi import Kivi
from kvcli.kv.slots import AttentionParams, LayerShape, Slots, alike, compact, last, nbytes, zeros_on_demand
from kvcli.kv.sparse.settings import FullAttention
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.tiers.dense_layer import DenseLayer
from kvcli.kv.views.view import CompactView, Selection
from kvcli.settings.profile import load_profile
from kvcli.settings.schema import Memory
from tests import make
from tests.policies import masks
from tests.reference import GatheredView

K, G, D, L = 3, 2, 8, 2
H = K * G


def filled(n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Dense:
    g = torch.Generator().manual_seed(seed)
    kv = make.dense((L, K, D), dtype)
    at = 0
    for m in (1, n // 3, n - n // 3 - 1):
        for layer in range(L):
            k, v = (torch.randn(K, m, D, generator=g, dtype=torch.float64).to(dtype) for _ in "kv")
            kv.append(layer, k, v, at)
        at += m
    return kv


def rows(n: int, at: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    return torch.randn(H, n, D, generator=g, dtype=torch.float64), torch.arange(at, at + n)


def read(kv: Dense | GatheredView, q: Tensor, pos: Tensor, window: int | None = None, layer: int = 1) -> Tensor:
    parts = kv.attend(layer, q, AttentionParams(0.3, 0.0, window), pos.tolist())
    return merge_attention([*parts, *parts]) if parts else torch.zeros_like(q)  # a part merged with itself is itself


def uneven(s: Slots) -> Tensor:
    """Head j keeps the slots whose position is a multiple of j + 1."""
    return torch.stack([s.pos[j] % (j + 1) == 0 for j in range(K)])


def test_shuffling_slots_changes_nothing() -> None:
    kv = filled(37)
    q, pos = rows(5, 37)
    want = read(kv, q, pos)
    slots = kv.slots(1)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(1))
    shuffled = make.dense((L, K, D))
    for i in order.tolist():
        shuffled.append(1, slots.k[:, i : i + 1], slots.v[:, i : i + 1], int(slots.pos[0, i]))
    torch.testing.assert_close(read(shuffled, q, pos), want)


@pytest.mark.parametrize("window", [1, 4, 11, 36, 37, 41, 42, 1000])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_sliding_window_hides_what_is_too_old(window: int, n: int, shuffle: bool) -> None:
    kv = filled(37)
    if shuffle:
        slots, order = kv.slots(1), torch.randperm(37, generator=torch.Generator().manual_seed(2))
        kv = make.dense((L, K, D))
        for i in order.tolist():
            kv.append(1, slots.k[:, i : i + 1], slots.v[:, i : i + 1], int(slots.pos[0, i]))
    q, pos = rows(n, 37)
    s = kv.slots(1)
    mask = s.pos.unsqueeze(1) > (pos - window).view(1, -1, 1)
    out, _ = specified(q, s.k, s.v, 0.3, 0.0, mask, s.n_slots)
    torch.testing.assert_close(read(kv, q, pos, window), out)


def allocated(kv: Dense) -> int:
    """Bytes of every tensor that the store holds on to, found by looking, each storage once."""
    held: dict[int, int] = {}
    for slab in kv._slabs.values():
        names = slab.__slots__ if hasattr(slab, "__slots__") else vars(slab)
        for t in (getattr(slab, name) for name in names):
            if isinstance(t, Tensor):
                held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(held.values())


def test_bytes_are_what_the_tensors_hold_and_evicting_gives_them_back() -> None:
    kv = filled(37, torch.float32)
    assert nbytes(kv)["cpu"] == allocated(kv) == L * Dense.STEP * (2 * K * D * 4 + 4)
    kv.compress(masks(kv, lambda layer, s: s.pos < 10))
    assert nbytes(kv)["cpu"] == allocated(kv) == L * 10 * (2 * K * D * 4 + 4)


def test_unequal_heads_take_the_bytes_of_their_own_slots() -> None:
    kv, slot = filled(3000, torch.float32), 2 * D * 4 + 4
    kv.compress(masks(kv, lambda layer, s: uneven(s)))
    held = 3000 + 1500 + 1000
    assert nbytes(kv)["cpu"] == allocated(kv)
    assert held < allocated(kv) / (L * slot) < 1.05 * held
    kv.compress(masks(kv, lambda layer, s: s.pos % 30 == 0))  # heads agree again, and share their positions again
    assert nbytes(kv)["cpu"] == allocated(kv) == L * 100 * (2 * K * D * 4 + 4)


def test_keeping_all_is_a_no_op() -> None:
    kv = filled(37)
    before = [t.data_ptr() for t in (kv.slots(0).k, kv.slots(0).v)]
    fell = kv.evict_except(0, kv.slots(0).pos >= 0)
    kv.compress()
    assert [t.data_ptr() for t in (kv.slots(0).k, kv.slots(0).v)] == before
    assert fell.n_slots == 0
    assert kv.slots(0).n_slots == 37


def test_reserved_room_is_counted_and_never_moves() -> None:
    kv = make.dense((L, K, D), torch.float32)
    kv.reserve(100)
    at = kv.slots(0).k.untyped_storage().data_ptr()
    for i in range(100):
        kv.append(0, torch.ones(K, 1, D), torch.ones(K, 1, D), i)
    assert kv.slots(0).k.untyped_storage().data_ptr() == at
    assert nbytes(kv)["cpu"] == L * Dense.STEP * (2 * K * D * 4 + 4)


def test_room_for_a_long_prompt_takes_memory_as_it_is_filled() -> None:
    kv, this = make.dense((1, 4, 128), torch.float32), psutil.Process()
    before = this.memory_info().rss
    kv.reserve(1 << 14)
    assert nbytes(kv)["cpu"] > 64 << 20
    assert this.memory_info().rss - before < 16 << 20
    kv.append(0, torch.ones(4, 7, 128), torch.ones(4, 7, 128), 0)
    k = kv._slabs[0].k.view(4, -1, 128)
    assert (k[:, :7] == 1).all()
    assert not k[:, 7:].any()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_does_not_write_into_the_room_of_its_parent() -> None:
    room = zeros_on_demand(torch.zeros(0), 1 << 20)
    if not (child := os.fork()):
        room.numpy()[:] = 1
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not room.any()


def test_positions_beside_keys_follow_those_on_the_host() -> None:
    slab = DenseLayer(Slots(*(torch.zeros(2, 3, 4) for _ in "kv"), torch.tensor([[0, 2, 5]] * 2)), step=8)
    rows = torch.zeros(2, 2, 4)
    changes: list[Callable[[], object]] = [
        lambda: slab.append(rows, rows, 6),
        lambda: slab.append(rows, rows, 20),
        lambda: slab.crop(7),
        lambda: slab.append(rows, rows, 7),
        lambda: slab.take(Slots(rows, rows, torch.tensor([[1, 30]] * 2))),
        lambda: slab.reserve(40),
    ]
    for change in changes:
        slab.beside()
        change()
        assert slab.beside()[: slab.length].tolist() == slab.at().tolist()


@pytest.mark.parametrize("window", [None, 3])
def test_positions_lie_on_the_host_whatever_the_device(window: int | None) -> None:
    """Torch's device without numbers refuses to show the host any, as a GPU does."""
    kv = Dense(alike(L, K, D), torch.float32, "meta", step=4)
    rows, own = torch.empty(K, 3, D, device="meta"), torch.empty(K, 1, D, device="meta")
    for start in (0, 3, 6):
        kv.append(0, rows, rows, start)
        found = kv.attend(
            0,
            torch.empty(H, 1, D, device="meta"),
            AttentionParams(1.0, window=window),
            [9],
            NewRows(own, own, [9], None, None),
        )
        assert {part.out.device.type for part in found} == {"meta"}
    for change in (lambda: kv.device_tables(2), lambda: kv.reserve(40), lambda: kv.crop(7)):
        change()
        assert kv._slabs[0].pos.is_cpu
        assert {t.device.type for t in astuple(kv.device_tables(2).layers[0].table)} == {"meta"}
    assert kv._slabs[0].at().tolist() == [*range(7)]


@pytest.mark.parametrize("n", [2, 1100])  # long runs are read with the spare room behind them
def test_numbers_that_are_not_finite_go_with_their_text(n: int) -> None:
    kv, ones = make.dense((1, K, D), torch.float32), torch.ones(K, n, D)
    kv.append(0, ones, ones, 0)
    kv.append(0, ones[:, :2] / 0, ones[:, :2] * torch.nan, n)
    kv.crop(n)
    q, pos = rows(1, n)
    torch.testing.assert_close(read(kv, q.float(), pos, layer=0), torch.ones(H, 1, D))


def test_keys_that_are_not_finite_go_with_their_text_under_recorded_passes() -> None:
    """Heads of equal room and unequal length are read under a mask, with the room behind the shorter ones."""
    kv, ones = make.dense((1, K, D)), torch.ones(K, 40, D, dtype=torch.float64)
    kv.append(0, ones, ones, 0)
    kv.evict_except(0, torch.arange(40) >= torch.arange(K).unsqueeze(1))
    kv.append(0, ones[:, :3] * torch.nan, ones[:, :3] * torch.nan, 40)
    (lying,) = kv.device_tables(1, 100).layers
    kv.crop(40)
    assert len(kv._slabs[0]._extents.runs()) == 1
    assert bool(read(kv, *rows(1, 40), layer=0).isfinite().all())
    assert kv.device_tables(1, 100).layers == [lying], "in place"


@pytest.mark.parametrize("ragged", [False, True])
def test_what_is_evicted_under_recorded_passes_leaves_nothing_where_it_lay(ragged: bool) -> None:
    """Numbers that are not finite go with their slots; a KV cache of the same length differs from the one before."""
    kv = make.dense((1, K, D))
    ones = torch.ones(K, 40, D, dtype=torch.float64)
    kv.append(0, ones, ones, 0)
    if ragged:
        kv.evict_except(0, uneven(kv.slots(0)))
    odd = kv.slots(0).pos
    kv.append(0, ones[:, :3] * torch.nan, ones[:, :3] * torch.nan, 40)
    (lying,) = kv.device_tables(1, 100).layers
    told = lying.synced_length
    kv.compress([kv.slots(0).pos.lt(40) & kv.slots(0).pos.ge(0)])
    # before they are overwritten
    assert all(bool(t.isfinite().all()) for t in (kv._slabs[0].v, read(kv, *rows(1, 46), layer=0)))
    kv.append(0, ones[:, :3], ones[:, :3], 43)
    assert kv.device_tables(1, 100).layers == [lying], "in place"
    assert lying.synced_length > told
    assert torch.equal(kv.slots(0).pos[:, : odd.shape[1]].where(odd >= 0, -1), odd)
    q, pos = rows(1, 46)
    assert all(bool(t.isfinite().all()) for t in (kv._slabs[0].v, read(kv, q, pos, layer=0)))


def test_positions_that_an_eager_pass_sent_count_as_an_upload() -> None:
    """A pass that was launched before its request read other slots, even if there were as many."""
    kv, ones = make.dense((1, K, D)), torch.ones(K, 40, D, dtype=torch.float64)
    kv.append(0, ones, ones, 0)
    (lying,) = kv.device_tables(1, 100).layers
    told = lying.synced_length
    kv.crop(39)
    kv.append(0, ones[:, :1], ones[:, :1] * 2, 39)
    kv._slabs[0].beside()  # as a window reads them on a GPU
    assert kv.device_tables(1, 100).layers == [lying]
    assert lying.synced_length > told


@pytest.mark.parametrize("ragged", [False, True])
def test_a_kv_cache_emptied_after_an_eviction_is_as_good_as_new(ragged: bool) -> None:
    kv = filled(37)
    kv.compress(masks(kv, lambda layer, s: uneven(s) if ragged else s.pos % 3 > 0))
    kv.crop(0)
    for at in (0, 1):
        kv.append(1, torch.ones(K, 1, D, dtype=torch.float64), torch.ones(K, 1, D, dtype=torch.float64), at)
    assert kv._slabs[1].ordered, "windows of slots out of order are read under a mask, all slots of them"


def test_running_out_of_memory_while_growing_leaves_the_kv_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    kv, ones = filled(37), torch.ones(K, 1, D, dtype=torch.float64)
    want, new_zeros, calls = read(kv, *rows(5, 37)), Tensor.new_zeros, iter(range(99))

    def scarce(t: Tensor, *args: object) -> Tensor:
        if next(calls) == 3:  # keys of the second layer fit, its values do not
            raise MemoryError("full")
        return new_zeros(t, *args)

    monkeypatch.setattr(Tensor, "new_zeros", scarce)
    with pytest.raises(MemoryError):
        kv.reserve(1000)
    monkeypatch.undo()
    torch.testing.assert_close(read(kv, *rows(5, 37)), want)
    kv.reserve(600)
    for layer in range(L):
        kv.append(layer, ones, ones, 37)
    assert kv.slots(1).n_slots == 38


@pytest.mark.parametrize("verb", ["append", "take", "reserve"])
def test_running_out_of_memory_leaves_unequal_heads_as_they_were(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, ones = filled(37), torch.ones(K, 20, D, dtype=torch.float64)
    kv.evict_except(1, uneven(kv.slots(1)))
    want, before, new_zeros, calls = read(kv, *rows(5, 37)), kv.slots(1).pos, Tensor.new_zeros, iter(range(99))
    pos = torch.arange(37, 57)

    def scarce(t: Tensor, *args: object) -> Tensor:
        if next(calls) == 1:
            raise MemoryError("full")
        return new_zeros(t, *args)

    def grow() -> None:
        if verb == "append":
            kv.append(1, ones, ones, 37)
        elif verb == "take":
            kv.take(1, Slots(ones, ones, pos.expand(K, -1)))
        else:
            kv.reserve(1000)

    monkeypatch.setattr(Tensor, "new_zeros", scarce)
    with pytest.raises(MemoryError):
        grow()
    monkeypatch.undo()
    torch.testing.assert_close(read(kv, *rows(5, 37)), want)
    assert torch.equal(kv.slots(1).pos, before)
    grow()
    assert kv.n_slots(1) == (37 if verb == "reserve" else 57)


def test_what_another_tier_let_go_is_taken_in() -> None:
    kv, other = filled(37), filled(50, seed=1)
    whole = other.slots(1)
    changes = kv.changes
    kv.take(1, Slots(whole.k[:, 37:], whole.v[:, 37:], whole.pos[:, 37:]))
    assert kv.changes > changes
    assert kv.slots(1).pos.tolist() == [list(range(50))] * K
    assert kv.usage()[1].nbytes == Dense.STEP * (2 * K * D * 8 + 4), "heads that agree share their positions"
    fell = other.evict_except(0, uneven(other.slots(0)))
    kv.crop(0)
    kv.take(0, fell)
    kv.take(0, Slots(fell.k[:, :0], fell.v[:, :0], fell.pos[:, :0]))
    for j, pos in enumerate(kv.slots(0).pos):
        assert pos[pos >= 0].tolist() == [p for p in range(50) if p % (j + 1)]
    torch.testing.assert_close(kv.slots(0).k[2, :33], fell.k[2, :33])


@pytest.mark.parametrize("ragged", [False, True])
def test_the_newest_slots_are_those_stored_last(ragged: bool) -> None:
    kv = filled(37)
    if ragged:
        kv.evict_except(1, uneven(kv.slots(1)))
    kv.append(1, torch.ones(K, 2, D, dtype=torch.float64), torch.ones(K, 2, D, dtype=torch.float64), 37)
    newest = kv.newest(1, 3)
    for j, pos in enumerate(newest.pos):
        kept = [p for p in range(37) if not ragged or p % (j + 1) == 0]
        assert pos.tolist() == [kept[-1], 37, 38]
        assert bool((newest.k[j, 1:] == 1).all())
    assert last(kv.slots(1), 3).pos.tolist() == newest.pos.tolist()
    everything = kv.newest(1, 1000)
    assert torch.equal(everything.pos, kv.slots(1).pos)
    assert kv.n_slots(1) == 39


def test_a_view_reads_what_is_picked_and_leaves_the_kv_cache_alone() -> None:
    kv = filled(37)
    q, pos = rows(5, 37)
    whole = GatheredView(kv, lambda layer, q, s, last: s.pos >= 0)
    torch.testing.assert_close(read(whole, q, pos), read(kv, q, pos))
    s = kv.slots(1)
    out, _ = specified(q, s.k, s.v, 0.3, 0.0, uneven(s).unsqueeze(1).expand(-1, 5, -1), s.n_slots)
    torch.testing.assert_close(read(GatheredView(kv, lambda layer, q, s, last: uneven(s)), q, pos), out)
    assert GatheredView(kv, lambda layer, q, s, last: s.pos < 0).attend(1, q, AttentionParams(0.3), pos) == []
    assert kv.slots(1).n_slots == 37


def test_compacting_keeps_order_and_pads_with_empty_slots() -> None:
    s = filled(7).slots(0)
    mask = torch.tensor([[1, 0, 1, 1, 0, 0, 1], [0] * 7, [1] * 7], dtype=torch.bool)
    kept = compact(s, mask)
    assert kept.pos.tolist() == [[0, 2, 3, 6, -1, -1, -1], [-1] * 7, list(range(7))]
    torch.testing.assert_close(kept.k[0, 1], s.k[0, 2])


# ---- layers that are not alike ----

UNEVEN = (LayerShape(3, 8, 12), LayerShape(1, 16, 4), LayerShape(3, 8, 12, shared_from=0), LayerShape(6, 5, 5))


def test_layers_may_differ_in_heads_and_sizes_and_share_their_slots() -> None:
    kv, twin, noise = Dense(UNEVEN, torch.float64), Dense(UNEVEN, torch.float64), torch.Generator().manual_seed(0)
    owners = {layer: shape for layer, shape in enumerate(UNEVEN) if shape.shared_from is None}

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    def same(keep: Callable[[Tensor], Tensor]) -> None:
        """Each layer reads what is kept of its own slots, or of those that it shares."""
        for layer, shape in enumerate(UNEVEN):
            source, q = layer if shape.shared_from is None else shape.shared_from, random(6, 4, shape.k_dim)
            s = kv.slots(layer)
            pos = torch.arange(held[source][0].shape[1]).expand(shape.n_kv_heads, -1)
            mask = keep(pos).unsqueeze(1).expand(-1, 4, -1)
            out, _ = specified(q, *held[source], 0.3, 0.0, mask, pos.shape[1])
            torch.testing.assert_close(merge_attention(kv.attend(layer, q, AttentionParams(0.3), range(90, 94))), out)
            assert (*s.k.shape[::2], s.v.shape[2]) == (shape.n_kv_heads, shape.k_dim, shape.v_dim)
            assert kv.n_slots(layer) == s.n_slots == int(keep(pos).sum(1).max())

    held = {i: (random(s.n_kv_heads, 40, s.k_dim), random(s.n_kv_heads, 40, s.v_dim)) for i, s in owners.items()}
    for layer, (k, v) in held.items():
        kv.append(layer, k, v, 0)
    same(lambda pos: pos >= 0)
    mask = [s.pos % (torch.arange(s.pos.shape[0]).view(-1, 1) + 1) == 0 for s in map(kv.slots, range(4))]
    kv.compress([m if layer in owners else None for layer, m in enumerate(mask)])  # heads of unequal length
    same(lambda pos: pos % (torch.arange(pos.shape[0]).view(-1, 1) + 1) == 0)
    for layer in owners:
        twin.take(layer, kv.slots(layer))
    assert torch.equal(twin.slots(2).k, kv.slots(2).k)
    kv.crop(10)
    same(lambda pos: (pos % (torch.arange(pos.shape[0]).view(-1, 1) + 1) == 0) & (pos < 10))
    kv.reserve(77)
    size = sum(s.n_kv_heads * (s.k_dim + s.v_dim) * 8 for s in owners.values())
    assert nbytes(kv)["cpu"] == allocated(kv) >= 77 * size


def test_what_shares_slots_stores_none() -> None:
    kv = Dense(UNEVEN, torch.float64)
    kv.append(0, torch.ones(3, 4, 8), torch.ones(3, 4, 12), 0)
    with pytest.raises(KeyError):
        kv.append(2, torch.ones(3, 4, 8), torch.ones(3, 4, 12), 4)
    with pytest.raises(AssertionError, match="stores no slots"):
        kv.put(2, kv.slots(2))
    with pytest.raises(AssertionError, match="a layer without KV"):
        Dense([*UNEVEN, LayerShape(3, 8, 12, shared_from=2)], torch.float64)


def test_a_view_chooses_for_each_layer_even_where_slots_are_shared() -> None:
    kv = Dense(UNEVEN, torch.float64)
    for layer, shape in enumerate(UNEVEN):
        if shape.shared_from is None:
            k, v = (torch.randn(shape.n_kv_heads, 9, d, dtype=torch.float64) for d in (shape.k_dim, shape.v_dim))
            kv.append(layer, k, v, 0)

    def pick(layer: int, q: Tensor, s: Slots, last: Selection) -> Tensor:
        return s.pos % 2 == layer // 2 % 2

    front, view = CompactView(kv, pick, 4, UNEVEN), GatheredView(kv, pick)
    for layer, shape in enumerate(UNEVEN):
        q = torch.randn(6, 2, shape.k_dim, dtype=torch.float64)
        torch.testing.assert_close(
            merge_attention(front.attend(layer, q, AttentionParams(0.3), [9, 9])),
            merge_attention(view.attend(layer, q, AttentionParams(0.3), [9, 9])),
        )


MORE = {
    "kv.k_bits": {"kv": {"k_bits": 8}},
    "kv.v_bits": {"kv": {"v_bits": 4}},
    "memory.disk": {"memory": {"disk": "1GiB", "device": "1GiB"}},
    "memory.device": {"memory": {"device": "1GiB"}},
    "sparse.method": {"sparse": {"method": "minmax", "dense_layers": 0}},
}


SIZES = (LayerShape(2, 16, 16), LayerShape(1, 32, 16), LayerShape(2, 16, 16, shared_from=0), LayerShape(4, 16, 32))


@pytest.mark.parametrize("key", MORE)
def test_tiers_and_sparse_attention_take_layers_of_any_size(key: str) -> None:
    """And gives what a dense tier gives, to what is rounded."""
    profile = load_profile("exact").replace(exactness="approx", **MORE[key])
    plan = assemble.plan(make.model("llama", num_hidden_layers=4), profile)
    kv, plain = replace(plan, shapes=SIZES).store(), Dense(SIZES, plan.dtype)
    for layer, of in enumerate(SIZES):
        if of.shared_from is None:
            k, v = (torch.randn(of.n_kv_heads, 600, size) for size in (of.k_dim, of.v_dim))
            for store in (kv, plain):
                store.append(layer, k, v, 0)
    kv.compress((), 600)
    assert {use.layer for use in kv.usage() if use.nbytes} == {0, 1, 3}
    for layer, of in enumerate(SIZES):
        if of.shared_from is None:
            q = torch.randn(4, 3, of.k_dim)
            ours, theirs = (
                merge_attention(store.attend(layer, q, AttentionParams(0.3, is_prompt=True), range(600, 603)))
                for store in (kv, plain)
            )
            within = {"kv.k_bits": 0.02, "kv.v_bits": 0.2}.get(key, 1e-5)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=within)
            one = merge_attention(
                kv.attend(layer, q, AttentionParams(0.3), range(600, 603))
            )  # where sparse attention reads a part
            assert one.shape == ours.shape


def test_what_a_layout_cannot_hold_is_refused_by_the_key_that_asks_for_it() -> None:
    profile = load_profile("exact").replace(exactness="approx", kv={"v_bits": 4})
    plan = assemble.plan(make.model("llama", num_hidden_layers=4), profile)
    with pytest.raises(BadConfig, match=r"kv\.v_bits = 4 does not fit") as caught:
        replace(plan, shapes=UNEVEN).store()
    assert caught.value.code == "kv_bits"
    assert caught.value.try_[0].startswith("--set kv.v_bits=")


def test_room_is_counted_layer_by_layer() -> None:
    kv = load_profile("exact").kv
    found = CacheFootprint(
        kv, Kivi(), Memory(), FullAttention(), UNEVEN, [AttentionParams(1.0)] * len(UNEVEN), 2, "cpu"
    )
    assert [shape.slot_bytes(2) for shape in UNEVEN] == [2 * 3 * 20 + 4, 2 * 20 + 4, 0, 2 * 60 + 4]
    assert found.lower_slot(UNEVEN[0]) == UNEVEN[0].slot_bytes(2)
