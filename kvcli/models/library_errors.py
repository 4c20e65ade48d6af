"""Whose fault an exception is: that of the data a library was given, or ours, which stays an internal error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvcli.errors import KvcliError, is_out_of_memory


@contextmanager
def blame_files(say: Callable[[str], KvcliError]) -> Iterator[None]:
    """Around a call into a library with files that a stranger wrote: whatever it raises is said as their fault.

    `say` makes the error from one line that begins with the exception's class. Out of memory passes, and so does what
    was raised in a line of kvcli's own: that is a bug, whatever the files are.
    """
    try:
        yield
    except KvcliError:
        raise
    except BaseException as error:  # a panic of a library written in Rust is no Exception
        if not _is_foreign(error):
            raise
        raise say(f"{type(error).__name__}: {_first_line(error)}".rstrip(": ")) from error


def _is_foreign(error: BaseException) -> bool:
    rusts = type(error) is Exception or type(error).__name__ == "PanicException"  # which has no line of its own
    if is_out_of_memory(error) or not (isinstance(error, Exception) or rusts):
        return False
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return rusts or (at is not None and not str(at.tb_frame.f_globals.get("__name__")).startswith("kvcli"))


def _first_line(error: BaseException) -> str:
    """The first line with content; one that ends with a colon only announces the next."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if not line.endswith(":")), lines[0] if lines else "")[:300]
