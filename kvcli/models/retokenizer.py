"""Retokenizer between two vocabularies: maps text between the token ids of two tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvcli.models.refusals import blame_files
from kvcli.models.text import decode, opening_ids, special_ids, tokenizer_failed
from kvcli.safe_output import BROKEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAME = 0.95  # share of the larger vocabulary: with this many equal tokens two models can read each other's ids
_SEAM = "\n"  # prefix of a piece of text, because some tokenizers treat the first word of a text differently


class Words:
    """A tokenizer that converts pieces of text to and from ids, without control tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.special = special_ids(tokenizer)
        self._seam = self._encode(_SEAM)
        with blame_files(tokenizer_failed):
            self.opening: Sequence[int] = opening_ids(tokenizer)

    def text(self, ids: Sequence[int], before: Sequence[int] | None = None) -> str:
        """Text of `ids` after the ids `before` (None = any context). An incomplete last character is BROKEN."""
        before = self._seam if before is None else before
        return decode(self._tokenizer, [*before, *ids])[len(decode(self._tokenizer, before).rstrip(BROKEN)) :]

    def ids(self, text: str, *, is_first: bool = False) -> list[int]:
        """Ids of `text`, at the beginning of a sequence or within it."""
        n = len(self._seam)
        if not is_first and (found := self._encode(_SEAM + text))[:n] == self._seam:
            return found[n:]
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        with blame_files(tokenizer_failed):
            return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


class TokenMapping:
    """Mapping between the vocabularies of the target model and the draft model."""

    def __init__(self, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
        self.target, self.draft = Words(target), Words(draft)
        self.marks = _marks(target, draft)
        self.marks_back = {its: i for i, its in reversed([*self.marks.items()]) if its is not None}

    def __deepcopy__(self, memo: object) -> TokenMapping:
        """Return itself, because copied sequences share the mapping."""
        return self


def spelling(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> TokenMapping | None:
    """Return the mapping between two vocabularies; None if they are the same.

    Added tokens, such as the marks of a chat template, do not count, because related models often differ in them.
    """
    known, drafted = (_ordinary(tokenizer) for tokenizer in (target, draft))
    alike = sum(drafted.get(word) == i for word, i in known.items())
    return None if alike >= SAME * max(len(known), len(drafted)) else TokenMapping(target, draft)


def _ordinary(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    added = tokenizer.get_added_vocab()
    return {word: i for word, i in tokenizer.get_vocab().items() if word not in added}


def _marks(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> Mapping[int, int | None]:
    """Map control tokens to the draft's token of the same name or role (bos, eos); None if it has none."""
    its, offices = special_ids(draft), dict[int, int]()
    for office in ("bos_token_id", "eos_token_id"):
        mine, other = getattr(target, office, None), getattr(draft, office, None)
        if mine is not None and other is not None:
            offices[mine] = other
    found: dict[int, int | None] = {}
    for i in sorted(special_ids(target)):
        name = target.convert_ids_to_tokens(i)
        same = draft.convert_tokens_to_ids(name)
        found[i] = same if same in its and draft.convert_ids_to_tokens(same) == name else offices.get(i)
    return found
