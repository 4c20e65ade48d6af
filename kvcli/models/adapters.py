"""LoRA adapters (arXiv 2106.09685) in peft's format: files and settings, checked. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, sqrt
from os.path import exists, expanduser
from pathlib import Path
from typing import Any

from kvcli.errors import BadModel
from kvcli.models.checkpoint import WeightFile, count, read_header
from kvcli.models.hub_names import ID
from kvcli.models.source import cached, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PAIR = re.compile(r"(.+)\.lora_(?:embedding_([AB])|([AB])\.weight)")
_PATTERN = re.compile(r"\^?(?:[\w.]|\\\.)+\$?")  # names, not regular expressions that take for ever
_ALTERNATIVES = "merge the adapter into its base model with peft, and load that"
_HONOURED = {"r", "lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern", "fan_in_fan_out", "modules_to_save"}
# keys of training, and keys whose effect shows in the names of the tensors
_WITHOUT_EFFECT = {
    "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core",
    "qalora_group_size", "eva_config", "runtime_config",
}  # fmt: skip
# other starting points change the base weights
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter on disk. Names of layers and parameters are those of its base model."""

    name: str  # its folder or hub id, and its weight
    file: WeightFile
    config: Path
    pairs: dict[str, list[str]] = field(default_factory=dict)  # layer -> tensor names of A and of B
    scales: dict[str, float] = field(default_factory=dict)  # layer -> factor of B A, the weight of the adapter included
    saved: dict[str, str] = field(default_factory=dict)  # parameter -> tensor that replaces it


def located(text: str) -> tuple[str, float]:
    """Split `PATH:WEIGHT` into the path or hub id, and the weight (1 if it has none)."""
    name, colon, weight = text.rpartition(":")
    try:
        return (name, float(weight)) if colon and name else (text, 1.0)
    except ValueError:
        return text, 1.0


def lasting(text: str) -> str:
    """Return `PATH:WEIGHT` as it is valid in any working folder."""
    name, weight = located(text)
    name = str(Path(expanduser(name)).absolute()) if exists(expanduser(name)) else name
    return f"{name}:{weight:g}"


def find_adapter(text: str) -> Adapter:
    """Find and check an adapter: a folder, or a hub id in the local cache. Raises BadModel."""
    name, weight = located(text)
    if not isfinite(weight):
        raise _bad(name, f"its weight {weight} is no number", ["--adapter PATH:0.5"])
    folder = Path(expanduser(name))
    if not name or not folder.is_dir():
        if not ID.fullmatch(name):
            try_ = ["the folder that holds adapter_config.json", "a hub id in the cache: OWNER/NAME"]
            raise BadModel(f"there is no adapter {name[:80]!r}", code="adapter_missing", try_=try_)
        folder, _ = cached(name, "", None, name, offline=True)
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).exists():
            pickled = "its weights are a pickle file, which can run any code" if any(folder.glob("*.bin")) else ""
            try_ = ["save it anew with peft: save_pretrained(FOLDER)", f"ls {folder}"]
            raise _bad(name, f"{folder} has no {file}", try_, [pickled] if pickled else [])
    config = read_json(folder / CONFIG, name)
    _refuse(config, name)
    read = read_header(folder / WEIGHTS)
    found = Adapter(f"{folder.name if exists(expanduser(name)) else name}:{weight:g}", read, folder / CONFIG)
    _sort(found, config, name)
    for layer, pair in found.pairs.items():
        shapes = [read.tensors[tensor].shape for tensor in pair if tensor]
        rank = count(_by_layer(config, "rank_pattern", "r", layer, name), "r", name)
        if len(shapes) != 2 or any(len(shape) != 2 for shape in shapes) or not shapes[0][0] == shapes[1][1] == rank:
            raise _bad(name, f"layer {layer} has matrices {shapes}, not two of rank {rank}")
        alpha = _by_layer(config, "alpha_pattern", "lora_alpha", layer, name)
        found.scales[layer] = weight * alpha / (sqrt(rank) if config.get("use_rslora") else rank)
    if found.saved and weight != 1:
        why = f"it replaces {min(found.saved)}, to which a weight of {weight:g} cannot apply"
        raise _bad(name, why, [f"--adapter {name}"])
    return found


def _refuse(config: Mapping[str, Any], name: str) -> None:
    """Raise BadModel for a kind of adapter, or a setting with an effect, that is not supported."""
    if config.get("peft_type") != "LORA":
        raise _bad(name, f"its kind is {str(config.get('peft_type'))[:40]}, and only LORA is supported")
    wrong = {key: value for key, value in config.items() if value and key not in _HONOURED | _WITHOUT_EFFECT}
    wrong = {k: v for k, v in wrong.items() if not ((k == "bias" and v == "none") or k == "init_lora_weights")}
    if config.get("init_lora_weights") not in _STARTS:
        wrong["init_lora_weights"] = config["init_lora_weights"]
    if wrong:
        said = ", ".join(f"{key} = {str(value)[:40]}" for key, value in sorted(wrong.items()))
        raise _bad(name, f"it sets {said}, which kvcli does not support")


def _sort(found: Adapter, config: Mapping[str, Any], name: str) -> None:
    """Sort the tensors of the file into pairs A, B and parameters that are replaced."""
    kept, unknown = config.get("modules_to_save"), list[str]()
    kept = kept if isinstance(kept, list) else []
    for tensor in found.file.tensors:
        bare = tensor.removeprefix(_PREFIX)
        module, _, parameter = bare.rpartition(".")
        if match := _PAIR.fullmatch(bare):
            found.pairs.setdefault(match[1], ["", ""])["AB".index(match[2] or match[3])] = tensor
        elif parameter in ("weight", "bias") and any(module == one or module.endswith(f".{one}") for one in kept):
            found.saved[bare] = tensor
        elif bare.endswith(".base_layer.weight"):  # peft saves embeddings beside their low-rank change
            found.saved[bare.replace(".base_layer.", ".")] = tensor
        else:
            unknown.append(tensor)
    if unknown or not found.file.tensors:
        said = f"{len(unknown)} of {len(found.file.tensors)} tensors are no part of a LoRA adapter"
        raise _bad(name, said, lines=[min(unknown)[:200]] if unknown else [])


def _by_layer(config: Mapping[str, Any], patterns: str, key: str, layer: str, name: str) -> float:
    """Return a number of the config for a layer, by the first pattern that matches the end of its name."""
    value, given = config.get(key), config.get(patterns) or {}
    for pattern, its in given.items() if isinstance(given, dict) else ():
        if not _PATTERN.fullmatch(pattern):
            raise _bad(name, f"{patterns} has a regular expression, and only names of layers are supported: {pattern}")
        if re.match(rf"(.*\.)?({pattern})$", layer):
            value = its
            break
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise _bad(name, f"{key} = {str(value)[:40]} is no number")
    return float(value)


def _bad(name: str, why: str, try_: list[str] | None = None, lines: list[str] | None = None) -> BadModel:
    return BadModel(
        f"the adapter {name[:80]} cannot be used: {why}",
        code="adapter_unsupported",
        lines=lines or [],
        try_=try_ or [_ALTERNATIVES],
    )
