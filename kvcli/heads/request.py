"""Request for a run of the head probes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.schemas.heads import SAMPLE, TEXTS, Probe

if TYPE_CHECKING:
    from kvcli.documents import Document
    from kvcli.methods.policies.fastgen.policy import FastGen

PROBES: tuple[Probe, ...] = ("prompt", "ablate", "needle", "reason", "repeat")
# the head map is made from the first of these probes that ran
BEST: tuple[Probe, ...] = ("ablate", "reason", "needle", "repeat", "prompt")
RECENT = 256  # newest tokens that a restricted head keeps


@dataclass(frozen=True)
class ProbeRequest:
    """Request for one run of the head probes."""

    probes: tuple[Probe, ...]
    context: int  # most tokens of a prompt
    settings: FastGen  # candidates, criterion, and rule of choice
    documents: tuple[Document, ...] = ()  # text of the prompt probe and around hidden facts; none: built-in text
    others: tuple[int, ...] = ()  # further context lengths for which memory is computed
    layers: tuple[int, ...] = ()  # layers to probe; none = all
    texts: int = TEXTS
    seed: int = 0
    stability: int = 0  # tokens between two measurements while generating; 0 = none

    @property
    def sample(self) -> int:
        """Number of tokens of a text with hidden facts."""
        return min(self.context, SAMPLE)

    @property
    def recent(self) -> int:
        """Newest tokens that a restricted head keeps; fewer in a short text, so that the restriction has an effect."""
        return min(RECENT, max(8, self.sample // 8))

    @property
    def haystack(self) -> str | None:
        """Text of the user in which facts are hidden; None = generated prose."""
        return "\n\n".join(d.text for d in self.documents) or None
