"""Encoding of keys and values in files: the `[prefix_cache]` table. No torch, because profiles are read first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Codec(Protocol):
    """Codec: the `[prefix_cache]` table of a profile, shared by all sequences."""

    def encode(self, t: Tensor) -> bytes | None:
        """Encode a tensor; None = store it unchanged."""


@dataclass(frozen=True)
class Uncompressed:
    """No compression (kvcli's own): KV is saved as it is in memory. Not measured here: it is the baseline."""

    def encode(self, t: Tensor) -> bytes | None:
        """Return None: no tensor is encoded."""
        return None


@dataclass(frozen=True)
class Lossless:
    """Exponents in four bits (kvcli's own), without loss: three quarters of the bytes for bf16.

    A block of the demo model takes 595 kB, 4.9 ms to write and 1.3 ms to read (measurements/lab-log.md).
    """

    def encode(self, t: Tensor) -> bytes | None:
        """Encode with exponents in four bits; None if that takes no fewer bytes."""
        from kvcli.prefix_cache.exponent_coding import encode

        return encode(t)
