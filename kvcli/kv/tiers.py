"""From a profile's keys to tiers: one dense tier, or a ladder of what `[kv]` packs and `[memory]` moves away."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import psutil
import torch

from kvcli.errors import BadConfig
from kvcli.kv.dense import Dense
from kvcli.kv.ladder import Ladder, Rung
from kvcli.kv.room import EVERY, Room
from kvcli.machine import kept_free
from kvcli.schema import size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcli.kv.recall_settings import Chosen
    from kvcli.kv.recall_source import Shelf
    from kvcli.kv.slots import Sight, Store
    from kvcli.schema import Kv, Memory

STEP = 64  # slots by which the top of a ladder grows: it is short, or has little room
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
    chunk: int  # tokens read in one pass, at most
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
            below.append(self._rung(self._packed(self.device), self.room.on_device, self.kv.group))
        if self.room.host_bytes:
            below.append(self._rung(self._host(), self.room.in_host, self.kv.group))
        if size_of(self.memory.disk):
            below.append(self._rung(self._disk(), self.room.on_disk))
        holds = self.kv.residual if self.is_packed else self.room.on_device
        ladder = Ladder(top, below, holds=holds, group=self.kv.group if below else 1, sinks=self.kv.sinks)
        return ladder if below else self.recall.over(ladder, top, self.sights)

    def _rung(self, tier: Shelf, holds: int | None, group: int = 1) -> Rung:
        return Rung(self.recall.below(tier, self.sights), holds, group)

    def _refuse_host(self) -> None:
        steps = [step for step in self.memory.ladder if step.startswith("memory.host")]
        if steps or (self.memory.host != "auto" and size_of(self.memory.host)):
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
    def room(self) -> Room:
        """What these keys and the machine leave to keys and values."""
        is_gpu, free = self.device.type == "cuda", int(psutil.virtual_memory().available)
        behind = free - kept_free(free) if is_gpu else 0
        if is_gpu:
            free = int(torch.cuda.mem_get_info(self.device)[0])
        free += self.held
        return room(
            self.kv,
            self.memory,
            self.recall,
            self.sights,
            (self.n_kv_heads, self.head_dim, self.dtype.itemsize),
            chunk=self.chunk,
            is_cpu=self.device.type == "cpu",
            free=free - kept_free(free),
            host=behind,
        )

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


def room(
    kv: Kv,
    memory: Memory,
    recall: Chosen,
    sights: Sequence[Sight],
    of_slot: tuple[int, int, int],
    *,
    chunk: int,
    is_cpu: bool,
    free: int,
    host: int,
) -> Room:
    """Room for keys and values under these tables.

    `of_slot`: KV heads of a layer, numbers of one, bytes of a number as it comes. `chunk`: tokens read in one pass, at
    most. `free`, `host`: bytes where no size is given; a CPU has no memory beside its own.
    """
    heads, dim, number = of_slot
    indexed = len(recall.layers(sights)) * heads
    index, near = indexed * recall.per_slot(dim, number), indexed * recall.near(dim, number)
    newest, packs = max(chunk, EVERY), is_packed(kv)
    always = kv.sinks + (kv.residual if packs else 0)
    return Room(
        memory=replace(memory, host="auto") if is_cpu else memory,
        layers=len(sights),
        wide=len(sights) * wide(*of_slot),
        narrow=len(sights) * narrow(kv, *of_slot),
        index=round(index),
        far=round(index if is_cpu else index + near),
        between=always + kv.group + newest + STEP,
        newest=newest,
        always=always,
        is_packed=packs,
        free=free,
        host=0 if is_cpu else host,
    )


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
