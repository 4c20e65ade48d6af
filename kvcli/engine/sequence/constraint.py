"""Constraints: which tokens may come next in an answer that is held to something.

Those of a grammar take their masks from llguidance.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kvcli.errors import BadModel
from kvcli.models.grammar import Grammar, library, refused
from kvcli.models.library_errors import blame_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AHEAD = 16  # tokens that are tried of a grammar before it is taken


class Constraint(Protocol):
    """What an answer is held to."""

    def allowed(self, ids: Sequence[int]) -> Tensor | None:
        """[V] bool on the CPU: what may follow `ids`, the answer so far; None = anything.

        A function of the ids alone, whatever was asked before; asked only of ids that it allowed one by one. Stop
        tokens are allowed where the answer may end. Where nothing is, it cannot go on, an error if it comes that far.
        """
        ...


def is_whole(constraint: Constraint, ids: Sequence[int], stops: Collection[int]) -> bool:
    """Whether the answer may end behind `ids`, the stop token not among them."""
    mask = constraint.allowed(ids)
    return mask is None or any(bool(mask[i]) for i in stops)


class Vocabulary:
    """The tokens of a model as llguidance sees them; made in up to seconds, so once for all grammars."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab: int, stops: Collection[int]) -> None:
        """`vocab`: V of the logits; `stops`: what ends an answer. Raises BadModel where tokens cannot be told."""
        library()
        from llguidance.hf import from_tokenizer

        if not stops:
            raise BadModel(
                "no token of the model ends an answer, so none can be held to a grammar", code="no_stop_token"
            )
        with blame_files(_unreadable):
            self._tokens: Any = from_tokenizer(tokenizer, max(vocab, len(tokenizer)), sorted(stops))
        self._vocab, self._stops = vocab, sorted(stops)

    def constraint(self, grammar: Grammar) -> Constraint:
        """What holds an answer of the model to the grammar."""
        matcher = library().LLMatcher(self._tokens, grammar.text, log_level=0)
        if matcher.is_error():
            raise refused(grammar.name, matcher.get_error(), "bad_grammar")
        held = _Follows(matcher, self._vocab)
        if not held.allowed([]).index_fill(0, torch.tensor(self._stops), False).any():
            raise refused(grammar.name, "it allows no answer but an empty one", "bad_grammar")
        self._refuse_vast(grammar, matcher.deep_copy())
        return held

    def _refuse_vast(self, grammar: Grammar, matcher: Any) -> None:
        """Raises BadInput where the library gives up after a few tokens: it counts as it goes."""
        for _ in range(AHEAD):
            allowed = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)
            allowed[self._stops] = 0
            if not allowed.any():
                break
            matcher.consume_tokens([int(allowed.argmax())])
        if "oo many" in (why := matcher.get_error().split("\n")[0]):
            raise refused(grammar.name, f"it repeats too much ({why})", "bad_grammar")


class _Follows:
    """A matcher that goes back and forth to where it is asked: the rows of a tree share most of their paths.

    Texts of several threads may be held to the same, so one asks at a time.
    """

    def __init__(self, start: Any, vocab: int) -> None:
        self._start, self._vocab = start, vocab
        self._matcher, self._at = start.deep_copy(), list[int]()  # behind these ids
        self._lock = Lock()

    def allowed(self, ids: Sequence[int]) -> Tensor:
        with self._lock:
            return self._allowed(ids)

    def _allowed(self, ids: Sequence[int]) -> Tensor:
        new, shared = list(ids), min(len(ids), len(self._at))
        while self._at[:shared] != new[:shared]:
            shared -= 1
        self._matcher.rollback(len(self._at) - shared)
        self._matcher.consume_tokens(new[shared:])
        mask = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)  # a byte a token
        self._at = new
        if self._matcher.is_error():  # the vocabulary spells nothing that fits, or a limit; the mask then says "end"
            self._matcher, self._at = self._start.deep_copy(), []
            return torch.zeros(self._vocab, dtype=torch.bool)
        return mask[: self._vocab] > 0  # [V]


def _unreadable(said: str) -> BadModel:
    return BadModel("this model's tokens cannot be held to a grammar", code="bad_vocabulary", lines=[said])
