"""Verification for 16-bit models: near ties are decided by a pass of one row, as plain decoding decides them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from kvcli.rows import Draft, Rows
from kvcli.sample import Sampler, Seen
from kvcli.ties import bound
from kvcli.verify import exact

if TYPE_CHECKING:
    from kvcli.drafts.base import Costs, Drafter, Glance
    from kvcli.drafts.report import Report
    from kvcli.stats import Step


class Strict:
    """`exact` up to the first near tie. Wraps a drafter too: the pass behind that must have one row.

    Near ties then fall as they do without drafting, but for what rounding does to the keys and values of accepted
    guesses, which moves later logits less than a tie is wide. Not seen: whether rounding moves a token across the edge
    of top-k, top-p or min-p.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.ties = 0  # near ties so far
        self._alone = False  # the next pass has one row
        self._decides = False  # the pass under way has one row, because of a near tie

    def __call__(self, rows: Rows, logits: Tensor, sampler: Sampler, seen: Seen) -> tuple[list[int], list[int]]:
        """The path is empty if the first row is a near tie already."""
        path, new = exact(rows, logits, sampler, seen)
        if rows.n_rows == 1:
            return path, new
        for i, row in enumerate(path):
            mask = seen.mask
            if sampler.needs_text and i:
                mask = mask.clone()
                mask[new[:i]] = True
            at = slice(row, row + 1)
            if bool(sampler.margin(logits[at], rows.pos[at], mask) <= bound(logits[at])):
                self._alone = True
                return path[:i], new[:i]
        return path, new

    @property
    def view(self) -> Glance | None:
        return self.drafter.view

    def expect(self, costs: Costs) -> None:
        self.drafter.expect(costs)

    def start(self, ids: Sequence[int], sampler: Sampler | None = None) -> None:
        self._alone = self._decides = False
        self.drafter.start(ids, sampler)

    def propose(self, ids: Sequence[int], room: int) -> Draft:
        self._decides, self._alone = self._alone, False
        return self.drafter.propose(ids, 0 if self._decides else room)

    def observe(self, step: Step) -> None:
        self.ties += self._decides
        self.drafter.observe(step)

    def report(self) -> Report | None:
        report = self.drafter.report()
        return None if report is None else replace(report, ties=self.ties)
