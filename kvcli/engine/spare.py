"""Keys and values of another text that a prompt takes over in runs, in place of reading them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.lm import LM
    from kvcli.kv.slots import Store


class Spare(Protocol):
    """Runs of one prompt, which need no reading where the text before them is stored."""

    def next(self, at: int) -> int | None:
        """Where the next run begins, at or behind position `at`; None = there is none."""

    def take(self, at: int) -> tuple[int, Iterator[tuple[int, Tensor, Tensor, int]]]:
        """The run that begins at `at`, given once: where it ends, and what `Session.adopt` takes."""


class Reusing(Protocol):
    """The `[reuse]` table of a profile, shared by all texts."""

    @property
    def reuses(self) -> str:
        """What is taken over that was read behind another text, in words; "" = nothing."""

    def over(self, lm: LM, past: Store, had: Sequence[int], ids: Sequence[int], shared: int) -> Spare | None:
        """What of the stored text `had` serves `ids`, of which the first `shared` tokens are the same."""
