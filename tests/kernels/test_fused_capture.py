"""A captured pass whose attention and storing are the fused kernels, interpreted: the text of the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from kvcli.engine.cuda_graphs import captured_pass
from kvcli.engine.cuda_graphs.captured_passes import CapturedPasses, captured_passes
from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.engine import run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.kernels import triton_support
from kvcli.kernels.attend_captured import attend_captured, reference
from kvcli.kernels.attend_invariant.tables import Table, Tree
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.methods.drafts.lookahead import Lookahead
from kvcli.methods.drafts.off import Off
from kvcli.methods.drafts.self_draft import SelfDraft
from tests import families, make
from tests.drafters import Bush, Moody
from tests.fake_graphs import FakeGraphs

pytest.importorskip("triton")
import_module("tests.kernels.interpreted")  # before what is fused
OPS = ("attend_invariant", "append_kv", "argmax")
FUSED = {name: import_module(f"kvcli.kernels.{name}.fused") for name in (*OPS, "rms_norm")}
delta = import_module("kvcli.kernels.gated_delta.fused")

SINGLE = {"num_hidden_layers": 1, "vocab_size": 61}


def written(lm: LM, drafter: Any, new: int) -> list[int]:
    kv = make.dense(lm, step=16)
    session = make.session(lm, kv, drafter, chunk=64)
    run_to_end(session.read(families.prompt(30, vocab=61)))
    while len(session.ids) < 30 + new:
        run_to_end(session.step((), 30 + new - len(session.ids)))
    return session.ids[30:]


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_fused_kernels_drop_in(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16, whose numbers are near enough to the reference's that a short text is the same; plain rows and a tree."""
    windowed = {"layer_types": ["sliding_attention"]} if family == "gemma2" else {}
    lm, graphs = make.model(family, torch.float16, **SINGLE, **windowed), FakeGraphs()
    want = written(lm, Off(), 6)
    lm.remembers[CapturedPasses] = CapturedPasses(graphs)
    monkeypatch.setattr(triton_support, "why_not", lambda device, dtype: "")
    asked = [opaque(monkeypatch, graphs, FUSED[name], name) for name in OPS]
    assert written(lm, Off(), 6) == want
    assert written(lm, Bush([*families.prompt(30, vocab=61), *want], 61, 60), 6) == want
    assert all(calls() for calls in asked)
    assert (dict(captured_passes(lm).eager), captured_passes(lm).why) == ({}, "")


def test_fused_kernels_run_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated delta net between layers of attention: outputs by the kernel, and the state by it once more."""
    few = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "vocab_size": 61}
    want = written(make.model("qwen3_5_text", torch.float16, **few), Off(), 6)
    monkeypatch.setattr(triton_support, "why_not", lambda device, dtype: "")
    lm, graphs = make.model("qwen3_5_text", torch.float16, **few), FakeGraphs()
    assert lm.recurrent_layers.are_by_row
    lm.remembers[CapturedPasses] = CapturedPasses(graphs)
    for name in (*OPS, "rms_norm"):
        opaque(monkeypatch, graphs, FUSED[name], name)
    asked = [opaque(monkeypatch, graphs, delta, name) for name in ("gated_delta", "advance_", "causal_conv")]
    assert written(lm, Moody([*families.prompt(30, vocab=61), *want], 61, 60), 6) == want
    assert all(calls() for calls in asked)
    assert (dict(captured_passes(lm).eager), captured_passes(lm).why) == ({}, "")


@pytest.mark.parametrize(
    "settings",
    [
        Lookahead(adaptive=False, view="stream", sinks=2, recent=5),
        pytest.param(SelfDraft(adaptive=False), marks=pytest.mark.slow),
    ],
)
def test_fused_kernels_read_views_and_draft_trees(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookahead rows behind a tree, and rows that see draft tokens of earlier passes."""
    lm, graphs = make.model("llama", torch.float16, **SINGLE), FakeGraphs()
    want = written(lm, Off(), 4)
    lm.remembers[CapturedPasses] = CapturedPasses(graphs)
    monkeypatch.setattr(triton_support, "why_not", lambda device, dtype: "")
    asked = [opaque(monkeypatch, graphs, FUSED[name], name) for name in OPS]
    assert written(lm, settings.drafter(pair=ModelPair(lm, lm)), 4) == want
    assert all(calls() for calls in asked)
    assert (dict(captured_passes(lm).eager), captured_passes(lm).why) == ({}, "")


@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("is_kept", [False, True])
def test_attention_to_lower_tiers_is_merged_and_other_rows_are_kept(
    parts: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the reference in float64: a tree with rows of earlier passes, a window, attention sinks."""
    g, (h, kv, n, m, d, slots) = torch.Generator().manual_seed(1), (4, 2, 4, 9, 16, 40)

    def made(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float16)

    start, length = torch.tensor([[0, slots], [33, 40]], dtype=torch.int32)
    pos = torch.arange(2 * slots, dtype=torch.int32) % slots
    table = Table(made(2 * slots, d), made(2 * slots, d), pos, start, length, start)
    path = torch.tensor([[0, 2, 5, 6, -1], [0, 3, 7, -1, -1]], dtype=torch.int32)
    tree = Tree(path, *torch.tensor([[0, 0, 1, -1], [2, 3, 2, 0]], dtype=torch.int32), made(m + n).int() * 0 + 44)
    given = (made(h, n, d), table, made(kv, m, d), made(kv, m, d), tree, 0.3, slots)
    before = [PartialAttention(made(h, n, d).float(), made(h, n).float()) for _ in range(parts)]
    more = {"window": 30, "sink": made(h).float(), "before": before, "out": made(h, n, d) if is_kept else None}
    kept = None if not is_kept else more["out"].clone()
    doubled = [PartialAttention(part.out.double(), part.lse.double()) for part in before]
    wide = [replace(table, k=table.k.double(), v=table.v.double()) if t is table else t for t in given]
    wide = [t.double() if isinstance(t, Tensor) else t for t in wide]
    want = reference.attend_captured(*wide, **{**more, "before": doubled, "out": None})  # type: ignore[arg-type]
    monkeypatch.setattr(triton_support, "why_not", lambda device, dtype: "")
    found = attend_captured(*given, **more)
    assert (found - want)[:, :3].abs().max() < 2e-3
    assert kept is None or torch.equal(found[:, 3], kept[:, 3])


class Forgetful(FakeGraphs):
    """Holds nothing of what it recorded, as a device does not; nothing is done again."""

    def record(self, work: Callable[[], Any], pool: Any = None) -> tuple[Any, Callable[[], None]]:
        return work(), lambda: None


def test_what_becomes_slots_is_held_by_its_captured_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels know rows by address alone: of those let go the memory would be that of what draws, which runs first."""
    lm, made, own = make.model("llama", torch.float16, **SINGLE), list[Any](), captured_pass.storing
    lm.remembers[CapturedPasses] = CapturedPasses(Forgetful())

    def storing(tables: Any, fresh: Any) -> Any:
        made.extend(ref(t) for pair in fresh for t in pair)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_support, "why_not", lambda device, dtype: "")
            _, alive = own(tables, fresh)
        return lambda *_: None, alive

    monkeypatch.setattr(captured_pass, "storing", storing)
    session = make.session(lm, make.dense(lm, step=16))
    run_to_end(session.read(families.prompt(9, vocab=61)))
    run_to_end(session.step((), 1))
    assert not captured_passes(lm).eager
    assert len(made) == 2
    assert all(t() is not None for t in made)


def opaque(monkeypatch: pytest.MonkeyPatch, graphs: FakeGraphs, module: Any, name: str) -> Callable[[], int]:
    """Recorded as one operation, whatever the interpreter makes of it; how often it ran."""
    own, n = getattr(module, name), 0

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal n
        n += 1
        with _disable_current_modes():
            return own(*args, **kwargs)

    monkeypatch.setattr(module, name, lambda *args, **kwargs: graphs.launch(kernel, args, kwargs))
    return lambda: n
