"""Probe on first use if a CPU's 8-bit products are right, and fast enough for attention over quantized slots."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kvcli.kernels.attend_quantized.cpu import in_digits, scores_in_bytes, weigh_in_bytes, widened_scores
from kvcli.kernels.quantize_kv import Rounded, pack_keys, pack_values, unpack_keys, unpack_values


@cache
def why_not() -> str:
    """Return why this CPU or torch is not supported; "" if it is. Tries both products, at odd sizes, on first use."""
    if not _has_product():
        return "this torch has no 8-bit products"
    noise = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2048 + 7, 64, generator=noise) for _ in "kv")
    rows = torch.randn(4, 64, generator=noise)
    try:
        return _differs(rows, k, v) or _drags(rows, pack_keys(k, 8, 1))
    except RuntimeError as e:
        return f"torch's int8 products fail here: {str(e).splitlines()[0]}"


def _has_product() -> bool:
    return hasattr(torch.ops.aten, "_weight_int8pack_mm") and hasattr(torch, "_int_mm")


def _differs(rows: Tensor, k: Tensor, v: Tensor) -> str:
    """Return a reason if a product differs from that of dequantized numbers."""
    keys, values = pack_keys(k, 8, 1), pack_values(v, 8, 1)
    score = scores_in_bytes(*in_digits(rows), keys)
    want = rows @ unpack_keys(keys, rows).T
    if not torch.allclose(score, want, atol=1e-2):
        return "torch's int8 product is wrong on this CPU"
    mass = torch.softmax(want, 1)
    want = mass @ unpack_values(values, rows, mass.shape[1])
    if not torch.allclose(weigh_in_bytes(mass, values), want, atol=1e-2):
        return "torch's int8 product with packed weights is wrong on this CPU"
    return ""


def _drags(rows: Tensor, keys: Rounded) -> str:
    """Return a reason if the integer product is much slower than dequantization, as when torch has no kernel for it.

    The limit is a factor of 4, so that other load on the machine does not change the answer: with a kernel the product
    is 3 times as fast, without one 20 times as slow.
    """
    narrow = rows.to(torch.bfloat16)
    ours = _least(lambda: scores_in_bytes(*in_digits(rows), keys))
    plain = _least(lambda: widened_scores(narrow, keys))
    return "torch multiplies 8-bit integers slowly on this CPU" if ours > 4 * plain else ""


def _least(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls."""
    found = []
    for _ in range(5):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)
