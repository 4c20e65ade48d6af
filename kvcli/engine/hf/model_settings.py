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

from kvcli.models.checkpoint import count

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
