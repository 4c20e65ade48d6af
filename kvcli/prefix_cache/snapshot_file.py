"""Snapshot: a tree of tensors in one file, which is valid as a whole or rejected. It has the state of a session, or a
block of the prefix cache (block_tree.py).

It is a safetensors file: tensors are named by their path in the tree, joined by "/"; the header has the numbers of the
tree and a checksum, because safetensors rejects a truncated file but accepts flipped bits. It is written one tensor at
a time. The reader compares every size with the file size before it allocates, so no more is allocated than the file has
bytes. The users of the tensors validate them (kv/snapshot.py).
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from kvcli.errors import is_out_of_memory
from kvcli.files import replacing
from kvcli.kv.snapshot import Leaf, SnapshotMismatch, State, leaves, tree_of
from kvcli.settings.small_file import Unfit, open_regular, parse_object

ENDS, SUM = ".kv", "crc32"
# exceptions that invalid headers cause
UNREADABLE = (Unfit, ValueError, LookupError, TypeError, AttributeError, RuntimeError, SnapshotMismatch)
HEADER, MOST, DEEP = 1 << 24, 1 << 17, 8  # maximum bytes, tensors, and tensor dimensions
NUMBERS = "numbers"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CorruptFile(Exception):
    """File that does not hold what it should."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Tensor of a file, before its memory is allocated."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(path: Path, state: State, of: str = "") -> int:
    """Write a private file atomically, `of` its maker; return its bytes. A power cut may corrupt the file."""
    tensors, numbers = _parted(state)
    with replacing(path, is_lasting=False) as file:
        file.write(_header(tensors, numbers, 0))
        total = _seed(numbers, of)
        for name, tensor in tensors.items():
            data = _bytes(tensor.cpu().contiguous())
            total = zlib.crc32(data, zlib.crc32(name.encode(), total))
            file.write(data)
        size = file.tell()
        file.seek(0)
        file.write(_header(tensors, numbers, total))
    return size


def path_of(folder: Path, ids: Sequence[int]) -> Path:
    """Return the path of the snapshot of exactly these tokens."""
    return folder / f"{len(ids)}-{digest(ids)}{ENDS}"


def match_prefix(folder: Path, ids: Sequence[int]) -> Iterator[tuple[int, Path]]:
    """Yield the snapshots of prefixes of `ids` and their token counts, the longest first."""
    names = [path.name.removesuffix(ENDS).partition("-") for path in folder.glob(f"*-*{ENDS}")]
    counts = {int(n) for n, _, _ in names if n.isdecimal() and len(n) < 12}
    for n in sorted((n for n in counts if n <= len(ids)), reverse=True):
        if (path := path_of(folder, ids[:n])).exists():
            yield n, path


def digest(ids: Sequence[int]) -> str:
    """Return the hash of a sequence, long enough to rule out collisions."""
    return blake2b(np.asarray(ids, "<i4").tobytes(), digest_size=16).hexdigest()


def nbytes(state: State) -> int:
    """Return the bytes of the file."""
    tensors, numbers = _parted(state)
    return len(_header(tensors, numbers, 0)) + sum(t.nbytes for t in tensors.values())


def read(path: Path, of: str = "", most: float = math.inf) -> State:
    """Read the tree from a file of at most `most` bytes. Raises CorruptFile; OSError if the system refused access."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > most:
                raise CorruptFile("it is too large")
            entries, numbers, said = header_of(file)
            found: dict[str, Leaf] = dict(numbers)
            total = _seed(numbers, of)
            for entry in entries:
                found[entry.name] = tensor = torch.empty(entry.shape, dtype=entry.dtype)
                data = _bytes(tensor)
                if file.readinto(data) != len(data):
                    raise CorruptFile("it was cut short")
                total = zlib.crc32(data, zlib.crc32(entry.name.encode(), total))
            if said != f"{total:08x}":
                raise CorruptFile("its checksum is wrong")
            return tree_of(found)
    except UNREADABLE as error:
        raise blamed(error) from None


def blamed(error: Exception) -> Exception:
    """Return CorruptFile for a damaged file; the error itself if memory ran out or the system refused access, as with
    too many open files."""
    if is_out_of_memory(error):
        return error
    cause = error.__cause__
    return cause if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError) else CorruptFile(str(error))


def header_of(file: IO[bytes]) -> tuple[list[Entry], dict[str, int | float], str]:
    """Return the tensors in the header, whose sizes must match the file; the numbers of the tree; the checksum."""
    end, size = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
    if not 0 < size <= min(HEADER, end - 8):
        raise CorruptFile("it has no header")
    header = parse_object(file.read(size))
    about, at, entries = header.pop("__metadata__"), 0, list[Entry]()
    if len(header) > MOST:
        raise CorruptFile("it has too many tensors")
    for name, of in sorted(header.items(), key=lambda each: each[1]["data_offsets"][0]):
        sizes = *of["shape"], *of["data_offsets"]
        if len(sizes) > DEEP or not all(type(n) is int and 0 <= n <= end for n in sizes):
            raise CorruptFile("its sizes are invalid")
        entry = Entry(name, DTYPES[of["dtype"]], tuple(of["shape"]))
        if of["data_offsets"] != [at, at + entry.nbytes]:
            raise CorruptFile("its tensors overlap or have gaps")
        at += entry.nbytes
        entries.append(entry)
    if 8 + size + at != end:
        raise CorruptFile("its size does not fit its tensors")
    numbers = parse_object(about[NUMBERS].encode())
    if not all(isinstance(value, int | float) for value in numbers.values()):
        raise CorruptFile("its header has an invalid number")
    return entries, numbers, about[SUM]


def _parted(state: State) -> tuple[dict[str, Tensor], dict[str, Leaf]]:
    found = dict(leaves(state))
    tensors = {name: leaf for name, leaf in found.items() if isinstance(leaf, Tensor)}
    return tensors, {name: leaf for name, leaf in found.items() if name not in tensors}


def _header(tensors: Mapping[str, Tensor], numbers: Mapping[str, Leaf], total: int) -> bytes:
    at, header = 0, dict[str, Any]({"__metadata__": {SUM: f"{total:08x}", NUMBERS: json.dumps(numbers)}})
    for name, t in tensors.items():
        header[name] = {"dtype": NAMES[t.dtype], "shape": [*t.shape], "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _seed(numbers: Mapping[str, Leaf], of: str) -> int:
    """Return the initial value of the checksum."""
    return zlib.crc32(json.dumps(numbers, sort_keys=True).encode(), zlib.crc32(of.encode()))


def _bytes(t: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host, for reading and writing."""
    return t.reshape(-1).view(torch.uint8).numpy().data if t.numel() else memoryview(bytearray())
