"""The one door by which kvcli writes files: whole or not at all, on the disk when it returns, for their owner alone.

A file is written under a temporary name in its folder, which stays locked until it has its own name. So whatever of
these is not locked was left by a run that was killed, and goes when the next one starts or writes there.
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

BEGINS, ENDS = ".kvcli-", ".part"  # of temporary names; without the file's own, which may be as long as a name can be
SPARE = 64 << 20  # bytes of a disk that stay free
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of file systems without them: nothing is swept there either
FIXED = (errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS)  # of a name that cannot be given anew


def private_folder(folder: Path) -> Path:
    """Make the folder and what is missing above it, open to its owner only."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
        _sync_folder(path.parent)
    return folder


def free_bytes(folder: Path) -> int:
    """Of the disk that the folder is on, or will be."""
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free


def check_room(folder: Path, needed: int, work: str) -> None:
    """Raises BadInput where the disk of the folder has no room for what some work writes."""
    if (free := free_bytes(folder)) < needed + SPARE:
        raise BadInput(
            f"there is no room on the disk for {work}",
            code="no_space",
            lines=[f"it takes {needed >> 20:,} MiB; {free >> 20:,} MiB are free for {folder}"],
            detail={"needed": needed, "free": free},
            try_=["kvcli cache info", "KVCLI_HOME and HF_HOME say where models and their copies go"],
        )


def try_folder(folder: Path) -> Path:
    """The folder, made if it is not there. Raises OSError where nothing can be kept in it: better now than later."""
    tempfile.TemporaryFile(dir=private_folder(folder)).close()
    return folder


def try_output(path: Path) -> None:
    """Raises OSError where `write_output` would, before any work is done for it."""
    with suppress(FileNotFoundError):
        path.stat()  # links that lead in a circle are told from one that leads nowhere
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if not path.exists():
        tempfile.TemporaryFile(dir=path.resolve().parent).close()


def write_private(
    path: Path, content: str | bytes, *, mode: int = 0o600, is_new: bool = False, is_lasting: bool = True
) -> None:
    """Replace the file in one step. With `is_new` it must not be there yet: FileExistsError.

    Not `is_lasting`: the disk is not waited for, as a power cut may have what can be made again.
    """
    data = content.encode() if isinstance(content, str) else content
    with replacing(path, mode=mode, is_new=is_new, is_lasting=is_lasting) as stream:
        stream.write(data)


def write_output(path: Path, content: str) -> None:
    """Write where the user said: a link stays a link, a mode what it was; a device or a pipe is written to.

    So is a file that cannot be replaced, being mounted by itself or in a folder that is closed to us; a kill may then
    leave half of it.
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
    """A folder for other programs to write into, gone with the block; after a kill, when `parent` is swept."""
    folder, handle = _temporary_folder(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


@contextmanager
def replacing(path: Path, *, mode: int = 0o600, is_new: bool = False, is_lasting: bool = True) -> Iterator[BinaryIO]:
    """What is written to the stream becomes the file when the block ends well, and is gone when it does not."""
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
        with suppress(OSError):  # it has its name, or the next run sweeps it
            os.unlink(stream.name)
    if not is_lasting:
        return
    try:
        _sync_folder(path.parent)
    except OSError:
        if is_new:  # whoever hears that it could not be written may write it again
            path.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A folder to be filled, which gets its name when the block ends well and is gone when it does not.

    Who comes second to the same name leaves what the first one made.
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
    """Add whole lines in one write, all of them or none. Beyond `most` bytes, if given, the older half goes."""
    with locked(path) as handle:
        kind, size = stat.S_IFMT(os.fstat(handle).st_mode), os.fstat(handle).st_size
        data = text.encode(errors="backslashreplace")
        if kind != stat.S_IFREG:  # a device or a pipe, that somebody named as the log
            os.write(handle, data)
            return
        if size and os.pread(handle, 1, size - 1) != b"\n":  # the last line is half a line, of a run that was killed
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
    """The file, made if need be, open to read and append; others that lock it wait until the block ends."""
    return opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, lock)


@contextmanager
def opened(path: Path, how: int, take: Callable[[int], None]) -> Iterator[int]:
    """The file that has this name once it is taken: `take` may lock it, and so wait while it is replaced."""
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
    """Hold an open file until it is closed; raises BlockingIOError if another has it and `wait` is False."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def sweep(folder: Path) -> None:
    """Remove what killed runs left in the folder. What a running one is writing is locked, and stays."""
    try:
        names = [n for n in os.listdir(folder) if n.startswith(BEGINS) and n.endswith(ENDS)]
    except OSError:  # there is none
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
    """A locked one, and the handle that holds it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=BEGINS, suffix=ENDS, dir=parent))
        with suppress(FileNotFoundError):  # another run took it for a dead one's before it was locked
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            lock(handle)
            if os.fstat(handle).st_nlink:
                return folder, handle
            os.close(handle)


def _temporary(folder: Path) -> BinaryIO:
    """A locked file of mode 0600 with a name of its own."""
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
        stream.close()  # swept between its making and its locking


def _name(temporary: str, path: Path) -> None:
    """Give the file its name if nothing has it."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links: nearly as good
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(temporary, path)


def is_at(handle: int, path: Path) -> bool:
    """Whether the open file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    """So that a name is still there after a power cut."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # one may write in a folder without reading it
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems do not sync folders
            raise
    finally:
        os.close(handle)
