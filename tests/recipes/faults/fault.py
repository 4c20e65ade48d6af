"""A seeded fault: one line of the source made wrong, and the tests that own what it breaks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    file: str
    old: str  # occurs once in the file
    new: str
    tests: str  # files or single tests, with spaces between them
