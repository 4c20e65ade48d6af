"""Gumbel noise for a few tokens at one position, on the host, cheap enough for a drafter.

Equal to the reference up to the last bit of a logarithm. It uses plain integers, because one call of torch or numpy
costs more than the whole computation for eight tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import log

COIN = -1  # an id that no token has, for decisions about a position
_ALL = (1 << 64) - 1


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _ALL
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _ALL
    return x ^ (x >> 31)


@lru_cache(maxsize=64)
def _key(seed: int, pos: int) -> int:
    return _splitmix(_splitmix(seed & _ALL) ^ pos)


@lru_cache(maxsize=1 << 15)
def _hashed(token: int) -> int:
    return _splitmix(token)


def uniform_host(seed: int, pos: int, token: int) -> float:
    """Return the uniform number of a token at one position; `token` may be -1."""
    return ((_splitmix(_key(seed, pos) ^ _hashed(token & _ALL)) >> 12) + 0.5) * 2.0**-52


def gumbel_host(seed: int, pos: int, ids: Sequence[int]) -> list[float]:
    """Return the noise of each of these tokens at one position."""
    key = _key(seed, pos)
    return [-log(-log(((_splitmix(key ^ _hashed(token)) >> 12) + 0.5) * 2.0**-52)) for token in ids]
