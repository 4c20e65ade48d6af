"""PIE: behind an edit, keys are turned to their new positions and values stay, so that the edit alone is read.

He et al., "Let the Code LLM Edit Itself When You Edit the Code" (Positional Integrity Encoding), arXiv 2407.03157.
What is taken over was read behind the old text and does not know of the new one: an approximation, good where an edit
changes little of what follows. Runs are found wherever they lie in the old text, so that a document taken out and a
conversation that lost its beginning cost no reading either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.settings.schema import Range

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from kvcli.engine.lm import LM
    from kvcli.engine.spare import Spare
    from kvcli.kernels.rotate import Rotary
    from kvcli.kv.slots import Store

FACTOR = 0x9E3779B97F4A7C15  # odd, of the rolling sums by which runs are looked up


@dataclass(frozen=True)
class Pie:
    """Take over what two texts share behind an edit, keys turned to their new positions (PIE, arXiv 2407.03157)."""

    least: Annotated[int, Range(8)] = 64  # tokens in a row that are worth taking over

    @property
    def reuses(self) -> str:
        return f"takes over {self.least} tokens or more in a row as they were read behind another text"

    def over(self, lm: LM, past: Store, had: Sequence[int], ids: Sequence[int], shared: int) -> Spare | None:
        """Runs of what is stored of `had` that stand in `ids` behind the first `shared` tokens, which both begin with.

        Raises BadModel where no fixed table says how keys turn. Layers that no longer hold a run all along, as their
        window moved on, leave it to be read.
        """
        from kvcli.engine.rope import rotaries

        wanted = list(runs(had, ids[:-1], shared, self.least))
        if not wanted:
            return None
        turns = rotaries(lm)
        kept: dict[Run, dict[int, tuple[Tensor, Tensor]]] = {run: {} for run in wanted}
        for layer, shape in enumerate(lm.shapes):
            if shape.shares is None:
                s = past.slots(layer)  # once, as what is packed is unpacked for it
                order = s.pos[0].argsort()
                for run in list(kept):
                    if (at := _at(s.pos[0], order, run)) is None:
                        del kept[run]
                    else:
                        kept[run][layer] = s.k[:, at], s.v[:, at]  # copies: what lies there is overwritten
        return _Turned({run.new: (run, held) for run, held in kept.items()}, turns) if kept else None


@dataclass(frozen=True, slots=True)
class Run:
    """Equal tokens in two texts."""

    old: int  # position of the first in the text that was read
    new: int  # and in the one to be read
    n: int


def runs(had: Sequence[int], ids: Sequence[int], start: int, least: int) -> Iterator[Run]:
    """Runs of `least` tokens or more that stand in both texts, in `ids` from `start` on, rising and apart."""
    import numpy as np

    old, new = np.asarray(had, dtype=np.uint64), np.asarray(ids, dtype=np.uint64)
    if min(len(old), len(new) - start) < least:
        return
    places: dict[int, int] = {}
    for i, key in enumerate(_keys(old, least).tolist()):
        places.setdefault(key, i)
    keys = _keys(new, least).tolist()
    shift, at = 0, start  # where the last run lay: a text that repeats itself goes on there
    while at < len(keys):
        i = at + shift
        if not (i >= 0 and i + least <= len(old) and (old[i : i + least] == new[at : at + least]).all()):
            i = places.get(keys[at], -1)
        if i < 0 or not (old[i : i + least] == new[at : at + least]).all():
            at += 1
            continue
        both = min(len(old) - i, len(new) - at)
        differ = (old[i : i + both] != new[at : at + both]).nonzero()[0]
        n = int(differ[0]) if len(differ) else both
        yield Run(i, at, n)
        shift, at = i - at, at + n


def _keys(ids: np.ndarray, n: int) -> np.ndarray:
    """A number for each n tokens in a row; equal ones have equal numbers."""
    import numpy as np

    found = np.zeros(max(0, len(ids) - n + 1), dtype=np.uint64)
    for i in range(n):
        found = found * np.uint64(FACTOR) + ids[i : i + len(found)]
    return found


def _at(pos: Tensor, order: Tensor, run: Run) -> Tensor | None:
    """Which slots at positions pos [S], rising in `order`, hold a run; None where some of it is gone."""
    import torch

    first = int(torch.searchsorted(pos[order], run.old))
    at = order[first : first + run.n]
    return at if len(at) == run.n and int(pos[at[0]]) == run.old and int(pos[at[-1]]) == run.old + run.n - 1 else None


class _Turned:
    """What of an old text is left for a new one."""

    def __init__(
        self, runs: dict[int, tuple[Run, dict[int, tuple[Tensor, Tensor]]]], turns: Sequence[Rotary | None]
    ) -> None:
        self._runs, self._turns = runs, turns

    def next(self, at: int) -> int | None:
        """Where the next run begins, at or behind this position."""
        return min((start for start in self._runs if start >= at), default=None)

    def take(self, at: int) -> tuple[int, Iterator[tuple[int, Tensor, Tensor, int]]]:
        """The run that begins there, which is given once: where it ends, and its layers, keys, values and start."""
        run, held = self._runs.pop(at)
        return at + run.n, self._turned(run, held)

    def _turned(self, run: Run, held: dict[int, tuple[Tensor, Tensor]]) -> Iterator[tuple[int, Tensor, Tensor, int]]:
        import torch

        from kvcli.kernels.rotate import rotate, unrotate

        for layer, (k, v) in held.items():
            if (rotary := self._turns[layer]) is not None and run.old != run.new:
                old = torch.arange(run.old, run.old + run.n, device=k.device)
                wide = k.to(torch.promote_types(k.dtype, torch.float32))
                k = rotate(unrotate(wide, old, rotary), old + (run.new - run.old), rotary).to(k.dtype)
            yield layer, k, v, run.new
