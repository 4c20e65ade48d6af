"""Forms of stored slots: each against its published rule, and what all of them promise as tiers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcli.errors import BadConfig
from kvcli.kernels.attend.reference import attend as specified
from kvcli.kernels.merge import merge
from kvcli.kernels.native import native
from kvcli.kernels.rotate import Rotary, unrotate
from kvcli.kv.coded import Coded
from kvcli.kv.form import OfModel
from kvcli.kv.form_blocks import Blocks
from kvcli.kv.form_gear import Gear
from kvcli.kv.form_kivi import Kivi
from kvcli.kv.form_qaq import Qaq
from kvcli.kv.form_rotatekv import RotateKV
from kvcli.kv.form_rounding import by_slot, numbers, of_slots, rounded
from kvcli.kv.form_squat import Squat
from kvcli.kv.form_zipcache import ZipCache
from kvcli.kv.packed import Packed
from kvcli.kv.slots import LayerShape, Sight, Slots, alike, compact, nbytes, visible
from kvcli.kv.state import Given
from kvcli.settings.schema import Kv

K, G, D, L = 2, 2, 16, 2
N = 67
KV = Kv(k_bits=4, v_bits=2, group=8)
ROTARY = Rotary(0.5 ** torch.arange(D // 2))
FORMS: dict[str, Blocks] = {
    "kivi before": Kivi(rope="before"),
    "zipcache": ZipCache(),
    "separable": ZipCache(keys="separable"),
    "rotatekv": RotateKV(),
    "alone": RotateKV(joint=1, rope="after", massive=0),
    "qaq": Qaq(outliers=0.05),
    "gear": Gear(outliers=0.25),
    "squat": Squat(),
}


def made(n: int = N, seed: int = 0, dtype: torch.dtype = torch.float32) -> Slots:
    noise = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(K, n, D, generator=noise) for _ in "kv")
    k[..., 3] *= 9  # a channel that is large in every slot, as keys have them
    k[:, 5] *= 11  # and a slot of which all numbers are
    return Slots(k.to(dtype), v.to(dtype), torch.arange(n, dtype=torch.int32).expand(K, -1))


def of(dtype: torch.dtype = torch.float32, shapes: tuple[LayerShape, ...] = alike(L, K, D)) -> OfModel:
    return OfModel(shapes, dtype, [Sight(0.3)] * len(shapes), lambda: [ROTARY] * len(shapes))


def tier(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return FORMS[name].tier(of(dtype), torch.device("cpu"), KV)


def filled(name: str, dtype: torch.dtype = torch.float32) -> Any:
    kv, s = tier(name, dtype), made(dtype=dtype)
    for a, b in ((0, 1), (1, 30), (30, N)):
        for layer in range(L):
            kv.take(layer, Slots(s.k[:, a:b], s.v[:, a:b], s.pos[:, a:b]))
    return kv


def rows(n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[int]]:
    q = torch.randn(K * G, n, D, generator=torch.Generator().manual_seed(5)).to(dtype)
    return q, list(range(N, N + n))


def scattered(s: Slots, share: float) -> Tensor:
    """The same in all heads."""
    noise = torch.rand(s.pos.shape[1], generator=torch.Generator().manual_seed(3))
    return (noise < share) & (s.pos >= 0)


def same(a: Slots, b: Slots) -> bool:
    return torch.equal(a.pos, b.pos) and torch.equal(a.k, b.k) and torch.equal(a.v, b.v)


ALL = pytest.mark.parametrize("name", FORMS)


@ALL
@pytest.mark.parametrize("sight", [Sight(0.3), Sight(0.3, 2.0), Sight(0.3, 0.0, 13)], ids=str)
@pytest.mark.parametrize("share", [1.0, 0.8, 0.3])
@pytest.mark.parametrize("span", [16, 4096])
def test_rows_read_the_slots_that_are_shown(name: str, sight: Sight, share: float, span: int) -> None:
    kv = filled(name)
    kv._span = span
    kv.keep(1, scattered(kv.slots(1), share))
    s = kv.slots(1)
    q, pos = rows(5)
    want = specified(q, s.k, s.v, sight.scale, sight.softcap, visible(s.pos, pos, sight.window), s.n_slots)[0]
    torch.testing.assert_close(merge(kv.attend(1, q, sight, pos)).float(), want, atol=1e-5, rtol=1e-4)


@ALL
@pytest.mark.skipif(native() is None, reason="without native kernels rows know of each other")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_alone_has_the_bits_of_one_in_company(name: str, dtype: torch.dtype) -> None:
    kv = filled(name, dtype)
    assert not kv.rounds_by_rows
    q, pos = rows(7, dtype)
    together = kv.attend(1, q, Sight(0.3), pos)
    for i in range(7):
        for part, alone in zip(together, kv.attend(1, q[:, i : i + 1], Sight(0.3), pos[i : i + 1]), strict=True):
            assert torch.equal(part.out[:, i], alone.out[:, 0])
            assert torch.equal(part.lse[:, i], alone.lse[:, 0])


@ALL
def test_a_block_says_the_same_whichever_come_with_it(name: str) -> None:
    kv = filled(name)
    s = kv.slots(0)
    for index in (torch.tensor([[3, 66, -1]] * K), torch.tensor([[40, 9, 17]] * K), torch.arange(N).expand(K, -1)):
        found = kv.gather(0, index)
        held = index >= 0
        assert torch.equal(found.k[held], s.k.gather(1, index.clamp(min=0)[..., None].expand(-1, -1, D))[held])
        assert torch.equal(found.v[held], s.v.gather(1, index.clamp(min=0)[..., None].expand(-1, -1, D))[held])
        assert torch.equal(found.pos[held], s.pos.gather(1, index.clamp(min=0))[held])
    for head in range(K):
        assert torch.equal(kv.head(0, head, 21).k[0], s.k[head, :21])
    assert kv.final(0, torch.tensor([N, 30] * (K // 2))).tolist() == [N // 8 * 8, 24] * (K // 2)


@ALL
def test_taking_piece_by_piece_is_taking_at_once(name: str) -> None:
    at_once = tier(name)
    at_once.take(0, made())
    assert same(at_once.slots(0), filled(name).slots(0))


@ALL
def test_bytes_are_those_that_are_foretold(name: str) -> None:
    kv, s = tier(name), made(64)
    kv.take(0, s)
    kv.take(1, s)
    held = nbytes(kv)["packed"]
    codec = FORMS[name].codec(LayerShape(K, D, D), KV)
    assert held == L * (64 * 4 + K // codec.heads * sum(t.nbytes for t in codec.layout(8)))
    assert 0 <= L * 64 * FORMS[name].nbytes(LayerShape(K, D, D), KV, 4) - held < L * 64, "by whole bytes of a slot"


@ALL
def test_what_is_let_go_gives_its_bytes_back_and_what_stays_is_not_rounded_again(name: str) -> None:
    kv = filled(name)
    before = kv.slots(0)
    mask = (before.pos // 8 != 3) & (before.pos % 8 != 2)
    fell = kv.keep(0, mask)
    assert same(fell, compact(before, ~mask))
    assert same(compact(kv.slots(0), kv.positions(0) >= 0), compact(before, mask))
    kv.crop(0)
    assert nbytes(kv) == {"packed": 0}


@ALL
def test_half_of_a_block_waits_until_others_come(name: str) -> None:
    kv = filled(name)
    before = kv.slots(0)
    mask = (before.pos // 8 != 3) | (before.pos % 8 < 3)  # three of eight are left of one block
    kv.keep(0, mask)
    left = kv.slots(0)
    order = left.pos.argsort(dim=1, stable=True)[..., None].expand(-1, -1, D)
    assert torch.equal(left.k.gather(1, order), compact(before, mask).k)
    assert kv._bands[0][0].k.shape[1] == 3 + N % 8


@ALL
def test_heads_that_are_written_alone_may_differ(name: str) -> None:
    kv = filled(name)
    if FORMS[name].heads(K) > 1:
        return
    before = kv.slots(0)
    mask = torch.stack([before.pos[j] % (j + 1) == 0 for j in range(K)])
    kv.keep(0, mask)
    for head in range(K):
        assert sorted(p for p in kv.slots(0).pos[head].tolist() if p >= 0) == list(range(0, N, head + 1))
    kv.take(0, compact(Slots(before.k, before.v, before.pos + N), mask))
    q, _ = rows(3)
    s = kv.slots(0)
    want = specified(q, s.k, s.v, 0.3, 0.0, visible(s.pos, [200] * 3, None), s.n_slots)[0]
    torch.testing.assert_close(merge(kv.attend(0, q, Sight(0.3), [200] * 3)).float(), want, atol=1e-5, rtol=1e-4)


@ALL
def test_a_past_goes_on_from_its_state(name: str) -> None:
    kv, again = filled(name), tier(name)
    kv.keep(0, scattered(kv.slots(0), 0.7))
    again.restore(Given(copy.deepcopy(kv.state()), N))
    for layer in range(L):
        assert same(kv.slots(layer), again.slots(layer))
    assert nbytes(kv) == nbytes(again)


@ALL
def test_the_error_is_one_of_rounding(name: str) -> None:
    s, found = made(), filled(name).slots(0)
    assert float((found.v - s.v).norm() / s.v.norm()) < 0.4, "2 bits"
    assert float((found.k - s.k).norm() / s.k.norm()) < 0.1, "4 bits"


def test_keys_before_the_rotary_embedding_are_rounded_as_they_were_there() -> None:
    s, kv = made(64), tier("kivi before")
    kv.take(0, s)
    before = unrotate(s.k, s.pos, ROTARY).view(K, 8, 8, D)
    wanted = numbers(rounded(before, 4, -2), 4, torch.float32).view(K, 64, D)
    torch.testing.assert_close(unrotate(kv.slots(0).k, s.pos, ROTARY), wanted)


def test_kivi_read_back_says_what_it_says_where_it_lies() -> None:
    s, plain = made(64), Packed(alike(L, K, D), torch.float32, k_bits=4, v_bits=2, group=8)
    plain.take(0, s)
    coded = Coded(Kivi(), of(), "cpu", KV)
    coded.take(0, s)
    assert same(plain.slots(0), coded.slots(0))
    assert nbytes(plain) == nbytes(coded)


def test_values_are_rounded_by_slot() -> None:
    v = made().v
    torch.testing.assert_close(of_slots(by_slot(v, 8, 8), 8, torch.float32), v, atol=0.02, rtol=0)


def test_sizes_that_no_byte_holds_are_refused() -> None:
    with pytest.raises(BadConfig, match=r"kv.v_bits = 2 does not fit"):
        Kivi(rope="before").tier(of(shapes=alike(1, 2, 6)), torch.device("cpu"), KV)
