"""States: what recurrent, convolutional and linear-attention layers know of a text, and checkpoints to go back to.

A state has the whole text in it and cannot be cropped. Nothing is ever written into one: what a pass makes of it is
another, so checkpoints and copies of a text share what they have in common.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcli.kv.slots import Usage
from kvcli.kv.snapshot import SnapshotMismatch, SnapshotReader, State

EVERY = 2048  # tokens of an answer between two checkpoints

Key = tuple[int, int]  # a layer, and which of its states


@dataclass(frozen=True, slots=True)
class StateCheckpoint:
    """What layers know once the first `at` tokens went through them."""

    at: int = 0
    conv: Mapping[Key, Tensor] = field(default_factory=dict)  # [1, C, W]: the newest inputs of a convolution
    rec: Mapping[Key, Tensor] = field(default_factory=dict)  # [1, ..]: as its layer makes it

    def __deepcopy__(self, memo: object) -> StateCheckpoint:
        """Itself: nobody writes into it."""
        return self

    @property
    def tensors(self) -> Iterator[tuple[Key, Tensor]]:
        yield from self.conv.items()
        yield from self.rec.items()


NOTHING = StateCheckpoint()


def apart_by(mine: StateCheckpoint, theirs: StateCheckpoint) -> float:
    """Relative RMS between two of one text: of the state that is off the most."""
    both = [(mine.conv, theirs.conv), (mine.rec, theirs.rec)]
    pairs = [(of[key].double(), t.double()) for of, its in both for key, t in its.items()]
    off = [float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs]
    return max((math.inf if math.isnan(each) else each for each in off), default=0.0)


class StateUpdate:
    """What rows of one text make of a state in one pass; the one that they begin with stays as it is."""

    def __init__(self, before: StateCheckpoint, n_rows: int, *, is_sure: bool = False) -> None:
        """`is_sure`: all rows will be accepted, so that nothing is kept to cut from."""
        self.before, self.n_rows, self._is_sure = before, n_rows, is_sure
        self.rec: dict[Key, Tensor] = {}
        self._conv: dict[Key, Tensor] = {}  # [1, C, n]: histories that end with the rows of the pass
        self._width: dict[Key, int] = {}

    def conv_state(self, key: Key) -> Tensor | None:
        """The history before these rows. A copy: some layers write a lone row into it, whatever they are told."""
        if (held := self.before.conv.get(key)) is None:
            return None
        self._conv[key], self._width[key] = held.clone(), held.shape[-1]
        return self._conv[key]

    def recurrent_state(self, key: Key) -> Tensor | None:
        """The state before these rows. A copy: Mamba2's kernel for one row writes into it and says no more."""
        if (held := self.before.rec.get(key)) is None:
            return None
        self.rec[key] = held.clone()
        return self.rec[key]

    def join(self, key: Key, x: Tensor, width: int) -> Tensor:
        """x [1, C, N], what these rows bring -> with the history before them; `width` of it matter to the next row."""
        if (held := self.before.conv.get(key)) is not None:
            x = torch.cat([held.to(x.dtype), x], dim=-1)
        # a text that begins with fewer rows than a kernel has taps begins behind zeros
        x = pad(x, (max(0, width - x.shape[-1]), 0))
        self._conv[key], self._width[key] = x[..., -width:].clone() if self._is_sure else x, width
        return x

    def known(self, n: int, rec: Mapping[Key, Tensor]) -> StateCheckpoint:
        """The state behind the first n rows, with these recurrent ones."""
        conv = {key: self._newest(key, self.n_rows - n) for key in self._conv}
        assert len(conv) + len(rec) >= sum(1 for _ in self.before.tensors), "a layer did not run"
        return StateCheckpoint(self.before.at + n, conv, {key: _alone(t) for key, t in rec.items()})

    def _newest(self, key: Key, dropped: int) -> Tensor:
        """The end of a history without its last rows, by itself: what it is cut from may be a chunk's."""
        history, width = self._conv[key], self._width[key]
        end = history.shape[-1] - dropped
        return pad(history[..., max(0, end - width) : end], (max(0, width - end), 0)).clone()


def _alone(t: Tensor) -> Tensor:
    """By itself: some layers give a part of what a chunk took."""
    return t if t.untyped_storage().nbytes() == t.nbytes else t.clone()


class RecurrentStates:
    """The state of a text and checkpoints of it; those of a model without any are at every length."""

    def __init__(self, like: StateCheckpoint = NOTHING, most: int = 8) -> None:
        """`like`: of the shapes and types that the model makes. `most`: checkpoints, further back the fewer."""
        self.now = NOTHING
        self._like, self._most, self._marks = like, most, list[StateCheckpoint]()  # rising

    @property
    def _has_any(self) -> bool:
        return any(True for _ in self._like.tensors)

    def advance(self, known: StateCheckpoint) -> None:
        """So much of the text is read."""
        crosses = known.at // EVERY > self.now.at // EVERY
        self.now = known
        if crosses:
            self.mark()

    def skip_tokens(self, n: int) -> None:
        """The text has n tokens, of which those from here on are left out."""
        if self._has_any:
            self.now = replace(self.now, at=n)

    def checkpoint_positions(self, turns: Iterable[int]) -> list[int]:
        """Those ahead of these lengths of the text, where reading has to stop for a checkpoint to come back to."""
        return [turn for turn in turns if turn > self.now.at] if self._has_any else []

    def mark(self) -> None:
        """Somebody may come back to where the text is now."""
        if not self.now.at or (self._marks and self._marks[-1].at == self.now.at):
            return
        self._marks.append(self.now)
        if len(self._marks) > self._most:
            del self._marks[self._least()]

    def _least(self) -> int:
        """Which checkpoint is missed least: behind whose neighbours a gap is small beside how far back it lies."""
        at = [0, *(mark.at for mark in self._marks), self.now.at]
        gaps = [(at[i + 2] - at[i]) / (at[-1] - at[i]) for i in range(len(self._marks))]
        return gaps.index(min(gaps))

    def reaches(self, n: int) -> int:
        """The furthest of the first n tokens behind which the text can go on."""
        if not self._has_any or n >= self.now.at:
            return n
        return max((mark.at for mark in self._marks if mark.at <= n), default=0)

    def crop(self, n: int) -> None:
        """Go back to where n tokens were read, as `reaches` gives them; from there others may come back, too."""
        if n >= self.now.at:
            return self.mark()
        self._marks = [mark for mark in self._marks if mark.at <= n]
        self.now = self._marks[-1] if n else NOTHING
        assert self.now.at == n, "there is no checkpoint"

    def usage(self) -> list[Usage]:
        """By layer: what the state and its checkpoints take together, each tensor once."""
        held: dict[int, dict[int, int]] = {}
        for known in (self.now, *self._marks):
            for (layer, _), t in known.tensors:
                held.setdefault(layer, {})[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return [Usage(layer, "state", 0, sum(of.values())) for layer, of in sorted(held.items())]

    def state(self) -> State:
        """Checkpoints, and the state last."""
        marks = [mark for mark in self._marks if mark.at != self.now.at]
        return {str(i): _tree(known) for i, known in enumerate((*marks, self.now))} if self.now.at else {}

    def restore(self, given: SnapshotReader) -> None:
        """As it was given, with no more checkpoints than there may be here. Raises SnapshotMismatch."""
        knowns = [self._known(part) for part in given.parts(given.n)]
        ends = [known.at for known in knowns]
        if ends != sorted({*ends}) or ends[-1:] != [given.n] * self._has_any:
            raise SnapshotMismatch("its states are not those of its text")
        self.now, self._marks = NOTHING, []
        for known in knowns:
            self.now = known
            self.mark()

    def _known(self, given: SnapshotReader) -> StateCheckpoint:
        conv = {key: given.part("conv").like(_name(key), t) for key, t in self._like.conv.items()}
        rec = {key: given.part("rec").like(_name(key), t) for key, t in self._like.rec.items()}
        return StateCheckpoint(given.number("at", given.n, 1), conv, rec)


def _tree(known: StateCheckpoint) -> State:
    conv, rec = ({_name(key): t for key, t in of.items()} for of in (known.conv, known.rec))
    return {"at": known.at, "conv": conv, "rec": rec}


def _name(key: Key) -> str:
    return f"{key[0]}.{key[1]}"
