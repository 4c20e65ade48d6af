"""Rows of stored tensors in the order of transformers' tensors, some at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcli.models.gguf.blocks import Bytes, numbers, stretches
from kvcli.models.gguf.config import Rows, TensorSource
from kvcli.models.gguf.header import Header


def raw_rows(header: Header, piece: TensorSource) -> Iterator[Bytes]:
    """Blocks of a plain tensor [N, bytes] in the order of its rows."""
    held, (_, order) = _raw(header, piece.parts[0].stored), _order(piece)
    for part in stretches(len(order), piece.shape[-1]):
        yield held[order[part]]


def values(header: Header, piece: TensorSource) -> Iterator[Tensor]:
    """Numbers of a tensor of transformers, float32, flat or by rows."""
    source, order = _order(piece)
    held = [_numbers_of(header, part) for part in piece.parts]
    width = prod(piece.shape) // len(order)
    cuts = stretches(len(order), width)
    if piece.turned:  # a matrix at a time
        cuts = (slice(a, a + piece.turned) for a in range(0, len(order), piece.turned))
    for cut in cuts:
        made = torch.empty(len(order[cut]), width)
        for i, read in enumerate(held):
            mine = source[cut] == i
            if mine.any():
                made[torch.from_numpy(mine)] = read(order[cut][mine])
        made = made.T if piece.turned else made
        yield (torch.log(-made) if piece.is_log else made) - piece.minus


def _order(piece: TensorSource) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Part, and row in its stored tensor, of each row of the piece."""
    rows = [
        (np.arange(part.start, part.stop).reshape(part.view).transpose(part.axes)).reshape(piece.groups, -1)
        for part in piece.parts
    ]
    source = np.concatenate([np.full(row.shape, i) for i, row in enumerate(rows)], axis=1)
    return source.reshape(-1), np.concatenate(rows, axis=1).reshape(-1)


def _raw(header: Header, name: str) -> Bytes:
    """Blocks of a stored tensor, a row of bytes for each of its rows."""
    stored = header.tensors[name]
    n = prod(stored.shape[:-1])
    return np.memmap(header.path, np.uint8, "r", stored.at, (n, stored.nbytes // n))


def _numbers_of(header: Header, part: Rows) -> Callable[[NDArray[np.intp]], Tensor]:
    stored, held = header.tensors[part.stored], _raw(header, part.stored)
    if part.by == "rows":
        return lambda rows: numbers(held[rows], stored.kind)
    whole = numbers(held, stored.kind).reshape(-1, *stored.shape[-2:])
    flat = whole.reshape(-1, 1) if part.by == "numbers" else whole.transpose(1, 2).reshape(-1, stored.shape[-2])
    return lambda rows: flat[torch.from_numpy(rows)]
