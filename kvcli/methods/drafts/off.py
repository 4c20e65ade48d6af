"""No drafting: one row a pass, the yardstick."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import Costs, DraftContext, ModelPair
    from kvcli.engine.drafting.report import DraftReport
    from kvcli.engine.rows import Draft
    from kvcli.engine.sequence.sampler import Sampler
    from kvcli.engine.stats import Step
    from kvcli.kv.slots import Usage


@dataclass(frozen=True)
class Off:
    """No drafting: one row a pass, the yardstick."""

    require_batch_invariance: ClassVar[bool] = False  # nothing to be strict about
    second: ClassVar[None] = None  # no model that drafts
    checks: ClassVar[bool] = False  # nor anything to check
    rows: ClassVar[int] = 1  # of a pass, at most: what memory is planned with
    view: ClassVar[None] = None
    logits_hook: ClassVar[None] = None

    def draft_slots(self, n: int, device: str = "cpu") -> int:
        """Of n tokens, those whose keys and values layers of its own have there: what memory is planned with."""
        return 0

    def view_slots(self, n: int) -> int:
        """How many of n slots a head a view keeps a copy of: what memory is planned with."""
        return 0

    def index_bytes(self, n: int) -> int:
        """Bytes of host memory, at most, of what a drafter remembers of n tokens: what memory is planned with."""
        return 0

    def ignored_keys(self) -> dict[str, str]:
        """Keys that nothing reads as the others are: key -> the one in whose way it is."""
        return {}

    def drafter(self, ends: Collection[int] = (), pair: ModelPair | None = None) -> Off:
        """The drafter of these settings, as every method's dataclass makes its own. `ends`: tokens that end a text.
        `pair`: of the model that writes and the one that drafts, where `second` names one."""
        return self

    def usage(self) -> list[Usage]:
        return []

    def expect(self, costs: Costs) -> None:
        return

    def start(self, ids: Sequence[int], sampler: Sampler | None = None) -> None:
        return

    def propose(self, ids: Sequence[int], room: int, past: DraftContext | None = None) -> Draft:
        from kvcli.engine.rows import Draft  # late: reading a profile must not import torch

        return Draft.none(ahead=room)

    def observe(self, step: Step) -> None:
        return

    def report(self) -> DraftReport | None:
        return None
