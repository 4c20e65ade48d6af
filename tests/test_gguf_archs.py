"""Architectures of llama.cpp: a file as its converter writes it is the model that was converted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvcli.models import source
from kvcli.models.gguf import convert
from tests.gguf_archs import KINDS, write

gguf = pytest.importorskip("gguf")


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
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
    state = ours.state_dict()
    for key, weight in theirs.state_dict().items():
        assert torch.equal(state[key], weight) or torch.allclose(state[key], weight, rtol=1e-6, atol=1e-7), key
    ids = torch.randint(3, 97, (1, 37), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        mine, right = ours.eval()(ids).logits, theirs(ids).logits
    assert torch.allclose(mine, right, rtol=1e-4, atol=1e-4), (mine - right).abs().max()
