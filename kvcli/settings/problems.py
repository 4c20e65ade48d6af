"""Problems in configuration: position, message and correction, with the line and a caret."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcli.errors import BadConfig


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """A position in a file, or in typed text (`--set`, an environment variable)."""

    source: str  # displayed name: "~/.config/kvcli/config.toml", "--set", "env KVCLI_KV__DTYPE"
    text: str = ""  # the line itself
    line: int = 0  # from 1; 0 = the source has no lines
    column: int = 1  # from 1, in characters
    is_file: bool = True


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in the configuration."""

    place: SourcePosition
    message: str
    key: str = ""  # dotted, as written in the source
    hint: str = ""  # shown after the caret

    def render(self) -> list[str]:
        """Format the problem as lines: position and message, the source line, the caret (cli.md's error form)."""
        at = self.place
        where = f"{at.source}:{at.line}:{at.column}" if at.line else at.source
        head = ": ".join(part for part in (where, self.key, self.message) if part)
        if not at.text:
            return [head, *([f"      | {self.hint}"] if self.hint else [])]
        number = f"{at.line:>5}" if at.line else " " * 5
        caret = f"{_blank(at.text[: at.column - 1])}^ {self.hint}".rstrip()
        return [head, f"{number} | {at.text}", f"      | {caret}"]

    def as_detail(self) -> dict[str, object]:
        at = self.place
        return {
            "source": at.source,
            "line": at.line or None,
            "column": at.column if at.line else None,
            "key": self.key or None,
            "message": self.message,
            "hint": self.hint or None,
        }


def bad_config(problems: Sequence[Problem]) -> BadConfig:
    """Return one error for all problems, in the order of the sources and then of the lines."""
    unique = list(dict.fromkeys(problems))
    sources = list(dict.fromkeys(p.place.source for p in unique))
    unique.sort(key=lambda p: (sources.index(p.place.source), p.place.line, p.place.column))
    return BadConfig(
        f"{len(unique)} problem{'s' * (len(unique) != 1)} in {_counted(unique)}",
        lines=[line for p in unique for line in p.render()],
        detail={"problems": [p.as_detail() for p in unique]},
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `did you mean "x"?`, or "" if no known word is similar."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f'did you mean "{near[0]}"?' if near else ""


def any_of(words: Sequence[str]) -> str:
    """Join words: `a, b or c`."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _blank(text: str) -> str:
    """Spaces as wide as `text` on a terminal. Tabs are kept, so that both lines align."""
    return "".join("\t" if c == "\t" else " " * (1 + (unicodedata.east_asian_width(c) in "WF")) for c in text)


def _counted(problems: Sequence[Problem]) -> str:
    files = {p.place.source for p in problems if p.place.is_file}
    parts = [f"{len(files)} file{'s' * (len(files) != 1)}"] if files else []
    parts += dict.fromkeys(p.place.source for p in problems if not p.place.is_file)
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
