"""Kept keys and values lie in files as in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AsIs:
    """Every number as it lies in memory."""

    def encode(self, t: Tensor) -> bytes | None:
        """None."""
        return None
