"""How rows reach host memory: three ways give one answer, and none touches what may still be under way."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcli.kernels.merge_attention import merge_attention
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.cache.tiered_cache import TieredCache
from kvcli.kv.offload import host_access
from kvcli.kv.offload import transfer as kv_bus
from kvcli.kv.offload.host_access import AutoAccess, CpuAttention, Rates, StreamedCopy, Way, ZeroCopyKernel
from kvcli.kv.offload.transfer import CudaLink, CudaQueue, DeviceLink
from kvcli.kv.slots import Attendable, AttentionParams, LayerShape, Slots, alike, hit_rate, nbytes
from kvcli.kv.sparse import sparse_tier
from kvcli.kv.sparse.pages import PageBudget
from kvcli.kv.sparse.sparse_tier import SparseTier
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.tiers.disk import ExtentTier
from kvcli.kv.tiers.host import HostTier, Mappings
from kvcli.methods.sparse.sketch import Sketch
from tests import make
from tests.fake_bus import FakeBus

L, K, H, D = 3, 2, 4, 8
WAYS: dict[str, Way] = {"query": CpuAttention, "kernel": ZeroCopyKernel, "stream": StreamedCopy, "rule": AutoAccess}
SIGHT = AttentionParams(0.3)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several extents of a few slots."""
    from kvcli.kv.tiers import host as pinned_host

    monkeypatch.setattr(pinned_host, "PIECE", 11 * 2 * K * D * 8)


def some(n: int, at: int = 0, layer: int = 0) -> Slots:
    g = torch.Generator().manual_seed(1000 * layer + at)
    k, v = torch.randn(2, K, n, D, generator=g, dtype=torch.float64).unbind(0)
    return Slots(k, v, torch.arange(at, at + n, dtype=torch.int32).expand(K, -1))


def asked(n: int = 3) -> Tensor:
    return torch.randn(H, n, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def host(bus: FakeBus, way: Way = CpuAttention) -> HostTier:
    return HostTier(ExtentTier(Mappings(alike(L, K, D), torch.float64, bus)), "cpu", way, lambda device: bus)


def filled(bus: FakeBus, way: Way, uneven: bool = False) -> tuple[HostTier, Dense]:
    far, one = host(bus, way), make.dense((L, K, D))
    for layer in range(L):
        for at, n in ((0, 25), (25, 4), (29, 17)):
            s = some(n, at, layer)
            if uneven:
                hidden = torch.stack([s.pos[j] % (j + 2) == 0 for j in range(K)])
                s = Slots(s.k, s.v, s.pos.masked_fill(hidden, -1))
            far.take(layer, s)
            one.take(layer, s)
    return far, one


def answer(kv: Attendable, layer: int, q: Tensor, params: AttentionParams = SIGHT) -> Tensor:
    parts = kv.attend(layer, q, params, range(46, 46 + q.shape[1]))
    return merge_attention([*parts, *parts])


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_every_way_reads_what_a_dense_tier_holds(name: str, uneven: bool) -> None:
    bus, q = FakeBus(), asked()
    far, one = filled(bus, WAYS[name], uneven)
    assert len(far._tier.pieces(1)) > 2
    want = [answer(one, layer, q, sight) for layer in range(L) for sight in (SIGHT, AttentionParams(0.3, 0.0, 9))]
    with bus:
        for _ in range(2):
            got = [
                answer(far, layer, q, sight) for layer in range(L) for sight in (SIGHT, AttentionParams(0.3, 0.0, 9))
            ]
            torch.testing.assert_close(got, want)
        far.evict_except(1, far.slots(1).pos % 3 != 1)
        far.crop(40)
    one.evict_except(1, one.slots(1).pos % 3 != 1)
    one.crop(40)
    want = [answer(one, layer, q) for layer in range(L)]
    with bus:
        torch.testing.assert_close([answer(far, layer, q) for layer in range(L)], want)


def test_pieces_fly_while_others_are_read() -> None:
    bus = FakeBus()
    far, _ = filled(bus, StreamedCopy)
    held = sum(t.nbytes for layer in range(L) for piece in far._tier.pieces(layer) for t in piece.tensors)
    with bus:
        for _ in range(2):
            before, bus.copied, bus.hidden = bus.hidden, 0, 0
            for layer in range(L):
                answer(far, layer, asked())
            assert bus.copied == held, "each piece once"
            assert bus.hidden >= before
        first = sum(t.nbytes for t in far._tier.pieces(0)[0].tensors)
        assert bus.hidden == held - first, "all but the first piece of a pass"
    assert all(buffer.room.nbytes == 1 << 20 for buffer in far._reach._buffers)  # type: ignore[attr-defined]


Breaks = Callable[[pytest.MonkeyPatch], None]


def _unwaited(lane: str) -> Breaks:
    """A way that does not wait in one lane."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        from tests import fake_bus

        right = fake_bus.Lane.wait

        def wait(self: fake_bus.Lane, mark: fake_bus.Mark) -> None:
            if self is not getattr(self.bus, lane):
                right(self, mark)

        patch.setattr(fake_bus.Lane, "wait", wait)

    return apply


@pytest.mark.parametrize("lane", ["work", "copies"])
def test_a_wait_that_is_missing_is_found(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bus, q = FakeBus(), asked()
    far, one = host(bus, StreamedCopy), make.dense((L, K, D))
    for kv in (far, one):
        kv.take(0, some(20 if lane == "work" else 46))
    _unwaited(lane)(monkeypatch)
    if lane == "copies":
        with bus, pytest.raises(AssertionError, match="it may still be read"):
            answer(far, 0, q)
    else:
        with bus:
            assert bool(answer(far, 0, q).isnan().any())
        assert not bool(answer(one, 0, q).isnan().any())


def test_what_flies_ahead_is_dropped_when_its_tier_changes() -> None:
    bus, q = FakeBus(), asked()
    far, one = filled(bus, StreamedCopy)
    with bus:
        for _ in range(2):
            answer(far, 0, q)
            answer(far, 1, q)
        answer(far, 0, q)  # the first piece of layer 1 flies
        assert bus.flights
        far.evict_except(1, far.slots(1).pos != 3)
        assert not bus.flights
        got = answer(far, 1, q)
    one.evict_except(1, one.slots(1).pos != 3)
    torch.testing.assert_close(got, answer(one, 1, q))


def test_the_cpu_attends_while_the_device_reads_its_own_levels() -> None:
    bus, told = FakeBus(), list[str]()

    class Told(Dense):
        def attend(self, *args):  # type: ignore[no-untyped-def]
            told.append("own")
            return super().attend(*args)

    class ToldMapped(ExtentTier):
        def attend(self, *args):  # type: ignore[no-untyped-def]
            told.append("host")
            return super().attend(*args)

    shapes = alike(L, K, D)
    far = HostTier(ToldMapped(Mappings(shapes, torch.float64, bus)), "cpu", CpuAttention, lambda device: bus)
    top = Told(shapes, torch.float64)
    ladder = TieredCache(
        top, [TierLevel(Told(shapes, torch.float64), 6), TierLevel(far, attend_async=far.attend_async)], holds=5
    )
    one = Dense(shapes, torch.float64)
    for layer in range(L):
        one.take(layer, some(46, 0, layer))
        ladder.take(layer, some(46, 0, layer))
    with bus:
        got = answer(ladder, 1, asked())
    assert told == ["own", "own", "host"], "what the host does comes when the device has been told all else"
    torch.testing.assert_close(got, answer(one, 1, asked()))


def test_prompts_are_streamed_and_answers_go_the_faster_way() -> None:
    bus = FakeBus()

    def way(rates: Rates | None, unserved: str = "", refuses: str = "", window: int | None = None) -> str:
        bus = FakeBus(refuses)
        rule = partial(AutoAccess, unserved=unserved, rates=None if rates is None else lambda: rates)
        far, _ = filled(bus, rule)
        return type(far._reach._way(0, AttentionParams(0.3, 0.0, window))).__name__  # type: ignore[attr-defined]

    slow_cpu, fast_cpu, far_cpu = Rates(2e9, 1e9, 0.0), Rates(1e9, 2e9, 0.0), Rates(1e9, 2e9, 1.0)
    assert [way(r) for r in (None, slow_cpu, fast_cpu, far_cpu)] == [
        "ZeroCopyKernel",
        "ZeroCopyKernel",
        "CpuAttention",
        "ZeroCopyKernel",
    ]
    assert way(None, window=3) == way(None, unserved="fp64") == way(None, refuses="no") == "CpuAttention"
    far, _ = filled(bus, AutoAccess)
    assert type(far._reach._way(0, AttentionParams(0.3, is_prompt=True))).__name__ == "StreamedCopy"  # type: ignore[attr-defined]


def test_what_cannot_be_pinned_is_said_and_read_by_the_cpu() -> None:
    bus = FakeBus("host memory cannot be pinned (operation not supported)")
    far, one = filled(bus, AutoAccess)
    torch.testing.assert_close(answer(far, 1, asked()), answer(one, 1, asked()))
    assert far.usage()[0].how == "the CPU reads it: host memory cannot be pinned (operation not supported)"


def test_mappings_are_pinned_while_they_live_and_no_larger_than_they_must() -> None:
    bus = FakeBus()
    far, _ = filled(bus, ZeroCopyKernel)
    held = sum(bus.pinned.values())
    assert nbytes(far)["host"] >= held >= 46 * L * 2 * K * D * 8
    far.evict_except(0, far.slots(0).pos < 11)
    gc.collect()
    assert sum(bus.pinned.values()) == held, "who is collected asks nothing of the device"
    bus.let_go()
    assert sum(bus.pinned.values()) < held
    del far
    gc.collect()
    bus.let_go()
    assert not bus.pinned


def test_a_card_is_waited_for_once_and_not_where_garbage_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("waited"))
    monkeypatch.setattr(kv_bus, "_runtime", lambda: SimpleNamespace(cudaHostUnregister=done.append))
    bus = CudaLink.__new__(CudaLink)  # without the streams of a card
    bus.device, bus._over = torch.device("cuda"), []
    for address in (3, 5):
        bus.unpin(address, object())
    assert done == []
    bus.release()
    bus.release()
    assert done == ["waited", 3, 5]


@pytest.mark.parametrize("name", WAYS)
def test_a_copy_has_mappings_of_its_own(name: str) -> None:
    bus, q = FakeBus(), asked()
    far, one = filled(bus, WAYS[name], uneven=True)
    new = deepcopy(far)
    far.crop(3)
    torch.testing.assert_close(answer(new, 1, q), answer(one, 1, q))
    assert nbytes(new)["host"] > 0


def test_layers_of_different_shapes_lie_in_one_tier() -> None:
    shapes = [LayerShape(2, 8, 8), LayerShape(1, 4, 6)]
    tier, one = ExtentTier(Mappings(shapes, torch.float64, FakeBus())), Dense(shapes, torch.float64)
    for layer, shape in enumerate(shapes):
        k = torch.randn(shape.n_kv_heads, 30, shape.k_dim, dtype=torch.float64)
        s = Slots(k, torch.randn(shape.n_kv_heads, 30, shape.v_dim, dtype=torch.float64), some(30).pos[: k.shape[0]])
        tier.take(layer, s)
        one.take(layer, s)
        q = torch.randn(2, 3, shape.k_dim, dtype=torch.float64)
        want, got = (merge_attention(kv.attend(layer, q, SIGHT, range(30, 33))) for kv in (one, tier))
        torch.testing.assert_close(got, want)


def test_parts_join_into_one() -> None:
    _, one = filled(FakeBus(), CpuAttention)
    half = [make.dense((L, K, D)) for _ in "ab"]
    for tier, (a, b) in zip(half, ((0, 20), (20, 46)), strict=True):
        s = one.slots(0)
        tier.take(0, Slots(s.k[:, a:b], s.v[:, a:b], s.pos[:, a:b]))
    q, rows = asked(), range(46, 49)
    part = host_access.joined([p for tier in half for p in tier.attend(0, q, SIGHT, rows)])
    (want,) = one.attend(0, q, SIGHT, rows)
    torch.testing.assert_close(part.out, want.out)
    torch.testing.assert_close(part.lse, want.lse)


def test_the_seam_has_a_lane_where_there_are_no_streams() -> None:
    from kvcli.kv.offload.transfer import bus_of

    bus: DeviceLink = bus_of(torch.device("cpu"))
    to, of = torch.zeros(3), torch.ones(3)
    bus.copies.wait(bus.work.record())
    bus.copies.copy(to, of)
    bus.copies.record().synchronize()
    assert torch.equal(to, of)
    assert bus.pin(of)


# ---- what sparse attention reads of host memory ----


def recalled(bus: FakeBus, far: HostTier | Dense) -> SparseTier:
    kv = SparseTier(far, Sketch(page=2), PageBudget(0.0, 8, 1, 2), range(L), source=far)
    for layer in range(L):
        kv.take(layer, some(46, 0, layer))
    return kv


def test_pages_fetched_ahead_change_no_answer_and_are_found() -> None:
    bus = FakeBus()
    near, plain = recalled(bus, host(bus)), recalled(bus, make.dense((L, K, D)))
    assert near._near is not None
    g = torch.Generator().manual_seed(2)
    q = asked()
    with bus:
        for at in range(12):
            q = q + 0.3 * torch.randn(q.shape, generator=g, dtype=torch.float64)
            for layer in range(L):
                torch.testing.assert_close(answer(near, layer, q), answer(plain, layer, q))
            if at == 6:
                near.evict_except(1, near.slots(1).pos != 5)
                plain.evict_except(1, plain.slots(1).pos != 5)
    use = next(use for use in near.usage() if use.asked)
    assert 0 < use.found < use.asked
    assert near._near.flown > 0
    assert hit_rate([near]) == use.found / use.asked


def test_a_read_ahead_finds_more_than_what_was_read_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def rate(share: float) -> float:
        monkeypatch.setattr(sparse_tier, "AHEAD", share)
        bus, g, q = FakeBus(), torch.Generator().manual_seed(2), asked(1)
        near = recalled(bus, host(bus))
        for _ in range(30):
            q = q + 0.3 * torch.randn(q.shape, generator=g, dtype=torch.float64)
            answer(near, 1, q)
        return hit_rate([near]) or 0.0

    assert rate(0.5) > rate(0.0) > 0.3


@pytest.mark.parametrize("side", ["side", None])
def test_memory_that_a_stream_of_its_own_copies_is_not_given_away_before(
    side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch hands out what is let go to whatever is computed next, and knows nothing of other streams."""

    class There:
        def __init__(self, is_cuda: bool) -> None:
            self.is_cuda, self.used = is_cuda, list[Any]()

        def copy_(self, of: object, non_blocking: bool) -> None:
            assert non_blocking

        def record_stream(self, stream: Any) -> None:
            self.used.append(stream)

    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "now")
    there, here = There(True), There(False)
    for to, of in ((there, here), (here, there)):
        CudaQueue(torch.device("cuda"), side).copy(to, of)  # type: ignore[arg-type]
    assert (there.used, here.used) == ([side] * 2 if side else [], [])
