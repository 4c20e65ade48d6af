"""Weights in the blocks of GGUF files on a GPU: the numbers of the gguf package, laid out as lanes load them."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from kvcli.engine.hf.fused_layers import FusedLayer
from kvcli.engine.loading.open_lm import open_lm
from kvcli.fit.plan import subject_of
from kvcli.fit.weights import weigh
from kvcli.kernels import triton_support
from kvcli.kernels.linear_skinny import MOST, Weight, linear_skinny, of_packed, reference
from kvcli.kernels.linear_skinny.module import OnWeight
from kvcli.models import source
from kvcli.models.gguf import convert
from kvcli.models.gguf.blocks import PACKED, packed_bytes
from tests.families import prompt
from tests.gguf_files import write
from tests.kernels.test_gguf_blocks import N, weights, widths
from tests.kernels.test_gpu_layer import Captured, counted
from tests.test_model_probe import our_logits

pytest.importorskip("triton")
import_module("tests.kernels.interpreted")  # before anything that is fused
fused = import_module("kvcli.kernels.linear_skinny.fused")
BF16, FP16 = torch.bfloat16, torch.float16
OFTEN = ("Q4_K", "Q6_K", "Q8_0", "MXFP4")  # of each way of codes and of scales one
KINDS = [pytest.param(kind, marks=[] if kind in OFTEN else pytest.mark.slow) for kind in PACKED]


def on_gpu(kind: str, k: int = 0) -> tuple[Weight, torch.Tensor]:
    """A weight as lanes load it, and its numbers by the gguf package."""
    w, plain = weights(kind, k or widths(kind)[0])
    return of_packed(w), plain


@pytest.mark.parametrize("kind", PACKED)
def test_a_weight_has_the_numbers_of_the_file_and_the_bytes_that_are_foretold(kind: str):
    for k in widths(kind):
        w, plain = on_gpu(kind, k)
        assert torch.equal(reference.weight(w), plain)
        index = torch.tensor([130, 0, 64, 7])
        assert torch.equal(reference.rows(w, index), plain[index])
        assert sum(t.nbytes for t in w.tensors if t is not w.arrivals) == packed_bytes(kind, (N, k), "cuda")


@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_exact_and_a_row_does_not_know_its_neighbours(kind: str, dtype: torch.dtype):
    w, plain = on_gpu(kind, 512 if widths(kind)[0] == 256 else 96)
    x = torch.randn(17, w.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    x[:, 5] *= 50
    got, want = fused.linear(x, w, None, 2, torch.float32), x.double() @ plain.double().T
    assert (got.double() - want).norm() < 4e-6 * want.norm()
    for part in (slice(1), slice(7), slice(16, 17)):
        assert torch.equal(fused.linear(x[part].contiguous(), w, None, 2, torch.float32), got[part])


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_are_multiplied_by_numbers_in_16_bits(kind: str):
    w, plain = on_gpu(kind)
    assert torch.equal(fused.widen(w, 64, N, FP16), plain[64:].to(FP16))
    x = torch.ones(MOST + 1, w.shape[1], dtype=BF16)
    want = x.double() @ plain.double().T
    assert (linear_skinny(x, w).double() - want).norm() < 8e-3 * want.norm()


def test_weights_of_several_formats_are_one_of_the_same_numbers():
    """As q, k and v of a Q4_K_M file are."""
    kinds, parts = ("Q4_K", "Q3_K", "Q6_K", "IQ4_XS"), list[Weight]()
    for kind in (*kinds, "Q8_0"):
        w, _ = weights(kind, 512)
        parts.append(of_packed(replace(w, shape=(128, 512), data=w.data[:2], scale=w.scale[:2])))
    merged = Weight.merged(parts[:4])
    assert merged is not None
    assert (merged.kind, merged.group, merged.shape) == ("blocks8", 16, (512, 512))
    plain = torch.cat([weights(kind, 512)[1][:128] for kind in kinds])
    assert torch.equal(reference.weight(merged), plain)
    x = torch.randn(3, 512).to(BF16)
    want = x.double() @ plain.double().T
    assert (fused.linear(x, merged, None, 2, torch.float32).double() - want).norm() < 4e-6 * want.norm()
    assert Weight.merged([parts[0], parts[4]]) is None  # one has no factors


# ---- in a model ----


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "why_not", lambda _, dtype: "float32" if dtype == torch.float32 else "")


SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1, "vocab_size": 320}
Q4_K_M = ("Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q4_K", "Q6_K")  # q, k, v, o, gate, up, down of half its layers


@pytest.mark.parametrize("is_tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_file_runs_in_its_blocks_and_fit_knows_their_bytes(
    tmp_path: Path, served: None, monkeypatch: pytest.MonkeyPatch, is_tied: bool
):
    theirs = write(tmp_path / "tiny.gguf", "llama", Q4_K_M, ends="Q6_K", **SIZES, tie_word_embeddings=is_tied)
    found = source.find(str(tmp_path / "tiny.gguf"))
    subject = subject_of(found)
    folder = convert.convert_if_needed(found, "bf16", tmp_path / "cache", packs=True, kind="cuda")
    assert folder.path == convert.convert_if_needed(found, "bf16", tmp_path / "cache", packs=True).path
    lm = open_lm(folder, device="cpu", verify=False)
    assert lm.info.parameters == theirs.num_parameters()
    linears = [m for m in lm.model.modules() if isinstance(m, OnWeight)]
    assert len(linears) == 8
    assert not [p for p in lm.model.parameters() if p.dim() > 1 and type(p) is torch.nn.Parameter]
    (layer,) = lm.layers or ()
    assert isinstance(vars(layer)["forward"], FusedLayer)
    x, cos, sin = (torch.randn(1, n).to(BF16) for n in (256, 64, 64))
    its_pass = Captured(lm)
    with counted(monkeypatch) as launches:
        vars(layer)["forward"].run(x, cos, sin, its_pass)
    assert launches.total() == 8, launches
    ids = prompt(9)
    mine = our_logits(lm, ids, 5).float()
    right = theirs(torch.tensor([ids])).logits[0].float()
    assert (mine - right).norm() < 0.03 * right.norm()
    foretold = weigh(subject.held, subject.shape, number=2, quant="none", device="cuda", given=False)
    arrivals = {b.data_ptr(): b.nbytes for key, b in lm.model.named_buffers() if "arrivals" in key or "inv_freq" in key}
    before = lm.info.weight_bytes - sum(arrivals.values())
    assert foretold.memory == pytest.approx(before, rel=0.01)


def test_what_runs_in_its_blocks_is_told_with_its_bytes(tmp_path: Path):
    write(tmp_path / "tiny.gguf", kinds=("Q4_K", "TQ1_0"), intermediate_size=256)
    found = source.find(str(tmp_path / "tiny.gguf"))
    stays, gone = convert.conversion_notes(found, "bfloat16", packs=True, kind="cuda")
    assert stays.endswith(" in the file, 1 MiB on the GPU") or "MiB on the GPU" in stays
    assert gone == "GGUF tensors converted to bfloat16: 14 TQ1_0"
    assert len(convert.conversion_notes(found, "bfloat16", packs=False, kind="cuda")) == 1
