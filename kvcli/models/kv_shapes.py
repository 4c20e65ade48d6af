"""What each layer of a model stores of a token, by its config: what a loaded model says of itself
(engine/hf/model_probe.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcli.models.recurrent_shapes import attends, layer_kinds
from kvcli.models.sizes import count


@dataclass(frozen=True, slots=True)
class LayerKVShape:
    """Keys and values of one layer."""

    kv_heads: int
    key: int  # numbers
    value: int
    shares: int | None = None  # an earlier layer, whose keys and values this one reads: it stores none of its own
    rank: int = 0  # > 0: a latent of so many numbers with a turned part behind it is key and value of all heads
    expanded: tuple[int, int] = (0, 0)  # numbers of a head's key and value that are made of it

    @property
    def numbers(self) -> int:
        """Of a token."""
        return 0 if self.shares is not None else self.kv_heads * (self.key + (0 if self.rank else self.value))

    @property
    def head(self) -> tuple[int, int]:
        """Numbers of a head's key and value, as the weights make them."""
        return self.expanded if self.rank else (self.key, self.value)


def stores_of(
    config: Mapping[str, Any], plain: LayerKVShape, layers: int, heads: int, name: str
) -> tuple[LayerKVShape, ...]:
    """By layer; `plain`: what those store of which the config says nothing else. Raises BadModel for sizes that are
    none."""

    def size(of: Mapping[str, Any], key: str, other: int) -> int:
        return count(of[key], key, name) if of.get(key) else other

    kinds, does = kinds_of(config, layers), layer_kinds(config, layers)
    if config.get("kv_lora_rank"):  # one for all heads, with a part behind it that is turned
        rank = size(config, "kv_lora_rank", 0)
        wide = rank + size(config, "qk_rope_head_dim", 0)
        key = size(config, "qk_nope_head_dim", 0) + wide - rank
        latent = LayerKVShape(1, wide, wide, rank=rank, expanded=(key, size(config, "v_head_dim", plain.value)))
        # of Kimi-Linear's layers most keep a state
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
    """How each layer attends, in the config's words; none where it has no such list."""
    kinds = config.get("layer_types")
    return kinds if isinstance(kinds, list) and len(kinds) == layers else ()


def _own(config: Mapping[str, Any], kinds: Sequence[str], layer: int, plain: LayerKVShape) -> Mapping[str, Any]:
    """What is said of a layer alone: by number, or of all that see the whole text (Gemma 4)."""
    listed = config.get("per_layer_config")
    if isinstance(listed, Mapping):
        said = listed.get(str(layer), listed.get(layer, {}))
        return said if isinstance(said, Mapping) else {}
    if kinds and kinds[layer] == "sliding_attention":  # of which MiMo-V2-Flash's have twice as many, said or not
        twice = 2 * plain.kv_heads if config.get("model_type") == "mimo_v2_flash" else None
        return {"num_key_value_heads": config.get("swa_num_key_value_heads") or twice}
    if not kinds or kinds[layer] != "full_attention":
        return {}
    heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    return {"head_dim": config.get("global_head_dim"), "num_key_value_heads": heads}


def _owner(kinds: Sequence[str], layer: int, shared: int) -> int | None:
    """The last of the layers with keys of their own that is of the kind of one that has none (Gemma 3n)."""
    first = len(kinds) - shared
    if not kinds or layer < first:
        return None
    return next((i for i in reversed(range(first)) if kinds[i] == kinds[layer]), None)
