"""Prompts for a summary: rules and marks around the text, or a model's own wording.

A model may have a wording of its own, in the file `summarize.json` of its folder. The bundled model has one, because it
was trained on one question and follows nothing else. Wordings for models that cannot follow the general one are in
`wordings.toml`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from os.path import lexists
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import tomli
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from kvcli.errors import BadModel, UsageError
from kvcli.settings.small_file import parse_object, read_small
from kvcli.summarize.claim_words import sentences, words

if TYPE_CHECKING:
    from kvcli.documents import Unit
    from kvcli.engine.model_info import ModelInfo
    from kvcli.models.source import Source
    from kvcli.summarize.parts import Part
    from kvcli.summarize.request import Request, Style

# Share of a sentence's words that the passage has. Below it, nearly all sentences that SmolLM2-135M wrote about 57
# passages, with four wordings, were about itself or "the text above", or made up.
LEAST = 0.6
FEWEST = 4  # different words of a statement: "2.1." ends like a sentence but states nothing
_STATED = re.compile(r"[.!…\u3002\uff01][\"')\]”’»]*\Z")  # no heading, no question, no "as follows:"


def sentence_of(answer: str, passage: str) -> str:
    """Return the one sentence of a small model's answer about the passage, as a list item; "" if none is."""
    there = {word.key for word in words(passage)}
    for start, end in sentences(answer):
        sentence = answer[start:end]
        keys = {word.key for word in words(sentence)}
        if len(keys) >= FEWEST and len(keys & there) >= LEAST * len(keys) and _STATED.search(sentence):
            return f"- {' '.join(sentence.split()).lstrip('-*•# ')}"
    return ""


FILE = "summarize.json"
TABLE = Path(__file__).with_name("wordings.toml")
LARGEST = 1 << 20  # bytes
SCHEMA = "kvcli.wording/1"
SPOKEN = 20  # words of a sentence
Option = Literal["length", "style", "focus", "lang"]  # options of a request that the prompt states in words
Tokens = Annotated[int, Field(gt=0, strict=True)]

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
    "Each {noun} of the document begins with its mark, a line like {mark}. End every point, or every sentence where "
    "there are no points, with the mark of the {noun} it comes from, copied exactly. Use no mark that does not stand "
    "in the text."
)

Messages = list[dict[str, str]]


class Wording(BaseModel):
    """Prompt texts for one model. Without texts of its own, the rules above are used."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    system: StrictStr | None = None  # the system message
    lead: StrictStr | None = None  # text before the document
    question: StrictStr | None = None  # text after the document
    # for a text of fewer tokens: this lead, and no system message
    short: tuple[Tokens, StrictStr] | None = None
    follows: tuple[Option, ...] = get_args(Option)  # options that change the model's output
    merges: StrictBool = True  # the model can merge several summaries; otherwise their points are joined
    part: tuple[Tokens, Tokens] | None = None  # tokens of text in a part: best length, and longest readable length
    sentence: Tokens | None = None  # tokens of an answer, of which one sentence is used

    @property
    def own(self) -> str | None:
        """The text that replaces the rules."""
        return self.question or self.system or self.lead

    @property
    def cites(self) -> bool:
        """True if the prompt has marks to copy; otherwise kvcli searches the place of each sentence."""
        return self.sentence is None

    def about(self, tokens: int) -> Wording:
        """Return the wording for a text of this many tokens."""
        if self.short is None or tokens >= self.short[0]:
            return self
        return self.model_copy(update={"system": None, "lead": self.short[1]})

    def part_of(self, tokens: int, words: int) -> int | None:
        """Return tokens per part, so that one sentence per part gives about the requested number of words."""
        return max(self.part[0], min(self.part[1], tokens * SPOKEN // words)) if self.part else None

    def taken(self, answer: str, passage: str) -> str:
        """Return the part of an answer that is used."""
        return answer if self.cites else sentence_of(answer, passage)

    def cut_note(self, what: str, tokens: int) -> str:
        """Return a note on an answer that reached its length limit; "" if only one sentence is used."""
        more = "; a larger --length allows more" if "length" in self.follows else ""
        return f"{what} was cut at {tokens:,} tokens{more}" if self.cites else ""

    def refuse(self, request: Request, model: str) -> None:
        """Refuse options that the model does not follow, so that none is ignored silently."""
        asked = [name for name in get_args(Option) if getattr(request, name) is not None and name not in self.follows]
        if not request.cite and self.cites and self.own is not None:
            raise UsageError(f"{model} always cites pages", code="not_followed", try_=["leave --cite out"])
        if asked:
            flags = " and ".join(f"--{name}" for name in asked)
            raise UsageError(
                f"{model} summarizes in only one way: {flags} would have no effect",
                code="not_followed",
                lines=[f"its only prompt: {self.own}" if self.own else ""],
                detail={"options": asked},
                try_=[f"leave {flags} out", "-m with a model that follows instructions"],
            )


def wording_of(model: ModelInfo | Source) -> Wording:
    """Return the wording of the model's folder, or else that of similar models, or else the general one."""
    file = Path(model.path) / FILE
    if not lexists(file):
        return _of_table(model)
    try:
        found = parse_object(read_small(file, LARGEST))
        if found.pop("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        return Wording.model_validate(found)
    except (ValueError, KeyError) as error:
        raise BadModel(
            f"{file} is damaged", code="bad_wording", lines=[repr(error)], try_=["remove it, or mend it"]
        ) from None


def _of_table(model: ModelInfo | Source) -> Wording:
    """Return the first wording of the table whose bounds match the model."""
    for row in tomli.loads(TABLE.read_text(encoding="utf-8"))["wording"]:
        families, (least, most) = row.pop("families"), row.pop("parameters")
        if least <= model.parameters < most and model.family in families:
            return Wording.model_validate(row)
    return Wording()


def part_messages(wording: Wording, request: Request, part: Part, unit: Unit, of: int = 1) -> Messages:
    """Return the prompt about one part of a document, or about all of it.

    Texts common to all summaries precede the document, and the request follows it, so that prompts for another length
    or style share a prefix. For a document in the KV cache, the text before it is unchanged.
    """
    system = part.read.system if part.read is not None else None
    if wording.own is not None:
        content = f"{wording.lead or ''}\n\n{part.text}\n\n{wording.question or ''}".strip()
        return _said(wording.system or system, content)
    which = "the document above" if of == 1 else f"the text above, which is part {part.number} of {of} of a document"
    rules, asked = _rules(unit, part.cite), _asked(request, unit, part.cite, f"Summarise {which}.")
    if part.read is None:
        return _said(rules, f"{part.text}\n\n---\n{asked}")
    return _said(system, f"{part.text}\n\n---\n{rules}\n{asked}")


def merge_messages(request: Request, points: Sequence[str], unit: Unit) -> Messages:
    """Return the prompt that merges the summaries of several parts."""
    listed = "\n".join(f"- {point}" for point in points)
    task = (
        "These points summarise the parts of one document in order. Make one summary of them: join what belongs "
        "together, keep the most important."
    )
    return _said(_rules(unit, request.cite), f"{listed}\n\n---\n{_asked(request, unit, request.cite, task)}")


def _said(system: str | None, user: str) -> Messages:
    by_role = {"system": system, "user": user}
    return [{"role": role, "content": content} for role, content in by_role.items() if content is not None]


def _rules(unit: Unit, marks: bool) -> str:
    """Return the rules that are the same for every summary of a text."""
    return "\n".join([RULES, MARKS.format(noun=NOUNS[unit], mark=_mark(unit))] if marks else [RULES])


def _asked(request: Request, unit: Unit, marks: bool, task: str) -> str:
    """Return the request for this summary."""
    wishes = [task, f"Write {SHAPES[request.shape]}."]
    if request.focus:
        wishes.append(f"The reader wants to know about this; leave out what is not about it: {request.focus}")
    if request.lang:
        wishes.append(f"Write in this language, whatever the document is in: {request.lang}")
    end = f" End each with the mark of its {NOUNS[unit]}, like {_mark(unit)}." if marks else ""
    return "\n".join([*wishes, f"At most {request.words} words.{end}"])


def _mark(unit: Unit) -> str:
    """Return an example of a mark without a number that a model could copy."""
    return {"page": "[p. N]", "line": "[l. N-N]"}.get(unit, "[§ NAME]")
