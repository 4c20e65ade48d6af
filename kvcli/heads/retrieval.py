"""Retrieval probes: which heads read hidden facts, the loss when they are restricted, and which heads suffice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.heads.ablate import Loss, ablate, answers, open_past, restricted, right
from kvcli.heads.needle import OFFSETS, needle
from kvcli.heads.restricted_heads import HeadWindow
from kvcli.heads.sample import ProbeSample

if TYPE_CHECKING:
    from kvcli.chat.model import Model

Tell = Callable[[int], None]  # passes done


@dataclass(slots=True)
class RetrievalResult:
    """Result of the retrieval probes over all samples."""

    kl: Tensor | None  # [L, K] nats per token, mean over samples; None: `ablate` not run
    read: Tensor | None  # [L, H, O] attention around the needle; None: `needle` not run
    right: int  # right answers without restricted heads
    of: int


def probe_retrieval(
    model: Model,
    texts: Sequence[ProbeSample],
    layers: Collection[int],
    probes: Collection[str],
    reach: HeadWindow,
    tell: Tell,
) -> RetrievalResult:
    """Restrict each head of `layers` in turn, and measure the attention of answer rows, according to `probes`."""
    lm = model.lm
    heads = long_range_heads(model, layers, reach)
    found = RetrievalResult(None, None, 0, 0)
    kl = torch.zeros(lm.n_layers, lm.n_kv_heads, dtype=torch.float64)
    read = torch.zeros(lm.n_layers, lm.n_heads, len(OFFSETS), dtype=torch.float64)
    for sample in texts:
        session = open_past(model, sample)
        tell(1)
        found.right += right(answers(session, sample), sample)
        found.of += len(sample.asked)
        if "needle" in probes:
            read += needle(session, sample).cpu()
        if "ablate" in probes:
            losses = ablate(session, sample, heads, reach, tell)
            for (layer, head), loss in zip(heads, losses.tolist(), strict=True):
                kl[layer, head] += loss
    if "ablate" in probes:
        found.kl = kl / len(texts)
    if "needle" in probes:
        found.read = read / len(texts)
    return found


def long_range_heads(model: Model, layers: Collection[int], reach: HeadWindow) -> list[tuple[int, int]]:
    """Return the heads of `layers` that `reach` restricts; sliding-window layers with a smaller window are left out."""
    seen = [w is None or w > reach.recent for w in model.lm.windows]
    return [(layer, head) for layer in sorted(layers) if seen[layer] for head in range(model.lm.n_kv_heads)]


def check(model: Model, texts: Sequence[ProbeSample], blind: Tensor, reach: HeadWindow, tell: Tell) -> Loss:
    """Return the loss over all texts with all heads in `blind` [L, K] restricted."""
    losses = []
    for sample in texts:
        losses.append(restricted(open_past(model, sample), sample, blind, reach))
        tell(1)
    return Loss(sum(x.kl for x in losses) / len(losses), sum(x.right for x in losses), sum(x.of for x in losses))
