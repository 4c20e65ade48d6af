"""File writing for all of kvcli: atomic, synced to the disk on return, readable by the owner alone.

A file is written under a temporary name in its folder, which is locked until the file is renamed. So an unlocked
temporary file was left by a killed run, and the next run that starts or writes there removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from kvcli.errors import BadInput

# parts of temporary names; the file's own name is not included, because it may have the maximal length
BEGINS, ENDS = ".kvcli-", ".part"
SPARE = 64 << 20  # bytes of a disk that remain free
# errors of file systems without locks: nothing is removed there either
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
FIXED = (errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS)  # errors of a name that cannot be replaced


def private_folder(folder: Path) -> Path:
    """Create the folder and its missing parents, open to the owner only."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
        _sync_folder(path.parent)
    return folder


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that the folder is on, or will be."""
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free


def check_room(folder: Path, needed: int, work: str) -> None:
    """Raise BadInput if the folder's disk has no space for the work."""
    if (free := free_bytes(folder)) < needed + SPARE:
        raise BadInput(
            f"there is no room on the disk for {work}",
            code="no_space",
            lines=[f"it takes {needed >> 20:,} MiB; {free >> 20:,} MiB are free for {folder}"],
            detail={"needed": needed, "free": free},
            try_=["kvcli cache info", "KVCLI_HOME and HF_HOME say where models and their copies go"],
        )


def try_folder(folder: Path) -> Path:
    """Create the folder if missing and return it. Raises OSError early if no file can be written in it."""
    tempfile.TemporaryFile(dir=private_folder(folder)).close()
    return folder


def try_output(path: Path) -> None:
    """Raise OSError where `write_output` would, before any work is done for it."""
    with suppress(FileNotFoundError):
        path.stat()  # distinguishes a cycle of links from a dangling link
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if not path.exists():
        tempfile.TemporaryFile(dir=path.resolve().parent).close()


def write_private(
    path: Path, content: str | bytes, *, mode: int = 0o600, is_new: bool = False, is_lasting: bool = True
) -> None:
    """Replace the file in one step. With `is_new` it must not exist yet: FileExistsError.

    Without `is_lasting` the file is not synced to disk: a power cut may lose data that can be made again.
    """
    data = content.encode() if isinstance(content, str) else content
    with replacing(path, mode=mode, is_new=is_new, is_lasting=is_lasting) as stream:
        stream.write(data)


def write_output(path: Path, content: str) -> None:
    """Write to the user's output path: a link remains a link, a mode is kept; a device or a pipe is written to.

    A file that cannot be replaced, because it is a mount point or its folder is not writable, is written in place; a
    kill may then leave half of it.
    """
    target, is_there = path.resolve(), path.exists()
    if not is_there or path.is_file():
        try:
            write_private(target, content, mode=stat.S_IMODE(target.stat().st_mode) if is_there else 0o600)
            return
        except OSError as error:
            if not is_there or error.errno not in FIXED:
                raise
    with path.open("w", encoding="utf-8") as stream:
        stream.write(content)
        stream.flush()
        if path.is_file():
            os.fsync(stream.fileno())


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A folder for other programs to write into, removed after the block; after a kill, when `parent` is swept."""
    folder, handle = _temporary_folder(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


@contextmanager
def replacing(path: Path, *, mode: int = 0o600, is_new: bool = False, is_lasting: bool = True) -> Iterator[BinaryIO]:
    """Write the stream to a temporary file, which becomes the file if the block succeeds and is removed if it fails."""
    sweep(path.parent)
    stream = _temporary(path.parent)
    try:
        with stream:
            yield stream
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            if is_lasting:
                os.fsync(stream.fileno())
            (_name if is_new else os.replace)(stream.name, path)
    finally:
        with suppress(OSError):  # it was renamed, or the next run sweeps it
            os.unlink(stream.name)
    if not is_lasting:
        return
    try:
        _sync_folder(path.parent)
    except OSError:
        if is_new:  # a caller that gets the error may write the file again
            path.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Fill a temporary folder, which gets its name if the block succeeds and is removed if it fails.

    If the name exists already, the existing folder is kept.
    """
    sweep(path.parent)
    with temporary_folder(path.parent) as made:
        yield made
        for file in made.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        _sync_folder(made)
        try:
            made.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    _sync_folder(path.parent)


def append(path: Path, text: str, most: int = 0) -> None:
    """Add whole lines in one write, all of them or none. Beyond `most` bytes, if given, the older half is removed."""
    with locked(path) as handle:
        kind, size = stat.S_IFMT(os.fstat(handle).st_mode), os.fstat(handle).st_size
        data = text.encode(errors="backslashreplace")
        if kind != stat.S_IFREG:  # a device or a pipe, named by a user as the log
            os.write(handle, data)
            return
        if size and os.pread(handle, 1, size - 1) != b"\n":  # the last line is incomplete, from a killed run
            data = b"\n" + data
        try:
            if os.write(handle, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(handle)
        except BaseException:
            os.ftruncate(handle, size)
            raise
        if 0 < most < size + len(data):
            lines = path.read_bytes().splitlines(keepends=True)
            write_private(Path(os.path.realpath(path)), b"".join(lines[len(lines) // 2 :]))


def locked(path: Path) -> AbstractContextManager[int]:
    """Open the file, created if missing, to read and append; others that lock it wait until the block ends."""
    return opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, lock)


@contextmanager
def opened(path: Path, how: int, take: Callable[[int], None]) -> Iterator[int]:
    """Open the file of this name and lock it by `take`. Reopen if the file was replaced while `take` waited."""
    while True:
        handle = os.open(path, how, 0o600)
        try:
            take(handle)
            if is_at(handle, path):
                yield handle
                return
        finally:
            os.close(handle)


def lock(handle: int, *, wait: bool = True) -> None:
    """Lock an open file until it is closed. Raises BlockingIOError if another has it and `wait` is False."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def sweep(folder: Path) -> None:
    """Remove temporary files of killed runs from the folder. Files of running processes are locked and kept."""
    try:
        names = [n for n in os.listdir(folder) if n.startswith(BEGINS) and n.endswith(ENDS)]
    except OSError:  # the folder does not exist
        return
    for name in names:
        with suppress(OSError):
            is_folder = stat.S_ISDIR(os.lstat(folder / name).st_mode)
            how = os.O_RDONLY | os.O_DIRECTORY if is_folder else os.O_RDWR
            handle = os.open(folder / name, how | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (shutil.rmtree if is_folder else os.unlink)(folder / name)
            finally:
                os.close(handle)


def _temporary_folder(parent: Path) -> tuple[Path, int]:
    """Create a locked folder; return it and the handle that holds the lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=BEGINS, suffix=ENDS, dir=parent))
        with suppress(FileNotFoundError):  # another run removed it as abandoned before it was locked
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            lock(handle)
            if os.fstat(handle).st_nlink:
                return folder, handle
            os.close(handle)


def _temporary(folder: Path) -> BinaryIO:
    """Create a locked file of mode 0600 with a unique name."""
    while True:
        handle, name = tempfile.mkstemp(prefix=BEGINS, suffix=ENDS, dir=folder)
        stream = open(name, "wb", opener=lambda *_, handle=handle: handle)  # noqa: SIM115  # the caller's
        try:
            lock(stream.fileno())
        except BaseException:
            stream.close()
            os.unlink(name)
            raise
        if os.fstat(stream.fileno()).st_nlink:
            return stream
        stream.close()  # swept between its creation and its locking


def _name(temporary: str, path: Path) -> None:
    """Rename the file if the name is free."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: nearly as safe
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(temporary, path)


def is_at(handle: int, path: Path) -> bool:
    """True if the open file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    """Sync the folder, so that a name survives a power cut."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a folder may be writable without being readable
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems do not sync folders
            raise
    finally:
        os.close(handle)
