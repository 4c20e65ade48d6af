"""Model sizes that determine memory and time, read from the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcli.errors import BadModel
from kvcli.models.checkpoint import NAMES, count, sizes_of

if TYPE_CHECKING:
    from kvcli.models.source import Source

# Sizes of the recurrent state, from the config. A loaded model reports the same sizes (engine/hf/recurrent_layers.py).

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


# KV sizes per token of each layer, from the config. A loaded model reports the same sizes (engine/hf/model_probe.py).


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


_ENDLESS = 1 << 20  # tokens, if no limit is stated: the value that `model_settings.py` uses then


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int  # this and the next: the maximum over layers
    head_dim: int  # head size of keys
    inner: int  # feed-forward width, of one expert in a mixture of experts
    vocab: int
    limit: int  # context window the model was trained for
    windows: tuple[int | None, ...]  # sliding window of each layer in tokens; None = full attention
    is_tied: bool = False  # the output head uses the embeddings
    experts: int = 0  # 0 = no experts
    active: int = 0  # experts used per token
    is_capped: bool = False  # attention scores are soft-capped, which needs plain matrix products
    is_endless: bool = False  # the config states no limit
    uneven: tuple[LayerKVShape, ...] = ()  # KV sizes of each layer, if layers differ
    folds: RecurrentShapes = NONE  # recurrent layers

    @property
    def stores(self) -> tuple[LayerKVShape, ...]:
        """KV sizes of one token in each layer."""
        return self.uneven or (LayerKVShape(self.kv_heads, self.head_dim, self.head_dim),) * self.layers

    @property
    def expanded(self) -> Shape:
        """Sizes with latents expanded to keys and values of every head, for when latents cannot be stored."""
        stores = tuple(LayerKVShape(self.heads, *of.expanded) if of.rank else of for of in self.stores)
        return replace(self, kv_heads=self.heads, head_dim=max(of.key for of in stores), uneven=stores)

    @property
    def kv_per_token(self) -> int:
        """Numbers of KV per token, summed over layers."""
        return sum(of.numbers for of in self.stores)

    @property
    def linear(self) -> int:
        """Weights of the linear layers, all experts included."""
        return self._attention + self.layers * 3 * self.hidden * self.inner * max(1, self.experts)

    @property
    def linear_active(self) -> int:
        """Weights of the linear layers that one token uses."""
        return self._attention + self.layers * 3 * self.hidden * self.inner * max(1, self.active)

    @property
    def _attention(self) -> int:
        return sum(
            self.hidden * (self.heads * sum(of.head) + of.numbers)
            + of.rank * self.heads * (sum(of.head) - (of.key - of.rank if of.rank else 0))
            for of in self.stores
        )

    def visible(self, n: int) -> list[int]:
        """Slots that the last of n tokens attends to, by layer."""
        return [n if window is None else min(n, window) for window in self.windows]


def of_source(source: Source) -> Shape:
    """Read the sizes of a model from its files. No other function gives sizes and context window before loading."""
    config: Mapping[str, Any] = source.text_config
    if not is_complete(config):  # the family's defaults, known to transformers alone, may state the rest
        from kvcli.models.family import with_defaults

        with suppress(BadModel):
            config = with_defaults(source)
    return shape_of(config, source.id)


def shape_of(config: Mapping[str, Any], name: str = "the model") -> Shape:
    """Read the sizes from the text part of config.json. Raises BadModel that names the missing sizes."""
    found = sizes_of(config, name)
    missing = [NAMES[key][0] for key in ("layers", "hidden", "heads", "vocab") if not found[key]]
    if missing:
        raise BadModel(
            f"config.json of {name} lacks sizes of the model",
            code="model_sizes",
            lines=[f"missing or invalid: {', '.join(missing)}"],
            detail={"missing": missing},
            try_=["download config.json again"],
        )
    hidden, heads, layers = found["hidden"], found["heads"], found["layers"]
    if config.get("model_type") == "longcat_flash" and not config.get("num_hidden_layers"):
        layers *= 2  # each layer has two attention blocks
    kv_heads, dim = 1 if _is_multi_query(config) else found["kv_heads"] or heads, found["head_dim"] or hidden // heads
    stores = stores_of(config, LayerKVShape(kv_heads, dim, dim), layers, heads, name)
    is_even = len(set(stores)) == 1 and stores[0].key == stores[0].value and not stores[0].rank
    return Shape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=max(of.kv_heads for of in stores),
        head_dim=max(of.key for of in stores),
        inner=(found["experts"] and found["expert_inner"]) or found["inner"] or 4 * hidden, vocab=found["vocab"],
        limit=_limit(config, found["limit"] or _ENDLESS, name), windows=_windows(config, layers, name),
        is_tied=bool(config.get("tie_word_embeddings", False)), experts=found["experts"], active=found["active"],
        is_capped=bool(config.get("attn_logit_softcapping")), is_endless=not found["limit"],
        uneven=() if is_even else stores, folds=folds_of(config, layer_kinds(config, layers), hidden, name),
    )  # fmt: skip


def is_complete(config: Mapping[str, Any]) -> bool:
    """True if a config states its sizes and its sliding layers; some leave out their family's defaults."""
    sizes = all(any(config.get(name) for name in NAMES[key]) for key in ("layers", "hidden", "heads", "vocab", "limit"))
    return sizes and (not config.get("sliding_window") or isinstance(config.get("layer_types"), list))


def _is_multi_query(config: Mapping[str, Any]) -> bool:
    """True if all heads share one KV head, by the keys of gpt_bigcode and the first Falcons."""
    return bool(config.get("multi_query")) and not config.get("new_decoder_architecture")


def _limit(config: Mapping[str, Any], stated: int, name: str) -> int:
    """Context limit that the loaded model reports (`model_settings.py`). With dynamic RoPE, keys change beyond it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    ropes = [rope, *rope.values()] if isinstance(rope, dict) else []
    for one in (r for r in ropes if isinstance(r, dict)):
        if "dynamic" in str(one.get("rope_type") or one.get("type")):
            original = one.get("original_max_position_embeddings")
            return count(original, "original_max_position_embeddings", name) if original else stated
    return stated


def _windows(config: Mapping[str, Any], layers: int, name: str) -> tuple[int | None, ...]:
    """Sliding window of each layer in tokens; None = full attention."""
    stated = None if config.get("use_sliding_window") is False else config.get("sliding_window")
    if not stated:
        return (None,) * layers
    window = count(stated, "sliding_window", name)
    kinds, pattern = kinds_of(config, layers), config.get("sliding_window_pattern")
    if kinds:
        return tuple(window if "sliding" in str(kind) else None for kind in kinds)
    if isinstance(pattern, int) and pattern > 0:  # every `pattern`-th layer has full attention
        return tuple(None if (i + 1) % pattern == 0 else window for i in range(layers))
    return (window,) * layers
