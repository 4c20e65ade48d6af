"""Admission: the order in which answers begin whose KV caches share one pool of memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from kvcli.api import Waiting

if TYPE_CHECKING:
    from kvcli.chat.turn import TurnRun
    from kvcli.engine.engine import EngineTask
    from kvcli.engine.forward_request import Coroutine


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of the answers that event loops ask of one model."""

    pool_bytes: int | None = None  # memory of the KV of all sessions; None = what is free beside the weights
    queue: int = 256  # most answers that wait
    skips: int = 8  # most answers that begin before an earlier answer, for which too little memory is left


class Pause(Waiting):
    """The answer waits for one engine step of the others."""


@dataclass(eq=False, slots=True)
class Claim:
    """A requested answer, and the memory that it needs."""

    work: Coroutine[Any, Any]
    session: Any  # the `TextSession`, whose module imports this one
    run: TurnRun
    need: int = 0  # bytes of KV for prompt and answer
    client: str = ""
    can_shrink: bool = False  # its profile offloads KV, or has fallbacks
    tell: Callable[[Any], object] = id  # receives its events, and at the end its error or None
    task: EngineTask[Any, Any] | None = None
    is_preempted: bool = False  # its work waits for the result of a pass that never ran
    skipped: int = 0  # answers that began before it
    ahead: int = -1  # requests before it, as last told
    order: int = 0  # of admission
    copies: dict[Claim, int] = field(default_factory=dict)  # prompt tokens that it can copy from another answer
    began: float = 0.0


class AdmissionQueue:
    """Waiting claims: in turns of their clients, and of each client in order of arrival."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Claim]] = {}  # by client, whose turn is next first

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def order(self) -> list[Claim]:
        """Return the claims in the order in which they are to begin."""
        return [claim for each in zip_longest(*self._lines.values()) for claim in each if claim is not None]

    def add(self, claim: Claim) -> None:
        """Add a claim."""
        self._lines.setdefault(claim.client, deque()).append(claim)

    def remove(self, claim: Claim) -> None:
        """Remove a claim, if it waits. Its client has the last turn then."""
        line = self._lines.pop(claim.client, deque())
        if claim in line:
            line.remove(claim)
        self._lines |= {claim.client: line} if line else {}

    def next(self, fits: Callable[[Claim], bool | None], skips: int) -> Claim | None:
        """Remove and return the next claim that fits; None = none. A claim for which `fits` is False is skipped at most
        `skips` times; one for which it is None waits for no memory."""
        skipped = list[Claim]()
        for claim in self.order():
            if (is_next := fits(claim)) is None:
                continue
            if is_next:
                for one in skipped:
                    one.skipped += 1
                self.remove(claim)
                return claim
            if claim.skipped >= skips:
                return None
            skipped.append(claim)
        return None
