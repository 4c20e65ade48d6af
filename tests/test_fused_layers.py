"""What stands between products and attention made native: which modules are found, and that nothing else changes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcli.engine.engine import run
from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.engine.hf.cache_shim import call
from kvcli.engine.hf.fused_layers import FusedLayer, RopeTable
from kvcli.engine.hf.lm import LM
from kvcli.engine.hf.model_probe import is_batch_variant, kinds, reduced_model
from kvcli.engine.loading import open_lm
from kvcli.engine.loading.open_lm import install_kernels, wrap_lm
from kvcli.kernels import native, triton_support
from kvcli.kernels.gated_mlp import NativeMlp
from kvcli.kernels.linear_skinny import MOST
from kvcli.kernels.rms_norm import NativeNorm, norm_
from tests import make
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
STRAIGHT = {"llama", "mistral", "qwen2", "qwen3", "smollm3"}
NUMBERS = [torch.float32, torch.bfloat16]

torch.set_num_threads(1)


def loaded(name: str, dtype: torch.dtype = torch.float32, quant: str = "none") -> LM:
    return make.model(name, dtype, quant=quant, kernels=True)


def counts(model: nn.Module) -> tuple[int, ...]:
    ways = [vars(m).get("forward") for m in model.modules()]
    return tuple(sum(isinstance(way, kind) for way in ways) for kind in (NativeNorm, NativeMlp, FusedLayer))


def logits(of: LM) -> Tensor:
    """[19, V] in two passes."""
    kv, found = make.dense(of), []
    ids = torch.randint(0, of.vocab, (19,), generator=torch.Generator().manual_seed(5)).tolist()
    for a, b in ((0, 12), (12, 19)):
        (made,) = run([ForwardRequest(of, Rows.chain(ids[a:b], a), kv, want=range(b - a))])
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
    monkeypatch.setattr(open_lm, "fuse_", lambda *_: "")
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


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("name", FOUND)
def test_models_without_anything_between_their_layers_are_gone_straight_through(name: str, dtype: torch.dtype):
    found = loaded(name, dtype)
    assert (found.direct_forward is not None) == (name in STRAIGHT)
    if found.direct_forward is not None:
        ours = logits(found)
        found.direct_forward = None
        assert torch.equal(ours, logits(found))


@pytest.mark.parametrize(
    "pos", [[0], [254, 255, 256, 257], [7, 8, 8, 9, 9, 9], [255, 300, 5], range(100, 600)], ids=str
)
def test_positions_turn_as_in_the_module_whichever_block_they_lie_in(pos: Any):
    module = loaded("llama").model.model.rotary_emb
    turns = RopeTable(module, torch.empty(0))
    for ours, theirs in zip(turns(pos), module(torch.empty(0), torch.tensor([list(pos)])), strict=True):
        assert torch.equal(ours, theirs[0])
    assert turns.is_fixed(4096)


def test_what_depends_on_the_length_of_the_pass_is_not_remembered():
    class Dynamic(nn.Module):
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            angles = position_ids.unsqueeze(-1) / (1.0 + position_ids.max() // 2048)
            return angles.cos(), angles.sin()

    assert RopeTable(Dynamic(), torch.empty(0)).is_fixed(2048)
    assert not RopeTable(Dynamic(), torch.empty(0)).is_fixed(4096)


def test_a_model_that_does_more_around_its_layers_is_gone_through_as_it_is(monkeypatch: pytest.MonkeyPatch):
    from transformers.models.llama import modeling_llama as llama

    def louder(out: Any) -> Any:
        out.logits = out.logits * 1.01
        return out

    with monkeypatch.context() as patched:
        _change(patched, llama.LlamaForCausalLM, louder)
        assert loaded("llama").direct_forward is None


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


def test_layers_of_a_kind_are_tried_at_its_ends_and_restored(monkeypatch: pytest.MonkeyPatch):
    found = make.model("llama", num_hidden_layers=5)
    layers = list(found.layers or ())
    with reduced_model(found, layers) as tried:
        assert tried == [0, 4]
        assert [bool(vars(layer).get("forward")) for layer in layers] == [False, True, True, True, False]
    assert not any(vars(layer).get("forward") for layer in layers)
    layers[2].self_attn.scaling *= 2  # a setting of its own: a kind of its own
    assert kinds(found, layers) == [[0, 1, 3, 4], [2]]
    layers[3].mlp.act_fn = nn.ReLU()  # which is none of ours
    install_kernels(found)
    assert counts(found.model) == (11, 4, 4)
    assert found.is_row_invariant


def test_a_device_is_tried_where_fused_kernels_serve_it(monkeypatch: pytest.MonkeyPatch):
    found = make.model("llama", torch.bfloat16)
    install_kernels(found)
    assert (found.is_row_invariant, found.max_invariant_rows) == (True, None)
    monkeypatch.setattr(found, "is_on_accelerator", True)
    assert found.max_invariant_rows == MOST
    assert is_batch_variant(found)  # of this one nobody says that its kernels do not look at the shape
    monkeypatch.setattr(triton_support, "why_not", lambda device, dtype: "")
    assert not is_batch_variant(found)


def test_weights_that_cannot_tell_gate_from_up_prove_nothing():
    model = build("llama", num_hidden_layers=4)
    for weight in model.model.layers[0].mlp.parameters():
        weight.data.zero_()
    found = wrap_lm(model)
    install_kernels(found)
    assert counts(found.model) == (9, 0, 0)


def test_a_model_that_is_laid_out_is_saved_as_it_came():
    wanted = build("llama", torch.bfloat16, tie_word_embeddings=False).state_dict()
    model = build("llama", torch.bfloat16, tie_word_embeddings=False)
    install_kernels(wrap_lm(model))
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
