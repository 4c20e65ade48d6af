"""llama.cpp's names and layouts of models: one table for reading and writing GGUF files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

HEAD = "lm_head.weight"
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.o_proj.bias": "attn_output.bias",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_TWO_NORMS = {"post_attention_layernorm.weight": "ffn_norm.weight"}
_FOUR_NORMS = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
_ROTATED = {"q_proj": "attn_q", "k_proj": "attn_k"}

# metadata, after the architecture's name -> config.json: keys with the same number
SETTINGS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """An architecture of llama.cpp, and the class of transformers that computes the same."""

    arch: str
    model_type: str
    model: str
    between: Mapping[str, str]  # norms of a layer except the first
    permutes: bool = False  # RoPE rotates neighbouring numbers; transformers rotates one half against the other
    stretches: bool = False  # reads factors of the RoPE frequencies from the file
    norms: bool = False  # a norm on each query and key
    chooses_bias: bool = False  # attention has biases in some checkpoints, as a setting states
    period: int = 0  # every `period`-th layer has full attention, the others a window; 0 = all have full attention
    is_gemma: bool = False  # norms are stored as w + 1

    def tensors(self, layers: int, heads: int, kv_heads: int, *, is_tied: bool) -> Iterator[tuple[str, str, int]]:
        """(name in the checkpoint, name in GGUF, heads to permute or 0), optional tensors included."""
        yield "model.embed_tokens.weight", "token_embd.weight", 0
        yield "model.norm.weight", "output_norm.weight", 0
        if not is_tied:
            yield HEAD, "output.weight", 0
        of = {"q_proj": heads, "k_proj": kv_heads}
        for i in range(layers):
            for theirs, ours in {**_LAYER, **self.between}.items():
                yield f"model.layers.{i}.{theirs}", f"blk.{i}.{ours}", 0
            for theirs, ours in _ROTATED.items():
                for part in ("weight", "bias"):
                    name = f"model.layers.{i}.self_attn.{theirs}.{part}"
                    yield name, f"blk.{i}.{ours}.{part}", of[theirs] if self.permutes else 0

    def is_optional(self, name: str) -> bool:
        """True if some checkpoints of the architecture lack the tensor."""
        return name.endswith(".bias") or (name.endswith(("q_norm.weight", "k_norm.weight")) and not self.norms)


_LAYOUTS = (
    Layout("llama", "llama", "LlamaForCausalLM", _TWO_NORMS, permutes=True, stretches=True, chooses_bias=True),
    Layout("qwen2", "qwen2", "Qwen2ForCausalLM", _TWO_NORMS),
    Layout("qwen3", "qwen3", "Qwen3ForCausalLM", _TWO_NORMS, norms=True, chooses_bias=True),
    Layout("gemma2", "gemma2", "Gemma2ForCausalLM", _FOUR_NORMS, period=2, is_gemma=True),
    Layout("gemma3", "gemma3_text", "Gemma3ForCausalLM", _FOUR_NORMS, norms=True, period=6, is_gemma=True),
)
BY_ARCH = {layout.arch: layout for layout in _LAYOUTS}
# families of transformers that are exported for llama.cpp, which computes mistral as llama
WRITTEN = {"llama": BY_ARCH["llama"], "mistral": BY_ARCH["llama"]} | {
    name: BY_ARCH[name] for name in ("qwen2", "qwen3")
}
