"""Functions of pdfium on plain numbers: an object for every pointer costs more than the call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pypdfium2.raw as raw

Box = tuple[float, float, float, float]  # left, bottom, right, top


def handle(of: Any) -> int:
    """The number by which pdfium knows a page or the text of one."""
    return ctypes.cast(of.raw, ctypes.c_void_p).value or 0


def plain(call: Any) -> Callable[..., Any]:
    """The function with a number for every pointer."""
    kinds = [ctypes.c_void_p if hasattr(kind, "contents") else kind for kind in (call.restype, *call.argtypes)]
    return ctypes.CFUNCTYPE(*kinds)(ctypes.cast(call, ctypes.c_void_p).value or 0)


def told(call: Any, kind: Any, order: Sequence[int] = range(4)) -> Callable[..., Any]:
    """The function with its answers returned: four numbers of that kind, the first told at place `order[0]`, or none.

    They are told into the same place each time: one thread at a time may ask.
    """
    function, answers = plain(call), (kind * 4)()
    at = [ctypes.addressof(answers) + i * ctypes.sizeof(kind) for i in order]
    return lambda *about: tuple(answers[:]) if function(*about, *at) else ()


ink = told(raw.FPDFText_GetCharBox, ctypes.c_double, (0, 2, 1, 3))  # what a letter of a text blackens
