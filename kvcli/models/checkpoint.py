"""Checkpoint files: headers of safetensors files, sizes of the weights, and quantized formats.

Standard library only.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from kvcli.errors import BadModel
from kvcli.installing import pip
from kvcli.settings.small_file import Unfit, open_regular, parse_object

# Headers of safetensors files: their tensors, and a check of the file's length. Standard library only.

_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_LARGEST = 32 << 20  # bytes of a header; a model of a trillion weights in one file needs a tenth
_ABSURD = 1 << 56  # bytes or numbers
_RANK = 16  # dimensions


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor in the header of its file."""

    dtype: str  # in safetensors' spelling: BF16, F32, ...
    shape: tuple[int, ...]
    nbytes: int
    is_made: bool = False  # its numbers are computed from those of the file, so none of the file's blocks is used
    is_turned: bool = False  # the file has each of its matrices transposed

    @property
    def in_file(self) -> tuple[int, ...]:
        """Its shape with the file's matrices."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.is_turned else self.shape


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A weight file. `tensors` is empty for a pickle, which lists none before it is run."""

    path: Path
    nbytes: int
    tensors: Mapping[str, TensorHeader]


def read_header(file: Path) -> WeightFile:
    """Read the tensors in the header of a safetensors file, after checking the file's length."""
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = _length(file, stream.read(8), size)
            header = parse_object(stream.read(length))
    except (Unfit, OSError) as error:
        raise corrupt(file, f"it {error}" if isinstance(error, Unfit) else str(error)) from error
    header.pop("__metadata__", None)
    try:
        tensors = {name: _tensor(entry) for name, entry in header.items()}
        end = _end(entry["data_offsets"] for entry in header.values())
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise corrupt(file, f"its header cannot be read: {error}") from error
    if size != 8 + length + end:
        cut = f"{8 + length + end - size:,} bytes are missing" if size < 8 + length + end else "the file is too long"
        raise corrupt(file, f"its header announces {8 + length + end:,} bytes, the file has {size:,}: {cut}")
    return WeightFile(file, size, tensors)


def _length(file: Path, first: bytes, size: int) -> int:
    """Bytes of the header, from the first eight bytes of the file."""
    if first == b"version ":  # a git-lfs pointer, left by `git clone` without lfs
        raise corrupt(file, "it is a git-lfs pointer, not the weights", ["git lfs pull"])
    if len(first) < 8:
        raise corrupt(file, f"it has {size} bytes")
    (length,) = struct.unpack("<Q", first)
    if length > size - 8:
        raise corrupt(file, f"its header needs {length + 8:,} bytes, the file has {size:,}")
    if length > _LARGEST:
        raise corrupt(file, f"its header has {length:,} bytes; the limit is {_LARGEST:,}")
    return int(length)


def _tensor(entry: Mapping[str, Any]) -> TensorHeader:
    begin, end = entry["data_offsets"]
    if len(entry["shape"]) > _RANK:
        raise ValueError(f"a tensor has {len(entry['shape']):,} dimensions")
    shape = tuple(_count(n) for n in entry["shape"])
    nbytes = _count(end) - _count(begin)
    dtype = entry["dtype"]
    if not isinstance(dtype, str):
        raise TypeError(f"{dtype!r} is not a dtype")
    bits = _BITS.get(dtype)
    if nbytes < 0 or (bits is not None and math.prod(shape) * bits != nbytes * 8):
        raise ValueError(f"a tensor of shape {list(shape)} in {dtype} cannot have {nbytes} bytes")
    return TensorHeader(dtype, shape, nbytes)


def _end(offsets: Iterable[list[int]]) -> int:
    """End of the last tensor. Raises ValueError if tensors leave holes or overlap."""
    at = 0
    for begin, end in sorted(offsets):
        if begin != at:
            raise ValueError(f"a tensor begins at byte {begin:,}, and the one before it ends at {at:,}")
        at = end
    return at


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < _ABSURD:
        raise ValueError(f"{str(value)[:40]} is not a size")
    return value


def corrupt(file: Path, why: str, try_: Sequence[str] = ()) -> BadModel:
    return BadModel(
        f"{file.name} is damaged or cut short",
        code="model_corrupt",
        lines=[f"{file}: {why}"],
        detail={"file": str(file)},
        try_=[*try_, f"download {file.name} again"],
    )


# Sizes in a model's config, type-checked and compared with the headers of its weight files. Standard library only.


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


# Quantized checkpoints: packages that load a format and the dtype it dequantizes to, by config.json and headers. Only
# the standard library is used.


# Packages with which transformers loads a format, by its `quant_method`. accelerate places quantized weights on a GPU.
_READ_WITH: dict[str, tuple[str, ...]] = {
    "bitsandbytes": ("accelerate", "bitsandbytes"),
    "fp8": ("accelerate",),
    "mxfp8": ("accelerate",),
    "mxfp4": ("accelerate",),
    "compressed-tensors": ("compressed-tensors",),
    "gptq": ("optimum", "gptqmodel"),
    "awq": ("gptqmodel", "accelerate"),
    "hqq": ("hqq",),
    "auto-round": ("auto-round",),
    "aqlm": ("aqlm", "accelerate"),
    "bitnet": ("accelerate",),
    "quanto": ("optimum-quanto", "accelerate"),
}
_MODULES = {"optimum-quanto": "optimum.quanto"}  # import names that differ from the package's name
_UNPACK = {"fp8", "mxfp8", "mxfp4", "compressed-tensors"}  # dequantized to the dtype of the run while loading
# formats that stay quantized on CUDA if the package `kernels` is installed, because it multiplies them directly
_BY_KERNELS = {"fp8", "mxfp8", "mxfp4"}
_GPU_ONLY = {"eetq", "fbgemm_fp8", "fp_quant", "higgs", "spqr", "vptq"}
_UNSERVED = {
    "nvfp4": "transformers quantizes weights to it, but loads no files of it",
    "torchao": "its weights are a tensor class of torchao, which kvcli cannot multiply",
}
_WIDTHS = {"I32": 32, "U8": 8, "I8": 8}
# tensors of GPTQ, AWQ and bitsandbytes that hold no weights
_BESIDE = re.compile(r"qzeros|weight\.|SCB|weight_format|channel_scale|\.scales$|g_idx")
# names of scales and similar tensors
_SCALES = ("_scale", "_scale_inv", "_scales", "_zero_point", "weight_shape", "_g_idx", ".scale")
INSTEAD = "GGUF, or the unquantized model with --quant int4"


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """Quantization format of a checkpoint's weights."""

    method: str = ""  # `quant_method` of transformers; "" = not quantized
    settings: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(config: Mapping[str, Any]) -> CheckpointFormat:
        """Read the format from config.json of a model or from its text part."""
        text = config.get("text_config")
        for at in (config, text if isinstance(text, dict) else {}):
            if isinstance(found := at.get("quantization_config"), dict):
                is_bnb = found.get("load_in_4bit") or found.get("load_in_8bit")
                return CheckpointFormat(
                    "bitsandbytes" if is_bnb else str(found.get("quant_method") or "unnamed")[:40], found
                )
        return CheckpointFormat()

    @property
    def is_unserved(self) -> bool:
        """True if no device can run the format."""
        return self.method in _UNSERVED

    def unpacks(self, kind: str) -> bool:
        """True if loading on this kind of device dequantizes the weights to 16 bits, as in an unquantized model."""
        by_kernels = self.method in _BY_KERNELS and kind == "cuda" and _is_there("kernels")
        return self.method in _UNPACK and not by_kernels

    def stays(self, kind: str) -> bool:
        """True if the weights stay quantized when multiplied, so `load.quant` cannot change them."""
        return bool(self.method) and not self.unpacks(kind)

    def is_placed(self, kind: str) -> bool:
        """True if transformers has to load the weights to the device; those of kvcli are placed one by one."""
        return self.stays(kind) and kind != "cpu" and self.method != "kvcli"

    def missing(self, kind: str) -> list[str]:
        """Packages that must be installed before the checkpoint can be loaded."""
        placed = ("accelerate",) if self.is_placed(kind) else ()
        wanted = dict.fromkeys((*_READ_WITH.get(self.method, ()), *placed))
        return [package for package in wanted if not _is_there(_MODULES.get(package, package.replace("-", "_")))]

    def shape(self, name: str, dtype: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Shape of the weight that a tensor dequantizes to; (0,) for scales and the like, None if it does not."""
        if self.method not in _UNPACK:
            return None
        if name.endswith(_SCALES):
            return (0,)
        if name.endswith("_blocks") and len(shape) > 1:  # two weights per byte, 32 per scale
            return (*shape[:-2], shape[-2] * shape[-1] * 2)
        if name.endswith("weight_packed") and shape:
            each = _WIDTHS.get(dtype, 32) // self._bits
            return (*shape[:-1], shape[-1] * each)
        return shape if dtype.startswith("F8") or dtype == "I8" else None

    def weights(self, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        """Number of weights in a stored tensor: 0 for scales and the like, several per number of a packed tensor."""
        if not self.method:
            return prod(shape)
        stated = self.settings.get("weights")
        if isinstance(stated, dict) and isinstance(of := stated.get(name), list):  # of kvcli: the type, then the shape
            return prod(n for n in of[1:] if type(n) is int)
        if (unpacked := self.shape(name, dtype, shape)) is not None:
            return prod(unpacked)
        if name.endswith(_SCALES) or _BESIDE.search(name):
            return 0
        is_packed = name.endswith((".data", "weight", "qweight", "_blocks"))
        return prod(shape) * (_WIDTHS[dtype] // self._bits if is_packed and dtype in _WIDTHS else 1)

    @property
    def _bits(self) -> int:
        if type(bits := self.settings.get("bits", 8 if self.settings.get("load_in_8bit") else None)) is int:
            return min(max(bits, 1), 8)
        groups = self.settings.get("config_groups")
        each = [one for one in groups.values() if isinstance(one, dict)] if isinstance(groups, dict) else []
        stated = [of["num_bits"] for one in each if isinstance(of := one.get("weights"), dict) and "num_bits" in of]
        return next((n for n in stated if isinstance(n, int) and 0 < n <= 8), 4)


def refuse_unpackable(name: str, config: Mapping[str, Any], kind: str) -> None:
    """Raise BadModel for a quantized checkpoint that this kind of device cannot load or that lacks a package."""
    packing = CheckpointFormat.of(config)
    is_elsewhere = packing.method in _GPU_ONLY and kind != "cuda"
    if why := _UNSERVED.get(packing.method) or ("transformers loads it on a GPU only" if is_elsewhere else ""):
        raise BadModel(
            f"{name} is quantized as {packing.method}, which does not run on {kind}",
            code="model_unsupported",
            lines=[why],
            try_=[INSTEAD, *(["--device cuda"] if is_elsewhere else [])],
        )
    if missing := packing.missing(kind):
        raise BadModel(
            f"{name} is quantized as {packing.method}, which needs the package{'s' * (len(missing) > 1)} "
            f"{' and '.join(missing)}",
            code="package_missing",
            lines=[f"transformers needs {'it' if len(missing) == 1 else 'them'} to load the weights; none were loaded"],
            detail={"missing": missing},
            try_=[pip(*missing), INSTEAD],
        )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False
