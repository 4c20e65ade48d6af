"""The numbers of a model that memory and time follow from, read from its config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcli.errors import BadModel

# what families call the same number, the usual name first
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "inner": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "limit": ("max_position_embeddings", "n_positions", "seq_length"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "active": ("num_experts_per_tok", "num_experts_per_token"),
    "expert_inner": ("moe_intermediate_size",),
}
_ENDLESS = 1 << 20  # tokens, where no limit is stated: what `model.py` takes then
_ABSURD = 1 << 48  # no number of a model is as large
_LAYERS = 1 << 16  # nor has any as many layers


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder in numbers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int  # width of the feed-forward part, of one expert where there are experts
    vocab: int
    limit: int  # positions the model was made for
    windows: tuple[int | None, ...]  # per layer: tokens a sliding layer sees; None = all
    is_tied: bool = False  # the head uses the embeddings
    experts: int = 0  # 0 = no experts
    active: int = 0  # experts a token goes through
    is_capped: bool = False  # attention scores are bent, which takes plain products
    is_endless: bool = False  # the config states no limit

    @property
    def kv_per_token(self) -> int:
        """Numbers that keys and values of one token have in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def linear(self) -> int:
        """Weights of the linear layers, all experts."""
        return self.layers * (self._attention + 3 * self.hidden * self.inner * max(1, self.experts))

    @property
    def linear_active(self) -> int:
        """Of these, the ones a token goes through."""
        return self.layers * (self._attention + 3 * self.hidden * self.inner * max(1, self.active))

    @property
    def _attention(self) -> int:
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    def visible(self, n: int) -> int:
        """Slots that the last of n tokens attends to, summed over the layers."""
        return sum(n if window is None else min(n, window) for window in self.windows)


def shape_of(config: Mapping[str, Any], name: str = "the model") -> Shape:
    """From the text part of config.json; raises BadModel naming what it does not say."""
    found = {key: _number(config, names) for key, names in _NAMES.items()}
    hidden, heads, layers = found["hidden"], found["heads"], found["layers"]
    missing = [_NAMES[key][0] for key in ("layers", "hidden", "heads", "vocab") if not found[key]]
    if missing or not (hidden and heads and layers) or layers > _LAYERS:
        raise BadModel(
            f"config.json of {name} does not say how large the model is",
            code="model_sizes",
            lines=[f"missing or no size: {', '.join(missing or [_NAMES['layers'][0]])}"],
            detail={"missing": missing},
            try_=["download config.json again"],
        )
    experts = found["experts"] or 0
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=1 if _is_multi_query(config) else found["kv_heads"] or heads,
        head_dim=found["head_dim"] or hidden // heads,
        inner=(found["expert_inner"] if experts else None) or found["inner"] or 4 * hidden,
        vocab=found["vocab"] or 0,
        limit=_limit(config, found["limit"]),
        windows=_windows(config, layers),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        active=found["active"] or 0,
        is_capped=bool(config.get("attn_logit_softcapping")),
        is_endless=not found["limit"],
    )


def is_complete(config: Mapping[str, Any]) -> bool:
    """Whether a config states its sizes and which layers slide; some leave out what their family's defaults say."""
    sizes = all(_number(config, _NAMES[key]) for key in ("layers", "hidden", "heads", "vocab", "limit"))
    return sizes and (not _window(config) or isinstance(config.get("layer_types"), list))


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of these that is a size at all."""
    values = [config.get(name) for name in names]
    sizes = (v for v in values if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v))
    return next((int(v) for v in sizes if 1 <= v < _ABSURD), None)


def _is_multi_query(config: Mapping[str, Any]) -> bool:
    """One head of keys and values for all, in words of its own (gpt_bigcode, the first Falcons)."""
    return bool(config.get("multi_query")) and not config.get("new_decoder_architecture")


def _limit(config: Mapping[str, Any], stated: int | None) -> int:
    """What the loaded model will say (`model.py`): with dynamic rope, the length before keys change."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    ropes = [rope, *rope.values()] if isinstance(rope, dict) else []
    for one in (r for r in ropes if isinstance(r, dict)):
        if "dynamic" in str(one.get("rope_type") or one.get("type")):
            return _number(one, ("original_max_position_embeddings",)) or stated or _ENDLESS
    return stated or _ENDLESS


def _window(config: Mapping[str, Any]) -> int | None:
    """Tokens that sliding layers see; None where the config speaks of none."""
    return None if config.get("use_sliding_window") is False else _number(config, ("sliding_window",))


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = _window(config)
    if window is None:
        return (None,) * layers
    kinds, pattern = config.get("layer_types"), config.get("sliding_window_pattern")
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(window if "sliding" in str(kind) else None for kind in kinds)
    if isinstance(pattern, int) and pattern > 0:  # every so-many-th layer sees all
        return tuple(None if (i + 1) % pattern == 0 else window for i in range(layers))
    return (window,) * layers
