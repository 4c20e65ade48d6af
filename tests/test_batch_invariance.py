"""Stores whose rows know nothing of each other: a row alone, in a tree and in a chain gives the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvcli.kernels import native
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import merge_attention
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.cache.tiered_cache import TieredCache
from kvcli.kv.slots import AttentionParams, KVCache, Slots
from kvcli.kv.sparse.index import PageIndex
from kvcli.kv.sparse.page_source import PageTier
from kvcli.kv.sparse.pages import PageBudget
from kvcli.kv.sparse.sparse_tier import SparseCache, SparseTier
from kvcli.methods.sparse.certified import Certified
from kvcli.methods.sparse.minmax import MinMax
from kvcli.methods.sparse.sketch import Sketch
from tests import make
from tests.policies import masks

pytestmark = pytest.mark.skipif(not native.levels(), reason=native.why_not() or "unknown")
K, G, D = 2, 3, 64
H = K * G
BUDGET = PageBudget(fraction=0.05, floor=70, sinks=4, recent=9)
INDEXES: dict[str, Callable[[], PageIndex]] = {
    "minmax": lambda: MinMax(page=16),
    "sketch": lambda: Sketch(page=4),
    "certified": lambda: Certified(page=4),
}


def below(kind: str, dtype: torch.dtype) -> PageTier:
    if kind == "disk":
        return make.disk((1, K, D), dtype)
    turn = "hadamard" if kind == "turned" else "none"
    return make.quantized((1, K, D), (4, 8), dtype, group=32, rotate=turn)


def store(kind: str, index: str, dtype: torch.dtype) -> KVCache:
    dense = make.dense((1, K, D), dtype)
    more = {"epsilon": 0.4} if index == "certified" else {}
    if kind == "dense":
        return SparseCache(dense, INDEXES[index](), BUDGET, [0], source=dense, **more) if index else dense
    shelf = below(kind, dtype)
    rung = SparseTier(shelf, INDEXES[index](), BUDGET, [0], source=shelf, **more) if index else shelf
    return TieredCache(dense, [TierLevel(rung, group=32)], holds=40, group=32, sinks=4)


def made(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    loud = 1 + 4 * (torch.randn(shape[-1], generator=torch.Generator().manual_seed(99)) > 1.3)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * loud).to(dtype)


def uneven(layer: int, s: Slots) -> Tensor:
    return (s.pos % torch.tensor([[5], [9]]) != 3) | (s.pos < 0)


PAST, LATE = 900, 70


def filled(kind: str, index: str, dtype: torch.dtype, evicts: bool) -> KVCache:
    kv = store(kind, index, dtype)
    for a in range(0, PAST, 300):
        kv.append(0, *(made(K, 300, D, dtype=dtype, seed=a + i) for i in (1, 2)), a)
        kv.compress()
    if evicts:
        kv.compress(masks(kv, uneven))
    kv.append(0, *(made(K, LATE, D, dtype=dtype, seed=i) for i in (5, 6)), PAST)
    return kv


@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("index", ["", *INDEXES])
@pytest.mark.parametrize("kind", ["dense", "packed", "turned", "disk"])
def test_a_row_gives_the_same_bits_alone_and_among_others(
    kind: str, index: str, dtype: torch.dtype, evicts: bool
) -> None:
    n, start = 9, PAST + LATE
    q, k, v = (made(heads, n, D, dtype=dtype, seed=7 + heads) for heads in (H, K, K))
    v = made(K, n, D, dtype=dtype, seed=8)
    sees = torch.eye(n, dtype=torch.bool)
    for i in range(1, n):
        sees[i] |= sees[(i - 1) // 2]  # two children each
    for sight in (AttentionParams(D**-0.5), AttentionParams(D**-0.5, softcap=6.0)):
        kv = filled(kind, index, dtype, evicts)
        assert kv.batch_variant_reason == ""
        pos = [start + int(row.sum()) - 1 for row in sees]
        together = merge_attention(kv.attend(0, q, sight, pos, NewRows(k, v, pos, sees, sees)))
        # lookahead rows: the last rows ask beside the others
        few = merge_attention(kv.attend(0, q[:, 4:], sight, pos[4:], NewRows(k, v, pos, sees[4:], sees[4:])))
        assert torch.equal(few, together[:, 4:])
        for row in (0, 2, 8):
            kv = filled(kind, index, dtype, evicts)
            path = sees[row].nonzero().flatten().tolist()
            for at, i in enumerate(path):
                own = NewRows(k[:, i : i + 1], v[:, i : i + 1], [start + at], None, None)
                alone = merge_attention(kv.attend(0, q[:, i : i + 1], sight, [start + at], own))
                assert torch.equal(alone[:, 0], together[:, i])
                kv.append(0, k[:, i : i + 1], v[:, i : i + 1], start + at)


@pytest.mark.parametrize("index", INDEXES)
def test_a_choice_is_a_part_and_rows_differ_in_theirs(index: str) -> None:
    kv = filled("dense", index, torch.bfloat16, False)
    assert isinstance(kv, SparseCache)
    whole = merge_attention(
        kv._tier.attend(0, made(H, 5, D, dtype=torch.bfloat16, seed=1), AttentionParams(0.1), [PAST + LATE] * 5)
    )
    read = merge_attention(
        kv.attend(0, made(H, 5, D, dtype=torch.bfloat16, seed=1), AttentionParams(0.1), [PAST + LATE] * 5)
    )
    assert not torch.allclose(whole.float(), read.float(), atol=1e-2)
    assert kv.tally.pages > 1.2 * BUDGET.grains(PAST, kv._index.page) * K


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_a_kv_cache_says_which_setting_makes_it_batch_variant(dtype: torch.dtype) -> None:
    for kind in ("dense", "packed", "disk"):
        assert store(kind, "minmax", dtype).batch_variant_reason == "kv.dtype"
    assert make.quantized((1, 1, 24), dtype=torch.bfloat16).batch_variant_reason == "kv.k_bits"
