"""Random Llamas, made on the device: their arithmetic is that of any model of their size."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvcli.engine.hf.lm import LM
from tests import families


def llama(device: str, is_tiny: bool) -> Any:
    """1.2 billion weights in bfloat16 as Llama 3.2 1B has them, or a tiny one."""
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
    return _random(device, is_tiny, tie_word_embeddings=True, **shape)


def eight(device: str, is_tiny: bool, layers: int = 32) -> Any:
    """So many layers of those of Llama 3.1 8B, or a tiny one."""
    shape = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": layers, "head_dim": 128}
    return _random(device, is_tiny, tie_word_embeddings=False, **shape)


def bytes_of_a_pass(lm: LM) -> int:
    """Bytes of weights that every pass reads: all but an input embedding that is not the output layer as well."""
    embedding = lm.model.get_input_embeddings().weight
    is_read = getattr(lm.model.get_output_embeddings(), "weight", None) is embedding
    is_here = embedding.device == lm.device
    return lm.info.weight_bytes - (0 if is_read or not is_here else embedding.nbytes)


def _random(device: str, is_tiny: bool, **shape: Any) -> Any:
    if is_tiny:
        return families.build("llama", torch.bfloat16, max_position_embeddings=4096)
    config = LlamaConfig(
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=131_072 + 1024,
        eos_token_id=None,
        **shape,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
