"""Call pdfium with plain integers as pointers: a ctypes object per pointer costs more than the call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pypdfium2.raw as raw

Box = tuple[float, float, float, float]  # left, bottom, right, top


def handle(of: Any) -> int:
    """Return the integer pointer of a pdfium page or text page."""
    return ctypes.cast(of.raw, ctypes.c_void_p).value or 0


def plain(call: Any) -> Callable[..., Any]:
    """Return the function with integers in place of pointers."""
    kinds = [ctypes.c_void_p if hasattr(kind, "contents") else kind for kind in (call.restype, *call.argtypes)]
    return ctypes.CFUNCTYPE(*kinds)(ctypes.cast(call, ctypes.c_void_p).value or 0)


def told(call: Any, kind: Any, order: Sequence[int] = range(4)) -> Callable[..., Any]:
    """Return the function with its output parameters as its result: four numbers of type `kind`, or () on failure.

    Output i is written to index `order[i]`. All calls write to the same buffer, so only one thread at a time may call
    it.
    """
    function, answers = plain(call), (kind * 4)()
    at = [ctypes.addressof(answers) + i * ctypes.sizeof(kind) for i in order]
    return lambda *about: tuple(answers[:]) if function(*about, *at) else ()


ink = told(raw.FPDFText_GetCharBox, ctypes.c_double, (0, 2, 1, 3))  # ink box of a character of a text page
