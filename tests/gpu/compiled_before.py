"""Compile the kernels for a card that is not here: `python -m tests.gpu.compiled_before CAPABILITY PROCESSORS [OP..]`.

For an H100 or H200 that is `90 132`. Fills `.gpu-cache/` at the root of the checkout, which `python -m tests.gpu` has
Triton use where it is carried along; Triton takes what it finds there by the source, the options, its own release and
that of its assembler, so install the same release here. Calls are the real ones, over tensors without memory and a
driver that launches nothing. What cannot be called so is said, and compiled at its first use there.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from tests.gpu.__main__ import CACHE, ROOT
from tests.gpu.stage import why

ROWS = (1, 32)  # for tiles of 16 rows and of 32
# outputs and inputs of the products of `models.eight` and `models.llama`
SHAPES = (
    *((4096, 4096), (1024, 4096), (14_336, 4096), (4096, 14_336)),
    *((2048, 2048), (512, 2048), (8192, 2048), (2048, 8192), (128_256, 2048), (128_256, 4096)),
)


class Driver:
    """What Triton asks of a driver before it launches."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda")


class Indexed(TorchFunctionMode):
    """Indexing as operations of views, since Python's own asks for the card; a list of rows is the first so many."""

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if f is Tensor.__setitem__:
            return None  # there are no numbers to change
        if f is Tensor.contiguous:
            return args[0].clone(memory_format=torch.contiguous_format)
        if f is not Tensor.__getitem__:
            return f(*args, **(kwargs or {}))
        found, at = args[0], 0
        for one in args[1] if isinstance(args[1], tuple) else (args[1],):
            if one is None:
                found = found.unsqueeze(at)
            elif isinstance(one, int):
                found, at = found.select(at, one), at - 1
            elif one is Ellipsis:
                at = found.dim() - (len(args[1]) - args[1].index(one))
            elif isinstance(one, list):
                found = found.narrow(at, 0, len(one)).clone()
            elif isinstance(one, Tensor):
                found = torch.ops.aten.index.Tensor(found, [None] * at + [one])
            else:
                found = torch.ops.aten.slice.Tensor(found, at, one.start, one.stop, one.step or 1)
            at += 1
        return found


def _without_a_generator(make: Callable[..., Tensor], *args: Any, generator: object = None, **more: Any) -> Tensor:
    return make(*args, **more)


def compile_only(capability: int, processors: int) -> set[str]:
    """Have every call of a kernel in this process compile it and no more -> those compiled, as they come."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    made: set[str] = set()
    driver.set_active(Driver(capability))
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        found = run(self, *args, grid=grid, warmup=True, **more)
        made.add(f"{self.__name__} {found.hash}")
        return found

    JITFunction.run = compiled
    card = SimpleNamespace(multi_processor_count=processors, major=capability // 10, minor=capability % 10)
    Tensor.pin_memory = lambda self: self  # type: ignore[assignment,method-assign]
    for name in ("rand", "randn", "randint"):  # without a generator, which no card is here for
        setattr(torch, name, partial(_without_a_generator, getattr(torch, name)))
    torch.cuda.get_device_properties = lambda device=None: card  # type: ignore[assignment]
    return made


def calls() -> Iterator[tuple[str, Callable[[int], object]]]:
    """By name, what calls it with so many rows."""
    from tests.gpu.ops import OURS, Size

    g: Any = SimpleNamespace(device=torch.device("cuda"))
    for name, make in OURS.items():
        yield name, lambda n, make=make: make(Size(), g).call(range(n))  # type: ignore[misc]
    for kind in ("plain", "int4"):
        for outputs, inputs in SHAPES:
            size = Size(inputs=inputs, outputs=outputs)
            product = OURS[f"linear_skinny, {kind}"]
            yield (
                f"linear_skinny, {kind}, {outputs} x {inputs}",
                lambda n, make=product, size=size: make(size, g).call(range(n)),  # type: ignore[misc]
            )


def main(capability: str, processors: str, *ops: str) -> int:
    os.environ["TRITON_CACHE_DIR"] = str(CACHE)
    warnings.simplefilter("ignore")
    made, faults = compile_only(int(capability), int(processors)), 0
    for file in sorted((ROOT / "kernels").glob("*/fused.py")):  # tables of their own have numbers
        import_module(f"kvcli.kernels.{file.parent.name}.fused")
    for name, call in calls():
        if ops and name.partition(",")[0] not in ops:
            continue
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), Indexed():
                for n in ROWS:
                    call(n)
        except Exception as error:
            faults += 1
            print(f"{name}: compiled at its first use there: {why(error)}")
    import triton

    print(f"{len(made)} kernels for {capability} by triton {triton.__version__} in {CACHE}; {faults} ops not called")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
