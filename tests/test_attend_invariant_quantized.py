"""Attention over slots in few bits: the bits that the same slots give unpacked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcli.kernels import native
from kvcli.kernels.attend_invariant import QuantizedKV, StoredKV, attend_part, attend_quantized_part
from kvcli.kernels.attend_quantized import PackedHead
from kvcli.kernels.quantize_kv import pack_keys, pack_values, unpack_keys, unpack_values

pytestmark = pytest.mark.skipif(not native.levels(), reason=native.why_not() or "unknown")


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("k_bits", "v_bits"), [(8, 8), (4, 4), (2, 2), (16, 4), (4, 16), (8, 2)])
def test_slots_in_few_bits_give_the_bits_that_they_give_dequantized(
    level: str, dtype: torch.dtype, k_bits: int, v_bits: int
) -> None:
    torch.manual_seed(0)
    # numbers of a head, channels and slots of a group, rows, query heads of a KV head: few for registers, and more
    few = [(64, 64, 64, 1, g) for g in (1, 2, 3, 4)]
    more = [(64, 64, 64, 3, 2), (96, 24, 32, 3, 2), (128, 32, 16, 1, 2), (128, 64, 128, 1, 3), (128, 128, 64, 1, 4)]
    for d, width, group, n, g in few + more:
        heads, ks, vs = [], [], []
        for length in (700, 0, 77):
            full = length if k_bits in (8, 16) else length // group * group
            # of all sizes that scales may have, down to where half precision has fewer digits
            sizes = torch.logspace(-6, 2, d), torch.logspace(-6, 2, length).unsqueeze(1)
            k, v = ((torch.randn(length, d) * by).to(dtype) for by in sizes)
            packed = PackedHead(pack_keys(k[:full], k_bits, group), k[full:], pack_values(v, v_bits, width), length)
            heads.append(packed)
            ks.append(torch.cat([unpack_keys(packed.keys, k), packed.rest]))
            vs.append(unpack_values(packed.values, v, length))
        pos, starts = torch.arange(777, dtype=torch.int32), [0, 700, 700]
        run = StoredKV(torch.cat(ks), torch.cat(vs), pos, starts, [700, 0, 77], starts)
        q = torch.randn(n, 3 * g, d).to(dtype).transpose(0, 1)
        for window in (None, 300):
            asks: dict[str, Any] = {"window": window, "softcap": 20.0, "level": level}
            got = attend_quantized_part(q, QuantizedKV(heads, pos, starts), [700] * n, d**-0.5, **asks)
            want = attend_part(q, run, [700] * n, d**-0.5, **asks)
            assert torch.equal(got.out, want.out)
            assert torch.equal(got.lse, want.lse)


def test_a_hole_is_hidden_where_there_is_a_window() -> None:
    torch.manual_seed(0)
    k, v, q = torch.randn(70, 32), torch.randn(70, 32), torch.randn(2, 1, 32)
    at = torch.cat([torch.arange(30), torch.arange(40, 70)])
    pos = torch.arange(70, dtype=torch.int32)
    pos[30:40] = -1
    head = PackedHead(pack_keys(k, 16, 0), k[:0], pack_values(v, 16, 0), 70)
    got = attend_quantized_part(q, QuantizedKV([head], pos, [0]), [70], 0.2, window=1 << 30)
    want = attend_part(q, StoredKV(k[at], v[at], pos[at], [0], [60], [0]), [70], 0.2)
    torch.testing.assert_close(got.out, want.out)
    torch.testing.assert_close(got.lse, want.lse)
