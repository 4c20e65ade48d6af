"""How llama.cpp names and lays out the tensors of the architectures that are compared with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.source import Source

_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
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
_ROTATED = {"q_proj": "attn_q", "k_proj": "attn_k"}
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Layout:
    """One architecture of llama.cpp."""

    arch: str
    permutes: bool  # rotates neighbouring numbers, where transformers rotates one half against the other
    stretches: bool  # reads factors of the rope's frequencies from the file
    norms: bool = False  # a norm on each query and key

    def tensors(self, config: Any) -> Iterator[tuple[str, str, int]]:
        """(name in the checkpoint, name in GGUF, heads to permute or 0), optional ones included."""
        yield "model.embed_tokens.weight", "token_embd.weight", 0
        yield "model.norm.weight", "output_norm.weight", 0
        if not config.tie_word_embeddings:
            yield _HEAD, "output.weight", 0
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for i in range(config.num_hidden_layers):
            for theirs, ours in _LAYER.items():
                yield f"model.layers.{i}.{theirs}", f"blk.{i}.{ours}", 0
            for theirs, ours in _ROTATED.items():
                for part in ("weight", "bias"):
                    name = f"model.layers.{i}.self_attn.{theirs}.{part}"
                    yield name, f"blk.{i}.{ours}.{part}", heads[theirs] if self.permutes else 0

    def is_optional(self, name: str, config: Any) -> bool:
        """Absent in some checkpoints of the architecture."""
        return name.endswith(".bias") or (name.endswith(("q_norm.weight", "k_norm.weight")) and not self.norms)

    def is_dropped(self, name: str, config: Any) -> bool:
        """Held by the checkpoint, used by nobody: the second copy of a tied head, and frequencies that are computed."""
        return (name == _HEAD and config.tie_word_embeddings) or name.endswith("rotary_emb.inv_freq")


_LAYOUTS = {
    "llama": Layout("llama", permutes=True, stretches=True),
    "mistral": Layout("llama", permutes=True, stretches=True),
    "qwen2": Layout("qwen2", permutes=False, stretches=False),
    "qwen3": Layout("qwen3", permutes=False, stretches=False, norms=True),
}


def layout_of(config: Any) -> Layout:
    """The layout of a model that `refusal` has nothing against."""
    return _LAYOUTS[config.model_type]


def refusal(found: Source, config: Any) -> str:
    """Why llama.cpp would not compute what transformers does, in words; "" if it would."""
    if found.family not in _LAYOUTS:
        return f"{found.family} is none of {', '.join(_LAYOUTS)}"
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if found.is_pickle:
        return "its weights are pickle files"
    if "quantization_config" in found.config:
        return "its weights are quantized in a way that GGUF has no name for"
    if getattr(config, "sliding_window", None) or "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        return "it attends through a sliding window, which llama.cpp leaves out for this architecture"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, llama.cpp's is silu"
    if kind == "longrope" or (kind not in ("default", "dynamic") and not _LAYOUTS[found.family].stretches):
        return f"its rope is {kind}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "its rope turns only a part of each head"
    return ""


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from (halves, pairs) order to pairs: what llama.cpp's rope turns together comes together."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
