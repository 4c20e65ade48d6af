"""Conversion between text and token ids: chat template, detokenizer, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcli.errors import BadConfig, BadInput, BadModel
from kvcli.models import control_words
from kvcli.models.control_words import FENCED, OPEN
from kvcli.models.refusals import blame_files
from kvcli.models.template import Layout, layout, placed, render
from kvcli.safe_output import BROKEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
Note = Callable[[str], None]

WINDOW = 4  # context tokens; an unfinished character has at most three bytes, so at most three tokens


# --- ids to text


class Detokenizer:
    """Detokenizer that returns whole characters only. The pieces joined equal the decoding of all ids at once.

    Each push decodes a few tokens, however long the text is. Context tokens precede the new ones because some decoders
    treat the first token differently (they strip its space).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.special = special_ids(tokenizer)
        self._bytes = byte_ids(tokenizer)
        self._window: list[int] = []
        self._shown = 0  # characters of the decoded window already returned
        self._held: list[int] = []  # a run of byte tokens: whether they form characters shows at its end

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that became certain with these ids; often a word, sometimes ""."""
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
        """Return the text still held back, at the end of the sequence."""
        self._window += self._held
        self._held = []
        return self._take(whole=True)

    def _take(self, whole: bool) -> str:
        text = decode(self._tokenizer, self._window)
        end = len(text) - (not whole and len(text) > self._shown and text.endswith(BROKEN))
        piece = text[self._shown : end]
        unsure = len(text) - end
        # cutting inside a character is harmless: UTF-8 resynchronizes at the next first byte
        self._window = self._window[-WINDOW:]
        self._shown = len(decode(self._tokenizer, self._window)) - unsure
        return piece


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Decode ids without tidying of spaces. Control tokens show only if they are in `ids`."""
    with blame_files(tokenizer_failed):
        text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of control tokens: named ones (end of text, ...) and all others."""
    with blame_files(tokenizer_failed):
        added, named = getattr(tokenizer, "added_tokens_decoder", {}), tokenizer.all_special_ids
    return frozenset(named) | {i for i, token in added.items() if token.special}


def byte_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the tokens <0x00> to <0xFF>, with which some vocabularies spell text they have no token for."""
    with blame_files(tokenizer_failed):
        ids = tokenizer.convert_tokens_to_ids([f"<0x{b:02X}>" for b in range(256)])
    return frozenset(i for i in ids if i is not None and i != tokenizer.unk_token_id)


def tokens_with(tokenizer: PreTrainedTokenizerBase, vocab: int, texts: tuple[str, ...]) -> frozenset[int]:
    """Ids below `vocab` whose text contains one of these texts. Each text must be in some token."""
    words = [decode(tokenizer, [i]) for i in range(min(vocab, len(tokenizer)))]
    if missing := [text for text in texts if not any(text in word for word in words)]:
        raise BadConfig(
            f"no token of this model contains {missing[0]!r}, which sample.dry_sequence_breakers has",
            code="unknown_token",
            try_=[f"sample.dry_sequence_breakers without {missing[0]!r}"],
        )
    return frozenset(i for i, word in enumerate(words) if any(text in word for text in texts))


class StopStrings:
    """Stop strings, which end a text where one of them begins, however the text is cut into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""
        self.is_hit = False

    @property
    def is_waiting(self) -> bool:
        """True if the last text may be the beginning of a stop string."""
        return bool(self._held)

    def push(self, piece: str) -> str:
        """Return the text that cannot be part of a stop string any more. After a match, return ""."""
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
        """Return the text held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of `stop`."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


# --- messages to ids


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, note: Note | None = None, **variables: Any
) -> list[int]:
    """Return the prompt ids for the next answer. `note` is called with each deviation. `variables`: of the template.

    A template without a system role gets the system text at the head of the first user message. A tokenizer without a
    template gets the plain texts, blank lines between them. Control tokens spelled in messages (`<|end|>` in a
    document, say) have no effect, because they are tokenized letter by letter.
    """
    text, has_template = render_text(tokenizer, messages, note=note, **variables)
    return encode(tokenizer, text, special=not has_template)


def render_text(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, note: Note | None = None, **variables: Any
) -> tuple[str, bool]:
    """Render the prompt as text for `encode`. True if a chat template rendered it, with its control tokens."""
    text, laid = lay_out(tokenizer, messages, note or (lambda _: None), variables)
    return text, laid.has_template


def lay_out(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tell: Note, variables: Mapping[str, Any]
) -> tuple[str, Layout]:
    """Render the prompt as in `render_text`, with the position of each message in it."""
    if not messages:
        raise BadInput("the prompt is empty", code="empty_prompt")
    # tools and calls are no text of the template either
    foreign, tools = control_words.acting(tokenizer, ""), variables.get("tools")
    variables = {**variables, "tools": control_words.fence_all(tokenizer, tools, foreign)} if tools else variables
    calls = ({k: m[k] for k in ("tool_calls",) if k in m} for m in messages)
    messages = [{**m, **control_words.fence_all(tokenizer, c, foreign)} for m, c in zip(messages, calls, strict=True)]
    laid = layout(tokenizer, messages, variables)
    own = [FENCED.sub("", piece) for piece in laid.own]
    words = control_words.acting(tokenizer, "".join(own))
    # answers contain the model's own marks of a thought, which the template looks for
    of_answers = control_words.flagged(tokenizer) | {word for word in words if word in laid.between}
    inert = [of_answers if laid.is_answer(i) else words for i in range(len(messages))]
    texts = [control_words.fence(tokenizer, m["content"], of) for m, of in zip(messages, inert, strict=True)]
    if any(OPEN in text for text in texts):
        tell("the text contains control tokens of this model; they are treated as plain text")
    if not laid.has_template:
        tell("this model has no chat template: it continues the text as it is")
    if laid.folds:
        tell("this model's chat template has no system role: the system prompt precedes the first question")
    for i in laid.lost:
        tell(f"this model's chat template leaves out {laid.name(i)}")
    with blame_files(tokenizer_failed):
        cut = control_words.cut_up(tokenizer, own)
    if cut:
        tell(f"the model's tokenizer splits {', '.join(cut)} of its chat template into letters: answers may be poor")
    prompt = render(tokenizer, laid, texts)
    laid = placed(laid, texts, prompt)
    for i in laid.changed:
        tell(f"this model's chat template changes {laid.name(i)}: the prompt does not hold it as written")
    return prompt, laid


def encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> list[int]:
    """Encode rendered text. `special` adds tokens that the tokenizer puts before a text, such as its first token."""
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
    """Tokens that the tokenizer puts before a text. Those after a text are dropped, because the sequence continues."""
    whole, bare = ([*map(int, tokenizer.encode("a", add_special_tokens=special))] for special in (True, False))
    return whole[: next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)]


def encode_with_places(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Encode a text, with the character range (first, end) of each token. Fast tokenizers only."""
    with blame_files(tokenizer_failed):
        whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = [(int(start), int(end)) for start, end in whole["offset_mapping"]]
    return [int(i) for i in whole["input_ids"]], places


def tokenizer_failed(said: str) -> BadModel:
    """Return the error for `blame_files` around calls of a model's tokenizer."""
    return BadModel(
        "the model's tokenizer cannot encode this text",
        code="bad_tokenizer",
        lines=[said],
        try_=["download tokenizer.json and tokenizer_config.json again"],
    )


def resume_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, encoded: tuple[str, Sequence[int]], *, special: bool = False
) -> list[int]:
    """Ids of `text`, beginning with the known ids if `text` begins with the text of `encoded`.

    A model may spell its answer in other tokens than the tokenizer would, and then nothing after that position could be
    reused. So the known ids are kept, and only the text after them is encoded by the tokenizer.
    """
    known, ids = encoded
    usable = known and text.startswith(known) and OPEN not in text and getattr(tokenizer, "is_fast", False)
    if not usable or special:
        return encode(tokenizer, text, special)
    fresh, spans = encode_with_places(tokenizer, text)
    cut = next((i for i, (start, _) in enumerate(spans) if start >= len(known)), len(fresh))
    if cut and spans[cut - 1][1] > len(known):
        return fresh  # a token spans the seam
    return [*ids, *fresh[cut:]]
