"""Scoring functions for answers, 0 to 1."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from kvcli.quality.sample import Question


def has(answer: str, reference: str) -> bool:
    """Return True if the answer contains the reference as whole words, ignoring case."""
    return re.search(rf"(?<!\w){re.escape(reference)}(?!\w)", answer, re.IGNORECASE) is not None


def share_of_references(answer: str, question: Question) -> float:
    """Return the share of references that the answer contains, without the given prefix."""
    said = answer.removeprefix(question.prefix)
    return sum(has(said, reference) for reference in question.references) / len(question.references)


def likeness(answer: str, question: Question) -> float:
    """Return 1 - edit distance in words / words of the reference; text after as many words is not counted."""
    want = question.references[0].split()
    got = answer.removeprefix(question.prefix).split()[: len(want)]
    return 1 - edit_distance(got, want) / len(want)


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the Levenshtein distance: the fewest insertions, deletions and replacements from `a` to `b`."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def share_of_fields(answer: str, question: Question) -> float:
    """Return the share of the expected object's fields that the answer's first JSON object has right; 0 without one."""
    want = json.loads(question.references[0])
    found = first_object(answer)
    if found is None:
        return 0.0
    right = [_plain(found.get(key)) == _plain(value) for key, value in want.items()]
    return sum(right) / len(right)


def first_object(text: str) -> dict[str, object] | None:
    """Return the first JSON object in the text, or None."""
    start = text.find("{")
    if start < 0:
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(text[start:])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _plain(value: object) -> str:
    return str(value).strip().casefold()
