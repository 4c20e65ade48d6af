"""Control words: what a vocabulary holds as one token that acts (<|end|>, <start_of_turn>, [INST]).

A template's own control words must become their tokens. What a user or a document spells like one must not, whatever
flag the tokenizer puts on the token: it is fenced here, and read letter by letter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Around text that is to be read letter by letter. Noncharacters, which Unicode keeps free for such inner use.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
FENCED = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)
_STANDS, _CUT = "\ufdd4{}\ufdd5", "\ufdd6"  # for a control word that acts; a cut inside one that does not
PLACE = "\ufdd7{}\ufdd8"  # for the text of a message, while it is found out where a template writes it
_OURS = dict.fromkeys(map(ord, OPEN + CLOSE + _STANDS.format("") + _CUT + PLACE.format("")))
_SHAPE = re.compile(r"<[^\s<>]+>|\[/?[A-Z][A-Z_]*\]")
_SHAPES = re.compile(f"(?=({_SHAPE.pattern}))")  # also where one lies in another
_ENDS_TURNS = re.compile(r"<[|\uff5c].*[|\uff5c]>")
# Bytes, and tags of HTML, of which some vocabularies have tokens: words like others.
_PLAIN = re.compile(
    r"<0x[0-9A-F]{2}>|</?(?:[abipsu]|h[1-6]|[bht]r|[dlt][dhilt]|[ou]l|em|su[bp]|div|pre|img|code|span|table|caption"
    r"|t(?:head|body|foot)|strong|center|blockquote)/?>"
)


def spelled(text: str) -> list[str]:
    """What looks like a control word in a text, in order."""
    return [word for word in _SHAPES.findall(text) if not _PLAIN.fullmatch(word)]


def control_words(tokenizer: PreTrainedTokenizerBase, written: str) -> set[str]:
    """The words of the vocabulary that act: flagged, of the shape of one, or in `written`, what a template writes.

    Runs of spaces and words of letters are none: vocabularies have tokens for these as well.
    """
    added = [str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()]
    like = {word for word in added if spelled(word) or (word in written and re.search(r"[^\w\s]", word))}
    return like | flagged(tokenizer)


def flagged(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Those that the tokenizer calls special."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return {str(token) for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", ())) - {""}


def fence(text: str, words: Iterable[str]) -> str:
    """The text with fences around each of `words`. What was in the text like fences is dropped."""
    text = text.translate(_OURS)
    shaped = set(_SHAPES.findall(text))
    found = {word for word in words if (word in shaped if _SHAPE.fullmatch(word) else word in text)}
    return re.sub(_any(found), lambda m: f"{OPEN}{m[0]}{CLOSE}", text) if found else text


def encode_fenced(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a text with fences, read as a whole: nothing is added beside what is fenced.

    The same vocabulary and rules serve a second tokenizer, to which the fenced words are no tokens. Those that act have
    stand-ins there.
    """
    from tokenizers import AddedToken, Tokenizer

    known: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    fenced = set(FENCED.findall(text))
    other = Tokenizer(known.model)
    other.normalizer, other.pre_tokenizer = known.normalizer, known.pre_tokenizer
    named = tokenizer.added_tokens_decoder
    stands = {token.content: _STANDS.format(i) for i, token in named.items() if token.content in fenced}
    ids = {stands.get(token.content, token.content): i for i, token in named.items()}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    other.add_tokens([AddedToken(w, **{f: getattr(named[i], f) for f in flags}) for w, i in ids.items()])
    other.add_tokens([AddedToken(_CUT, normalized=True)])
    inert = {known.token_to_id(word) for word in fenced}
    acting = [*_acting(text, stands)]
    for cut in ("", _CUT):  # some models have the word in their vocabulary besides, and find it in its letters
        whole = "".join(piece[:1] + cut + piece[1:] if i % 2 else piece for i, piece in enumerate(acting))
        read = other.encode(whole, add_special_tokens=False)
        tokens = [word for word in zip(read.tokens, read.ids, strict=True) if word[0] != _CUT]
        if not any(i in inert and word not in ids for word, i in tokens):
            break
    return [ids.get(word, i) for word, i in tokens]


def _acting(text: str, stands: Mapping[str, str]) -> Iterator[str]:
    """Pieces outside and inside fences in turn, with a stand-in for each word that is outside."""
    pattern = _any(stands)
    for i, piece in enumerate(FENCED.split(text)):
        yield (
            piece if i % 2 else re.sub(pattern, lambda m: stands[m[0]], unfenced(piece)) if stands else unfenced(piece)
        )


def unfenced(text: str) -> str:
    return text.replace(OPEN, "").replace(CLOSE, "")


def _any(words: Iterable[str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


def admit(tokenizer: PreTrainedTokenizerBase) -> None:
    """Have the control words of the vocabulary read as one token each, though nobody added them to it.

    Those are the words like <|end|>, and what the chat template spells and the vocabulary's own rules cut up.
    """
    from tokenizers import AddedToken

    template, added = str(getattr(tokenizer, "chat_template", None) or ""), tokenizer.get_added_vocab()
    found = [
        word for word in tokenizer.get_vocab() if word[:1] in "<[" and word not in added and spelled(word) == [word]
    ]
    turns = [word for word in found if _ENDS_TURNS.fullmatch(word)]
    cut = [word for word in found if word not in turns and word in template and is_cut_up(tokenizer, word)]
    if turns or cut:
        tokenizer.add_tokens([AddedToken(w, normalized=False, special=w in turns) for w in (*turns, *cut)])


def is_cut_up(tokenizer: PreTrainedTokenizerBase, word: str) -> bool:
    return tokenizer.convert_tokens_to_ids(word) not in tokenizer.encode(word, add_special_tokens=False)


def cut_up(tokenizer: PreTrainedTokenizerBase, written: Sequence[str]) -> list[str]:
    """The control words in `written`, pieces of a prompt, that the vocabulary has and reads as something else."""
    if not hasattr(tokenizer, "convert_tokens_to_ids"):
        return []
    words = Counter(spelled("\n".join(written)))
    whole: dict[str, Any] = {word: tokenizer.convert_tokens_to_ids(word) for word in words}
    known = [word for word, i in whole.items() if i is not None and i != tokenizer.unk_token_id]
    read = Counter(i for piece in written if piece for i in tokenizer.encode(piece, add_special_tokens=False))
    added = tokenizer.get_added_vocab() if known else {}
    return [w for w in known if read[whole[w]] < words[w] and (w in added or is_cut_up(tokenizer, w))]
