"""Sizes in a model's config, type-checked and compared with the headers of its weight files. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvcli.errors import BadModel
from kvcli.models.headers import WeightFile

# keys of families for the same size, the usual one first
NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocab": ("vocab_size",),
    "limit": ("max_position_embeddings", "n_positions", "seq_length"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "inner": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "active": ("num_experts_per_tok", "num_experts_per_token"),
    "expert_inner": ("moe_intermediate_size",),
}
_NEEDED = ("layers", "hidden", "heads", "vocab", "limit")  # sizes that must be one number each, if stated
_LAYERS = 1 << 16  # more layers than any model has
_MOST = 1 << 48  # a larger number than any model has


def sizes_of(config: Mapping[str, Any], name: str) -> dict[str, int]:
    """Read the sizes from the text part of config.json. A size is 0 if it is missing, or listed per layer.

    Raises BadModel for a size that is no number.
    """
    return {key: _stated(config, key, name) for key in NAMES}


def count(value: object, key: str, name: str, least: int = 1, most: int = _MOST) -> int:
    """Return the value as a whole number in the allowed range. Raises BadModel that names its key."""
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most and value % 1 == 0:
        return int(value)
    raise BadModel(
        f"the config of {name} cannot be used: {key} = {str(value)[:40]}",
        code="model_sizes",
        lines=[f"{key} is a whole number from {least:,}" + (f" to {most:,}" if most < _MOST else "")],
        detail={"key": key},
        try_=["download config.json and generation_config.json again"],
    )


def hold(config: Mapping[str, Any], text: Mapping[str, Any], files: Sequence[WeightFile], name: str) -> None:
    """Refuse a config whose sizes exceed its weight files, before anything is allocated by it.

    Each layer has at least one tensor, and each weight takes at least one bit. Pickles state no sizes before they
    run.
    """
    n_tensors = sum(len(file.tensors) for file in files)
    n_bits = 8 * sum(file.nbytes for file in files)
    for key, layers in _layers(config):
        if layers > (n_tensors or _LAYERS):
            _refuse(name, f"{key} = {layers:,}", f"its weight files hold {n_tensors:,} tensors")
    sizes = sizes_of(text, name)
    hidden, heads = sizes["hidden"], sizes["heads"]
    for what, numbers in (
        ("vocab_size * hidden_size", sizes["vocab"] * hidden),
        ("num_attention_heads * head_dim * hidden_size", heads * sizes["head_dim"] * hidden),
        ("hidden_size squared", hidden * hidden),
    ):
        if numbers > n_bits:
            _refuse(name, f"{what} = {numbers:,}", f"its weight files have {n_bits:,} bits")
    if hidden and heads and not sizes["head_dim"] and hidden < heads:
        _refuse(name, f"num_attention_heads = {heads:,}", f"hidden_size is {hidden:,}, which the heads share")


def _stated(config: Mapping[str, Any], key: str, name: str) -> int:
    """Return the size under the first of its keys that the config has."""
    for alias in NAMES[key]:
        value = config.get(alias)
        if value is None or (isinstance(value, list) and key not in _NEEDED):
            continue
        if number := count(value, alias, name, int(key in _NEEDED), _LAYERS if key == "layers" else _MOST):
            return number
    return 0


def _layers(config: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Layer counts of the config and of configs nested in it (text, vision, ...)."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _layers(value)
        elif key in NAMES["layers"] and isinstance(value, int | float):
            yield key, value


def _refuse(name: str, said: str, held: str) -> None:
    raise BadModel(
        f"config.json of {name} does not belong to its weights: {said}",
        code="model_corrupt",
        lines=[held],
        try_=["download config.json again", "check that config.json belongs to these weights"],
    )
