"""Checkpoints as they are downloaded: with parts that see, and packed in few bits. Each runs, or is refused in time."""

from __future__ import annotations

import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvcli.engine.hf.lm import LM
from kvcli.engine.hf.model_probe import _ours
from kvcli.engine.loading import weights
from kvcli.engine.loading.open_lm import open_lm
from kvcli.errors import BadModel, ExitStatus, KvcliError, UsageError
from kvcli.fit.plan import subject_of
from kvcli.fit.weights import weigh
from kvcli.installing import EXTRAS, pip
from kvcli.methods.drafts.ngram import Ngram
from kvcli.models import checkpoint, source
from kvcli.models.checkpoint import CheckpointFormat
from tests.all_families import config_of, lively, ours
from tests.exact.table import prompt
from tests.packed_checkpoints import FORMATS, edit_config, written

ROOT = Path(__file__).parents[1]
SEEING = ("mistral3", "qwen3_vl", "gemma3", "llava")
NEW = 16  # tokens

torch.set_num_threads(1)


def held(lm: LM) -> int:
    """Bytes of weights, without the tables of rotary embeddings."""
    return lm.info.weight_bytes - sum(b.nbytes for name, b in lm.model.named_buffers() if "inv_freq" in name)


def foretold(path: Path, number: int, quant: str = "none") -> int:
    subject = subject_of(source.find(str(path)))
    given = subject.packing.stays("cpu")
    return weigh(subject.held, subject.shape, number=number, quant=quant, device="cpu", given=given).memory


def refused(act: Callable[[], object]) -> KvcliError:
    with pytest.raises((BadModel, UsageError)) as caught:
        act()
    return caught.value


# ---- with parts that see ----


@pytest.mark.parametrize("kind", SEEING)
def test_the_text_of_a_model_that_sees(tmp_path: Path, kind: str):
    """Its text is that of `generate`, and what sees is not read: nothing could be made of it."""
    config = config_of(kind)
    model = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()  # fmt: skip
    text = lively(model, NEW)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    sees = [name for name in stored if "vision_tower" in name or ".visual." in name]
    stored |= dict.fromkeys(sees, torch.zeros(1))
    save_file({n: t.clone() for n, t in stored.items()}, tmp_path / "model.safetensors", metadata={"format": "pt"})

    lm = open_lm(source.find(str(tmp_path)), device="cpu", dtype="fp32")
    assert ours(lm, Ngram(adaptive=False, max=7).drafter(), prompt(), NEW) == text
    assert lm.info.notes == (f"images and audio are not supported: {len(sees)} tensors for them were not loaded",)
    assert foretold(tmp_path, 4) == pytest.approx(held(lm), abs=512)  # buffers of gemma


# ---- packed ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path, "fp8")


def needs(name: str) -> None:
    """Skip where the packages of a format are not installed."""
    for module in ("accelerate", *(["compressed_tensors", "loguru"] if name.startswith("compressed") else [])):
        pytest.importorskip(module)


@pytest.mark.parametrize("name", [*FORMATS, "mxfp4"])
def test_a_quantized_file_gives_the_bits_of_what_it_dequantizes_to(tmp_path: Path, name: str):
    needs(name)
    lm = open_lm(source.find(str(written(tmp_path, name))), device="cpu")
    plain = open_lm(source.find(str(tmp_path / "plain")), device="cpu")
    assert torch.equal(_ours(lm, range(3, 40))[0], _ours(plain, range(3, 40))[0])
    assert held(lm) == held(plain)
    assert "weights were dequantized to bfloat16" in lm.info.notes[-1]


@pytest.mark.parametrize("name", ["fp8", "compressed-int4"])
def test_what_is_dequantized_can_be_quantized_again(tmp_path: Path, name: str):
    needs(name)
    lm = open_lm(source.find(str(written(tmp_path, name))), device="cpu", quant="int8")
    plain = open_lm(source.find(str(tmp_path / "plain")), device="cpu", quant="int8")
    assert torch.equal(_ours(lm, range(3, 40))[0], _ours(plain, range(3, 40))[0])


@pytest.mark.parametrize("name", [*FORMATS, "mxfp4"])
def test_weights_are_counted_not_what_is_stored(tmp_path: Path, name: str):
    packed, plain = source.find(str(written(tmp_path, name))), source.find(str(tmp_path / "plain"))
    assert packed.parameters == plain.parameters


@pytest.mark.parametrize(
    ("settings", "stored"),
    [
        ({"quant_method": "gptq", "bits": 4}, {"qweight": ("I32", (8, 64)), "qzeros": ("I32", (2, 8)),
                                               "scales": ("F16", (2, 64)), "g_idx": ("I32", (64,))}),
        ({"quant_method": "gptq", "bits": 8}, {"qweight": ("I32", (16, 64)), "qzeros": ("I32", (2, 16))}),
        ({"quant_method": "awq", "bits": 4}, {"qweight": ("I32", (64, 8)), "qzeros": ("I32", (2, 8))}),
        ({"load_in_4bit": True}, {"weight": ("U8", (2048, 1)), "weight.absmax": ("U8", (64,)),
                                  "weight.quant_state.bitsandbytes__nf4": ("U8", (90,))}),
        ({"load_in_8bit": True}, {"weight": ("I8", (64, 64)), "SCB": ("F32", (64,))}),
    ],
    ids=["gptq", "gptq8", "awq", "bnb4", "bnb8"],
)  # fmt: skip
def test_a_quantized_layer_counts_the_weights_that_it_stands_for(settings: dict[str, Any], stored: dict[str, Any]):
    packing = CheckpointFormat.of({"quantization_config": settings})
    held = {f"model.layers.0.self_attn.q_proj.{part}": of for part, of in stored.items()}
    assert sum(packing.weights(name, *of) for name, of in held.items()) == 64 * 64


@pytest.mark.parametrize("quant", ["none", "int8"])
@pytest.mark.parametrize("name", [*FORMATS, "mxfp4"])
def test_fit_knows_what_a_quantized_file_dequantizes_to(tmp_path: Path, name: str, quant: str):
    """By headers alone: no package of the format is asked for."""
    mine, plain = foretold(written(tmp_path, name), 2, quant), foretold(tmp_path / "plain", 2, quant)
    assert mine == (pytest.approx(plain, rel=0.01) if name == "mxfp4" else plain)  # whose plain experts lie turned over


@pytest.mark.parametrize(
    ("settings", "missing", "types"),
    [
        ({"quant_method": "fp8"}, ["accelerate"], pip("accelerate")),
        ({"quant_method": "mxfp4"}, ["accelerate"], pip("accelerate")),
        ({"quant_method": "compressed-tensors"}, ["compressed-tensors"], pip("compressed-tensors")),
        ({"load_in_4bit": True}, ["accelerate", "bitsandbytes"], pip("accelerate", "bitsandbytes")),
        ({"quant_method": "gptq", "bits": 4}, ["optimum", "gptqmodel"], pip("optimum", "gptqmodel")),
        ({"quant_method": "awq", "bits": 4}, ["gptqmodel", "accelerate"], pip("gptqmodel", "accelerate")),
    ],
)
def test_a_package_that_is_missing_is_named_before_a_weight_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], missing: list[str], types: str
):
    edit_config(folder, quantization_config=settings)
    monkeypatch.setattr(checkpoint, "find_spec", lambda name: None)
    monkeypatch.setattr(weights, "loader_of", lambda *_: None)  # which nothing can be loaded with
    error = refused(lambda: open_lm(source.find(str(folder)), device="cpu"))
    assert (error.code, error.exit, error.detail["missing"]) == ("package_missing", ExitStatus.BAD_MODEL, missing)
    assert types in error.try_
    assert not any("download" in line for line in error.try_)


def test_on_a_gpu_what_stays_quantized_is_placed_by_a_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint, "find_spec", lambda name: None if name == "accelerate" else name)
    hqq = CheckpointFormat.of({"quantization_config": {"quant_method": "hqq"}})
    assert (hqq.missing("cpu"), hqq.missing("cuda")) == ([], ["accelerate"])


def test_without_bitsandbytes_its_quantization_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    error = refused(lambda: weights.quantize_with_bitsandbytes(torch.nn.Linear(2, 2), "nf4", torch.device("cpu")))
    assert (error.code, error.try_[0]) == ("package_missing", pip("bitsandbytes"))


def test_what_extras_bring():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"] | {
        "docs": [line for line in project["dependencies"] if line.startswith(EXTRAS["docs"])]
    }
    for name, packages in EXTRAS.items():
        assert tuple(line.partition(">")[0] for line in extras[name]) == packages
    assert pip("lxml") == f"{shlex.quote(sys.executable)} -m pip install lxml"  # no other Python's


@pytest.mark.parametrize("method", ["modelopt", "nvfp4", "torchao", "eetq", "unnamed"])
def test_what_nothing_reads_is_no_plain_numbers(folder: Path, method: str):
    """transformers would take the numbers without their scales."""
    edit_config(folder, quantization_config={"quant_method": method} if method != "unnamed" else {})
    error = refused(lambda: open_lm(source.find(str(folder)), device="cpu"))
    assert error.code == "model_unsupported"
    assert f"quantized as {method}" in error.message


def test_a_package_of_a_package_is_named_too(folder: Path):
    error = weights._unloadable(source.find(str(folder)), "ModuleNotFoundError: No module named 'loguru'")
    assert (error.code, error.try_) == ("package_missing", (pip("-U", "loguru"),))
    error = weights._unloadable(source.find(str(folder)), "ImportError: requires x: `pip install 'x>=3'`")
    assert error.try_ == (pip("-U", "x>=3"),)  # which no shell takes for a file
    error = weights._unloadable(source.find(str(folder)), "ImportError: y is old: pip install -U y>=0.46. Then again")
    assert error.try_ == (pip("-U", "y>=0.46"),)


def test_numbers_that_stay_quantized_where_kernels_read_them(monkeypatch: pytest.MonkeyPatch):
    fp8 = CheckpointFormat.of({"text_config": {"quantization_config": {"quant_method": "fp8"}}})
    assert fp8.unpacks("cpu")
    monkeypatch.setattr(checkpoint, "find_spec", lambda name: name)
    assert fp8.stays("cuda")
    assert fp8.unpacks("cpu")
