"""Errors raised by libraries, split into faults of the input files and internal errors of kvcli."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvcli.errors import KvcliError, is_out_of_memory


@contextmanager
def blame_files(say: Callable[[str], KvcliError]) -> Iterator[None]:
    """Convert exceptions of a library call on untrusted files into an error about the files.

    `say` makes the error from one line that begins with the exception's class. Out of memory is re-raised, and so is an
    exception raised in kvcli's own code, because that is a bug whatever the files are.
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
    rusts = type(error) is Exception or type(error).__name__ == "PanicException"  # has no traceback line of the library
    if is_out_of_memory(error) or not (isinstance(error, Exception) or rusts):
        return False
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return rusts or (at is not None and not str(at.tb_frame.f_globals.get("__name__")).startswith("kvcli"))


def _first_line(error: BaseException) -> str:
    """First non-empty line of the message; a line that ends with a colon only announces the next."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if not line.endswith(":")), lines[0] if lines else "")[:300]
