"""Recurrent state of recurrent, convolutional and linear-attention layers, and checkpoints to rewind to.

A state depends on the whole sequence and cannot be cropped. States are immutable: each pass makes a new one, so
checkpoints and copies of a sequence share their tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcli.kv.companion import Companion
from kvcli.kv.slots import Usage
from kvcli.kv.snapshot import SnapshotMismatch, SnapshotReader, State

EVERY = 2048  # tokens between two checkpoints

Key = tuple[int, int]  # (layer, index of its state)


@dataclass(frozen=True, slots=True)
class StateCheckpoint:
    """Recurrent state of all layers after the first `at` tokens."""

    at: int = 0
    conv: Mapping[Key, Tensor] = field(default_factory=dict)  # [1, C, W]: the newest inputs of a convolution
    rec: Mapping[Key, Tensor] = field(default_factory=dict)  # [1, ..]: shape depends on the layer

    def __deepcopy__(self, memo: object) -> StateCheckpoint:
        """Return the object itself, because states are immutable."""
        return self

    @property
    def tensors(self) -> Iterator[tuple[Key, Tensor]]:
        yield from self.conv.items()
        yield from self.rec.items()


NOTHING = StateCheckpoint()


def apart_by(one: StateCheckpoint, other: StateCheckpoint) -> float:
    """Return the largest relative RMS difference between two checkpoints of one sequence."""
    both = [(one.conv, other.conv), (one.rec, other.rec)]
    pairs = [(of[key].double(), t.double()) for of, its in both for key, t in its.items()]
    off = [float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs]
    return max((math.inf if math.isnan(each) else each for each in off), default=0.0)


class StateUpdate:
    """Update of the state of one sequence by one forward pass; the state before the pass is not modified."""

    def __init__(
        self, before: StateCheckpoint, n_rows: int, *, is_sure: bool = False, are_written: bool = True
    ) -> None:
        """`is_sure`: all rows will be accepted, so inputs need not be kept for a rollback. `are_written`: layers may
        write into a state that they get, so they get a copy."""
        self.before, self.n_rows, self._is_sure, self._are_written = before, n_rows, is_sure, are_written
        self.rec: dict[Key, Tensor] = {}
        self._conv: dict[Key, Tensor] = {}  # [1, C, n]: convolution inputs up to the last row of the pass
        self._width: dict[Key, int] = {}

    def conv_state(self, key: Key) -> Tensor | None:
        """Return the convolution state before these rows. Some layers write a single row into it."""
        if (state := self.before.conv.get(key)) is None:
            return None
        self._conv[key], self._width[key] = state.clone() if self._are_written else state, state.shape[-1]
        return self._conv[key]

    def recurrent_state(self, key: Key) -> Tensor | None:
        """Return the recurrent state before these rows. Mamba2's kernel for one row writes into it."""
        if (state := self.before.rec.get(key)) is None:
            return None
        self.rec[key] = state.clone() if self._are_written else state
        return self.rec[key]

    def join(self, key: Key, x: Tensor, width: int) -> Tensor:
        """Prepend the convolution state to x [1, C, N] of these rows; the next row needs the last `width` inputs."""
        if (state := self.before.conv.get(key)) is not None:
            x = torch.cat([state.to(x.dtype), x], dim=-1)
        # a sequence shorter than the kernel width is padded with zeros in front
        x = pad(x, (max(0, width - x.shape[-1]), 0))
        self._conv[key], self._width[key] = x[..., -width:].clone() if self._is_sure else x, width
        return x

    def advance_convolutions_(self, count: Tensor) -> None:
        """Update the convolution states before these rows in place, by the first `count` [1] rows. With a count of 0
        the rows are not read: a captured pass that has not run has no numbers in them."""
        for key, x in self._conv.items():
            width = (state := self.before.conv[key]).shape[-1]
            history = torch.cat([state, x[..., width:]], -1)
            torch.index_select(history, -1, count + torch.arange(width, device=x.device), out=state)

    def known(self, n: int, rec: Mapping[Key, Tensor]) -> StateCheckpoint:
        """Return the state after the first n rows, with recurrent states `rec`."""
        conv = {key: self._newest(key, self.n_rows - n) for key in self._conv}
        assert len(conv) + len(rec) >= sum(1 for _ in self.before.tensors), "a layer did not run"
        return StateCheckpoint(self.before.at + n, conv, {key: _alone(t) for key, t in rec.items()})

    def _newest(self, key: Key, dropped: int) -> Tensor:
        """Return a copy of the end of the inputs without the last `dropped` rows, so that a chunk's buffer is freed."""
        history, width = self._conv[key], self._width[key]
        end = history.shape[-1] - dropped
        return pad(history[..., max(0, end - width) : end], (max(0, width - end), 0)).clone()


def _alone(t: Tensor) -> Tensor:
    """Return the tensor, cloned if it is a view, because a view keeps the buffer of a chunk in memory."""
    return t if t.untyped_storage().nbytes() == t.nbytes else t.clone()


@dataclass(slots=True, eq=False, weakref_slot=True)
class DeviceStates:
    """Recurrent states of a sequence at fixed addresses, which captured passes read and update in place."""

    states: StateCheckpoint
    holds: StateCheckpoint | None = None  # the checkpoint that they equal; None = a captured pass has updated them
    # a pass is updating them whose rows are not committed; if it fails, they are lost
    is_pending: bool = False
    synced_length: int = 0  # count of changes not made by a captured pass

    def load(self, known: StateCheckpoint) -> None:
        """Overwrite the states; what `known` lacks is zero, as at the start of a sequence."""
        for of, new in ((self.states.conv, known.conv), (self.states.rec, known.rec)):
            for key, t in of.items():
                t.copy_(new[key]) if key in new else t.zero_()
        self.holds, self.synced_length = known, self.synced_length + 1

    def ran(self) -> None:
        """Note that a captured pass is about to update the states."""
        self.holds, self.is_pending = None, True


class RecurrentStates(Companion):
    """Recurrent state of a sequence and its checkpoints. A model without such layers can rewind to any length.

    Once captured passes run, the state lies on the device, and `now` copies it where a checkpoint is needed.
    """

    def __init__(self, like: StateCheckpoint = NOTHING, most: int = 8) -> None:
        """`like`: shapes and data types of the model's states. `most`: number of checkpoints, sparser further back."""
        self._like, self._most, self._marks = like, most, list[StateCheckpoint]()  # checkpoints sorted by length
        # the state; of that on the device, which is ahead of any checkpoint, only its length
        self._now, self._is_ahead = NOTHING, False
        self._device: DeviceStates | None = None

    def __deepcopy__(self, memo: object) -> RecurrentStates:
        found = RecurrentStates(self._like, self._most)
        # `now` would copy a lost state, which would then pass for a known one
        found._now, found._is_ahead = (self._now, True) if self._is_lost else (self.now, False)
        found._marks = [*self._marks]
        return found

    @property
    def at(self) -> int:
        """Number of tokens before the state."""
        return self._now.at

    @property
    def now(self) -> StateCheckpoint:
        """The state after the newest token."""
        if self._is_ahead and self._device is not None:
            its, at = self._device.states, self._now.at
            conv, rec = ({key: t.clone() for key, t in of.items()} for of in (its.conv, its.rec))
            self.now = self._device.holds = StateCheckpoint(at, conv, rec)
        return self._now

    @now.setter
    def now(self, known: StateCheckpoint) -> None:
        self._now, self._is_ahead = known, False

    def on_device(self) -> DeviceStates:
        """Return the state at fixed addresses, up to date."""
        if (its := self._device) is None:
            conv, rec = ({k: torch.empty_like(t) for k, t in of.items()} for of in (self._like.conv, self._like.rec))
            its = self._device = DeviceStates(StateCheckpoint(0, conv, rec))
        if not self._is_ahead and its.holds is not self._now:
            its.load(self._now)
        return its

    def grew(self, n: int) -> None:
        """Count n tokens by which a captured pass has updated the state on the device."""
        assert self._device is not None, "no captured pass ran"
        before, self._device.is_pending = self.at, False
        self._now, self._is_ahead = StateCheckpoint(before + n), True
        if self.at // EVERY > before // EVERY:
            self.mark()

    @property
    def _is_lost(self) -> bool:
        return self._is_ahead and (self._device is None or self._device.is_pending)

    @property
    def _has_any(self) -> bool:
        return any(True for _ in self._like.tensors)

    def advance(self, known: StateCheckpoint) -> None:
        """Replace the state after more tokens were computed."""
        crosses = known.at // EVERY > self.at // EVERY
        self.now = known
        if crosses:
            self.mark()

    def skip_tokens(self, n: int) -> None:
        """Set the length to n tokens; tokens after the current state are skipped."""
        if self._has_any:
            self._now = replace(self._now, at=n)

    def checkpoint_positions(self, turns: Iterable[int]) -> list[int]:
        """Return the lengths among `turns` at which prefill must stop for a checkpoint."""
        return [turn for turn in turns if turn > self.at] if self._has_any else []

    def mark(self) -> None:
        """Save a checkpoint of the current state."""
        if not self.at or (self._marks and self._marks[-1].at == self.at):
            return
        self._marks.append(self.now)
        if len(self._marks) > self._most:
            del self._marks[self._least()]

    def _least(self) -> int:
        """Return the checkpoint to drop: its neighbours' gap is smallest relative to its distance from the end."""
        at = [0, *(mark.at for mark in self._marks), self.at]
        gaps = [(at[i + 2] - at[i]) / (at[-1] - at[i]) for i in range(len(self._marks))]
        return gaps.index(min(gaps))

    def reaches(self, n: int, of: int = 0) -> int:
        """Return the longest length up to n from which the sequence can continue."""
        if not self._has_any or (n >= self.at and not self._is_lost):
            return n
        return max((mark.at for mark in self._marks if mark.at <= n), default=0)

    def rewind(self, n: int, of: int = 0) -> None:
        """Rewind to n tokens, a result of `reaches`."""
        if n >= self.at and not self._is_lost:
            return self.mark()
        self._marks = [mark for mark in self._marks if mark.at <= n]
        self.now = self._marks[-1] if n else NOTHING
        assert self.at == n, "no checkpoint is at this position"

    def compress(self, point: Any) -> None:
        """Save a checkpoint at the end of a chunk of the prompt."""
        if point.phase != "answering":
            self.mark()

    def usage(self) -> list[Usage]:
        """Return the bytes of state and checkpoints by layer, each tensor counted once."""
        storages: dict[int, dict[int, int]] = {}
        for known in (self._now, *self._marks, *([] if self._device is None else [self._device.states])):
            for (layer, _), t in known.tensors:
                storages.setdefault(layer, {})[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return [Usage(layer, "state", 0, sum(of.values())) for layer, of in sorted(storages.items())]

    def snapshot(self) -> State:
        """Return a snapshot: checkpoints, then the current state."""
        knowns = [*(mark for mark in self._marks if mark.at != self.now.at), self.now] if self.now.at else []
        return {"states": {str(i): _tree(known) for i, known in enumerate(knowns)}}

    def restore(self, given: SnapshotReader) -> None:
        """Restore a snapshot, with at most as many checkpoints as allowed here. Raises SnapshotMismatch."""
        knowns = [self._known(part) for part in given.part("states").parts(given.n)]
        ends = [known.at for known in knowns]
        if ends != sorted({*ends}) or ends[-1:] != [given.n] * self._has_any:
            raise SnapshotMismatch("its recurrent states do not match its tokens")
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
