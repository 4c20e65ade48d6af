"""Tiny GGUF files, written with the gguf package's own names of keys and tensors, and the models they came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from tests.families import build

ARCHS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3"}  # family -> GGUF
VOCAB = 320
# of linear layers in turn
KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4", "F16", "BF16", "F32", "TQ1_0")
OF_256 = ("Q4_K", "Q6_K", "Q5_K", "Q3_K", "Q2_K", "IQ4_XS")
CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
_SIZES = {"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 4}
_GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 11}
_SLIDING = {"rope_type": "default", "rope_theta": 10000.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"head_dim": 64, "tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "gemma2": {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": True,
               "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {**_GEMMA, "num_hidden_layers": 7, "tie_word_embeddings": True,
               "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
               "rope_parameters": {"sliding_attention": _SLIDING,
                                   "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}},
}  # fmt: skip


def write(
    path: Path,
    family: str = "llama",
    kinds: tuple[str, ...] = KINDS,
    *,
    keys: Mapping[str, object] = {},
    tensors: Mapping[str, np.ndarray] = {},
    drop: tuple[str, ...] = (),
    words: int = VOCAB,
    ends: str = "Q8_0",
    split: int = 0,
    **changes: Any,
) -> PreTrainedModel:
    """Write a file and return transformers' model with the numbers that its blocks stand for, in float32.

    `kinds` are those of linear layers in turn, `ends` that of embedding and head. `keys` and `tensors` come on top;
    what is in `drop`, of either, is left out. `split`: tensors of a file, if there are to be several.
    """
    model = build(family, **{**_SIZES, **SETTINGS[family], **changes})
    c, arch = model.config, ARCHS[family]
    if arch.startswith("gemma"):  # or a token's own row outweighs what the layers say, and one is repeated for ever
        model.get_input_embeddings().weight.mul_(0.05)
    names = names_of(arch, c.num_hidden_layers)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    said = {**_keys(arch, c), **vocabulary(arch, words), **keys}
    for key, value in said.items():
        if key not in drop:
            put(writer, key, value)
    turn = 0
    for name, weight in tensors_of(model).items():
        base, _, part = name.rpartition(".")
        ours = f"{names.get_name(base)}.{part}"
        kind = (
            "F32" if weight.dim() == 1 else ends if "embed" in name or "lm_head" in name else kinds[turn % len(kinds)]
        )
        turn += weight.dim() == 2
        if ours not in drop:
            weight.copy_(_tensor(writer, ours, weight, kind, c, arch))
    for ours, numbers in tensors.items():
        writer.add_tensor(ours, numbers)
    finish(writer)
    return model


def names_of(arch: str, layers: int) -> Any:
    """Return llama.cpp's names of an architecture's tensors."""
    return gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), layers)


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors that a file has: no head that is tied to the embedding."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set[str]()
    return {name: weight for name, weight in model.state_dict().items() if name not in tied}


def finish(writer: Any) -> None:
    """Write all that was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensor(writer: Any, name: str, weight: torch.Tensor, kind: str, c: Any, arch: str) -> torch.Tensor:
    """Write one as llama.cpp's converter does; what comes back is what the file says."""
    numbers = weight.numpy().copy()
    heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}.get(name.split(".")[-2])
    permutes = arch == "llama" and heads
    if permutes:  # as convert_hf_to_gguf.py spells it
        numbers = numbers.reshape(heads, 2, numbers.shape[0] // heads // 2, *numbers.shape[1:]).swapaxes(1, 2)
    numbers = numbers.reshape(weight.shape)
    plus = float(arch.startswith("gemma") and name.endswith("norm.weight"))
    raw, what = _raw(np.ascontiguousarray(numbers + np.float32(plus)), kind)
    writer.add_tensor(name, raw, raw_dtype=what)
    back = gguf.quants.dequantize(raw, what).reshape(numbers.shape) - np.float32(plus)
    if permutes:
        back = back.reshape(heads, numbers.shape[0] // heads // 2, 2, *numbers.shape[1:]).swapaxes(1, 2)
    return torch.from_numpy(np.ascontiguousarray(back.reshape(weight.shape)))


def _raw(numbers: np.ndarray, kind: str) -> tuple[np.ndarray, Any]:
    what = gguf.GGMLQuantizationType[kind]
    block, _ = gguf.constants.GGML_QUANT_SIZES[what]
    if kind == "F32":
        return numbers, what
    if block == 256 and numbers.shape[-1] % block:
        return _raw(numbers, "Q8_0")
    if kind in SCALES:
        return blocks(kind, *numbers.shape, seed=crc32(numbers)), what
    return gguf.quants.quantize(numbers, what), what


# of types that the package unpacks and does not make: bytes of the float16 scales, and scales for weights around 0.25
SCALES = {
    "Q2_K": (slice(80, 84), [0.008, 0.008]), "Q3_K": (slice(108, 110), [0.004]), "Q4_K": (slice(0, 4), [0.0008, 0.006]),
    "Q5_K": (slice(0, 4), [0.0008, 0.006]), "Q6_K": (slice(208, 210), [0.00008]), "IQ4_NL": (slice(0, 2), [0.002]),
    "IQ4_XS": (slice(0, 2), [0.0001]),
}  # fmt: skip


def blocks(kind: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Rows of blocks of any bytes, with such scales."""
    block, nbytes = gguf.constants.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng((n, seed))
    raw = rng.integers(0, 256, (n * k // block, nbytes), dtype=np.uint8)
    at, scales = SCALES[kind]
    raw[:, at] = (rng.uniform(0.5, 1, (len(raw), len(scales))) * scales).astype(np.float16).view(np.uint8)
    return raw.reshape(n, -1)


def _keys(arch: str, c: Any) -> dict[str, object]:
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    rope = c.rope_parameters
    theta = (rope.get("full_attention") or rope)["rope_theta"]
    keys: dict[str, object] = {
        "general.type": "model",
        "general.name": "tiny",
        "general.file_type": 1,
        f"{arch}.context_length": c.max_position_embeddings,
        f"{arch}.embedding_length": c.hidden_size,
        f"{arch}.block_count": c.num_hidden_layers,
        f"{arch}.feed_forward_length": c.intermediate_size,
        f"{arch}.attention.head_count": c.num_attention_heads,
        f"{arch}.attention.head_count_kv": c.num_key_value_heads,
        f"{arch}.attention.key_length": head,
        f"{arch}.attention.value_length": head,
        f"{arch}.attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        f"{arch}.rope.freq_base": float(theta),
    }
    if arch.startswith("gemma"):
        keys[f"{arch}.attention.sliding_window"] = c.sliding_window
    if arch == "gemma2":
        keys[f"{arch}.attn_logit_softcapping"] = c.attn_logit_softcapping
        keys[f"{arch}.final_logit_softcapping"] = c.final_logit_softcapping
    if arch == "gemma3":
        keys |= {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": 8.0}
    return keys


def vocabulary(arch: str, count: int) -> dict[str, object]:
    """A vocabulary of bytes with two merges; that of gemma as sentencepiece has it."""
    ids = {f"tokenizer.ggml.{kind}_token_id": i for i, kind in enumerate(("padding", "bos", "eos", "unknown"))}
    if arch.startswith("gemma"):
        tokens = ["<pad>", "<bos>", "<eos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
        kinds = [3, 3, 3, 2, 3, 3, 3] + [6] * 256
        tokens += [f"<0x{b:02X}>" for b in range(256)] + ["▁", *"abcdefghijklmnopqrst", "th", "▁a"]
        kinds += [1] * (len(tokens) - len(kinds))
        said: dict[str, object] = {"model": "llama", "pre": "default", "add_space_prefix": False}
        said["scores"] = [-float(i) for i in range(count)]
        if arch == "gemma4":
            said |= {"model": "gemma4", "merges": ["t h", "▁ a"], "add_bos_token": True}
            del said["pre"]
    else:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", *bytes_to_unicode().values(), "th", "Ġa"]
        kinds = [3, 3, 3, 3] + [1] * (len(tokens) - 4)
        said = {"model": "gpt2", "pre": "smollm", "merges": ["t h", "Ġ a"]}
        ids["tokenizer.chat_template"] = CHAT  # type: ignore[assignment]
    more = count - len(tokens)
    said["tokens"] = tokens[:count] + [f"<unused{i}>" for i in range(more)]
    said["token_type"] = kinds[:count] + [5] * more
    return {f"tokenizer.ggml.{key}": value for key, value in said.items()} | ids


def put(writer: Any, key: str, value: object) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}[type(value)](
            key, value
        )
