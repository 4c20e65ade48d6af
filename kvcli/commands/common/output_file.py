"""The output file of `-o`. A file that cannot be written is refused before the work starts."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvcli.errors import BadInput, UsageError, writing
from kvcli.files import try_output

if TYPE_CHECKING:
    from kvcli.environment import Environment

Form = TypeVar("Form", bound=str)


def output_file(world: Environment, typed: str, endings: Mapping[str, Form], form: Form | None) -> tuple[Path, Form]:
    """Return the file and its format: that of --format, else that of the file's suffix."""
    file = world.cwd / expanduser(typed)
    form = form or endings.get(file.suffix.lower())
    if form is None:
        names = dict.fromkeys(endings.values())
        raise UsageError(f"-o {typed}: its ending names no format", try_=[f"--format {name}" for name in names])
    with writing(typed, try_=["-o FILE elsewhere"]):
        if file.is_dir() or not file.parent.is_dir():
            what = "it is a folder" if file.is_dir() else "its folder does not exist"
            raise BadInput(f"cannot write {typed}: {what}", code="file_unwritable", try_=["-o FILE in a folder"])
        try_output(file)
    return file, form
