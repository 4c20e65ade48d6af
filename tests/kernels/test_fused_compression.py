"""Kernels of compression points in Triton's interpreter: what the references give, codes to the bit."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcli.kernels import attention_mass, page_bounds, quantize_kv, quantized_key_scores, rope, triton_support
from tests.covering import pinned

pytest.importorskip("triton")
import_module("tests.kernels.interpreted")  # before what is fused
FUSED = {
    op: import_module(f"kvcli.kernels.{op}.fused")
    for op in ("quantize_kv", "rope", "attention_mass", "quantized_key_scores", "page_bounds")
}

torch.set_num_threads(1)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], tuple[Any, Any]]:
    """What a call gives with the kernels, whose results are NaN before they are written, and without."""

    def run(call: Callable[[], Any]) -> tuple[Any, Any]:
        want = call()
        with monkeypatch.context() as m:
            m.setattr(triton_support, "why_not", lambda *_: "")
            for module in FUSED.values():
                _poison(m, module)
            return call(), want

    return run


def _poison(m: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Its own `torch.empty` and `new_empty`, whichever it has."""
    for name in ("empty", "empty_like"):
        made = getattr(torch, name)
        m.setattr(module.torch, name, lambda *a, _made=made, **k: _filled(_made(*a, **k)))
    new = Tensor.new_empty
    m.setattr(Tensor, "new_empty", lambda t, *a, **k: _filled(new(t, *a, **k)))


def _filled(t: Tensor) -> Tensor:
    return t.fill_(torch.nan if t.is_floating_point() else 85)


# slots, channels, numbers in a group: primes and ones, several programs
SHAPES = [(7, 16, 7), (130, 64, 13), (64, 80, 64), (96, 128, 32)]


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_and_scales_are_those_of_the_reference(shape: tuple[int, int, int], bits: int, both: Any) -> None:
    s, d, group = shape
    x = noise(s, d) * torch.linspace(0.1, 4, d) + torch.linspace(-9, 9, d)
    x[: s // 3] *= 1e-9  # groups of tiny numbers, and of all the same
    x[s // 2 :, ::3] = 7e4 if bits == 8 else 3.25
    for dtype in (torch.bfloat16, torch.float32):
        k, v = x[: s // group * group].to(dtype), x.to(dtype)
        for call in (
            lambda k=k: quantize_kv.pack_keys(k, bits, group),
            lambda v=v: quantize_kv.pack_values(v, bits, group),
        ):
            got, want = both(call)
            assert [t.shape for t in got.tensors] == [t.shape for t in want.tensors]
            assert all(torch.equal(a, b) for a, b in zip(got.tensors, want.tensors, strict=True))


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("far", [1e5, -1e5, 1e6])
def test_numbers_beyond_sixteen_bits_are_quantized_as_by_the_reference(bits: int, far: float, both: Any) -> None:
    """Neither zero nor scale becomes infinite, which would make every number of the group none."""
    x = noise(64, 16)
    x[3, 5], x[32:, 7] = far, far
    for call in (lambda: quantize_kv.pack_keys(x, bits, 32), lambda: quantize_kv.pack_values(x, bits, 8)):
        got, want = both(call)
        assert all(t.isfinite().all() for t in got.tensors)
        assert all(torch.equal(a, b) for a, b in zip(got.tensors, want.tensors, strict=True))


@pytest.mark.parametrize("bits", [8, 4])
def test_no_slots_are_quantized(bits: int, both: Any) -> None:
    got, want = both(
        lambda: (quantize_kv.pack_keys(noise(0, 16), bits, 8), quantize_kv.pack_values(noise(0, 16), bits, 8))
    )
    for a, b in zip(got, want, strict=True):
        assert [t.shape for t in a.tensors] == [t.shape for t in b.tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [16, 128])
def test_a_hadamard_turn_is_that_of_its_matrix(d: int, dtype: torch.dtype, both: Any) -> None:
    """To the rounding of float32, and a row the same alone."""
    x = noise(3, 7, d).to(dtype)
    matrix = quantize_kv.hadamard(d, x.float())
    torch.testing.assert_close(*both(lambda: quantize_kv.turned(x, matrix)), atol=3e-6, rtol=1e-5)
    together, alone = (both(lambda n=n: quantize_kv.turned(x[:, :n], matrix))[0] for n in (7, 1))
    assert torch.equal(together[:, :1], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dims", "near"), [(16, False), (10, True), (6, False)])
def test_keys_turn_and_turn_back(dims: int, near: bool, dtype: torch.dtype, both: Any) -> None:
    rotary = rope.Rotary(100.0 ** (-torch.arange(0, dims, 2) / dims), 1.3, near)
    k = noise(3, 19, 16).to(dtype)[:, 1:]  # strides are free
    pos = torch.randint(0, 100_000, (3, 18), generator=torch.Generator().manual_seed(1))
    for at in (pos, pos[:1], pos[0]):
        for way in (rope.rotate, rope.unrotate):
            got, want = both(lambda way=way, at=at: way(k, at, rotary))
            assert got.dtype == dtype
            torch.testing.assert_close(got, want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 0, 16), (0, 5, 16)], ids=str)
def test_no_keys_turn_into_none(shape: tuple[int, int, int], both: Any) -> None:
    rotary, k = rope.Rotary(100.0 ** (-torch.arange(0, 16, 2) / 16)), torch.empty(shape)
    for pos in (torch.arange(shape[1]), torch.empty(shape[:2], dtype=torch.int64)):
        got, want = both(lambda pos=pos: rope.unrotate(k, pos, rotary))
        assert got.shape == want.shape == shape


MASSES = [(*bent, over) for bent in [(0.0, None), (1.5, 20)] for over in ("mean", "sum", "max", "none")]


@pytest.mark.parametrize(("softcap", "window", "over"), pinned(MASSES, (0.0, None, "sum")))
def test_masses_are_those_of_the_reference(softcap: float, window: int | None, over: str, both: Any) -> None:
    kv, g, w, s, d = 2, 3, 35, 131, 64
    q, k = noise(kv * g, w, d).bfloat16(), noise(kv, s + 3, d, seed=1).bfloat16()[:, 3:]
    pos = torch.stack([torch.randperm(2 * s, generator=torch.Generator().manual_seed(j))[:s] for j in range(kv)])
    pos[1, 100:] = -1
    q_pos = torch.arange(s // 2, s // 2 + w)
    q_pos[0] = -1  # sees nothing
    both_of = both(
        lambda: attention_mass.attention_mass(q, q_pos, k, pos, 0.2, softcap=softcap, window=window, over=over)  # type: ignore[arg-type]
    )
    torch.testing.assert_close(*both_of, atol=1e-5, rtol=2e-3)


def test_masses_of_long_kv_caches_are_found_in_spans(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FUSED["attention_mass"], "SPAN", 64)
    q, k = noise(1, 3, 64).half(), noise(1, 200, 64, seed=1).half()
    pos = torch.arange(200, dtype=torch.int32).expand(1, -1)
    call = lambda: attention_mass.attention_mass(q, torch.tensor([199, 70, 3]), k, pos, 0.2)  # noqa: E731
    torch.testing.assert_close(*both(call), atol=1e-5, rtol=2e-3)
    nobody, nothing = (
        both(lambda n=n, m=m: attention_mass.attention_mass(q[:, :n], q.new_zeros(n).long(), k[:, :m], pos[:, :m], 0.2))
        for n, m in ((0, 200), (3, 0))
    )
    assert torch.equal(*nobody)
    assert torch.equal(*nothing)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scores_of_codes_are_those_of_float32(dtype: torch.dtype, both: Any) -> None:
    rows = noise(2, 19, 48).to(dtype)
    codes = torch.randint(-127, 128, (2, 70, 48), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    scale = noise(2, 70).abs().bfloat16()
    got, want = both(lambda: quantized_key_scores.code_scores(rows, codes, scale))
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-5)


def test_bounds_are_those_of_the_reference(both: Any) -> None:
    low, high = noise(2, 35, 48).bfloat16(), noise(2, 35, 48).bfloat16() + 1
    got, want = both(lambda: page_bounds.page_bounds(noise(2, 5, 48), low, high))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)


# ---- rows alone and together: of those that a pass asks for; test_row_dependence.py has what is caught ----

ROWS = 19  # a tile and a part of one


def _boxes(op: str) -> Callable[[slice], Tensor]:
    """Some rows of an op's result [K, rows, ..]."""
    x, low, high = noise(2, ROWS, 128), noise(2, 35, 128, seed=1), noise(2, 35, 128, seed=2).abs() + 3
    codes = torch.randint(-127, 128, (2, 70, 128), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    scale, pos, at = noise(2, 70).abs(), torch.arange(35).expand(2, -1), torch.arange(35 - ROWS, 35)
    calls: dict[str, Callable[[slice], Tensor]] = {
        "page_bounds": lambda some: FUSED["page_bounds"].page_bounds(x[:, some], low, high),
        "quantized_key_scores": lambda some: FUSED["quantized_key_scores"].code_scores(x[:, some], codes, scale),
        "quantize_kv": lambda some: FUSED["quantize_kv"].turned(x[:, some]),
        "rope": lambda some: FUSED["rope"].turned(x[:, some], at[some], x[0, 0, :64], 1.0, False, back=False),
        "attention_mass": lambda some: FUSED["attention_mass"].attention_mass(
            *(x[:, some].half(), at[some], low.half(), pos, 0.1, 2.0, 20, "none")
        )[:, 0],
    }
    return calls[op]


def differing(call: Callable[[slice], Tensor]) -> int:
    """Rows that have other bits alone than among others."""
    together = call(slice(ROWS))
    return sum(not torch.equal(call(slice(i, i + 1))[:, 0], together[:, i]) for i in range(ROWS))


@pytest.mark.parametrize("op", FUSED)
def test_a_row_has_the_bits_that_it_has_alone(op: str) -> None:
    assert differing(_boxes(op)) == 0


def test_kernels_wait_for_nothing() -> None:
    """None of their modules asks a tensor for its numbers."""
    for module in FUSED.values():
        with open(module.__file__, encoding="utf-8") as file:  # type: ignore[arg-type]
            text = file.read()
        assert not any(word in text for word in (".item(", ".tolist(", "bool(", ".cpu("))
