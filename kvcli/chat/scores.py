"""Scores of an answer and of its prompt: what `top_logprobs` and `prompt_logprobs` ask for."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch

from kvcli.api import MOST_TOP, TokenScore
from kvcli.engine.forward_request import ForwardRequest, ForwardResult, Passes
from kvcli.engine.sequence.token_scores import score_tokens
from kvcli.errors import BadInput

if TYPE_CHECKING:
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.engine.stats import Step
    from kvcli.settings.profile import Profile

ROWS = 256  # prompt rows whose logits are held at once, where that changes nothing else


def refuse_scores(profile: Profile, top: int | None, of_prompt: bool) -> None:
    """Raise BadInput if `top` is out of range, or if some tokens have no logits of the model under this profile."""
    if top is not None and not 0 <= top <= MOST_TOP:
        raise BadInput(f"top_logprobs is {top}", code="bad_logprobs", try_=[f"0 to {MOST_TOP}, or None for no scores"])
    methods = {
        "reasoning_steps.method=none": top is not None
        and profile.reasoning_steps.takes,  # takes another model's tokens
        "prune.method=none": of_prompt and profile.prune.describe_read,
        "reuse.method=none": of_prompt and profile.reuse.describe_reused,
        "prefill.order=chunks": of_prompt and profile.prefill.order == "layers",
    }
    if ways := [f"--set {way}" for way, is_due in methods.items() if is_due]:
        message = f"under profile {profile.name} some tokens have no log-probability of the model"
        raise BadInput(message, code="no_logprobs", try_=[" ".join(ways)])


def token_score(token: int, numbers: Sequence[float]) -> TokenScore:
    """Return the score of a token from its numbers (token_scores.py)."""
    n = len(numbers) // 2
    return TokenScore(token, numbers[0], tuple(zip(map(int, numbers[1 : n + 1]), numbers[n + 1 :], strict=True)))


def scores_of(step: Step) -> list[TokenScore]:
    """Return the scores of the tokens that a decoding step added."""
    return [token_score(token, step.score(row)) for token, row in zip(step.new, step.path, strict=True)]


class PromptScores(Generator[ForwardRequest, ForwardResult, Any]):
    """Passes that read a prompt, with logits of their rows, from which the tokens are scored."""

    def __init__(self, session: GenerationSession, ids: Sequence[int], top: int) -> None:
        self._session, self._ids, self._top = session, ids, top
        self._found = {0: TokenScore(ids[0], None)}  # by position
        self._pos: Sequence[int] = ()  # of the rows of the pass under way, if it reads the prompt

    def through(self, passes: Passes[Any]) -> Self:
        """Continue with these passes."""
        self._passes, self._pos = passes, ()
        return self

    def send(self, result: ForwardResult | None) -> ForwardRequest:
        if result is not None and self._pos:
            ids = [self._ids[at + 1] for at in self._pos]
            numbers = score_tokens(result.logits, torch.tensor(ids, device=result.logits.device), self._top).tolist()
            scores = map(token_score, ids, numbers)
            self._found |= {at + 1: score for at, score in zip(self._pos, scores, strict=True)}
        return self._asked(self._passes.send(result))  # type: ignore[arg-type]

    def throw(self, *error: Any) -> ForwardRequest:
        return self._asked(self._passes.throw(*error))

    def _asked(self, request: ForwardRequest) -> ForwardRequest:
        is_read = request.is_prompt and request.cache is self._session.cache  # not the KV of a draft model
        self._pos = request.rows.pos if is_read else ()
        return replace(request, want=range(request.rows.n_rows)) if is_read else request

    @property
    def scores(self) -> tuple[TokenScore, ...]:
        """The scores of the tokens that were read."""
        return tuple(self._found[at] for at in sorted(self._found))
