"""Judge of drafted reasoning steps; the likelihood they need is learned online (ATTS, arXiv 2509.15148).

The rule is online conformal calibration as in adaptive conformal inference (arXiv 2106.00170). After each audited step
the threshold goes up by rate * (1 - alpha) if the step would have been accepted wrongly, else down by rate * alpha. As
a threshold above 1 accepts no step, the share of wrong ones among n is at most
alpha + (1 + rate - likely) / (rate * n) for any text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcli.methods.steps.lookahead_reasoning import LookaheadReasoning


class Judge:
    """Judge of one sequence. Its threshold is learned if `alpha` is set."""

    def __init__(self, settings: LookaheadReasoning) -> None:
        self._wants = settings
        self.threshold = settings.likely
        self._n = 0  # steps that differed from the model's

    def looks(self, likelihood: Callable[[], float]) -> bool | None:
        """Judge a step that differs from the model's tokens by the mean probability of its tokens: True = accepted,
        False = rejected, None = the model's own step is needed."""
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
        """True if a step is equivalent to the model's own, for steps that `looks` could not judge."""
        # token by token, which needs no words but cannot see how a changed number changes the meaning
        is_alike = SequenceMatcher(None, step, own, autojunk=False).ratio() >= self._wants.alike
        if self._wants.alpha:
            self.learn(is_wrong=not is_alike)
        return is_alike

    def learn(self, *, is_wrong: bool) -> None:
        """Update the threshold after one audited step."""
        self.threshold += self._wants.rate * (is_wrong - self._wants.alpha)
