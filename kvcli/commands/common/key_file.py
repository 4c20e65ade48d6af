"""Private file with a key: of a server, or for one."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from kvcli.errors import BadInput, reading

if TYPE_CHECKING:
    from pathlib import Path

    from kvcli.environment import Environment

LONGEST = 4096  # characters


def read_key(world: Environment, file: str | Path, least: int = 1) -> str:
    """Return the first line of a file that only its owner may read. `least`: characters that the key has."""
    path = world.path(file)
    with reading(file, try_=["--key-file FILE"]):
        mode, key = path.stat().st_mode, path.read_bytes().partition(b"\n")[0].strip()
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadInput(f"others may read the key in {file}", code="key_not_private", try_=[f"chmod 600 {file}"])
    if not least <= len(key) <= LONGEST or not key.isascii() or not key.decode().isprintable():
        said = f"the first line of {file} is no key of {least} to {LONGEST} ASCII characters"
        raise BadInput(said, code="bad_key", try_=[f"(umask 077; openssl rand -hex 24 > {file})"])
    return key.decode()
