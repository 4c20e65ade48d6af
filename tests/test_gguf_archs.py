"""Architectures of llama.cpp: a file as its converter writes it is the model that was converted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import kvcli
from kvcli.models import source
from kvcli.models.draft_heads import has_mtp
from kvcli.models.gguf import convert
from tests.families import prompt
from tests.gguf_archs import KINDS, write

gguf = pytest.importorskip("gguf")
DTYPE = {"load.dtype": "fp32", "load.device": "cpu", "sample.temperature": 0.0}


def folder_of(tmp_path: Path, name: str) -> tuple[Path, torch.nn.Module]:
    model = write(tmp_path / "tiny.gguf", name)
    found = source.find(str(tmp_path / "tiny.gguf"))
    return convert.convert_if_needed(found, "fp32", tmp_path / "cache", packs=False).path, model


@pytest.mark.parametrize("name", KINDS)
def test_a_converted_file_is_the_model_again(tmp_path: Path, name: str):
    folder, theirs = folder_of(tmp_path, name)
    ours, said = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(said[key] for key in ("missing_keys", "mismatched_keys")), said
    assert all(key.startswith("mtp.") for key in said["unexpected_keys"]), said
    state = ours.state_dict()
    for key, weight in theirs.state_dict().items():
        assert torch.equal(state[key], weight) or torch.allclose(state[key], weight, rtol=1e-6, atol=1e-7), key
    ids = torch.tensor([prompt(37)])
    with torch.inference_mode():
        mine, right = ours.eval()(ids).logits, theirs(ids).logits
    assert torch.allclose(mine, right, rtol=1e-4, atol=1e-4), (mine - right).abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_the_engine_writes_the_text_of_the_model(tmp_path: Path, name: str):
    theirs, ids = write(tmp_path / "tiny.gguf", name), prompt(80)
    with kvcli.load(str(tmp_path / "tiny.gguf"), "exact", DTYPE, cache=tmp_path / "cache") as model:
        mine = list(model.generate(ids, 24).ids)
    theirs.generation_config.eos_token_id = None
    right = theirs.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, use_cache=False)[0, 80:].tolist()
    assert mine == right[: len(mine)]
    assert len(mine) > 3


def test_an_mtp_layer_in_the_file_drafts(tmp_path: Path):
    folder, theirs = folder_of(tmp_path, "qwen35_mtp")
    assert has_mtp(source.find(str(folder)))
    tensors, right = load_file(folder / "model.safetensors"), KINDS["qwen35_mtp"].mtp(theirs)
    assert {key for key in tensors if key.startswith("mtp.")} == right.keys()
    assert all(torch.allclose(tensors[key], weight, atol=1e-6) for key, weight in right.items())
    texts = []
    for spec in ({"spec.method": "off"}, {"spec.method": "mtp"}):
        with kvcli.load(str(tmp_path / "tiny.gguf"), "exact", DTYPE | spec, cache=tmp_path / "cache") as model:
            texts.append(list(model.generate(prompt(37), 12).ids))
    assert texts[0] == texts[1]
