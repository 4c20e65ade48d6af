"""The `[prefix_cache]` table: how a file stores keys and values. It imports no torch, as profiles are read before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Codec(Protocol):
    """The `[prefix_cache]` table of a profile, shared by all texts."""

    def encode(self, t: Tensor) -> bytes | None:
        """A tensor on the host that lies in one piece as bytes; None where it is better kept as it is."""


@dataclass(frozen=True)
class Uncompressed:
    """Every number as it lies in memory."""

    def encode(self, t: Tensor) -> bytes | None:
        """None."""
        return None


@dataclass(frozen=True)
class Lossless:
    """The same bits in three quarters of the bytes: of numbers whose exponents are much alike, as in bf16."""

    def encode(self, t: Tensor) -> bytes | None:
        """With exponents in four bits; None where that takes no fewer bytes."""
        from kvcli.prefix_cache.exponent_coding import encode

        return encode(t)
