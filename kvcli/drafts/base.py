"""What a drafter is: something that proposes rows, and hears what became of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvcli.drafts.pace import Report
    from kvcli.policies.base import Policy
    from kvcli.rows import Draft
    from kvcli.stats import Step


class Drafter(Protocol):
    """Proposes guesses. Nothing it does can change the text: the engine samples, then matches."""

    @property
    def view(self) -> Policy | None:
        """How scouts read the past; None = they read all of it."""

    def expect(self, costs: Mapping[int, float]) -> None:
        """Rows of a pass -> its time in passes of one row, as measured on this machine before: a start, no more."""

    def start(self, ids: Sequence[int]) -> None:
        """The committed text is now `ids` (a new prompt, or an earlier point after an undo)."""

    def propose(self, ids: Sequence[int], room: int) -> Draft:
        """Guesses for what follows `ids`; no path deeper than `room` tokens. May be empty."""

    def observe(self, step: Step) -> None:
        """What one step made of the proposal; called once after each step, in order."""

    def report(self) -> Report | None:
        """How drafting fares and why it pauses, for people; None if there is nothing to say."""


@dataclass(frozen=True)
class Off:
    """No drafting: one row a pass, the yardstick."""

    def drafter(self) -> Off:
        """The drafter of these settings, as every method's dataclass makes its own."""
        return self

    @property
    def view(self) -> Policy | None:
        return None

    def expect(self, costs: Mapping[int, float]) -> None:
        return

    def start(self, ids: Sequence[int]) -> None:
        return

    def propose(self, ids: Sequence[int], room: int) -> Draft:
        from kvcli.rows import Draft  # late: reading a profile must not import torch

        return Draft.none()

    def observe(self, step: Step) -> None:
        return

    def report(self) -> Report | None:
        return None
