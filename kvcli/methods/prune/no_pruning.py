"""Every token of a prompt goes through every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM


@dataclass(frozen=True)
class NoPruning:
    """Read all of a prompt in every layer."""

    describe_read = ""
    compression_interval = None

    def n_deferred(self, n: int) -> int:
        """Nobody."""
        return 0

    def describe(self, lm: LM) -> str:
        """Nothing."""
        return ""
