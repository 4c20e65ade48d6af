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

        layers = [layer for layer, shape in enumerate(lm.shapes) if shape.shares is None]
        first = max((int(past.slots(layer).pos[0, 0]) for layer in layers), default=0) if shared < len(had) else 0
        found = [run for run in runs(had, ids[:-1], shared, self.least) if run.old >= first]
        if not found:
            return None
        turns = rotaries(lm)
        kept = {run: {layer: _copied(past, layer, run) for layer in layers} for run in found}
        return _Turned({run.new: (run, kept[run]) for run in found}, turns)


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


def _copied(past: Store, layer: int, run: Run) -> tuple[Tensor, Tensor]:
    """Keys and values of a run, [K, n, D] and [K, n, E], out of the way of what overwrites them."""
    s = past.slots(layer)
    first = run.old - int(s.pos[0, 0])
    return s.k[:, first : first + run.n].clone(), s.v[:, first : first + run.n].clone()


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
