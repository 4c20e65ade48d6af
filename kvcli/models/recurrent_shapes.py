"""Sizes of the recurrent state, from the config. A loaded model reports the same sizes
(engine/hf/recurrent_layers.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcli.models.sizes import count

WIDE = 4  # bytes of a number of a recurrent state
_FOLDS = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid", "hybrid_sliding"}
_ATTENDS = {"full_attention", "sliding_attention", "attention", "hybrid", "hybrid_sliding"}
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # letters of Nemotron-H's layer pattern


@dataclass(frozen=True, slots=True)
class RecurrentShapes:
    """Recurrent layers, with the sizes of one layer."""

    layers: int = 0
    history: int = 0  # stored inputs of a convolution, in the model's dtype
    state: int = 0  # recurrent state, in float32
    taped: int = 0  # inputs and outputs of linear layers recorded for a row that may be rejected, in the model's dtype

    def nbytes(self, number: int) -> int:
        """Bytes of one recurrent state, summed over layers."""
        return self.layers * (self.history * number + self.state * WIDE)


NONE = RecurrentShapes()


def layer_kinds(config: Mapping[str, Any], layers: int) -> Sequence[str]:
    """Kind of each layer, in the words of newer configs; () if all layers attend and the config lists no kinds."""
    for key in ("layer_types", "layers_block_type"):
        if isinstance(found := config.get(key), list) and len(found) == layers:
            return [str(kind) for kind in found]
    if isinstance(pattern := config.get("hybrid_override_pattern"), str) and len(pattern) == layers:
        return [_LETTERS.get(letter, letter) for letter in pattern]
    if isinstance(attends := config.get("attn_layer_indices"), list):
        return ["attention" if i in attends else "mamba" for i in range(layers)]
    return ["hybrid"] * layers if config.get("model_type") == "falcon_h1" else ()


def attends(kinds: Sequence[str], layer: int) -> bool:
    """True if a layer stores keys and values."""
    return not kinds or kinds[layer] in _ATTENDS


def folds_of(config: Mapping[str, Any], kinds: Sequence[str], hidden: int, name: str) -> RecurrentShapes:
    """Sizes of a model's recurrent layers; `NONE` for families of unknown sizes. Raises BadModel for bad sizes."""
    n = sum(kind in _FOLDS for kind in kinds)
    return RecurrentShapes(n, *_one(config, hidden, name)) if n else NONE


def _one(config: Mapping[str, Any], hidden: int, name: str) -> tuple[int, int, int]:
    def of(*keys: str) -> int:
        """Return the number under the first key that the config has; 0 if it has none."""
        return next((count(config[key], key, name, 0) for key in keys if config.get(key) is not None), 0)

    around = 2 * hidden  # input of the block and output of its last linear layer
    if taps := of("conv_L_cache"):  # a short convolution without other state
        return hidden * taps, 0, around + 3 * hidden
    taps = of("linear_conv_kernel_dim")
    if heads := of("linear_num_value_heads"):  # gated delta net
        dim = of("linear_value_head_dim")
        inputs = 2 * of("linear_num_key_heads") * of("linear_key_head_dim") + heads * dim
        return inputs * taps, heads * of("linear_key_head_dim") * dim, around + inputs + heads * (dim + 2)
    if heads := of("linear_num_heads"):  # Kimi's
        dim = of("linear_head_dim")
        return 3 * heads * dim * taps, heads * dim * dim, around + 5 * heads * dim + heads
    heads, dim = of("mamba_n_heads", "mamba_num_heads"), of("mamba_d_head", "mamba_head_dim")
    groups, size = of("mamba_n_groups", "n_groups"), of("mamba_d_state", "ssm_state_size")
    inputs = heads * dim + 2 * groups * size
    return inputs * of("mamba_d_conv", "conv_kernel"), heads * dim * size, around + inputs + heads * (dim + 1)
