"""What is lost when heads see only the first and the newest tokens: the ablation probe.

A head is a retrieval head if blinkers on it change what the model says (the definition that DuoAttention, arXiv
2410.10819, learns gates for). Here each head in turn gets them in one short pass behind a text that was read whole.
Attention statistics of a prompt cannot find heads that this prompt leaves dormant, nor those that read an answer a few
tokens beside it; what comes out of the model can.
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
    """What blinkers cost."""

    kl: float  # nats, of the next token over the tokens of the answers, mean
    right: int  # answers whose every token is still the first choice
    of: int


def open_past(model: Model, sample: ProbeSample) -> GenerationSession:
    """The text of a sample, read whole; its last token is pending."""
    session = whole(model)
    run_to_end(session.read(sample.context))
    return session


def answers(session: GenerationSession, sample: ProbeSample, cache: RestrictedHeads | KVCache | None = None) -> Tensor:
    """[n, V] float32 log-probabilities of each token of the values, in one pass that is not committed."""
    rows = sample.rows()
    want = [row for row, _ in sample.scored()]
    # a pass that is never committed asks a store for nothing but `dtype` and `attend`
    (made,) = run(
        [ForwardRequest(session.lm, rows, cast("KVCache", cache or session.cache), want=want, states=session.states)]
    )
    return torch.log_softmax(made.logits.float(), dim=-1)


def ablate(
    session: GenerationSession, sample: ProbeSample, heads: Sequence[tuple[int, int]], reach: HeadWindow, tell: Tell
) -> Tensor:
    """[len(heads)] KL of the answers' tokens when one (layer, KV head) after the other has blinkers."""
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
    """What blinkers on all heads in `blind` [L, K] do together."""
    truth = answers(session, sample)
    said = answers(session, sample, RestrictedHeads(session.cache, blind.to(session.lm.device), reach))
    return Loss(_kl(truth, said), right(said, sample), len(sample.asked))


def right(said: Tensor, sample: ProbeSample) -> int:
    """Answers of which every token is the first choice in `said` [n, V]."""
    wanted = torch.tensor([token for _, token in sample.scored()], device=said.device)
    hits, n, start = (said.argmax(-1) == wanted).tolist(), 0, 0
    for one in sample.asked:
        n += all(hits[start : start + len(one.value)])
        start += len(one.value)
    return n


def _kl(truth: Tensor, said: Tensor) -> float:
    return max(0.0, float((truth.exp() * (truth - said)).sum(-1).mean()))
