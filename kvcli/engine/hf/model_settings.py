"""Settings from a model's own config: context limit, rope, stop tokens, sampling defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import unwrap
from types import MethodType
from typing import Any

import torch
from torch import nn

from kvcli.errors import BadModel
from kvcli.models.checkpoint import count
from kvcli.settings.schema import NO_PENALTY, Sample
from kvcli.settings.values import WrongValue, check, keys_of

# settings of generation_config.json that change answers and are ignored
_UNKEPT = """suppress_tokens begin_suppress_tokens bad_words_ids sequence_bias no_repeat_ngram_size min_length num_beams
    min_new_tokens encoder_no_repeat_ngram_size encoder_repetition_penalty forced_bos_token_id forced_eos_token_id top_h
    guidance_scale exponential_decay_length_penalty penalty_alpha epsilon_cutoff eta_cutoff""".split()


def context_limit(text: Any, name: str) -> tuple[int, tuple[str, ...]]:
    """Return the model's context limit in positions, and notes."""
    limit = getattr(text, "max_position_embeddings", None)
    if limit is None:
        return 1 << 20, ("its config states no context limit",)
    dynamic = [r for r in _ropes(text) if "dynamic" in str(r.get("rope_type"))]
    if dynamic:
        end = _original(dynamic[0], limit, name)
        return end, (f"context ends at {end:,} tokens: beyond, dynamic rope would change stored keys",)
    return count(limit, "max_position_embeddings", name), ()


def _original(rope: Mapping[str, Any], limit: Any, name: str) -> int:
    """Return the context length before rope scaling."""
    key = "original_max_position_embeddings"
    return count(rope.get(key) or limit, key, name)


def settle_rope(model: nn.Module, text: Any, name: str) -> tuple[str, ...]:
    """Fix the rope table of longrope. It has two tables, and transformers selects one by the longest position of each
    call, so chunked prefill would mix them. A model whose context exceeds the short table uses the long one
    throughout."""
    longs = [r for r in _ropes(text) if r.get("rope_type") == "longrope"]
    reach = [_original(r, text.max_position_embeddings, name) for r in longs]
    if not longs or text.max_position_embeddings <= min(reach):
        return ()
    for part in model.modules():
        for table in [n for n, _ in part.named_buffers(recurse=False) if n.endswith("original_inv_freq")]:
            prefix = table.removesuffix("original_inv_freq")
            kind = {"layer_type": prefix.removesuffix("_")} if prefix else {}
            x = torch.zeros(1, dtype=torch.float32, device=getattr(part, table).device)
            # one position further: selects the long table
            part(x, torch.tensor([[max(reach)]], device=x.device), **kind)
            setattr(part, table, getattr(part, f"{prefix}inv_freq").clone())
    return (f"rope: the table for texts beyond {min(reach):,} tokens is used for shorter texts too",)


@contextmanager
def fixed_ropes(model: nn.Module) -> Iterator[None]:
    """Keep the rope tables fixed within this block: releases of transformers read positions from the device to update
    them. Within the context limit, and with settled tables, no update is needed."""
    moving = [part for part in model.modules() if re.search("dynamic|longrope", str(getattr(part, "rope_type", "")))]
    for part in moving:
        part.forward = MethodType(unwrap(type(part).forward), part)  # the undecorated function
    try:
        yield
    finally:
        for part in moving:
            del part.forward


def _ropes(text: Any) -> list[dict[str, Any]]:
    """Return the rope settings, one per kind of layer if a family has several."""
    given = getattr(text, "rope_parameters", None)
    if not isinstance(given, dict):
        return []
    return [given] if "rope_type" in given else [r for r in given.values() if isinstance(r, dict)]


def stop_ids(model: Any, name: str) -> frozenset[int]:
    """Return the stop tokens in any of the model's configs."""
    stop: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config, model.config.get_text_config()):
        ids = getattr(holder, "eos_token_id", None)
        each = ids if isinstance(ids, list | tuple) else [] if ids is None else [ids]
        stop |= {count(i, "eos_token_id", name, least=-1) for i in each}
    return frozenset(stop - {-1})  # -1 means that there is none


def stop_strings(model: Any) -> tuple[str, ...]:
    """Return the stop strings of the generation config."""
    stop_strings = getattr(getattr(model, "generation_config", None), "stop_strings", None) or ()
    return (stop_strings,) if isinstance(stop_strings, str) else tuple(map(str, stop_strings))


def unkept(model: Any) -> tuple[str, ...]:
    """Return a note on settings of the generation config that are ignored; 0 and 1 have no effect."""
    given = getattr(model, "generation_config", None)
    names = [key for key in _UNKEPT if (value := getattr(given, key, None)) and value != 1]
    return (f"ignored in generation_config.json: {', '.join(names)}",) if names else ()


# settings that follow the model where a profile has none
_SAMPLING = tuple(name for name, key in keys_of(Sample).items() if key.default is None)


def generation_defaults(model: Any, name: str, usual: Mapping[str, Any] = {}) -> Mapping[str, Any]:
    """Return the model's own sampling settings, only those it states; `usual` if it states none at all."""
    given = getattr(model, "generation_config", None)
    if all(getattr(given, key, None) is None for key in ("do_sample", *_SAMPLING)):
        return {"temperature": 0.0, **usual}
    # otherwise transformers is greedy, whatever the other settings are
    samples = bool(getattr(given, "do_sample", False))
    settings = {k: getattr(given, k, None) for k in (_SAMPLING if samples else NO_PENALTY)}
    stated = {k: _sampling(k, v, name) for k, v in settings.items() if v is not None}
    return {"temperature": 1.0 if samples else 0.0, **stated}


def _sampling(key: str, value: object, name: str) -> object:
    """Check a sampling setting of the model against the range of a profile. Raises BadModel."""
    try:
        return check(keys_of(Sample)[key].hint, value)
    except WrongValue as wrong:
        raise BadModel(
            f"generation_config.json of {name} cannot be used: {key} = {str(value)[:40]}",
            code="model_corrupt",
            lines=[wrong.message, *([wrong.hint] if wrong.hint else [])],
            try_=["download generation_config.json again"],
        ) from wrong
