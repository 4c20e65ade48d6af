"""Plain decoding: one token per pass, no draft."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcli.kv.footprint import Footprint, ModelSizes

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import Costs, DraftContext, ModelPair
    from kvcli.engine.forward_request import Draft
    from kvcli.engine.sequence.sampler import Sampler
    from kvcli.engine.stats import DraftReport, Step
    from kvcli.kv.slots import Usage


@dataclass(frozen=True)
class Off:
    """Plain decoding (kvcli's own): one token per forward pass, no draft. Not measured here: it is the baseline."""

    require_batch_invariance: ClassVar[bool] = False  # no draft that could differ in bits
    checks: ClassVar[bool] = False  # no draft to verify
    rows: ClassVar[int] = 1  # maximum of a pass; for memory planning
    view: ClassVar[None] = None
    logits_hook: ClassVar[None] = None

    def footprint(self, n: int, of: ModelSizes) -> Footprint:
        return Footprint()

    def view_slots(self, n: int) -> int:
        """Return 0: there is no cache view."""
        return 0

    def ignored_keys(self) -> dict[str, str]:
        """Return no keys: every key has an effect."""
        return {}

    def drafter(self, ends: Collection[int] = (), pair: ModelPair | None = None) -> Off:
        """Return the drafter of these settings; here the settings themselves. `ends`: end tokens of a sequence. `pair`:
        target model and draft model, if a method names one."""
        return self

    def usage(self) -> list[Usage]:
        return []

    def expect(self, costs: Costs) -> None:
        return

    def start(self, ids: Sequence[int], sampler: Sampler | None = None) -> None:
        return

    def propose(self, ids: Sequence[int], room: int, context: DraftContext | None = None) -> Draft:
        from kvcli.engine.forward_request import Draft  # late: reading a profile must not import torch

        return Draft([], [], ahead=room)

    def observe(self, step: Step) -> None:
        return

    def report(self) -> DraftReport | None:
        return None
