"""Conversion of a GGUF file's metadata to config.json and tensor names. Standard library only.

It is strict: each key of the architecture is translated, known to have no effect, or refused by name. Otherwise an
ignored number would give wrong text without an error.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvcli.errors import BadModel
from kvcli.models.checkpoint import TensorHeader
from kvcli.models.gguf.header import BY_ARCH, SETTINGS, Header, Layout, Listed, floats
from kvcli.models.refusals import no_tokenizer

# values with which a key has no effect; None = any value
_HARMLESS: Mapping[str, tuple[object, ...] | None] = {
    "vocab_size": None,  # the embedding gives the number of rows
    "attention.layer_norm_epsilon": None,  # no supported architecture has such a norm
    "rope.scaling.finetuned": None,
    "rope.scaling.original_context_length": None,  # used only by kinds of scaling that are refused
    "rope.scaling.attn_factor": (1.0,),
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0,),
}
# keys of the tokenizer: translated or without effect, as are token ids; values as above
_WORDS: Mapping[str, tuple[object, ...] | None] = {
    **dict.fromkeys(("ggml.model", "ggml.pre", "ggml.tokens", "ggml.token_type", "ggml.scores", "ggml.merges")),
    **dict.fromkeys(("chat_template", "chat_templates", "huggingface.json", "ggml.token_type_count")),
    **dict.fromkeys(("ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_sep_token"), (True, False)),
    "ggml.add_space_prefix": (True, False),
    "ggml.remove_extra_whitespaces": (False,),
}
_NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}
# A byte-level vocabulary names the rule that splits text before merging. For an unknown rule transformers uses GPT-2's.
# It also misses rules that split each digit, and whole words that no merges produce (llama.cpp's ignore_merges).
WHOLE = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"}
DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}
SPLITS = WHOLE | {"smaug-bpe", "qwen2", "deepseek-r1-qwen", "gpt-4o"}
_ROPE = "rope_freqs.weight"
# llama3's RoPE scaling, of which a file states only the resulting factors: every release uses these numbers
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Source in the file of one transformers tensor."""

    stored: str  # name in the file
    heads: int  # heads whose rows are permuted; 0 = none
    plus: float  # constant added before storing


@dataclass(frozen=True, slots=True)
class Described:
    """A model as its file describes it; `pieces` by transformers' names."""

    config: dict[str, Any]
    pieces: Mapping[str, TensorSource]
    split: str  # splitting rule of its tokenizer, for a byte-level vocabulary

    def tensors(self, header: Header) -> dict[str, TensorHeader]:
        stored = {name: header.tensors[piece.stored] for name, piece in self.pieces.items()}
        return {name: TensorHeader(t.kind, t.shape, t.nbytes) for name, t in stored.items()}


def describe(header: Header, name: str) -> Described:
    """Translate a header to a model description. Raises BadModel where the computation would differ from the file's."""
    metadata = _Metadata(header, name)
    layout = metadata.layout
    config: dict[str, Any] = {"architectures": [layout.model], "model_type": layout.model_type}
    config |= {theirs: metadata.size(key) for key, theirs in SETTINGS.items() if metadata.has(key)}
    if missing := [key for key in _NEEDED if key not in config]:
        raise metadata.refused(f"it does not state its {missing[0]}")
    layers, heads, is_tied = config["num_hidden_layers"], config["num_attention_heads"], metadata.is_tied
    config = {"num_key_value_heads": heads, "head_dim": config["hidden_size"] // heads, **config}
    if not config["head_dim"]:
        raise metadata.refused(f"{heads:,} heads are more than its hidden size, {config['hidden_size']:,}")
    config["rms_norm_eps"] = metadata.number("attention.layer_norm_rms_epsilon", 1e-6)
    config["tie_word_embeddings"] = is_tied
    config |= {f"{ours}_token_id": metadata.token(theirs) for ours, theirs in _TOKENS.items()}
    if layers > len(header.tensors) or "token_embd.weight" not in header.tensors:
        raise metadata.refused(f"its {len(header.tensors):,} tensors do not hold {layers:,} layers and the embedding")
    config |= {"vocab_size": header.tensors["token_embd.weight"].shape[0], "dtype": _dtype(header)}
    if layout.chooses_bias:
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    config |= _gemma(metadata, config) if layout.is_gemma else {"rope_parameters": metadata.rope(config["head_dim"])}
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.has(key) and metadata.size(key) != config["head_dim"]:
            raise metadata.refused(f"{key} differs from the head size, {config['head_dim']:,}")
    metadata.refuse_rest()
    pieces = dict(_pieces(metadata, config))
    return Described(config, pieces, _check_words(metadata, config["vocab_size"]))


def _gemma(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    layers, period, rope = config["num_hidden_layers"], metadata.layout.period, metadata.rope(config["head_dim"])
    pattern = metadata.pop("attention.sliding_window_pattern")
    if isinstance(pattern, Listed) and len(pattern.values) == layers:
        slides = [bool(value) for value in pattern.values]
    elif pattern in (None, period):
        slides = [(i + 1) % period != 0 for i in range(layers)]
    else:
        raise metadata.refused(f"attention.sliding_window_pattern is {str(pattern)[:40]}")
    # the largest models of either generation, whose head size does not follow from their width (as in llama.cpp)
    is_largest = layers == {"gemma2": 46, "gemma3": 62}[metadata.layout.arch]
    heads = config["num_attention_heads"]
    found = {
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "query_pre_attn_scalar": config["hidden_size"] // heads if is_largest else config["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
    }
    near = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10000.0)}
    if metadata.layout.arch == "gemma3":
        found["rope_parameters"] = {"full_attention": rope, "sliding_attention": near}
        found["final_logit_softcapping"] = metadata.number("final_logit_softcapping", 0.0) or None
        return found
    if near["rope_theta"] != rope["rope_theta"]:
        raise metadata.refused("rope.freq_base_swa differs from rope.freq_base")
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # llama.cpp's values if none are stated
    return found | {"rope_parameters": rope, **{key: metadata.number(key, usual) for key, usual in caps.items()}}


def _pieces(metadata: _Metadata, config: Mapping[str, Any]) -> Iterator[tuple[str, TensorSource]]:
    """Sources of the tensors that transformers loads. Raises BadModel unless every tensor of the file is used."""
    left, layout = dict(metadata.header.tensors), metadata.layout
    left.pop(_ROPE, None)  # covered by the config
    sizes = [config[key] for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")]
    for theirs, ours, heads in layout.tensors(*sizes, is_tied=metadata.is_tied):
        tensor = left.pop(ours, None)
        if tensor is None and not layout.is_optional(theirs):
            raise BadModel(
                f"{metadata.name} is incomplete: it has no tensor {ours}",
                code="model_incomplete",
                lines=[str(metadata.header.path)],
                try_=["download the file again"],
            )
        if tensor is not None and heads and tensor.shape[0] % (2 * heads):
            raise metadata.refused(f"{ours} has {tensor.shape[0]:,} outputs, not a multiple of {heads:,} heads")
        if tensor is not None:
            yield theirs, TensorSource(ours, heads, 1.0 if layout.is_gemma and ours.endswith("norm.weight") else 0.0)
    if left:
        raise metadata.refused(f"its tensor {next(iter(left))[:80]} is unknown")


def _dtype(header: Header) -> str:
    """Default dtype for computing: float32 or float16 if most bytes of the file have it, else bfloat16."""
    held: dict[str, int] = {}
    for t in header.tensors.values():
        held[t.kind] = held.get(t.kind, 0) + t.nbytes
    most = max(held, key=lambda kind: held[kind])
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _check_words(metadata: _Metadata, rows: int) -> str:
    """Return the splitting rule of the tokenizer. Raises BadModel if the tokenizer is missing or of an unknown kind."""
    meta = metadata.header.meta
    words, kind, split = (meta.get(f"tokenizer.ggml.{key}") for key in ("tokens", "model", "pre"))
    if not isinstance(words, Listed) or not words.count:
        raise no_tokenizer(metadata.name, "the file holds weights and no vocabulary", "another GGUF file of the model")
    if words.count > rows:
        raise metadata.refused(f"its vocabulary has {words.count:,} tokens, its embedding {rows:,} rows")
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and split not in SPLITS | DIGITS | {"gpt-2"}):
        raise metadata.refused(f"tokenizer.ggml.model = {kind}, tokenizer.ggml.pre = {split} is not supported")
    kinds, leads = meta.get("tokenizer.ggml.token_type"), meta.get("tokenizer.ggml.add_space_prefix")
    if isinstance(kinds, Listed) and kinds.count != words.count:
        raise metadata.refused(f"its vocabulary has {words.count:,} tokens, but {kinds.count:,} token types")
    if leads and (kind == "gpt2" or metadata.layout.is_gemma):
        raise metadata.refused("tokenizer.ggml.add_space_prefix = True is not supported for its vocabulary")
    for key, value in meta.items():
        name = key.removeprefix("tokenizer.")
        if name != key and not name.startswith("chat_template.") and not name.endswith("_token_id"):
            harmless = _WORDS.get(name, ())
            if harmless is not None and value not in harmless:
                raise metadata.refused(f"{key} = {str(value)[:60]} is unknown and may change the output")
    return str(split) if kind == "gpt2" else ""


class _Metadata:
    """Metadata of a header. Each key is read once, so unread keys are known."""

    def __init__(self, header: Header, name: str) -> None:
        self.header, self.name = header, name
        arch = header.meta.get("general.architecture")
        kind = header.meta.get("general.type", "model")
        if arch not in BY_ARCH or kind != "model":
            what = f"architecture {str(arch)[:60]}" + (f", type {str(kind)[:60]}" if kind != "model" else "")
            raise self.refused(f"its {what} is none of {', '.join(BY_ARCH)}")
        self.layout: Layout = BY_ARCH[str(arch)]
        self._left = {k.removeprefix(f"{arch}."): v for k, v in header.meta.items() if k.startswith(f"{arch}.")}

    @property
    def is_tied(self) -> bool:
        return "output.weight" not in self.header.tensors

    def has(self, key: str) -> bool:
        return key in self._left

    def pop(self, key: str) -> object:
        return self._left.pop(key, None)

    def size(self, key: str) -> int:
        value = self.pop(key)
        if isinstance(value, Listed) and value.values and len(set(value.values)) == 1:
            value = value.values[0]
        if type(value) is not int or not 0 < value < 1 << 40:
            raise self.refused(f"{key} is {str(value)[:80]}: only one number for all layers is supported")
        return value

    def number(self, key: str, usual: float) -> float:
        value = usual if key not in self._left else self.pop(key)
        if not isinstance(value, float) or not 0 <= value < 3e38:  # range of float32
            raise self.refused(f"{key} is {str(value)[:80]}")
        return _written(value)

    def token(self, key: str) -> int | None:
        value = self.header.meta.get(f"tokenizer.ggml.{key}_token_id")
        return value if type(value) is int else None

    def rope(self, head: int) -> dict[str, Any]:
        theta, kind = self.number("rope.freq_base", 10000.0), self.pop("rope.scaling.type") or "linear"
        factor = self.number("rope.scaling.factor", 0.0) or self.number("rope.scale_linear", 0.0) or 1.0
        if kind not in ("linear", "none"):
            raise self.refused(f"rope.scaling.type is {str(kind)[:40]}")
        factor = 1.0 if kind == "none" else factor
        stretched = floats(self.header, _ROPE) if _ROPE in self.header.tensors else (1.0,)
        if not theta or not all(0 < s < math.inf for s in stretched):
            raise self.refused("its rope frequencies are no positive numbers")
        alike = float(f"{stretched[0]:.5g}")
        if all(math.isclose(s, alike, rel_tol=1e-5) for s in stretched):
            factor *= alike
        elif factor == 1.0 and self.layout.stretches and _is_llama3(stretched, theta, head):
            return {"rope_type": "llama3", "rope_theta": theta, "factor": max(stretched), **_LLAMA3}
        else:
            raise self.refused(f"{_ROPE} scales its rope in an unknown way")
        linear = {"rope_type": "linear", "factor": factor}
        return {"rope_theta": theta, **({"rope_type": "default"} if factor == 1.0 else linear)}

    def refuse_rest(self) -> None:
        for key, value in self._left.items():
            harmless = _HARMLESS.get(key, ())
            if harmless is not None and value not in harmless:
                raise self.refused(f"{self.layout.arch}.{key} = {str(value)[:60]} is unknown and may change the output")

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


def _is_llama3(stretched: tuple[float, ...], theta: float, head: int) -> bool:
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
