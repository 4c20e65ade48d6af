"""What a safetensors file announces: its tensors, and whether it is as long as it says. Standard library only."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcli.errors import BadModel

_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor as its file announces it."""

    dtype: str  # as safetensors spells it: BF16, F32, ...
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file of weights; `tensors` is empty for a pickle, which says nothing before it is run."""

    path: Path
    nbytes: int
    tensors: Mapping[str, TensorHeader]


def read_header(file: Path) -> WeightFile:
    """The tensors a safetensors file announces, after checking that the file is as long as it says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        if first == b"version ":  # a git-lfs pointer, left by `git clone` without lfs
            raise _corrupt(file, "it is a git-lfs pointer, not the weights", ["git lfs pull"])
        if len(first) < 8:
            raise _corrupt(file, f"it has {size} bytes")
        (length,) = struct.unpack("<Q", first)
        if length > size - 8:
            raise _corrupt(file, f"its header needs {length + 8:,} bytes, the file has {size:,}")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {k: _tensor(v) for k, v in header.items()}
        end = max((int(v["data_offsets"][1]) for v in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _corrupt(file, f"its header cannot be read: {error}") from error
    if size != 8 + length + end:
        cut = f"{8 + length + end - size:,} bytes are missing" if size < 8 + length + end else "it has bytes too many"
        raise _corrupt(file, f"its header announces {8 + length + end:,} bytes, the file has {size:,}: {cut}")
    return WeightFile(file, size, tensors)


def _tensor(entry: Mapping[str, Any]) -> TensorHeader:
    begin, end = entry["data_offsets"]
    shape = tuple(int(n) for n in entry["shape"])
    nbytes = int(end) - int(begin)
    bits = _BITS.get(entry["dtype"])
    if nbytes < 0 or (bits is not None and math.prod(shape) * bits != nbytes * 8):
        raise ValueError(f"a tensor of shape {list(shape)} in {entry['dtype']} cannot have {nbytes} bytes")
    return TensorHeader(str(entry["dtype"]), shape, nbytes)


def _corrupt(file: Path, why: str, try_: Sequence[str] = ()) -> BadModel:
    return BadModel(
        f"{file.name} is damaged or cut short",
        code="model_corrupt",
        lines=[f"{file}: {why}"],
        detail={"file": str(file)},
        try_=[*try_, f"download {file.name} again"],
    )
