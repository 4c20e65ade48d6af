"""Tiny random models some of whose layers keep a state, with memories long enough for faults in them to show."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING

VOCAB = 257
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}
_THREE = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
_TURNS = {"layer_types": ["linear_attention", "full_attention"] * 2}
_CONVS = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA | _THREE,
    "qwen3_5_moe_text": _DELTA | _MOE | _THREE,
    "qwen3_next": _DELTA | _MOE | _THREE | {"mlp_only_layers": [], "decoder_sparse_step": 1},
    "lfm2": _CONVS | {"block_multiple_of": 8, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": _CONVS | _MOE | {"num_dense_layers": 1},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],  # a mixer behind the last layer that attends
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 8,
        "expand": 1,
    },
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64, "mamba_d_head": 8},  # each layer does both
    "granitemoehybrid": _MAMBA
    | {
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
    },
    "bamba": _MAMBA | {"attn_layer_indices": [1, 3]},
    "olmo_hybrid": _DELTA | _TURNS,
    "kimi_linear": _TURNS
    | {
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}


@torch.no_grad()
def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 1, **changes: Any) -> PreTrainedModel:
    """A tiny random model of a family, on the CPU, ready to run."""
    told = {**_COMMON, **HYBRIDS[name], **changes}
    if name == "nemotron_h":
        del told["num_hidden_layers"]
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**told), attn_implementation="eager")
    noise = torch.Generator().manual_seed(seed)
    for key, weight in sorted(model.named_parameters()):
        if key.endswith("A_log"):  # by their usual start, tiny Mamba2 models forget within a few tokens
            weight.fill_(-2.0)
        elif key.endswith("dt_bias"):
            weight.fill_(0.5)
        elif weight.dim() > 1:
            weight.copy_(torch.randn(weight.shape, generator=noise) * 0.15)
        elif "norm" not in key:
            weight.copy_(torch.randn(weight.shape, generator=noise) * 0.02)
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval().requires_grad_(False)


def prompt(n: int, seed: int = 1) -> list[int]:
    """`n` random tokens."""
    return torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
