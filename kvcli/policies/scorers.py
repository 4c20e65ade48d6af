"""Scorers: what says how much slots are worth at a boundary, and which queries it must have heard for that.

The arithmetic is in `scores.py`; here is what a text leaves behind between two boundaries, if anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvcli.errors import BadModel
from kvcli.kernels.rotate import Rotary, unrotate
from kvcli.policies import scores
from kvcli.policies.base import Quiet
from kvcli.policies.rotary import mean_turn
from kvcli.rope import rotaries

if TYPE_CHECKING:
    from kvcli.kv.slots import Slots
    from kvcli.model import LM
    from kvcli.policies.base import Moment


class Scorer(Protocol):
    """How much each slot is worth."""

    @property
    def recent(self) -> int:
        """How many of the latest queries it needs."""

    @property
    def lasting(self) -> bool:
        """Does it need those again to score what was generated?"""

    def probes(self, n: int) -> Sequence[int]:
        """Positions of a prompt of n tokens whose queries it needs beside them."""

    def meet(self, lm: LM) -> None:
        """The model whose texts it will score; raises BadModel for one that it cannot."""

    def start(self) -> None:
        """Another text begins."""

    def hear(self, s: Slots, at: Moment) -> None:
        """A boundary, whether or not anything will be scored there; twice for the same one changes nothing."""

    def rereads(self, first: int, n: int) -> Sequence[tuple[int, int]]:
        """Pieces of tokens `first` to n - 1 that it needs run once more."""

    def reread(self, s: Slots, fresh: Slots, at: Moment) -> None:
        """One layer of such a piece."""

    def __call__(self, s: Slots, at: Moment) -> Tensor:
        """[K, S], higher = worth more; whatever for empty slots."""


class Deaf(Quiet):
    """A scorer that what happens at a boundary does not change."""

    def hear(self, s: Slots, at: Moment) -> None:
        return

    def rereads(self, first: int, n: int) -> Sequence[tuple[int, int]]:
        return ()


@dataclass
class Stateless(Deaf):
    """A pure function of the moment."""

    score: Callable[[Slots, Moment], Tensor]
    recent: int = 0

    def __call__(self, s: Slots, at: Moment) -> Tensor:
        return self.score(s, at)


@dataclass
class Cumulative(Deaf):
    """H2O (arXiv 2306.14048), Scissorhands (2305.17118): the attention that a slot ever got from heard queries.

    While answering, every query is heard once; of a prompt, the last `recent` of each chunk. One number a head and
    position, 1/D of the keys and values of the whole text in 16 bits (float32; float64 in a float64 model).
    """

    recent: int
    _total: dict[int, Tensor] = field(default_factory=dict)  # layer -> [K, T]
    _last: dict[int, int] = field(default_factory=dict)  # layer -> position of the last query counted

    def start(self) -> None:
        self._total, self._last = {}, {}

    def hear(self, s: Slots, at: Moment) -> None:
        first = int((at.q_pos <= self._last.get(at.layer, -1)).sum())
        if first == at.q.shape[1] or not s.n_slots:
            return
        gained = scores.mass(s, at, first, "sum").masked_fill(s.pos < 0, 0.0)
        total = gained.new_zeros(s.pos.shape[0], int(s.pos.max()) + 1)
        if (before := self._total.get(at.layer)) is not None:
            total[:, : before.shape[1]] = before
        self._total[at.layer] = total.scatter_add_(1, s.pos.clamp(min=0).long(), gained)
        self._last[at.layer] = int(at.q_pos[-1])

    def __call__(self, s: Slots, at: Moment) -> Tensor:
        total = self._total.get(at.layer)
        if total is None:  # nothing was heard yet: all are alike, and the newest win
            return torch.zeros_like(s.pos, dtype=torch.float32)
        return total.gather(1, s.pos.clamp(min=0).long())


@dataclass
class Expected(Deaf):
    """Expected Attention (arXiv 2510.00636): what queries to come will look at, if they are like those heard.

    The paper takes mean and covariance over all queries of the prompt; here over `samples` of them, spread evenly, and
    over the newest where a prompt has too few. They are turned back to position 0, and forward by the mean rotation
    over the next `horizon` positions.
    """

    samples: int = 256
    horizon: int = 512
    covariance: bool = True
    epsilon: float = 0.0
    sinks: int = 4  # first tokens, whose queries are unlike all others
    recent: int = 64  # where fewer than so many samples are heard, as of a short question, these count too
    lasting = True
    _rotary: Sequence[Rotary | None] | None = None  # by layer; None in it = positions change nothing there

    def probes(self, n: int) -> Sequence[int]:
        first = min(self.sinks, max(0, n - 1))
        count = min(self.samples, n - first)
        return [first + i * (n - first) // count for i in range(count)]

    def meet(self, lm: LM) -> None:
        try:
            self._rotary = rotaries(lm)
        except BadModel as none:
            raise BadModel(
                f'policy.name = "expected" needs the rotary frequencies of {lm.info.id}, and does not find them',
                code="policy_unsupported",
                lines=[none.message, *none.lines],
                try_=["--set policy.name=keydiff", "--set policy.name=snap"],
            ) from None

    def __call__(self, s: Slots, at: Moment) -> Tensor:
        if self._rotary is None:
            raise BadModel(
                'policy.name = "expected" needs the rotary frequencies of the model, and has met none',
                code="policy_unsupported",
                try_=["policy.meet(lm) before the session begins, as kvcli.build.session does"],
            )
        rotary, wide = self._rotary[at.layer], torch.promote_types(at.q.dtype, torch.float32)
        q, q_pos = self._sample(at)
        if not q.shape[1]:  # no query at all: any key is as likely as another
            return scores.expected(s, q.new_zeros(s.k.shape[0], s.k.shape[2], dtype=wide), None, 0.0, 0.0, 0.0)
        q = q.to(wide) if rotary is None else unrotate(q.to(wide), q_pos, rotary)  # [H, w, D]
        now = int(s.pos.max()) + 1
        turn = mean_turn(rotary, torch.arange(now, now + self.horizon, device=q.device), q.shape[2], q.dtype)
        mean, cov = q.mean(1), None
        if self.covariance:
            off = q - mean.unsqueeze(1)
            cov = turn @ (off.transpose(1, 2) @ off / q.shape[1]) @ turn.T  # [H, D, D]
        return scores.expected(s, mean @ turn.T, cov, at.scale, at.softcap, self.epsilon)

    def _sample(self, at: Moment) -> tuple[Tensor, Tensor]:
        """The heard queries that were spread evenly, if there are enough of them; else all."""
        wanted = set(self.probes(at.n_prompt)) if at.n_prompt else set()
        rows = [row for row, pos in enumerate(at.q_pos.tolist()) if pos in wanted]
        return (at.q[:, rows], at.q_pos[rows]) if len(rows) >= min(self.recent, self.samples) else (at.q, at.q_pos)
