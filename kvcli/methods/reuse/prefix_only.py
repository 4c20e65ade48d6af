"""What stands behind another text than before is read again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefixOnly:
    """Take over the beginning that two texts share, and nothing behind it."""

    describe_reused = ""
