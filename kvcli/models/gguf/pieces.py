"""Rows of stored tensors in the order of transformers' tensors, some at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcli.models.gguf.architectures import Part, Piece
from kvcli.models.gguf.blocks import Bytes, numbers, stretches
from kvcli.models.gguf.header import Header

Held = TypeVar("Held", Bytes, Tensor)
Indices = NDArray[np.intp]


def raw_rows(header: Header, piece: Piece) -> Iterator[Bytes]:
    """Blocks of a plain tensor, whose parts are of one kind, [N, bytes] in the order of its rows in the file."""
    held = [_raw(header, part) for part in piece.parts]
    return _read(
        replace(piece, is_turned=False),
        [blocks.__getitem__ for blocks in held],
        lambda n: np.empty((n, held[0].shape[1]), np.uint8),
    )


def values(header: Header, piece: Piece) -> Iterator[Tensor]:
    """Numbers of a tensor of transformers in float32, in their order; a matrix at a time where they are transposed."""
    held, width = [_numbers(header, part) for part in piece.parts], _width(piece)
    for made in _read(piece, held, lambda n: torch.empty(n, width)):
        numbers = made.T if piece.is_turned else made
        yield (torch.log(-numbers) if piece.is_log else numbers) - (piece.offset or 0.0)


def _width(piece: Piece) -> int:
    return prod(piece.shape) // sum(prod(part.view) for part in piece.parts)


def _read(piece: Piece, held: list[Callable[[Indices], Held]], empty: Callable[[int], Held]) -> Iterator[Held]:
    """Rows of all parts, in their order."""
    source, order = _order(piece)
    step = piece.shape[-1] if piece.is_turned else 0
    cuts = (slice(a, a + step) for a in range(0, len(order), step)) if step else stretches(len(order), _width(piece))
    for cut in cuts:
        if len(held) == 1:
            yield held[0](order[cut])
            continue
        made = empty(len(order[cut]))
        for i, rows in enumerate(held):
            (mine,) = np.nonzero(source[cut] == i)
            made[mine] = rows(order[cut][mine])
        yield made


def _order(piece: Piece) -> tuple[Indices, Indices]:
    """Part, and row in its stored tensor, of each row of the piece."""
    rows = []
    for part in piece.parts:
        view = np.arange(part.skip[0], part.skip[0] + part.take[0]).reshape(part.view)
        rows.append(view.transpose(part.axes).reshape(piece.groups, -1))
    source = np.concatenate([np.full(row.shape, i) for i, row in enumerate(rows)], axis=1)
    return source.reshape(-1), np.concatenate(rows, axis=1).reshape(-1)


def _raw(header: Header, part: Part) -> Bytes:
    """Blocks of a stored tensor, by its rows."""
    stored = header.tensors[part.stored]
    n = prod(stored.shape[:-1])
    return np.memmap(header.file_of(part.stored), np.uint8, "r", stored.at, (n, stored.nbytes // n))


def _numbers(header: Header, part: Part) -> Callable[[Indices], Tensor]:
    stored, held = header.tensors[part.stored], _raw(header, part)
    if part.by == "rows":
        return lambda rows: numbers(held[rows], stored.kind)
    whole = numbers(held.copy(), stored.kind).reshape(-1, *stored.shape[-2:])
    flat = whole.reshape(-1, 1) if part.by == "numbers" else whole.transpose(1, 2).reshape(-1, stored.shape[-2])
    return lambda rows: flat[torch.from_numpy(rows)]
