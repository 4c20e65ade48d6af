"""Native kernels: a C library, loaded once, with a table of functions for this kind of CPU.

Each output is one fixed chain of instructions over its own row's inputs. A row is therefore batch invariant, and does
not depend on threads. Bits differ between kinds of CPU. If no library was built, `native` is None and `why_not` gives
the reason: every op then runs on torch, which is not batch invariant.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
# Argument types of each function, in the order of its C declaration
_TAKES = {
    "linear": (_P, _P, _P, _P, _L, _L, _L, _I),
    "attend": (_P,),
    "page_scores": (_P,),
    "log_masses": (_P,),
    "unfused": (_P,),
    "linear_quantized": (_P, _P, _P, _P, _L, _L, _L, _P, _I),
    "rms_norm": (_P, _P, _P, _L),
    "mlp": (_P, _P, _P, _L),
    "layer_before": (_P, _P, _P, _P, _P, _P, _P, _L, _L),
    "layer_after": (_P, _P, _P, _P, _L),
    "gated_delta": (_P,),
    "causal_conv": (_P,),
    "numbers": (_P, _P, _L, _I, _I),
}


class Native:
    """Functions for one kind of CPU, as attributes; addresses are passed as integers, `None` = null."""

    linear: Callable[..., None]
    attend: Callable[..., None]
    page_scores: Callable[..., None]
    log_masses: Callable[..., None]
    unfused: Callable[..., None]
    linear_quantized: Callable[..., None]
    rms_norm: Callable[..., None]
    mlp: Callable[..., None]
    layer_before: Callable[..., None]
    layer_after: Callable[..., None]
    gated_delta: Callable[..., None]
    causal_conv: Callable[..., None]
    numbers: Callable[..., None]

    def __init__(self, library: ctypes.CDLL, level: str) -> None:
        self.level = level
        for name, takes in _TAKES.items():
            function = library[f"{name}__{level}"]
            function.argtypes, function.restype = takes, _made
            setattr(self, name, function)
        self._threads = library["pool_threads"]
        self._threads.argtypes, self._threads.restype = (_I,), None
        self._release = library["pool_release"]
        self._release.argtypes, self._release.restype = (), None

    def use_threads(self, n: int) -> None:
        """Set the number of threads per call, for the functions of all kinds of CPU."""
        self._threads(n)

    def release(self) -> None:
        """Free the work memory that layers keep between calls. It is as large as the longest pass so far needed."""
        self._release()


def _made(is_done: int) -> None:
    """Check a function's return value: 0 = its work memory could not be allocated."""
    if not is_done:
        raise MemoryError("no memory for what a native kernel works in")


def levels() -> tuple[str, ...]:
    """Return the supported kinds of CPU whose instructions this CPU has, the best last; empty without a library."""
    library = _library()
    return () if library is None else _place()[1][: library["cpu_level"]()]


@cache
def native(level: str | None = None) -> Native | None:
    """Return the functions for this CPU, or for a lesser `level` of `levels()`; None if `why_not` has a reason."""
    found = levels()
    if not found:
        return None
    assert level is None or level in found, f"{level} is none of {found}"
    library = _library()
    assert library is not None
    return Native(library, level or found[-1])


def why_not() -> str:
    """Return why there are no native kernels here; "" if there are."""
    path, written = _place()
    if not written:
        return "none are written for this kind of machine"
    if not path.exists():
        note = path.with_name("why_not.txt")  # written by the hook that built the wheel
        reason = note.read_text(encoding="utf-8").strip() if note.exists() else ""
        return "none were built when kvcli was installed" + (reason and f": {reason}")
    if _loaded() is None:
        return f"{path.name} cannot be loaded"
    if _library() is None:
        return f"{path.name} was compiled from other sources than these"
    return "" if levels() else "this CPU lacks AVX2"


def is_unbuilt() -> bool:
    """True if this is a checkout whose library for this machine is missing or out of date."""
    path, written = _place()
    return bool(written) and _library() is None and path.with_name("c").is_dir()


def remedy() -> str:
    """Return the command to type if `why_not` has a reason; "" if nothing would help."""
    if not _place()[1] or _library() is not None:
        return ""
    if is_unbuilt():
        return "python -m pip install ziglang; python -m kvcli.kernels.native.build"
    return "in a checkout, with a network: pip install --force-reinstall --no-deps --no-cache-dir ."


@cache
def _place() -> tuple[Path, tuple[str, ...]]:
    """Return the path of this machine's library, and the kinds of CPU that kernels exist for, if any."""
    from kvcli.kernels.native.build import HERE, LEVELS, NAMES, here  # imported late, as that file is also a program

    machine, system = here()
    return HERE / NAMES.get(system, "libkvcli.so"), tuple(LEVELS.get(machine, ()) if system else ())


@cache
def _library() -> ctypes.CDLL | None:
    """Return the library if it was compiled from the present sources in c/; an installation has no sources."""
    from kvcli.kernels.native.build import sources

    now = sources()
    return _loaded() if not now or hasattr(_loaded(), now) else None


@cache
def _loaded() -> ctypes.CDLL | None:
    path, written = _place()
    try:
        return ctypes.CDLL(str(path)) if written and path.exists() else None
    except OSError:  # built for another system, or damaged; `why_not` reports it
        return None
