"""Words at the edge of a program of ids: chat template, pieces of text, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvcli.errors import BadInput, BadModel
from kvcli.models import control_words
from kvcli.models.control_words import FENCED, OPEN
from kvcli.models.layout import Layout, layout, placed, render
from kvcli.models.library_errors import blame_files
from kvcli.safe_output import BROKEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, str]]
Note = Callable[[str], None]

WINDOW = 4  # tokens kept as context; an unfinished character has at most three bytes, so at most three tokens


# --- ids to text


class Detokenizer:
    """Ids in, text out, whole characters only. The pieces together are what decoding all ids at once would give.

    Each push decodes a few tokens, however long the text is. Context tokens stand before the new ones because
    some decoders treat the first token differently (they strip its space).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.special = special_ids(tokenizer)
        self._bytes = byte_ids(tokenizer)
        self._window: list[int] = []
        self._shown = 0  # characters of the decoded window that were handed out
        self._held: list[int] = []  # a run of byte tokens: whether they are characters shows at its end

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with these ids; often a word, sometimes nothing."""
        before = len(self._window)
        for i in ids:
            if i in self.special:
                continue
            self._held.append(i)
            if i not in self._bytes:
                self._window += self._held
                self._held = []
        return self._take(whole=False) if len(self._window) > before else ""

    def finish(self) -> str:
        """What was still held back, for the end of the text."""
        self._window += self._held
        self._held = []
        return self._take(whole=True)

    def _take(self, whole: bool) -> str:
        text = decode(self._tokenizer, self._window)
        end = len(text) - (not whole and len(text) > self._shown and text.endswith(BROKEN))
        piece = text[self._shown : end]
        unsure = len(text) - end
        # cutting inside a character is harmless: UTF-8 finds its place again at the next first byte
        self._window = self._window[-WINDOW:]
        self._shown = len(decode(self._tokenizer, self._window)) - unsure
        return piece


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Ids to text as the decoder has it: no tidying of spaces; control tokens show only if they are in `ids`."""
    with blame_files(tokenizer_failed):
        text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of control tokens, the ones with a name (end of text, ...) and all others."""
    with blame_files(tokenizer_failed):
        added, named = getattr(tokenizer, "added_tokens_decoder", {}), tokenizer.all_special_ids
    return frozenset(named) | {i for i, token in added.items() if token.special}


def byte_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the tokens <0x00> to <0xFF>, with which some vocabularies spell what they have no token for."""
    with blame_files(tokenizer_failed):
        ids = tokenizer.convert_tokens_to_ids([f"<0x{b:02X}>" for b in range(256)])
    return frozenset(i for i in ids if i is not None and i != tokenizer.unk_token_id)


class StopStrings:
    """Ends a text where one of the strings begins, however it is cut into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""
        self.is_hit = False

    def push(self, piece: str) -> str:
        """The text that cannot be part of a stop string any more. After a hit, nothing."""
        if self.is_hit or not self._stops:
            return "" if self.is_hit else piece
        text = self._held + piece
        starts = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if starts:
            self.is_hit, self._held = True, ""
            return text[: min(starts)]
        held = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that is a beginning of `stop`."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


# --- messages to ids


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, note: Note | None = None) -> list[int]:
    """The ids that ask the model for the next answer. `note` hears what had to be done differently.

    A template without a system role gets the system text at the head of the first user message; a tokenizer
    without a template gets the plain texts, blank lines between them. Messages that spell a control token
    (`<|end|>` in a document, say) cannot act as one: they are read letter by letter.
    """
    text, has_template = render_text(tokenizer, messages, note=note)
    return encode(tokenizer, text, special=not has_template)


def render_text(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, note: Note | None = None
) -> tuple[str, bool]:
    """The prompt as text for `encode`, and whether a chat template made it (it then has its control tokens)."""
    text, laid = lay_out(tokenizer, messages, note or (lambda _: None))
    return text, laid.has_template


def lay_out(tokenizer: PreTrainedTokenizerBase, messages: Messages, tell: Note) -> tuple[str, Layout]:
    """The same text, and where in it each message stands."""
    if not messages:
        raise BadInput("there is nothing to ask", code="empty_prompt")
    laid = layout(tokenizer, messages)
    words = control_words.acting(tokenizer, "".join(laid.own))
    # in an answer stand the model's own marks of a thought, for the template to find
    of_answers = control_words.flagged(tokenizer) | {word for word in words if word in laid.between}
    inert = [of_answers if laid.is_answer(i) else words for i in range(len(messages))]
    texts = [control_words.fence(tokenizer, m["content"], of) for m, of in zip(messages, inert, strict=True)]
    if any(OPEN in text for text in texts):
        tell("the text spells control tokens of this model; they are read as plain letters")
    if not laid.has_template:
        tell("this model has no chat template: it continues the plain text")
    if laid.folds:
        tell("this model's chat template has no system role: the system text heads the first question")
    for i in laid.lost:
        tell(f"this model's chat template leaves out {laid.name(i)}")
    with blame_files(tokenizer_failed):
        cut = control_words.cut_up(tokenizer, laid.own)
    if cut:
        tell(f"the model's tokenizer reads {', '.join(cut)} of its chat template letter by letter: answers may be poor")
    prompt = render(tokenizer, laid, texts)
    laid = placed(laid, texts, prompt)
    for i in laid.changed:
        tell(f"this model's chat template changes {laid.name(i)}: the model reads it otherwise than it was said")
    return prompt, laid


def encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> list[int]:
    """Rendered text to ids; `special` adds what the tokenizer puts around a text, its first token for example."""
    with blame_files(tokenizer_failed):
        opening = opening_ids(tokenizer) if special else []
        if not FENCED.search(text):
            return [*opening, *tokenizer.encode(control_words.unfenced(text), add_special_tokens=False)]
        if getattr(tokenizer, "is_fast", False):
            return opening + control_words.encode_fenced(tokenizer, text)
        for i, segment in enumerate(FENCED.split(text)):
            letters = {"split_special_tokens": True} if i % 2 else {}
            opening += tokenizer.encode(segment, add_special_tokens=False, **letters)
    return opening


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text. What it puts behind one has no place in a text that goes on."""
    whole, bare = ([*map(int, tokenizer.encode("a", add_special_tokens=special))] for special in (True, False))
    return whole[: next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)]


def encode_with_places(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of a text, and the characters (first, behind the last) that each stands for. Fast tokenizers only."""
    with blame_files(tokenizer_failed):
        whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = [(int(start), int(end)) for start, end in whole["offset_mapping"]]
    return [int(i) for i in whole["input_ids"]], places


def tokenizer_failed(said: str) -> BadModel:
    """For `blame_files`, around calls of a model's tokenizer."""
    return BadModel(
        "the model's tokenizer cannot read this text",
        code="bad_tokenizer",
        lines=[said],
        try_=["download tokenizer.json and tokenizer_config.json again"],
    )


def resume_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, heard: tuple[str, Sequence[int]], *, special: bool = False
) -> list[int]:
    """Ids of `text`, beginning with the ids already heard where `text` begins with what was heard.

    A model may spell its answer in other tokens than the tokenizer would, and then nothing after that place
    could be reused. So the heard ids stay, and only the text after them is taken from the tokenizer.
    """
    known, ids = heard
    usable = known and text.startswith(known) and OPEN not in text and getattr(tokenizer, "is_fast", False)
    if not usable or special:
        return encode(tokenizer, text, special)
    fresh, spans = encode_with_places(tokenizer, text)
    cut = next((i for i, (start, _) in enumerate(spans) if start >= len(known)), len(fresh))
    if cut and spans[cut - 1][1] > len(known):
        return fresh  # a token spans the seam
    return [*ids, *fresh[cut:]]
