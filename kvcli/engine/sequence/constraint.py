"""Constraints: the tokens allowed next in a structured output.

Masks of grammars come from llguidance.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kvcli.errors import BadModel
from kvcli.models.grammar import Grammar, library, refused
from kvcli.models.refusals import blame_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AHEAD = 16  # tokens that are tried with a grammar before it is accepted


class Constraint(Protocol):
    """A constraint on the answer (structured output)."""

    def allowed(self, ids: Sequence[int]) -> Tensor | None:
        """Return the mask [V] (bool, on the CPU) of tokens allowed after `ids`, the answer so far; None = any token.

        The mask depends on the ids alone, not on earlier calls. It is requested only for ids that were allowed one by
        one. Stop tokens are allowed where the answer may end. If no token is allowed, the answer cannot continue; that
        is an error if decoding gets there.
        """


def is_whole(constraint: Constraint, ids: Sequence[int], stops: Collection[int]) -> bool:
    """True if the answer may end after `ids`, which exclude the stop token."""
    mask = constraint.allowed(ids)
    return mask is None or any(bool(mask[i]) for i in stops)


class Vocabulary:
    """The tokens of a model in llguidance's format. Building it takes up to seconds, so it is shared by all
    grammars."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab: int, stops: Collection[int]) -> None:
        """`vocab`: V of the logits; `stops`: stop tokens. Raises BadModel if the tokens cannot be read."""
        library()
        from llguidance.hf import from_tokenizer

        if not stops:
            raise BadModel("the model has no stop token, so no answer can follow a grammar", code="no_stop_token")
        with blame_files(_unreadable):
            self._tokens: Any = from_tokenizer(tokenizer, max(vocab, len(tokenizer)), sorted(stops))
        self._vocab, self._stops = vocab, sorted(stops)

    def constraint(self, grammar: Grammar) -> Constraint:
        """Return the constraint that restricts an answer of the model to the grammar."""
        matcher = library().LLMatcher(self._tokens, grammar.text, log_level=0)
        if matcher.is_error():
            raise refused(grammar.name, matcher.get_error(), "bad_grammar")
        following = _Follows(matcher, self._vocab)
        if not following.allowed([]).index_fill(0, torch.tensor(self._stops), False).any():
            raise refused(grammar.name, "it allows only an empty answer", "bad_grammar")
        self._refuse_vast(grammar, matcher.deep_copy())
        return following

    def _refuse_vast(self, grammar: Grammar, matcher: Any) -> None:
        """Raise BadInput if the library gives up after a few tokens: it counts rules while it parses."""
        for _ in range(AHEAD):
            allowed = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)
            allowed[self._stops] = 0
            if not allowed.any():
                break
            matcher.consume_tokens([int(allowed.argmax())])
        if "oo many" in (why := matcher.get_error().split("\n")[0]):
            raise refused(grammar.name, f"it repeats too much ({why})", "bad_grammar")


class _Follows:
    """A grammar matcher that rolls back and advances to the requested ids. The rows of a draft tree share most of their
    paths, so few tokens are parsed again.

    Sequences in several threads may share a matcher, so a lock serializes calls.
    """

    def __init__(self, start: Any, vocab: int) -> None:
        self._start, self._vocab = start, vocab
        self._matcher, self._at = start.deep_copy(), list[int]()  # ids that the matcher has consumed
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
        mask = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)  # one byte per token
        self._at = new
        if self._matcher.is_error():  # no token fits the grammar, or a limit is exceeded; the mask then allows the end
            self._matcher, self._at = self._start.deep_copy(), []
            return torch.zeros(self._vocab, dtype=torch.bool)
        return mask[: self._vocab] > 0  # [V]


def _unreadable(reason: str) -> BadModel:
    return BadModel("this model's vocabulary cannot follow a grammar", code="bad_vocabulary", lines=[reason])
