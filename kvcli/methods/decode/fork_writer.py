"""The base of decoding methods, and the writer that extends an answer by one."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcli.engine.forward_request import Passes
from kvcli.engine.stats import Step
from kvcli.methods.decode.forks import Fork, Forks, Places
from kvcli.settings.profile import NOT_WHOLE, Needs
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.kv.slots import Usage


@dataclass(frozen=True)
class Decoding:
    """Settings of a decoding method; a subclass has its rule in `write`."""

    forks: Annotated[int, Range(2, 16)] = 4  # continuations of the prompt that are written together
    draft: Annotated[int, Range(0, 16)] = 4  # tokens that a fork copies from the others and tries in a pass; 0 = none

    needs: ClassVar[Needs] = Needs(
        NOT_WHOLE | {"prunes", "degrades", "steps", "drafts"}, "a full KV cache, and forks that draft for one another"
    )
    notice: ClassVar[str] = "the answer of this decoding method appears when it is complete"  # "" = as it is written

    @property
    def rows(self) -> int:
        """Maximum rows of a pass; for memory planning."""
        return self.forks * (1 + self.draft)

    def writer(self, lm: LM) -> ForkWriter:
        """Return the writer of a sequence's answers. Raises BadConfig for a model with recurrent layers."""
        lm.recurrent_layers.refuse(lm.info.id, "forks have no recurrent state", ["--set decode.method=none"])
        return ForkWriter(self)

    def write(self, forks: Forks) -> Passes[Fork]:
        """Write forks and return the one whose tokens continue the answer."""
        raise NotImplementedError


class ForkWriter:
    """A writer that extends the answers of one sequence by a decoding method."""

    def __init__(self, method: Decoding) -> None:
        self._method = method
        self._text, self._places = list[int](), Places()  # of the sequence

    def usage(self) -> list[Usage]:
        """Memory between two steps: none, because the KV of forks is freed with the step."""
        return []

    def step(self, session: GenerationSession, stop: Collection[int] = (), most: float = math.inf) -> Passes[Step]:
        """Extend the answer by what the method writes at once, 1 to `most` tokens. Afterwards the session is as
        `GenerationSession.step` leaves it."""
        began, n = session.lm.clock(), len(self._text)
        room = int(min(most, session.lm.limit - session.committed - 1))
        if room < 1:  # the last token of the context window
            return (yield from session.step(stop, most))
        if session.ids[:n] != self._text:
            self._text, self._places, n = [], Places(), 0
        self._text += session.ids[n:]
        self._places.add(self._text, n)
        forks = Forks(session, self._places, self._method.draft, stop, room)
        return forks.adopt((yield from self._method.write(forks)), began)
