"""The model writes its text itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class NoSteps:
    """The model writes its text itself."""

    second: ClassVar[None] = None  # no model that drafts
    takes: ClassVar[str] = ""  # what of the text is not its own
    rows: ClassVar[int] = 1  # of a pass, at most
