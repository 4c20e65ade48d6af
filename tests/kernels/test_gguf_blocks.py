"""Weights in the blocks of GGUF files: the numbers of the gguf package, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import pytest
import torch
from torch import Tensor

from kvcli.kernels import linear_quantized
from kvcli.kernels import native as built
from kvcli.kernels.linear_quantized import QuantizedWeight, formats, of_blocks
from kvcli.models.gguf.blocks import PACKED, numbers
from tests.gguf_files import SCALES, blocks
from tests.kernels.test_linear import LEVELS, strays

pytestmark = pytest.mark.skipif(not built.levels(), reason=built.why_not())
BF16, FP32 = torch.bfloat16, torch.float32
N = 131  # outputs, which fill no panel


def weights(kind: str, k: int) -> tuple[QuantizedWeight, Tensor]:
    """A weight in panels, and its numbers by the gguf package."""
    of, what = PACKED[kind], gguf.GGMLQuantizationType[kind]
    g = torch.Generator().manual_seed(k)
    plain = torch.randn(N, k, generator=g).numpy() / 4
    raw = blocks(kind, N, k) if kind in SCALES else gguf.quants.quantize(plain, what)
    parts = formats.arrange_panels(of.codes(raw), of.format.bits), formats.arrange_scales(of.scales(raw), of.format)
    return of_blocks(torch.cat([part.flatten() for part in parts]), of.format, (N, k)), numbers(raw, kind)


def widths(kind: str) -> tuple[int, ...]:
    block, _ = gguf.constants.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return (block, 3 * block)


def product(w: QuantizedWeight, level: str) -> Callable[[Tensor], Tensor]:
    return lambda x: linear_quantized.linear(x, N, w.format, w.data, w.scale, level=level)


def rows(m: int, k: int) -> Tensor:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
    x[:, 7] *= 300  # an outlier channel, as models have
    return x


@pytest.mark.parametrize("kind", PACKED)
def test_weights_are_those_of_the_gguf_package_to_the_bit(kind: str):
    for k in widths(kind):
        w, want = weights(kind, k)
        assert torch.equal(w.plain(), want)
        index = torch.tensor([[130, 0], [64, 7]])
        assert torch.equal(w.rows(index), want[index])
        assert (w.data.nbytes, w.scale.nbytes) == w.format.nbytes(N, k)
        # near the size of the block itself: six bits of a factor become eight
        per_weight = w.format.bits / 8 + w.format.per_span / w.format.span
        assert per_weight <= 1.06 * PACKED[kind].nbytes / widths(kind)[0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", PACKED)
def test_a_product_errs_as_rounding_it_does_and_a_row_does_not_know_its_neighbours(kind: str, level: str):
    for k, dtype, most in ((widths(kind)[1], BF16, 19), (widths(kind)[0], FP32, 7)):
        w, plain = weights(kind, k)
        run, x = product(w, level), rows(most, k).to(dtype)
        want = x.double() @ plain.double().T
        error, alone = (run(x).double() - want).norm(), (want.to(dtype).double() - want).norm()
        assert error <= (1e-6 * want.norm() if dtype == FP32 else 1.05 * alone)
        assert strays(run, x) == []


@pytest.mark.skipif("avx512bf16" not in LEVELS, reason="this CPU has one kind of digits")
@pytest.mark.parametrize("kind", PACKED)
def test_all_kinds_of_digits_give_the_same_bits(kind: str):
    w, _ = weights(kind, widths(kind)[1])
    for m in (1, 3, 4, 17, 66):
        x = rows(m, w.shape[1]).to(BF16)
        want = product(w, "avx2")(x)
        for level in LEVELS[LEVELS.index("avx512bf16") :]:
            assert torch.equal(product(w, level)(x), want), (m, level)


def test_float16_rows_are_multiplied_in_float32():
    w, plain = weights("Q4_K", 256)
    x = (rows(3, 256) / 300).half()
    got = linear_quantized.linear_quantized(x, w)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.float(), x.float() @ plain.T, rtol=2e-3, atol=2e-3)


def test_a_scale_that_is_no_number_spoils_its_output_alone():
    w, _ = weights("Q6_K", 256)
    x = rows(5, 256).to(BF16)
    want = linear_quantized.linear_quantized(x, w)
    w.scale[1, 0, 2 * 3 : 2 * 3 + 2] = 255  # d of output 67
    got = linear_quantized.linear_quantized(x, w)
    others = [n for n in range(N) if n != 67]
    assert not got[:, 67].isfinite().any()
    assert torch.equal(got[:, others], want[:, others])
