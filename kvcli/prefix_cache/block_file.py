"""A block: keys and values of a run of tokens, as a file that is whole or not taken for one.

A safetensors file with a checksum of what is in it: safetensors refuses a file that was cut short, and takes one with
flipped bits for good. Nothing of it is believed before its sizes are those of the model that asks, nor under another
name than it was written for: that of its folder is its model's, and that of its file begins with its parent block's.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvcli.errors import is_out_of_memory
from kvcli.files import write_private
from kvcli.kernels.attend_invariant import BLOCK
from kvcli.kv.slots import LayerShape
from kvcli.prefix_cache.codec import Codec
from kvcli.prefix_cache.tensor_codec import coded, decoded
from kvcli.settings.small_file import Unfit, open_regular, parse_object, read_small

LENGTH = 256  # tokens of a whole one
SUM = "crc32"
HEADER = 1 << 20  # bytes, at most
# what comes of headers that say what no header does
UNREADABLE = (Unfit, ValueError, LookupError, TypeError, AttributeError, RuntimeError)


class CorruptFile(Exception):
    """The file holds nothing that may be read."""


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens that follow each other, and what layers stored of them."""

    ids: Sequence[int]  # n
    kv: Mapping[int, tuple[Tensor, Tensor]]  # by layer: k [K, m, D], v [K, m, E] of the last m; a window lost the rest

    def part(self, layer: int, at: slice) -> tuple[Tensor, Tensor]:
        """Keys and values of these of its tokens, as views. Raises CorruptFile for what it does not have."""
        k, v = self.kv.get(layer, (None, None))
        if k is None or v is None or (first := at.start - len(self.ids) + k.shape[1]) < 0:
            raise CorruptFile("it is another one by now")
        mine = slice(first, first + at.stop - at.start)
        cut = k[:, mine]
        return cut, cut if v is k else v[:, mine]

    def write(self, path: Path, codec: Codec) -> int:
        """As a private file, in one step; returns its bytes. Not waited for: what a power cut damages is read again."""
        tensors = {_ids_of(path): torch.tensor(self.ids, dtype=torch.int32)}
        for layer, (k, v) in self.kv.items():
            place = _place(layer, len(self.ids) - k.shape[1])
            tensors[f"k.{place}"] = coded(k, codec)
            if v is not k:
                tensors[f"v.{place}"] = coded(v, codec)
        data = save(tensors, {SUM: _sum(tensors)})
        write_private(path, data, is_lasting=False)
        return len(data)


def read(path: Path, shapes: Sequence[LayerShape], dtype: torch.dtype) -> Block:
    """The block of a model with layers of these shapes, stored in numbers of this type. Raises CorruptFile, OSError."""
    own = [(i, shape) for i, shape in enumerate(shapes) if shape.shared_from is None]
    most = LENGTH * sum(s.numbers for _, s in own) * dtype.itemsize + 4 * LENGTH + HEADER
    try:
        data = read_small(path, most)
        tensors, said = load(data), _said(data)
    except (SafetensorError, *UNREADABLE) as error:
        raise blamed(error) from None
    ids = tensors.get(_ids_of(path))
    if ids is None or ids.dtype != torch.int32 or ids.dim() != 1 or not 0 < len(ids) <= LENGTH or _sum(tensors) != said:
        raise CorruptFile("its numbers are not those that were written")
    kv, firsts = {}, _firsts(tensors, len(ids))
    for layer, shape in own:
        first = firsts.get(layer, 0)
        k = tensors.get(f"k.{_place(layer, first)}")
        v = k if shape.rank else tensors.get(f"v.{_place(layer, first)}")
        if k is None or v is None:
            continue
        heads, n = shape.n_kv_heads, len(ids) - first
        try:
            keys = decoded(k, (heads, n, shape.k_dim), dtype)
            kv[layer] = keys, keys if shape.rank else decoded(v, (heads, n, shape.v_dim), dtype)
        except ValueError as error:
            raise CorruptFile(str(error)) from None
    return Block(ids.tolist(), kv)


def blamed(error: Exception) -> Exception:
    """Damaged, unless there was no memory, or the system would not let the file be read, as with too many open ones."""
    if is_out_of_memory(error):
        return error
    cause = error.__cause__
    return cause if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError) else CorruptFile(str(error))


def read_tokens(path: Path) -> tuple[np.ndarray, Mapping[int, int]]:
    """The tokens of a block, int32 [n], and by layer the first that it has, and no numbers. Raises CorruptFile,
    OSError."""
    try:
        with open_regular(path) as file:
            size = int.from_bytes(file.read(8), "little")
            header = parse_object(file.read(min(size, HEADER)))
            first, end = (said := header[_ids_of(path)])["data_offsets"]
            left = os.fstat(file.fileno()).st_size - 8 - size
            if said["dtype"] != "I32" or not 0 <= first < end <= min(left, first + 4 * LENGTH):
                raise CorruptFile("these are no tokens")
            file.seek(8 + size + first)
            ids = np.frombuffer(file.read(end - first), "<i4")
    except (OverflowError, *UNREADABLE) as error:
        raise blamed(error) from None
    if 4 * len(ids) != end - first:
        raise CorruptFile("it was cut short")
    return ids, _firsts(header, len(ids))


def _ids_of(path: Path) -> str:
    """What the tokens of the block of this file are called: behind another parent they have other keys and values."""
    return f"ids of {path.parent.name}/{path.name}"


def _place(layer: int, first: int) -> str:
    """What a layer's keys and values are called: "3", or from the 64th token on "3.64"."""
    return f"{layer}.{first}" if first else f"{layer}"


def _firsts(names: Iterable[str], n: int) -> dict[int, int]:
    """By layer, of n tokens the first that it has. Raises CorruptFile for one where no layer begins: slots go by
    blocks."""
    found = {}
    for layer, _, first in (name[2:].partition(".") for name in names if name.startswith("k.")):
        if not layer.isdecimal() or not (first or "0").isdecimal() or len(first) > len(str(LENGTH)):
            raise CorruptFile("it has layers of no number")
        found[int(layer)] = at = int(first or 0)
        if at % BLOCK or at >= n:
            raise CorruptFile("a layer of it begins where none does")
    return found


def _said(data: bytes) -> object:
    """The checksum that a file names, whose header was read already."""
    header = parse_object(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header["__metadata__"][SUM]


def _sum(tensors: Mapping[str, Tensor]) -> str:
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"
