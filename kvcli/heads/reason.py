"""Reasoning probe: heads that retrieve a fact through another fact, by the score of HeadKV-R2 (arXiv 2410.19258).

The question needs two facts (Fu et al.): which depot is beside the named one, and the code of that depot, among codes
of other depots. For each row that generates the answer, a head's highest attention weights are taken, as many as the
fact's sentence has tokens, and those on that sentence are summed. The sum is divided by the tokens of the sentence and
of the answer, times ten, as in the authors' code. Texts with a wrong answer are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.sequence.state import END
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

DEPOTS = 4  # depots with codes; the question asks for one of them


def _beside(draw: SampleSeed, size: int) -> Context:
    rng = draw.rng()
    (known, *others), values = distinct(rng, DEPOTS + 1, name), distinct(rng, DEPOTS, number)
    facts = [fact(k, v) for k, v in zip(others, values, strict=True)]
    hint = f"Depot {known} stands right beside depot {others[0]}."
    text = hide(draw.prose.sentences(rng, size), [(rng.random(), one) for one in (*facts, hint)])
    of = f"access code of the depot beside depot {known}"
    return Context(text, (Question(f"What is the {of}?", f"The {of} is", (values[0],), f" {values[0]}.", {}),))


TASK = Task("beside", "a code that needs two facts", _beside, share_of_references, is_binary=True)


def reason(
    model: Model, texts: Sequence[ProbeSample], kinds: Tensor, tell: Callable[[int], None]
) -> tuple[Tensor, int]:
    """Return the mean score [L, H] over texts answered right, and their number; `kinds` [V] by id."""
    total, n = torch.zeros(model.lm.n_layers, model.lm.n_heads, dtype=torch.float64), 0
    for sample in texts:
        session = open_past(model, sample)
        if right(answers(session, sample), sample):
            total += score(session, sample, sentence(sample, kinds)).cpu()
            n += 1
        tell(1)
    return total / max(1, n), n


def score(session: GenerationSession, sample: ProbeSample, at: range) -> Tensor:
    """Return the score [L, H] of one text, whose fact is at the positions `at`."""
    found = []
    for layer in looks(session, sample):
        for weight, pos in layer:  # [G, w, S + N]
            best, where = weight.topk(min(len(at), weight.shape[-1]), dim=-1)
            place = torch.cat((pos.long(), pos.new_full((weight.shape[-1] - len(pos),), -1).long()))[where]
            hits = best * ((place >= at.start) & (place < at.stop))
            found.append(10 * hits.sum((1, 2)) / (len(at) * weight.shape[1]))
    return torch.cat(found).view(session.lm.n_layers, -1)


def sentence(sample: ProbeSample, kinds: Tensor) -> range:
    """Return the token positions of the sentence with the requested value."""
    ends = [kinds[i] == END for i in sample.context]
    at = sample.asked[0].needle
    start = next((i + 1 for i in range(at - 1, -1, -1) if ends[i]), 0)
    return range(start, next((i + 1 for i in range(at, len(ends)) if ends[i]), len(ends)))
