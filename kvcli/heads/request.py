"""What is asked of the heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.schemas.heads import SAMPLE, TEXTS, Probe

if TYPE_CHECKING:
    from kvcli.documents import Document
    from kvcli.methods.policies.fastgen.policy import FastGen

PROBES: tuple[Probe, ...] = ("prompt", "ablate", "needle", "reason", "repeat")
# the first of them that ran makes the head map
BEST: tuple[Probe, ...] = ("ablate", "reason", "needle", "repeat", "prompt")
RECENT = 256  # newest tokens that a restricted head keeps


@dataclass(frozen=True)
class ProbeRequest:
    """One run."""

    probes: tuple[Probe, ...]
    context: int  # tokens read at most
    settings: FastGen  # candidates, criterion, and how a head chooses
    documents: tuple[Document, ...] = ()  # what the prompt probe reads, and what facts are hidden in; none: our own
    others: tuple[int, ...] = ()  # further contexts for which memory is reckoned
    layers: tuple[int, ...] = ()  # to look at; none = all
    texts: int = TEXTS
    seed: int = 0
    stability: int = 0  # tokens between two looks while an answer is written; 0 = none

    @property
    def sample(self) -> int:
        """Tokens of a text with hidden facts."""
        return min(self.context, SAMPLE)

    @property
    def recent(self) -> int:
        """Newest tokens that a restricted head keeps: few in a short text, or nothing would be taken from it."""
        return min(RECENT, max(8, self.sample // 8))

    @property
    def haystack(self) -> str | None:
        """The user's own text to hide facts in."""
        return "\n\n".join(d.text for d in self.documents) or None
