"""What a model is asked: rules first, which all parts share, then the text with its marks, then a short reminder.

A model may bring its own wording, in the file `summarize.json` of its folder. The bundled one does: it was trained on
one question and follows nothing else. Models that cannot follow the general wording are in `wordings.toml`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import lexists
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import tomli

from kvcli.errors import BadModel, UsageError
from kvcli.small_file import parse_object, read_small

if TYPE_CHECKING:
    from kvcli.documents import Unit
    from kvcli.summarize.request import Request, Style

FILE = "summarize.json"
TABLE = Path(__file__).with_name("wordings.toml")
LARGEST = 1 << 20  # bytes
SCHEMA = "kvcli.wording/1"
SPOKEN = 20  # words of a sentence
OPTIONS = ("length", "style", "focus", "lang")  # of a request, that are told to the model in words

NOUNS: dict[Unit, str] = {"page": "page", "heading": "section", "chapter": "chapter", "line": "block of lines"}
SHAPES: dict[Style, str] = {
    "bullets": "a list of points, each on a line of its own that begins with '- ', one sentence or two each",
    "prose": "plain paragraphs, without lists or headings",
    "outline": "an outline: a line '## TOPIC' for each topic, below it points that begin with '- '",
    "abstract": "one paragraph that says what the text is about and what it found, as an abstract does",
}
RULES = (
    "You summarise documents. Say only what the document says, in your own words or its own, and add nothing. Keep "
    "numbers and names exactly as they are. Leave out what is unimportant. Write the summary and nothing else."
)
MARKS = (
    "Each {noun} of the document begins with its mark, a line like {mark}. End every {thing} with the mark of the "
    "{noun} it comes from, copied exactly. Use no mark that does not stand in the text."
)

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Wording:
    """How one model is asked. Without a `question` of its own, by the rules above."""

    question: str | None = None  # stands behind the text, with nothing else
    follows: tuple[str, ...] = OPTIONS  # those of OPTIONS that change what it writes
    merges: bool = True  # it can make one summary of several; else their points are joined
    part: int | None = None  # tokens of text that it is best with; None: as many as fit
    longest: int | None = None  # tokens of a part that it still reads, where short ones would say more than was asked
    cites: bool = True  # it is shown marks and told to copy them; else kvcli looks for the place of each point
    sentence: int | None = None  # tokens of an answer, of which one sentence is taken

    def part_of(self, tokens: int, words: int) -> int | None:
        """Tokens of a part of a text, so that with a sentence each there are about as many words as asked."""
        if self.part is None or self.longest is None:
            return self.part
        return max(self.part, min(self.longest, tokens * SPOKEN // words))

    def refuse(self, request: Request, model: str) -> None:
        """No option is dropped in silence."""
        asked = [name for name in OPTIONS if getattr(request, name) is not None and name not in self.follows]
        if not request.cite and self.cites and self.question is not None:
            raise UsageError(f"{model} cites pages whatever it is told", code="not_followed", try_=["leave --cite out"])
        if asked:
            flags = " and ".join(f"--{name}" for name in asked)
            raise UsageError(
                f"{model} summarises in one way only: {flags} would change nothing",
                code="not_followed",
                lines=[f"it is asked one question: {self.question}" if self.question else ""],
                detail={"options": asked},
                try_=[f"leave {flags} out", "-m with a model that follows instructions"],
            )


class Asked(Protocol):
    """What is known of a model before it is loaded, and after."""

    @property
    def path(self) -> str | Path: ...
    @property
    def family(self) -> str: ...
    @property
    def parameters(self) -> int: ...


def wording_of(model: Asked) -> Wording:
    """The wording that a model's folder brings, that of models like it, or the general one."""
    file = Path(model.path) / FILE
    if not lexists(file):
        return _of_table(model)
    try:
        found = parse_object(read_small(file, LARGEST))
        if found.pop("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        return _wording(found)
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(file, error) from None


def _of_table(model: Asked) -> Wording:
    """The first row whose bounds the model keeps."""
    for row in tomli.loads(TABLE.read_text(encoding="utf-8"))["wording"]:
        families, (least, most) = row.pop("families"), row.pop("parameters")
        if least <= model.parameters < most and model.family in families:
            return _wording(row)
    return Wording()


def _wording(said: Mapping[str, Any]) -> Wording:
    """Raises TypeError for what is no setting of a wording, or no value of one."""
    wording = Wording(**{**said, "follows": tuple(str(name) for name in said.get("follows", OPTIONS))})
    if wording.question is not None and not isinstance(wording.question, str):
        raise TypeError("question is no text")
    for key in ("part", "longest", "sentence"):
        value = getattr(wording, key)
        if value is not None and (type(value) is not int or value < 1):
            raise TypeError(f"{key} is no number of tokens")
    return wording


def part_messages(wording: Wording, request: Request, text: str, unit: Unit, part: int = 1, of: int = 1) -> Messages:
    """The question about one part of a document, or about all of it."""
    if wording.question is not None:
        return [{"role": "user", "content": f"{text}\n\n{wording.question}"}]
    which = "the document above" if of == 1 else f"the text above, which is part {part} of {of} of a document"
    return [
        {"role": "system", "content": _rules(request, unit)},
        {"role": "user", "content": f"{text}\n\n---\nSummarise {which}. {_reminder(request, unit)}"},
    ]


def merge_messages(wording: Wording, request: Request, points: Sequence[str], unit: Unit) -> Messages:
    """The question that makes one summary of those of several parts."""
    listed = "\n".join(f"- {point}" for point in points)
    return [
        {"role": "system", "content": _rules(request, unit)},
        {
            "role": "user",
            "content": f"{listed}\n\n---\nThese points summarise the parts of one document in order. Make one summary "
            f"of them: join what belongs together, keep the most important. {_reminder(request, unit)}",
        },
    ]


def _rules(request: Request, unit: Unit) -> str:
    rules = [RULES, f"Write {SHAPES[request.shape]}."]
    if request.focus:
        rules.append(f"The reader wants to know about this; leave out what is not about it: {request.focus}")
    if request.lang:
        rules.append(f"Write in this language, whatever the document is in: {request.lang}")
    if request.cite:
        thing = "point" if request.shape in ("bullets", "outline") else "sentence"
        rules.append(MARKS.format(noun=NOUNS[unit], mark=_mark(unit), thing=thing))
    return "\n".join(rules)


def _reminder(request: Request, unit: Unit) -> str:
    marks = f" End each with the mark of its {NOUNS[unit]}, like {_mark(unit)}." if request.cite else ""
    return f"At most {request.words} words.{marks}"


def _mark(unit: Unit) -> str:
    """A mark with no number in it that a model could copy."""
    return {"page": "[p. N]", "line": "[l. N-N]"}.get(unit, "[§ NAME]")


def _damaged(file: Path, error: Exception) -> BadModel:
    return BadModel(f"{file} is damaged", code="bad_wording", lines=[repr(error)], try_=["remove it, or mend it"])
