"""Tiny random models of every supported family, with weights sharp enough that each family's peculiarity shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

WINDOW = 11  # tokens, of every sliding layer
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
PAIRS = ["sliding_attention", "full_attention"]
_PAIRS = {"num_hidden_layers": 4, "layer_types": PAIRS * 2, "sliding_window": WINDOW}
_GLOBAL = {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 8}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip
_SHARP = {"rope_type": "default", "rope_theta": 50.0}
_LONGCAT = {
    "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 56, "expert_ffn_hidden_size": 24, "moe_topk": 2,
    "zero_expert_num": 2, "head_dim": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model_type, the settings that make it tiny, and changes that must be visible in its logits."""

    name: str
    config: dict[str, Any]
    windows: tuple[int | None, ...] = (None, None, None)
    matters: tuple[dict[str, Any], ...] = ()  # a pass that ignored one of these settings must fail
    model_type: str = ""
    zeroed: tuple[str, ...] = field(default=())  # parameters, by the end of their names, that must matter too
    has_tables: bool = True  # keys turn as a fixed table says


_WINDOWED = {"sliding_window": 4096}
_list = [
    Family("llama", {"head_dim": 16}),
    Family("mistral", {"sliding_window": WINDOW, "head_dim": 16}, (WINDOW,) * 3, (_WINDOWED,)),
    Family("mistral_full", {"sliding_window": None, "head_dim": 16}, model_type="mistral"),
    Family("qwen2", {}, zeroed=("k_proj.bias",)),
    Family(
        "qwen2_windowed",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        (None, WINDOW, WINDOW),
        (_WINDOWED, {"max_window_layers": 2}),
        model_type="qwen2",
    ),
    Family("qwen3", {"head_dim": 16}, zeroed=("q_norm.weight",)),
    Family("qwen3_moe", {"head_dim": 16, **_MOE}),
    Family("phi3", {"sliding_window": WINDOW}, (WINDOW,) * 3, (_WINDOWED,)),
    Family(
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 9,
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": False,  # tied, a random model repeats one token for ever
        },
        (WINDOW, None, WINDOW),
        (_WINDOWED, {"attn_logit_softcapping": None}, {"final_logit_softcapping": None}, {"query_pre_attn_scalar": 16}),
    ),
    Family(
        "gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 9,
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            },
            "tie_word_embeddings": False,
        },
        (WINDOW, None, WINDOW),
        (_WINDOWED, {"query_pre_attn_scalar": 16}),
        model_type="gemma3_text",
    ),
    Family("olmo2", {}, zeroed=("k_norm.weight",)),
    Family(
        "granite",
        {
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.6,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
        },
        matters=tuple({f"{k}_multiplier": 1.0} for k in ("attention", "residual", "embedding")),
    ),
    Family(
        "smollm3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": False},
        matters=({"no_rope_layers": [1, 1, 1]},),
    ),
    Family("glm4", {"head_dim": 16, "attention_bias": True}, zeroed=("k_proj.bias",)),
    Family(
        "cohere2",
        {"sliding_window": WINDOW, "layer_types": _MIXED, "logit_scale": 0.5},
        (WINDOW, None, WINDOW),
        (_WINDOWED,),
    ),
    Family("starcoder2", {"sliding_window": WINDOW, "tie_word_embeddings": False}, (WINDOW,) * 3, (_WINDOWED,)),
    Family(
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
        (WINDOW, None, WINDOW),
        (_WINDOWED,),
        zeroed=("sinks",),
    ),
    Family("stablelm", {"hidden_size": 64}, zeroed=("input_layernorm.bias",)),
    Family("nemotron", {"head_dim": 16}, zeroed=("input_layernorm.bias",)),
    # layers of several sizes, and keys that layers share; keys and values of several sizes
    Family(
        "gemma4",
        {**_PAIRS, **_GLOBAL, "attention_k_eq_v": True, "tie_word_embeddings": False, "vocab_size_per_layer_input": 97},
        (WINDOW, None) * 2,
        (_WINDOWED,),
        model_type="gemma4_text",
    ),
    Family(
        "gemma4_shared",
        {
            **_PAIRS,
            **_GLOBAL,
            "num_kv_shared_layers": 2,
            "tie_word_embeddings": False,
            "vocab_size_per_layer_input": 97,
        },
        (WINDOW, None) * 2,
        (_WINDOWED, {"num_kv_shared_layers": 0}),
        model_type="gemma4_text",
    ),
    Family(
        "gemma3n",
        {
            **_PAIRS,
            "head_dim": 16,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [56] * 4,
            "tie_word_embeddings": False,
        },
        (WINDOW, None) * 2,
        (_WINDOWED, {"num_kv_shared_layers": 0}),
        model_type="gemma3n_text",
    ),
    Family(
        "mimo",
        {**_PAIRS, **_MOE, "n_routed_experts": 5, "head_dim": 16, "v_head_dim": 12},
        (WINDOW, None) * 2,
        (_WINDOWED,),
        zeroed=("sinks",),
        model_type="mimo_v2_flash",
    ),
    Family("deepseek_v2", {**_LATENT, "q_lora_rank": None, "rope_parameters": _SHARP}, has_tables=False),
    Family("deepseek_v3", {**_LATENT, "head_dim": 8}, has_tables=False),
    Family("glm4_moe_lite", {**_LATENT, "head_dim": 8}, has_tables=False),
    Family(
        "minicpm3", {**_LATENT, "scale_emb": 1, "dim_model_base": 48, "tie_word_embeddings": False}, has_tables=False
    ),
    Family("youtu", _LATENT, has_tables=False),
    Family("longcat_flash", {**_LATENT, **_LONGCAT}, (None,) * 4, has_tables=False),
]
LATENT = [f.name for f in _list if f.config.get("kv_lora_rank")]
FAMILIES = {f.name: f for f in _list}
WHOLE = {"longcat_flash"}  # two layers that attend in each of its own: rows cannot be stopped between them
GATED = sorted(FAMILIES.keys() - WHOLE)


def config_of(name: str, **changes: Any) -> Any:
    """The tiny config of a family, with `changes` applied."""
    family = FAMILIES[name]
    kind = family.model_type or name
    return AutoConfig.for_model(kind, **{**COMMON, **family.config, **changes})


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny random model of a family, on the CPU, ready to run."""
    model = AutoModelForCausalLM.from_config(config_of(name, **changes), attn_implementation="eager")
    sharpen(model, seed)
    if dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # torch's grouped product has no float64
    return model.to(dtype).eval().requires_grad_(False)


@torch.no_grad()
def sharpen(model: PreTrainedModel, seed: int = 0) -> None:
    """Weights that give attention scores of a few units and logits of about ten.

    The usual initialisation keeps scores near zero: there a forgotten softcap, sink or norm changes nothing visible.
    """
    noise = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        fresh = torch.randn(weight.shape, generator=noise, dtype=torch.float64)
        if weight.dim() >= 2:
            weight.copy_((fresh * 0.25).to(weight.dtype))
        elif "norm" in name and name.endswith("weight"):
            weight.add_((fresh * 0.4).to(weight.dtype))  # around one, or around zero where a family stores w - 1
        else:
            weight.copy_((fresh * (1.5 if name.endswith("sinks") else 0.5)).to(weight.dtype))  # sinks, biases
    model.tie_weights()


def prompt(n: int, vocab: int = 97, seed: int = 1) -> list[int]:
    """`n` random tokens, none of them special."""
    return torch.randint(3, vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
