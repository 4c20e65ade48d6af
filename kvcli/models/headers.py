"""Headers of safetensors files: their tensors, and a check of the file's length. Standard library only."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcli.errors import BadModel
from kvcli.settings.small_file import Unfit, open_regular, parse_object

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
