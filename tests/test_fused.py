"""What stands between products and attention made native: which modules are found, and that nothing else changes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcli.engine import lm
from kvcli.engine.engine import call, run
from kvcli.engine.feed import Feed
from kvcli.engine.fused import Fused
from kvcli.engine.lm import LM
from kvcli.engine.rows import Rows
from kvcli.kernels import native
from kvcli.kernels.gated_mlp.module import NativeMlp
from kvcli.kernels.rms_norm.module import NativeNorm, norm_
from kvcli.kv.dense import Dense
from tests.families import build

pytestmark = pytest.mark.skipif(not native.levels(), reason=native.why_not() or "unknown")
# norms, MLPs, whole layers of tiny models of three layers
FOUND = {
    "llama": (7, 3, 3),
    "mistral": (7, 3, 3),
    "qwen2": (7, 3, 3),
    "qwen3": (13, 3, 3),
    "smollm3": (7, 3, 3),
    "gemma2": (13, 3, 3),
    "gemma3": (19, 3, 3),
    "olmo2": (13, 3, 0),
    "granite": (7, 3, 0),
    "cohere2": (0, 3, 0),
    "gpt_oss": (7, 0, 0),
    "starcoder2": (0, 0, 0),
}
NUMBERS = [torch.float32, torch.bfloat16]

torch.set_num_threads(1)


def loaded(name: str, dtype: torch.dtype = torch.float32, quant: str = "none") -> LM:
    found = LM.of(build(name, dtype), quant=quant)
    found.lay_out()
    return found


def counts(model: nn.Module) -> tuple[int, ...]:
    ways = [vars(m).get("forward") for m in model.modules()]
    return tuple(sum(isinstance(way, kind) for way in ways) for kind in (NativeNorm, NativeMlp, Fused))


def logits(of: LM) -> Tensor:
    """[19, V] in two passes."""
    kv, found = Dense(of.shapes, of.dtype), []
    ids = torch.randint(0, of.vocab, (19,), generator=torch.Generator().manual_seed(5)).tolist()
    for a, b in ((0, 12), (12, 19)):
        (made,) = run([Feed(of, Rows.chain(ids[a:b], a), kv, want=range(b - a))])
        found.append(made.logits)
        for layer, fresh in made.fresh.items():
            kv.append(layer, fresh.k, fresh.v, a)
    return torch.cat(found)


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("name", FOUND)
def test_families_are_found_by_what_they_do(name: str, dtype: torch.dtype):
    assert counts(loaded(name, dtype).model) == FOUND[name]


@pytest.mark.parametrize("quant", ["none", "int8"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "smollm3"])
def test_logits_stay_as_they_were(name: str, quant: str, monkeypatch: pytest.MonkeyPatch):
    found = loaded(name, quant=quant)
    assert counts(found.model) == FOUND[name]
    ours = logits(found)
    monkeypatch.setattr(lm, "fuse_", lambda *_: "")
    plain = loaded(name, quant=quant)
    assert counts(plain.model) == (0, 0, 0)
    wanted = logits(plain)
    assert (ours - wanted).norm() <= 1e-5 * wanted.norm()


def _change(monkeypatch: pytest.MonkeyPatch, of: Any, change: Any) -> None:
    own = of.forward
    monkeypatch.setattr(of, "forward", lambda self, *args, **told: change(own(self, *args, **told)))


def test_modules_that_compute_something_else_stay(monkeypatch: pytest.MonkeyPatch):
    from transformers.models.llama import modeling_llama as llama

    with monkeypatch.context() as patched:
        _change(patched, llama.LlamaRMSNorm, lambda y: y * 1.000001)
        assert counts(loaded("llama").model) == (0, 3, 0)
    with monkeypatch.context() as patched:
        _change(patched, llama.LlamaMLP, lambda y: y * 1.0001)
        assert counts(loaded("llama").model) == (7, 0, 0)
    with monkeypatch.context() as patched:
        _change(patched, llama.LlamaDecoderLayer, lambda y: y * 1.000001)
        assert counts(loaded("llama").model) == (7, 3, 0)
    with monkeypatch.context() as patched:
        turn = llama.apply_rotary_pos_emb
        patched.setattr(llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: turn(q, k, cos, -sin))
        assert counts(loaded("llama").model) == (7, 3, 0)


def test_modules_that_want_something_else_stay():
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(48), requires_grad=False), 1e-6

        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return x * gate

    class Pair(Gated):
        def forward(self, x: Tensor, gate: Tensor | None = None) -> Any:
            return x, gate

    assert norm_(nn.ModuleList([Gated(), Pair()])) == 0


def test_a_call_that_is_no_pass_of_ours_goes_through_the_layer_itself():
    model, plain = loaded("llama").model, build("llama")
    model.set_attn_implementation("eager")
    wanted = call(plain, [3, 1, 4, 1, 5])
    assert (call(model, [3, 1, 4, 1, 5]) - wanted).norm() <= 1e-5 * wanted.norm()


def test_rows_of_another_type_are_normed_by_the_module():
    norm: Any = loaded("llama", torch.bfloat16).model.model.norm
    x = torch.randn(3, 48)
    assert torch.equal(norm(x), type(norm).forward(norm, x))


def test_nothing_keeps_a_model():
    found = loaded("llama")
    gone = weakref.ref(found.model)
    gc.disable()
    try:
        del found
        assert gone() is None
    finally:
        gc.enable()


def test_the_model_says_what_was_made_native():
    assert loaded("llama").info.backend.endswith(", 7 norms, 3 MLPs, 3 whole layers fused")
