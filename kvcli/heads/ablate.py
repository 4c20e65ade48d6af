"""Ablation probe: the loss when a head attends only to the first and the newest tokens.

A head is a retrieval head if restricting it changes the model's output (the definition for which DuoAttention, arXiv
2410.10819, learns gates). Here each head in turn is restricted in one short pass after an unrestricted prefill.
Attention statistics of a prompt miss heads that are inactive on this prompt, and heads that attend a few tokens beside
the answer; the model's output shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kvcli.engine.engine import run, run_to_end
from kvcli.engine.forward_request import ForwardRequest
from kvcli.heads.query_probe import whole
from kvcli.heads.restricted_heads import HeadWindow, RestrictedHeads

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.heads.sample import ProbeSample
    from kvcli.kv.slots import KVCache

Tell = Callable[[int], None]  # passes done


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss caused by restricted heads."""

    kl: float  # nats per answer token, mean
    right: int  # answers of which every token is still the likeliest
    of: int  # number of answers


def open_past(model: Model, sample: ProbeSample) -> GenerationSession:
    """Prefill the text of a sample without eviction; its last token is pending."""
    session = whole(model)
    run_to_end(session.read(sample.context))
    return session


def answers(session: GenerationSession, sample: ProbeSample, cache: RestrictedHeads | KVCache | None = None) -> Tensor:
    """Return log-probabilities [n, V] float32 for each token of the values, from one pass that is not committed."""
    rows = sample.rows()
    want = [row for row, _ in sample.scored()]
    # a pass that is never committed uses only `dtype` and `attend` of a KV cache
    (made,) = run(
        [ForwardRequest(session.lm, rows, cast("KVCache", cache or session.cache), want=want, states=session.states)]
    )
    return torch.log_softmax(made.logits.float(), dim=-1)


def ablate(
    session: GenerationSession, sample: ProbeSample, heads: Sequence[tuple[int, int]], reach: HeadWindow, tell: Tell
) -> Tensor:
    """Return the KL of the answer tokens [len(heads)] with each (layer, KV head) restricted in turn."""
    lm = session.lm
    truth = answers(session, sample)
    found = torch.zeros(len(heads), dtype=torch.float64)
    for i, (layer, head) in enumerate(heads):
        blind = torch.zeros(lm.n_layers, lm.n_kv_heads, dtype=torch.bool, device=lm.device)
        blind[layer, head] = True
        found[i] = _kl(truth, answers(session, sample, RestrictedHeads(session.cache, blind, reach)))
        tell(1)
    return found


def restricted(session: GenerationSession, sample: ProbeSample, blind: Tensor, reach: HeadWindow) -> Loss:
    """Return the loss with all heads in `blind` [L, K] restricted together."""
    truth = answers(session, sample)
    said = answers(session, sample, RestrictedHeads(session.cache, blind.to(session.lm.device), reach))
    return Loss(_kl(truth, said), right(said, sample), len(sample.asked))


def right(said: Tensor, sample: ProbeSample) -> int:
    """Count the answers of which every token is the likeliest in `said` [n, V]."""
    wanted = torch.tensor([token for _, token in sample.scored()], device=said.device)
    hits, n, start = (said.argmax(-1) == wanted).tolist(), 0, 0
    for one in sample.asked:
        n += all(hits[start : start + len(one.value)])
        start += len(one.value)
    return n


def _kl(truth: Tensor, said: Tensor) -> float:
    return max(0.0, float((truth.exp() * (truth - said)).sum(-1).mean()))
