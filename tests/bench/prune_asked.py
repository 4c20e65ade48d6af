"""What `prune.py` asks: prompts with their question in sight, and how right a side is about each.

The demo model is asked for facts and for summaries of held-out reports. Others are asked what the quality suite asks
(lookups), go on with a text (prose: the share of its next tokens that are named), and summarise one (summary: the share
of the tokens of the unpruned model's summary that are named, each given those before it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from statistics import fmean
from typing import Any

from kvcli.bench.texts import text_of
from kvcli.bench.workloads import cut, turns
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.quality.agree import predicted
from kvcli.quality.answer import open_session
from kvcli.quality.prompt import Prompts, fitted
from kvcli.quality.prose import Prose
from kvcli.quality.sample import SampleSeed
from kvcli.quality.tasks import TASKS
from tests.bench.harness import once
from tests.demo_model.evaluate import HELD_OUT, Question, prompt_ids, questions

SKILLS = {"single key": "lookup", "many keys": "lookup", "one finding": "lookup", "summary": "summary"}
LOOKUPS = ("niah_single", "passkey", "mqar")
TEXTS = ("article", "manual", "prose")
SAID = 64  # tokens that are predicted, and written
ASK = "{text}\n\nSummarise the main points of this text."

Score = Callable[[str], float]


@dataclass
class Asked:
    """One prompt, and how what comes behind it is judged."""

    kind: str  # lookup, summary, prose; none = it is timed alone
    ids: list[int]
    new: int  # tokens of the answer, at most
    score: Score | None = None  # of the answer; it may then end before
    follow: Sequence[int] = ()  # what is to be named token by token instead, before anything is written

    def named(self, session: Any) -> float:
        """The share of `follow` that is the likeliest token where it stands."""
        likeliest = predicted(session, self.follow).argmax(-1).tolist()
        return fmean(a == b for a, b in zip(likeliest, self.follow, strict=True))


def of_demo(model: Any, tokens: int, n: int) -> Iterator[Asked]:
    """n lookups of a kind, half as many summaries."""
    tokenizer = model.tokenizer
    for question in questions(tokenizer.backend_tokenizer, tokens, n, HELD_OUT):
        if (kind := SKILLS.get(question.skill)) is not None:
            new = len(tokenizer.encode(question.turn.answer, add_special_tokens=False)) + 8
            ids = prompt_ids(tokenizer.backend_tokenizer, question)
            yield Asked(kind, ids, new, partial(_lines if kind == "summary" else _first, question))


def _first(question: Question, said: str) -> float:
    return float(said.strip() == question.turn.answer.split("\n")[0])


def _lines(question: Question, said: str) -> float:
    return fmean(line in said.strip().split("\n") for line in question.turn.answer.split("\n"))


def lookups(model: Any, tokens: int, n: int) -> Iterator[Asked]:
    """n lookups of a kind about Moby-Dick."""
    prompts, prose = Prompts(model.tokenizer), Prose(text_of("prose"))
    for name in LOOKUPS:
        task = TASKS[name]
        for i in range(n):
            context = fitted(task, SampleSeed(name, HELD_OUT, tokens, i, prose), prompts)
            question = context.questions[i % len(context.questions)]
            ids = prompts.context(context.text) + prompts.question(question)
            right = partial(task.score, question=question)
            yield Asked("lookup", ids, question.max_new, lambda said, q=question, of=right: of(q.prefix + said))


def of_suite(model: Any, tokens: int, n: int) -> Iterator[Asked]:
    """n lookups of a kind, half as many texts to go on with and as many summaries."""
    yield from lookups(model, tokens, n)
    for i in range(max(1, n // 2)):
        text = text_of(TEXTS[i % len(TEXTS)])
        rest = text[Random(i).randrange(len(text) // 2) :]
        ids = model.tokenizer.encode(rest)
        yield Asked("prose", ids[:tokens], SAID, follow=ids[tokens : tokens + SAID])
        asked = cut(model.tokenizer, rest, partial(turns, [ASK]), tokens)
        follow = once(f"summary of {tokens} tokens, {i}", partial(_summary, model, asked))
        yield Asked("summary", asked, SAID, follow=follow)


def _summary(model: Any, ids: list[int]) -> list[int]:
    """As the model writes it that has read everything."""
    session = open_session(model)
    run_to_end(session.read(ids))
    return [i for step in iterate_events(session.stream(SAID)) for i in step.new]


def plain(model: Any, tokens: int, n: int) -> Iterator[Asked]:
    """n prompts about nothing."""
    ids = model.tokenizer.encode(text_of("prose") + text_of("manual"))
    for i in range(n):
        start = Random(i).randrange(len(ids))
        yield Asked("none", (ids[start:] + ids * (tokens // len(ids) + 1))[:tokens], 1)
