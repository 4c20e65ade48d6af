"""Hearing the queries of a prompt while it is read as always: a policy that keeps everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvcli.policies.base import Moment, Plain
from kvcli.quality.controls import full_profile
from kvcli.sample import Sampler
from kvcli.session import Session

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.kv.slots import Slots
    from kvcli.local import Model

Hear = Callable[["Slots", Moment], None]
Rows = Callable[[int], Sequence[int]]  # tokens of the prompt -> positions to hear, rising


class Listen(Plain):
    """Hands each layer's stored slots, with the queries at the probed positions, to `hear`; evicts nothing."""

    lasting = wants_kinds = True

    def __init__(self, rows: Rows, hear: Hear, *, recent: int = 0) -> None:
        self._rows, self._hear, self.recent = rows, hear, recent

    def probes(self, n: int) -> Sequence[int]:
        return self._rows(n)

    def keep(self, s: Slots, at: Moment) -> Tensor:
        if at.phase != "reading":
            self._hear(s, at)
        return s.pos >= 0


def whole(model: Model) -> Model:
    """The model with nothing evicted and no drafts, whatever its profile."""
    return model.with_profile(full_profile(model.profile))


def listening(
    model: Model,
    rows: Rows,
    hear: Hear,
    kinds: Tensor | None = None,
    *,
    recent: int = 0,
    every: int | None = None,
) -> Session:
    """A greedy session of its own that hears these rows once its prompt is read. `kinds` [V] by id.

    While it writes, each `every` tokens, it hears them and the `recent` newest ones.
    """
    plain = whole(model).session
    policy = Listen(rows, hear, recent=recent)
    return Session(
        plain.lm, plain.kv, plain.drafter, Sampler(), policy=policy, chunk=plain.chunk_rows, every=every, kinds=kinds
    )
