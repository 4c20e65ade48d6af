"""Hashes of model files over all their bytes, which decide whether two models are the same.

Each file is hashed once. The hash is cached under the file's device, inode, size, and times of writing and of change.
The system alone sets the time of change: no copy, archive or `touch` resets it, whatever it does to the others.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Thread

from kvcli.errors import BadModel, reading
from kvcli.files import append, private_folder
from kvcli.settings.small_file import Unfit, read_small
from kvcli.version import __version__

MOST = 256 << 10  # bytes of the file of hashes; beyond that, the older half is removed
PIECE, THREADS = 8 << 20, min(8, os.cpu_count() or 1)  # bytes that a thread hashes at once
SMALL, LARGE = 1 << 20, 256 << 20  # bytes: smaller files are hashed in each run, more than LARGE takes a while
FRESH = 2_000_000_000  # ns: two changes within this time may get the same time of change, by the clocks of some disks
LINE = re.compile(r"((?:-?\d+ ){5})([0-9a-f]{64})")  # a file stamp and its hash
# files beside the weights that determine their meaning
BESIDE = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
PARSED = ("config.json", "generation_config.json")  # hashed by their parsed settings, defaults included
COMPUTES = ("engine", "kernels", "kv", "models", "policies", "prune")  # packages of kvcli that affect the result


@dataclass(frozen=True, slots=True)
class Stamped:
    """A file at one moment. `stamp` differs after any change of its bytes, and if another file got its name."""

    path: Path
    stamp: str  # device, inode, bytes, times of writing and of change, ns
    nbytes: int
    changed: int

    @classmethod
    def of(cls, path: Path, handle: int | None = None) -> Stamped:
        """Stamp of the file now, or of the open `handle`; a link is followed. Raises BadInput for a missing file."""
        with reading(path):
            s = os.stat(path if handle is None else handle)
        stamp = f"{s.st_dev} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns} "
        return cls(path, stamp, s.st_size, s.st_ctime_ns)

    def check(self, handle: int | None = None) -> None:
        """Raise BadModel if the file changed since: data read from it may mix both versions."""
        if Stamped.of(self.path, handle) != self:
            try_ = ["the same command again, when no process writes to that file"]
            raise BadModel(f"{self.path} changed while it was read", code="model_changed", try_=try_)


def model_files(path: Path, weights: Sequence[Path] = (), made_of: Sequence[Path] = ()) -> dict[str, list[Stamped]]:
    """Stamp the files of a model: "weights", and "files" that it depends on. `made_of`: source of a converted copy."""
    beside = sorted(f for f in (*path.glob("*"), *path.glob("additional_chat_templates/*")) if f.suffix in BESIDE)
    others = [file for file in beside if file.name not in PARSED and file.is_file()]
    held = [*weights] or sorted(path.glob("*.safetensors")) or [path] * path.is_file()
    found = {"weights": made_of or held, "files": [*(held if made_of else ()), *others]}
    return {name: [Stamped.of(file) for file in files] for name, files in found.items()}


class Hashes:
    """Hashes of files, from earlier runs, or computed now and cached below `cache`."""

    def __init__(self, cache: Path | None = None, tell: Callable[[str], None] | None = None) -> None:
        """`tell` is called before hashing that takes a while."""
        self._file, self._tell, self._known = cache and cache / "hashes" / "files.txt", tell, dict[str, str]()
        with suppress(Unfit):  # no file of hashes yet
            lines = read_small(self._file, 2 * MOST).decode(errors="replace").splitlines() if self._file else []
            self._known = {found[1]: found[2] for found in map(LINE.fullmatch, lines) if found}

    def of(self, files: Sequence[Stamped]) -> str:
        """A single hash over names and bytes. Raises BadModel for a changed file without a cached hash."""
        size = sum(file.nbytes for file in files if file.stamp not in self._known)
        if size > LARGE and self._tell is not None:
            self._tell(f"hashing {size / 1e6:,.0f} MB of weights once: saved data of a model is found by its hash")
        said = [(file.path.name, self._known.get(file.stamp) or self._hash(file)) for file in files]
        return sha256(json.dumps(said).encode()).hexdigest()

    def known(self, files: Sequence[Stamped]) -> str:
        """Return the same hash, or "" if a large file was never hashed."""
        return self.of(files) if all(f.stamp in self._known or f.nbytes <= SMALL for f in files) else ""

    def _hash(self, file: Stamped) -> str:
        # old enough that any later change gets another time of change
        is_settled = time.time_ns() - file.changed > FRESH
        with reading(file.path), file.path.open("rb") as stream:
            file.check(stream.fileno())
            found = _of_pieces(stream.fileno(), file.nbytes)
            file.check(stream.fileno())
        if is_settled:
            self._known[file.stamp] = found
        if is_settled and self._file is not None and file.nbytes > SMALL:
            with suppress(OSError):  # the file is hashed again the next time
                append(private_folder(self._file.parent) / self._file.name, f"{file.stamp}{found}\n", MOST)
        return found


def _of_pieces(handle: int, nbytes: int) -> str:
    """Hash over the hashes of a file's pieces. The threads share no lock with the caller, whom Ctrl-C may stop
    anywhere; threads of `concurrent.futures` then hang now and then.
    """
    left, found = deque(range(0, nbytes, PIECE)), dict[int, tuple[int, bytes]]()

    def work() -> None:
        with suppress(OSError, IndexError):  # an unread piece is missing below; IndexError means no piece is left
            while True:
                data = os.pread(handle, PIECE, at := left.popleft())
                found[at] = len(data), sha256(data).digest()

    threads = [Thread(target=work, daemon=True) for _ in range(THREADS)]
    try:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        left.clear()
    if sum(n for n, _ in found.values()) != nbytes:
        raise OSError("not all of it can be read")
    return sha256(b"".join(digest for _, (_, digest) in sorted(found.items()))).hexdigest()


def releases() -> dict[str, str]:
    """Versions of the computing software. Results may change with a release, or with code changes in a checkout."""
    import torch
    import transformers

    code = code_hash(COMPUTES)
    return {"kvcli": f"{__version__} {code}", "torch": torch.__version__, "transformers": transformers.__version__}


@cache
def code_hash(packages: Sequence[str] = ("", "kernels")) -> str:
    """Hash of these packages of kvcli and the native library, as at the first call."""
    root, found = Path(__file__).parents[1], sha256()
    for path in sorted(path for name in packages for path in (root / name).rglob("*.*")):
        if path.suffix in (".py", ".so", ".dylib", ".dll"):
            found.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return found.hexdigest()[:16]
