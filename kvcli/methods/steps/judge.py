"""Whether a drafted step stands for the model's own; how likely it must be is learned online (ATTS, arXiv 2509.15148).

The rule is online conformal calibration as in adaptive conformal inference (arXiv 2106.00170): after each step that was
looked at closely the threshold goes up by rate * (1 - alpha) if it would have been accepted wrongly, else down by
rate * alpha. Since nothing is accepted above 1, the share of wrong ones among n is at most
alpha + (1 + rate - likely) / (rate * n), whatever the text is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcli.methods.steps.lookahead_reasoning import LookaheadReasoning


class Judge:
    """Of one text. Its threshold is learned where `alpha` says so."""

    def __init__(self, settings: LookaheadReasoning) -> None:
        self._wants = settings
        self.threshold = settings.likely
        self._n = 0  # steps that differed

    def looks(self, likelihood: Callable[[], float]) -> bool | None:
        """Of a step in other words than the model's, by the mean probability of its tokens: accepted, refused, or None:
        the model's own step is needed."""
        if self._wants.judge != "likely":
            return False if self._wants.judge == "exact" else None
        is_likely = likelihood() >= self.threshold
        self._n += 1
        if self._wants.alpha and self._n % self._wants.audit == 0:
            if is_likely:
                return None
            self.learn(is_wrong=False)
        return is_likely

    def compares(self, step: Sequence[int], own: Sequence[int]) -> bool:
        """Whether a step stands for the model's own, where `looks` could not say."""
        # token by token, so that it needs no words: what a changed number does to the meaning it cannot see
        is_alike = SequenceMatcher(None, step, own, autojunk=False).ratio() >= self._wants.alike
        if self._wants.alpha:
            self.learn(is_wrong=not is_alike)
        return is_alike

    def learn(self, *, is_wrong: bool) -> None:
        """One step was looked at closely."""
        self.threshold += self._wants.rate * (is_wrong - self._wants.alpha)
