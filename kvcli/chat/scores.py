"""Scores of an answer and of its prompt: what `top_logprobs` and `prompt_logprobs` ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli import assemble
from kvcli.api import MOST_TOP, TokenScore
from kvcli.engine.forward_request import Coroutine, ForwardRequest
from kvcli.engine.sequence.token_scores import score_tokens
from kvcli.errors import BadInput

if TYPE_CHECKING:
    from kvcli.api import Event, Turn
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.settings.profile import Profile

ROWS = 256  # prompt rows whose logits are held at once, where that changes nothing else


def refuse_scores(session: GenerationSession, profile: Profile, top: int | None, of_prompt: bool) -> None:
    """Raise BadInput if `top` is out of range, or if some tokens have no logits of the model under this profile."""
    if top is not None and not 0 <= top <= MOST_TOP:
        raise BadInput(f"top_logprobs is {top}", code="bad_logprobs", try_=[f"0 to {MOST_TOP}, or None for no scores"])
    table = assemble.writer_table(profile)
    methods = {
        f"{table}.method=none": top is not None and table,  # chooses tokens otherwise
        "prune.method=none": of_prompt and profile.prune.describe_read,
        "reuse.method=none": of_prompt and profile.reuse.describe_reused,
        "context.on_overflow=drop": of_prompt and session.condensed,  # its first ids stand for more tokens
        "prefill.order=chunks": of_prompt and profile.prefill.order == "layers",
    }
    if ways := [f"--set {way}" for way, is_due in methods.items() if is_due]:
        raise BadInput(
            f"under profile {profile.name} some tokens have no log-probability",
            code="no_logprobs",
            try_=[" ".join(ways)],
        )


def scores_of(logits: Tensor, ids: Sequence[int], top: int) -> list[TokenScore]:
    """Return the scores of tokens, one behind each row of logits [n, V]."""
    logits = logits.cpu() if logits.device.type == "mps" else logits  # as in Readback
    tokens, n = torch.tensor(ids, dtype=torch.long, device=logits.device), min(top, logits.shape[-1])
    found = score_tokens(logits, tokens, top).tolist()
    return [
        TokenScore(token, of[0], tuple(zip(map(int, of[1 : n + 1]), of[n + 1 :], strict=True)))
        for token, of in zip(ids, found, strict=True)
    ]


def score_prompt(
    answer: Coroutine[Event, Turn], ids: Sequence[int], top: int, of: Callable[[], tuple[GenerationSession, Profile]]
) -> Coroutine[Event, Turn]:
    """Run an answer to `ids`, and add the scores of the prompt's tokens, from logits of the passes that read them.

    `of`: returns the session, which is known when the answer begins, and the present profile.
    """
    session, profile = of()
    found, rows, step = {0: TokenScore(ids[0], None)}, session.chunk_rows, partial(next, answer)
    if assemble.is_lossless(profile) and session.lm.is_row_invariant:
        session.chunk_rows = min(rows, ROWS)
    try:
        while True:
            output = step()
            pos: Sequence[int] = ()  # of rows that read the prompt, not into the KV cache of a draft model
            if isinstance(output, ForwardRequest) and output.is_prompt and output.cache is session.cache:
                pos = [at for at in output.rows.pos if at + 1 < len(ids)]
                output = replace(output, want=range(len(pos)))
            try:
                result = yield output
            except BaseException as error:
                step = partial(answer.throw, error)
                continue
            if pos:
                scores = scores_of(result.logits, [ids[at + 1] for at in pos], top)
                found |= zip((at + 1 for at in pos), scores, strict=True)
            step = partial(answer.send, result)
    except StopIteration as end:
        turn: Turn = end.value
        return replace(turn, prompt_scores=tuple(found[at] for at in sorted(found)))
    finally:
        # a lack of memory may have made it smaller
        session.chunk_rows = min(rows, assemble.chunk(session.lm, of()[1]))
