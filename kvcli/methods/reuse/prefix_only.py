"""No span reuse: text after another prefix is prefilled again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import ModelPair


@dataclass(frozen=True)
class PrefixOnly:
    """No span reuse (kvcli's own): prompts share only their prefix. Not measured here: it is the baseline."""

    describe_reused = ""

    def companion(self, pair: ModelPair) -> None:
        """Return None: nothing is reused."""
