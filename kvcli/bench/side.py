"""A side of a benchmark: something that continues a prompt greedily, timed token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvcli.engine.stats import Stats


@dataclass(frozen=True, slots=True)
class TimedSample:
    """One prompt continued once. Times in seconds since the prompt was handed over."""

    ids: tuple[int, ...]  # the new tokens
    at: tuple[float, ...]  # when each of them came; tokens of one pass came at the same moment
    prompt: int  # tokens
    kv_bytes: int | None = None  # allocated for keys and values at the end; None = the side cannot tell
    stats: Stats | None = None  # of sides that draft

    @property
    def first_token(self) -> float:
        """Seconds from the prompt to the first token."""
        return self.at[0]

    @property
    def read_tok_s(self) -> float:
        """Prompt tokens a second until the first new token: the one definition that all sides can be held to."""
        return self.prompt / self.at[0]

    @property
    def tok_s(self) -> float:
        """Decoding speed after the pass that gave the first token; 0 when everything came in that pass."""
        first = sum(moment == self.at[0] for moment in self.at)
        return (len(self.at) - first) / (self.at[-1] - self.at[0]) if len(self.at) > first else 0.0


class Side(Protocol):
    """One column of what is compared. Made once, run many times; forgets every prompt before the next one."""

    @property
    def name(self) -> str:
        """As the table shows it: a profile's name, or hf, hf-lookup, llama.cpp, kvpress."""

    @property
    def setup(self) -> dict[str, str]:
        """What a reader must know to believe the figures: versions, dtype, threads, settings that differ."""

    @property
    def peak_bytes(self) -> int | None:
        """What a process of its own held at most; None for a side that runs in ours."""

    def run(self, prompt: Sequence[int], new: int) -> TimedSample:
        """Continue `prompt` by exactly `new` tokens, greedily; stop tokens do not end it."""

    def close(self) -> None:
        """Free what it holds."""
