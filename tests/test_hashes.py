"""Files are told apart by all their bytes, hashed once, and a hash is never remembered of what changed meanwhile."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvcli
from kvcli.chat.document_pack import open_pack
from kvcli.chat.model import Model
from kvcli.engine.loading import weights as weights_of
from kvcli.engine.loading.open_lm import open_lm
from kvcli.errors import BadInput, BadModel
from kvcli.fit.calibrate import fingerprint_in, fingerprint_of
from kvcli.fit.plan import subject_of
from kvcli.heads.auto_headmap import place
from kvcli.models import catalog, source
from kvcli.models.catalog import Hashes, Stamped, code_hash, model_files
from kvcli.models.gguf import convert
from kvcli.prefix_cache.prefix_cache import cache_key
from kvcli.settings.profile import Profile
from kvcli.summarize.cache import fingerprint
from tests.families import build
from tests.twins import TIME, flipped, put

WAYS = ("in place", "rename", "link")
PIECE, SIZE = 1000, 3500


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few pieces, all of them worth remembering."""
    monkeypatch.setattr(catalog, "PIECE", PIECE)
    monkeypatch.setattr(catalog, "SMALL", 10)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every file had been written long ago."""
    monkeypatch.setattr(catalog, "FRESH", -(1 << 62))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pieces that are read."""
    found, pread = list[int](), os.pread
    monkeypatch.setattr(os, "pread", lambda handle, n, at: (found.append(at), pread(handle, n, at))[1])
    return found


def of(cache: Path | None, *paths: Path) -> str:
    return Hashes(cache).of([Stamped.of(path) for path in paths])


@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, SIZE // 2, 3 * PIECE, SIZE - 1])
@pytest.mark.parametrize("how", WAYS)
def test_one_other_byte_is_another_file(tmp_path: Path, settled: None, how: str, at: int) -> None:
    data, file = random.Random(at).randbytes(SIZE), tmp_path / "model.safetensors"
    put(file, data, how)
    first = of(tmp_path, file)
    put(file, flipped(data, at), how)
    assert file.stat().st_mtime_ns == TIME
    assert of(tmp_path, file) != first
    put(file, data, how)
    assert of(tmp_path, file) == first


def storm(folder: Path, seed: int, n: int) -> None:
    """Files are changed, swapped, linked and cut in many ways, with one time of writing, and asked for now and then."""
    rng, files = random.Random(seed), [folder / f"model-{i}.safetensors" for i in range(3)]
    for file in files:
        put(file, rng.randbytes(SIZE))
    for _ in range(n):
        file, other = rng.sample(files, 2)
        data = file.read_bytes()
        match rng.randrange(5):
            case 0:
                put(file, flipped(data, rng.randrange(len(data))) if data else b"x", rng.choice(WAYS))
            case 1:
                put(file, data[rng.randrange(SIZE // 2) :] + rng.randbytes(rng.choice([0, 1, PIECE])), rng.choice(WAYS))
            case 2:  # two names change places
                file.rename(folder / "aside")
                other.rename(file)
                (folder / "aside").rename(other)
            case 3:
                put(file, other.read_bytes(), rng.choice(WAYS))
            case _:
                os.utime(file, ns=(TIME, TIME))
        asked = rng.sample(files, rng.randrange(1, 4))
        assert of(folder, *asked) == of(None, *asked)


@pytest.mark.parametrize("seed", range(3))
def test_no_change_is_missed(tmp_path: Path, settled: None, seed: int) -> None:
    storm(tmp_path, seed, 15)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 103))
def test_no_change_is_missed_in_a_long_stress_test(tmp_path: Path, settled: None, seed: int) -> None:
    storm(tmp_path, seed, 200)


def test_names_and_order_of_shards_count(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    put(a, b"x" * SIZE)
    put(b, b"y" * SIZE)
    assert len({of(None, a, b), of(None, b, a), of(None, a), of(None, b)}) == 4
    first = of(None, a)
    assert of(None, a.rename(tmp_path / "c")) != first


def test_a_file_is_read_once_and_the_memory_is_its_owners(tmp_path: Path, settled: None, reads: list[int]) -> None:
    file, cache = tmp_path / "model.safetensors", tmp_path / "cache"
    put(file, bytes(SIZE))
    first = of(cache, file)
    assert sorted(reads) == [0, 1000, 2000, 3000]
    assert of(cache, file) == first == Hashes(cache).known([Stamped.of(file)])
    (tmp_path / "again").symlink_to(file.name)
    assert Hashes(cache).known([Stamped.of(tmp_path / "again")])
    assert len(reads) == 4
    (memory,) = (cache / "hashes").iterdir()
    assert (memory.stat().st_mode & 0o777, memory.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    shutil.copy2(file, tmp_path / "copy")
    assert Hashes(cache).known([Stamped.of(tmp_path / "copy")]) == ""


def test_what_was_just_written_is_not_remembered(tmp_path: Path, reads: list[int]) -> None:
    """It may be written to once more before the clock of the disk has moved on."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(SIZE))
    known = Hashes(tmp_path)
    for i in range(1, 4):
        known.of([Stamped.of(file)])
        assert len(reads) == 4 * i
    assert not (tmp_path / "hashes").exists()


@pytest.mark.parametrize("damage", ["", "\n\n", "1 2 3 4 5 abc\n", "\0" * 99, "cut", "more", "folder", "pipe"])
def test_a_damaged_memory_costs_time_alone(tmp_path: Path, settled: None, damage: str) -> None:
    file, memory = tmp_path / "model.safetensors", tmp_path / "hashes" / "files.txt"
    put(file, bytes(SIZE))
    first = of(tmp_path, file)
    whole = memory.read_text()
    memory.unlink()
    match damage:
        case "folder":
            memory.mkdir()
        case "pipe":
            os.mkfifo(memory)
        case "cut":
            memory.write_text(whole[:-20])
        case "more":
            memory.write_text(whole * 9000)
        case _:
            memory.write_text(damage)
    assert of(tmp_path, file) == of(tmp_path, file) == first


def test_what_takes_long_is_told_once(tmp_path: Path, settled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "LARGE", SIZE - 1)
    file, told = tmp_path / "model.safetensors", list[str]()
    put(file, bytes(SIZE))
    for _ in range(2):
        Hashes(tmp_path, told.append).of([Stamped.of(file)])
    assert told == ["hashing 0 MB of weights once: saved data of a model is found by its hash"]


@pytest.mark.parametrize("how", ["before", "while", "cut", "gone"])
def test_a_file_that_changes_while_it_is_hashed_is_of_no_model(
    tmp_path: Path, settled: None, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    file = tmp_path / "model.safetensors"
    put(file, bytes(SIZE))
    was, pread = Stamped.of(file), os.pread

    def changing(handle: int, n: int, at: int) -> bytes:
        if at == 2 * PIECE:
            (put if how == "while" else Path.write_bytes)(file, bytes(SIZE if how == "while" else 10))
        return pread(handle, n, at)

    match how:
        case "before":
            put(file, flipped(bytes(SIZE), 7), "rename")
        case "gone":
            file.unlink()
        case _:
            monkeypatch.setattr(os, "pread", changing)
    with pytest.raises((BadModel, BadInput)) as caught:
        Hashes(tmp_path).of([was])
    assert caught.value.code == ("model_changed" if how in ("before", "while") else "file_unreadable")
    assert not (tmp_path / "hashes").exists()


def test_ctrl_c_is_heard_while_a_file_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, seen, pread = tmp_path / "model.safetensors", list[int](), os.pread
    put(file, bytes(PIECE * 5000))

    def stopping(handle: int, n: int, at: int) -> bytes:
        seen.append(at)
        if len(seen) == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return pread(handle, n, at)

    monkeypatch.setattr(os, "pread", stopping)
    before, others = signal.signal(signal.SIGINT, signal.default_int_handler), {*threading.enumerate()}
    try:
        with pytest.raises(KeyboardInterrupt):
            of(tmp_path, file)
    finally:
        signal.signal(signal.SIGINT, before)
    for thread in {*threading.enumerate()} - others:
        if thread.ident is not None:  # Ctrl-C may come before a thread runs
            thread.join()
    assert len(seen) < 5000


def test_code_counts_by_its_bytes_and_so_does_the_native_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"models/a.py": b"x = 1", "kernels/native/libkvcli.so": b"\x7fELF", "commands/b.py": b"y = 1"}
    for name, data in made.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        put(tmp_path / name, data)
    monkeypatch.setattr(catalog, "__file__", str(tmp_path / "models" / "catalog.py"))
    hash_of: Callable[[Any], str] = code_hash.__wrapped__
    first = hash_of(catalog.COMPUTES)
    for name, data in made.items():
        put(tmp_path / name, flipped(data, 3))
        assert (hash_of(catalog.COMPUTES) != first) == (name != "commands/b.py")
        put(tmp_path / name, data)
    assert hash_of(catalog.COMPUTES) == first


# ---- models ----


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model in a folder of its own."""
    return Path(shutil.copytree(source.find("demo").path, tmp_path_factory.mktemp("models") / "one"))


def loaded(folder: Path, cache: Path) -> Model:
    return kvcli.load(str(folder), "exact", cache=cache, set={"load.device": "cpu"})


def test_twins_share_nothing(demo: Path, tmp_path: Path, settled: None) -> None:
    """In one folder, one after the other, as a program that keeps times puts them there: pack, map, times, parts."""
    folder, cache = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(demo, folder)
    files = {name: (folder / name).read_bytes() for name in ("model.safetensors", "tokenizer.json")}
    kinds: dict[str, Callable[[Model], object]] = {
        "kept": lambda model: cache_key(model.lm),
        "map": lambda model: place(model.lm, tmp_path),
        "parts": lambda model: fingerprint(model.info, Hashes(cache)),
        "times": fingerprint_of,
    }
    for name, data in files.items():
        put(folder / name, data)
    with loaded(folder, cache) as model:
        first = {kind: say(model) for kind, say in kinds.items()}
        chat = model.chat()
        chat.attach(kvcli.Document("a.md", "The depot opens at nine. " * 40, "0" * 64))
        chat.pack(tmp_path / "one.kvs")
    assert {kind: say(model) for kind, say in kinds.items()} == first
    same = tmp_path / "elsewhere"
    shutil.copytree(folder, same)
    with loaded(same, cache) as model:
        assert cache_key(model.lm) == first["kept"]  # the same bytes, wherever they lie
    twins = {
        "model.safetensors": flipped(files["model.safetensors"], -3),
        "tokenizer.json": files["tokenizer.json"].replace(b"{\n", b"{ ", 1),
    }
    for name, twin in twins.items():
        assert len(twin) == len(files[name])
        assert twin != files[name]
        put(folder / name, twin, "rename")
        with loaded(folder, cache) as model:
            differs = {kind for kind, say in kinds.items() if say(model) != first[kind]}
            assert differs == set(kinds) - ({"times"} if name == "tokenizer.json" else set())
            with pytest.raises(BadInput) as caught:
                open_pack(tmp_path / "one.kvs").refuse_other(model.text_session.session, model.profile)
            assert caught.value.detail["fields"] == ["weights" if name == "model.safetensors" else "files"]
        put(folder / name, files[name])


def test_times_of_a_model_are_found_before_it_is_loaded(demo: Path, tmp_path: Path, settled: None) -> None:
    class Planned:
        profile = Profile.load("exact")

    folder, cache = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(demo, folder)
    subject = subject_of(source.find(str(folder)))
    before = fingerprint_in(Planned(), subject, str(folder), cache)  # type: ignore[arg-type]
    with loaded(folder, cache) as model:
        timed = fingerprint_of(model)
    assert before != timed == fingerprint_in(Planned(), subject, str(folder), cache)  # type: ignore[arg-type]
    file = folder / "model.safetensors"
    put(file, flipped(file.read_bytes(), -3))
    assert fingerprint_in(Planned(), subject, str(folder), cache) == before  # type: ignore[arg-type]


def test_one_shard_of_several_makes_another_model(tmp_path: Path) -> None:
    build("qwen2").save_pretrained(tmp_path, max_shard_size="20KB")
    found = source.find(str(tmp_path))
    assert len(found.files) > 2
    ways = [[], *([file.path] for file in found.files), [tmp_path / "model.safetensors.index.json"]]
    seen = set()
    for paths in ways:
        for path in paths:
            whole = path.read_bytes()
            put(path, flipped(whole, -9))
        seen.add(str([of(None, *files_) and of(None, *files_) for files_ in _paths(tmp_path, found)]))
        for path in paths:
            put(path, whole, "rename")
    assert len(seen) == len(ways)


def _paths(folder: Path, found: source.Source) -> list[list[Path]]:
    files = model_files(folder, [file.path for file in found.files])
    return [[file.path for file in part] for part in files.values()]


@pytest.mark.parametrize("how", WAYS)
def test_weights_that_change_while_they_are_loaded_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    build("llama").save_pretrained(tmp_path)
    file, read = tmp_path / "model.safetensors", weights_of.load_weights
    found, data = source.find(str(tmp_path)), file.read_bytes()

    def reading(*given: Any) -> Any:
        put(file, flipped(data, -9), how)
        return read(*given)

    monkeypatch.setattr(weights_of, "load_weights", reading)
    with pytest.raises(BadModel) as caught:
        open_lm(found, device="cpu")
    assert caught.value.code == "model_changed"
    assert caught.value.try_


def test_a_model_keeps_its_identity_when_its_files_are_replaced(tmp_path: Path, settled: None) -> None:
    build("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    lms = [open_lm(source.find(str(tmp_path)), device="cpu") for _ in range(2)]
    mine = cache_key(lms[0])
    put(file, flipped(file.read_bytes(), -9), "rename")
    assert cache_key(lms[0]) == mine
    with pytest.raises(BadModel, match="changed"):  # whose weights nobody has hashed in time
        cache_key(lms[1])


# ---- GGUF files ----


@pytest.mark.parametrize("how", WAYS)
def test_a_gguf_file_is_not_answered_from_its_twins_copy(tmp_path: Path, settled: None, how: str) -> None:
    gguf_files = pytest.importorskip("tests.gguf_files", reason="the gguf package is absent")
    gguf_files.write(tmp_path / "one.gguf")
    data, cache = (tmp_path / "one.gguf").read_bytes(), tmp_path / "cache"
    made = {}
    for name, its in {"a": data, "b": flipped(data, -9), "c": flipped(data, -4097), "again": data}.items():
        for folder in (name, "same"):  # two folders, and one in which each takes the place of the one before it
            file = tmp_path / folder / "model.gguf"
            file.parent.mkdir(exist_ok=True)
            put(file, its, how)
            copy = convert.convert_if_needed(source.find(str(file)), "fp32", cache, keeps_on="cpu").path
            made.setdefault(name, set()).add((copy.name, (copy / "model.safetensors").read_bytes()))
    assert [len(copies) for copies in made.values()] == [1] * 4
    assert made["a"] == made["again"]
    assert len({next(iter(copies))[1] for copies in made.values()}) == 3


def test_a_gguf_file_that_changes_while_it_is_dequantized_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_files = pytest.importorskip("tests.gguf_files", reason="the gguf package is absent")
    file = tmp_path / "model.gguf"
    gguf_files.write(file)
    found, data, write = source.find(str(file)), file.read_bytes(), convert._write_weights

    def writing(*given: Any) -> None:
        put(file, flipped(data, -9), "rename")
        write(*given)

    monkeypatch.setattr(convert, "_write_weights", writing)
    with pytest.raises(BadModel, match="changed"):
        convert.convert_if_needed(found, "fp32", tmp_path / "cache", keeps_on="cpu")
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []
