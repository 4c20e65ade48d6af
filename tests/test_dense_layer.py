"""Heads of unequal length: where they lie, and how they are read; tests/test_kv_machine.py has what they hold."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcli.kernels.merge_attention import PartialAttention, merge_attention
from kvcli.kv.slots import AttentionParams
from kvcli.kv.snapshot import SnapshotReader
from kvcli.kv.tiers.dense_layer import HeadExtents
from tests import make
from tests.policies import masks

torch.set_num_threads(1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=9), st.sampled_from([1, 16, 64, 256]), st.integers(0, 99))
def test_every_head_has_its_own_place_and_little_spare_room(lengths: list[int], step: int, least: int) -> None:
    lay = HeadExtents.of(lengths, step, least)
    places = sorted((start, start + room) for start, room in zip(lay.start, lay.room, strict=True))
    assert places[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(places))
    assert places[-1][1] == lay.total
    assert sorted(head for run in lay.runs() for head in run) == list(range(len(lengths)))
    for n, room in zip(lengths, lay.room, strict=True):
        assert max(n, least) <= room <= max(least, n + max(24, n // 21))
        assert room <= max(least, n + 1.5 * max(1, step // 4))


def test_heads_of_equal_length_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unequal slots in equal numbers, as most methods keep them: one product over all heads, no mask."""
    import kvcli.kv.tiers.dense_layer as dense_layer

    calls: list[tuple[int, object]] = []
    attend = dense_layer.attend

    def noted(q: Tensor, k: Tensor, *args: Any, **more: Any) -> PartialAttention:
        calls.append((k.shape[0], more.get("mask")))
        return attend(q, k, *args, **more)

    monkeypatch.setattr(dense_layer, "attend", noted)
    kv = make.dense((1, 3, 4))
    kv.append(0, torch.ones(3, 60, 4), torch.ones(3, 60, 4), 0)
    kv.compress(masks(kv, lambda layer, s: (s.pos + torch.arange(3).view(-1, 1)) % 3 == 0))
    kv.attend(0, torch.ones(6, 1, 4, dtype=torch.float64), AttentionParams(1.0), [60])
    assert calls == [(3, None)]
    calls.clear()
    kv.compress(masks(kv, lambda layer, s: (s.pos < 12) | (torch.arange(3).view(-1, 1) == 1)))
    kv.attend(0, torch.ones(6, 1, 4, dtype=torch.float64), AttentionParams(1.0), [60])
    assert sorted(calls) == [(1, None), (2, None)]


def test_numbers_that_are_not_finite_go_with_their_text() -> None:
    """Spare room is read along: what was there must not come back."""
    kv = make.dense((1, 3, 4))
    ones = torch.ones(3, 60, 4, dtype=torch.float64)
    bad = ones.clone()
    bad[:, 30:] = torch.nan
    kv.append(0, bad, bad / 0, 0)
    kv.compress(masks(kv, lambda layer, s: s.pos < 10 * (1 + torch.arange(3).view(-1, 1))))
    kv.append(0, ones[:, :1], ones[:, :1] * torch.inf, 60)
    kv.crop(60)
    q = torch.ones(6, 1, 4, dtype=torch.float64)
    assert not bool(merge_attention(kv.attend(0, q, AttentionParams(1.0), [60])).isnan().any())
    for window in (45, 32):
        out = merge_attention(kv.attend(0, q, AttentionParams(1.0, 0.0, window), [60]))
        assert not bool(out.isnan().any())


class Largest(TorchDispatchMode):
    """Notes the most bytes of a tensor."""

    nbytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(made) if isinstance(t, Tensor)]
        self.nbytes = max(self.nbytes, *sizes, 0)
        return made


def test_heads_of_a_snapshot_take_no_more_memory_than_their_own_slots() -> None:
    """A file of one long head and many short ones must not be restored as so many long ones."""
    n_kv, n, size = 16, 1000, 32
    state = {
        str(head): {"k": torch.ones(m, size), "v": torch.ones(m, size), "pos": torch.arange(m, dtype=torch.int32)}
        for head, m in enumerate([n] + [1] * (n_kv - 1))
    }
    kv = make.dense((1, n_kv, size), torch.float32)
    with Largest() as largest:
        kv.restore(SnapshotReader({"0": state}, n))
    assert kv._slabs[0].lengths == [n] + [1] * (n_kv - 1)
    assert bool(kv.head(0, 0, n).v.eq(1).all())
    assert largest.nbytes < 3 * n * size * 4
