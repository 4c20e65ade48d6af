"""A model that summarises as it is told to, and remembers what it was asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvcli.api import Cancel, End, Event, Finish, Live, Read, Text, Turn
from kvcli.documents import Document, Section
from kvcli.documents.document import marked
from kvcli.engine.model_info import ModelInfo
from kvcli.engine.sequence.state import Repetition, RepetitionDetector
from kvcli.engine.stats import Stats
from kvcli.settings.schema import Sample
from kvcli.summarize.events import Done
from kvcli.summarize.request import Request
from kvcli.summarize.result import Summary
from kvcli.summarize.run import summarize
from tests.fake_model import FakeTokenizer, fake_info

if TYPE_CHECKING:
    from kvcli.prefix_cache.prefix_cache import SaveResult


class WordTokenizer(FakeTokenizer):
    """One id for each word, with the space before it."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        for word in (found := re.findall(r"\s*\S+|\s+", text)):
            if word not in self._ids:
                self._ids[word] = len(self._words)
                self._words.append(word)
        return [self._ids[word] for word in found]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(self._words[i] for i in ids)


@dataclass
class FakeProfile:
    """What a plan and a cache look at."""

    hash: str = "abc"
    sample: Any = field(default_factory=Sample)
    spec: Any = field(default_factory=lambda: SimpleNamespace(method="off"))
    origins: dict[str, str] = field(default_factory=lambda: {"sample.max_new_tokens": "default"})


@dataclass
class Scribe:
    """Answers a prompt with `answer(prompt)`, a word at a time; a word is a token."""

    answer: Callable[[str], str]
    limit: int = 1400
    info: ModelInfo = field(default_factory=lambda: fake_info(path="/nowhere"))
    profile: FakeProfile = field(default_factory=FakeProfile)
    tokenizer: Any = field(default_factory=WordTokenizer)
    foretell: None = None
    template_variables: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    penalties: list[dict[str, float]] = field(default_factory=list)
    stop_loops: int = 0
    n_workers: int = 1

    def keep(self, cancel: Cancel) -> SaveResult:
        # imports torch, and a program in a terminal of the tests is quicker without
        from kvcli.prefix_cache.prefix_cache import SaveResult

        return SaveResult()

    @property
    def model(self) -> Scribe:
        return self

    def open(self) -> Scribe:
        return self

    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        cancel: Cancel | None = None,
        messages: Sequence[object] = (),
        **penalties: float,
    ) -> Iterator[Event]:
        assert len(prompt) + max_new_tokens <= self.limit, "a prompt that leaves no room for its answer"
        text = self.tokenizer.decode(prompt)
        self.asked.append(text)
        self.penalties.append(penalties)
        stats = Stats(prompt=len(prompt), limit=self.limit)
        yield Live(stats)
        yield Read(len(prompt), len(prompt), 0, 0.1)
        said = list[int]()

        loops = RepetitionDetector(self.stop_loops)

        def turn(finish: Finish, loop: Repetition | None = None) -> End:
            return End(Turn(self.tokenizer.decode(said), tuple(said), finish, stats, loop))

        for word in self.tokenizer.encode(self.answer(text)):
            if (cancel and cancel()) or len(said) == max_new_tokens:
                yield turn("length" if len(said) == max_new_tokens else "interrupted")
                return
            said.append(word)
            yield Text(self.tokenizer.decode([word]), (word,))
            if (loop := loops.push(word)) is not None:
                yield turn("loop", loop)
                return
        yield turn("stop")


def paged(*texts: str, name: str = "a.pdf") -> Document:
    """A document of pages."""
    sections = tuple(Section(i, str(i), text) for i, text in enumerate(texts, 1))
    return Document(name, marked("page", sections), "0" * 64, unit="page", sections=sections, kind="pdf")


def first_sentences(prompt: str) -> str:
    """A summary: the first sentence of every page of the prompt, with its page."""
    found = re.findall(r"(?:^|<user>)\[((?:\S+ )?p\. \d+)\]\n([^.]+)\.", prompt, flags=re.MULTILINE)
    return "\n".join(f"- {' '.join(sentence.split())} [{page}]." for page, sentence in found)


def summary_of(model: Any, documents: Sequence[Document], request: Request | None = None, **options: Any) -> Summary:
    """What `summarize` comes to, all at once."""
    for event in summarize(model, documents, request, **options):
        if isinstance(event, Done):
            return event.summary
    raise KeyboardInterrupt  # only `cancel` ends it earlier
