"""Tokens of a prompt that no method leaves behind, and where methods can look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.errors import BadModel
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.policy import ProtectedTokens


@dataclass(frozen=True)
class PruneSettings:
    """What all methods that leave tokens behind have in common."""

    recent: Annotated[int, Range(1)] = 64  # newest tokens that always go on
    sinks: Annotated[int, Range(0)] = 4  # first tokens that always go on
    protect: bool = True  # the template's tokens, the system text and the question always go on
    min_prompt: Annotated[int, Range(1)] = 1024  # tokens of a prompt below which all go on

    @property
    def n_scoring_rows(self) -> int:
        """The last row's queries judge the others."""
        return 1

    @property
    def compression_interval(self) -> int | None:
        """Nobody comes back."""
        return None

    @property
    def revives_before_prompt(self) -> bool:
        """Nor is anybody brought back."""
        return False

    def n_deferred(self, n: int) -> int:
        """Nor remembered."""
        return 0

    def group_size(self, n: int, chunk: int) -> int:
        """How many of the n tokens that are left of a prompt are read and judged together."""
        return n

    @property
    def guard(self) -> ProtectedTokens:
        """The first and the newest, and what says what is to be done."""
        from kvcli.engine.policy.policy import ProtectedTokens
        from kvcli.engine.sequence.token_kinds import QUESTION, SPECIAL, SYSTEM, TOOLS

        return ProtectedTokens(
            self.sinks, self.recent, frozenset({SPECIAL, SYSTEM, TOOLS, QUESTION} if self.protect else ())
        )

    @property
    def always(self) -> str:
        """Who goes on whatever is judged, in words."""
        others = ", the template, the system text and the question" if self.protect else ""
        return f"the first {self.sinks} and the newest {self.recent}{others} always do"


def below_all(lm: LM, spared: int = 0) -> list[int]:
    """Layers before which tokens can be judged: the one below shows all of a text, and `spared` lie above.

    Raises BadModel where there is none.
    """
    from kvcli.kv.slots import spans  # late: reading a profile must not import torch

    lm.mixers.refuse(lm.info.id, "rows cannot be stopped between them", ["--set prune.method=none"])
    starts = [span.start for span in spans(lm.shapes)[1:] if span.start <= lm.n_layers - spared]
    shown = [i for i in starts if lm.windows[i - 1] is None and lm.shapes[i - 1].shared_from is None]
    if not shown:
        raise BadModel(
            f"[prune] judges tokens in layers that see all of a text, and {lm.info.id} has none",
            code="no_pruning",
            lines=[f"below its last {spared}, where tokens that may come back stay"] if spared else [],
            try_=["--set prune.method=none"],
        )
    return shown


def nearest(layers: Sequence[int], at: float) -> int:
    """The lower of two that are as near."""
    return min(layers, key=lambda layer: (abs(layer - at), layer))
