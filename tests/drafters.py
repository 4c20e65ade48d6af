"""Drafters that try to break the engine: always right, always wrong, a bush of noise, nothing but end tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kvcli.drafts.mixer import Mixer
from kvcli.drafts.self_draft import SelfDraft
from kvcli.engine.drafter import Costs, Pair
from kvcli.engine.feed import Asks, Glean, asked
from kvcli.engine.policy import Policy
from kvcli.engine.report import Report
from kvcli.engine.rows import Draft
from kvcli.engine.sample import Sampler
from kvcli.engine.session import Session
from kvcli.engine.stats import Step
from kvcli.kv.slots import Usage


class Scripted:
    """A drafter that knows the text plain decoding gives (prompt included)."""

    view: Policy | None = None
    glean = None

    def __init__(self, truth: Sequence[int], vocab: int, stop: int) -> None:
        self.truth, self.vocab, self.stop = list(truth), vocab, stop
        self.random = random.Random(7)
        self.steps: list[Step] = []

    def start(self, ids: Sequence[int], sampler: object = None) -> None:
        return

    def observe(self, step: Step) -> None:
        self.steps.append(step)

    def usage(self) -> list[Usage]:
        return []

    def report(self) -> None:
        return None

    def ahead(self, ids: Sequence[int], n: int) -> list[int]:
        return self.truth[len(ids) : len(ids) + n]


class Right(Scripted):
    """Guesses the truth, up to seven tokens."""

    def propose(self, ids: Sequence[int], room: int, past: object) -> Draft:
        return Draft.chain(self.ahead(ids, min(7, room)))


class Wrong(Scripted):
    """Guesses anything but the truth."""

    def propose(self, ids: Sequence[int], room: int, past: object) -> Draft:
        return Draft.chain([(t + 1) % self.vocab for t in self.ahead(ids, min(5, room))])


class EndSpam(Scripted):
    """Guesses that the text ends, in the middle of a true path and everywhere else."""

    def propose(self, ids: Sequence[int], room: int, past: object) -> Draft:
        true = self.ahead(ids, min(2, room))
        if len(true) < 2:
            return Draft.chain([self.stop] * min(room, 4))
        nodes, parent = [true[0], self.stop, true[1], self.stop], [-1, 0, 0, -1]
        seen: set[tuple[int, int]] = set()
        kept = [i for i in range(4) if (parent[i], nodes[i]) not in seen and not seen.add((parent[i], nodes[i]))]
        return Draft([nodes[i] for i in kept], [parent[i] for i in kept])


class Bush(Scripted):
    """A random tree of noise with the truth hidden somewhere in it, never as the first child."""

    def propose(self, ids: Sequence[int], room: int, past: object) -> Draft:
        nodes: list[int] = []
        parent: list[int] = []
        at = -1
        for token in self.ahead(ids, min(4, room)):
            noise = self.random.sample([t for t in range(self.vocab) if t != token], self.random.randint(1, 3))
            for t in [*noise, token]:
                nodes.append(t)
                parent.append(at)
            at = len(nodes) - 1
        return Draft(nodes, parent)


class Moody(Scripted):
    """A chain that is right for a random length: any accept length, at any boundary."""

    def propose(self, ids: Sequence[int], room: int, past: object) -> Draft:
        true = self.ahead(ids, min(9, room))
        good = self.random.randint(0, len(true)) if true else 0
        return Draft.chain([t if i < good else (t + 1) % self.vocab for i, t in enumerate(true)])


ADVERSARIES = (Right, Wrong, EndSpam, Bush, Moody)


class Itself:
    """The model of whichever session it is given to."""

    def __init__(self, **settings: Any) -> None:
        self._config = SelfDraft(adaptive=False, depth=3, copies=False, **settings)
        self.view = self._config.glance()
        self._mixer: Mixer | None = None
        self._text: tuple[Sequence[int], Sampler | None] = ((), None)

    @property
    def glean(self) -> Glean | None:
        return self._mixer.glean if self._mixer is not None else None

    def expect(self, costs: Costs) -> None:
        return

    def start(self, ids: Sequence[int], sampler: Sampler | None = None) -> Asks[None] | None:
        self._text = ids, sampler
        return self._mixer.start(ids, sampler) if self._mixer is not None else None

    def propose(self, ids: Sequence[int], room: int, past: Session) -> Asks[Draft]:
        if self._mixer is None:
            self._mixer = self._config.drafter(pair=Pair(past.lm, past.lm))
            yield from asked(self._mixer.start(*self._text))
        return (yield from asked(self._mixer.propose(ids, room, past)))

    def observe(self, step: Step) -> Asks[None] | None:
        return self._mixer.observe(step) if self._mixer is not None else None

    def usage(self) -> list[Usage]:
        return []

    def report(self) -> Report | None:
        return self._mixer.report() if self._mixer is not None else None
