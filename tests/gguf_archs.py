"""Tiny models of many architectures as GGUF files, converted as llama.cpp's own scripts convert checkpoints.

Written from those scripts (conversion/*.py there), not from kvcli's table: names come from the gguf package's map of
transformers' names, keys from its writer, and each change of numbers is spelled as the script of that family spells it.
Everything is F32, so that the model and the file have the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFWriter
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests import families, hybrids
from tests.gguf_files import VOCAB, finish, names_of, put, tensors_of, vocabulary

Tensors = Iterator[tuple[str, Tensor]]  # by transformers' names, or names that the map knows beside them


def _same(name: str, w: Tensor, c: Any) -> Tensors:
    yield name, w


# ---- changes of numbers, per family ----


def _permute(w: Tensor, heads: int) -> Tensor:
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def _llama(name: str, w: Tensor, c: Any) -> Tensors:
    if name.endswith(("q_proj.weight", "q_proj.bias")):
        w = _permute(w, c.num_attention_heads)
    if name.endswith(("k_proj.weight", "k_proj.bias")):
        w = _permute(w, c.num_key_value_heads)
    yield from _moe(name, w, c)


def _moe(name: str, w: Tensor, c: Any) -> Tensors:
    """Of experts in one tensor, gate and up apart."""
    if name.endswith("experts.gate_up_proj"):
        n = w.shape[-2] // 2
        yield name.replace("gate_up_proj", "gate_proj.weight"), w[..., :n, :].contiguous()
        yield name.replace("gate_up_proj", "up_proj.weight"), w[..., n:, :].contiguous()
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", w
    elif name.endswith("e_score_correction_bias"):
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), w
    elif name.endswith("expert_bias"):
        yield f"{name}.bias", w
    elif name.endswith("conv.conv.weight"):
        yield name, w.squeeze(1)
    else:
        yield name, w


def _plus_one(name: str, w: Tensor, c: Any) -> Tensors:
    yield name, w + 1 if name.endswith("norm.weight") else w


def _next(name: str, w: Tensor, c: Any) -> Tensors:
    if name.endswith(".A_log"):
        w = -torch.exp(w)
    elif name.endswith(".dt_bias"):
        name = name.rpartition(".dt_bias")[0] + ".dt_proj.bias"
    elif "conv1d" in name:
        w = w.squeeze()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        w = w + 1
    if "in_proj_qkvz.weight" in name:
        k, v, n = c.linear_key_head_dim, c.linear_value_head_dim, c.linear_num_key_heads
        r = c.linear_num_value_heads // n
        rows = w.permute(1, 0).contiguous().view(-1, n, 2 * k + 2 * r * v)
        parts = [p.contiguous().view(c.hidden_size, -1) for p in torch.split(rows, [k, k, r * v, r * v], dim=-1)]
        base = name.replace("linear_attn.in_proj_qkvz.weight", "")
        yield f"{base}linear_attn.in_proj_qkv.weight", torch.cat(parts[:3], dim=-1).permute(1, 0).contiguous()
        yield f"{base}linear_attn.in_proj_z.weight", parts[3].permute(1, 0).contiguous()
        return
    yield from _moe(name, w, c)


def _reorder(w: Tensor, dim: int, k: int, per_k: int, size: int) -> Tensor:
    shape = list(w.shape)
    dim = dim % len(shape)
    split = w.reshape(*shape[:dim], k, per_k, size, *shape[dim + 1 :])
    return split.transpose(dim, dim + 1).contiguous().reshape(*shape)


def _qwen35(name: str, w: Tensor, c: Any) -> Tensors:
    n, d, size = c.linear_num_key_heads, c.linear_key_head_dim, c.linear_value_head_dim
    per_k = c.linear_num_value_heads // n
    if ".in_proj_qkv." in name:
        w = torch.cat([w[: 2 * d * n], _reorder(w[2 * d * n :], 0, n, per_k, size)])
    elif ".in_proj_z." in name:
        w = _reorder(w, 0, n, per_k, size)
    elif ".in_proj_b." in name or ".in_proj_a." in name:
        w = _reorder(w, 0, n, per_k, 1)
    elif ".A_log" in name or ".dt_bias" in name:
        w = _reorder(w.unsqueeze(-1), 0, n, per_k, 1).squeeze(-1)
    elif ".conv1d" in name:
        w = w.squeeze()
        w = torch.cat([w[: 2 * d * n], _reorder(w[2 * d * n :], 0, n, per_k, size)])
    elif ".out_proj." in name:
        w = _reorder(w, 1, n, per_k, size)
    yield from _next(name, w, c)


def _gpt_oss(name: str, w: Tensor, c: Any) -> Tensors:
    if "sinks" in name:
        name += ".weight"
    if name.endswith("gate_up_proj_bias"):
        yield name.replace("gate_up_proj_bias", "gate_proj.bias"), w[..., ::2]
        yield name.replace("gate_up_proj_bias", "up_proj.bias"), w[..., 1::2]
    elif name.endswith("gate_up_proj"):
        w = w.transpose(-1, -2)
        yield name.replace("gate_up_proj", "gate_proj.weight"), w[:, ::2, :]
        yield name.replace("gate_up_proj", "up_proj.weight"), w[:, 1::2, :]
    elif name.endswith("down_proj_bias"):
        yield name.replace("down_proj_bias", "down_proj.bias"), w
    elif name.endswith("down_proj"):
        yield f"{name}.weight", w.transpose(-1, -2)
    else:
        yield name, w


def _gemma4(name: str, w: Tensor, c: Any) -> Tensors:
    if name.endswith("layer_scalar"):
        name += ".weight"
    if ".experts." in name and not name.endswith(".weight"):
        name += ".weight"
    bid = [*name.split("."), ""][2]
    if name.endswith("router.scale"):
        name = f"blk.{bid}.ffn_gate_inp.scale"
    elif ".per_expert_scale" in name:
        name = f"blk.{bid}.ffn_down_exps.scale"
    yield name, w


def _mamba2(name: str, w: Tensor, c: Any) -> Tensors:
    if name.endswith(".dt_bias"):
        name = name.rpartition(".dt_bias")[0] + ".dt_proj.bias"
    if "conv1d" in name:
        w = w.squeeze()
    elif name.endswith((".A_log", ".D")):
        w = w.reshape(*w.shape, 1)
    elif name.endswith("mamba.norm.weight"):
        inner = c.mamba_n_heads * c.mamba_d_head
        w = w.reshape(c.mamba_n_groups, inner // c.mamba_n_groups)
    yield name, -torch.exp(w) if name.endswith(".A_log") else w


def _granite_hybrid(name: str, w: Tensor, c: Any) -> Tensors:
    bid = [*name.split("."), ""][2]
    exps, shared = ("_exps", "_shexp") if c.num_local_experts else ("", "")
    if name.endswith("experts.gate_up_proj"):
        gate, up = w.chunk(2, dim=-2)
        yield f"blk.{bid}.ffn_gate{exps}.weight", gate
        yield f"blk.{bid}.ffn_up{exps}.weight", up
    elif name.endswith("experts.down_proj"):
        yield f"blk.{bid}.ffn_down_exps.weight", w
    elif name.endswith("router.weight"):
        yield f"blk.{bid}.ffn_gate_inp.weight", w
    elif name.endswith("shared_mlp.input_linear.weight"):
        gate, up = w.chunk(2, dim=-2)
        yield f"blk.{bid}.ffn_gate{shared}.weight", gate
        yield f"blk.{bid}.ffn_up{shared}.weight", up
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield f"blk.{bid}.ffn_down{shared}.weight", w
    elif ".mamba." in name:
        yield from _mamba2(name, w, c)
    else:
        yield from _llama(name, w, c)


def _deepseek(name: str, w: Tensor, c: Any) -> Tensors:
    if name.endswith("kv_b_proj.weight"):
        kv = w.view(c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, w.shape[-1])
        k, v = torch.split(kv, [c.qk_nope_head_dim, c.v_head_dim], dim=1)
        yield name.replace("kv_b_proj", "k_b_proj"), k.transpose(1, 2).contiguous()
        yield name.replace("kv_b_proj", "v_b_proj"), v.contiguous()
    else:
        yield from _moe(name, w, c)


# ---- keys, per family ----


def _base(w: GGUFWriter, c: Any) -> None:
    """Those that every script writes, from the same settings."""

    def has(*names: str) -> Any:
        return next((getattr(c, n) for n in names if getattr(c, n, None) is not None), None)

    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    if (n := has("intermediate_size")) is not None:
        w.add_feed_forward_length(n)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if kind in ("linear", "yarn") and factor is not None:
        w.add_rope_scaling_type(gguf.RopeScalingType(kind))
        w.add_rope_scaling_factor(factor)
    if kind == "yarn":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if (fast := rope.get("beta_fast")) is not None:
            w.add_rope_scaling_yarn_beta_fast(fast)
        if (slow := rope.get("beta_slow")) is not None:
            w.add_rope_scaling_yarn_beta_slow(slow)
    if "mrope_section" in c.rope_parameters:
        w.add_rope_dimension_sections([*c.rope_parameters["mrope_section"], 0])
    w.add_rope_freq_base(rope["rope_theta"])
    if (near := c.rope_parameters.get("sliding_attention")) is not None:
        w.add_rope_freq_base_swa(near["rope_theta"])
    if (eps := has("rms_norm_eps", "norm_eps")) is not None:
        w.add_layer_norm_rms_eps(eps)
    if (eps := has("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")) is not None:
        w.add_layer_norm_eps(eps)
    if (n := has("num_local_experts", "num_experts")) is not None:
        w.add_expert_count(n)
    if (n := has("num_experts_per_tok", "num_experts_per_token", "top_k_experts")) is not None:
        w.add_expert_used_count(n)
    if (n := has("n_group")) is not None:
        w.add_expert_group_count(n)
    if (n := has("topk_group")) is not None:
        w.add_expert_group_used_count(n)
    if (n := has("head_dim")) is not None:
        w.add_key_length(n)
        w.add_value_length(n)


def _head(c: Any) -> int:
    return getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads


def _partial(usual: float) -> Callable[[GGUFWriter, Any], None]:
    def put_it(w: GGUFWriter, c: Any) -> None:
        w.add_rope_dimension_count(int(_head(c) * c.rope_parameters.get("partial_rotary_factor", usual)))

    return put_it


def _llama_keys(w: GGUFWriter, c: Any) -> None:
    w.add_vocab_size(c.vocab_size)
    w.add_rope_dimension_count(_head(c))


def _moe_keys(w: GGUFWriter, c: Any) -> None:
    w.add_expert_feed_forward_length(c.moe_intermediate_size)
    if (n := getattr(c, "shared_expert_intermediate_size", None)) is not None:
        w.add_expert_shared_feed_forward_length(n)


def _gemma_keys(w: GGUFWriter, c: Any) -> None:
    w.add_sliding_window(c.sliding_window)
    if c.final_logit_softcapping:
        w.add_final_logit_softcapping(c.final_logit_softcapping)


def _gemma4_keys(w: GGUFWriter, c: Any) -> None:
    far = c.per_layer_config[str(c.layer_types.index("full_attention"))]
    head, heads = far["head_dim"], far.get("num_key_value_heads", c.num_key_value_heads)
    _gemma_keys(w, c)
    w.add_shared_kv_layers(c.num_kv_shared_layers)
    w.add_embedding_length_per_layer_input(c.hidden_size_per_layer_input or 0)
    slides = [kind == "sliding_attention" for kind in c.layer_types]
    w.add_sliding_window_pattern(slides)
    _again(w, "attention.key_length", head)
    _again(w, "attention.value_length", head)
    w.add_key_length_swa(c.head_dim)
    w.add_value_length_swa(c.head_dim)
    if c.moe_intermediate_size is not None:
        w.add_expert_feed_forward_length(c.moe_intermediate_size)
    if c.use_double_wide_mlp:
        first = c.num_hidden_layers - c.num_kv_shared_layers
        widths = [c.intermediate_size * (1 if i < first else 2) for i in range(c.num_hidden_layers)]
        _again(w, "feed_forward_length", widths)
    if heads != c.num_key_value_heads:
        counts = [c.num_key_value_heads if s else heads for s in slides]
        _again(w, "attention.head_count_kv", counts)
    w.add_rope_dimension_count(head)
    w.add_rope_dimension_count_swa(c.head_dim)
    turned = int(head * c.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    factors = [1.0] * turned + [1e30] * (head // 2 - turned)
    w.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def _again(w: GGUFWriter, key: str, value: Any) -> None:
    """A key that the base has written is written anew."""
    for shard in w.kv_data:
        shard.pop(f"{w.arch}.{key}", None)
    put(w, f"{w.arch}.{key}", value)


def _delta_keys(w: GGUFWriter, c: Any) -> None:
    w.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
    w.add_ssm_state_size(c.linear_key_head_dim)
    w.add_ssm_group_count(c.linear_num_key_heads)
    w.add_ssm_time_step_rank(c.linear_num_value_heads)
    w.add_ssm_inner_size(c.linear_value_head_dim * c.linear_num_value_heads)
    w.add_full_attention_interval(4)
    _partial(0.25)(w, c)
    if hasattr(c, "moe_intermediate_size"):
        _moe_keys(w, c)


def _oss_keys(w: GGUFWriter, c: Any) -> None:
    w.add_sliding_window(c.sliding_window)
    w.add_expert_feed_forward_length(c.intermediate_size)


def _phi3_keys(w: GGUFWriter, c: Any) -> None:
    rope = c.rope_parameters
    _partial(1.0)(w, c)
    w.add_sliding_window(c.sliding_window or 0)
    w.add_rope_scaling_orig_ctx_len(c.original_max_position_embeddings)
    if rope["rope_type"] == "longrope":
        scale = c.max_position_embeddings / c.original_max_position_embeddings
        w.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(c.original_max_position_embeddings))))
        for name in ("long", "short"):
            w.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))


def _granite_keys(w: GGUFWriter, c: Any) -> None:
    _llama_keys(w, c)
    w.add_attention_scale(c.attention_multiplier)
    w.add_embedding_scale(c.embedding_multiplier)
    w.add_residual_scale(c.residual_multiplier)
    w.add_logit_scale(c.logits_scaling)


def _granite_hybrid_keys(w: GGUFWriter, c: Any) -> None:
    _granite_keys(w, c)
    w.add_expert_shared_feed_forward_length(c.shared_intermediate_size)
    w.add_ssm_conv_kernel(c.mamba_d_conv)
    w.add_ssm_state_size(c.mamba_d_state)
    w.add_ssm_group_count(c.mamba_n_groups)
    w.add_ssm_inner_size(c.mamba_n_heads * c.mamba_d_head)
    w.add_ssm_time_step_rank(c.mamba_n_heads)
    attends = [kind == "full_attention" for kind in c.layer_types]
    _again(w, "attention.head_count_kv", [c.num_key_value_heads if a else 0 for a in attends])
    w.add_rope_scaling_finetuned(c.position_embedding_type == "rope")


def _lfm2_keys(w: GGUFWriter, c: Any) -> None:
    _again(w, "attention.head_count_kv", [c.num_key_value_heads if k != "conv" else 0 for k in c.layer_types])
    w.add_vocab_size(c.vocab_size)
    w.add_shortconv_l_cache(c.conv_L_cache)
    if hasattr(c, "num_dense_layers"):
        w.add_expert_feed_forward_length(c.moe_intermediate_size)
        w.add_leading_dense_block_count(c.num_dense_layers)
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _mistral3_keys(w: GGUFWriter, c: Any) -> None:
    _llama_keys(w, c)
    if c.model_type == "ministral3":
        w.add_rope_scaling_yarn_log_mul(c.rope_parameters["mscale_all_dim"])
        w.add_attn_temperature_scale(c.rope_parameters["llama_4_scaling_beta"])


def _glm_moe_keys(w: GGUFWriter, c: Any) -> None:
    _partial(0.5)(w, c)
    _routed_keys(w, c)


def _routed_keys(w: GGUFWriter, c: Any) -> None:
    _again(w, "expert_count", c.n_routed_experts)
    w.add_expert_feed_forward_length(c.moe_intermediate_size)
    w.add_expert_shared_count(c.n_shared_experts)
    w.add_leading_dense_block_count(c.first_k_dense_replace)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    w.add_expert_weights_scale(c.routed_scaling_factor)
    w.add_expert_weights_norm(c.norm_topk_prob)


def _deepseek_keys(w: GGUFWriter, c: Any) -> None:
    _routed_keys(w, c)
    _again(w, "attention.head_count_kv", 1)
    if c.q_lora_rank is not None:
        w.add_q_lora_rank(c.q_lora_rank)
    w.add_kv_lora_rank(c.kv_lora_rank)
    _again(w, "attention.key_length", c.kv_lora_rank + c.qk_rope_head_dim)
    _again(w, "attention.value_length", c.kv_lora_rank)
    w.add_key_length_mla(c.qk_nope_head_dim + c.qk_rope_head_dim)
    w.add_value_length_mla(c.v_head_dim)
    w.add_rope_dimension_count(c.qk_rope_head_dim)
    if (scale := c.rope_parameters.get("mscale_all_dim")) is not None:
        w.add_rope_scaling_yarn_log_mul(0.1 * scale)


def _stablelm_keys(w: GGUFWriter, c: Any) -> None:
    _partial(0.25)(w, c)
    w.add_parallel_residual(c.use_parallel_residual)


def _nemotron_keys(w: GGUFWriter, c: Any) -> None:
    w.add_layer_norm_eps(c.norm_eps)
    _partial(0.5)(w, c)


def _cohere_keys(w: GGUFWriter, c: Any) -> None:
    w.add_logit_scale(c.logit_scale)
    w.add_sliding_window(c.sliding_window)
    w.add_vocab_size(c.vocab_size)
    w.add_rope_dimension_count(_head(c))
    w.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _no_keys(w: GGUFWriter, c: Any) -> None:
    pass


@dataclass(frozen=True)
class Kind:
    """A family of the tests' tiny models, and how llama.cpp converts it."""

    family: str
    arch: str
    change: Callable[[str, Tensor, Any], Tensors] = _same
    keys: Callable[[GGUFWriter, Any], None] = _no_keys
    config: dict[str, Any] = field(default_factory=dict)
    mtp: Callable[[PreTrainedModel], dict[str, Tensor]] | None = None  # tensors of an MTP layer, by transformers' names


def mtp(model: PreTrainedModel) -> dict[str, Tensor]:
    """An MTP layer in the names of Qwen3.5, like the last layer."""
    n, hidden = model.config.num_hidden_layers, model.config.hidden_size
    like = {k.removeprefix(f"model.layers.{n - 1}."): v for k, v in model.state_dict().items() if f".{n - 1}." in k}
    sizes = {"fc.weight": (hidden, 2 * hidden)}
    sizes |= {f"{name}.weight": (hidden,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    sizes |= {f"layers.0.{name}": tuple(weight.shape) for name, weight in like.items()}
    noise = torch.Generator().manual_seed(7)
    return {f"mtp.{name}": torch.randn(shape, generator=noise) * 0.2 for name, shape in sizes.items()}


def _behind(name: str, n: int) -> str:
    """Name of an MTP layer's tensor as the converter has it: that of a layer behind the last."""
    parts = name.split(".", 3)
    if parts[1] == "layers":
        return f"model.layers.{n + int(parts[2])}.{parts[3]}"
    names = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    return f"blk.{n}.nextn.{names.get(parts[1], 'shared_head_norm')}.{parts[2]}"


_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 64,
    "long_factor": [1.0, 2.0, 3.0, 4.5],
    "short_factor": [1.0, 1.25, 1.5, 1.75],
}
_MINISTRAL = {
    "head_dim": 16,
    "rope_parameters": {
        **_YARN,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
        "beta_fast": 32.0,
    },
}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_AXES = {"rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}}
_HALF = {**_PLAIN, "partial_rotary_factor": 0.5}
_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
_ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
           "first_k_dense_replace": 1, "n_shared_experts": 1}  # fmt: skip
_SPARSE = {"norm_topk_prob": True}
_PER_LAYER = {"vocab_size_per_layer_input": VOCAB, "final_logit_softcapping": 8.0}
_GEMMA4_MOE = {
    "final_logit_softcapping": 8.0,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
KINDS = {
    "llama_biased": Kind("llama", "llama", _llama, _llama_keys, {"attention_bias": True}),
    "llama_yarn": Kind("llama", "llama", _llama, _llama_keys, {"rope_parameters": _YARN}),
    "mixtral": Kind("mixtral", "llama", _llama, _llama_keys, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": Kind("qwen2", "qwen2"),
    "qwen3": Kind("qwen3", "qwen3"),
    "qwen2moe": Kind("qwen2_moe", "qwen2moe", _moe, _moe_keys, _MOE),
    "qwen3moe": Kind("qwen3_moe", "qwen3moe", _moe, _moe_keys, _SPARSE),
    "qwen35": Kind("qwen3_5_text", "qwen35", _qwen35, _delta_keys, _AXES),
    "qwen35_mtp": Kind("qwen3_5_text", "qwen35", _qwen35, _delta_keys, _AXES, mtp),
    "qwen35moe": Kind("qwen3_5_moe_text", "qwen35moe", _qwen35, _delta_keys, _AXES),
    "qwen3next": Kind("qwen3_next", "qwen3next", _next, _delta_keys),
    "gemma3": Kind("gemma3", "gemma3", _plus_one, _gemma_keys, {"query_pre_attn_scalar": 16, "num_hidden_layers": 7,
                   "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]}),
    "gemma4": Kind("gemma4", "gemma4", _gemma4, _gemma4_keys, _PER_LAYER),
    "gemma4_shared": Kind("gemma4_shared", "gemma4", _gemma4, _gemma4_keys,
                          {**_PER_LAYER, "use_double_wide_mlp": True}),
    "gemma4_moe": Kind("gemma4", "gemma4", _gemma4, _gemma4_keys, _GEMMA4_MOE),
    "gpt_oss": Kind("gpt_oss", "gpt-oss", _gpt_oss, _oss_keys, {"rope_parameters": {**_YARN, "truncate": False},
                    "layer_types": [*families.PAIRS, "sliding_attention"]}),
    "gpt_oss_plain": Kind("gpt_oss", "gpt-oss", _gpt_oss, _oss_keys, {"rope_parameters": _PLAIN,
                          "layer_types": [*families.PAIRS, "sliding_attention"]}),
    "phi3": Kind("phi3", "phi3", _same, _phi3_keys, {"sliding_window": None}),
    "phi3_window": Kind("phi3", "phi3", _same, _phi3_keys),
    "phi3_long": Kind("phi3", "phi3", _same, _phi3_keys, {"rope_parameters": _LONGROPE, "hidden_size": 64,
                      "sliding_window": None, "original_max_position_embeddings": 64}),
    "granite": Kind("granite", "granite", _llama, _granite_keys),
    "granite_hybrid": Kind("granitemoehybrid", "granitehybrid", _granite_hybrid, _granite_hybrid_keys),
    "granite_hybrid_dense": Kind("granitemoehybrid", "granitehybrid", _granite_hybrid, _granite_hybrid_keys,
                                 {"num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": None,
                                  "shared_intermediate_size": 96}),
    "glm4": Kind("glm4", "glm4", _same, _partial(0.5), {"rope_parameters": _HALF}),
    "glm4moe": Kind("glm4_moe", "glm4moe", _moe, _glm_moe_keys, {**_ROUTED, "head_dim": 16, "use_qk_norm": True,
                    "attention_bias": True, "rope_parameters": _HALF}),
    "deepseek_v3": Kind("deepseek_v3", "deepseek2", _deepseek, _deepseek_keys),
    "lfm2": Kind("lfm2", "lfm2", _moe, _lfm2_keys),
    "lfm2moe": Kind("lfm2_moe", "lfm2moe", _moe, _lfm2_keys),
    "mistral3": Kind("mistral_full", "mistral3", _llama, _mistral3_keys),
    "ministral3": Kind("ministral3", "mistral3", _llama, _mistral3_keys, {**_MINISTRAL}),
    "smollm3": Kind("smollm3", "smollm3", _llama, _llama_keys, {"no_rope_layers": None, "num_hidden_layers": 5}),
    "olmo2": Kind("olmo2", "olmo2"),
    "starcoder2": Kind("starcoder2", "starcoder2", config={"sliding_window": None}),
    "stablelm": Kind("stablelm", "stablelm", _same, _stablelm_keys),
    "stablelm_parallel": Kind("stablelm", "stablelm", _same, _stablelm_keys, {"use_parallel_residual": True,
                              "use_qkv_bias": True}),
    "nemotron": Kind("nemotron", "nemotron", _plus_one, _nemotron_keys, {"head_dim": 12}),
    "cohere2": Kind("cohere2", "cohere2", _same, _cohere_keys, {"num_hidden_layers": 4, "sliding_window": 11,
                    "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    """The tiny model of a kind, in float32."""
    kind = KINDS[name]
    if kind.family in hybrids.HYBRIDS:
        return hybrids.build(kind.family, **kind.config, vocab_size=VOCAB)
    if kind.family in families.FAMILIES:
        return families.build(kind.family, **{**kind.config, "vocab_size": VOCAB})
    config = AutoConfig.for_model(kind.family, **{**families.COMMON, **kind.config, "vocab_size": VOCAB})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    families.sharpen(model)
    return model.eval().requires_grad_(False)


def write(path: Path, name: str, blocks: tuple[str, ...] = (), *, unpacked: bool = False) -> PreTrainedModel:
    """Write the file of a kind, and return transformers' model with the same numbers.

    With `blocks`, tensors are in blocks of these kinds in turn, where rows are long enough; `unpacked`: in F32, with
    the numbers of such blocks.
    """
    kind, model = KINDS[name], build(name)
    writer = GGUFWriter(path, kind.arch)
    c = SimpleNamespace(**model.config.to_dict())
    _base(writer, c)
    kind.keys(writer, c)
    if kind.mtp is not None:
        _again(writer, "block_count", c.num_hidden_layers + 1)
        writer.add_nextn_predict_layers(1)
    for key, value in vocabulary(kind.arch, VOCAB).items():
        put(writer, key, value)
    for i, (ours, weight) in enumerate(converted(model, name)):
        numbers = weight.float().contiguous().numpy()
        what = gguf.GGMLQuantizationType[blocks[i % len(blocks)] if blocks else "F32"]
        if what != 0 and weight.dim() > 1 and weight.shape[-1] % 32 == 0:
            raw = gguf.quants.quantize(numbers, what)
            if unpacked:
                writer.add_tensor(ours, gguf.quants.dequantize(raw, what))
            else:
                writer.add_tensor(ours, raw, raw_dtype=what)
        else:
            writer.add_tensor(ours, numbers)
    finish(writer)
    return model


def converted(model: PreTrainedModel, name: str) -> Tensors:
    """Tensors by llama.cpp's names."""
    kind, c = KINDS[name], SimpleNamespace(**model.config.to_dict())
    names = names_of(kind.arch, c.num_hidden_layers + 1)
    drafts = kind.mtp(model) if kind.mtp is not None else {}
    behind = {_behind(name, c.num_hidden_layers): weight for name, weight in drafts.items()}
    for theirs, weight in (tensors_of(model) | behind).items():
        for given, numbers in kind.change(theirs, weight, c):
            ours = given if given.startswith("blk.") else names.get_name(given, try_suffixes=(".weight", ".bias"))
            assert ours, f"the gguf package has no name for {given}"
            yield ours, numbers
