"""Forms of stored slots: each against its published rule, and what all of them promise as tiers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcli import assemble
from kvcli.engine.engine import run_to_end
from kvcli.errors import BadConfig, BadModel
from kvcli.kernels.attend.reference import attend as specified
from kvcli.kernels.merge_attention import merge_attention
from kvcli.kernels.native import native
from kvcli.kernels.quantize_kv import hadamard
from kvcli.kernels.rope import Rotary, unrotate
from kvcli.kv.formats.block_format import BlockFormat
from kvcli.kv.formats.format import FormatContext, by_slot, dequantize, of_slots, quantize
from kvcli.kv.formats.kivi import Kivi
from kvcli.kv.slots import AttentionParams, LayerShape, Slots, alike, compact, nbytes, visible
from kvcli.kv.snapshot import SnapshotReader
from kvcli.kv.tiers import block_tier
from kvcli.methods.formats.cskv import Cskv
from kvcli.methods.formats.freqkv import FreqKV
from kvcli.methods.formats.gear import Gear
from kvcli.methods.formats.mustafar import Mustafar
from kvcli.methods.formats.qaq import Qaq
from kvcli.methods.formats.rotatekv import RotateKV
from kvcli.methods.formats.squat import Squat
from kvcli.methods.formats.subgen import SubGen
from kvcli.methods.formats.turboquant import TurboQuant, normal_levels
from kvcli.methods.formats.zipcache import ZipCache, joined, separated
from kvcli.settings.profile import Profile
from kvcli.settings.schema import Kv, registries
from tests import families, make
from tests.exact import table

K, G, D, L = 2, 2, 16, 2
N = 67
FOUR = {"k_bits": 4, "v_bits": 4}
KV = Kv(k_bits=4, v_bits=2, group=8)
ROTARY = Rotary(0.5 ** torch.arange(D // 2))
FORMS: dict[str, BlockFormat] = {
    "kivi before": Kivi(rope="before"),
    "zipcache": ZipCache(),
    "separable": ZipCache(keys="separable"),
    "rotatekv": RotateKV(),
    "alone": RotateKV(joint=1, rope="after", massive=0),
    "qaq": Qaq(outliers=0.05),
    "gear": Gear(outliers=0.25),
    "squat": Squat(),
    "turboquant": TurboQuant(),
}
FEWER: dict[str, BlockFormat] = {  # numbers, of 16 bits
    "mustafar": Mustafar(k_sparsity=0.25, v_sparsity=0.75),
    "freqkv": FreqKV(retained=0.75),
    "subgen": SubGen(centers=3, samples=4),
    "cskv": Cskv(k_rank=3, v_rank=2),
    "cskv of keys": Cskv(k_rank=3, v_rank=0),
    "cskv alone": Cskv(rope="after", k_rank=2, v_rank=1, joint=1),
}
ROUNDED = tuple(FORMS)
FORMS |= FEWER


def made(n: int = N, seed: int = 0, dtype: torch.dtype = torch.float32) -> Slots:
    noise = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(K, n, D, generator=noise) for _ in "kv")
    k[..., 3] *= 9  # a channel that is large in every slot, as keys have them
    k[:, 5] *= 11  # and a slot of which all numbers are
    return Slots(k.to(dtype), v.to(dtype), torch.arange(n, dtype=torch.int32).expand(K, -1))


def of(dtype: torch.dtype = torch.float32, shapes: tuple[LayerShape, ...] = alike(L, K, D)) -> FormatContext:
    return FormatContext(shapes, dtype, [AttentionParams(0.3)] * len(shapes), lambda: [ROTARY] * len(shapes))


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


@pytest.mark.parametrize("name", [*FORMS, "kivi"])
def test_heads_are_quantized_together_as_each_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMS, "kivi", Kivi())
    together = filled(name)
    monkeypatch.setattr(block_tier, "AT_ONCE", 0)
    alone = filled(name)
    assert all(same(together.slots(layer), alone.slots(layer)) for layer in range(L))


@ALL
@pytest.mark.parametrize(
    "params", [AttentionParams(0.3), AttentionParams(0.3, 2.0), AttentionParams(0.3, 0.0, 13)], ids=str
)
@pytest.mark.parametrize("share", [1.0, 0.8, 0.3])
@pytest.mark.parametrize("span", [16, 4096])
def test_rows_read_the_slots_that_are_shown(name: str, params: AttentionParams, share: float, span: int) -> None:
    kv = filled(name)
    kv._span = span
    kv.evict_except(1, scattered(kv.slots(1), share))
    s = kv.slots(1)
    q, pos = rows(5)
    want = specified(q, s.k, s.v, params.scale, params.softcap, visible(s.pos, pos, params.window), s.n_slots)[0]
    torch.testing.assert_close(merge_attention(kv.attend(1, q, params, pos)).float(), want, atol=1e-5, rtol=1e-4)


@ALL
@pytest.mark.skipif(native() is None, reason="without native kernels rows know of each other")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_alone_has_the_bits_of_one_in_a_batch(name: str, dtype: torch.dtype) -> None:
    kv = filled(name, dtype)
    assert not kv.batch_variant_reason
    q, pos = rows(7, dtype)
    together = kv.attend(1, q, AttentionParams(0.3), pos)
    for i in range(7):
        for part, alone in zip(
            together, kv.attend(1, q[:, i : i + 1], AttentionParams(0.3), pos[i : i + 1]), strict=True
        ):
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
    assert kv.n_stable(0, torch.tensor([N, 30] * (K // 2))).tolist() == [N // 8 * 8, 24] * (K // 2)


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
    form = FORMS[name]
    codec = form.codec(KV, LayerShape(K, D, D))
    shared = (L - 1) * 64 * 4  # positions that all layers share, and that are planned for each
    assert held + shared == L * (64 * 4 + K // codec.heads * sum(t.nbytes for t in codec.layout(8)))
    planned = L * 64 * FORMS[name].nbytes(LayerShape(K, D, D), KV, 4)
    assert 0 <= planned - held - shared < L * 64, "by whole bytes of a slot"


@ALL
def test_what_is_let_go_gives_its_bytes_back_and_what_stays_is_not_rounded_again(name: str) -> None:
    kv = filled(name)
    before = kv.slots(0)
    mask = (before.pos // 8 != 3) & (before.pos % 8 != 2)
    fell = kv.evict_except(0, mask)
    assert same(fell, compact(before, ~mask))
    assert same(compact(kv.slots(0), kv.positions(0) >= 0), compact(before, mask))
    kv.crop(0)
    assert nbytes(kv) == {"packed": 0}


@ALL
def test_half_of_a_block_waits_until_others_come(name: str) -> None:
    kv = filled(name)
    before = kv.slots(0)
    mask = (before.pos // 8 != 3) | (before.pos % 8 < 3)  # three of eight are left of one block
    kv.evict_except(0, mask)
    left = kv.slots(0)
    order = left.pos.argsort(dim=1, stable=True)[..., None].expand(-1, -1, D)
    assert torch.equal(left.k.gather(1, order), compact(before, mask).k)
    assert kv._layers[0][0].waits[0].shape[1] == 3 + N % 8


@ALL
def test_heads_that_are_written_alone_may_differ(name: str) -> None:
    kv = filled(name)
    if FORMS[name].heads(K) > 1:
        return
    before = kv.slots(0)
    mask = torch.stack([before.pos[j] % (j + 1) == 0 for j in range(K)])
    kv.evict_except(0, mask)
    for head in range(K):
        assert sorted(p for p in kv.slots(0).pos[head].tolist() if p >= 0) == list(range(0, N, head + 1))
    kv.take(0, compact(Slots(before.k, before.v, before.pos + N), mask))
    q, _ = rows(3)
    s = kv.slots(0)
    want = specified(q, s.k, s.v, 0.3, 0.0, visible(s.pos, [200] * 3, None), s.n_slots)[0]
    torch.testing.assert_close(
        merge_attention(kv.attend(0, q, AttentionParams(0.3), [200] * 3)).float(), want, atol=1e-5, rtol=1e-4
    )


@ALL
def test_a_kv_cache_goes_on_from_its_state(name: str) -> None:
    kv, again = filled(name), tier(name)
    kv.evict_except(0, scattered(kv.slots(0), 0.7))
    again.restore(SnapshotReader(copy.deepcopy(kv.snapshot()), N))
    for layer in range(L):
        assert same(kv.slots(layer), again.slots(layer))
    assert nbytes(kv) == nbytes(again)


@pytest.mark.parametrize("name", ROUNDED)
def test_the_error_is_one_of_rounding(name: str) -> None:
    s, found = made(), filled(name).slots(0)
    assert float((found.v - s.v).norm() / s.v.norm()) < 0.4, "2 bits"
    assert float((found.k - s.k).norm() / s.k.norm()) < 0.1, "4 bits"


def test_keys_before_the_rotary_embedding_are_rounded_as_they_were_there() -> None:
    s, kv = made(64), tier("kivi before")
    kv.take(0, s)
    before = unrotate(s.k, s.pos, ROTARY).view(K, 8, 8, D)
    wanted = dequantize(quantize(before, 4, -2), 4, torch.float32).view(K, 64, D)
    torch.testing.assert_close(unrotate(kv.slots(0).k, s.pos, ROTARY), wanted)


def test_kivi_read_back_says_what_it_says_where_it_lies() -> None:
    s, plain = made(64), make.quantized((L, K, D), (4, 2), torch.float32, group=8)
    plain.take(0, s)
    coded = BlockFormat.tier(Kivi(), of(), torch.device("cpu"), KV)
    coded.take(0, s)
    assert same(plain.slots(0), coded.slots(0))
    assert nbytes(plain) == nbytes(coded)


def test_values_are_rounded_by_slot() -> None:
    v = made().v
    torch.testing.assert_close(of_slots(by_slot(v, 8, 8), 8, torch.float32), v, atol=0.02, rtol=0)


def test_zipcache_divides_by_the_root_of_a_channels_largest_number_and_rounds_each_slot() -> None:
    x = torch.tensor([[4.0, 0.0, -1.0], [-16.0, 0.25, 0.5]])  # two slots of three channels
    codes, scale, zero, c = separated(x, 8)
    assert c.tolist() == [[4.0, 0.5, 1.0]]  # sqrt(16), sqrt(1/4), sqrt(1)
    assert zero.tolist() == [[-1.0], [-4.0]], "the least of 1, 0, -1 and of -4, 1/2, 1/2"
    torch.testing.assert_close(scale.float(), torch.tensor([[2 / 255], [4.5 / 255]]), atol=0, rtol=1e-3)
    assert codes.tolist() == [[255, 128, 0], [0, 255, 255]] or codes.tolist() == [[255, 127, 0], [0, 255, 255]]
    torch.testing.assert_close(joined((codes, scale, zero, c), 8, torch.float32), x, atol=0.04, rtol=0)


def test_zipcache_beats_one_range_a_slot_where_a_channel_is_large() -> None:
    v = made().v * torch.tensor([1.0] * 15 + [30.0])
    plain = of_slots(by_slot(v, 4, D), 4, torch.float32)
    divided = joined(separated(v, 4), 4, torch.float32)
    assert (divided - v)[..., :15].norm() < 0.5 * (plain - v)[..., :15].norm()


def test_rotatekv_turns_heads_as_one_and_orders_channels_by_their_means() -> None:
    form, kv = RotateKV(joint=2, massive=0), Kv(k_bits=4, v_bits=4, group=8)
    k, v = (torch.randn(1, 2, 8, D, generator=torch.Generator().manual_seed(i)) + 1 for i in range(2))
    codes, scale, zero, *_, order, _, _, _ = form.quantize(k, v, kv)
    wide = k[0].transpose(0, 1).reshape(8, 2 * D) @ hadamard(2 * D, k)  # the matrix itself
    means = wide.mean(0)
    assert order[0, 0].tolist() == means.argsort().tolist()
    assert means[order[0, 0].long()].diff().min() >= 0
    want = of_slots(by_slot(wide[:, order[0, 0].long()], 4, 8), 4, torch.float32)
    torch.testing.assert_close(of_slots((codes, scale, zero), 4, torch.float32)[0], want, atol=1e-3, rtol=1e-2)
    found = form.dequantize(form.quantize(k, v, kv), kv, (D, D), torch.float32)
    assert (found[0] - k).norm() < 0.1 * k.norm()


def test_rotatekv_keeps_the_slots_of_massive_keys_wherever_they_stand() -> None:
    s, kv = made(64), tier("rotatekv")
    kv.take(0, s)
    found, other = kv.slots(0), FORMS["rotatekv"].heads(K)
    assert other == 2, "both heads are turned together"
    lost = (found.v - s.v).norm(dim=2)
    massive = unrotate(s.k, s.pos, ROTARY).view(K, 8, 8, D).square().sum((0, 3)).argmax(1) + 8 * torch.arange(8)
    assert 5 in massive.tolist(), "which is not one of the first four"
    torch.testing.assert_close(found.v[:, massive], s.v[:, massive], atol=0.01, rtol=1e-3)
    assert lost.median() > 10 * lost[:, massive].max()


@pytest.mark.parametrize(("n", "most", "want"), [(8, 4, 4), (3, 4, 1), (6, 4, 2), (8, 3, 2), (5, 1, 1), (1, 9, 1)])
def test_so_many_heads_are_turned_together(n: int, most: int, want: int) -> None:
    assert RotateKV(joint=most).heads(n) == want


def test_turboquant_has_the_levels_and_the_error_of_its_paper() -> None:
    assert normal_levels(1) == pytest.approx([-((2 / math.pi) ** 0.5), (2 / math.pi) ** 0.5])
    assert normal_levels(2) == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=1e-3)
    noise = torch.rand(1, 2, 64, 128, generator=torch.Generator().manual_seed(0)) - 0.3  # not normal at all
    for bits, error in ((2, 0.1175), (4, 0.009497), (8, 5e-5)):  # mean square errors for normal noise (Max, 1960)
        kv = Kv(k_bits=bits, v_bits=bits)
        for found in TurboQuant().dequantize(TurboQuant().quantize(noise, noise, kv), kv, (128, 128), torch.float32):
            lost = (found - noise).square().sum(-1) / noise.square().sum(-1)
            assert float(lost.mean()) == pytest.approx(error, rel=0.05 if bits < 8 else 1)


def test_qaq_keeps_outliers_apart() -> None:
    form, kv = Qaq(outliers=0.05), Kv(k_bits=2, v_bits=2, group=8)
    k, v = made(8).k[None, :1], made(8).v[None, :1]
    found = form.dequantize(form.quantize(k, v, kv), kv, (D, D), torch.float32)
    for was, now in ((k, found[0]), (v, found[1])):
        order = was.flatten().argsort()
        n = round(0.05 * 8 * D / 2)
        at = torch.cat([order[:n], order[-n:]])
        torch.testing.assert_close(now.flatten()[at], was.flatten()[at], atol=0, rtol=1e-3)
        inner = was.flatten()[order[n:-n]]
        assert now.flatten()[order[n:-n]].abs().max() <= inner.abs().max() * 1.01, "the range is of the others"
    v = v.flatten().index_fill(0, torch.tensor([7, 50, 99]), 40.0).view_as(v)
    lost = [
        (f.dequantize(f.quantize(k, v, kv), kv, (D, D), torch.float32)[1] - v).norm()
        for f in (form, Kivi(rope="before"))
    ]
    assert lost[0] < 0.7 * lost[1]


def test_gear_repairs_with_the_best_product_of_its_rank() -> None:
    kv = Kv(k_bits=2, v_bits=2, group=8)
    k, v = made(8).k[None, :1], made(8).v[None, :1]
    plain, few = Gear(outliers=0, rank=0), Gear(outliers=0, rank=3)
    lost = [
        t - p
        for t, p in zip((k, v), plain.dequantize(plain.quantize(k, v, kv), kv, (D, D), torch.float32), strict=True)
    ]
    found = few.dequantize(few.quantize(k, v, kv), kv, (D, D), torch.float32)
    for was, now, error in zip((k, v), found, lost, strict=True):
        rest = torch.linalg.svdvals(error)[..., 3:].square().sum().sqrt()  # what a rank of three cannot say
        torch.testing.assert_close((was - now).norm(), rest, atol=1e-2, rtol=1e-2)
    all_of_it = Gear(outliers=0, rank=8)
    torch.testing.assert_close(
        all_of_it.dequantize(all_of_it.quantize(k, v, kv), kv, (D, D), torch.float32)[0], k, atol=0.02, rtol=0.01
    )


def test_gear_takes_outliers_of_each_channel_of_keys_and_of_each_slot_of_values() -> None:
    kv, form = Kv(k_bits=2, v_bits=2, group=8), Gear(outliers=0.25, rank=0)
    k, v = made(8).k[None, :1], made(8).v[None, :1]
    found = form.dequantize(form.quantize(k, v, kv), kv, (D, D), torch.float32)
    for was, now, dim in ((k, found[0], 2), (v, found[1], 3)):
        n = round(0.25 * was.shape[dim] / 2)
        for at in (was.topk(n, dim).indices, was.topk(n, dim, largest=False).indices):
            torch.testing.assert_close(now.gather(dim, at), was.gather(dim, at), atol=0, rtol=1e-3)


@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-3])
@pytest.mark.parametrize(
    "form", [Squat(), Squat(rank=64, weight=1000.0), Gear(), Cskv(joint=1, k_rank=16, v_rank=16)], ids=str
)
def test_keys_of_fewer_directions_than_a_form_asks_for_lose_no_more(form: BlockFormat, noise: float) -> None:
    """As those of one token again and again do before the rotary embedding; or none at all."""
    of = torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, 1, 64, generator=of) + noise * torch.randn(1, 1, 64, 64, generator=of)
    for x in (k, torch.zeros_like(k)):
        kv = Kv(k_bits=4, v_bits=4, group=64)
        got, _ = form.dequantize(form.quantize(x, x, kv), kv, (64, 64), x.dtype)
        assert (got - x).norm() <= 0.01 * x.norm()


def test_squat_moves_the_error_out_of_the_keys_directions() -> None:
    kv = Kv(k_bits=2, v_bits=2, group=64)
    mixed = torch.randn(D, D, generator=torch.Generator().manual_seed(1))
    k = (
        torch.randn(1, 1, 64, 2, generator=torch.Generator().manual_seed(0)) @ mixed[:2] * 3
    )  # two directions, and noise
    k = k + 0.1 * torch.randn(1, 1, 64, D, generator=torch.Generator().manual_seed(2))
    way = torch.linalg.svd(k, full_matrices=False)[2][..., :2, :]

    def along(form: BlockFormat) -> Tensor:
        return ((form.dequantize(form.quantize(k, k, kv), kv, (D, D), torch.float32)[0] - k) @ way.mT).norm()

    assert along(Squat(rank=2, weight=100.0)) < 0.4 * along(Kivi(rope="before"))
    weak = Squat(rank=2, weight=1e-6)
    same_codes = weak.quantize(k, k, kv)[0] == quantize(k, 2, -2)[0]
    assert same_codes.all(), "without weight it is plain rounding"


def held(form: BlockFormat, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One block k, v [h, g, D], written and read back."""
    kv = Kv(group=k.shape[1])
    found = form.dequantize(form.quantize(k[None], v[None], kv), kv, (k.shape[2], v.shape[2]), torch.float32)
    return found[0][0], found[1][0]


def test_mustafar_keeps_the_largest_numbers_of_each_slot() -> None:
    x = torch.tensor([[[1.0, -4.0, 3.0, 2.0], [0.5, 0.25, -0.125, 8.0]]])
    k, v = held(Mustafar(k_sparsity=0.5, v_sparsity=0.75), x, x)
    assert k.tolist() == [[[0, -4, 3, 0], [0.5, 0, 0, 8]]]
    assert v.tolist() == [[[0, -4, 0, 0], [0, 0, 0, 8]]]
    bits, found, *_ = Mustafar(k_sparsity=0.5, v_sparsity=0.75).quantize(x[None], x[None], Kv(group=2))
    assert bits.flatten().tolist() == [0b0110, 0b1001], "the first number in the lowest bit"
    assert found.tolist() == [[[[-4, 3], [0.5, 8]]]]


def test_mustafar_takes_the_bytes_of_what_is_left_and_a_bit_for_each_number() -> None:
    kv, shape = Kv(group=64), LayerShape(1, 128, 128)
    assert Mustafar(k_sparsity=0.5, v_sparsity=0.5).nbytes(shape, kv, 2) == 2 * (64 * 2 + 128 // 8) + 4
    few = Mustafar(k_sparsity=0.7, v_sparsity=0.7).nbytes(shape, kv, 2)
    assert few == 2 * (38 * 2 + 16) + 4, "0.37 of 16 bits; tiles of the paper's kernel come to 0.45"


def test_freqkv_keeps_low_waves_whole_and_loses_high_ones() -> None:
    g = 8
    f, s = torch.arange(g, dtype=torch.float64)[:, None], torch.arange(g, dtype=torch.float64)
    waves = torch.cos(torch.pi * f * (2 * s + 1) / (2 * g)).float()  # a wave a row, as DCT-II defines them
    k, v = held(FreqKV(retained=0.5), waves.T[None], 3 * waves.T[None])
    for found, wave in ((k, waves), (v, 3 * waves)):
        torch.testing.assert_close(found[0, :, : g // 2], wave.T[:, : g // 2], atol=4e-3, rtol=0)
        assert found[0, :, g // 2 :].abs().max() < 4e-3
    mixed = torch.randn(1, g, D, generator=torch.Generator().manual_seed(7))
    every = held(FreqKV(retained=1.0), mixed, mixed)[0]
    torch.testing.assert_close(every, mixed, atol=4e-3, rtol=0)
    twice = held(FreqKV(retained=0.5), *held(FreqKV(retained=0.5), mixed, mixed))[0]
    torch.testing.assert_close(twice, held(FreqKV(retained=0.5), mixed, mixed)[0], atol=4e-3, rtol=0)


def test_subgen_reads_what_its_sketch_says_by_the_papers_formula() -> None:
    """Softmax's sum from each cluster's center and size; the sum of values from those drawn, by squared length."""
    s, form, kv = made(8), SubGen(centers=3, samples=4), Kv(group=8)
    tier = BlockFormat.tier(form, of(), torch.device("cpu"), kv)
    tier.take(0, s)
    (centers, own, _, drawn), (q, pos) = form.quantize(s.k[:, None], s.v[:, None], kv), rows(3)
    part = merge_attention(tier.attend(0, q, AttentionParams(0.3), pos))
    for head in range(K * G):
        j = head // G
        scores = (q[head] @ centers[j, 0].float().mT * 0.3).exp()  # [N, 3]
        size = torch.bincount(own[j, 0].long(), minlength=3)
        below = scores @ size.float()
        above, mass = torch.zeros(3, D), s.v[j].square().sum()
        for slot in drawn[j, 0].long().tolist():
            weight = mass / (4 * s.v[j, slot].square().sum())
            above += scores[:, own[j, 0, slot].long(), None] * weight * s.v[j, slot]
        torch.testing.assert_close(part[head], above / below[:, None], atol=5e-3, rtol=5e-3)


def test_subgen_takes_the_farthest_key_as_the_next_center_and_draws_long_values() -> None:
    k = torch.tensor([0.0, 0.1, 9.0, 9.2, -5.0, 0.2, -5.1, 9.1])[None, :, None].expand(1, 8, 8)
    v = torch.zeros(1, 8, 8).index_fill(1, torch.tensor([1, 6]), 1.0)
    v[0, 6] *= 3**0.5
    found, values = held(SubGen(centers=3, samples=4), k, v)
    want = torch.tensor([0.0, 0.0, 9.2, 9.2, -5.1, 0.0, -5.1, 9.2]).half().float()
    assert found[0, :, 0].tolist() == want.tolist()
    assert values[0, :, 0].nonzero().flatten().tolist() == [1, 6], "a quarter and three quarters of four draws"
    torch.testing.assert_close(values, v, atol=2e-3, rtol=0)


def test_subgen_forgets_by_the_slot() -> None:
    tier = SubGen(centers=1, samples=8).tier(of(), torch.device("cpu"), Kv(group=8))
    s = made(16)
    s = Slots(torch.cat([s.k[:, :1].expand(-1, 8, -1), s.k[:, 8:9].expand(-1, 8, -1)], 1), torch.ones_like(s.v), s.pos)
    s.v[:, 8:] = 2
    tier.take(0, s)
    q, pos = rows(1)
    q = torch.zeros_like(q)  # all keys score alike: each center counts as often as it has slots
    assert merge_attention(tier.attend(0, q, AttentionParams(0.3), pos)).mean().item() == pytest.approx(1.5, rel=1e-3)
    tier.evict_except(0, s.pos >= 4)
    assert merge_attention(tier.attend(0, q, AttentionParams(0.3), pos)).mean().item() == pytest.approx(
        (4 * 1 + 8 * 2) / 12, rel=1e-3
    )


def test_cskv_is_the_best_product_of_its_rank_over_all_heads() -> None:
    s = made(8)
    k, v = held(Cskv(k_rank=3, v_rank=5), s.k, s.v)
    for was, now, rank in ((s.k, k, 3), (s.v, v, 5)):
        wide, found = (t.transpose(0, 1).flatten(1) for t in (was, now))
        u, size, w = torch.linalg.svd(wide, full_matrices=False)
        torch.testing.assert_close(found, u[:, :rank] * size[:rank] @ w[:rank], atol=0.05, rtol=5e-3)


def test_cskv_refuses_what_saves_nothing() -> None:
    with pytest.raises(
        BadConfig, match=r"kv_format.v_rank = 7 saves nothing: 8 tokens, 2 heads of 16 numbers"
    ) as found:
        Cskv(k_rank=6, v_rank=7).tier(of(), torch.device("cpu"), KV)
    assert found.value.code == "form_rank"
    form, kv = Cskv(k_rank=6, v_rank=6), Kv(group=8)
    assert form.nbytes(LayerShape(K, D, D), kv, 2) < LayerShape(K, D, D).numbers * 2 + 4


REFUSED = [
    (
        {"kv_format": {"method": "mustafar"}, "kv": {"rotate": "hadamard"}},
        "spreads the large values",
    ),
    ({"kv_format": {"method": "mustafar"}, "kv": {"k_bits": 4}}, "is impossible with kv.k_bits = 4"),
    ({"kv_format": {"method": "freqkv"}, "kv": {"v_bits": 8}}, "this KV format does not quantize"),
    ({"kv_format": {"method": "cskv"}, "policy": {"name": "snap"}}, "set kv_format.joint = 1"),
    ({"kv_format": {"method": "subgen"}, "memory": {"fallbacks": ["kv.v_bits=2"]}}, "frees nothing"),
    ({"kv_format": {"method": "gear"}}, "which does not quantize"),
    ({"kv_format": {"method": "gear"}, "kv": FOUR | {"rotate": "hadamard"}}, "spreads the outliers"),
    ({"kv_format": {"method": "qaq"}, "kv": FOUR | {"rotate": "hadamard"}}, "spreads the outliers"),
    ({"kv_format": {"method": "rotatekv"}, "kv": FOUR | {"rotate": "hadamard"}}, "as this KV format does already"),
    (
        {"kv_format": {"method": "zipcache"}, "kv": {"k_bits": 8, "v_bits": 8, "split_codes": True}},
        "split codes need kv_format.method",
    ),
    ({"kv_format": {"method": "kivi", "rope": "before"}, "kv": FOUR | {"rotate": "hadamard"}}, "which rotates what"),
    ({"kv_format": {"method": "kivi", "rope": "before"}}, "has no effect while kv.k_bits"),
    (
        {"kv_format": {"method": "kivi", "rope": "before"}, "memory": {"fallbacks": ["kv.v_bits=8"]}},
        "with kv.k_bits = 16",
    ),
    ({"kv_format": {"method": "zipcache"}, "kv": {"k_bits": 4}}, "is impossible with kv.v_bits = 16"),
    ({"kv_format": {"method": "rotatekv"}, "kv": FOUR, "policy": {"name": "snap"}}, "set kv_format.joint = 1"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadConfig) as caught:
        Profile.load("exact").replace(exactness="approx", **changes)
    assert says in "\n".join(caught.value.lines)


def test_a_form_needs_a_profile_that_may_round() -> None:
    with pytest.raises(BadConfig) as caught:
        Profile.load("exact").replace(kv_format={"method": "gear"}, kv=FOUR)
    assert '"exact" is impossible' in "\n".join(caught.value.lines)


def test_a_model_whose_tables_depend_on_length_is_refused() -> None:
    model = table.lm("latents", "fp32")
    with pytest.raises(BadModel, match="stores latents"):
        assemble.store(
            model,
            Profile.load("exact").replace(exactness="approx", kv_format={"method": "kivi", "rope": "before"}, kv=FOUR),
        )


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_keys_that_are_no_numbers_are_told_by_name_or_stored(name: str, number: float) -> None:
    """Forms that look for directions find none; what the others make of it is refused where tokens are drawn."""
    kv, s = tier(name), made()
    s.k[0, 3, 1] = number
    looks = name.split()[0] in ("squat", "cskv") or (name == "gear" and number != torch.inf)  # outliers are kept apart
    if looks:
        with pytest.raises(BadModel) as refused:
            kv.take(0, s)
        assert refused.value.code == "bad_slots"
        assert "--set load.dtype=fp32" in refused.value.try_
    else:
        kv.take(0, s)
        assert kv.n_slots(0) == N


def test_waves_need_no_float64_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's GPU: what is asked of it there is never in float64."""
    want = FreqKV(retained=0.5)._waves(8, torch.device("cpu"), torch.float32)
    arange, asked = torch.arange, list[str]()

    def kept(*args: Any, dtype: torch.dtype, device: Any = "cpu", **more: Any) -> Tensor:
        asked.append(str(device))
        return arange(*args, dtype=dtype, **more)

    monkeypatch.setattr(torch, "arange", kept)
    monkeypatch.setattr(Tensor, "to", lambda self, where: self if str(where) == "mps" else self.type(where))
    assert torch.equal(FreqKV(retained=0.5)._waves(8, torch.device("mps"), torch.float32), want)
    assert asked == ["cpu", "cpu"]


@pytest.mark.parametrize("method", list(registries()["kv_format"]))
@pytest.mark.parametrize("family", ["dense", "uneven", "latents"])
def test_a_session_goes_back_and_on_in_every_form(method: str, family: str) -> None:
    model = table.lm(family, "fp32")
    rope = {} if family == "dense" else {"rope": "after"}
    bits = {} if method in FEWER else FOUR
    ranks = {"k_rank": 2, "v_rank": 2} if method == "cskv" else {}
    kv = bits | {"group": 8, "residual": 8, "sinks": 2}
    asked = Profile.load("exact").replace(exactness="approx", kv_format={"method": method, **rope, **ranks}, kv=kv)
    if method == "rotatekv" and any(dim & (dim - 1) for of in model.shapes for dim in of.parts):
        with pytest.raises(BadConfig) as found:
            assemble.session(model, asked)
        assert found.value.code == "kv_rotate"
        return
    session = assemble.session(model, asked)
    run_to_end(session.read(families.prompt(90)))
    run_to_end(session.stream(9))
    assert nbytes(session.cache)["packed"]
    assert session.cache.usage()
    again = assemble.session(model, asked)
    again.cache.restore(SnapshotReader(copy.deepcopy(session.cache.snapshot()), len(session.ids)))
    assert nbytes(again.cache)["packed"] == nbytes(session.cache)["packed"]
    session.cache.crop(41)
    assert {int(session.cache.slots(use.layer).pos.max()) for use in session.cache.usage()} == {40}


def test_sizes_that_no_byte_holds_are_refused() -> None:
    with pytest.raises(BadConfig, match=r"kv.v_bits = 2 does not fit"):
        Kivi(rope="before").tier(of(shapes=alike(1, 2, 6)), torch.device("cpu"), KV)
