"""Where a model's tokenizer, which may come from a stranger, cuts and joins text: here, or where it can do no harm.

A tokenizer.json is a program of a kind: its steps may let a text grow a million times, and its patterns go back and
forth for hours, in a library that hears no Ctrl-C. So short texts go through plain steps here, which take time in
proportion to the text and are those of nearly all models; all others in a process that is shut in and can be killed.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from functools import cached_property, partial
from typing import IO, TYPE_CHECKING, Any
from weakref import ReferenceType, ref

from kvcli.demo.words import split_pattern
from kvcli.errors import BadModel, UsageError
from kvcli.models.control_words import Words, encode_among, normalize
from kvcli.models.text import tokenizer_failed
from kvcli.outside import Limits, Outside, Standby, TooLong, TooSlow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE = 1 << 18  # characters that are cut here: in less than a second, for which Ctrl-C waits
GROWTH = 8  # times that plain steps make a text longer, at most
LONGEST = 1 << 10  # characters of a token, and of a word looked up piece by piece, where that is plain
BASE, FOLD, EACH = 768 << 20, 24, 512  # bytes of address space: in any case, for each of tokenizer.json, of a text
OUTPUT, LONGER, TOKEN = 1 << 16, 64, 1 << 10  # bytes of an answer: in any case, for each of a text, for each token
START, SECONDS, PACE = 20.0, 5.0, 1 << 17  # s to get ready, for any text, bytes of a text for one s more
PLAIN = frozenset(
    "NFC NFD NFKC NFKD Nmt Lowercase Strip StripAccents BertNormalizer ByteLevel Digits Punctuation Metaspace "
    "Whitespace WhitespaceSplit BertPreTokenizer UnicodeScripts CharDelimiterSplit ByteFallback Fuse WordPiece "
    "BPEDecoder TemplateProcessing BertProcessing RobertaProcessing".split()
)

# Patterns that do not go back: what repeats ends an alternative, or what stands behind it need not be there.
_ONE = r"(?:\[(?:\\.|(?!&&)[^\\\[\]])+\]|\\p\{\^?\w+\}|\\[acdefhnrstvwDHSW]|\\\W|[^\\()\[\]{}|?*+^$.])"  # a character
_WORDS = r"\(\?i?:[^()\[\]{}\\*+?.^$]{1,60}\)"
_SAME, _MAY = rf"{_ONE}(?:\{{\d\}})?(?![*+?{{])", rf"{_ONE}(?:\?|\{{\d,\d\}})(?![*+?{{])"
_MANY = rf"{_ONE}[*+](?![*+?{{])(?:{_ONE}[*?](?![*+?{{])|{_WORDS}\?)*"
# Or goes back once: `\s+` but for its last, and `\s*\n+`, where the next alternative is `\s+` and takes all of it.
_ONCE = rf"\\s\+\(\?!\\S\)|(?P<may>{_ONE}\?)?(?P<run>{_ONE})\*{_ONE}\+(?:{_WORDS}\?)?(?=\|(?P=may)?(?P=run)\+)"
_EACH = rf"(?:{_ONCE}|(?:{_WORDS})?(?:{_SAME})*(?:{_MAY}(?:{_SAME})*){{0,2}}(?:{_MANY})?)"
_PATTERN = re.compile(rf"(?:{_EACH}(?:\||\Z))+", re.DOTALL)


class Tokenizing:
    """Stands in for what cuts and joins text in a tokenizer of the library `tokenizers`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._whose = ref(tokenizer)  # which holds this: in a circle, the process would wait for the garbage collector
        self._standby = Standby(partial(_effective, self._whose), PIECE, START)

    def __reduce__(self) -> tuple[type[Tokenizing], tuple[PreTrainedTokenizerBase]]:
        """A copy of the tokenizer gets a process of its own."""
        return Tokenizing, (_alive(self._whose),)

    @cached_property
    def _cuts_here(self) -> bool:
        tokenizer = _alive(self._whose)
        its, longest = tokenizer.backend_tokenizer, max(map(len, tokenizer.get_vocab()))
        # of tokens that take the spaces before them, each is looked for from the beginning of the text
        goes_back = any(token.lstrip for token in tokenizer.added_tokens_decoder.values())
        is_long = max(longest, getattr(its.model, "max_input_chars_per_word", 0)) > LONGEST
        steps = map(_state, (its.normalizer, its.pre_tokenizer, its.post_processor))
        return not (goes_back or is_long) and is_plain(*steps)

    @cached_property
    def _joins_here(self) -> bool:
        return is_plain(_state(_alive(self._whose).backend_tokenizer.decoder))

    def encode(self, text: Any, text_pair: Any = None, **options: Any) -> Any:
        """As `_encode_plus` of transformers."""
        tokenizer, is_text = _alive(self._whose), isinstance(text, str)
        if self._cuts_here and not (is_text and len(text) > PIECE):
            return type(tokenizer)._encode_plus(tokenizer, text, text_pair, **options)
        if not is_text or text_pair is not None or options.get("return_tensors") is not None:
            raise UsageError("this model's tokenizer takes one text at a time, and gives lists of ids")
        names = {"special": "add_special_tokens", "letters": "split_special_tokens", "places": "return_offsets_mapping"}
        said = answer(self._standby, {"text": text} | {name: bool(options.get(its)) for name, its in names.items()})
        from transformers import BatchEncoding

        mask = [1] * len(said["ids"])
        return BatchEncoding({"input_ids": said["ids"], "attention_mask": mask, "offset_mapping": said["places"]})

    def encode_among(self, text: str, words: Words) -> list[tuple[str, int]]:
        """As control_words.encode_among, by this tokenizer."""
        if self._cuts_here and len(text) <= PIECE:
            return encode_among(_alive(self._whose).backend_tokenizer, text, words)
        return [(word, i) for word, i in answer(self._standby, {"text": text, "among": words})["tokens"]]

    def normalize(self, text: str) -> str:
        """As its normalizer leaves a text."""
        if self._cuts_here and len(text) <= PIECE:
            return normalize(_alive(self._whose).backend_tokenizer, text)
        return str(answer(self._standby, {"text": text, "among": None})["normal"])

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        """As `_decode` of transformers, but for spaces, which are not tidied elsewhere."""
        tokenizer = _alive(self._whose)
        if self._joins_here:
            return str(type(tokenizer)._decode(tokenizer, token_ids, skip_special_tokens, **options))
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(answer(self._standby, {"ids": ids, "skip": skip_special_tokens})["text"])


def check_load(file: IO[bytes], beside: Sequence[str]) -> None:
    """Raises BadModel if to load this tokenizer.json takes too much: words that are added are normalized then.

    `beside`: the other files, JSON, that may add some.
    """
    text = file.read().decode("utf-8", "replace")
    key = re.search(r'"normalizer"\s*:\s*', text)
    try:
        # without parsing a vocabulary of megabytes, where no other key can mean the same
        if key is not None and text.count('"normalizer"') == 1 and not re.search(r"\\u00[4-7]", text):
            step = json.JSONDecoder().raw_decode(text, key.end())[0]
        else:
            step = json.loads(text).get("normalizer")
        is_harmless = is_plain(step)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_harmless = False
    standby = Standby(partial(_outside, file), PIECE, START)
    for words in () if is_harmless else ("[]", *beside):
        answer(standby, {"words": words})


def is_plain(*steps: Any) -> bool:
    """Whether these steps, as tokenizer.json has them, take time and memory in proportion to a text."""
    growth, waiting = 1.0, list(steps)
    while waiting:
        if (step := waiting.pop()) is None:
            continue
        kind, pattern = step["type"], step.get("pattern") or {}
        literal, rule = pattern.get("String"), pattern.get("Regex", "")
        if kind == "Sequence":
            waiting += next((inner for inner in step.values() if isinstance(inner, list)), ())
        elif kind == "Replace":
            growth *= max(1.0, len(step["content"]) / len(literal)) if literal else GROWTH + 1
        elif kind == "Prepend":
            growth *= max(1.0, len(step["prepend"]))
        elif kind == "Split":
            if not literal and not ((len(rule) < LONGEST and _PATTERN.fullmatch(rule)) or rule == split_pattern()):
                return False
        elif kind not in PLAIN or len(str(step)) > 1 << 16:
            return False
    return growth <= GROWTH


def answer(standby: Standby, asked: dict[str, Any]) -> dict[str, Any]:
    """What a tokenizer in a process of its own makes of it. Raises BadModel."""
    line = json.dumps(asked, ensure_ascii=False).encode("utf-8", "surrogatepass")
    seconds = SECONDS + len(line) / PACE
    try:
        said = standby.ask(line, seconds, OUTPUT + LONGER * len(line) + TOKEN * len(asked.get("ids", ())))
    except TooSlow:
        raise _heavy(f"it was not done after {seconds:.0f} seconds") from None
    except TooLong:
        raise _heavy("what it makes of a text has no end") from None
    found: dict[str, Any] = json.loads(said or '{"heavy": "it takes too much memory, or ended its process"}')
    if "heavy" in found:
        raise _heavy(found["heavy"])
    if "broken" in found:
        raise tokenizer_failed(found["broken"])
    return found


def _effective(whose: ReferenceType[PreTrainedTokenizerBase], room: int) -> Outside:
    with tempfile.TemporaryFile() as file:
        file.write(_alive(whose).backend_tokenizer.to_str().encode())
        file.flush()
        return _outside(file, room)


def _outside(file: IO[bytes], room: int) -> Outside:
    memory = BASE + FOLD * os.fstat(file.fileno()).st_size + EACH * room
    return Outside("kvcli.models.tokenizer_worker", Limits(memory=memory, cpu=3600, wall=0.0), file.fileno())


def _alive(whose: ReferenceType[PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    tokenizer = whose()
    assert tokenizer is not None
    return tokenizer


def _state(step: Any) -> Any:
    return None if step is None else json.loads(step.__getstate__())


def _heavy(why: str) -> BadModel:
    return BadModel(
        "the model's tokenizer cannot be used",
        code="tokenizer_too_heavy",
        lines=[f"{why}; it may be broken, or made to keep this machine busy"],
        try_=["get the model again, or repair its tokenizer.json"],
    )
