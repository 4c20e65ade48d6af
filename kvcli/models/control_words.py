"""Control words: vocabulary entries that act as one control token (<|end|>, <start_of_turn>, [INST]).

Control words of a chat template must become control tokens. Control words in a message must not, whatever flag the
tokenizer gives the token: kvcli fences them, so that they are tokenized letter by letter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Unicode noncharacters, which are reserved for internal use. They mark text to tokenize letter by letter (OPEN, CLOSE),
# replace a control word that acts (STANDS), split one that must not act (CUT), and mark a message while its position in
# the rendered template is searched (PLACE).
OPEN, CLOSE, STANDS, CUT, PLACE = "\ufdd0", "\ufdd1", "\ufdd4{}\ufdd5", "\ufdd6", "\ufdd7{}\ufdd8"
FENCED = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)
_OURS = dict.fromkeys(map(ord, OPEN + CLOSE + (STANDS + CUT + PLACE).format("", "")))
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
Words = Sequence[tuple[str, dict[str, bool]]]  # words added to a vocabulary, with their flags
_SHAPE = re.compile(r"<[^\s<>]+>|\[/?[A-Z][A-Z_]*\]|\[\|[^\s|]+\|\]")
_SHAPES = re.compile(f"(?=({_SHAPE.pattern}))")  # overlapping matches too
_TURN = re.compile(r"[<\[][|\uff5c].*[|\uff5c][>\]]")
# byte tokens and HTML tags, which some vocabularies have as tokens: ordinary words
_PLAIN = re.compile(
    r"<0x[0-9A-F]{2}>|</?(?:[abipsu]|h[1-6]|[bht]r|[dlt][dhilt]|[ou]l|em|su[bp]|div|pre|img|code|span|table|caption"
    r"|t(?:head|body|foot)|strong|center|blockquote)/?>"
)


def spelled(text: str) -> list[str]:
    """Substrings of a text that have the shape of a control word, in order."""
    return [word for word in _SHAPES.findall(text) if not _PLAIN.fullmatch(word)]


def acting(tokenizer: PreTrainedTokenizerBase, written: str) -> set[str]:
    """Words of the vocabulary that act as control words: flagged, of that shape, or in `written`, the template's text.

    Runs of spaces and words of letters are excluded, because vocabularies have tokens for them as well.
    """
    added = {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    return flagged(tokenizer) | {w for w in added if spelled(w) or (w in written and re.search(r"[^\w\s]", w))}


def flagged(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Words that the tokenizer flags as special."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return {str(token) for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", ())) - {""}


def fence(tokenizer: PreTrainedTokenizerBase, text: str, words: Iterable[str]) -> str:
    """Put fences around each of `words` in a text. Fence characters already in the text are dropped."""
    text = _as_read(tokenizer, text.translate(_OURS))
    shaped = set(_SHAPES.findall(text))
    found = {word for word in words if (word in shaped if _SHAPE.fullmatch(word) else word in text)}
    return re.sub(_any(found), lambda m: f"{OPEN}{m[0]}{CLOSE}", text) if found else text


def fence_all(tokenizer: PreTrainedTokenizerBase, value: Any, words: Iterable[str]) -> Any:
    """Put fences into all texts of a JSON value."""
    if isinstance(value, Mapping):
        return {fence(tokenizer, str(key), words): fence_all(tokenizer, one, words) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [fence_all(tokenizer, one, words) for one in value]
    return fence(tokenizer, value, words) if isinstance(value, str) else value


def _as_read(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return the text as the tokenizer normalizes it if that would create a control word, else the text unchanged."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    words = [str(token) for token in added if token.normalized and spelled(str(token))]
    tidy = _read(tokenizer, normalize, text) if words and getattr(tokenizer, "is_fast", False) else text
    return tidy if any(tidy.count(word) > text.count(word) for word in words) else text


def unfenced(text: str) -> str:
    return text.replace(OPEN, "").replace(CLOSE, "")


def encode_fenced(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode a text with fences as a whole. No token is added around the fenced words.

    A second tokenizer has the same vocabulary and rules, but the fenced words are no tokens of it. Where such a word
    acts as a control word, a placeholder replaces it.
    """
    known: Any = tokenizer.backend_tokenizer
    named, fenced = tokenizer.added_tokens_decoder, set(FENCED.findall(text))
    stands = {token.content: STANDS.format(i) for i, token in named.items() if token.content in fenced}
    ids = {stands.get(token.content, token.content): i for i, token in named.items()}
    words = [(w, {flag: bool(getattr(named[i], flag)) for flag in _FLAGS}) for w, i in ids.items()]
    words.append((CUT, {"normalized": True}))
    pieces, inert = FENCED.split(text), {known.token_to_id(word) for word in fenced}
    pieces[::2] = [re.sub(_any(stands) or "(?!)", lambda m: stands[m[0]], unfenced(piece)) for piece in pieces[::2]]
    for mark in ("", CUT):  # a model with the word in its vocabulary may form it again from the letters
        pieces[1::2] = [word[:1] + mark + word[1:] for word in pieces[1::2]]
        tokens = [(word, i) for word, i in _read(tokenizer, encode_among, "".join(pieces), words) if word != CUT]
        if not any(i in inert and word not in ids for word, i in tokens):
            break
    return [ids.get(word, i) for word, i in tokens]


def _read(tokenizer: PreTrainedTokenizerBase, does: Callable[..., Any], text: str, *given: Any) -> Any:
    """Call `encode_among` or `normalize`. A loaded tokenizer runs it in a separate process where necessary."""
    read = getattr(tokenizer, "read_guarded", None)
    return read(does, text, *given) if read else does(tokenizer.backend_tokenizer, text, *given)


def encode_among(known: Any, text: str, words: Words) -> list[tuple[str, int]]:
    """Tokens and ids of a text by the model and rules of a `tokenizers` tokenizer with only these added words."""
    from tokenizers import AddedToken, Tokenizer

    other = Tokenizer(known.model)
    other.normalizer, other.pre_tokenizer = known.normalizer, known.pre_tokenizer
    other.add_tokens([AddedToken(word, **flags) for word, flags in words])
    read = other.encode(text, add_special_tokens=False)
    return [*zip(read.tokens, read.ids, strict=True)]


def normalize(known: Any, text: str) -> str:
    """Return a text as normalized by a tokenizer of `tokenizers`."""
    return str(known.normalizer.normalize_str(text)) if known.normalizer else text


def _any(words: Iterable[str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


def admit(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Add the vocabulary's control words that are no added tokens, so that each is read as one token. True if any were.

    These are words such as <|end|>, and words that the chat template contains and the vocabulary's rules split.
    """
    from tokenizers import AddedToken

    template, added = str(getattr(tokenizer, "chat_template", None) or ""), tokenizer.get_added_vocab()
    found = [w for w in tokenizer.get_vocab() if w[:1] in "<[" and w not in added and spelled(w) == [w]]
    found = [w for w in found if _TURN.fullmatch(w) or (w in template and _is_cut_up(tokenizer, w))]
    words = [AddedToken(w, normalized=False, special=bool(_TURN.fullmatch(w))) for w in found]
    return bool(words and tokenizer.add_tokens(words))


def cut_up(tokenizer: PreTrainedTokenizerBase, written: Sequence[str]) -> list[str]:
    """Control words in `written` (pieces of a prompt) that the vocabulary contains but splits into other tokens."""
    words = Counter(spelled("\n".join(written)))
    if not words or not hasattr(tokenizer, "get_added_vocab"):
        return []
    whole: dict[str, Any] = {word: tokenizer.convert_tokens_to_ids(word) for word in words}
    known = [word for word, i in whole.items() if i is not None and i != tokenizer.unk_token_id]
    read = Counter(i for piece in written if piece for i in tokenizer.encode(piece, add_special_tokens=False))
    added = tokenizer.get_added_vocab() if known else {}
    return [w for w in known if read[whole[w]] < words[w] and (w in added or _is_cut_up(tokenizer, w))]


def _is_cut_up(tokenizer: PreTrainedTokenizerBase, word: str) -> bool:
    return tokenizer.convert_tokens_to_ids(word) not in tokenizer.encode(word, add_special_tokens=False)
