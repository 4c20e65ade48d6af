"""A seeded fault: one line of the source made wrong, and the tests that own what it breaks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    file: str
    old: str  # occurs once in the file
    new: str
    tests: str  # files, and single tests that are tried first, with spaces between them
    level: str = ""  # of a fault in C, the kind of CPU that runs its line; any without one
