"""From a profile's keys to tiers: one dense tier, or a ladder of what `[kv]` packs and `[memory]` moves away."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from kvcli.errors import BadConfig
from kvcli.kv.dense import Dense
from kvcli.kv.ladder import Ladder, Rung
from kvcli.kv.room import Room
from kvcli.schema import size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcli.kv.recall_settings import Chosen
    from kvcli.kv.recall_source import Shelf
    from kvcli.kv.slots import Sight, Store
    from kvcli.schema import Kv, Memory

STEP = 64  # slots by which the top of a ladder grows: it is short, or has little room
EVERY = 64  # tokens between two boundaries of a ladder, where no policy wants them closer
POSITION = 4  # bytes


@dataclass(frozen=True)
class Plan:
    """What a store is made for."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of newly stored rows
    device: torch.device  # that computes
    kv: Kv
    memory: Memory
    recall: Chosen  # how the rungs below the top are read, or the one tier where there is no other
    sights: Sequence[Sight]  # by layer
    chunk: int  # tokens read in one pass
    held: int = 0  # bytes of the device that the store in use takes, which this one is to replace

    def store(self) -> Store:
        """The store; raises BadConfig or Shortage where what is asked for cannot be."""
        if self.device.type == "cpu":
            self._refuse_host()
        self._check_steps()
        if not is_ladder(self.kv, self.memory):
            dense = self._dense(self.device)
            return self.recall.over(dense, dense, self.sights)
        top, below = self._dense(self.device, STEP), list[Rung]()
        if self.is_packed:
            below.append(self._rung(self._packed(self.device), self._room.on_device, self.kv.group))
        if self._room.host_bytes:
            below.append(self._rung(self._host(), self._room.in_host, self.kv.group))
        if size_of(self.memory.disk):
            below.append(self._rung(self._disk(), self._room.on_disk))
        holds = self.kv.residual if self.is_packed else self._room.on_device
        ladder = Ladder(top, below, holds=holds, group=self.kv.group if below else 1, sinks=self.kv.sinks)
        return ladder if below else self.recall.over(ladder, top, self.sights)

    def _rung(self, tier: Shelf, holds: int | None, group: int = 1) -> Rung:
        return Rung(self.recall.below(tier, self.sights), holds, group)

    def _refuse_host(self) -> None:
        steps = [step for step in self.memory.ladder if step.startswith("memory.host")]
        if self._room.host_bytes or steps:
            asked = f"memory.ladder has {steps[0]}" if steps else f"memory.host = {self.memory.host}"
            raise BadConfig(
                f"{asked}, but keys and values are in host memory already",
                code="no_host_tier",
                lines=["the model runs on the CPU, where tiers are precisions: older tokens in fewer bits"],
                try_=["--set memory.host=0GiB", "--set kv.k_bits=8 --set kv.v_bits=8", "--set memory.disk=8GiB"],
            )

    def _check_steps(self) -> None:
        """Steps that pack must suit the model: better said now than when memory has run out."""
        for step in self.memory.ladder:
            key, _, value = step.partition("=")
            if key in ("kv.k_bits", "kv.v_bits"):
                bits: dict[str, Any] = {key.removeprefix("kv."): int(value)}
                replace(self, kv=replace(self.kv, **bits), n_layers=1)._packed(self.device)

    @property
    def is_packed(self) -> bool:
        return is_packed(self.kv)

    @cached_property
    def _room(self) -> Room:
        wide_, narrow_ = (self.n_layers * n for n in (self._wide, self._narrow))
        heads = len(self.recall.layers(self.sights)) * self.n_kv_heads
        index, near = (
            heads * of(self.head_dim, self.dtype.itemsize) for of in (self.recall.per_slot, self.recall.near)
        )
        return Room(
            self.memory,
            self.device,
            wide_,
            narrow_,
            round(index),
            round(index + (near if self.device.type != "cpu" else 0)),
            self._between,
            self.chunk,
            self.is_packed,
            self.held,
        )

    @property
    def _between(self) -> int:
        """Slots a head in the top before they can go anywhere: what is read or written between two boundaries too."""
        before = self.kv.sinks + self.kv.group + max(self.chunk, EVERY) + STEP
        return before + (self.kv.residual if self.is_packed else 0)

    @property
    def _wide(self) -> int:
        """Bytes of a slot of all heads, as the top stores it."""
        return wide(self.n_kv_heads, self.head_dim, self.dtype.itemsize)

    @property
    def _narrow(self) -> int:
        """The same below the top."""
        return narrow(self.kv, self.n_kv_heads, self.head_dim, self.dtype.itemsize)

    def _dense(self, device: torch.device, step: int = Dense.STEP) -> Dense:
        return Dense(self.n_layers, self.n_kv_heads, self.head_dim, self.dtype, device, step=step)

    def _packed(self, device: torch.device) -> Shelf:
        from kvcli.kv.packed import Packed

        return Packed(
            self.n_layers,
            self.n_kv_heads,
            self.head_dim,
            self.dtype,
            device,
            k_bits=self.kv.k_bits,
            v_bits=self.kv.v_bits,
            group=self.kv.group,
            rotate=self.kv.rotate,
        )

    def _host(self) -> Shelf:
        from kvcli.kv.host import Host

        cpu = torch.device("cpu")
        return Host(self._packed(cpu) if self.is_packed else self._dense(cpu), self.device)

    def _disk(self) -> Shelf:
        from kvcli.kv.disk import Disk
        from kvcli.kv.host import Host

        most, writes = size_of(self.memory.disk), size_of(self.memory.disk_writes)
        disk = Disk(self.n_layers, self.n_kv_heads, self.head_dim, self.dtype, most, writes)
        return disk if self.device.type == "cpu" else Host(disk, self.device)


def is_packed(kv: Kv) -> bool:
    return min(kv.k_bits, kv.v_bits) < 16


def is_ladder(kv: Kv, memory: Memory) -> bool:
    """Whether these keys ask for more than one dense tier that grows as it likes."""
    is_plain = kv.k_bits == kv.v_bits == 16 and memory.device == "auto"
    return not is_plain or memory.host == "auto" or size_of(memory.host) > 0 or size_of(memory.disk) > 0


def layer_bytes(kv: Kv, memory: Memory, heads: int, dim: int, number: int, slots: int, fresh: int) -> int:
    """What a layer of `heads` KV heads of `dim` takes in memory with so many slots a head, for planning.

    `number`: bytes of a number as it comes; `fresh`: slots that came since the last boundary.
    """
    step, top = (STEP if is_ladder(kv, memory) else Dense.STEP), in_top(kv, slots, fresh)
    return -(-top // step) * step * wide(heads, dim, number) + (slots - top) * narrow(kv, heads, dim, number)


def index_bytes(kv: Kv, per_slot: float, heads: int, slots: int, fresh: int) -> int:
    """What recall knows a layer by, for planning; layers that read everything have no index.

    `per_slot`: bytes beside a slot of one KV head, `profile.recall.per_slot(head_dim, number)`.
    """
    below = slots - in_top(kv, slots, fresh) if is_packed(kv) else slots
    return int(below * heads * per_slot)


def in_top(kv: Kv, slots: int, fresh: int) -> int:
    """Of so many slots a head, those in full precision."""
    return min(slots, kv.sinks + kv.residual + kv.group - 1 + fresh) if is_packed(kv) else slots


def wide(heads: int, dim: int, number: int) -> int:
    """Bytes of a dense slot of all heads."""
    return 2 * heads * dim * number + POSITION


def narrow(kv: Kv, heads: int, dim: int, number: int) -> int:
    """Bytes of a slot of all heads below the top: with 8 bits a scale of 16 bit each, with fewer two per group."""
    if not is_packed(kv):
        return wide(heads, dim, number)
    bits = 0.0
    for b, group in ((kv.k_bits, kv.group), (kv.v_bits, min(kv.group, dim))):
        bits += 8 * number if b == 16 else 8 + 16 / dim if b == 8 else b + 32 / group
    return int(heads * dim * bits / 8) + POSITION
