"""No span reuse: text after another prefix is prefilled again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefixOnly:
    """Reuse only the prefix that two prompts share."""

    describe_reused = ""
