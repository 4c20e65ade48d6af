"""No token pruning: every token of a prompt is run through every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM


@dataclass(frozen=True)
class NoPruning:
    """Run all tokens of a prompt through every layer."""

    describe_read = ""
    compression_interval = None

    def n_deferred(self, n: int) -> int:
        """Return 0."""
        return 0

    def describe(self, lm: LM) -> str:
        """Return "": no pruning."""
        return ""
