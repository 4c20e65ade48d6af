"""Heads that reason over what they retrieve: the score of HeadKV-R2 (Fu et al., arXiv 2410.19258).

A fact has to be found by way of another: which depot stands beside the one that is named, and what its code is, while
codes of other depots stand in the text, too. Of each row that writes the answer a head's highest weights count, as many
as the fact's sentence has tokens, where they fall on that sentence: their sum by those tokens and those of the answer,
times ten, as in the authors' code. Of texts that are answered wrong nothing counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.sequence.token_kinds import END
from kvcli.heads.ablate import answers, open_past, right
from kvcli.heads.needle import looks
from kvcli.quality.prose import distinct, hide, name, number
from kvcli.quality.sample import Context, Question, SampleSeed, Task
from kvcli.quality.score import share_of_references
from kvcli.quality.tasks.needles import fact

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.heads.sample import ProbeSample

DEPOTS = 4  # with codes; one of them is asked for


def _beside(draw: SampleSeed, size: int) -> Context:
    rng = draw.rng()
    (known, *others), values = distinct(rng, DEPOTS + 1, name), distinct(rng, DEPOTS, number)
    facts = [fact(k, v) for k, v in zip(others, values, strict=True)]
    hint = f"Depot {known} stands right beside depot {others[0]}."
    text = hide(draw.prose.sentences(rng, size), [(rng.random(), one) for one in (*facts, hint)])
    of = f"access code of the depot beside depot {known}"
    return Context(text, (Question(f"What is the {of}?", f"The {of} is", (values[0],), f" {values[0]}.", {}),))


TASK = Task("beside", "a code found by way of another fact", _beside, share_of_references, is_binary=True)


def reason(
    model: Model, texts: Sequence[ProbeSample], kinds: Tensor, tell: Callable[[int], None]
) -> tuple[Tensor, int]:
    """[L, H] mean over texts that are answered right, and how many are; `kinds` [V] by id."""
    total, n = torch.zeros(model.lm.n_layers, model.lm.n_heads, dtype=torch.float64), 0
    for sample in texts:
        session = open_past(model, sample)
        if right(answers(session, sample), sample):
            total += score(session, sample, sentence(sample, kinds)).cpu()
            n += 1
        tell(1)
    return total / max(1, n), n


def score(session: GenerationSession, sample: ProbeSample, at: range) -> Tensor:
    """[L, H] of one text, whose fact stands at these positions."""
    found = []
    for layer in looks(session, sample):
        for weight, pos in layer:  # [G, w, S + N]
            best, where = weight.topk(min(len(at), weight.shape[-1]), dim=-1)
            place = torch.cat((pos.long(), pos.new_full((weight.shape[-1] - len(pos),), -1).long()))[where]
            hits = best * ((place >= at.start) & (place < at.stop))
            found.append(10 * hits.sum((1, 2)) / (len(at) * weight.shape[1]))
    return torch.cat(found).view(session.lm.n_layers, -1)


def sentence(sample: ProbeSample, kinds: Tensor) -> range:
    """The tokens of the sentence that holds the value asked for."""
    ends = [kinds[i] == END for i in sample.context]
    at = sample.asked[0].needle
    start = next((i + 1 for i in range(at - 1, -1, -1) if ends[i]), 0)
    return range(start, next((i + 1 for i in range(at, len(ends)) if ends[i]), len(ends)))
