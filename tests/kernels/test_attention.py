"""attend, attend_new_tokens and merge: each implementation is softmax attention, however slots are cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kvcli.kernels import attend, attend_new_tokens, dispatch, native
from kvcli.kernels.attend import attend as attend_op
from kvcli.kernels.merge_attention import PartialAttention, merge_attention
from kvcli.kernels.merge_attention.reference import merge_attention as merge_reference

# K, G, N, S, D: primes and ones
SHAPES = [(1, 1, 1, 1, 8), (2, 3, 5, 7, 16), (3, 1, 1, 131, 8), (1, 7, 3, 4099, 8), (2, 2, 13, 1, 32)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
IMPLEMENTATIONS = ["reference", "cpu"]


def of(op: str, name: str):  # type: ignore[no-untyped-def]
    from importlib import import_module

    return getattr(import_module(f"kvcli.kernels.{op}.{name}"), op)


def inputs(k: int, g: int, n: int, s: int, d: int, dtype: torch.dtype, e: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """`e`: numbers of a value; 0 = as many as of a key."""
    r = torch.Generator().manual_seed(k * 1000 + s)
    q, key, v = (
        torch.randn(shape, generator=r, dtype=torch.float64) for shape in ((k * g, n, d), (k, s, d), (k, s, e or d))
    )
    return q.to(dtype), key.to(dtype), v.to(dtype)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The definition, one query head at a time, in float64."""
    outs, lses = [], []
    group = q.shape[0] // k.shape[0]
    for h in range(q.shape[0]):
        score = q[h].double() @ k[h // group].double().T * scale
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if mask is not None:
            score = score.masked_fill(~(mask if mask.dim() == 2 else mask[h // group]), -torch.inf)
        outs.append(torch.softmax(score, -1).nan_to_num(0.0) @ v[h // group].double())
        lses.append(torch.logsumexp(score, -1))
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("masked", ["none", "rows", "heads"])
@pytest.mark.parametrize("e", [0, 5, 40])
def test_attend_is_softmax_attention(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, masked: str, e: int
) -> None:
    k, _, n, s, _ = shape
    q, key, v = inputs(*shape, dtype, e)
    r = torch.Generator().manual_seed(9)
    mask = None if masked == "none" else torch.rand((n, s) if masked == "rows" else (k, n, s), generator=r) < 0.6
    if mask is not None:
        mask[..., 0, :] = False  # a row that sees nothing
    out, lse = of("attend", name)(q, key, v, 0.3, 0.0, mask, s)
    want, mass = softmax_attention(q, key, v, 0.3, 0.0, mask)
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), mass, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_soft_capped_scores_are_bent(dtype: torch.dtype) -> None:
    q, k, v = inputs(2, 3, 5, 7, 16, dtype)
    part = attend_op(q * 4, k, v, 0.3, softcap=1.5)
    want, mass = softmax_attention(q * 4, k, v, 0.3, 1.5, None)
    torch.testing.assert_close(part.out.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(part.lse.double(), mass, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(part.out, attend_op(q * 4, k, v, 0.3).out, atol=1e-2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(("k", "g", "n", "d"), [(1, 1, 1, 8), (2, 3, 1, 16), (2, 2, 7, 8), (3, 1, 67, 16)])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("e", [0, 5, 40])
def test_attend_fresh_is_masked_attention(
    name: str, k: int, g: int, n: int, d: int, tree: bool, dtype: torch.dtype, e: int
) -> None:
    q, key, v = inputs(k, g, n, n, d, dtype, e)
    sees = torch.ones(n, n, dtype=torch.bool).tril()
    if tree:
        sees = (torch.rand(n, n, generator=torch.Generator().manual_seed(4)) < 0.4) | torch.eye(n, dtype=torch.bool)
    out, lse = of("attend_new_tokens", name)(q, key, v, 0.3, sees if tree else None, 0.0)
    want, mass = softmax_attention(q, key, v, 0.3, 0.0, sees)
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), mass, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("cuts", [(), (0,), (3, 3), (1, 64, 65, 130), (131,)])
@pytest.mark.parametrize("e", [0, 5])
def test_merged_parts_equal_one_attention(cuts: tuple[int, ...], e: int) -> None:
    q, k, v = inputs(2, 3, 5, 131, 16, torch.float64, e)
    edges = [0, *cuts, 131]
    parts = [attend_op(q, k[:, a:b], v[:, a:b], 0.3) for a, b in itertools.pairwise(edges)]
    whole = attend_op(q, k, v, 0.3)
    torch.testing.assert_close(merge_attention(parts), whole.out)
    torch.testing.assert_close(merge_attention(parts[::-1]), whole.out)


def test_a_part_that_saw_nothing_weighs_nothing_even_when_it_holds_garbage() -> None:
    q, k, v = inputs(2, 3, 5, 7, 16, torch.float32)
    part = attend_op(q, k, v, 0.3)
    blind = PartialAttention(torch.full_like(part.out, 1e30), torch.full_like(part.lse, -torch.inf))
    for parts in ([blind, part, blind], [blind, part], [part, blind]):
        torch.testing.assert_close(merge_attention(parts), part.out)
    assert merge_attention([blind, blind, blind]).abs().max() == 0


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_two_parts_merge_as_many_do(dtype: torch.dtype) -> None:
    q, k, v = inputs(2, 3, 5, 131, 16, dtype)
    a, b = attend_op(q, k[:, :40], v[:, :40], 0.3), attend_op(q * 3, k[:, 40:], v[:, 40:], 0.3)
    want = merge_reference([a.out, b.out], [a.lse, b.lse])
    torch.testing.assert_close(merge_attention([a, b]), want)
    assert merge_attention([a, b]).dtype == a.lse.dtype
    nothing = attend_op(q, k[:, :0], v[:, :0], 0.3)
    assert merge_attention([nothing, nothing]).abs().max() == 0


def test_spare_capacity_behind_the_slots_is_never_read() -> None:
    q, k, v = inputs(2, 3, 5, 7, 16, torch.float32)
    slab_k, slab_v = (torch.full((2, 20, 16), torch.nan) for _ in "kv")
    slab_k[:, :7], slab_v[:, :7] = k, v
    for name in IMPLEMENTATIONS:
        out, _ = of("attend", name)(q, slab_k[:, :7], slab_v[:, :7], 0.3, 0.0, None, 7)
        torch.testing.assert_close(out, attend_op(q, k, v, 0.3).out)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(("n", "length"), [(1, 1), (1, 7), (5, 11), (5, 20), (131, 11), (1, 1031), (7, 1025)])
def test_a_slab_with_spare_room_reads_as_its_slots(name: str, n: int, length: int, dtype: torch.dtype) -> None:
    q, k, v = inputs(2, 3, n, 1040 if length > 20 else 20, 16, dtype)
    k[:, length:] *= 50  # left over from what was cropped: finite, and must not count
    v[:, length:] *= 50
    out, lse = of("attend", name)(q, k, v, 0.3, 0.0, None, length)
    want, mass = softmax_attention(q, k[:, :length], v[:, :length], 0.3, 0.0, None)
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), mass, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("n", [1, 5, 131])
@pytest.mark.parametrize("lengths", [(7, 20, 1), (0, 20, 3), (1031, 1040, 1025), (1, 1040, 0), (1040, 1040, 2)])
def test_heads_of_different_lengths_read_their_own_slots(
    name: str, lengths: tuple[int, ...], n: int, dtype: torch.dtype
) -> None:
    q, k, v = inputs(3, 2, n, max(lengths), 16, dtype)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).view(-1, 1, 1)
    for slab in (k, v):
        slab.mul_(torch.where(mask[:, 0].unsqueeze(-1), 1.0, 50.0).to(dtype))  # spare room: finite, must not count
    out, lse = of("attend", name)(q, k, v, 0.3, 0.0, None, lengths)
    want, mass = softmax_attention(q, k, v, 0.3, 0.0, mask.expand(-1, n, -1))
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), mass, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_scores_beyond_half_precision_stay_finite(name: str) -> None:
    """Unscaled products of large keys pass 65,504, the largest number of float16; scaled ones do not."""
    q, k, v = inputs(2, 3, 1, 7, 128, torch.float16)
    k[:, 3] = q[::3, 0] * 900
    assert (q.double() @ k.double()[0].T).abs().max() > 65504
    out, lse = of("attend", name)(q, k, v, 128**-0.5, 0.0, None, 7)
    want, mass = softmax_attention(q, k, v, 128**-0.5, 0.0, None)
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), mass, atol=1e-2, rtol=1e-2)


def test_dispatch_says_what_it_chose_and_why() -> None:
    chosen = dispatch.explain("cpu", torch.bfloat16)
    assert [(op, what) for op, what, _ in chosen[:2]] == [("attend", "cpu"), ("attend_new_tokens", "cpu")]
    assert [op for op, _, _ in chosen[2:]] == ["attend_quantized", "native"]  # which ask the CPU
    assert all(why for *_, why in chosen)
    assert {what for _, what, _ in dispatch.explain("cuda", torch.bfloat16)} == {"reference"}
    assert attend.dispatch is attend_new_tokens.dispatch


def test_a_card_that_kernels_serve_is_told_what_they_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.triton_support, "why_not", lambda device, dtype: "")
    told = {op: (what, why) for op, what, why in dispatch.explain("cuda", torch.bfloat16)}
    assert all(told[op][0] == "fused" for op in dispatch.ON_GPUS)
    assert "mask" in told["attend"][1]
    assert told["attend_new_tokens"][0] == "reference"


@pytest.mark.parametrize("levels", [(), ("avx2",), ("avx2", "avx512")])
def test_native_kernels_are_named_or_missed(levels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "levels", lambda: levels)
    monkeypatch.setattr(native, "why_not", lambda: "" if levels else "none were built")
    monkeypatch.setattr(native, "remedy", lambda: "build them")
    _, what, why = dispatch.explain("cpu", torch.bfloat16)[-1]
    assert what == (levels[-1] if levels else "none")
    assert why.startswith("compiled; threads" if levels else "none were built; torch computes instead")
    assert ("build them" in why, "avx2 as well" in why) == (not levels, len(levels) == 2)
