"""Tokenizer of a model, loaded from its folder."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import IO, TYPE_CHECKING, Any
from weakref import ReferenceType

from kvcli.demo import split_pattern
from kvcli.errors import BadModel, UsageError
from kvcli.models.control_words import admit
from kvcli.models.family import read_config
from kvcli.models.gguf import header
from kvcli.models.refusals import blame_files, no_tokenizer
from kvcli.models.template import Chats, Guarded
from kvcli.models.text import tokenizer_failed
from kvcli.settings.small_file import Unfit, open_regular, parse_object, read_small
from kvcli.worker_process import Limits, Standby, WorkerProcess

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvcli.models.source import Source

# Comparison of the vocabularies of two models on disk, by a sample of their words. Standard library only.

SAME = 0.95  # share of the compared words
_LARGEST = 128 << 20  # bytes of a tokenizer.json

Words = Sequence[str | None]


def sample(source: Source) -> Words:
    """Words of the ids `header.SAMPLE`, after the letters that all vocabularies begin with; empty if unknown."""
    if source.is_gguf:
        listed = header.read(source.path).meta.get("tokenizer.ggml.tokens")
        return listed.words if isinstance(listed, header.Listed) else ()
    try:
        model = parse_object(read_small(source.path / "tokenizer.json", _LARGEST)).get("model")
    except (Unfit, OSError):
        return ()
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # pairs of a word and its score
        return [str(vocab[i][0]) if i < len(vocab) else None for i in header.SAMPLE]
    if not isinstance(vocab, dict):
        return ()
    by_id = {i: word for word, i in vocab.items()}
    return [by_id.get(i) for i in header.SAMPLE]


def alike(one: Words, other: Words) -> bool:
    """True if models with these words can read each other's ids."""
    same = sum(a == b for a, b in zip(one, other, strict=False) if a is not None)
    return same > 0 and same >= SAME * max(sum(word is not None for word in words) for words in (one, other))


# Encoding and decoding by an untrusted tokenizer, in this process or in a sandboxed one.
#
# A tokenizer.json is a kind of program. Its steps may lengthen a text a million times, and its patterns may backtrack
# for hours, in a library that ignores Ctrl-C. So short texts with plain steps run in this process: plain steps take
# time in proportion to the text, and nearly all models have no others. Everything else runs in a sandboxed process that
# can be killed.

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


_READ = (".json", ".jinja", ".txt", ".model")
# files that add words to the vocabulary
_ADDS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def load_tokenizer(found: Source, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer from the model's folder, without a length limit. Raises BadModel."""
    refuse_wordless(found)
    files = sorted(f for f in found.path.iterdir() if f.suffix in _READ)
    for file in files:
        try:
            with open_regular(file) as stream:
                if stream.seek(0, 2) > _LARGEST:
                    raise Unfit(f"is larger than {_LARGEST >> 20} MiB")
        except Unfit as error:
            raise _unreadable(found, f"{file.name} {error}") from error
    _refuse_unread(found)
    from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

    if (its := found.path / "tokenizer.json") in files:
        with open_regular(its) as stream:
            check_load(stream, [f.read_text(errors="replace") for f in files if f.name in _ADDS])
    config = read_config(found, trust_remote_code)
    with blame_files(partial(_unreadable, found)):
        tokenizer = AutoTokenizer.from_pretrained(
            found.path, config=config, trust_remote_code=trust_remote_code, local_files_only=True
        )
        n_words = len(tokenizer.get_vocab())
    if not n_words:
        raise _unreadable(found, "its vocabulary is empty")
    tokenizer.model_max_length = 1 << 40  # kvcli checks the context window itself; this avoids a second warning
    # a tokenizer class with its own rendering code uses no template
    if type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:
        tokenizer.apply_chat_template = chats = Chats(tokenizer)
        if tokenizer.chat_template:
            chats.start()
    # a class with its own splitting code, or a Python tokenizer, does not run in a separate process
    if is_cut_by_library := getattr(type(tokenizer), "_encode_plus", None) is PreTrainedTokenizerFast._encode_plus:
        _guard(tokenizer)
    with blame_files(partial(_unreadable, found)):
        if tokenizer.is_fast and admit(tokenizer) and is_cut_by_library:
            _guard(tokenizer)  # again: a running worker process has the old vocabulary
    return tokenizer


def _guard(tokenizer: PreTrainedTokenizerBase) -> None:
    its = Tokenizing(tokenizer)
    tokenizer._encode_plus, tokenizer._decode = its.encode, its.decode
    tokenizer.read_guarded = its.read


def refuse_wordless(found: Source) -> None:
    """Raise BadModel for a model without a vocabulary, by the names of its files."""
    if not found.has_words:
        raise _unreadable(found, "its folder holds no vocabulary")


def _refuse_unread(found: Source) -> None:
    """Raise BadModel if the vocabulary needs a missing package; transformers names only the last one it tries."""
    from transformers.utils.import_utils import is_protobuf_available, is_sentencepiece_available, is_tiktoken_available

    held = [found.path / name for name in ("tokenizer.json", "vocab.json", "tekken.json", "tokenizer.model")]
    if not (file := next((f for f in held if f.is_file()), held[0])).match("*.model"):
        return
    with file.open("rb") as stream:
        is_pieces = stream.read(1) == b"\n"  # the first field of a sentencepiece file
    has = {"sentencepiece": is_sentencepiece_available(), "protobuf": is_protobuf_available()}
    has = has if is_pieces else {"tiktoken": is_tiktoken_available()}
    if missing := " ".join(name for name, is_there in has.items() if not is_there):
        said = f"its {file.name} needs packages that are not installed: {missing}"
        raise no_tokenizer(found.id, said, f"pip install {missing}")


def _unreadable(found: Source, said: str) -> BadModel:
    return no_tokenizer(found.id, said, "put tokenizer.json and tokenizer_config.json beside config.json")
