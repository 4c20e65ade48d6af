"""Heads that lose all but their first and newest tokens for good, and answers written from what is left."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from kvcli.chat.model import Model
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.policy.policy import LayerContext, PerLayerPolicy
from kvcli.heads.query_probe import whole
from kvcli.heads.restricted_heads import HeadWindow
from kvcli.heads.sample import ProbeSample
from kvcli.kv.slots import Slots


@dataclass(frozen=True)
class Restrict(PerLayerPolicy):
    """Evicts, once the text is read."""

    heads: frozenset[tuple[int, int]]
    reach: HeadWindow

    def mask(self, s: Slots, at: LayerContext) -> Tensor:
        held = s.pos >= 0
        if at.phase == "reading":
            return held
        few = held & ((s.pos < self.reach.sinks) | (s.pos > s.pos.amax(dim=1, keepdim=True) - self.reach.recent))
        for head in range(s.pos.shape[0]):
            if (at.layer, head) in self.heads:
                held[head] = few[head]
        return held


def right_answers(
    model: Model, sample: ProbeSample, heads: Collection[tuple[int, int]], reach: HeadWindow
) -> list[bool]:
    """Each question of the sample: does greedy decoding write the value, token for token?"""
    session = whole(model)
    session.policy = Restrict(frozenset(heads), reach)
    run_to_end(session.read(sample.context))
    found = []
    for one in sample.asked:
        fork = session.fork()
        fork.policy = None
        run_to_end(fork.read(one.ids[: one.value.start]))
        wanted = [one.ids[i] for i in one.value]
        new = [token for step in iterate_events(fork.stream(len(wanted))) for token in step.new]
        found.append(new == wanted)
    return found
