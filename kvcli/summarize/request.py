"""Request for a summary: length, style, focus and citations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvcli.errors import UsageError
from kvcli.schemas.base import SURROGATE

Wish = Literal["auto", "whole", "parts"]
Style = Literal["bullets", "prose", "outline", "abstract"]
Length = Literal["short", "medium", "long"]

WORDS: dict[Length, int] = {"short": 100, "medium": 250, "long": 600}
TOKENS_PER_WORD = 3  # at most: most languages need fewer, and citations need some
LEAST_CHUNK = 64  # tokens; less than a paragraph cannot be summarised


@dataclass(frozen=True, slots=True)
class Request:
    """The options of `kvcli summarize`. None means not set: a set option that the model does not follow is refused."""

    mode: Wish = "auto"
    length: Length | int | None = None  # int: words; None: medium
    style: Style | None = None  # None: bullets
    focus: str | None = None
    lang: str | None = None
    cite: bool = True
    check: bool = True
    quotes: bool = False
    chunk: int | None = None  # most tokens of a part; None: as many as the context window holds
    overlap: int = 0  # tokens that a part repeats of the one before it

    def __post_init__(self) -> None:
        _refuse(self)

    @property
    def words(self) -> int:
        """Approximate words of the whole summary."""
        return self.length if isinstance(self.length, int) else WORDS[self.length or "medium"]

    @property
    def tokens(self) -> int:
        """Most tokens of one answer."""
        return self.words * TOKENS_PER_WORD

    @property
    def shape(self) -> Style:
        return self.style or "bullets"


def length_of(text: str) -> Length | int:
    """Parse `short`, `medium`, `long` or a number of words."""
    names: tuple[Length, ...] = get_args(Length)
    for name in names:
        if text == name:
            return name
    if text.isascii() and text.isdecimal() and 0 < int(text) <= 100_000:
        return int(text)
    raise UsageError(
        f"--length takes short, medium, long or a number of words, not {text!r}",
        try_=["--length short", "--length 300"],
    )


def _refuse(request: Request) -> None:
    _refuse_making(request)
    if request.words < 10:
        raise UsageError(f"--length {request.words}: a summary has at least 10 words", try_=["--length 50"])
    if not request.cite and request.quotes:
        raise UsageError("--quotes needs citations, and --cite none writes none", try_=["only one of them"])
    if not request.check and request.quotes:
        raise UsageError("--quotes shows what the check found, and --no-check skips it", try_=["only one of them"])
    for flag, text in (("--focus", request.focus), ("--lang", request.lang)):
        if text is not None and not text.strip():
            raise UsageError(f"{flag} is empty", try_=[f"leave out {flag}"])
        if text is not None and SURROGATE.search(text):  # a shell passes on bytes; a tokenizer takes only text
            raise UsageError(f"{flag} is not UTF-8, so no model can read it", try_=[f"{flag} in UTF-8"])


def _refuse_making(request: Request) -> None:
    if request.chunk is not None and request.chunk < LEAST_CHUNK:
        raise UsageError(
            f"--chunk {request.chunk}: a part has at least {LEAST_CHUNK} tokens", try_=["--chunk 2048", "no --chunk"]
        )
    if request.overlap < 0:
        raise UsageError(f"--overlap {request.overlap}: at least 0 tokens", try_=["--overlap 100", "no --overlap"])
    if request.chunk is not None and request.overlap > request.chunk // 2:
        raise UsageError(
            f"--overlap {request.overlap}: a part repeats at most half of the one before it",
            try_=[f"--overlap {request.chunk // 4}"],
        )
    if request.mode == "whole" and (request.chunk is not None or request.overlap):
        raise UsageError("with --mode whole, --chunk and --overlap have no effect", try_=["--mode parts"])
