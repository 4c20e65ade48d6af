"""A boundary: what a policy is shown of a text before it says what stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.feed import Asks, Feed, asked
from kvcli.heard import Heard
from kvcli.kv.slots import Choose, Slots, Store
from kvcli.policies.base import Moment, Phase, Policy
from kvcli.replay import Replay
from kvcli.rows import Rows

if TYPE_CHECKING:
    from kvcli.model import LM


@dataclass(frozen=True, slots=True)
class Boundary:
    """A text between two passes, all of whose tokens are stored."""

    lm: LM
    kv: Store
    heard: Heard
    ids: Sequence[int]
    kinds: Tensor  # [T] int8, by position; [0] for a policy that asks for none
    phase: Phase
    n_prompt: int

    def ask(self, policy: Policy) -> Asks[Choose]:
        """What to settle with: the policy's choice and its guard's, once it has seen all that it wants to see.

        At the end of a prompt this runs passes over the model where the policy asks for them, of which nothing is
        stored: one for each piece that it rereads, and those by which it weighs what it may forget (Replay).
        """
        if self.phase == "read":
            yield from self._reread(policy)
        if policy.looks:
            for layer in range(self.lm.n_layers):
                slots = self.kv.slots(layer)
                policy.look(slots, self._moment(policy, layer, slots))
        if self.phase == "read" and (n := min(policy.replays, len(self.ids) // 2)):
            replay = Replay(self.lm, self.kv, self.ids, len(self.ids) - n, partial(self._moment, policy))
            yield from asked(policy.settle_on(replay))

        def choose(layer: int, slots: Slots) -> Tensor:
            at = self._moment(policy, layer, slots)
            return policy.keep(slots, at) | at.protected

        return choose

    def _moment(self, policy: Policy, layer: int, slots: Slots) -> Moment:
        heard, protected = self.heard.of(layer, slots.k), policy.guard.covers(slots, self.kinds)
        return Moment.of(self.lm, layer, self.phase, self.n_prompt, heard, self.kinds, protected)

    def _reread(self, policy: Policy) -> Asks[None]:
        """Pieces of the text once more, behind all of it; nothing of these passes is stored."""
        for start, end in policy.rereads(len(self.ids)):
            rows = Rows.chain(self.ids[start:end], len(self.ids))
            made = yield Feed(self.lm, rows, self.kv, hear=range(rows.n_rows), is_prompt=True)
            pos = torch.tensor(rows.pos, device=self.lm.device)
            for layer, (q, (k, v)) in enumerate(zip(made.queries, made.fresh, strict=True)):
                slots = self.kv.slots(layer)
                fresh = Slots(k, v, pos.expand(k.shape[0], -1))
                policy.reread(slots, fresh, replace(self._moment(policy, layer, slots), q=q, q_pos=pos))
