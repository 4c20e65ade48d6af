"""The GGUF file llama.cpp is given: the same numbers, the right metadata, and refusals by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcli.errors import BadInput, BadModel
from kvcli.models import source
from kvcli.models.catalog import Hashes
from kvcli.models.gguf.convert import KEPT, fingerprint
from tests.families import build
from tests.recipes.gguf_export import VERSION, export, permuted
from tests.twins import flipped, put

gguf = pytest.importorskip("gguf", reason="the gguf package is absent; it comes with the dev extra")


def folder(tmp_path: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> source.Source:
    """A tiny random model of a family, on disk."""
    build(name, dtype, **changes).save_pretrained(tmp_path / "model")
    return source.find(str(tmp_path / "model"))


def read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Metadata, and tensors as float32 in transformers' order of dimensions."""
    reader = gguf.GGUFReader(path)
    tensors = {}
    for t in reader.tensors:
        shape = [int(n) for n in t.shape][::-1]
        numbers = torch.from_numpy(t.data.copy())
        kind = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[t.tensor_type.name]
        tensors[t.name] = numbers.view(kind).reshape(shape).float()
    return {name: field.contents() for name, field in reader.fields.items()}, tensors


def test_numbers_come_back(tmp_path: Path):
    found = folder(tmp_path, "llama")
    weights = build("llama").state_dict()
    meta, tensors = read(export(found, "float32", tmp_path))
    torch.testing.assert_close(tensors["blk.2.ffn_down.weight"], weights["model.layers.2.mlp.down_proj.weight"])
    torch.testing.assert_close(tensors["output.weight"], weights["lm_head.weight"])
    q = weights["model.layers.1.self_attn.q_proj.weight"]
    assert not torch.equal(tensors["blk.1.attn_q.weight"], q)
    torch.testing.assert_close(tensors["blk.1.attn_q.weight"], permuted(q, 4))
    assert len(tensors) == len(weights)
    assert meta["llama.attention.head_count_kv"] == 2
    assert meta["llama.attention.key_length"] == 16
    assert meta["llama.vocab_size"] == 97


def test_a_head_is_permuted_from_halves_to_pairs():
    rows = torch.arange(12).reshape(12, 1)  # two heads of six rows
    assert permuted(rows, 2).flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert permuted(rows.flatten(), 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_norms_are_float32_and_hold_the_runs_numbers(tmp_path: Path, dtype: str, kind: torch.dtype):
    found = folder(tmp_path, "llama")
    weights = build("llama").state_dict()
    path = export(found, dtype, tmp_path)
    _, tensors = read(path)
    for ours, theirs in (("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
                         ("blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight")):  # fmt: skip
        assert torch.equal(tensors[ours], weights[theirs].to(kind).float())
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["blk.0.ffn_up.weight"] == {"bfloat16": "BF16", "float16": "F16"}[dtype]


def test_a_tied_head_is_written_once(tmp_path: Path):
    _, tensors = read(export(folder(tmp_path, "llama", tie_word_embeddings=True), "float32", tmp_path))
    assert "output.weight" not in tensors
    assert "token_embd.weight" in tensors


def test_the_file_is_private_whole_and_written_once(tmp_path: Path):
    found, said = folder(tmp_path, "llama"), list[str]()
    path = export(found, "float32", tmp_path / "cache", said.append)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    before = path.stat().st_mtime_ns
    assert export(found, "float32", tmp_path / "cache", said.append) == path
    assert path.stat().st_mtime_ns == before
    assert len(said) == 1
    assert str(path) in said[0]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_other_weights_make_another_file(tmp_path: Path):
    found = folder(tmp_path, "llama")
    first, file = fingerprint(found, VERSION, Hashes()), found.files[0].path
    put(file, flipped(file.read_bytes(), -9))
    assert fingerprint(source.find(str(tmp_path / "model")), VERSION, Hashes()) != first
    put(file, flipped(file.read_bytes(), -9))
    assert fingerprint(source.find(str(tmp_path / "model")), VERSION, Hashes()) == first


def test_only_the_files_used_last_are_kept(tmp_path: Path):
    found, cache = folder(tmp_path, "llama"), tmp_path / "cache"
    used = export(found, "float16", cache)
    for n in range(KEPT):
        (used.parent / f"old{n}.gguf").touch()
        os.utime(used.parent / f"old{n}.gguf", (n, n))
    os.utime(used, (0, 0))
    assert export(found, "float16", cache) == used  # used again: the last to go
    newest = export(found, "float32", cache)
    left = {file.name for file in used.parent.iterdir()}
    assert left == {newest.name, used.name, *(f"old{n}.gguf" for n in range(2, KEPT))}


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = folder(tmp_path, "llama")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(OSError, match="No space"):
        export(found, "float32", tmp_path / "cache")
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_a_disk_that_is_full_is_said_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = folder(tmp_path, "llama")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(BadInput, match="no room on the disk"):
        export(found, "float32", tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("gemma2", {}, "gemma2 is not one of llama, mistral"),
        ("mistral", {}, "sliding-window"),
        ("qwen2_windowed", {}, "sliding-window"),
        ("llama", {"hidden_act": "gelu"}, "activation is gelu"),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope is linear"),
    ],
)
def test_what_llama_cpp_would_compute_differently_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], says: str
):
    found = folder(tmp_path, name, **changes)
    with pytest.raises(BadModel, match=says) as caught:
        export(found, "float32", tmp_path)
    assert caught.value.code == "gguf_unsupported"
    assert caught.value.try_


def test_a_tensor_that_nothing_takes_is_refused(tmp_path: Path):
    """A bias of the feed-forward part, say: leaving it out would compare another model."""
    found = folder(tmp_path, "llama", mlp_bias=True)
    with pytest.raises(BadModel, match=r"mlp\.\w+_proj\.bias"):
        export(found, "float32", tmp_path)


def test_a_quantized_checkpoint_is_refused(tmp_path: Path):
    found = folder(tmp_path, "llama")
    config = json.loads((found.path / "config.json").read_text())
    found.config["quantization_config"] = config["quantization_config"] = {"quant_method": "bitsandbytes"}
    with pytest.raises(BadModel, match="quantized"):
        export(found, "float32", tmp_path)
