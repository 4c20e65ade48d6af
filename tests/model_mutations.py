"""Small model folders, whole, and one of endless ways to break them: what a stranger or a bad disk may hand over."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.families import build
from tests.small_tokenizers import byte_fallback

Files = dict[str, bytes]
_SMALL = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
_SEEDS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8, "eos_token_id": [2, 5]},
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {"head_dim": 8},
    "phi3": {},
}

# ---- values that a number, a name or a list may be replaced by; text, as JSON has no limits ----

_DEEP = "[" * 3000 + "]" * 3000
WEIRD = (
    "null", "true", "false", "[]", "{}", '""', '"x"', '"../../x"', "0", "1", "-1", "2", "7", "-7", "1.5", "255",
    "65537", str(2**31), str(2**31 - 1), str(2**63), str(-(2**63)), "1" + "0" * 400, "9" * 5000, "1e308", "1e999",
    "-1e999", "NaN", "Infinity", "-Infinity", "1e-300", "[1]", "[[1]]", "[-1, 1]", '{"a": 1}', '{"0": 0}',
    '"\\u0000"', '"\\ud800"', '"\\u001b]0;x\\u0007"', '"' + "A" * 70_000 + '"', "[" + "0," * 9999 + "0]", _DEEP,
    '"float32"', '"float8_e4m3fn"',
)  # fmt: skip
KEYS = (
    "num_hidden_layers", "n_layer", "num_layers", "hidden_size", "n_embd", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "intermediate_size", "max_position_embeddings", "n_positions",
    "layer_types", "rope_scaling", "rope_parameters", "rope_theta", "sliding_window", "sliding_window_pattern",
    "num_experts", "num_local_experts", "num_experts_per_tok", "quantization_config", "dtype", "torch_dtype",
    "eos_token_id", "bos_token_id", "pad_token_id", "auto_map", "architectures", "model_type", "tie_word_embeddings",
    "text_config", "vision_config", "num_labels", "id2label", "transformers_weights", "fusion_config",
    "per_layer_config", "is_encoder_decoder", "_name_or_path", "_attn_implementation", "attn_implementation",
    "pruned_heads", "rms_norm_eps", "hidden_act", "tokenizer_class", "do_sample", "temperature", "top_k", "top_p",
    "min_p", "repetition_penalty", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder",
    "model", "truncation", "padding", "chat_template", "unk_token", "extra_special_tokens",
    "additional_special_tokens", "weight_map", "metadata", "dtype", "shape", "data_offsets",
)  # fmt: skip


def seeds(folder: Path) -> list[Files]:
    """Whole models of a few designs, in one file and in several; `folder` is for the making."""
    found = []
    for name, changes in _SEEDS.items():
        for shard in ("1GB", "30KB"):
            path = folder / f"{name}-{shard}"
            build(name, **{**_SMALL, **changes}).save_pretrained(path, max_shard_size=shard)
            byte_fallback().save_pretrained(path)
            found.append({f.name: f.read_bytes() for f in sorted(path.iterdir())})
            shutil.rmtree(path)
    return found


def mutated(seed: Files, chance: Random) -> tuple[Files, str, str]:
    """The files with one to three changes, and which file takes the form of what else it may be ("" = none)."""
    files = dict(seed)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        name = chance.choice(sorted(files))
        if chance.random() < 0.08:
            other = chance.choice(sorted(files))
            files[name], files[other] = files[other], files[name]
        elif chance.random() < 0.3:
            files[name] = _bytes_changed(files[name], chance)
        elif name.endswith(".safetensors"):
            files[name] = _header_changed(files[name], chance)
        elif name == "tokenizer.json" and chance.random() < 0.3:
            files[name] = _steps_changed(files[name], chance)
        elif name.endswith(".json"):
            files[name] = _json_changed(files[name], chance)
        else:
            files[name] = _bytes_changed(files[name], chance)
    if chance.random() < 0.04:
        return files, chance.choice(sorted(files)), chance.choice(sorted(FORMS))
    return files, "", ""


def write(files: Files, folder: Path, name: str = "", form: str = "") -> None:
    """Put the files into an empty folder, the one called `name` in another form."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file, data in files.items():
        if file == name:
            FORMS[form](folder / file)
        else:
            (folder / file).write_bytes(data)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole: no byte of it is on the disk


FORMS: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "loop": _loop,
    "nothing": lambda path: None,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "huge": _huge,
    "closed": lambda path: path.symlink_to("/proc/1/mem"),
}


def _bytes_changed(data: bytes, chance: Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    match chance.randrange(5):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + chance.randbytes(chance.randrange(1, 20)) + data[at + chance.randrange(20) :]
        case 2:  # a stretch twice
            return data[:at] + data[max(0, at - chance.randrange(1, 200)) :]
        case 3:  # a stretch missing
            return data[:at] + data[at + chance.randrange(1, 200) :]
    flipped = bytearray(data)
    for _ in range(chance.choice((1, 1, 3, 30)) if flipped else 0):
        # the first bytes of weights are their header, where a flip matters
        at = chance.randrange(min(len(flipped), chance.choice((8, 4000, len(flipped)))))
        flipped[at] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def _header_changed(data: bytes, chance: Random) -> bytes:
    """Another header, of the length it says."""
    if len(data) < 8:
        return data
    (length,) = struct.unpack("<Q", data[:8])
    header = _json_changed(data[8 : 8 + length], chance)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def _json_changed(data: bytes, chance: Random) -> bytes:
    """One place of the tree changed: its value, its key, or that it is there."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes_changed(data, chance)
    places = list(_places(tree))
    if not places:
        return chance.choice(WEIRD).encode("utf-8", "surrogatepass")
    holder, key = chance.choice(places)
    mark = "\ufdd0here\ufdd0"  # replaced in the text: some of what is put there no writer of JSON would write
    match chance.randrange(6):
        case 0:
            del holder[key]
        case 1:
            other, its = chance.choice(places)
            holder[key], other[its] = other[its], holder[key]
        case 2 if isinstance(holder, dict):
            holder[chance.choice(KEYS)] = holder.pop(key)
        case 3 if isinstance(tree, dict):
            tree[chance.choice(KEYS)] = mark
        case _:
            holder[key] = mark
    try:
        text = json.dumps(tree, ensure_ascii=False)
    except (ValueError, RecursionError):  # swapped into itself
        return data
    return text.replace(json.dumps(mark, ensure_ascii=False), chance.choice(WEIRD)).encode("utf-8", "surrogatepass")


def _steps_changed(data: bytes, chance: Random) -> bytes:
    """Other steps before, at and behind the cutting of text: rules that may let it grow, patterns that may go back."""
    try:
        tree = json.loads(data)
        old = tree["added_tokens"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return _bytes_changed(data, chance)
    pattern = {chance.choice(("String", "Regex")): chance.choice(_PATTERNS)}
    step = {
        "normalizer": {
            "type": "Replace",
            "pattern": pattern,
            "content": chance.choice(("", "a", "aa", "a▁a", "x" * 999)),
        },
        "pre_tokenizer": {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": chance.random() < 0.3},
    }
    step["decoder"] = step["normalizer"]
    where, names = chance.choice([*step]), {"pre_tokenizer": "pretokenizers"}
    many = [step[where]] * chance.choice((1, 2, 9, 30))
    tree[where] = {"type": "Sequence", names.get(where, f"{where}s"): many}
    if isinstance(old, list) and chance.random() < 0.3:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), chance.random() < 0.5)
        old.append({"id": chance.choice((1, 382, 400)), "content": "aaa", "normalized": True, **flags})
    return json.dumps(tree).encode()


_PATTERNS = ("a", "e", "▁", "aa", "[a-z]", "(?=e)", "", "(e+e+)+x", ".*l", "e*", r"\s*\n+", "(", r"\p{L}+", "(?:l|l)*x")


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key or index) of every node below the root; of long lists and tables, the first hundred."""
    nodes = list(tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ())[:100]
    for key, value in nodes:
        yield tree, key
        yield from _places(value)
