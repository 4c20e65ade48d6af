"""Protocol of a benchmark side: it continues a prompt greedily, timed token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvcli.engine.stats import Stats


@dataclass(frozen=True, slots=True)
class TimedSample:
    """A timed continuation of a prompt. Times are in seconds from the start of the run."""

    ids: tuple[int, ...]  # the new tokens
    at: tuple[float, ...]  # time of each new token, those of all texts; tokens of one pass have the same time
    prompt: int  # tokens, of all texts
    kv_bytes: int | None = None  # bytes of KV allocated at the end; None = unknown
    stats: Stats | None = None  # of sides that draft
    batch: int = 1  # texts side by side; `ids` are those of the first

    @property
    def first_token(self) -> float:
        """Seconds from the prompt to the first token."""
        return self.at[0]

    @property
    def read_tok_s(self) -> float:
        """Prompt tokens per second until the first new token, a definition that fits all sides."""
        return self.prompt / self.at[0]

    @property
    def tok_s(self) -> float:
        """Decoding speed after the pass that gave the first token; 0 if all tokens came from that pass."""
        first = sum(moment == self.at[0] for moment in self.at)
        return (len(self.at) - first) / (self.at[-1] - self.at[0]) if len(self.at) > first else 0.0


class Side(Protocol):
    """A column of the comparison. A side is made once and run many times; each prompt starts with an empty cache."""

    @property
    def name(self) -> str:
        """Name in the table: a profile's name, or hf, hf-lookup, llama.cpp."""

    @property
    def setup(self) -> dict[str, str]:
        """Conditions that affect the figures: versions, dtype, threads, settings that differ."""

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of the side's separate process; None for a side that runs in this process."""

    def run(self, prompt: Sequence[int], new: int) -> TimedSample:
        """Continue `prompt` by exactly `new` tokens, greedily; stop tokens do not end it."""

    def close(self) -> None:
        """Free the side's memory."""
