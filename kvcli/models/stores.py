"""What each layer of a model stores of a token, by its config: what a loaded model says of itself (engine/seam.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcli.models.mixing import attends, layer_kinds
from kvcli.models.sizes import count


@dataclass(frozen=True, slots=True)
class Stores:
    """Keys and values of one layer."""

    kv_heads: int
    key: int  # numbers
    value: int
    shares: int | None = None  # an earlier layer, whose keys and values this one reads: it stores none of its own

    @property
    def numbers(self) -> int:
        """Of a token."""
        return 0 if self.shares is not None else self.kv_heads * (self.key + self.value)


def stores_of(config: Mapping[str, Any], plain: Stores, layers: int, heads: int, name: str) -> tuple[Stores, ...]:
    """By layer; `plain`: what those store of which the config says nothing else. Raises BadModel for sizes that are
    none."""

    def size(of: Mapping[str, Any], key: str, other: int) -> int:
        return count(of[key], key, name) if of.get(key) else other

    if config.get("kv_lora_rank"):  # heads as latent attention expands them: each has a part that is turned
        parts = [size(config, key, 0) for key in ("qk_nope_head_dim", "qk_rope_head_dim")]
        plain = Stores(heads, sum(parts), plain.value)
    plain = Stores(plain.kv_heads, plain.key, size(config, "v_head_dim", plain.value))
    kinds, does = kinds_of(config, layers), layer_kinds(config, layers)
    found = []
    for layer in range(layers):
        if not attends(does, layer):
            found.append(Stores(0, plain.key, plain.value))
            continue
        own = _own(config, kinds, layer)
        key = size(own, "head_dim", plain.key)
        value = key if own.get("head_dim") else plain.value
        found.append(Stores(size(own, "num_key_value_heads", plain.kv_heads), key, value, _owner(config, kinds, layer)))
    return tuple(found)


def kinds_of(config: Mapping[str, Any], layers: int) -> Sequence[str]:
    """How each layer attends, in the config's words; none where it has no such list."""
    kinds = config.get("layer_types")
    return kinds if isinstance(kinds, list) and len(kinds) == layers else ()


def _own(config: Mapping[str, Any], kinds: Sequence[str], layer: int) -> Mapping[str, Any]:
    """What is said of a layer alone: by number, or of all that see the whole text (Gemma 4)."""
    listed = config.get("per_layer_config")
    if isinstance(listed, Mapping):
        said = listed.get(str(layer), listed.get(layer, {}))
        return said if isinstance(said, Mapping) else {}
    if kinds and kinds[layer] == "sliding_attention":  # of which MiMo-V2-Flash's have twice as many, said or not
        twice = 2 * config["num_key_value_heads"] if config.get("model_type") == "mimo_v2_flash" else None
        return {"num_key_value_heads": config.get("swa_num_key_value_heads") or twice}
    if not kinds or kinds[layer] != "full_attention":
        return {}
    heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    return {"head_dim": config.get("global_head_dim"), "num_key_value_heads": heads}


def _owner(config: Mapping[str, Any], kinds: Sequence[str], layer: int) -> int | None:
    """The last of the layers with keys of their own that is of the kind of one that has none (Gemma 3n)."""
    first = len(kinds) - int(config.get("num_kv_shared_layers") or 0)
    if not kinds or layer < first:
        return None
    return next((i for i in reversed(range(first)) if kinds[i] == kinds[layer]), None)
