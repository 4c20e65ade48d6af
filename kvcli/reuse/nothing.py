"""What stands behind another text than before is read again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcli.engine.lm import LM
    from kvcli.engine.spare import Spare
    from kvcli.kv.slots import Store


@dataclass(frozen=True)
class Nothing:
    """Take over the beginning that two texts share, and nothing behind it."""

    reuses = ""

    def over(self, lm: LM, past: Store, had: Sequence[int], ids: Sequence[int], shared: int) -> Spare | None:
        """None: nothing is taken over."""
        return None
