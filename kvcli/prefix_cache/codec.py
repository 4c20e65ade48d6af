"""How keys and values are put into a file: the `[keep]` table. Without tensors, as a profile is read before any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Codec(Protocol):
    """The `[keep]` table of a profile, shared by all texts."""

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
