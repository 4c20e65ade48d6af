"""A device that records work and does it again, on the CPU, with the rules of CUDA graphs: operations alone come back.

What is recorded is a list of operations on the tensors that they had. A replay runs them and puts what each gives where
the first one lay: no Python, no number of the host and no address changes. Asking for the host is refused while
recording, and copies of the host's arrive when it waits, not before. What is recorded later in one pool may lie where
an earlier one computes: a replay of that spoils it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")

ASKS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique_dim", "_unique2", "item"}


def tensors(of: Any) -> list[Tensor]:
    return [t for t in tree_leaves(of) if isinstance(t, Tensor)]


def storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


class Tape(TorchDispatchMode):
    """Records."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, op.overloadpacket.__name__
        if name in ASKS or (name.startswith("lift") and args[0].dim()):  # a scalar goes along with a launch
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        if name.startswith("index") and any(t.dtype == torch.bool for t in tensors(args[1])):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name} by flags")
        return self.run(op, args, kwargs, is_empty=name.startswith("empty") or name == "new_empty")

    def run(self, work: Callable[..., Any], args: Any, kwargs: Any, *, is_empty: bool = False) -> Any:
        """And note it down."""
        made = work(*args, **kwargs)
        known = {storage(t) for t in tensors([args, kwargs])}
        new = [(i, t) for i, t in enumerate(tensors(made)) if storage(t) not in known]
        self.done.append((None if is_empty else work, args, kwargs, new))
        return made


class FakeGraphs:
    """See above. `replays` and `waits` count."""

    def __init__(self) -> None:
        self.replays = self.waits = self.recorded = 0
        self.tape: Tape | None = None  # while recording
        self.is_inside = False  # of work that is recorded or replayed: what it allocates is the pool's
        self.of_host: set[int] = set()  # storages that are no memory of the device
        self.copies: list[tuple[Tensor, Tensor]] = []  # to the host, under way: a wait for one is one for those before
        self.pool: list[list[Tensor]] = []  # what each that was recorded here computes with

    def apart(self) -> Any:
        return Apart(self)

    def record(self, work: Callable[[], T], pool: list[list[Tensor]] | None = None) -> tuple[T, Callable[[], None]]:
        self.is_inside = True
        try:
            work()  # warms up
            with Tape() as self.tape:
                made = work()
        finally:
            self.is_inside = False
        tape, self.tape = self.tape, None
        self.recorded += 1
        pool = self.pool if pool is None else pool
        nth = len(pool) + 1
        pool.append([t for *_, new in tape.done for _, t in new])
        for t in pool[-1]:  # a recorded pass has not run
            poison(t)

        def replay() -> None:
            self.replays += 1
            self.is_inside = True
            with torch.inference_mode():
                for work, args, kwargs, new in tape.done:
                    again = tensors(work(*args, **kwargs)) if work is not None else ()
                    for i, t in new:
                        t.copy_(again[i]) if work is not None else poison(t)
                for t in (t for later in pool[nth:] for t in later):
                    poison(t)
            self.is_inside = False

        return made, replay

    def launch(self, kernel: Callable[..., T], args: Any, kwargs: Any) -> T:
        """A kernel that is no operation of torch's."""
        return kernel(*args, **kwargs) if self.tape is None else self.tape.run(kernel, args, kwargs)

    def host(self, n: int, dtype: torch.dtype) -> Tensor:
        found = torch.zeros(n, dtype=dtype)
        self.of_host.add(storage(found))
        return found

    def send(self, here: Tensor, there: Tensor) -> None:
        assert storage(here) in self.of_host, "a copy from pageable memory waits"
        there.copy_(here)

    def fetch(self, there: Tensor, here: Tensor) -> Callable[[], None]:
        assert storage(here) in self.of_host, "a copy to pageable memory waits"
        poison(here)
        self.is_inside = True
        now = there.clone()
        self.is_inside = False
        self.copies.append(one := (here, now))

        def wait() -> None:
            self.waits += any(one is left for left in self.copies)  # what has arrived is there
            while any(one is left for left in self.copies):
                first, of_first = self.copies.pop(0)
                first.copy_(of_first)

        return wait


class Apart:
    """The same device, with a pool of its own."""

    def __init__(self, device: FakeGraphs) -> None:
        self._device, self._pool = device, list[list[Tensor]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        return self._device.record(work, self._pool)


def poison(t: Tensor) -> None:
    """Numbers that nobody may have used."""
    with torch.inference_mode():
        t.fill_(torch.nan if t.is_floating_point() else False if t.dtype == torch.bool else 3)
