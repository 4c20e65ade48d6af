"""Encoding and decoding by an untrusted tokenizer, in this process or in a sandboxed one.

A tokenizer.json is a kind of program. Its steps may lengthen a text a million times, and its patterns may backtrack for
hours, in a library that ignores Ctrl-C. So short texts with plain steps run in this process: plain steps take time in
proportion to the text, and nearly all models have no others. Everything else runs in a sandboxed process that can be
killed.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import IO, TYPE_CHECKING, Any
from weakref import ReferenceType

from kvcli.demo.words import split_pattern
from kvcli.errors import BadModel, UsageError
from kvcli.models.guarded import Guarded
from kvcli.models.text import tokenizer_failed
from kvcli.worker_process import Limits, Standby, WorkerProcess

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE = 1 << 18  # characters encoded in this process, in less than a second, during which Ctrl-C has no effect
GROWTH = 8  # factor by which plain steps may lengthen a text, at most
LONGEST = 1 << 10  # characters of a token, and of a word looked up piece by piece, that still count as plain
BASE, FOLD, EACH = 768 << 20, 24, 512  # bytes of address space: fixed, per byte of tokenizer.json, per byte of a text
OUTPUT, LONGER, TOKEN = 1 << 16, 64, 1 << 10  # bytes of an answer: fixed, per byte of a text, per token
START, SECONDS, PACE = 20.0, 5.0, 1 << 17  # s to start, s for any text, bytes of a text per further s
PLAIN = frozenset(
    "NFC NFD NFKC NFKD Nmt Lowercase Strip StripAccents BertNormalizer ByteLevel Digits Punctuation Metaspace "
    "Whitespace WhitespaceSplit BertPreTokenizer UnicodeScripts CharDelimiterSplit ByteFallback Fuse WordPiece "
    "BPEDecoder TemplateProcessing BertProcessing RobertaProcessing".split()
)

# Patterns without backtracking: a repetition ends an alternative, or the pattern after it is optional.
_ONE = r"(?:\[(?:\\.|(?!&&)[^\\\[\]])+\]|\\p\{\^?\w+\}|\\[acdefhnrstvwDHSW]|\\\W|[^\\()\[\]{}|?*+^$.])"  # a character
_WORDS = r"\(\?i?:[^()\[\]{}\\*+?.^$]{1,60}\)"
_SAME, _MAY = rf"{_ONE}(?:\{{\d\}})?(?![*+?{{])", rf"{_ONE}(?:\?|\{{\d,\d\}})(?![*+?{{])"
_MANY = rf"{_ONE}[*+](?![*+?{{])(?:{_ONE}[*?](?![*+?{{])|{_WORDS}\?)*"
# Or with one backtracking step: `\s+` but for its last, and `\s*\n+` if the next alternative `\s+` takes all of it.
_ONCE = rf"\\s\+\(\?!\\S\)|(?P<may>{_ONE}\?)?(?P<run>{_ONE})\*{_ONE}\+(?:{_WORDS}\?)?(?=\|(?P=may)?(?P=run)\+)"
_EACH = rf"(?:{_ONCE}|(?:{_WORDS})?(?:{_SAME})*(?:{_MAY}(?:{_SAME})*){{0,2}}(?:{_MANY})?)"
_PATTERN = re.compile(rf"(?:{_EACH}(?:\||\Z))+", re.DOTALL)


class Tokenizing(Guarded):
    """Replacement for the encoding and decoding methods of a tokenizer of the library `tokenizers`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        self._standby = Standby(partial(_effective, self._whose), PIECE, START, _failed)

    @cached_property
    def _cuts_here(self) -> bool:
        tokenizer = self._tokenizer
        its, longest = tokenizer.backend_tokenizer, max(map(len, tokenizer.get_vocab()))
        # each token that takes the spaces before it is searched from the beginning of the text
        goes_back = any(token.lstrip for token in tokenizer.added_tokens_decoder.values())
        is_long = max(longest, getattr(its.model, "max_input_chars_per_word", 0)) > LONGEST
        steps = map(_state, (its.normalizer, its.pre_tokenizer, its.post_processor))
        return not (goes_back or is_long) and is_plain(*steps)

    @cached_property
    def _joins_here(self) -> bool:
        return is_plain(_state(self._tokenizer.backend_tokenizer.decoder))

    def encode(self, text: Any, text_pair: Any = None, **options: Any) -> Any:
        """Encode as `_encode_plus` of transformers."""
        tokenizer, is_text = self._tokenizer, isinstance(text, str)
        if self._cuts_here and not (is_text and len(text) > PIECE):
            return type(tokenizer)._encode_plus(tokenizer, text, text_pair, **options)
        if not is_text or text_pair is not None or options.get("return_tensors") is not None:
            raise UsageError("this model's tokenizer encodes one text at a time and returns lists of ids")
        names = "add_special_tokens", "split_special_tokens", "return_offsets_mapping"
        ids, places = _made(self._standby, "encode", text, *(bool(options.get(name)) for name in names))
        from transformers import BatchEncoding

        return BatchEncoding({"input_ids": ids, "attention_mask": [1] * len(ids), "offset_mapping": places})

    def read(self, does: Callable[..., Any], text: str, *given: Any) -> Any:
        """Run a function of control_words on a text by the rules of this tokenizer."""
        if self._cuts_here and len(text) <= PIECE:
            return does(self._tokenizer.backend_tokenizer, text, *given)
        return _made(self._standby, does.__name__, text, *given)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        """Decode as `_decode` of transformers, but without tidying spaces in the worker process."""
        tokenizer = self._tokenizer
        if self._joins_here:
            return str(type(tokenizer)._decode(tokenizer, token_ids, skip_special_tokens, **options))
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(_made(self._standby, "decode", ids, skip_special_tokens, n=len(ids)))


def check_load(file: IO[bytes], beside: Sequence[str]) -> None:
    """Raise BadModel if this tokenizer.json is too costly to load. Loading normalizes the added words.

    `beside`: the other JSON files that may add words.
    """
    text = file.read().decode("utf-8", "replace")
    key = re.search(r'"normalizer"\s*:\s*', text)
    try:
        # avoids parsing a vocabulary of megabytes, if no other key can mean the same
        if key is not None and text.count('"normalizer"') == 1 and not re.search(r"\\u00[4-7]", text):
            step = json.JSONDecoder().raw_decode(text, key.end())[0]
        else:
            step = json.loads(text).get("normalizer")
        is_harmless = is_plain(step)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_harmless = False
    standby = Standby(partial(_outside, file), PIECE, START, _failed)
    for words in () if is_harmless else ("[]", *beside):
        _made(standby, "check", words)


def is_plain(*steps: Any) -> bool:
    """True if these steps of a tokenizer.json take time and memory in proportion to a text."""
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


def _made(standby: Standby, does: str, *given: Any, n: int = 0) -> Any:
    """Return the result of a worker function on `n` tokens. Raises BadModel."""
    longer = OUTPUT + TOKEN * n
    return standby.ask([does, *given], lambda size: (SECONDS + size / PACE, longer + LONGER * size)).get("made")


def _effective(whose: ReferenceType[PreTrainedTokenizerBase], room: int) -> WorkerProcess:
    tokenizer = whose()
    assert tokenizer is not None
    with tempfile.TemporaryFile() as file:
        file.write(tokenizer.backend_tokenizer.to_str().encode())
        file.flush()
        return _outside(file, room)


def _outside(file: IO[bytes], room: int) -> WorkerProcess:
    memory = BASE + FOLD * os.fstat(file.fileno()).st_size + EACH * room
    return WorkerProcess("kvcli.models.tokenizer_worker", Limits(memory=memory, cpu=3600, wall=0.0), file.fileno())


def _state(step: Any) -> Any:
    return None if step is None else json.loads(step.__getstate__())


def _failed(how: str, why: str) -> BadModel:
    if how == "broken":
        return tokenizer_failed(why)
    try_ = ["get the model again, or repair its tokenizer.json"]
    return BadModel("the model's tokenizer cannot be used", code="tokenizer_too_heavy", lines=[why], try_=try_)
