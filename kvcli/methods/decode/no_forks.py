"""Plain decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class NoForks:
    """Plain decoding (kvcli's own): the answer is written token by token. Not measured here: it is the baseline."""

    writer: ClassVar[None] = None  # the session itself writes
    rows: ClassVar[int] = 1  # maximum of a pass
    notice: ClassVar[str] = ""
