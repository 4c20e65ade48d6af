"""Run the quality suite: every row answers the same questions about the same contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.errors import ContextOverflow, UsageError
from kvcli.quality.answer import QualityJob, answers
from kvcli.quality.controls import Row, full_profile, rows
from kvcli.quality.fingerprint import fingerprint
from kvcli.quality.partial import Key, Outcome, Partial
from kvcli.quality.prompt import Prompts, fitted
from kvcli.quality.prose import Prose
from kvcli.quality.result import QualityResult, Spot
from kvcli.quality.sample import SampleSeed, Task
from kvcli.quality.tasks import chosen

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.settings.profile import Profile

LENGTHS = (512, 1024)  # tokens, prompt and answer together
N = 6  # contexts for each task and length

Tell = Callable[[int, int, str], None]  # contexts done, of how many, and label of the next
Cancel = Callable[[], bool]


def run_quality(
    model: Model,
    profiles: Sequence[Profile],
    *,
    lengths: Sequence[int] = LENGTHS,
    n: int = N,
    tasks: Sequence[str] | None = None,
    seed: int = 0,
    query_visible: bool = False,
    haystack: str | None = None,
    partial: Path | None = None,
    tell: Tell = lambda done, total, label: None,
    cancel: Cancel = lambda: False,
) -> QualityResult:
    """Score the full cache, `profiles`, and two controls with as much memory as the leanest profile.

    `tasks` by name, None = all. `haystack` replaces the generated prose around the needles. Outcomes in `partial` are
    not run again. `cancel` is called between contexts; the result then covers the contexts that every row has done.
    Raises KvcliError subclasses, before any prefill except for errors of a broken model.
    """
    kinds, lengths = chosen(tasks), list(dict.fromkeys(lengths))
    _check(model, lengths, n)
    table = rows(profiles, full_profile(model.profile), lengths)
    for row in table:
        model.with_profile(row.at(min(lengths))).new_session()  # raise errors of a profile now, not later
    suite = _Suite(model, table, Prompts(model.tokenizer), Partial(partial), fingerprint(model), query_visible)
    draws = list(_draws(kinds, lengths, n, seed, Prose(haystack)))
    for task, draw in draws[: len(kinds) * len(lengths)]:  # the first round has each task at each length
        suite.job(task, draw)
    found: dict[Spot, list[Outcome]] = {}
    for outcome in suite.outcomes(draws, tell, cancel):
        found.setdefault(Spot.of(outcome.key), []).append(outcome)
    whole = {spot: of_rows for spot, of_rows in found.items() if len(of_rows) == len(table)}
    args: dict[str, object] = {"lengths": lengths, "n": n, "tasks": [task.name for task in kinds], "seed": seed}
    args |= {"query_visible": query_visible, "haystack": haystack is not None}
    return QualityResult(args, table, whole, is_complete=len(whole) == len(draws))


@dataclass(frozen=True)
class _Suite:
    """Settings shared by all contexts of a run."""

    model: Model
    table: list[Row]
    prompts: Prompts
    known: Partial
    weights: str
    query_visible: bool

    def outcomes(self, draws: Sequence[tuple[Task, SampleSeed]], tell: Tell, cancel: Cancel) -> Iterator[Outcome]:
        """Yield the outcomes by context and row."""
        done, total = 0, len(draws) * len(self.table)
        for task, draw in draws:
            job = self.job(task, draw)
            for row in self.table:
                if cancel():
                    return
                tell(done, total, f"{row.name} · {draw.task} · {draw.length:,} tokens")
                yield self._outcome(job, draw, row)
                done += 1
        tell(done, total, "")

    def job(self, task: Task, draw: SampleSeed) -> QualityJob:
        """Return the context of one draw, fitted to its length, with token ids."""
        context = fitted(task, draw, self.prompts)
        questions = [self.prompts.question(question) for question in context.questions]
        return QualityJob(task, context, self.prompts.context(context.text), questions)

    def _outcome(self, job: QualityJob, draw: SampleSeed, row: Row) -> Outcome:
        # a chat grows to its whole length, and so does the number of slots that a profile keeps
        profile = row.at(draw.length if job.context.is_dialogue else len(job.ids), draw.index)
        key = self._key(job, draw, profile.hash)
        if (known := self.known.get(key)) is not None:
            return known
        model = self.model.with_profile(profile)
        said, kept = answers(model, self.prompts, job, is_visible=self.query_visible)
        outcome = Outcome(key, tuple(said), len(job.ids), kept)
        self.known.add(outcome)
        return outcome

    def _key(self, job: QualityJob, draw: SampleSeed, profile: str) -> Key:
        read = (job.ids, job.questions, [question.max_new for question in job.context.questions])
        prompt = sha256(repr(read).encode()).hexdigest()[:16]
        task, visible = job.task.name, self.query_visible
        return Key(self.weights, profile, task, draw.seed, draw.length, draw.index, visible, prompt)


def _check(model: Model, lengths: Sequence[int], n: int) -> None:
    if n < 1 or not lengths or min(lengths) < 1:
        raise UsageError("the quality suite needs at least one length and one context", code="bad_quality_size")
    if max(lengths) > model.limit:
        raise ContextOverflow(
            "the texts of the quality suite exceed the context window",
            lines=[f"{max(lengths):,} tokens > {model.limit:,}"],
            detail={"length": max(lengths), "limit": model.limit},
            try_=[f"lengths of at most {model.limit:,} tokens"],
        )


def _draws(
    kinds: Sequence[Task], lengths: Sequence[int], n: int, seed: int, prose: Prose
) -> Iterator[tuple[Task, SampleSeed]]:
    """Yield draws in rounds over lengths and tasks, so that a stopped run has some of each."""
    for index in range(max(task.rounds(n) for task in kinds)):
        for length in lengths:
            for task in kinds:
                if index < task.rounds(n):
                    yield task, SampleSeed(task.name, seed, length, index, prose)
