"""Model sizes that determine memory and time, read from the config."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcli.errors import BadModel
from kvcli.models.kv_shapes import LayerKVShape, kinds_of, stores_of
from kvcli.models.recurrent_shapes import NONE, RecurrentShapes, folds_of, layer_kinds
from kvcli.models.sizes import NAMES, count, sizes_of

if TYPE_CHECKING:
    from kvcli.models.source import Source

_ENDLESS = 1 << 20  # tokens, if no limit is stated: the value that `lm.py` uses then


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
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=max(of.kv_heads for of in stores),
        head_dim=max(of.key for of in stores),
        inner=(found["experts"] and found["expert_inner"]) or found["inner"] or 4 * hidden,
        vocab=found["vocab"],
        limit=_limit(config, found["limit"] or _ENDLESS, name),
        windows=_windows(config, layers, name),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        experts=found["experts"],
        active=found["active"],
        is_capped=bool(config.get("attn_logit_softcapping")),
        is_endless=not found["limit"],
        uneven=() if is_even else stores,
        folds=folds_of(config, layer_kinds(config, layers), hidden, name),
    )


def is_complete(config: Mapping[str, Any]) -> bool:
    """True if a config states its sizes and its sliding layers; some leave out their family's defaults."""
    sizes = all(any(config.get(name) for name in NAMES[key]) for key in ("layers", "hidden", "heads", "vocab", "limit"))
    return sizes and (not config.get("sliding_window") or isinstance(config.get("layer_types"), list))


def _is_multi_query(config: Mapping[str, Any]) -> bool:
    """True if all heads share one KV head, by the keys of gpt_bigcode and the first Falcons."""
    return bool(config.get("multi_query")) and not config.get("new_decoder_architecture")


def _limit(config: Mapping[str, Any], stated: int, name: str) -> int:
    """Context limit that the loaded model will report (`lm.py`). With dynamic RoPE, keys change beyond this length."""
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
