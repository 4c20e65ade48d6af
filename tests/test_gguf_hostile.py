"""GGUF files that somebody broke or made to hurt: a typed error or a right answer, in little memory."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kvcli.engine.loading.open_lm import open_lm
from kvcli.errors import BadModel
from kvcli.models import source
from kvcli.models.gguf import convert, header
from tests import gguf_archs
from tests.gguf_files import write
from tests.test_model_probe import our_logits

ROOM = 16 << 20  # bytes that reading a header may take, whatever it announces: the file has 0.2 MB


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("whole") / "tiny.gguf"
    write(file)
    return file


@pytest.fixture(
    scope="module",
    params=["qwen35_mtp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "deepseek_v3"))],
)
def pieced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose tensors are joined, reordered and transposed by sizes that its metadata states."""
    file = tmp_path_factory.mktemp("pieced") / "tiny.gguf"
    gguf_archs.write(file, request.param)
    return file


def broken(whole: bytes, end: int, seed: int) -> bytes:
    """One or two things wrong with the first `end` bytes."""
    rng, data = Random(seed), bytearray(whole)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(end)
        wide = rng.choice((0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1, rng.getrandbits(64)))
        trick = rng.randrange(6)
        if trick == 0:
            data[at : at + 1] = rng.randbytes(1)
        elif trick == 1:
            data[at : at + 8] = struct.pack("<Q", wide)
        elif trick == 2:
            data[at : at + 4] = struct.pack("<I", wide & 0xFFFFFFFF)
        elif trick == 3:
            del data[at : at + rng.choice((1, 4, 8, 100))]
        elif trick == 4:
            data[at:at] = rng.randbytes(rng.choice((1, 4, 8, 100)))
        else:
            del data[at:]
    return bytes(data)


def outcomes(whole: Path, folder: Path, seeds: Iterator[int], *, load: bool) -> dict[str, int]:
    """What became of the files: "read", or the code of the error."""
    data, first = whole.read_bytes(), min(t.at for t in header.read(whole).tensors.values())
    file, ends = folder / "tiny.gguf", dict[str, int]()
    for seed in seeds:
        file.write_bytes(broken(data, first, seed))
        tracemalloc.start()
        try:
            found = source.find(str(file))
            end = "read"
        except BadModel as error:
            end = error.code
        finally:
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert most < ROOM, f"seed {seed} took {most:,} bytes"
        if load and end == "read":
            end = loads(found, folder)
        ends[end] = ends.get(end, 0) + 1
    return ends


def loads(found: source.Source, folder: Path) -> str:
    try:
        lm = open_lm(convert.convert_if_needed(found, "fp32", folder / "cache", keeps_on="cpu"), device="cpu")
    except BadModel as error:
        return error.code
    our_logits(lm, [5, 6, 7], 2)
    return "answered"


def test_a_broken_header_is_a_typed_error_or_read(whole: Path, tmp_path: Path):
    ends = outcomes(whole, tmp_path, iter(range(500)), load=False)
    assert ends.keys() <= {
        "read",
        "model_corrupt",
        "gguf_unsupported",
        "model_incomplete",
        "model_sizes",
        "bad_tokenizer",
    }
    assert ends["model_corrupt"] > 100
    assert ends["gguf_unsupported"] > 2


def test_what_is_read_loads_or_says_why(whole: Path, tmp_path: Path):
    ends = outcomes(whole, tmp_path, iter(range(500, 530)), load=True)
    assert sum(ends.values()) == 30


def test_sizes_that_do_not_fit_the_tensors_are_refused(pieced: Path, tmp_path: Path):
    """Numbers of the metadata alone are broken, so that files get beyond the header."""
    data, ends = pieced.read_bytes(), set[str]()
    for key, value in header.read(pieced).meta.items():
        if type(value) is not int or key.startswith(("tokenizer", "general")):
            continue
        at = data.index(key.encode()) + len(key) + 4
        for wrong in (0, 3, value + 1, (1 << 32) - 1):
            (tmp_path / "tiny.gguf").write_bytes(data[:at] + struct.pack("<I", wrong & 0xFFFFFFFF) + data[at + 4 :])
            ends.add(end_of(tmp_path / "tiny.gguf"))
    assert ends >= {"gguf_unsupported"}
    assert ends <= {"read", "gguf_unsupported", "model_incomplete", "model_sizes", "model_corrupt"}


def end_of(file: Path) -> str:
    try:
        source.find(str(file))
    except BadModel as error:
        return error.code
    return "read"


@pytest.mark.slow
def test_thousands_of_broken_files_with_pieces(pieced: Path, tmp_path: Path):
    outcomes(pieced, tmp_path, iter(range(10_000, 11_000)), load=False)
    outcomes(pieced, tmp_path, iter(range(20_000, 20_030)), load=True)


@pytest.mark.slow
def test_thousands_of_broken_files(whole: Path, tmp_path: Path):
    outcomes(whole, tmp_path, iter(range(10_000, 20_000)), load=False)
    outcomes(whole, tmp_path, iter(range(20_000, 20_600)), load=True)


def of(*entries: bytes, tensors: int = 0, keys: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + b"".join(entries)


def text(said: bytes) -> bytes:
    return struct.pack("<Q", len(said)) + said


KEY = text(b"k")
HOSTILE = {
    "a list without end": of(KEY + struct.pack("<IIQ", 9, 8, 1 << 60)),
    "a list of numbers without end": of(KEY + struct.pack("<IIQ", 9, 10, 1 << 61)),
    "a long list of nothing": of(KEY + struct.pack("<IIQ", 9, 8, 1 << 60) + b"\0" * (1 << 20)),
    "lists in lists": of(KEY + struct.pack("<IIQ", 9, 9, 1) * 1000),
    "an endless string": of(KEY + struct.pack("<IQ", 8, 1 << 62)),
    "a page for a token": of(KEY + struct.pack("<IIQ", 9, 8, 1) + text(b"a" * 5000) + b"\0" * 64),
    "a key that is no text": of(text(b"\xff\xfe") + struct.pack("<II", 4, 1) + b"\0" * 64),
    "a key twice": of(KEY + struct.pack("<II", 4, 1), KEY + struct.pack("<II", 4, 2) + b"\0" * 64, keys=2),
    "an odd alignment": of(text(b"general.alignment") + struct.pack("<II", 4, 33) + b"\0" * 64),
    "no alignment": of(text(b"general.alignment") + struct.pack("<II", 4, 0) + b"\0" * 64),
    "many dimensions": of(text(b"t") + struct.pack("<I", 1 << 30), tensors=1, keys=0),
    "more than all numbers": of(
        text(b"t") + struct.pack("<IQQIQ", 2, 1 << 63, 1 << 63, 0, 0), tensors=1, keys=0
    ),
    "half a block": of(text(b"t") + struct.pack("<IQIQ", 1, 31, 2, 0) + b"\0" * 99, tensors=1, keys=0),
    "a type of tomorrow": of(text(b"t") + struct.pack("<IQIQ", 1, 32, 99, 0) + b"\0" * 99, tensors=1, keys=0),
    "beyond the file": of(text(b"t") + struct.pack("<IQIQ", 1, 32, 0, 1 << 62), tensors=1, keys=0),
    "off its place": of(text(b"t") + struct.pack("<IQIQ", 1, 8, 0, 1) + b"\0" * 99, tensors=1, keys=0),
    "on each other": of(
        text(b"t") + struct.pack("<IQIQ", 1, 16, 0, 0), text(b"u") + struct.pack("<IQIQ", 1, 16, 0, 32) + b"\0" * 999,
        tensors=2, keys=0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("trick", HOSTILE)
def test_a_file_made_to_hurt_is_damaged(tmp_path: Path, trick: str):
    (tmp_path / "tiny.gguf").write_bytes(HOSTILE[trick])
    tracemalloc.start()
    with pytest.raises(BadModel) as caught:
        header.read(tmp_path / "tiny.gguf")
    assert tracemalloc.get_traced_memory()[1] < ROOM
    tracemalloc.stop()
    assert caught.value.code == "model_corrupt"


@pytest.mark.parametrize(("kind", "n", "is_read"), [("F32", 1024, True), ("F32", 1025, False), ("F16", 8, False)])
def test_factors_are_read_from_a_short_tensor_alone(tmp_path: Path, kind: str, n: int, is_read: bool):
    """A tensor of gigabytes by that name would fill memory before anything is loaded."""
    file, nbytes = tmp_path / "tiny.gguf", n * int(kind[1:]) // 8
    file.write_bytes(struct.pack("<f", 2.5) * 2000)
    found = header.Header(file, 8000, {}, {"factors": header.Stored(kind, (n,), 0, nbytes)})
    if is_read:
        assert header.floats(found, "factors") == (2.5,) * n
        return
    with pytest.raises(BadModel) as caught:
        header.floats(found, "factors")
    assert caught.value.code == "model_corrupt"


def test_a_pipe_and_a_folder_of_that_name_are_no_files(tmp_path: Path):
    os.mkfifo(tmp_path / "tiny.gguf")
    with pytest.raises(BadModel, match="damaged"):
        source.find(str(tmp_path / "tiny.gguf"))
