"""Results of finished contexts, saved line by line so that a stopped run can be resumed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvcli.errors import BadInput, reading, writing
from kvcli.files import append

SCHEMA = "kvcli.quality-sample/1"
HEAD = '{"schema": "kvcli.quality-sample/'  # start of a line, in every version


@dataclass(frozen=True, slots=True)
class Key:
    """All inputs that an answer depends on. Equal keys mean equal answers."""

    model: str  # fingerprint of the weights
    profile: str  # hash of its settings
    task: str
    seed: int
    length: int
    index: int
    query_visible: bool
    prompt: str  # digest of the prompt ids, so that another haystack or template is another sample


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer and its score."""

    text: str
    score: float
    tokens: int
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one row for one context."""

    key: Key
    answers: tuple[Answer, ...]
    context: int  # tokens prefilled before compression
    kept: float  # share of them still stored afterwards, mean over layers and heads

    @property
    def score(self) -> float:
        return sum(answer.score for answer in self.answers) / len(self.answers)


class Partial:
    """Outcomes so far, in memory and, with a path, in a file readable by its owner only.

    A whole line is written when its context is done; a broken line, left by a crash, is skipped.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[Key, Outcome] = {}
        if path is not None:
            self._read(path)

    def get(self, key: Key) -> Outcome | None:
        return self._known.get(key)

    def add(self, outcome: Outcome) -> None:
        """Store an outcome, and write it to disk at once."""
        self._known[outcome.key] = outcome
        if self._path is not None:
            line = json.dumps({"schema": SCHEMA, **asdict(outcome)}, ensure_ascii=False) + "\n"
            with writing(self._path):
                append(self._path, line)

    def _read(self, path: Path) -> None:
        with reading(path):
            data = path.read_bytes() if path.exists() else b""
        for n, line in enumerate(data.decode(errors="replace").split("\n"), 1):
            if not line.startswith(HEAD) and not HEAD.startswith(line):
                raise _foreign(path, n)
            if (outcome := _parsed(line)) is not None:  # None: written by another version, and run again
                self._known[outcome.key] = outcome
        with writing(path):
            append(path, "")


def _parsed(line: str) -> Outcome | None:
    try:
        found = json.loads(line)
        if found.pop("schema") != SCHEMA:
            return None
        answers = tuple(Answer(**a) for a in found.pop("answers"))
        return Outcome(key=Key(**found.pop("key")), answers=answers, **found)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _foreign(path: Path, line: int) -> BadInput:
    return BadInput(
        f"{path} does not hold quality results",
        code="not_quality_results",
        lines=[f"line {line} is not one of {SCHEMA}"],
        try_=["another file, or remove this one"],
    )
