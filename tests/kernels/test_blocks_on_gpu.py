"""Weights in the blocks of GGUF files on a GPU: the numbers of the gguf package, laid out as lanes load them."""

from __future__ import annotations

from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from kvcli.engine.hf.fused_layers import fuse_
from kvcli.engine.loading.weights import load_weights
from kvcli.fit.plan import subject_of
from kvcli.fit.weights import weigh
from kvcli.kernels import module_probe, triton_support
from kvcli.kernels.linear import KernelLinear, NativeWeight
from kvcli.kernels.linear_epilogue import Heads
from kvcli.kernels.linear_epilogue.module import merged, share_
from kvcli.kernels.linear_quantized import QuantizedWeight, of_blocks, packed_weights
from kvcli.kernels.linear_quantized.formats import arrange_panels, arrange_scales
from kvcli.kernels.linear_skinny import MOST, Weight, linear_skinny, module, of_packed, reference
from kvcli.kernels.linear_skinny.module import SkinnyPacked
from kvcli.models import source
from kvcli.models.family import read_config
from kvcli.models.gguf import convert
from kvcli.models.gguf.blocks import PACKED, packed_bytes
from tests import make
from tests.families import prompt
from tests.gguf_files import SCALES, blocks, write
from tests.kernels.test_gguf_blocks import N, weights, widths
from tests.kernels.test_gpu_layer import counted, launches_of_layer

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


def first(kind: str, n: int, k: int) -> QuantizedWeight:
    """A weight of any number of outputs, in panels."""
    of = PACKED[kind]
    raw = blocks(kind, n, k) if kind in SCALES else quantize(torch.randn(n, k).numpy() / 4, GGMLQuantizationType[kind])
    parts = arrange_panels(of.codes(raw), of.format.bits), arrange_scales(of.scales(raw), of.format)
    return of_blocks(torch.cat([part.flatten() for part in parts]), of.format, (n, k))


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
    kinds = ("Q4_K", "Q3_K", "Q6_K", "IQ4_XS")
    parts = [of_packed(first(kind, 128, 512)) for kind in (*kinds, "Q8_0")]
    whole = Weight.merged(parts[:4])
    assert whole is not None
    assert (whole.kind, whole.group, whole.shape) == ("blocks8", 16, (512, 512))
    plain = torch.cat([reference.weight(part) for part in parts[:4]])
    assert torch.equal(reference.weight(whole), plain)
    x = torch.randn(3, 512).to(BF16)
    want = x.double() @ plain.double().T
    assert (fused.linear(x, whole, None, 2, torch.float32).double() - want).norm() < 4e-6 * want.norm()
    assert Weight.merged([parts[0], parts[4]]) is None  # one has no factors


# ---- in a model ----


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "why_not", lambda _, dtype: "float32" if dtype == torch.float32 else "")


SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 1, "vocab_size": 320}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 1}
# of half its layers: down, as the table of embeddings takes a turn; q, k, v, o, gate, up
Q4_K_M = ("Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q4_K")


def in_blocks(path: Path) -> tuple[source.Source, Any]:
    """The file and its model, with linear layers as a GPU has them."""
    found = source.find(str(path))
    folder = convert.convert_if_needed(found, "bf16", path.parent / "cache", keeps_on="cuda")
    assert folder.path == convert.convert_if_needed(found, "bf16", path.parent / "cache", keeps_on="cpu").path
    return found, load_weights(folder, read_config(folder, False), "bf16", torch.device("cpu"), False)[0]


def _stored(these: list[Weight]) -> dict[int, int]:
    """Bytes of the tensors of weights, of which several may share one."""
    return {t.data_ptr(): t.nbytes for w in these for t in w.tensors if t is not w.arrivals}


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_file_is_loaded_in_its_blocks_and_fit_knows_their_bytes(
    tmp_path: Path, served: None, monkeypatch: pytest.MonkeyPatch, is_tied: bool
):
    theirs = write(tmp_path / "tiny.gguf", "llama", Q4_K_M, ends="Q8_0", **SIZES, tie_word_embeddings=is_tied)
    found, model = in_blocks(tmp_path / "tiny.gguf")
    linears = [m for m in model.modules() if isinstance(m, KernelLinear)]
    assert [one.as_weight.kind for one in linears] == ["blocks4"] * 2 + ["blocks8"] + ["blocks4"] * 3 + ["blocks8"] * 2
    table = model.get_input_embeddings().weight
    assert isinstance(table, NativeWeight)
    assert (table.form.memory.data_ptr() == linears[-1].data.data_ptr()) == is_tied  # type: ignore[attr-defined]
    assert not [p for p in model.parameters() if p.dim() > 1 and not isinstance(p, NativeWeight)]
    assert packed_weights(model) + sum(p.numel() for p in model.parameters()) == theirs.num_parameters()
    monkeypatch.setattr(module, "linear_skinny", reference.linear_skinny)
    ids = torch.tensor([prompt(9)])
    mine, right = model(ids).logits.float(), theirs(ids).logits
    assert (mine - right).norm() < 0.03 * right.norm()
    subject = subject_of(found)
    foretold = weigh(subject.held, subject.shape, number=2, quant="none", device="cuda", given=False)
    (layer,) = model.model.layers
    attends, mlp, pairs = layer.self_attn, layer.mlp, list[int]()
    for parts in ([attends.q_proj, attends.k_proj, attends.v_proj], [mlp.gate_proj, mlp.up_proj]):
        product = merged(parts)
        assert product is not None
        pairs.append(sum(_stored([product.weight]).values()))
        share_(parts, product)
    held = [w.as_weight for w in linears] + [table.form.weight]  # type: ignore[attr-defined]
    plain = sum(p.nbytes for p in model.parameters() if p.dim() == 1)
    assert foretold.memory == sum(_stored(held).values()) + plain
    assert foretold.packing == max(pairs)  # beside the parts, until these are freed


def test_heads_of_several_formats_are_one_launch(served: None, monkeypatch: pytest.MonkeyPatch):
    """q and k in 4 bits and v in 6, as in every second layer of a Q4_K_M file; the modules share the joined weight."""
    layers = [SkinnyPacked(of_packed(first(kind, 64, 256)), None, BF16) for kind in ("Q4_K", "Q4_K", "Q6_K")]
    assert module_probe.kind(layers[0]) == module_probe.kind(layers[1]) != module_probe.kind(layers[2])
    x = torch.randn(3, 256).to(BF16)
    apart = [reference.linear_skinny(x, layer.as_weight, None) for layer in layers]
    product = merged(layers)
    assert product is not None
    with counted(monkeypatch) as launches:
        q, kv = import_module("kvcli.kernels.linear_epilogue.fused").heads(x, product, Heads(1, 64), None, None)
    assert launches.total() == 1, launches
    share_(layers, product)
    for found, want, layer in zip((q[:, 0], kv[:, 0], kv[:, 1]), apart, layers, strict=True):
        assert (found.float() - want.float()).norm() <= 2 * torch.finfo(BF16).eps * want.float().norm()
        assert layer.data is product.weight.data
    index = torch.tensor([5, 63])
    want = reference.rows(of_packed(first("Q6_K", 64, 256)), index)
    assert torch.equal(layers[2].weight.form.rows(index), want)


@pytest.mark.slow
def test_a_layer_of_a_file_takes_eight_launches(tmp_path: Path, served: None, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "tiny.gguf", "llama", Q4_K_M, ends="Q8_0", **SIZES)
    lm = make.wrap_lm(in_blocks(tmp_path / "tiny.gguf")[1])
    fuse_(lm, list(lm.layers or ()))
    launches = launches_of_layer(lm, monkeypatch)
    assert launches.total() == 8, launches


def test_what_runs_in_its_blocks_is_told_with_its_bytes(tmp_path: Path):
    write(tmp_path / "tiny.gguf", kinds=("Q4_K", "TQ1_0"), intermediate_size=256)
    found = source.find(str(tmp_path / "tiny.gguf"))
    stays, gone = convert.conversion_notes(found, "bfloat16", keeps_on="cuda")
    assert stays == "GGUF tensors that stay quantized: 12 Q4_K, 6 Q8_0; 0 MiB in the file, 0 MiB on the GPU"
    tensors = [t for file in found.files for t in file.tensors.values() if t.dtype == "TQ1_0"]
    size = 2 * sum(prod(t.shape) for t in tensors) >> 20
    assert gone == f"GGUF tensors converted to bfloat16: 12 TQ1_0; 0 MiB in the file, {size} MiB on the GPU"
    (all_of_it,) = convert.conversion_notes(found, "bfloat16", keeps_on="")
    assert all_of_it == "GGUF tensors converted to bfloat16: 12 Q4_K, 6 Q8_0, 12 TQ1_0"
