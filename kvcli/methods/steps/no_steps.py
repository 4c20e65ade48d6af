"""No drafted reasoning steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class NoSteps:
    """No drafted steps (kvcli's own): the model writes all of the answer. Not measured here: it is the baseline."""

    takes: ClassVar[str] = ""  # no part of the answer is another model's
    rows: ClassVar[int] = 1  # maximum of a pass
