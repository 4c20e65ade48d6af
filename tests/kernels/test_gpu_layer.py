"""Decoder layers in few launches, as on a GPU: found by what they do, counted, and captured with the text of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from kvcli.engine import forward
from kvcli.engine.cuda_graphs.captured_passes import CapturedPasses, captured_passes
from kvcli.engine.engine import run_to_end
from kvcli.engine.hf.cache_shim import RunningPass, call
from kvcli.engine.hf.fused_layers import FusedLayer, RecordingPass, direct_forward_of, fuse_
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.weights import quantize_for_gpu
from kvcli.kernels import triton_support
from kvcli.kernels.attend_captured import attend_captured
from kvcli.kernels.attend_invariant.tables import Table, Tree
from kvcli.kernels.linear_skinny.module import lay_out_skinny_
from kvcli.methods.drafts.off import Off
from tests import families, make
from tests.drafters import Bush
from tests.fake_graphs import FakeGraphs

pytest.importorskip("triton")
import_module("tests.kernels.interpreted")  # before what is fused
interpreter = import_module("triton.runtime.interpreter")
torch.set_num_threads(1)

TINY = {"num_hidden_layers": 1, "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "why_not", lambda _, dtype: "float32" if dtype == torch.float32 else "")


def loaded(family: str, dtype: torch.dtype = torch.bfloat16, quant: str = "", **changes: Any) -> LM:
    """With the layers of a GPU."""
    windows = {"layer_types": ["sliding_attention"]} if family == "gemma2" else {}
    lm = make.model(family, dtype, **TINY | windows | changes)
    if quant:
        quantize_for_gpu(lm.model.model.layers, quant, torch.device("cpu"))
    lay_out_skinny_(lm.model)
    fuse_(lm, list(lm.layers or ()))
    return lm


def logits(lm: LM, rows: int = 5) -> Tensor:
    return call(lm.model, families.prompt(rows, vocab=61), range(rows), its_pass=RecordingPass())


@pytest.mark.slow
def test_a_layer_that_computes_something_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama as llama

    own = llama.LlamaDecoderLayer.forward
    monkeypatch.setattr(llama.LlamaDecoderLayer, "forward", lambda self, *args, **told: own(self, *args, **told) * 1.02)
    (layer,) = loaded("llama").layers or ()
    assert "forward" not in vars(layer)


# ---- launches ----


class Launches(TorchDispatchMode):
    """Counts what a GPU would be asked for: kernels, and operations of torch that are neither views nor memory."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, given = op(*args, **kwargs or {}), {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        is_view = all(t.untyped_storage()._cdata in given for t in _tensors(made)) and not op._schema.is_mutable
        if not is_view and "empty" not in op.overloadpacket.__name__:
            self.counted[op.overloadpacket.__name__] += 1
        return made


def _tensors(of: Any) -> list[Tensor]:
    return [t for t in tree_leaves(of) if isinstance(t, Tensor)]


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    own, mode = interpreter.GridExecutor.__call__, Launches()

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        mode.counted[self.fn.__name__] += 1
        with _disable_current_modes():
            own(self, *args, **kwargs)

    with monkeypatch.context() as patched, mode:
        patched.setattr(interpreter.GridExecutor, "__call__", launch)
        yield mode.counted


class Captured(RunningPass):
    """Attends as a captured pass of one row does, over 20 slots."""

    def __init__(self, lm: LM) -> None:
        of, device = lm.shapes[0], torch.device("cpu")
        start = torch.arange(of.n_kv_heads, dtype=torch.int32) * 64
        k, v = torch.randn(2, of.n_kv_heads * 64, of.k_dim).to(lm.dtype)
        pos = torch.arange(64, dtype=torch.int32).repeat(of.n_kv_heads)
        self._table, self._tree = Table(k, v, pos, start, torch.full_like(start, 20)), Tree.chain([20], device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: Any, sink: Tensor | None) -> Tensor:
        window, softcap = params.window, params.softcap
        given = q, self._table, k, v, self._tree, params.scale
        return attend_captured(*given, capacity=64, softcap=softcap, window=window, sink=sink)


def launches_of_layer(lm: LM, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    (layer,) = lm.layers or ()
    fused = vars(layer)["forward"]
    assert isinstance(fused, FusedLayer)
    x, cos, sin = (torch.randn(1, n).to(lm.dtype) for n in (lm.model.config.hidden_size, *[lm.shapes[0].k_dim] * 2))
    its_pass = Captured(lm)
    with counted(monkeypatch) as launches:
        fused.run(x, cos, sin, its_pass)
    return launches


@pytest.mark.parametrize(
    ("family", "quant", "of_a_layer"),
    [
        ("llama", "int4", 8),
        pytest.param("qwen3", "", 8, marks=pytest.mark.slow),
        pytest.param("gemma2", "int8", 9, marks=pytest.mark.slow),
    ],
)
def test_layers_are_found_by_what_they_do(
    family: str, quant: str, of_a_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Separate modules, which share the weights, give nearly the same, in 32 to 41 launches."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32} if quant else {}
    lm = loaded(family, quant=quant, **sizes)
    launches = launches_of_layer(lm, monkeypatch)
    assert launches.total() == of_a_layer, launches
    ours = logits(lm)
    for module in lm.model.modules():
        vars(module).pop("forward", None)
    theirs = logits(lm)
    assert (ours - theirs).float().norm() <= 0.02 * theirs.float().norm()


# ---- captured ----


def written(lm: LM, drafter: Any, new: int) -> list[int]:
    session = make.session(lm, make.dense(lm, step=16), drafter, chunk=64)
    run_to_end(session.read(families.prompt(4, vocab=61)))
    while len(session.ids) < 4 + new:
        run_to_end(session.step((), 4 + new - len(session.ids)))
    return session.ids[4:]


@pytest.mark.parametrize("is_drafted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_captured_passes_go_straight_through_the_layers(is_drafted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of single launches, plain and drafted: replays find every number where it was."""
    lm, graphs = loaded("llama"), FakeGraphs()
    want = written(lm, Off(), 2)
    lm.direct_forward = direct_forward_of(lm, list(lm.layers or ()))
    assert lm.direct_forward is not None
    lm.remembers[CapturedPasses] = CapturedPasses(graphs)
    own = interpreter.GridExecutor.__call__

    def run(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            own(*args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *args, **kwargs: graphs.launch(run, args, kwargs))
    monkeypatch.setattr(forward, "call", None)  # no model is called
    drafter = Bush([*families.prompt(4, vocab=61), *want], 61, 60) if is_drafted else Off()
    assert written(lm, drafter, 2) == want
    assert (dict(captured_passes(lm).eager), captured_passes(lm).why) == ({}, "")
    assert graphs.replays > 1
