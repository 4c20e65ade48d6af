"""Header of a GGUF file: its metadata, and the position of each tensor. Standard library only."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from os.path import lexists
from pathlib import Path
from typing import IO

from kvcli.errors import BadModel
from kvcli.models.checkpoint import corrupt
from kvcli.models.hub_names import shards
from kvcli.settings.small_file import Unfit, open_regular

MAGIC = b"GGUF"
# ggml's number of a type -> its name, and the numbers and bytes of a block (ggml.h; checked against the gguf package)
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
BLOCKS = {name for name, numbers, _ in TYPES.values() if numbers > 1}
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_LARGEST = 64 << 20  # bytes of a header; a vocabulary of 262,144 with its merges takes 15 MiB
_STEP = 1 << 20  # bytes read at a time
_WORD = 1 << 11  # bytes of a string in a list; the longest known token has 256, and a merge joins two
_TEXT = 1 << 20  # bytes of a single string, such as a chat template
_KEYS, _TENSORS = 1 << 12, 1 << 16
_SHORT = 1 << 10  # items of a list that may state a value per layer; longer lists belong to the vocabulary
_RANK = 4
_ABSURD = 1 << 56


SAMPLE = range(300, 1400, 11)  # words of a list by which vocabularies are compared


@dataclass(frozen=True, slots=True)
class Listed:
    """A list in the metadata. Its values are stored only if they are few numbers; of words, a sample is stored."""

    count: int
    values: tuple[int | float | bool, ...] = ()
    words: tuple[str | None, ...] = ()  # words of the ids in SAMPLE


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the file."""

    kind: str  # in ggml's spelling: Q4_K, F32, ...
    shape: tuple[int, ...]  # rows first
    at: int  # byte of the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a file, or of all files of a split model. All tensors are inside their file and do not overlap."""

    path: Path
    size: int
    meta: Mapping[str, str | int | float | bool | Listed]
    tensors: Mapping[str, Stored]  # of a split model, those of all files
    others: tuple[Header, ...] = ()  # headers of the other files of a split model

    def file_of(self, name: str) -> Path:
        """Path of the file that holds a tensor."""
        return next((one.path for one in self.others if name in one.tensors), self.path)


def is_gguf(file: Path) -> bool:
    """True if the file is GGUF by its name or, if the name does not show it, by its first bytes."""
    if file.suffix.lower() == ".gguf":
        return True
    try:
        with open_regular(file) as stream:
            return stream.read(4) == MAGIC
    except (Unfit, OSError):
        return False


def read(file: Path) -> Header:
    """Read the header of a file of version 2 or 3, and those of the other files if it is one of a split model.

    Raises BadModel quickly and in little memory, for any other file.
    """
    names = shards(file.name)
    if missing := [name for name in names if not lexists(file.parent / name)]:
        raise BadModel(
            f"{file.name} is one of {len(names)} files of a model, and {len(missing)} of them are missing",
            code="model_incomplete",
            lines=[f"not in {file.parent}:", *missing[:4], *([f"and {len(missing) - 4} more"] if missing[4:] else [])],
            detail={"missing": missing},
            try_=["download the missing files into the same folder"],
        )
    first, *others = (_read_file(file.parent / name) for name in names)
    if not others and (count := first.meta.get("split.count", 0)) not in (0, 1):
        raise BadModel(
            f"{file.name} is one of {str(count)[:20]} files of a model, and its name does not say which",
            code="model_incomplete",
            lines=[f"the names of such files end with -00001-of-{str(count)[:20]:0>5}.gguf and so on"],
            try_=["download all files under their original names"],
        )
    return _joined(first, tuple(others)) if others else first


def _joined(first: Header, others: tuple[Header, ...]) -> Header:
    """Return the header of a split model. Raises BadModel for files that do not belong together."""
    every = (first, *others)
    total = sum(len(one.tensors) for one in every)
    for key, values in (
        ("split.count", [len(every)] * len(every)),
        ("split.no", range(len(every))),
        ("split.tensors.count", [total] * len(every)),
    ):
        for one, value in zip(every, values, strict=True):
            if (said := one.meta.get(key)) != value:
                raise corrupt(
                    one.path, f"{key} is {str(said)[:40]}, not {value:,}: it is not of the other files' model"
                )
    meta = {key: value for key, value in first.meta.items() if not key.startswith("split.")}
    for one in others:
        if other := {key for key, value in one.meta.items() if meta.get(key, value) != value}:
            raise corrupt(one.path, f"its {min(other)[:60]} is not that of {first.path.name}")
    tensors = {name: t for one in every for name, t in one.tensors.items()}
    if len(tensors) != total:
        raise corrupt(first.path, "a tensor is in two files of the model")
    return replace(first, meta=meta, tensors=tensors, others=others)


def _read_file(file: Path) -> Header:
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            return _read(file, _Reader(stream, size), size)
    except (Unfit, OSError, ValueError) as error:
        raise corrupt(file, f"it {error}" if isinstance(error, Unfit) else str(error)) from error


def floats(header: Header, name: str) -> tuple[float, ...]:
    """Read a short F32 tensor. Raises BadModel for any other tensor."""
    tensor = header.tensors[name]
    if tensor.kind != "F32" or tensor.nbytes > 4 * _SHORT:
        raise corrupt(header.path, f"its tensor {name} is {tensor.kind} of {list(tensor.shape)}")
    with open_regular(header.file_of(name)) as stream:
        stream.seek(tensor.at)
        return struct.unpack(f"<{tensor.nbytes // 4}f", stream.read(tensor.nbytes))


def _read(file: Path, reader: _Reader, size: int) -> Header:
    magic = bytes(reader.take(4))
    if magic != MAGIC:
        if magic == b"vers":
            raise corrupt(file, "it is a git-lfs pointer, not the weights", ["git lfs pull"])
        raise ValueError(f"it is no GGUF file: it begins with {magic!r}")
    version = reader.number("I")
    if version not in (2, 3):
        big = " in the byte order of other machines" if version in (2 << 24, 3 << 24) else ""
        raise ValueError(f"it is GGUF version {version}{big}; supported are 2 and 3")
    n_tensors, n_keys = reader.number("Q"), reader.number("Q")
    if n_tensors > _TENSORS or n_keys > _KEYS:
        raise ValueError(f"it announces {n_tensors:,} tensors and {n_keys:,} keys; no model has as many")
    meta: dict[str, str | int | float | bool | Listed] = {}
    for _ in range(n_keys):
        key = reader.text(_WORD)
        if key in meta:
            raise ValueError(f"its key {key[:60]} occurs twice")
        meta[key] = reader.value(reader.number("I"))
    table = [_entry(reader) for _ in range(n_tensors)]
    align = meta.get("general.alignment", 32)
    if type(align) is not int or not 8 <= align <= 1 << 20 or align & (align - 1):
        raise ValueError(f"general.alignment is {str(align)[:40]}")
    start = -(-reader.at // align) * align
    return Header(file, size, meta, dict(_placed(table, start, align, size)))


def _entry(reader: _Reader) -> tuple[str, Stored]:
    name, rank = reader.text(_WORD), reader.number("I")
    if not 1 <= rank <= _RANK:
        raise ValueError(f"its tensor {name[:60]} has {rank:,} dimensions")
    shape = tuple(reader.number("Q") for _ in range(rank))[::-1]  # ggml writes the innermost first
    kind, at = reader.number("I"), reader.number("Q")
    if kind not in TYPES:
        raise ValueError(f"its tensor {name[:60]} is of unknown type {kind}")
    what, numbers, nbytes = TYPES[kind]
    if math.prod(shape) >= _ABSURD or 0 in shape or shape[-1] % numbers:
        raise ValueError(f"its tensor {name[:60]} cannot be {list(shape)} in {what}")
    return name, Stored(what, shape, at, math.prod(shape) // numbers * nbytes)


def _placed(table: list[tuple[str, Stored]], start: int, align: int, size: int) -> Iterator[tuple[str, Stored]]:
    """Tensors with their absolute positions, in file order. Raises ValueError for overlapping or missing bytes."""
    seen, free = set[str](), start
    end = start + max((t.at + t.nbytes for _, t in table), default=0)
    if end > size:
        raise ValueError(f"its header announces {end:,} bytes, the file has {size:,}: {end - size:,} bytes are missing")
    for name, t in sorted(table, key=lambda entry: entry[1].at):
        at = start + t.at
        if name in seen or at % align or at < free:
            raise ValueError(f"its tensor {name[:60]} occurs twice or overlaps another")
        seen.add(name)
        free = at + t.nbytes
        yield name, Stored(t.kind, t.shape, at, t.nbytes)


class _Reader:
    """Reader of consecutive numbers and strings, which holds only the requested part of the file in memory."""

    def __init__(self, stream: IO[bytes], size: int) -> None:
        self.at = 0
        self._stream, self._size, self._held = stream, size, bytearray()

    def take(self, n: int) -> memoryview:
        """Read the next n bytes."""
        self._need(n)
        self.at += n
        return memoryview(self._held)[self.at - n : self.at]

    def number(self, code: str) -> int:
        """Read an unsigned number."""
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))
        return int(value)

    def text(self, most: int) -> str:
        n = self.number("Q")
        if n > most:
            raise ValueError(f"it has a string of {n:,} bytes; the limit is {most:,}")
        return str(self.take(n), "utf-8")

    def value(self, kind: int) -> str | int | float | bool | Listed:
        if kind == _STRING:
            return self.text(_TEXT)
        if kind == _ARRAY:
            return self._listed(self.number("I"), self.number("Q"))
        return self._numbers(kind, 1)[0]

    def _listed(self, kind: int, count: int) -> Listed:
        if kind == _STRING:
            words: list[str | None] = [None] * len(SAMPLE)
            for i in range(first := min(count, SAMPLE.stop)):
                if (n := self.number("Q")) > _WORD:
                    raise ValueError(f"it lists a string of {n:,} bytes; the limit is {_WORD:,}")
                word = bytes(self.take(n))
                if i in SAMPLE:
                    words[SAMPLE.index(i)] = str(word, "utf-8", "replace")
            self._skip_strings(count - first)
            return Listed(count, words=tuple(words))
        return Listed(count, self._numbers(kind, count))

    def _numbers(self, kind: int, count: int) -> tuple[int | float | bool, ...]:
        if kind not in _SCALARS:
            raise ValueError(f"its metadata has a value of unknown type {kind}")
        taken = self.take(count * struct.calcsize(f"<{_SCALARS[kind]}"))
        return struct.unpack(f"<{count}{_SCALARS[kind]}", taken) if count <= _SHORT else ()

    def _skip_strings(self, count: int) -> None:
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if self.at + 8 + _WORD > len(self._held):  # buffers any string, so that one check per string is enough
                self._need(8)
                self._need(min(8 + length(self._held, self.at)[0], 8 + _WORD))
            (n,) = length(self._held, self.at)
            if n > _WORD:
                raise ValueError(f"it lists a string of {n:,} bytes; the limit is {_WORD:,}")
            self.at += 8 + n

    def _need(self, n: int) -> None:
        end = self.at + n
        if end > min(self._size, _LARGEST):
            most = f"the file has {self._size:,}" if end > self._size else f"the limit is {_LARGEST:,}"
            raise ValueError(f"its header needs {end:,} bytes, and {most}")
        while len(self._held) < end:
            more = self._stream.read(max(_STEP, end - len(self._held)))
            if not more:
                raise ValueError("it became shorter while it was read")
            self._held += more
