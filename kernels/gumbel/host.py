"""The same noise for a handful of tokens at one position, on the host: what a drafter can afford to look at.

Equal to the reference but for the last bit of a logarithm; numpy, because one call of torch costs more than all of
this.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN, _MIX1, _MIX2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_12, _27, _30, _31 = np.uint64(12), np.uint64(27), np.uint64(30), np.uint64(31)


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> _30)) * _MIX1
    x = (x ^ (x >> _27)) * _MIX2
    mixed: NDArray[np.uint64] = x ^ (x >> _31)
    return mixed


def gumbel_host(seed: int, pos: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """ids [C] at one position -> noise [C]."""
    start = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    key = _splitmix(_splitmix(start) ^ np.uint64(pos))
    bits = _splitmix(key ^ _splitmix(ids.astype(np.uint64)))
    u = ((bits >> _12).astype(np.float64) + 0.5) * 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(u))
    return noise
