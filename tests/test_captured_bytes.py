"""What recorded passes keep on a device, as it is allocated, against what `kvcli fit` counts for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from kvcli.engine import resources
from kvcli.engine.cuda_graphs import captured_pass
from kvcli.engine.cuda_graphs.captured_passes import CapturedPasses
from kvcli.engine.engine import run_to_end
from kvcli.engine.resources import captured_bytes
from kvcli.engine.sequence.sampler import Sampler
from kvcli.kernels import argmax
from kvcli.kv.tiers.device_tables import MOST_ROWS
from kvcli.methods.drafts.off import Off
from kvcli.models.shape import shape_of
from tests import families, make
from tests.drafters import Right
from tests.fake_device import FakeDevice
from tests.fake_graphs import FakeGraphs

fused = pytest.importorskip("kvcli.kernels.attend_invariant.fused")

T = TypeVar("T")
LARGE = {
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 4000,
}


class Weighed(FakeGraphs):
    """Notes how many bytes are live at most in what it records: what a graph's pool holds."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[int] = []  # by pool: bytes that what was recorded leaves there
        self.pools: list[int] = []  # the most that it ever holds

    def apart(self) -> Any:
        self.kept.append(0)
        self.pools.append(0)
        return super().apart()

    def record(self, work: Callable[[], T], pool: Any = None) -> Any:
        with FakeDevice() as device:
            made = work()
            self.pools[-1] = max(self.pools[-1], self.kept[-1] + device.peak)
            self.kept[-1] += device.live
            del made
        return super().record(work, pool)


def attend(q: Tensor, table: Any, k: Tensor, v: Tensor, tree: Any, scale: float, capacity: int, **_: Any) -> Tensor:
    """Allocates what the fused kernel does (attend_invariant/fused.py)."""
    h, n, _ = q.shape
    scratch = q.new_zeros(fused.scratch_size(h, n, v.shape[2], capacity, tree.path.shape[1]), dtype=torch.float32)
    out, lse = q.new_zeros(n, h, v.shape[2]), q.new_zeros(n, h, dtype=torch.float32)
    del scratch, lse
    return out.transpose(0, 1)


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=0.7, top_p=0.9, seed=1)])
@pytest.mark.parametrize("rows", [1, 8])
def test_captured_passes_hold_what_fit_counts(rows: int, sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a layer has room for the answer and a captured pass's rows, no more."""
    monkeypatch.setattr(captured_pass, "attend_captured", attend)
    monkeypatch.setattr(resources, "STRETCHES", 0)  # torch sums a linear layer in one go
    monkeypatch.setattr(argmax, "why_not", lambda logits: "")  # as on a card, where it makes nothing else
    monkeypatch.setattr(argmax, "argmax", lambda logits: logits.argmax(-1))
    lm, graphs = make.model("llama", torch.bfloat16, **LARGE), Weighed()
    lm.remembers[CapturedPasses] = CapturedPasses(graphs, [rows])
    truth = families.prompt(400, vocab=4000)
    drafter: Any = Off() if rows == 1 else Right(truth, 4000, 3999)
    session = make.session(lm, drafter=drafter, sampler=sampler)
    run_to_end(session.read(truth[:300]))
    run_to_end(session.step((), 64))
    assert not lm.remembers[CapturedPasses].eager
    (slab, *_) = session.cache._slabs.values()  # type: ignore[attr-defined]
    slots = slab.k.shape[0] // len(slab.lengths)
    assert slots == -(-(300 + 64 + MOST_ROWS) // 256) * 256

    shape = shape_of(lm.model.config.get_text_config().to_dict())
    counted = captured_bytes(shape, [rows], slots=slots, number=2, kv_number=2, draws=not sampler.temperature)
    (held,) = graphs.pools
    assert 0.8 * counted < held < 1.02 * counted
