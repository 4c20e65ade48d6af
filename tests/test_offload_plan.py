"""A store for a GPU that is not there: which way to host memory it takes, and what room it leaves a pass."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcli.engine.engine import run_to_end
from kvcli.engine.resources import pass_bytes
from kvcli.errors import BadConfig
from kvcli.fit.available_memory import AvailableMemory
from kvcli.kernels import dispatch, triton_support
from kvcli.kv.cache import plan as tiers
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.cache.tiered_cache import TieredCache
from kvcli.kv.capacity import CacheFootprint
from kvcli.kv.formats.kivi import Kivi
from kvcli.kv.offload.host_access import AutoAccess
from kvcli.kv.slots import AttentionParams, alike
from kvcli.kv.sparse.settings import FullAttention
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.tiers.disk import ExtentTier
from kvcli.kv.tiers.host import PIECE, HostTier, Mappings
from kvcli.methods.sparse.sketch import Sketch
from kvcli.settings.profile import load_profile
from kvcli.settings.schema import Kv, Memory
from tests import families, make
from tests.fake_bus import FakeBus
from tests.fake_device import FakeDevice

GIB = 1 << 30
HOST = Memory(host="4GiB")


def plan(memory: Memory = HOST, **more: Any) -> tiers.CachePlan:
    """Of an 8B shape."""
    of: dict[str, Any] = {"kv": Kv(), "recall": FullAttention(), **more}
    shapes, attention_params = alike(32, 8, 128), [AttentionParams(0.1)] * 32
    return tiers.CachePlan(
        shapes, torch.bfloat16, torch.device("cuda"), memory=memory, attention_params=attention_params, chunk=512, **of
    )


@pytest.fixture
def _served(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a card and kernels for it are."""
    monkeypatch.setattr(triton_support, "why_not", lambda device, dtype: "")
    name = "kvcli.kernels.attend.fused"
    monkeypatch.setattr(dispatch, "choose", lambda *_: SimpleNamespace(__module__=name))
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(fits=lambda d, e: d <= 256))  # type: ignore[misc]


def way(memory: Memory = HOST, **more: Any) -> tuple[str, dict[str, Any]]:
    found = plan(memory, **more)._way()
    return getattr(found, "func", found).__name__, getattr(found, "keywords", {})  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_served")
def test_the_way_is_what_the_setting_asks_for() -> None:
    name, how = way()
    assert name == "AutoAccess"
    assert how["unserved"] == ""
    assert how["rates"] is not None
    assert way(replace(HOST, host_access="zero-copy")) == ("AutoAccess", {"unserved": "", "rates": None})
    assert way(replace(HOST, host_access="cpu"))[0] == "CpuAttention"
    assert way(replace(HOST, host_access="stream"))[0] == "StreamedCopy"
    assert way(kv=Kv(k_bits=4, v_bits=4))[0] == "CpuAttention"
    for reach in ("zero-copy", "stream"):
        with pytest.raises(BadConfig) as found:
            way(replace(HOST, host_access=reach), kv=Kv(k_bits=4))  # type: ignore[arg-type]
        assert found.value.code == "no_such_reach"


def test_where_no_kernel_serves_answers_go_by_query_and_asking_for_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_support, "why_not", lambda device, dtype: "triton is not installed")
    name, how = way()
    assert name == "AutoAccess"
    assert how["unserved"] == "triton is not installed"
    with pytest.raises(BadConfig, match=r"memory\.host_access"):
        way(replace(HOST, host_access="zero-copy"))


def test_a_reach_without_host_memory_is_refused() -> None:
    with pytest.raises(BadConfig) as refused:
        load_profile("exact").replace(memory={"host_access": "cpu"})
    assert "host memory holds no KV" in "".join(refused.value.lines)
    for below in ({"host": "1GiB"}, {"disk": "1GiB"}):  # a file is read by way of host memory
        assert load_profile("exact").replace(memory={"host_access": "cpu", **below}).memory.host_access == "cpu"


@pytest.mark.parametrize("recall", [FullAttention(), Sketch()])
def test_room_is_left_for_a_pass(recall: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GIB, 12 * GIB))
    free, kept = plan(recall=recall), plan(recall=recall, working=2 * GIB)
    assert free.room.free - kept.room.free == 2 * GIB
    # of a card no more is left than `kvcli fit` leaves, or less than it promised would have room
    assert free.room.free == 8 * GIB - AvailableMemory("cuda:0", 8 * GIB, total=12 * GIB).kept_free - 2 * PIECE
    assert 0 < kept.room.on_device < free.room.on_device  # type: ignore[operator]
    held = kept.room.on_device * kept.room.wide + 2 * GIB  # type: ignore[operator]
    assert held < 8 * GIB


@pytest.mark.parametrize("counts", [True, False])
def test_a_promised_context_is_reached_because_room_counts_a_pass(counts: bool) -> None:
    """On a device with so much memory beside the weights, whatever is not in host memory, at every moment."""
    lm = make.model("llama", torch.float64)
    sizes, bus = (lm.shapes, lm.dtype), FakeBus()
    per_slot = sum(shape.n_kv_heads * (shape.k_dim + shape.v_dim) * 8 + 4 for shape in lm.shapes)
    free, working, buffers = 600 * per_slot, pass_bytes(lm, 16, 1, lm.dtype), 2 << 20
    of_kv = Kv(group=4, sinks=2), Kivi(), HOST, FullAttention(), lm.shapes, lm.attention_params
    found = CacheFootprint(*of_kv, 8, "cuda").capacity(16, free if counts else free + working, GIB)
    host = HostTier(ExtentTier(Mappings(*sizes, bus)), "cpu", AutoAccess, lambda _: bus)
    below = [TierLevel(host, found.in_host, 4, attend_async=host.attend_async)]
    kv = TieredCache(Dense(*sizes, step=64), below, holds=found.on_device, group=4, sinks=2)
    session = make.session(lm, kv, every=64, chunk=16)
    with (
        FakeDevice(budget=free + working + buffers),
        nullcontext() if counts else pytest.raises(torch.OutOfMemoryError),
    ):
        run_to_end(session.read(families.prompt(2600)))
    assert (session.committed == 2599) == counts


def test_a_pass_takes_more_with_more_rows_and_scores_where_no_kernel_is() -> None:
    lm = make.model()
    few, many = (pass_bytes(lm, rows, 1, torch.float32) for rows in (1, 64))
    assert 0 < few < many
    fresh = 64 * 2 * lm.n_layers * lm.n_kv_heads * lm.head_dim * 4
    assert many > fresh
