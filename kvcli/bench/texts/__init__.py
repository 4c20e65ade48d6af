"""Real texts to measure on, shipped with their origin and terms in SOURCES.md."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
TEXTS = tuple(sorted(file.stem for file in FOLDER.glob("*.txt")))


def text_of(name: str) -> str:
    """Return a text of TEXTS."""
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
