"""Companion of a sequence: state that follows its ids through every rewind, compression point, fork and save."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

from kvcli.kv.slots import Loss, Usage
from kvcli.kv.snapshot import SnapshotReader, State


class Companion:
    """Base class of companions. A companion overrides the methods that concern it; by default it does nothing.

    `GenerationSession.companions` is a list, in the order of effects; docs/design/engine.md has an example. `text` is
    the session and `point` a `CompressionPoint`, which are defined in folders above this one. A generator
    yields forward requests. A method that raises leaves the companion as it was, or in a state that `reaches` only 0.
    """

    condensed = 0  # first tokens of the sequence that stand for a longer text

    def before_prompt(self, text: Any, ids: Sequence[int]) -> None:
        """Take what is needed of the sequence before it is rewound to the prefix that it shares with a prompt."""

    def reaches(self, n: int, of: int) -> int:
        """Return to how many tokens, at most n of the `of` committed ones, it can be rewound; 0 is always possible."""
        return n

    def rewind(self, n: int, of: int) -> None:
        """Rewind to the first n of the `of` committed tokens; n = `of` discards what a broken pass left behind."""

    def complete(self, text: Any) -> Generator[Any, Any, None] | None:
        """Finish work that the next prompt would wait for: before it, and earlier if the user is idle."""

    def prefill(self, text: Any, end: int) -> Generator[Any, Any, None] | None:
        """Return the passes that prefill the next tokens of a prompt, at most up to `end`; None = as any session."""

    @property
    def progress(self) -> int:
        """Number of tokens of a prefill under way that equals the work done."""
        return 0

    def next_point(self, n: int, n_prompt: int) -> float:
        """Return the token count, above n, of its next compression point; n_prompt: tokens after the last prefill."""
        return math.inf

    def compress(self, point: Any) -> Generator[Any, Any, None] | None:
        """Do what is due at a compression point, before the companions that follow in the list."""

    def loss(self, n: int) -> Loss | None:
        """Return how it made the KV of the n committed tokens approximate."""
        return None

    def snapshot(self) -> State:
        """Return all state that later passes depend on, under names that no other companion uses. Tensors are views,
        valid until the sequence continues. It is called between passes only."""
        return {}

    def restore(self, given: SnapshotReader) -> None:
        """Restore it from the snapshot of a sequence, into a new companion. Raises SnapshotMismatch, CacheFull."""

    def usage(self) -> list[Usage]:
        """Return the memory in use, by layer."""
        return []
