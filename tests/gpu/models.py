"""A random Llama of about a billion weights, made on the device: its arithmetic is that of any model of its size."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests import families


def llama(device: str, is_tiny: bool) -> Any:
    """1.2 billion weights in bfloat16 as Llama 3.2 1B has them, or a tiny one."""
    if is_tiny:
        return families.build("llama", torch.bfloat16, max_position_embeddings=4096)
    config = LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128_256,
        intermediate_size=8192,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
