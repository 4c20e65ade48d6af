"""Token history: the tokens of a sequence, and facts about them that penalties read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels.attend_invariant.tables import sent


class TokenHistory:
    """The token ids of a sequence in order. Each method returns a fact about all V tokens at N rows, which a penalty
    reads. `paths`: by row, the draft tokens between the end of the sequence and the row, the row's own included."""

    def __init__(self, vocab: int, device: torch.device | str = "cpu") -> None:
        self._mask = torch.zeros(vocab, dtype=torch.bool, device=device)  # [V]
        self._ids = np.empty(0, np.int64)
        self._new: list[int] = []  # ids not yet in the two above, because few samplers have penalties

    def add(self, ids: Iterable[int]) -> None:
        """Append tokens."""
        self._new += ids

    def clear(self) -> None:
        self._mask.zero_()
        self._ids, self._new = self._ids[:0], []

    @property
    def ids(self) -> np.ndarray:
        """All tokens, [T] int64."""
        if self._new:
            self._mask[sent(torch.tensor(self._new), self._mask.device)] = True
            self._ids, self._new = np.append(self._ids, self._new), []
        return self._ids

    def seen(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """Return whether each token occurs before, [N, V] bool."""
        assert self.ids is self._ids  # the mask is complete
        mask = self._mask.repeat(len(paths), 1)
        mask[self._places(paths)] = True
        return mask

    def counts(self, paths: Sequence[Sequence[int]], answer_at: int) -> Tensor:
        """Return how often each token occurs in the answer, which starts at `answer_at`: [N, V] int32."""
        device, answer = self._mask.device, self.ids[answer_at:].tolist()
        counts = torch.zeros(len(paths), len(self._mask), dtype=torch.int32, device=device)
        at = self._places([[*answer, *path] for path in paths])
        return counts.index_put_(at, torch.ones_like(at[0], dtype=torch.int32), accumulate=True)

    def repeats(self, paths: Sequence[Sequence[int]], last: int, breakers: frozenset[int], most: int) -> Tensor:
        """Return the length of the longest repetition that each token would continue, [N, V] int64, as
        `longest_repeats` counts it in the last `last` tokens; 0 = in all."""
        table = _table(breakers, len(self._mask))
        rows = [np.append(self.ids, np.array(path, np.int64))[-last:] for path in paths]
        found = torch.from_numpy(np.stack([longest_repeats(row, table, most) for row in rows]))
        return sent(found, self._mask.device)

    def _places(self, paths: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        at = [(i, token) for i, path in enumerate(paths) for token in path]
        return tuple(sent(torch.tensor(at, dtype=torch.int64).reshape(-1, 2).T, self._mask.device))


def longest_repeats(ids: np.ndarray, breakers: np.ndarray, most: int) -> np.ndarray:
    """Return by token the length of the longest end of `ids` that occurred before with this token after it, [V] int64.

    The end contains no breaker ([V] bool), breakers have length 0, and no length is above `most` (DRY, llama.cpp).
    """
    lengths = np.zeros(len(breakers), np.int64)
    last = len(ids) - 1
    stops = np.flatnonzero(breakers[ids])
    most = min(most, last - int(stops[-1])) if len(stops) else most
    ends = np.flatnonzero(ids[:-1] == ids[-1:])  # where earlier occurrences of the end stop
    length = 0
    while len(ends) and length < most:
        length += 1
        lengths[ids[ends + 1]] = length
        ends = ends[ends >= length]
        ends = ends[ids[ends - length] == ids[last - length]]
    lengths[breakers] = 0
    return lengths


@lru_cache(maxsize=8)
def _table(ids: frozenset[int], vocab: int) -> np.ndarray:
    table = np.zeros(vocab, np.bool_)
    table[list(ids)] = True
    return table
