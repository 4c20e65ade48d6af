"""Layout of a dense layer whose heads all have the same slots: one buffer with one row of positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import BLOCK, NewRows, StoredKV, attend_stored_and_new, serves
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import AttentionParams, LayerShape, Slots, attend_new_only, picked, window_start, zeros_on_demand
from kvcli.kv.snapshot import SnapshotReader, State
from kvcli.kv.tiers.device_tables import DeviceLayer, grow_size, stays


@dataclass(slots=True)
class UniformLayer:
    """Keys and values of all heads. Attention also reads the spare capacity at the end, which is therefore finite.

    The buffer grows in steps of `step` slots. Positions are on the host for any device, so that finding the start of a
    sliding window needs no device synchronization.
    """

    k: Tensor  # [K, cap, D]
    v: Tensor  # [K, cap, D]; if values equal keys (MLA), `k` itself
    pos: Tensor  # [1, cap] int32 on the CPU, -1 = empty
    step: int  # slots
    length: int = 0  # slots of each head
    highest: int = -1  # position
    ordered: bool = True  # positions increase with the slot index
    # evicted slots before the first; the other slots keep their place in the blocks of batch-invariant kernels
    gone: int = 0
    slides: bool = False  # the layer has a sliding window, so its first slot may not be the first token
    noted: int = 0  # slots whose positions are in `pos`; later positions are consecutive up to `highest`
    lies: StoredKV | None = None  # last result of `run`: views of the tensors, None after they are replaced
    lying: DeviceLayer | None = None  # last result of `device_tables`
    there: Tensor | None = None  # [cap] positions on the device of the keys, if a window was read
    sent: int = 0  # slots whose positions are in `there`

    @staticmethod
    def of(slots: Slots, step: int, slides: bool = False) -> UniformLayer:
        """Build a layer from slots that are the same in all heads. It keeps their keys and values."""
        pos = slots.pos[:1].to("cpu", torch.int32, copy=True)
        k, v = slots.each(Tensor.contiguous)
        return UniformLayer(
            k=k, v=v, pos=pos, step=step, length=slots.n_slots, highest=int(pos.max()) if slots.n_slots else -1,
            ordered=rises(pos[0]), slides=slides, noted=slots.n_slots,
        )  # fmt: skip

    @staticmethod
    def made(given: SnapshotReader, shape: LayerShape, like: Tensor, step: int, slides: bool = False) -> UniformLayer:
        """Restore a layer from a snapshot; `like` has the data type and device."""
        pos, heads = given.positions("pos", None), shape.n_kv_heads
        k = given.tensor("k", like.dtype, heads, len(pos), shape.k_dim).to(like.device)
        v = k if shape.rank else given.tensor("v", like.dtype, heads, len(pos), shape.v_dim).to(like.device)
        slab = UniformLayer.of(Slots(k, v, pos.expand(heads, -1)), step, slides)
        slab.gone = given.number("gone", given.n) // BLOCK * BLOCK
        return slab

    def state(self) -> State:
        """Return a snapshot."""
        s = self.slots()
        return {"k": s.k, **({} if s.v is s.k else {"v": s.v}), "pos": s.pos[0], "gone": self.gone}

    @property
    def total(self) -> int:
        """Slots of all heads."""
        return self.length * self.k.shape[0]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the layer."""
        both = [self.k] if self.v is self.k else [self.k, self.v]
        return [*both, self.pos, *([] if self.there is None else [self.there])]

    @property
    def at(self) -> np.ndarray:
        """Positions [S] of the stored slots."""
        found: np.ndarray = self._pos.numpy()[0, : self.length]
        return found

    @property
    def _pos(self) -> Tensor:
        """`pos` with all positions written. During decoding it is read only at compression points."""
        self._note()
        return self.pos

    def _note(self) -> None:
        if n := self.length - self.noted:
            end = self.highest + 1
            self.pos.numpy()[0, self.noted : self.length] = np.arange(end - n, end)
            self.noted = self.length

    def attend(
        self, q: Tensor, params: AttentionParams, rows: Sequence[int], own: NewRows | None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions `rows` [N] over slots and new KV."""
        if not serves(q, self.v):
            return [*self._apart(q, params, rows), *attend_new_only(q, params, own)]
        if not self.length and own is None:
            return []
        if params.window is not None:
            self._note()
        run = self.run() if self.length else None
        if run is not None and params.window is not None and q.device.type != "cpu":
            run.pos = self.beside()
        window, softcap, is_prompt = params.window, params.softcap, params.is_prompt
        return [
            attend_stored_and_new(q, run, own, rows, params.scale, window=window, softcap=softcap, is_prompt=is_prompt)
        ]

    def beside(self) -> Tensor:
        """Return the positions [cap] of all slots on the device of the keys. Consecutive new positions, as in decoding,
        are computed there, without a copy or synchronization."""
        if self.there is None:
            self.there, self.sent = torch.full_like(self.pos[0], -1, device=self.k.device), 0
        if new := self.length - self.sent:
            at, place = self.at[self.sent :], self.there[self.sent : self.length]
            if at[-1] - at[0] == new - 1 and self.ordered:
                torch.arange(int(at[0]), int(at[-1]) + 1, out=place)
            else:
                place.copy_(torch.from_numpy(at))
            self.sent = self.length
        return self.there

    def run(self) -> StoredKV:
        """Return the stored slots in place, valid until the buffer changes."""
        if self.lies is None:
            n_kv, cap, _ = self.k.shape
            starts = range(0, n_kv * cap, cap)
            self.lies = StoredKV(self.k.flatten(0, 1), self.v.flatten(0, 1), self.pos[0], starts, [], [0] * n_kv)
        self.lies.lengths, self.lies.gone = [self.length] * len(self.lies.starts), self.gone
        return self.lies

    def _apart(self, q: Tensor, params: AttentionParams, rows: Sequence[int]) -> list[PartialAttention]:
        """Return partial attention over the stored slots alone."""
        if self.length == 0:
            return []
        start, mask = 0, None
        if params.window is not None:
            start, mask = seen(self.at, rows, params.window, self.ordered, q.device)
        if start == 0 and mask is None:  # the whole buffer
            return [attend(q, self.k, self.v, params.scale, softcap=params.softcap, length=self.length)]
        k, v = self.k[:, start : self.length], self.v[:, start : self.length]
        return [attend(q, k, v, params.scale, softcap=params.softcap, mask=mask)]

    def append(self, k: Tensor, v: Tensor, start: int) -> None:
        """Store k, v [K, M, D] at positions from `start` on, M > 0."""
        if self.slides and not self.length:  # as if all earlier tokens had been stored and evicted
            self.gone = start // BLOCK * BLOCK
        self._put(k, v)
        self._longer(k.shape[1], start)

    def _longer(self, n: int, start: int) -> None:
        """Count n slots that are already written, at positions from `start` on."""
        if start == self.highest + 1:
            self.length += n
            self.highest += n
        else:
            self._note()
            self.length += n
            self._place(np.arange(start, start + n))

    def _place(self, pos: np.ndarray) -> None:
        """Write the positions of the newest slots."""
        self.ordered &= int(pos[0]) > self.highest
        self.highest = max(self.highest, int(pos.max()))
        self.noted = self.length
        self.at[self.length - len(pos) :] = pos

    def _put(self, k: Tensor, v: Tensor) -> None:
        first, end = self.length, self.length + k.shape[1]
        self.reserve(end)
        self.k[:, first:end] = k
        if self.v is not self.k:
            self.v[:, first:end] = v

    def device_tables(self, rows: int, more: int = 0) -> DeviceLayer:
        """Return device tables of the slots, with capacity for `rows` more (see `grow_size`)."""
        if self.lying is None or self.length + rows > self.k.shape[1]:
            self.reserve(self.length + grow_size(self.length, rows, more, self.step))
        if self.lying is None:
            n_kv, cap, _ = self.k.shape
            starts = range(0, n_kv * cap, cap)
            self.lying = DeviceLayer.of(
                self.k.flatten(0, 1), self.v.flatten(0, 1), self.beside(), starts, [0] * n_kv, cap
            )
        self.lying.tell([self.length] * len(self.k), self.sent < self.length)
        self.beside()
        return self.lying

    def grew(self, n: int, start: int) -> None:
        """Count n slots that a captured pass stored, by the tables of `device_tables`, at positions from `start` on."""
        self._longer(n, start)
        self.sent = self.length

    def refill(self, slots: Slots) -> bool:
        """Replace all slots in place by a copy of `slots`, so that captured passes stay valid. Returns False, changing
        nothing, if no pass was captured over the layer or `slots` does not fit its layout."""
        was, n = self.length, slots.n_slots
        if self.lying is None or not stays(n, self.k.shape[1], self.step) or not agree(slots):
            return False
        pos = slots.pos[0].cpu()
        self.k[:, :n], self.v[:, :n] = slots.k, slots.v
        self.v[:, n:was] = 0  # because attention reads spare capacity, as in `crop`
        self.length, self.ordered, self.highest, self.gone, self.sent = n, True, -1, 0, 0
        self._place(pos.numpy())
        self.ordered = rises(pos)
        return True

    def take(self, slots: Slots) -> bool:
        """Store slots that are the same in all heads. Returns False and stores nothing if they differ."""
        if not agree(slots):
            return False
        pos = slots.pos[0].cpu()
        self._put(slots.k, slots.v)
        self._note()
        self.length += len(pos)
        self._place(pos.numpy())
        self.ordered &= rises(pos)
        return True

    def slots(self) -> Slots:
        """Return the stored slots as views."""
        pos = self._pos[:, : self.length].to(self.k.device).expand(self.k.shape[0], -1)
        return Slots(*Slots(self.k, self.v, pos).each(lambda t: t[:, : self.length]), pos)

    def newest(self, n: int) -> Slots:
        """Return the last n slots as views."""
        s, first = self.slots(), max(0, self.length - n)
        return Slots(*s.each(lambda t: t[:, first:]), s.pos[:, first:])

    def positions(self) -> Tensor:
        """Return pos [K, S] as a view."""
        return self.slots().pos

    def gather(self, index: Tensor) -> Slots:
        """Return a copy of slots index [K, M]."""
        return picked(self.slots(), index)

    def head(self, head: int, n: int) -> Slots:
        """Return the first n slots of one head as views."""
        s = self.slots()
        return Slots(*s.each(lambda t: t[head : head + 1, :n]), s.pos[head : head + 1, :n])

    def crop(self, n: int) -> bool:
        """Remove positions n and later in place if slots are in order. Otherwise return False and change nothing."""
        if not self.ordered:
            return False
        was, self.length = self.length, int(np.searchsorted(self.at, n))
        self.noted, self.sent = self.length, min(self.sent, self.length)
        # attention reads spare capacity, in which NaN or infinity of removed slots would remain
        self.v[:, self.length : was] = 0
        self.highest = int(self.at[-1]) if self.length else -1
        self.gone *= self.length > 0
        return True

    def evict_below(self, low: int) -> bool:
        """Evict whole blocks of slots at positions below `low`, hidden from all later rows, if slots are in order.
        Otherwise return False and change nothing."""
        if self.ordered and (n := int(np.searchsorted(self.at, low)) // BLOCK * BLOCK):
            self._lay(n, self.length - n)
            self.gone += n
        return self.ordered

    def reserve(self, n: int) -> None:
        """Allocate capacity for n slots per head."""
        if n > self.k.shape[1]:
            self._lay(0, n)

    def _lay(self, first: int, room: int) -> None:
        """Move the slots from `first` on to a new buffer with capacity for `room` slots."""
        cap, n = -(-room // self.step) * self.step, self.length - first

        def moved(t: Tensor) -> Tensor:
            shape = t.shape[0], cap, t.shape[2]
            # memory that was in use before has its pages, which a growing layer gets back
            new = t.new_zeros(shape) if n else zeros_on_demand(t, *shape)
            new[:, :n] = t[:, first : self.length]
            return new

        k, v = Slots(self.k, self.v, self.pos).each(moved)
        pos = self.pos.new_full((1, cap), -1)
        pos[:, :n] = self._pos[:, first : self.length]
        # assigned together, because an allocation above may have failed
        self.k, self.v, self.pos, self.lies, self.lying, self.there = k, v, pos, None, None, None
        self.length = self.noted = n


def agree(slots: Slots) -> bool:
    """True if all heads have the same slots in the same order, and none is empty."""
    return bool((slots.pos == slots.pos[:1]).all() and (slots.pos >= 0).all())


def rises(pos: Tensor) -> bool:
    """True if positions [S] increase."""
    return bool((pos[1:] > pos[:-1]).all())


def seen(
    stored: np.ndarray, rows: Sequence[int], window: int, ordered: bool, device: torch.device
) -> tuple[int, Tensor | None]:
    """Return the first of the slots at positions `stored` [S] in the windows of rows at positions [N], and the mask
    [N, S - start] if the windows of the rows start at different slots.

    Reading only the window makes sliding-window layers cheap at long context; slots out of order are all read.
    """
    first, last = min(rows) - window + 1, max(rows) - window + 1  # first positions in the windows of the rows
    start = int(np.searchsorted(stored, first)) if ordered else 0
    if ordered and last <= max(first, int(stored[start]) if start < len(stored) else first):
        return start, None
    return start, torch.from_numpy(stored[start:]).to(device) > window_start(rows, window, device)
