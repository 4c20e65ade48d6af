"""KV sizes per token of each layer, from the config. A loaded model reports the same sizes
(engine/hf/model_probe.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcli.models.recurrent_shapes import attends, layer_kinds
from kvcli.models.sizes import count


@dataclass(frozen=True, slots=True)
class LayerKVShape:
    """KV sizes of one layer."""

    kv_heads: int
    key: int  # numbers per key
    value: int
    shares: int | None = None  # the earlier layer whose KV this layer reads; it stores none
    rank: int = 0  # > 0: a latent of this size plus a RoPE part is the key and value of all heads
    expanded: tuple[int, int] = (0, 0)  # sizes of a head's key and value expanded from the latent

    @property
    def numbers(self) -> int:
        """Numbers per token."""
        return 0 if self.shares is not None else self.kv_heads * (self.key + (0 if self.rank else self.value))

    @property
    def head(self) -> tuple[int, int]:
        """Sizes of a head's key and value as computed by the weights."""
        return self.expanded if self.rank else (self.key, self.value)


def stores_of(
    config: Mapping[str, Any], plain: LayerKVShape, layers: int, heads: int, name: str
) -> tuple[LayerKVShape, ...]:
    """KV sizes by layer. `plain`: sizes where the config states no others. Raises BadModel for bad sizes."""

    def size(of: Mapping[str, Any], key: str, other: int) -> int:
        return count(of[key], key, name) if of.get(key) else other

    kinds, does = kinds_of(config, layers), layer_kinds(config, layers)
    if config.get("kv_lora_rank"):  # a latent for all heads, followed by a RoPE part
        rank = size(config, "kv_lora_rank", 0)
        wide = rank + size(config, "qk_rope_head_dim", 0)
        key = size(config, "qk_nope_head_dim", 0) + wide - rank
        latent = LayerKVShape(1, wide, wide, rank=rank, expanded=(key, size(config, "v_head_dim", plain.value)))
        # most layers of Kimi-Linear are recurrent
        return tuple(latent if attends(does, layer) else LayerKVShape(0, wide, wide) for layer in range(layers))
    plain = LayerKVShape(plain.kv_heads, plain.key, size(config, "v_head_dim", plain.value))
    shared = count(config.get("num_kv_shared_layers") or 0, "num_kv_shared_layers", name, 0)
    found = []
    for layer in range(layers):
        if not attends(does, layer):
            found.append(LayerKVShape(0, plain.key, plain.value))
            continue
        own = _own(config, kinds, layer, plain)
        key = size(own, "head_dim", plain.key)
        value = key if own.get("head_dim") else plain.value
        found.append(
            LayerKVShape(size(own, "num_key_value_heads", plain.kv_heads), key, value, _owner(kinds, layer, shared))
        )
    return tuple(found)


def kinds_of(config: Mapping[str, Any], layers: int) -> Sequence[str]:
    """Attention kind of each layer, in the config's words; empty if the config has no such list."""
    kinds = config.get("layer_types")
    return kinds if isinstance(kinds, list) and len(kinds) == layers else ()


def _own(config: Mapping[str, Any], kinds: Sequence[str], layer: int, plain: LayerKVShape) -> Mapping[str, Any]:
    """Settings of one layer: listed by layer number, or shared by all full-attention layers (Gemma 4)."""
    listed = config.get("per_layer_config")
    if isinstance(listed, Mapping):
        said = listed.get(str(layer), listed.get(layer, {}))
        return said if isinstance(said, Mapping) else {}
    if kinds and kinds[layer] == "sliding_attention":  # MiMo-V2-Flash has twice as many KV heads there, stated or not
        twice = 2 * plain.kv_heads if config.get("model_type") == "mimo_v2_flash" else None
        return {"num_key_value_heads": config.get("swa_num_key_value_heads") or twice}
    if not kinds or kinds[layer] != "full_attention":
        return {}
    heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    return {"head_dim": config.get("global_head_dim"), "num_key_value_heads": heads}


def _owner(kinds: Sequence[str], layer: int, shared: int) -> int | None:
    """The last layer that stores KV and has the same attention kind as this sharing layer (Gemma 3n)."""
    first = len(kinds) - shared
    if not kinds or layer < first:
        return None
    return next((i for i in reversed(range(first)) if kinds[i] == kinds[layer]), None)
