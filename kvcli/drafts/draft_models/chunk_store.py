"""KV of a sequence by chunk, stored beside the draft model's cache, to restore evicted chunks without a pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.kv.slots import LayerShape, Usage

# k [K, S, D], v [K, S, E] of one layer; keys are stored before rotary embedding if positions are contiguous
KV = tuple[Tensor, Tensor]


class ChunkStore:
    """Chunks of `size` tokens by number, on any device. A chunk is one tensor over all layers and is copied at once."""

    def __init__(self, shapes: Sequence[LayerShape], size: int, device: torch.device | str) -> None:
        """`shapes`: of the layers that store KV."""
        self._shapes, self._size, self._device = shapes, size, device
        self._held: dict[int, Tensor] = {}  # [F]
        self._end = 0  # upper bound of the chunk numbers

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._held

    def put(self, first: int, layers: Sequence[KV]) -> None:
        """Store the chunks from number `first` on; every layer has the same tokens, in whole chunks."""
        held = [t for of, kv in zip(self._shapes, layers, strict=True) for t in kv[: _tensors(of)]]
        rows = [t.view(len(t), -1, self._size, t.shape[2]).movedim(1, 0).flatten(1) for t in held]
        for chunk, one in enumerate(torch.cat(rows, 1).to(self._device), first):
            self._held[chunk], self._end = one, max(self._end, chunk)

    def of(self, chunks: Sequence[int], device: torch.device) -> list[KV]:
        """Return these chunks, at least one, concatenated per layer."""
        held = torch.stack([self._held[chunk] for chunk in chunks]).to(device)  # [M, F]
        each = [(s.n_kv_heads, self._size, dim) for s in self._shapes for dim in (s.k_dim, s.v_dim)[: _tensors(s)]]
        parts = torch.split(held, [a * b * c for a, b, c in each], 1)
        flat = iter([part.view(-1, *of).movedim(0, 1).flatten(1, 2) for part, of in zip(parts, each, strict=True)])
        return [(k := next(flat), k if of.rank else next(flat)) for of in self._shapes]

    def crop(self, n: int) -> None:
        """Remove chunk n and all after it."""
        if n <= self._end:
            self._held = {chunk: one for chunk, one in self._held.items() if chunk < n}
            self._end = n - 1

    def usage(self) -> list[Usage]:
        """Memory of all layers as one entry."""
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in self._held.values()}
        size = sum(storage.nbytes() for storage in storages.values())
        return [Usage(0, "draft chunks", len(self._held) * self._size, size)] if size else []


def _tensors(of: LayerShape) -> int:
    """Return the number of stored tensors: keys and values, or one latent that is both."""
    return 1 if of.rank else 2
