"""Sampling settings of a model: those in its files, or else those that its model card recommends."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import lexists
from types import SimpleNamespace
from typing import Any

from kvcli.errors import BadModel
from kvcli.models.catalog import recommended
from kvcli.models.gguf.header import Header, read
from kvcli.models.source import Source, read_json
from kvcli.settings.schema import NO_PENALTY, Sample
from kvcli.settings.values import WrongValue, check, keys_of

FILE = "generation_config.json"


def stated_sampling(found: Source) -> tuple[Mapping[str, Any], str]:
    """Return the sampling settings of a model that is not loaded, and their origin. Raises BadModel."""
    file = found.path / FILE
    stated = (
        sampling_of(read(found.path), found.id) if found.is_gguf else read_json(file, found.id) if lexists(file) else {}
    )
    given = SimpleNamespace(**stated)
    own = generation_defaults(given, found.id)
    usual = generation_defaults(given, found.id, recommended(found.text_config, found.id))
    origin = "default" if not stated else "the GGUF file" if found.is_gguf else FILE
    return usual, "the model card" if usual != own else origin


# settings that follow the model where a profile has none
_SAMPLING = tuple(name for name, key in keys_of(Sample).items() if key.default is None)


def generation_defaults(given: object, name: str, usual: Mapping[str, Any] = {}) -> Mapping[str, Any]:
    """Return the sampling settings of a generation config, only those it states; `usual` if it states none at all."""
    if all(getattr(given, key, None) is None for key in ("do_sample", *_SAMPLING)):
        return {"temperature": 0.0, **usual}
    # otherwise transformers is greedy, whatever the other settings are
    samples = bool(getattr(given, "do_sample", False))
    settings = {k: getattr(given, k, None) for k in (_SAMPLING if samples else NO_PENALTY)}
    stated = {k: _sampling(k, v, name) for k, v in settings.items() if v is not None}
    return {"temperature": 1.0 if samples else 0.0, **stated}


def sampling_of(header: Header, name: str) -> dict[str, Any]:
    """Return the sampling settings of a GGUF file (2025 or later), by transformers' names. Raises BadModel."""
    theirs = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
    alike = "top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold"
    settings = {key: header.meta.get(f"general.sampling.{key}") for key in (*theirs, *alike)}
    known = {theirs.get(key, key): value for key, value in settings.items() if isinstance(value, int | float)}
    found = {key: value if isinstance(value, int) else float(f"{value:.6g}") for key, value in known.items()}
    checked = {key: _sampling(key, value, name, "general.sampling") for key, value in found.items()}
    return checked | {"do_sample": found.get("temperature", 1) != 0} if found else {}


def _sampling(key: str, value: object, name: str, origin: str = FILE) -> object:
    """Check a sampling setting of the model against the range of a profile. Raises BadModel."""
    try:
        return check(keys_of(Sample)[key].hint, value)
    except WrongValue as wrong:
        raise BadModel(
            f"{origin} of {name} cannot be used: {key} = {str(value)[:40]}",
            code="model_corrupt",
            lines=[wrong.message, *([wrong.hint] if wrong.hint else [])],
            try_=[f"download {FILE} again" if origin == FILE else "another GGUF file of the model"],
        ) from wrong
