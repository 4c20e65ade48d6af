"""A bus to a device that is not there: copies land when they are waited for, and what is used too early is an error.

A copy may land at any moment between the two waits around it. This one does so at the last: before it has, its bytes
are NaN, and who reads them without a wait gets wrong numbers. A buffer must not be copied into while what reads it may
still be under way: every operation of torch that touches one is noted, and the copy has to come behind a mark that
comes behind it. Copies that leave host memory hold it: who changes it meanwhile is found out when they land.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(eq=False)
class Mark:
    lane: Lane
    at: int  # steps of its lane

    def synchronize(self) -> None:
        self.lane.bus.reach(self)


@dataclass(eq=False)
class Flight:
    """A copy under way."""

    to: Tensor
    of: Tensor
    was: Tensor  # what there was to copy
    at: int  # step of its lane
    worked: int  # products computed when it took off


@dataclass(eq=False)
class Lane:
    bus: FakeBus
    steps: int = 0
    seen: dict[int, int] = field(default_factory=dict)  # by lane: steps of it that this one comes behind
    flights: list[Flight] = field(default_factory=list)

    def record(self) -> Mark:
        return Mark(self, self.steps)

    def wait(self, mark: Mark) -> None:
        self.seen[id(mark.lane)] = max(self.seen.get(id(mark.lane), 0), mark.at)
        if self is self.bus.work:
            self.bus.reach(mark)

    def copy(self, to: Tensor, of: Tensor) -> None:
        bus = self.bus
        assert to.shape == of.shape, "of one shape"
        assert to.dtype == of.dtype, "of one type"
        assert to.is_contiguous(), "a copy of pieces waits"
        assert of.is_contiguous(), "a copy of pieces waits"
        with bus.aside():
            last = bus.touched.get(_storage(to), 0)
            assert self is bus.work or self.seen.get(id(bus.work), 0) >= last, "it may still be read"
            others = [f for lane in (bus.work, bus.copies) if lane is not self for f in lane.flights]
            assert not any(_meet(f.to, to) for f in others), "it is in flight"
            was = of.clone()
            if self is bus.work:  # in order with what reads it there; its source is still held
                to.copy_(of)
            elif to.is_floating_point():
                to.fill_(torch.nan)
            elif to.dtype == torch.uint8:
                to.fill_(255)
        self.steps += 1
        self.flights.append(Flight(to, of, was, self.steps, bus.products))
        bus.copied += to.nbytes


class FakeBus(TorchDispatchMode):
    """Use it as a context around what runs on the device. `copied`, `hidden`: bytes, and those of them that flew while
    something was computed."""

    def __init__(self, refuses: str = "") -> None:
        """`refuses`: why it pins nothing."""
        super().__init__()
        self.device = torch.device("cpu")
        self.work, self.copies = Lane(self), Lane(self)
        self.touched: dict[int, int] = {}  # by buffer: step of the lane that computes
        self.copied = self.hidden = self.products = 0
        self.pinned: dict[int, int] = {}  # bytes by address
        self.over: list[tuple[int, object]] = []  # what is to be unpinned
        self._refuses = refuses
        self._is_aside = False

    def __deepcopy__(self, memo: dict[int, object]) -> FakeBus:
        return self

    @property
    def flights(self) -> list[Flight]:
        return [*self.work.flights, *self.copies.flights]

    def staging(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def pin(self, t: Tensor) -> str:
        self.let_go()
        if not self._refuses:
            self.pinned[t.data_ptr()] = t.nbytes
        return self._refuses

    def unpin(self, address: int, mapping: object) -> None:
        self.over.append((address, mapping))

    def let_go(self) -> None:
        over, self.over = self.over, []
        for address, _ in over:
            self._unpin(address)

    def _unpin(self, address: int) -> None:
        size = self.pinned.pop(address)
        held = [f for f in self.flights if address <= f.of.data_ptr() < address + size]
        assert not held, "what is unpinned is being copied"

    def reach(self, mark: Mark) -> None:
        """What comes before it lands."""
        lane = mark.lane
        with self.aside():
            for flight in [f for f in lane.flights if f.at <= mark.at]:
                lane.flights.remove(flight)
                same = flight.of.view(torch.uint8) == flight.was.view(torch.uint8)
                assert bool(same.all()), "host memory changed while it was copied"
                if lane is self.copies:
                    with torch.inference_mode(flight.to.is_inference()):  # as where it set out
                        flight.to.copy_(flight.was)
                    self.hidden += flight.to.nbytes * (self.products > flight.worked)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        used = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.device.type == "cpu"}
        is_view = not name.endswith("_") and any(_storage(t) in used for t in tree_leaves(out) if isinstance(t, Tensor))
        if not self._is_aside and not is_view:  # which reads nothing
            self.work.steps += 1
            self.products += "mm" in name or "attention" in name
            self.touched |= dict.fromkeys(used, self.work.steps)
        return out

    @contextmanager
    def aside(self) -> Iterator[None]:
        before, self._is_aside = self._is_aside, True
        try:
            yield
        finally:
            self._is_aside = before


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _meet(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
