"""Plan of a summary: whole or in parts, token counts, and estimated time and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvcli.errors import BadInput, ContextOverflow, UsageError
from kvcli.fit.speed import at, by_rows
from kvcli.models.text import encode, render_prompt
from kvcli.summarize.parts import AsRead, Part, Piece, cut, pieces_of
from kvcli.summarize.request import Request
from kvcli.summarize.wording import Messages, Wording, merge_messages, part_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvcli.chat.model import Model
    from kvcli.chat.text_session import TextSession
    from kvcli.documents import Document, Unit
    from kvcli.schemas.fit import PassTime
    from kvcli.settings.profile import Profile
    from kvcli.summarize.result import Mode

SLACK = 8  # tokens; two joined texts may have a few more tokens than separately
LEAST = 32  # smallest capacity of a part, in tokens of text
SPOKEN = 0.5  # typical length of an answer, as a share of its limit, for the estimate of time


@dataclass(frozen=True)
class PlanWindow:
    """Facts about a model for a plan. All sizes are in tokens."""

    tokenizer: PreTrainedTokenizerBase
    limit: int  # context window in use, for prompt and answer
    most: int | None = None  # length limit of an answer, if the user set one
    passes: Sequence[PassTime] = ()  # pass times on this machine; empty: not measured
    foretell: Callable[[int], tuple[int, int]] | None = None  # tokens in the KV cache -> peak and available bytes
    reach: int | None = None  # the model's largest context window; None: unknown
    drafts: bool = False  # speculative decoding is on, so the times of one-row passes are an upper bound
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template

    @classmethod
    def of(cls, model: Model | TextSession, passes: Sequence[PassTime] = ()) -> PlanWindow:
        foretell, profile = model.foretell, model.profile
        ask = (lambda tokens: foretell(profile, tokens)) if foretell is not None else None
        known, drafts = (model.tokenizer, model.limit, most_of(profile)), profile.spec.method != "off"
        return cls(*known, passes, ask, model.info.limit, drafts, model.template_variables)


@dataclass(frozen=True)
class Plan:
    """Parts, prompts and limits of a summary."""

    request: Request
    wording: Wording = field(repr=False)
    mode: Mode
    why: str  # reason for the mode, in words
    unit: Unit
    parts: tuple[Part, ...] = field(repr=False)
    tokens: int  # tokens of the documents, with their marks
    prompts: tuple[int, ...]  # tokens of each part's prompt
    merges: int  # largest number of turns after the parts
    answer: int  # most tokens of an answer
    limit: int  # tokens of the context window
    seconds: float | None  # estimated; None: this model was not measured here
    estimate: int = 0  # peak bytes; 0: not estimated
    available: int = 0  # bytes
    drafts: bool = False  # drafting is on; `seconds` does not include its savings

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.prompts)


def most_of(profile: Profile) -> int | None:
    """Return the length limit of an answer if the profile sets one."""
    written = profile.origins["sample.max_new_tokens"] != "default"
    return profile.sample.max_new_tokens if written else None


def make_plan(
    documents: Sequence[Document],
    request: Request,
    window: PlanWindow,
    wording: Wording | None = None,
    read: AsRead | None = None,
) -> Plan:
    """Plan a whole prompt if it fits or if the documents were `read` so, or else parts.

    Raises ContextOverflow if neither fits, BadInput without any text, and UsageError for options that conflict.
    """
    wording = wording or Wording()
    if read is not None and (wording.system is not None or wording.part is not None):
        raise UsageError(
            "this model puts an instruction before short passages, so a pack without it cannot be used",
            code="not_followed",
            try_=["kvcli summarize FILE", "kvcli chat --pack NAME.kvs"],
        )
    pieces = pieces_of(documents)
    if not pieces:
        raise BadInput("there is no text to summarize", code="no_text", try_=["another file"])
    answer = min(request.tokens, window.most or request.tokens, wording.sentence or request.tokens)
    desk = _Desk(request, window, wording, pieces, answer, read)
    whole = Part(1, tuple(pieces), desk.marks, read)
    text = desk.count(whole.text)
    desk.wording = wording.about(text)
    size = desk.prompt(whole)
    most = request.chunk or wording.part_of(text, request.words)
    if (
        request.mode != "parts"
        and size + answer <= window.limit
        and (not most or text <= most or request.mode == "whole")
    ):
        return desk.plan("whole", "fits the context window", [whole], text)
    if read is not None:
        error = _too_long(size, answer, window)
        error.try_ = ("--length short", *_wider(size + answer, window), "kvcli summarize FILE, which reads it in parts")
        raise error
    if request.mode == "whole":
        raise _too_long(size, answer, window)
    return desk.plan("parts", _why(request, is_longer=size + answer > window.limit), desk.cut(most), text)


def _why(request: Request, *, is_longer: bool) -> str:
    """Return the reason for reading in parts."""
    if request.mode == "parts":
        return "as requested"
    if is_longer:
        return "longer than the context window"
    return "part size from --chunk" if request.chunk else "the part size that suits this model"


@dataclass
class _Desk:
    """Numbers of one plan."""

    request: Request
    window: PlanWindow
    wording: Wording
    pieces: list[Piece]
    answer: int
    read: AsRead | None = None

    @property
    def unit(self) -> Unit:
        return self.pieces[0].unit

    @cached_property
    def marks(self) -> bool:
        """True if the text has the marks that a model copies."""
        wanted = self.request.cite and self.wording.cites
        return wanted and (self.read is None or Part(1, tuple(self.pieces)).text == self.read.text)

    def count(self, text: str) -> int:
        return len(encode(self.window.tokenizer, text))

    def prompt(self, part: Part, of: int = 1) -> int:
        """Return the tokens of the question about a part."""
        return self._size(part_messages(self.wording, self.request, part, self.unit, of))

    def cut(self, most: int | None) -> list[Part]:
        """Return parts whose prompts leave space for the answer, with at most `most` tokens of text."""
        around = self.prompt(Part(99, (), self.marks), 99) + SLACK
        room = self.window.limit - self.answer - around
        if room < LEAST:
            raise _no_room(around, self.answer, self.window)
        room = min(room, most or room)
        while True:
            overlap = min(self.request.overlap, room // 2)
            parts = cut(self.pieces, room, self.count, cite=self.marks, overlap=overlap)
            over = max(self.prompt(part, len(parts)) for part in parts) + self.answer - self.window.limit
            if over <= 0 or room <= LEAST:
                return parts
            room = max(LEAST, room - over)

    def plan(self, mode: Mode, why: str, parts: list[Part], tokens: int) -> Plan:
        prompts = [self.prompt(part, len(parts)) for part in parts]
        merges = self._merges(len(parts))
        held = max(prompts) + self.answer
        estimate, available = self.window.foretell(held) if self.window.foretell else (0, 0)
        return Plan(
            request=self.request, wording=self.wording, mode=mode, why=why, unit=self.unit, parts=tuple(parts),
            tokens=tokens, prompts=tuple(prompts), merges=merges, answer=self.answer, limit=self.window.limit,
            seconds=self._seconds(prompts, merges), estimate=estimate, available=available, drafts=self.window.drafts,
        )  # fmt: skip

    def _merges(self, n: int) -> int:
        """Return the turns that merge `n` summaries, if each answer has its maximal length."""
        if n < 2 or not self.wording.merges:
            return 0
        around = self._size(merge_messages(self.request, [], self.unit)) + SLACK
        group = max(2, (self.window.limit - self.answer - around) // self.answer)
        turns = 0
        while n > 1:
            n = -(-n // group)
            turns += n
        return turns

    def _seconds(self, prompts: Sequence[int], merges: int) -> float | None:
        """Estimate seconds from measured passes: the widest passes for prefill, one-row passes for decoding."""
        grid = by_rows(self.window.passes)
        if not grid:
            return None
        rows, spoken = max(grid), int(SPOKEN * self.answer)
        total = 0.0
        for prompt in [*prompts, *[spoken * len(prompts) // max(1, merges)] * merges]:
            total += sum(at(grid[rows], i * rows) for i in range(-(-prompt // rows)))
            total += spoken * at(grid[min(grid)], prompt)
        return total

    def _size(self, messages: Messages) -> int:
        return len(render_prompt(self.window.tokenizer, messages, **self.window.variables))


def _wider(tokens: int, window: PlanWindow) -> list[str]:
    """Return the `--ctx` hint for a larger context window, if the model supports it."""
    return [f"--ctx {tokens}"] if window.reach is None or tokens <= window.reach else []


def _too_long(size: int, answer: int, window: PlanWindow) -> ContextOverflow:
    limit = window.limit
    return ContextOverflow(
        "the document is longer than the context window",
        lines=[f"prompt {size:,} tokens + answer {answer:,} tokens > {limit:,}"],
        detail={"prompt": size, "reserve": answer, "limit": limit},
        try_=["--mode parts", *_wider(size + answer, window), "--pages for fewer pages"],
    )


def _no_room(around: int, answer: int, window: PlanWindow) -> ContextOverflow:
    limit = window.limit
    return ContextOverflow(
        "the context window is too small for any part of the document",
        lines=[f"question {around:,} tokens + answer {answer:,} tokens, of {limit:,}"],
        detail={"prompt": around, "reserve": answer, "limit": limit},
        try_=["--length short", *_wider(2 * (around + answer), window)],
    )
