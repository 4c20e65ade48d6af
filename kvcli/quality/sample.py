"""What a task writes and how it is scored: a context, its questions, and the dice they are drawn with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcli.quality.prose import Prose


GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a context."""

    text: str
    prefix: str  # how the answer begins; the model goes on from there
    references: tuple[str, ...]  # what the answer has to hold
    expected: str  # a right answer behind the prefix; its length in tokens sets how long an answer may get
    meta: Mapping[str, object] = field(default_factory=dict)
    max_new: int = 0  # tokens; set when the context is fitted


@dataclass(frozen=True, slots=True)
class Context:
    """A text and what is asked about it. Questions are asked one by one, each of the same past."""

    text: str
    questions: tuple[Question, ...]
    is_dialogue: bool = False  # questions follow each other in one conversation instead


@dataclass(frozen=True, slots=True)
class SampleSeed:
    """The dice for one context. A longer form of a context is the same one with more between its needles."""

    task: str
    seed: int
    length: int  # tokens wanted, prompt and answer together
    index: int
    prose: Prose

    def rng(self) -> Random:
        """The same numbers every time."""
        return Random(f"{self.seed} {self.task} {self.length} {self.index}")

    @property
    def depth(self) -> float:
        """Where the needle goes, as a share of the text: the golden ratio spreads any number of contexts evenly."""
        return (Random(f"{self.seed} {self.task} {self.length}").random() + self.index * GOLDEN) % 1


def as_many(n: int) -> int:
    """Contexts at one length: as many as were asked for."""
    return n


Make = Callable[[SampleSeed, int], Context]
Rounds = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of question. `make(draw, size)` writes a context of a size that grows with its length in tokens."""

    name: str
    about: str  # one line for people
    make: Make
    score: Callable[[str, Question], float]  # the answer, prefix included -> 0 to 1
    is_binary: bool = False  # scores are 0 or 1
    least: int = 1  # the smallest size
    rounds: Rounds = as_many  # contexts at one length, from what was asked for
    detail: Callable[[str, Question], Mapping[str, bool]] | None = None  # parts of the score that are shown beside it
