"""Conversion of a GGUF file's metadata to config.json and tensor names.

It is strict: each key of the architecture is translated, known to have no effect, or refused by name. Otherwise an
ignored number would give wrong text without an error.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from kvcli.errors import BadModel
from kvcli.models.checkpoint import TensorHeader
from kvcli.models.gguf.architectures import (
    SETTINGS,
    Architecture,
    Names,
    Part,
    Piece,
    Setting,
    Size,
    architectures,
    full_names,
    table,
)
from kvcli.models.gguf.header import Header, Listed, Stored, floats
from kvcli.models.gguf.words import check_words

_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")
_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}
_ROPE, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
# llama3's RoPE scaling, of which a file states only the resulting factors: every release uses these numbers
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LISTS = ("attention.head_count_kv", "feed_forward_length")  # keys that may state a number per layer
_UNTURNED = 1e29  # factors of frequencies above which a number is not rotated at all
_OF_SHARED = ("k_proj.weight", "v_proj.weight", "k_norm.weight")  # unused in layers that read the KV of another


@dataclass(frozen=True, slots=True)
class Described:
    """A model as its file describes it; `pieces` by transformers' names."""

    config: dict[str, Any]
    pieces: Mapping[str, Piece]
    split: str  # splitting rule of its tokenizer, for a byte-level vocabulary

    def tensors(self, header: Header) -> dict[str, TensorHeader]:
        found = {}
        for name, piece in self.pieces.items():
            stored = [header.tensors[part.stored] for part in piece.parts]
            nbytes = sum(t.nbytes * prod(p.view) // _rows(t, p) for t, p in zip(stored, piece.parts, strict=True))
            is_made = not piece.is_plain or len({t.kind for t in stored}) > 1
            found[name] = TensorHeader(stored[0].kind, piece.shape, nbytes, is_made, piece.is_turned)
        return found


def describe(header: Header, name: str) -> Described:
    """Translate a header to a model description. Raises BadModel where the computation would differ from the file's."""
    metadata = _Metadata(header, name)
    layout, tensors = metadata.layout, header.tensors
    config: dict[str, Any] = {"architectures": [layout.model], "model_type": layout.model_type}
    config |= {
        theirs: metadata.size(key) for key, theirs in SETTINGS.items() if key not in _LISTS and metadata.has(key)
    }
    if config.get("num_hidden_layers", 0) > len(tensors) or "token_embd.weight" not in tensors:
        layers = config["num_hidden_layers"]
        raise metadata.refused(f"its {len(tensors):,} tensors do not hold {layers:,} layers and the embedding")
    if missing := [key for key in _NEEDED[:3] if key not in config]:
        raise metadata.refused(f"it does not state its {missing[0]}")
    blocks = config["num_hidden_layers"]
    if layout.mtp and metadata.left.get("nextn_predict_layers"):
        config[layout.mtp_names[2]] = metadata.size("nextn_predict_layers")
        config["num_hidden_layers"] -= config[layout.mtp_names[2]]
    config[layout.epsilon[1]] = metadata.number(layout.epsilon[0], math.nan)
    config |= {"tie_word_embeddings": "output.weight" not in tensors, "dtype": _dtype(header)}
    config |= {f"{ours}_token_id": metadata.token(theirs) for ours, theirs in _TOKENS.items()}
    embeddings = {"vocab_size": "token_embd.weight", "vocab_size_per_layer_input": "per_layer_token_embd.weight"}
    config |= {theirs: tensors[ours].shape[0] for theirs, ours in embeddings.items() if ours in tensors}
    config |= {theirs: any(name.endswith(f".{ours}") for name in tensors) for theirs, ours in layout.shows.items()}
    layers = [_layer(metadata, i) for i in range(blocks)]
    if layout.kinds:
        config["layer_types"] = [kind for kind, _ in layers[: config["num_hidden_layers"]]]
    if layout.period:
        config |= _windows(metadata, blocks)
    config |= _heads(metadata, config)
    config["rope_parameters"] = _ropes(metadata, config)
    for key, settings in layout.keys.items():
        _set(config, {s.name: metadata.setting(key, s, config) for s in settings})
        metadata.left.pop(key, None)
    _set(config, layout.fixed)
    alone = blocks - (config.get("num_kv_shared_layers") or 0)  # layers that store their own KV
    config |= {to: any(f"blk.{i}.{of}" not in tensors for i in range(alone)) for to, of in layout.lacks.items()}
    if "num_global_key_value_heads" in config and not any(config[to] for to in layout.lacks):
        raise metadata.refused("attention.head_count_kv differs between layers that have values of their own")
    config |= _widths(metadata, config)
    if missing := [key for key in _NEEDED if config.get(key) is None]:
        raise metadata.refused(f"it does not state its {missing[0]}")
    config |= {"sliding_window": config.get("sliding_window") or None}
    metadata.refuse_rest()
    pieces = dict(_pieces(metadata, config, [names for _, names in layers]))
    return Described(config, pieces, check_words(header, config["vocab_size"], layout.leads, metadata.refused, name))


def _set(config: dict[str, Any], values: Mapping[str, object]) -> None:
    """Set values by their names, of which one may be inside another setting."""
    for name, value in values.items():
        outer, _, inner = name.rpartition(".")
        (config[outer] if outer else config)[inner] = value


def _layer(metadata: _Metadata, i: int) -> tuple[str, Names]:
    """Kind and tensors of a layer, by the tensors that the file has for it."""
    layout, stored = metadata.layout, metadata.header.tensors

    def first(names: Names) -> str:
        return f"blk.{i}.{next(full_names(names))[1][0].parts[0].stored}"

    kind = next((kind for kind, names in layout.kinds.items() if first(names) in stored), "")
    block = next((names for names in layout.blocks if first(names) in stored), None)
    if layout.kinds and not kind:
        raise metadata.incomplete(first(next(iter(layout.kinds.values()))))
    if layout.blocks and block is None:
        raise metadata.incomplete(first(layout.blocks[-1]))
    return kind, {**layout.layer, **layout.kinds.get(kind, {}), **(block or {})}


def _windows(metadata: _Metadata, layers: int) -> dict[str, Any]:
    """Window, and the layers that have it."""
    period, pattern = metadata.layout.period, metadata.left.pop("attention.sliding_window_pattern", None)
    if isinstance(pattern, Listed) and len(pattern.values) == layers:
        slides = [bool(value) for value in pattern.values]
    elif pattern in (None, period):
        slides = [(i + 1) % period != 0 for i in range(layers)]
    else:
        raise metadata.refused(f"attention.sliding_window_pattern is {str(pattern)[:40]}")
    kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    return {"sliding_window": metadata.size("attention.sliding_window"), "layer_types": kinds}


def _heads(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and counts of heads."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head = config.get("head_dim", hidden // heads)
    if not head:
        raise metadata.refused(f"{heads:,} heads are more than its hidden size, {hidden:,}")
    found = {"head_dim": head, **_kv_heads(metadata, config)}
    if metadata.has("attention.kv_lora_rank"):  # keys and values of all heads are made from one latent
        rope, value = metadata.size("rope.dimension_count"), metadata.size("attention.value_length", head)
        full = metadata.size("attention.key_length_mla", head)
        value = metadata.size("attention.value_length_mla", value)
        if full <= rope:
            raise metadata.refused(f"rope.dimension_count differs from the head size, {full:,}")
        sizes = {"qk_rope_head_dim": rope, "qk_nope_head_dim": full - rope, "v_head_dim": value, "head_dim": rope}
        return found | sizes | {"num_key_value_heads": heads}
    if metadata.has("attention.key_length_swa"):  # layers with a window have heads of another size
        found |= {"global_head_dim": head, "head_dim": metadata.size("attention.key_length_swa")}
    near = found["head_dim"]
    for key, of in {"value_length": head, "value_length_swa": near}.items():
        if metadata.size(f"attention.{key}", of) != of:
            raise metadata.refused(f"attention.{key} differs from the head size, {of:,}")
    if metadata.layout.scaled_by_width:
        is_it = config["num_hidden_layers"] == metadata.layout.scaled_by_width
        found["query_pre_attn_scalar"] = hidden // heads if is_it else head
    return found


def _kv_heads(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """KV heads: one number for all layers that have any, or one for each kind of attention."""
    key, kinds = "attention.head_count_kv", config.get("layer_types", ())
    found = set(zip(kinds, metadata.listed(key), strict=False)) if len(metadata.listed(key)) == len(kinds) else set()
    if {kind for kind, _ in found} == {"sliding_attention", "full_attention"} and len(found) == 2:
        metadata.left.pop(key, None)
        counts = dict(found)
        near = {"num_key_value_heads": counts["sliding_attention"]}
        return near | {"num_global_key_value_heads": counts["full_attention"]}
    return {"num_key_value_heads": metadata.size(key, config["num_attention_heads"])}


def _widths(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Width of the feed-forward layers, which may be twice as wide where layers share their KV."""
    key, shared = "feed_forward_length", config.get("num_kv_shared_layers") or 0
    width, *_ = listed = metadata.listed(key) or (config.get("intermediate_size", config.get("moe_intermediate_size")),)
    if shared and listed == (width,) * (config["num_hidden_layers"] - shared) + (2 * width,) * shared:
        metadata.left.pop(key, None)
        return {"intermediate_size": width, "use_double_wide_mlp": True}
    return {"intermediate_size": metadata.size(key) if metadata.has(key) else width}


def _ropes(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """RoPE, by kind of attention if layers with a window have another."""
    rope = metadata.rope(config.get("global_head_dim") or config["head_dim"], "qk_rope_head_dim" in config)
    if rope["rope_type"] == "longrope":
        config["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    near, turned = "rope.freq_base_swa", "rope.dimension_count_swa"
    if metadata.size(turned, config["head_dim"]) != config["head_dim"]:
        raise metadata.refused(f"{turned} differs from the head size, {config['head_dim']:,}")
    if metadata.layout.has_two_ropes:
        sliding = {
            "rope_type": "default",
            "rope_theta": metadata.number(near, math.nan if "global_head_dim" in config else 10000.0),
        }
        return {"full_attention": rope, "sliding_attention": sliding}
    if metadata.number(near, rope["rope_theta"]) != rope["rope_theta"]:
        raise metadata.refused(f"{near} differs from rope.freq_base")
    return rope


def _pieces(metadata: _Metadata, config: Mapping[str, Any], layers: list[Names]) -> Iterator[tuple[str, Piece]]:
    """Sources of the tensors that transformers loads. Raises BadModel unless every tensor of the file is used."""
    tensors, used = metadata.header.tensors, metadata.used
    layout, n = metadata.layout, config["num_hidden_layers"]
    shares = len(layers) - (config.get("num_kv_shared_layers") or 0)  # the first layer that reads the KV of another
    groups = [(-1, layout.outer, "", "")]
    groups += [(i, names, f"model.layers.{i}.", f"blk.{i}.") for i, names in enumerate(layers[:n])]
    for i, names in enumerate(layers[n:], n):
        outer, inner = (prefix.format(i=i, j=i - n) for prefix in layout.mtp_names[:2])
        groups += [(-1, layout.mtp, outer, f"blk.{i}."), (-1, names, inner, f"blk.{i}.")]
    for layer, names, theirs, below in groups:
        for name, options in full_names(names):
            stored = [[below + part.stored.removesuffix(".") for part in piece.parts] for piece in options]
            at = next((i for i, parts in enumerate(stored) if parts[0] in tensors), None)
            if at is None and not options[-1].is_optional:
                raise metadata.incomplete(stored[0][0])
            if at is None:
                continue
            if lacking := [part for part in stored[at] if part not in tensors]:
                raise metadata.incomplete(lacking[0])
            used.update(stored[at])
            if layer < shares or not name.endswith(_OF_SHARED):
                yield theirs + name, _of_file(metadata, options[at], stored[at], config)
    if left := [name for name in tensors if name not in used]:
        raise metadata.refused(f"its tensor {left[0][:80]} is unknown")


def _of_file(metadata: _Metadata, piece: Piece, names: list[str], config: Mapping[str, Any]) -> Piece:
    """The piece with the sizes of the file. Raises BadModel if the stored tensors do not have them."""

    def sizes(given: Sequence[Size]) -> tuple[int, ...]:
        return tuple(config[size] if isinstance(size, str) else size for size in given)

    def filled(given: Sequence[Size], total: int) -> tuple[int, ...]:
        """Replace -1 by what is left. Raises BadModel unless the product is the total."""
        known = prod(size for size in sizes(given) if size != -1)
        found = tuple(total // max(1, known) if size == -1 else size for size in sizes(given))
        if prod(found) != total or not total:
            wants = " x ".join(f"{size:,}" for size in sizes(given) if size != -1)
            raise metadata.refused(f"{names[0]} has {total:,} outputs, not a multiple of {wants}")
        return found

    stored, parts = [metadata.header.tensors[name] for name in names], list[Part]()
    for part, name, tensor in zip(piece.parts, names, stored, strict=True):
        part = replace(part, stored=name, by="numbers" if len(tensor.shape) == 1 else part.by)
        skip = prod(sizes(part.skip)) if part.skip else 0
        take = prod(sizes(part.take)) if part.take else _rows(tensor, part) - skip
        if not 0 < take <= _rows(tensor, part) - skip:
            raise metadata.refused(f"{name} has {_rows(tensor, part):,} outputs, fewer than its heads have")
        parts.append(replace(part, skip=(skip,), take=(take,), view=filled(part.view, take)))
    lead, rows = stored[0].shape[:-2], [prod(part.view) for part in parts]
    groups = {0: prod(lead), -1: rows[0]}.get(each := sizes((piece.groups,))[0], each)
    widths = {prod(tensor.shape) // _rows(tensor, part) for tensor, part in zip(stored, parts, strict=True)}
    if len(widths) > 1 or any(n % groups for n in rows) or sum(rows) % prod(lead):
        raise metadata.refused(f"{', '.join(names)} do not fit each other: {[list(t.shape) for t in stored]}")
    matrix = (sum(rows) // prod(lead), *widths)
    natural = stored[0].shape if len(stored[0].shape) == 1 else (*lead, *(matrix[::-1] if piece.is_turned else matrix))
    shape = filled(piece.shape or natural, sum(rows) * sum(widths))
    of_norms = metadata.layout.offset if names[0].endswith("norm.weight") else 0.0
    offset = of_norms if piece.offset is None else piece.offset
    return replace(piece, parts=tuple(parts), groups=groups, shape=shape, offset=offset)


def _rows(tensor: Stored, part: Part) -> int:
    """Number of rows of a tensor, of which rows, columns or numbers count as rows."""
    return prod(tensor.shape) // {"rows": tensor.shape[-1], "columns": tensor.shape[-2:][0], "numbers": 1}[part.by]


def _dtype(header: Header) -> str:
    """Default dtype for computing: float32 or float16 if most bytes of the file have it, else bfloat16."""
    held: dict[str, int] = {}
    for t in header.tensors.values():
        held[t.kind] = held.get(t.kind, 0) + t.nbytes
    most = max(held, key=lambda kind: held[kind])
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


class _Metadata:
    """Metadata of a header. Each key is read once, so unread keys are known."""

    def __init__(self, header: Header, name: str) -> None:
        self.header, self.name = header, name
        self.used: set[str] = set()  # tensors
        arch = header.meta.get("general.architecture")
        kind = header.meta.get("general.type", "model")
        if arch not in architectures() or kind != "model":
            what = f"architecture {str(arch)[:60]}" + (f", type {str(kind)[:60]}" if kind != "model" else "")
            raise self.refused(f"its {what} is none of {', '.join(architectures())}")
        self.left = {k.removeprefix(f"{arch}."): v for k, v in header.meta.items() if k.startswith(f"{arch}.")}
        classes = architectures()[str(arch)]
        self.layout: Architecture = next(
            (one for one in classes if not one.when or self.left.get(one.when)), classes[-1]
        )

    def has(self, key: str) -> bool:
        return key in self.left

    def listed(self, key: str) -> tuple[Any, ...]:
        """Numbers of a key that states one per layer; () if it states another kind of value. The key remains."""
        value = self.left.get(key)
        return value.values if isinstance(value, Listed) else ()

    def size(self, key: str, usual: object = None) -> int:
        value = self.left.pop(key, usual)
        if isinstance(value, Listed) and len(numbers := {number for number in value.values if number}) == 1:
            (value,) = numbers
        if type(value) is not int or not 0 < value < 1 << 40:
            raise self.refused(f"{key} is {str(value)[:80]}: only one number for all layers is supported")
        return value

    def number(self, key: str, usual: float) -> float:
        value = usual if key not in self.left else self.left.pop(key)
        if not isinstance(value, float) or not 0 <= value < 3e38:  # range of float32
            raise self.refused(f"{key} is {str(value)[:80]}")
        return _written(value)

    def setting(self, key: str, to: Setting, config: Mapping[str, Any]) -> object:
        """Value of a setting that a key states; the key remains."""
        value, per = self.left.get(key), config[to.per] if to.per else 1
        if value is None and (to.is_optional or to.usual is not None):
            return to.usual
        if value is None:
            raise self.refused(f"it does not state its {to.name}")
        if to.values and str(value).lower() in to.values:
            return to.values[str(value).lower()] or None
        if isinstance(value, float) and 0 <= value < 3e38:
            return _written(value)
        if to.values or not isinstance(value, int) or not (0 <= value < 1 << 40 and per) or value % per:
            raise self.refused(f"{key} is {str(value)[:80]}")
        return value if isinstance(value, bool) else value // per

    def token(self, key: str) -> int | None:
        value = self.header.meta.get(f"tokenizer.ggml.{key}_token_id")
        return value if type(value) is int else None

    def rope(self, head: int, is_own: bool) -> dict[str, Any]:
        """RoPE of a head; `is_own`: all of the numbers that it gets are rotated."""
        theta, kind = self.number("rope.freq_base", 10000.0), self.left.pop("rope.scaling.type", None) or "linear"
        found: dict[str, Any] = {"rope_theta": theta}
        factor = self.number("rope.scaling.factor", 0.0) or self.number("rope.scale_linear", 0.0) or 1.0
        dims = head if is_own else self.size("rope.dimension_count", head)
        if dims > head or int(head * (dims / head)) != dims or (dims < head and not self.layout.is_partial):
            raise self.refused(f"rope.dimension_count differs from the head size, {head:,}")
        if self.layout.is_partial:
            found["partial_rotary_factor"] = dims / head
        stretched, original = self.factors(_ROPE) or (1.0,), "rope.scaling.original_context_length"
        if not theta:
            raise self.refused("its rope frequencies are no positive numbers")
        if self.layout.stretches == "longrope" and kind in ("linear", "longrope") and (long := self.factors(_LONG)):
            found |= {"rope_type": "longrope", "original_max_position_embeddings": self.size(original)}
            if self.has("rope.scaling.attn_factor"):
                found["attention_factor"] = self.number("rope.scaling.attn_factor", 1.0)
            return found | {"long_factor": long, "short_factor": self.factors(_SHORT)}
        if kind == "yarn" and self.has(original) and set(stretched) == {1.0} and self.layout.stretches != "longrope":
            found |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": self.size(original)}
            betas = {beta: f"rope.scaling.yarn_{beta}" for beta in ("beta_fast", "beta_slow")}
            found |= {beta: self.number(key, 0.0) for beta, key in betas.items() if self.has(key)}
            if self.layout.log_mul and self.has("rope.scaling.yarn_log_multiplier"):
                scale = _written(self.number("rope.scaling.yarn_log_multiplier", 0.0) / self.layout.log_mul)
                found |= {"mscale": scale, "mscale_all_dim": scale}
            return found
        if kind not in ("linear", "none"):
            raise self.refused(f"rope.scaling.type is {str(kind)[:40]}")
        factor, alike = 1.0 if kind == "none" else factor, float(f"{stretched[0]:.5g}")
        if self.layout.stretches == "proportional" and factor == 1.0:
            ones = stretched.count(1.0)
            if list(stretched[:ones]) == [1.0] * ones and all(s > _UNTURNED for s in stretched[ones:]):
                return found | {"rope_type": "proportional", "partial_rotary_factor": ones / len(stretched)}
        if all(math.isclose(s, alike, rel_tol=1e-5) for s in stretched):
            factor *= alike
            return found | ({"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor})
        if factor == 1.0 and self.layout.stretches == "llama3" and _is_llama3(stretched, theta, head):
            return found | {"rope_type": "llama3", "factor": max(stretched), **_LLAMA3}
        raise self.refused(f"{_ROPE} scales its rope in an unknown way")

    def factors(self, name: str) -> list[float]:
        """Factors of RoPE frequencies, [] if the file has no such tensor."""
        self.used.add(name)
        found = [_written(s) for s in floats(self.header, name)] if name in self.header.tensors else []
        if not all(0 < s < math.inf for s in found):
            raise self.refused("its rope frequencies are no positive numbers")
        return found

    def refuse_rest(self) -> None:
        for key, value in self.left.items():
            harmless = "any" if key in self.layout.implied else table()["harmless"].get(key, [])
            if harmless != "any" and value not in harmless:
                raise self.refused(f"{self.layout.arch}.{key} = {str(value)[:60]} is unknown and may change the output")

    def incomplete(self, tensor: str) -> BadModel:
        return BadModel(
            f"{self.name} is incomplete: it has no tensor {tensor}",
            code="model_incomplete",
            lines=[str(self.header.path)],
            try_=["download the file again"],
        )

    def refused(self, why: str, *try_: str) -> BadModel:
        return BadModel(
            f"{self.name} is a GGUF file that kvcli does not read: {why}",
            code="gguf_unsupported",
            lines=[str(self.header.path)],
            try_=[*try_, "the model as safetensors, or llama.cpp for this file"],
        )


def _written(value: float) -> float:
    """Shortest decimal that float32 stores as this value: 9.999999974752427e-07 was 1e-06."""
    as_stored = struct.pack("<f", value)
    short = (float(f"{value:.{digits}g}") for digits in range(1, 9))
    return next((s for s in short if struct.pack("<f", s) == as_stored), value)


def _is_llama3(stretched: Sequence[float], theta: float, head: int) -> bool:
    """True if these are the factors of llama3's RoPE scaling, to float32 precision."""
    most, low, high, length = max(stretched), *_LLAMA3.values()

    def factor(i: int) -> float:
        # rotations of this frequency in the original context
        turns: float = length / (2 * math.pi * theta ** (2 * i / head))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        return 1 / ((1 - smooth) / most + smooth)

    return len(stretched) == head // 2 and all(
        math.isclose(had, factor(i), rel_tol=1e-5) for i, had in enumerate(stretched)
    )
