"""RMSNorm on a GPU: the numbers of each form, the bits of a row alone, and only for modules that are one."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from kvcli.kernels import triton_support
from kvcli.kernels.rms_norm import FORMS, RMS, FusedNorm, norm_, reference

pytest.importorskip("triton")
import_module("tests.kernels.interpreted")  # before anything that is fused
fused = import_module("kvcli.kernels.rms_norm.fused")
torch.set_num_threads(1)

TYPES = (torch.bfloat16, torch.float16)
WIDTHS = (131, 768)


def rows(n: int, h: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """And a weight."""
    noise = torch.Generator().manual_seed(h)
    return torch.randn(n, h, generator=noise).to(dtype) * 3, torch.rand(h, generator=noise).to(dtype) + 0.5


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("h", WIDTHS)
@pytest.mark.parametrize("form", FORMS)
def test_forms_round_where_the_reference_does(form: str, h: int, dtype: torch.dtype):
    x, weight = rows(3, h, dtype)
    got, want = fused.rms_norm(x, RMS(weight, 1e-6, form)), reference.rms_norm(x, weight, 1e-6, form)
    assert (got == want).float().mean() > 0.99
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=0)


def differing(norm: Callable[[Tensor], Tensor], x: Tensor) -> list[int]:
    """How many rows there were in passes where one of them was not as among all of x."""
    together = norm(x)
    return [n for n in (1, 5, 16) if not torch.equal(norm(x[-n:]), together[-n:])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_has_the_bits_that_it_has_alone(dtype: torch.dtype):
    """In float32 too, where another order of a sum shows: of what is rounded to 16 bits most is the same."""
    x, weight = (t.to(dtype) for t in rows(33, 131, torch.bfloat16))
    assert differing(lambda some: fused.rms_norm(some, RMS(weight, 1e-6, "round first")), x) == []


class Centred(LlamaRMSNorm):
    """Another norm, by a name that ends alike."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        triton_support, "why_not", lambda device, dtype: "" if dtype in TYPES else "float32 needs full precision"
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("made", "form"), [(LlamaRMSNorm, "round first"), (GemmaRMSNorm, "one more"), (Olmo2RMSNorm, "round last")]
)
def test_a_norm_is_known_by_what_it_does(made: type[nn.Module], form: str, dtype: torch.dtype, served: None):
    root = nn.Sequential(made(768, 1e-6), Centred(768, 1e-6), nn.LayerNorm(768)).to(dtype)
    root[0].weight.data = rows(1, 768, dtype)[1]
    assert norm_(root) == 1
    forward = vars(root[0])["forward"]
    assert isinstance(forward, FusedNorm)
    assert forward.kind[0] == form


def test_rows_of_another_type_go_the_own_way(served: None):
    root = nn.Sequential(LlamaRMSNorm(131, 1e-6)).bfloat16()
    assert norm_(root) == 1
    assert root(torch.ones(2, 131)).dtype == torch.float32
    assert norm_(nn.Sequential(LlamaRMSNorm(5, 1e-6))) == 0


class SigmoidGated(Qwen3_5RMSNormGated):
    """Another function of the gate."""

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return super().forward(hidden_states, torch.ones_like(gate)) * gate.sigmoid()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_norm_of_a_recurrent_layer_takes_its_gate(dtype: torch.dtype, served: None):
    root = nn.Sequential(Qwen3_5RMSNormGated(131, eps=1e-6), SigmoidGated(131, eps=1e-6)).to(dtype)
    (x, weight), gate = rows(33, 131, dtype), rows(33, 131, dtype)[0].flip(0)
    root[0].weight.data = weight
    want = root[0](x, gate)
    assert norm_(root) == 1
    found = root[0](x, gate)
    assert isinstance(vars(root[0])["forward"], FusedNorm)
    torch.testing.assert_close(found, want, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert all(torch.equal(root[0](x[i : i + 1], gate[i : i + 1])[0], found[i]) for i in (0, 7, 32))
