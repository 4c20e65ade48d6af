"""Tiered caches: the attention of one tier over the same slots, demotion at compression points, the text of I2."""

from __future__ import annotations

import errno
import os
from copy import deepcopy
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kvcli.engine.drafting.drafter import Drafter
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import install_kernels
from kvcli.kernels.merge_attention import merge_attention
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.cache.tiered_cache import slots_to_demote
from kvcli.kv.out_of_memory import CacheFull
from kvcli.kv.slots import AttentionParams, KVCache, Slots, nbytes
from kvcli.kv.tiers import disk
from kvcli.kv.tiers import host as host_tier
from kvcli.kv.tiers.disk import ExtentTier
from kvcli.kv.tiers.host import HostTier
from kvcli.methods.drafts.off import Off
from tests import make
from tests.covering import pairs
from tests.exact.table import DRAFTERS, DTYPES, MODELS, NEW, SAMPLERS, STOP, prompt
from tests.fake_bus import FakeBus
from tests.policies import KeepAll, Ragged

K, G, D, L = 3, 2, 8, 2
H = K * G
Shape = tuple[int, int, int]
BIG = 1 << 30


LADDERS = ("two_dense", "rounding", "three", "on_disk")
EXACT = ("two_dense", "on_disk")  # those that round nothing
POLICIES = {"all": None, "keepall": KeepAll(), "ragged": Ragged()}


def fill(kv: KVCache, n: int, settle_at: int = 10) -> None:
    g = torch.Generator().manual_seed(0)
    for at in range(0, n, 5):
        for layer in range(L):
            k, v = (torch.randn(K, 5, D, generator=g, dtype=torch.float64) for _ in "kv")
            kv.append(layer, k.to(kv.dtype), v.to(kv.dtype), at)
        if (at + 5) % settle_at == 0:
            kv.compress()


def read(kv: KVCache, window: int | None = None, n: int = 40, layer: int = 1) -> Tensor:
    q = torch.randn(H, 3, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    parts = kv.attend(layer, q.to(kv.dtype), AttentionParams(0.3, 0.0, window), range(n, n + 3))
    return merge_attention([*parts, *parts])  # a part merged with itself is itself


def positions(kv: KVCache, layer: int = 1) -> list[list[int]]:
    return [sorted(pos[pos >= 0].tolist()) for pos in kv.slots(layer).pos]


def test_one_rung_is_the_bare_tier() -> None:
    one, ladder = make.dense((L, K, D)), make.tiered((L, K, D))
    fill(one, 40)
    fill(ladder, 40)
    assert torch.equal(read(ladder), read(one))
    assert ladder.usage() == one.usage()


def test_what_moves_down_is_the_oldest_beyond_sinks_and_residual_in_whole_groups() -> None:
    pos = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 3, 4, 6, 7, 9, -1, -1, -1, -1], [9, 2, 5, *[-1] * 7]])
    found = slots_to_demote(pos, sinks=2, holds=3, group=2)
    assert [row[hit].tolist() for row, hit in zip(pos, found, strict=True)] == [[2, 3, 4, 5], [3, 4], []]
    assert not slots_to_demote(pos, sinks=2, holds=3, group=7).any()


def test_the_kv_cache_changes_at_compression_points_only() -> None:
    kv = make.cache("two_dense", (L, K, D))
    fill(kv, 40, settle_at=1000)
    assert [u.slots for u in kv.usage() if u.layer == 0] == [40, 0]
    before = kv.changes
    kv.compress()
    assert [u.slots for u in kv.usage() if u.layer == 0] == [12, 28]  # 2 sinks, 7 newest, and 3 that fill no group
    assert kv.changes > before
    before = kv.changes
    kv.compress()
    assert kv.changes == before


def test_a_long_level_waits_until_moving_is_worth_it() -> None:
    kv = make.tiered((L, K, D), TierLevel(make.dense((L, K, D))), holds=64, group=2)
    held = []
    for at in range(0, 80, 2):
        for layer in range(L):
            kv.append(layer, *torch.randn(2, K, 2, D, dtype=torch.float64).unbind(0), at)
        kv.compress()
        held.append(kv.usage()[0].slots)
    assert held == [*range(2, 68, 2), *[64, 66] * 3, 64]


def test_rounding_reaches_what_went_down_and_nothing_else() -> None:
    one, ladder = make.dense((L, K, D)), make.cache("rounding", (L, K, D))
    fill(one, 40)
    fill(ladder, 40)
    want, got = one.slots(1), ladder.slots(1)
    order = got.pos[0].argsort()
    same = (got.k[0, order] == want.k[0]).all(-1)
    assert same.tolist() == [True] + [False] * 33 + [True] * 6
    torch.testing.assert_close(got.k[0, order], want.k[0], rtol=0.01, atol=0.01)


@pytest.mark.parametrize("name", LADDERS)
def test_a_past_moves_from_one_store_to_another(name: str) -> None:
    one, kv = make.dense((L, K, D)), make.cache(name, (L, K, D))
    fill(one, 40)
    for layer in range(L):
        kv.take(layer, one.slots(layer))
    assert positions(kv) == [list(range(40))] * K
    assert len([u for u in kv.usage() if u.layer == 1 and u.slots]) > 1
    torch.testing.assert_close(read(kv), read(one), rtol=0, atol=0.05)


@pytest.mark.parametrize("name", LADDERS)
def test_the_newest_slots_are_those_stored_last(name: str) -> None:
    kv = make.cache(name, (L, K, D))
    fill(kv, 40)
    for n in range(1, 41):  # of the top alone, and so many that its first tokens or lower levels would be among them
        assert positions_of(kv.newest(1, n)) == [list(range(40 - n, 40))] * K


def positions_of(s: Slots) -> list[list[int]]:
    return [sorted(row[row >= 0].tolist()) for row in s.pos]


@pytest.mark.parametrize("below", [True, False])
def test_the_last_level_says_when_it_is_full_and_keeps_what_it_has(below: bool) -> None:
    shape = (L, K, D)
    rungs = [TierLevel(make.dense(shape), 14)] if below else []
    kv = make.tiered(shape, *rungs, holds=10 if below else 22, group=2 if below else 1)
    with pytest.raises(CacheFull, match="outgrown"):
        fill(kv, 40)
    kv.crop(20)
    for layer in range(L):
        assert positions(kv, layer) == [list(range(20))] * K
    kv.reserve(20)
    with pytest.raises(CacheFull, match="30 tokens") as caught:
        kv.reserve(30)
    assert caught.value.most == (24 if below else 22)


def test_a_host_tier_answers_rows_of_its_device_and_counts_as_host() -> None:
    one, host = make.dense((L, K, D)), HostTier(make.dense((L, K, D)), "cpu")
    for layer in range(L):
        host.append(layer, *(t := torch.randn(2, K, 9, D, dtype=torch.float64)).unbind(0), 0)
        one.append(layer, *t.unbind(0), 0)
    q = torch.randn(H, 3, D, dtype=torch.float64)
    (want,), (got,) = (kv.attend(1, q, AttentionParams(0.3), range(9, 12)) for kv in (one, host))
    assert torch.equal(got.out, want.out)
    assert nbytes(host) == {"host": nbytes(one)["cpu"]}
    assert positions_of(host.newest(1, 4)) == [[5, 6, 7, 8]] * K


def test_slots_of_a_device_go_down_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through one buffer, which is read before the next piece is copied into it."""
    monkeypatch.setattr(host_tier, "STAGED", 32)
    t, bus = torch.randn(3, 7), FakeBus()
    far = SimpleNamespace(device=SimpleNamespace(type="cuda"), contiguous=lambda: t, nbytes=t.nbytes)
    far.dtype, far.shape = t.dtype, t.shape
    tier = HostTier(make.dense((L, K, D)), "cpu", bus=lambda _: bus)
    with bus:
        assert torch.equal(tier._down(far), t)
    assert tier.staging.room.nbytes <= 4096


# the disk tier


def a_disk(most: int = BIG, writes: int = BIG) -> ExtentTier:
    return make.disk((L, K, D), most=most, writes=writes)


def some(n: int, at: int = 0) -> Slots:
    k, v = torch.randn(2, K, n, D, dtype=torch.float64).unbind(0)
    return Slots(k, v, torch.arange(at, at + n).expand(K, -1))


def test_the_file_is_private_and_has_no_name() -> None:
    kv = a_disk()
    kv.take(0, some(300))
    facts = os.fstat(kv._place._file.fileno())
    assert facts.st_mode & 0o777 == 0o600
    assert facts.st_nlink == 0
    assert facts.st_size == sum(u.nbytes for u in kv.usage() if u.tier == "disk")


def test_slots_come_back_from_the_disk_as_they_went() -> None:
    kv, one = a_disk(), make.dense((L, K, D))
    for at, n in ((0, 1), (1, 299), (300, 5000)):
        s = some(n, at)
        kv.take(1, s)
        one.take(1, s)
    got, want = kv.slots(1), one.slots(1)
    assert torch.equal(got.k, want.k)
    assert torch.equal(got.v, want.v)
    assert torch.equal(got.pos, want.pos.to(torch.int32))
    torch.testing.assert_close(read(kv, n=5300), read(one, n=5300))
    torch.testing.assert_close(read(kv, 37, n=5300), read(one, 37, n=5300))


def test_slots_that_go_to_the_disk_together_are_read_together_but_by_a_device_apart() -> None:
    kv, apart = a_disk(), make.disk((L, K, D), longest=4096)
    for one in (kv, apart):
        one.take(0, some(9000))
    assert [e.length for e in kv._layers[0]] == [9000]
    assert [e.length for e in apart._layers[0]] == [4096, 4096, 808]
    assert [e.length for e in deepcopy(apart)._layers[0]] == [4096, 4096, 808]


def test_room_on_the_disk_is_used_again() -> None:
    kv = a_disk()
    for _ in range(5):
        kv.take(0, some(700))
        kv.evict_except(0, kv.slots(0).pos < 0)
        assert kv.n_slots(0) == 0
    once = a_disk()
    once.take(0, some(700))
    assert os.fstat(kv._place._file.fileno()).st_size == os.fstat(once._place._file.fileno()).st_size


@pytest.mark.parametrize("most", ["bytes", "writes"])
def test_budgets_of_the_disk_are_kept(most: str) -> None:
    per_slot = 2 * K * D * 8
    kv = a_disk(most=1 << 20) if most == "bytes" else a_disk(writes=1000 * per_slot)

    def use() -> None:
        for at in range(0, 100_000, 100):
            kv.take(0, some(100, at))

    with pytest.raises(CacheFull, match="disk is full" if most == "bytes" else "disk_writes"):
        use()
    assert kv._place._written <= 1000 * per_slot or most == "bytes"
    assert sum(u.nbytes for u in kv.usage() if u.tier == "disk") <= 1 << 20
    held = positions(kv, 0)
    assert held == [list(range(len(held[0])))] * K


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_full_disk_is_an_error_and_loses_nothing(monkeypatch: pytest.MonkeyPatch, call: str, at: int) -> None:
    if not hasattr(os, call):
        pytest.skip(f"no os.{call} here")
    kv = a_disk()
    kv.take(0, some(200))
    want, calls, real = read(kv, layer=0), iter(range(10**6)), getattr(os, call)

    def full(*args: object) -> object:
        if next(calls) == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(disk.os, call, full)

    def use() -> None:
        for i in range(4):
            kv.take(0, some(300 << i, 10_000))
            kv.evict_except(0, kv.slots(0).pos < 200)

    with pytest.raises(CacheFull, match="the disk is full"):
        use()
    monkeypatch.undo()
    kv.crop(200)
    torch.testing.assert_close(read(kv, layer=0), want)
    kv.take(0, some(300, 200))
    assert positions(kv, 0) == [list(range(500))] * K


def test_memory_is_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk._file_system(Path("/")) not in disk.IN_MEMORY
    monkeypatch.setattr(disk, "_file_system", lambda _: "tmpfs")
    with pytest.raises(CacheFull, match="a folder on a disk"):
        a_disk()


# the text of plain decoding, whatever drafts


@cache
def lm(model: str, dtype: str) -> LM:
    found = make.model(MODELS[model], DTYPES[dtype])
    if dtype != "fp64":  # a last digit may become another code
        install_kernels(found)
    return found


def decode(name: str, model: str, policy: str, sampler: str, dtype: str, drafter: Drafter) -> list[int]:
    found = lm(model, dtype)
    kv = make.cache(name, found)
    session = make.session(found, kv, drafter, SAMPLERS[sampler], policy=POLICIES[policy], every=8, chunk=13)
    run_to_end(session.read(prompt()))
    for _ in iterate_events(session.stream(NEW, stop={STOP})):
        assert session.committed == len(session.ids) - 1
    return session.ids


@cache
def plain(name: str, model: str, policy: str, sampler: str, dtype: str) -> list[int]:
    return decode(name, model, policy, sampler, dtype, Off())


@pytest.mark.parametrize(
    ("name", "policy", "drafter", "sampler", "dtype"),
    pairs(product((*LADDERS, *make.PACKED), POLICIES, DRAFTERS, SAMPLERS, DTYPES)),
)
def test_any_drafter_gives_the_text_of_plain_decoding(
    name: str, policy: str, drafter: str, sampler: str, dtype: str
) -> None:
    want = plain(name, "dense", policy, sampler, dtype)
    assert decode(name, "dense", policy, sampler, dtype, DRAFTERS[drafter](want)) == want


@pytest.mark.parametrize(
    ("name", "model", "drafter"), pairs(product(LADDERS, ("sliding", "sinks"), ("ngram", "fafo", "right")))
)
def test_sliding_layers_and_sinks_too(name: str, model: str, drafter: str) -> None:
    want = plain(name, model, "ragged", "sampled", "fp64")
    assert decode(name, model, "ragged", "sampled", "fp64", DRAFTERS[drafter](want)) == want


@pytest.mark.parametrize("model", ["dense", "sliding", "sinks"])
@pytest.mark.parametrize("name", EXACT)
def test_levels_that_round_nothing_give_the_text_of_one_tier(name: str, model: str) -> None:
    found = lm(model, "fp64")
    session = make.session(found, sampler=SAMPLERS["sampled"], chunk=13)  # fmt: skip
    run_to_end(session.read(prompt()))
    list(iterate_events(session.stream(NEW, stop={STOP})))
    assert plain(name, model, "all", "sampled", "fp64") == session.ids


def test_some_level_below_is_used_and_rounding_shows() -> None:
    """Or the table above would compare one tier with itself."""
    texts = {name: plain(name, "dense", "all", "greedy", "fp32") for name in LADDERS}
    assert texts["two_dense"] == texts["on_disk"]
    assert texts["rounding"] != texts["two_dense"] or texts["three"] != texts["two_dense"]
