"""Forks: continuations of one sequence that share its KV cache, from which a decoding method chooses the answer.

The tokens of all forks form one tree (draft_kv.py), so that the KV of the prompt is stored once and one pass runs the
last tokens of all forks. Behind them it runs draft tokens, which followed the same tokens in another fork or earlier in
the text. They only decide which rows are computed early: a method sees the logits behind the last token of a fork,
whichever pass computed them. So the answer depends on the prompt, the settings and the seed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.drafting.draft_kv import DraftTreeKV
from kvcli.engine.forward_request import ForwardRequest, Passes, Rows, SamplingContext
from kvcli.engine.readback import Readback
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.token_scores import score_tokens
from kvcli.engine.stats import Step

if TYPE_CHECKING:
    from kvcli.engine.sequence.session import GenerationSession

MATCH = 3  # tokens after which a draft is looked up
KEPT = 64  # newest rows whose logits are kept; older ones are computed again if a fork returns to them


class Places:
    """Places behind each sequence of `MATCH` tokens in some texts."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], tuple[Sequence[int], int]] = {}

    def add(self, ids: Sequence[int], start: int) -> int:
        """Add the places in `ids` from `start` on that have a token behind them. Returns the next start."""
        for end in range(max(start, MATCH), len(ids)):
            self._places[tuple(ids[end - MATCH : end])] = ids, end
        return len(ids)

    def after(self, ids: Sequence[int], n: int) -> Sequence[int]:
        """Return up to n tokens that followed the last tokens of `ids` where they occurred last."""
        found, end = self._places.get(tuple(ids[-MATCH:]), ((), 0))
        return found[end : end + max(0, n)]


@dataclass(slots=True)
class Fork:
    """A continuation of the sequence. Its last token need not have been computed."""

    ids: list[int] = field(default_factory=list)  # tokens behind the sequence
    above: int = -1  # tree row of the token before the last; -1 = none
    seed: int = 0  # added to the seed of the sampler
    logp: float = 0.0  # sum of log-probabilities of tokens, as far as the method counts them
    n_indexed: int = 0  # tokens whose places are known


class Forks:
    """The forks of a sequence after its pending token, whose row is the root of the tree."""

    def __init__(
        self, session: GenerationSession, places: Places, draft: int, stop: Collection[int], most: int
    ) -> None:
        """`draft`: most draft tokens behind a fork in one pass. `stop`: tokens that end a fork. `most`: its tokens."""
        self.session, self.stop, self.most, self.n_passes = session, stop, most, 0
        self._places, self._draft, self._at = places, draft, len(session.ids) - 1
        self._tree = DraftTreeKV(session.lm, session.cache, self._at)
        self._rows: dict[tuple[int, int], int] = {}  # row above (-1 = stored) and token -> the token's newest row
        self._logits: dict[int, Tensor] = {}  # of the newest rows, each [V]

    def has_ended(self, fork: Fork) -> bool:
        """True if the fork ended with a stop token."""
        return bool(fork.ids) and fork.ids[-1] in self.stop

    def is_over(self, fork: Fork) -> bool:
        """True if the fork has ended, or has all the tokens that it may have."""
        return self.has_ended(fork) or len(fork.ids) >= self.most

    def compute(self, forks: Sequence[Fork]) -> Passes[None]:
        """Run the last tokens of these forks, unless their logits are known, and draft tokens behind them."""
        for old in [*self._logits][:-KEPT]:
            del self._logits[old]
        n, ids, parents = len(self._tree), list[int](), list[int]()
        for fork in forks:
            if self._known(fork) is not None:
                continue
            text = [*self.session.ids[-MATCH:], *fork.ids]
            draft = self._places.after(text, min(self._draft, self.most - 1 - len(fork.ids)))
            fork.n_indexed, above = self._places.add(fork.ids, fork.n_indexed), fork.above
            for token in (text[-1], *draft):
                row = self._rows.get((above, token), -1)
                if row < n and row not in self._logits:
                    row = self._rows[above, token] = n + len(ids)
                    ids.append(token)
                    parents.append(above)
                above = row
        size = self.session.lm.max_invariant_rows or len(ids) or 1
        how = SamplingContext(Sampler(), self.session.history)  # a pass that decodes; the method chooses the tokens
        for at in range(0, len(ids), size):
            result = yield from self._tree.add(ids[at : at + size], parents[at : at + size], draw=how)
            self._logits |= enumerate(result.logits.clone(), start=n + at)
            self.n_passes += 1

    def run(
        self, forks: Sequence[Fork], choose: Callable[[Fork], int], is_over: Callable[[Fork], bool]
    ) -> Passes[None]:
        """Add the chosen tokens to each fork until it is over. Forks do not wait for each other."""
        while live := [fork for fork in forks if not is_over(fork)]:
            yield from self.compute(live)
            for fork in live:
                while not is_over(fork) and self._known(fork) is not None:
                    self.push(fork, choose(fork))

    def push(self, fork: Fork, token: int, logp: float = 0.0) -> Fork:
        """Add a token to a fork whose last token was computed."""
        fork.above = self._rows[fork.above, self._last(fork)]
        fork.ids.append(token)
        fork.logp += logp
        return fork

    def branch(self, fork: Fork, token: int, logp: float = 0.0) -> Fork:
        """Return a copy of a fork with one more token."""
        return self.push(replace(fork, ids=[*fork.ids]), token, logp)

    def sample(self, fork: Fork) -> int:
        """Sample the next token as an answer with the seed of the fork does. Raises BadModel, BadInput as that does."""
        session, n = self.session, len(fork.ids)
        sampler = replace(session.sampler, seed=session.sampler.seed + fork.seed)
        how = SamplingContext(sampler, session.history, session.constraint, session.ids, session.answer_at)
        rows, logits = Rows.chain([session.ids[-1], *fork.ids], self._at), self._raw(fork)
        return Readback(ForwardRequest(session.lm, rows, session.cache, draw=how), logits.expand(n + 1, -1)).drawn(n)

    def likeliest(self, fork: Fork, n: int) -> list[tuple[int, float]]:
        """Return the n most likely next tokens, those that a constraint forbids left out, with log-probabilities."""
        logits = self.logits(fork)
        n = min(n, logits.shape[-1])
        _, *found = score_tokens(logits, logits.new_zeros(1, dtype=torch.long), n)[0].tolist()
        ranked = [(int(i), logp) for i, logp in zip(found[:n], found[n:], strict=True) if logp > -torch.inf]
        return ranked or [(self.sample(fork), 0.0)]  # none is possible: the sampler raises the error

    def logp(self, fork: Fork, token: int) -> float:
        """Return the log-probability of a next token."""
        logits = self.logits(fork)
        return float(score_tokens(logits, torch.tensor([token], device=logits.device), 0))

    def logits(self, fork: Fork) -> Tensor:
        """Return the logits [1, V] of the next token, with penalties and constraint and without temperature."""
        session, logits = self.session, self._raw(fork)
        has_penalties = bool(session.sampler.penalties)
        facts = session.sampler.facts(session.history, [fork.ids], session.answer_at) if has_penalties else None
        logits = session.sampler.penalize(logits, facts)
        if session.constraint is None:
            return logits
        mask = session.constraint.allowed([*session.ids[session.answer_at :], *fork.ids])
        return logits if mask is None else logits.masked_fill(~mask.to(logits.device), -torch.inf)

    def adopt(self, fork: Fork, began: float) -> Step:
        """Continue the sequence with this fork. `began`: when the step did."""
        session, path = self.session, self._tree.above(fork.above)
        rows = Rows.chain(session.ids[-1:], self._at)
        session.adopt([*session.ids, *fork.ids], session.committed + len(path), self._tree.held(path))
        took = session.lm.clock() - began
        return Step(rows, torch.empty(0), [0], fork.ids, took, n_passes=self.n_passes)

    def _last(self, fork: Fork) -> int:
        return (fork.ids or self.session.ids)[-1]

    def _known(self, fork: Fork) -> Tensor | None:
        """Return the logits [V] behind the last token, if they are known."""
        return self._logits.get(self._rows.get((fork.above, self._last(fork)), -1))

    def _raw(self, fork: Fork) -> Tensor:
        logits = self._known(fork)
        assert logits is not None, "the last token of the fork was not computed"
        return logits.unsqueeze(0)
