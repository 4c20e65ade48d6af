"""Compute the quality table from outcomes: means, differences to the full cache with intervals, the worst task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from kvcli.errors import KvcliError
from kvcli.quality.controls import Row
from kvcli.quality.partial import Answer, Key, Outcome
from kvcli.quality.statistics import bootstrap, mcnemar, mean_of_means
from kvcli.quality.tasks import TASKS
from kvcli.schemas.quality import (
    Difference,
    GridCell,
    McNemar,
    QualityArgs,
    QualityDocument,
    QualityRow,
    QualityTask,
    TurnScore,
    WorstTask,
)

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, order=True)
class Spot:
    """Identifier of a context, equal for all rows."""

    task: str
    length: int
    index: int

    @staticmethod
    def of(key: Key) -> Spot:
        return Spot(key.task, key.length, key.index)


Cells = Mapping[Spot, Outcome]


@dataclass(frozen=True)
class QualityResult:
    """Outcomes of all rows, restricted to the contexts that every row has done."""

    args: Mapping[str, Any]
    table: Sequence[Row]
    outcomes: Mapping[Spot, Sequence[Outcome]]  # one for each row of `table`
    is_complete: bool

    def cells(self, row: int) -> dict[Spot, Outcome]:
        """Return the outcomes of one row."""
        return {spot: outcomes[row] for spot, outcomes in self.outcomes.items()}

    def document(self) -> QualityDocument:
        """Return the result as a kvcli.quality/1 document. Raises KvcliError if no context was done by every row."""
        if not self.outcomes:
            raise KvcliError("the quality suite was stopped before its first result", code="no_result")
        full, seed = self.cells(0), int(self.args["seed"])
        budgets = {row.budget.words() for row in self.table if row.budget}
        return QualityDocument(
            args=QualityArgs(**self.args, budget=", ".join(budgets)),
            complete=self.is_complete,
            contexts=len(self.outcomes),
            rows=[_row(row, self.cells(i), full, seed) for i, row in enumerate(self.table)],
        )


def _row(row: Row, cells: Cells, full: Cells, seed: int) -> QualityRow:
    is_full = row.role == "full"
    tasks = [_task(name, of_task, full, seed, is_full) for name, of_task in _by(cells, lambda s: s.task).items()]
    return QualityRow(
        profile=row.name,
        role=row.role,
        hash=None if row.budget else row.base.hash,
        kept=fmean(outcome.kept for outcome in cells.values()),
        mean=mean_of_means(_scores(cells)),
        worst=_worst(tasks),
        difference=None if is_full else _difference(cells, full, seed),
        mcnemar=None if is_full else _mcnemar(cells, full),
        by_length={n: mean_of_means(_scores(c)) for n, c in sorted(_by(cells, lambda s: s.length).items())},
        tasks=tasks,
        passkey=_grid({s: o for s, o in cells.items() if s.task == "passkey"}),
        turns=_turns(cells),
    )


def _task(name: str, cells: Cells, full: Cells, seed: int, is_full: bool) -> QualityTask:
    said = _answers(cells)
    parts = {part for answer in said for part, value in answer.meta.items() if isinstance(value, bool)}
    return QualityTask(
        task=name,
        mean=mean_of_means(_scores(cells)),
        contexts=len(cells),
        questions=len(said),
        difference=None if is_full else _difference(cells, full, seed),
        by_length={n: fmean(o.score for o in c.values()) for n, c in sorted(_by(cells, lambda s: s.length).items())},
        details={part: fmean(bool(a.meta.get(part)) for a in said) for part in sorted(parts)},
    )


def _worst(tasks: Sequence[QualityTask]) -> WorstTask:
    """Return the task with the largest loss; among equal losses, and for the full cache, with the lowest score."""
    task = min(tasks, key=lambda t: (t.difference.mean if t.difference else 0.0, t.mean))
    return WorstTask(task=task.task, score=task.mean, difference=task.difference.mean if task.difference else None)


def _difference(cells: Cells, full: Cells, seed: int) -> Difference:
    """Compute the difference with its interval: contexts are resampled within each task and length, which are fixed."""
    groups = _grouped((_group(spot), outcome.score - full[spot].score) for spot, outcome in cells.items())
    low, high = bootstrap(groups, seed, least=-1, most=1) or (None, None)
    return Difference(mean=mean_of_means(groups), low=low, high=high)


def _mcnemar(cells: Cells, full: Cells) -> McNemar | None:
    pairs = [
        (ours.score == 1, theirs.score == 1)
        for spot, outcome in cells.items()
        if TASKS[spot.task].is_binary
        for ours, theirs in zip(outcome.answers, full[spot].answers, strict=True)
    ]
    if not pairs:
        return None
    only_this, only_full = pairs.count((True, False)), pairs.count((False, True))
    return McNemar(questions=len(pairs), only_full=only_full, only_this=only_this, p=mcnemar(only_full, only_this))


def _grid(cells: Cells) -> list[GridCell]:
    found = _grouped(((s.length, float(o.answers[0].meta["depth"])), o.score) for s, o in cells.items())
    return [GridCell(length=n, depth=d, score=fmean(v), contexts=len(v)) for (n, d), v in sorted(found.items())]


def _turns(cells: Cells) -> list[TurnScore]:
    found = _grouped((int(a.meta["turn"]), a.score) for a in _answers(cells) if "turn" in a.meta)
    return [TurnScore(turn=turn, score=fmean(v), questions=len(v)) for turn, v in sorted(found.items())]


def _scores(cells: Cells) -> dict[str, list[float]]:
    """Group scores by task and length, one number per context."""
    return _grouped((_group(spot), outcome.score) for spot, outcome in cells.items())


def _group(spot: Spot) -> str:
    return f"{spot.task} {spot.length}"


def _answers(cells: Cells) -> list[Answer]:
    return [answer for outcome in cells.values() for answer in outcome.answers]


def _by(cells: Cells, what: Callable[[Spot], K]) -> dict[K, dict[Spot, Outcome]]:
    return {key: dict(each) for key, each in _grouped((what(cell[0]), cell) for cell in cells.items()).items()}


def _grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
