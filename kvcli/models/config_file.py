"""Settings of a model: config.json and similar files, read with a size limit."""

from __future__ import annotations

from os.path import exists, lexists
from pathlib import Path
from typing import Any

from kvcli.errors import BadModel
from kvcli.models import hub
from kvcli.settings.small_file import Unfit, parse_object, read_small

Config = dict[str, Any]

CONFIG = 4 << 20  # bytes; the longest lists are layer types and layers that are not quantized


def read_config(path: Path, name: str) -> Config:
    """Read config.json of a model folder. Raises BadModel with line and column."""
    file = path / "config.json"
    if not lexists(file):
        lines = [f"looked for {file}"]
        if exists(path / "adapter_config.json"):
            lines.append("adapter_config.json is there: this is an adapter; merge it into its base model first")
        lines += unread(path)
        others = [f"{name}:FILE.gguf, if it is a repository of GGUF files"] if hub.ID.fullmatch(name) else []
        raise BadModel(f"{name} has no config.json", code="model_incomplete", lines=lines, try_=[*others, f"ls {path}"])
    config = read_json(file, name)
    if not isinstance(config.get("model_type"), str):
        raise BadModel(
            f"config.json of {name} names no model_type",
            code="model_corrupt",
            lines=[f"in {file}", "without it the architecture is unknown"],
            try_=["download config.json again"],
        )
    return config


def text_config(config: Config) -> Config:
    """Return the settings of the text decoder inside `config`, or `config` itself."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def read_json(file: Path, name: str, most: int = CONFIG) -> Config:
    """Read the JSON object of a file of at most `most` bytes. Raises BadModel with line and column."""
    try:
        return parse_object(read_small(file, most))
    except Unfit as error:
        raise BadModel(
            f"{file.name} of {name} {str(error).partition(':')[0]}",
            code="model_corrupt",
            lines=[f"{file}: {error}"],
            try_=[f"download {file.name} again"],
        ) from error


def unread(path: Path) -> list[str]:
    """Describe the weight files of a folder that transformers does not load."""
    other = sorted(f.name for f in path.glob("*.safetensors"))
    return [f"found {', '.join(other[:3])}, which transformers does not look for"] if other else []
