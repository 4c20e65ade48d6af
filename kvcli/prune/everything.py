"""Every token of a prompt goes through every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcli.engine.gate import Pruner
    from kvcli.engine.lm import LM
    from kvcli.kv.slots import Store


@dataclass(frozen=True)
class Everything:
    """Read all of a prompt in every layer."""

    reads = ""

    def about(self, lm: LM) -> str:
        """Nothing."""
        return ""

    def over(self, lm: LM, past: Store, start: int, n: int, must: Sequence[int]) -> Pruner | None:
        """None: nothing stays behind."""
        return None
