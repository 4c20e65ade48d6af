"""What was read is kept on disk: found again by its beginning, the same to the bit, and never believed if damaged."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvcli.assemble import cache_conditions
from kvcli.engine.engine import iterate_events, run, run_to_end
from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import install_kernels, wrap_lm
from kvcli.engine.sequence.session import GenerationSession
from kvcli.files import SPARE
from kvcli.kv.slots import windows_of
from kvcli.prefix_cache import block_tree, snapshot_file
from kvcli.prefix_cache import prefix_cache as shelves
from kvcli.prefix_cache.block_tree import LENGTH, Block, BlockTree, _ids_of, read, read_tokens
from kvcli.prefix_cache.codec import Codec, Lossless, Uncompressed
from kvcli.prefix_cache.prefix_cache import INTACT, CacheConditions, PrefixCache, SaveResult
from kvcli.prefix_cache.snapshot_file import CorruptFile, path_of
from kvcli.settings.profile import Profile
from tests import families, make, prefix_cache_stress
from tests.twins import flipped, put

torch.set_num_threads(1)
IDS = families.prompt(3 * LENGTH + 40)
NEW = 8


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LM:
    """A model whose weights lie in a file, as only such a one is known again."""
    folder = tmp_path_factory.mktemp("model")
    more = {"sliding_window": 200} if request.param == "gemma3" else {}
    model = families.build(request.param, max_position_embeddings=8192, **more)
    save_file({n: p.detach().clone() for n, p in model.named_parameters()}, folder / "model.safetensors")
    lm = wrap_lm(model, path=str(folder))
    install_kernels(lm)
    assert lm.is_row_invariant  # so that chunks may begin anywhere
    return lm


def shelf_in(folder: Path, lm: LM, most: int = 1 << 30) -> PrefixCache:
    return PrefixCache(folder, most, lm, min_work=0)


def session(lm: LM) -> GenerationSession:
    return make.session(lm, make.dense(lm, windows=make.windows(lm)), chunk=100)


def answer(lm: LM, prefix_cache: PrefixCache | None, ids: list[int]) -> tuple[int, list[int], torch.Tensor]:
    """Tokens that needed no reading, those that came, and the logits behind the prompt."""
    s = session(lm)
    cached = prefix_cache.load_prefix(s, ids) if prefix_cache is not None else 0
    while run_to_end(s.prefill_chunk(ids)):
        pass
    (made,) = run([ForwardRequest(lm, Rows.chain(s.ids[-1:], len(s.ids) - 1), s.cache, want=[0])])
    list(iterate_events(s.stream(NEW)))
    if prefix_cache is not None:
        assert not prefix_cache.save(s).why_not
    return cached, s.ids[len(ids) :], made.logits[0]


def test_a_text_goes_on_from_what_another_run_read(lm: LM, tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path / "kv", lm)
    nothing, said, logits = answer(lm, shelf, IDS)
    whole = [*IDS, *said, *families.prompt(30)]
    cached, again, same = answer(lm, shelf_in(tmp_path / "kv", lm), whole)
    _, plain, alone = answer(lm, None, whole)
    assert (nothing, cached) == (0, len(IDS) + NEW - 1)  # all that was stored: the last token was pending
    assert again == plain
    assert torch.equal(same, alone)
    assert torch.equal(answer(lm, shelf, IDS)[2], logits)


# 582 and 583: a window of 200 lacks one slot, which begin at 384, and none
@pytest.mark.parametrize("shared", [1, 20, 100, LENGTH, LENGTH + 1, 582, 583, 2 * LENGTH + 90, len(IDS) - 1])
def test_texts_share_what_they_begin_with(lm: LM, tmp_path: Path, shared: int) -> None:
    shelf = shelf_in(tmp_path / "kv", lm)
    answer(lm, shelf, IDS)
    other = [*IDS[:shared], *reversed(IDS)]
    alike = next(i for i, (a, b) in enumerate(zip([*IDS, -1], other, strict=False)) if a != b)
    cached, said, logits = answer(lm, shelf, other)
    gone = max(
        (w.window_start(len(IDS)) + w.size - 1 for w in windows_of(lm.shapes, lm.attention_params).values()), default=0
    )
    assert cached == (alike if alike >= max(32, gone) else 0)  # what windows had given back was not there to be kept
    _, plain, alone = answer(lm, None, other)
    assert said == plain
    assert torch.equal(logits, alone)
    assert answer(lm, shelf, IDS)[0] == len(IDS) - 1  # both lie there
    assert answer(lm, shelf, other)[0] == len(other) - 1


def test_another_question_about_a_text_finds_all_that_a_window_may_undo(lm: LM, tmp_path: Path) -> None:
    """Also where the block in which a window begins was cut, and behind the first span of slots."""
    shelf, text = shelf_in(tmp_path / "kv", lm), families.prompt(4200, seed=3)
    for n in (700, 777, 4200):
        answer(lm, shelf, [*text[:n], *IDS[:150]])
        cached, said, logits = answer(lm, shelf_in(tmp_path / "kv", lm), [*text[:n], *reversed(IDS[:180])])
        assert cached >= n
        _, plain, alone = answer(lm, None, [*text[:n], *reversed(IDS[:180])])
        assert said == plain
        assert torch.equal(logits, alone)


def test_a_session_that_was_another_one_takes_over_what_a_window_left_as_a_new_one_does(lm: LM, tmp_path: Path) -> None:
    """Behind the first span of slots its bits would be others, were places counted from the first that it is given."""
    shelf, text = shelf_in(tmp_path / "kv", lm), families.prompt(4200, seed=3)
    answer(lm, shelf, text)
    other, one = read_all(lm, IDS), session(lm)
    one.restore(other.state(), 5)
    one.rewind(0)
    assert shelf.load_prefix(one, [*text, *IDS[:50]]) >= len(text)
    while run_to_end(one.prefill_chunk([*text, *IDS[:50]])):
        pass
    (made,) = run([ForwardRequest(lm, Rows.chain(one.ids[-1:], len(one.ids) - 1), one.cache, want=[0])])
    assert torch.equal(made.logits[0], answer(lm, None, [*text, *IDS[:50]])[2])


def test_what_was_kept_of_a_longer_text_is_kept_as_a_shorter_one_has_it(lm: LM, tmp_path: Path) -> None:
    """Or a text of which a window had moved on would be read for every question."""
    shelf = shelf_in(tmp_path / "kv", lm)
    shelf.save(read_all(lm, IDS))
    short = IDS[:300]
    shelf.save(read_all(lm, short))
    assert shelf.load_prefix(session(lm), [*short, 5]) >= len(short) - 1
    assert shelf.load_prefix(session(lm), IDS) == len(IDS) - 1
    files = {path: path.stat().st_ino for path in (tmp_path / "kv").glob(f"*/*{block_tree.ENDS}")}
    shelf.save(read_all(lm, IDS))
    assert {path: path.stat().st_ino for path in (tmp_path / "kv").glob(f"*/*{block_tree.ENDS}")} == files


@pytest.mark.parametrize("codec", [Uncompressed(), Lossless()])
def test_a_block_holds_what_a_window_left_of_a_layer(lm: LM, tmp_path: Path, codec: Codec) -> None:
    path, n, kv = tmp_path / "one.kv", 200, dict[int, tuple[torch.Tensor, torch.Tensor]]()
    for layer, shape in enumerate(lm.shapes[:3]):  # all of the first, 72 tokens of the next, the last 8
        m = (n, 72, 8)[layer]
        k, v = (torch.randn(shape.n_kv_heads, m, size) for size in (shape.k_dim, shape.v_dim))
        kv[layer] = k, v
    Block(list(range(n)), kv).write(path, codec)
    assert read_tokens(path)[1] == {0: 0, 1: 128, 2: 192}
    block = read(path, lm.shapes, torch.float32)
    assert all(torch.equal(a, b) for layer in kv for a, b in zip(block.kv[layer], kv[layer], strict=True))
    assert torch.equal(block.part(1, slice(150, 160))[1], kv[1][1][:, 22:32])
    for layer, at in ((1, slice(127, 200)), (2, slice(0, 200)), (3, slice(150, 160))):
        with pytest.raises(CorruptFile):
            block.part(layer, at)


@pytest.mark.parametrize("gone", [0.5, -1, 3, 4, None, 1 << 70])
def test_a_layer_that_begins_where_none_does_is_refused(lm: LM, tmp_path: Path, gone: Any) -> None:
    shape, path = lm.shapes[0], tmp_path / "one.kv"
    kv = {name: torch.zeros(shape.n_kv_heads, 64, shape.k_dim) for name in "kv"}
    tree: dict[str, Any] = {_ids_of(path): torch.arange(192, dtype=torch.int32), "0": {"gone": 2, **kv}}
    snapshot_file.write(path, tree)
    assert read_tokens(path)[1] == {0: 128}
    assert read(path, lm.shapes, torch.float32).kv[0][0].shape[1] == 64
    tree["0"] = kv if gone is None else {"gone": gone, **kv}
    snapshot_file.write(path, tree)
    with pytest.raises(CorruptFile, match="gone"):
        read(path, lm.shapes, torch.float32)
    if gone is None:
        assert not read_tokens(path)[1]
    else:
        with pytest.raises(CorruptFile, match="gone"):
            read_tokens(path)


def test_a_longer_text_takes_the_place_of_its_beginning(lm: LM, tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path / "kv", lm)
    for end in (50, 100, 200, LENGTH + 10, LENGTH + 100):
        shelf.save(read_all(lm, IDS[:end]))
    assert len(list((tmp_path / "kv").glob(f"*/*{block_tree.ENDS}"))) == 2
    assert shelf.load_prefix(session(lm), IDS) == LENGTH + 99


def test_each_field_in_which_a_model_differs_is_named(lm: LM, tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path / "kv", lm)
    answer(lm, shelf, IDS)
    fields, of_model = dict(shelf._fields), {"weights", "files", "config", "load.quant", "load.dtype"}
    assert of_model | {"format", "kvcli", "torch", "transformers", "device", "layers"} == set(fields)
    for field in fields:
        other = shelf_in(tmp_path / "kv", lm)
        other._fields = fields | {field: "another"}
        s = session(lm)
        assert other.load_prefix(s, IDS) == 0
        assert other.mismatch(s) == [f"{field} was {fields[field]}, is another"]


def test_weights_that_were_replaced_since_are_another_models(lm: LM, tmp_path: Path) -> None:
    """Same size, same time, and one byte in their middle: nobody sees it who does not read them all."""
    shelf = shelf_in(tmp_path / "kv", lm)
    answer(lm, shelf, IDS)
    file = Path(lm.info.path) / "model.safetensors"
    whole = file.read_bytes()
    try:
        put(file, flipped(whole, len(whole) // 2 + 12345))
        assert shelf.load_prefix(session(lm), IDS) > 0  # loaded before
        other = shelf_in(tmp_path / "kv", lm)
        assert other.load_prefix(session(lm), IDS) == 0
        assert [field.split()[0] for field in other.mismatch(session(lm))] == ["weights"]
        (file.parent / "tokenizer.json").write_text("{}")
        assert [field.split()[0] for field in shelf_in(tmp_path / "kv", lm).mismatch(session(lm))] == [
            "weights",
            "files",
        ]
    finally:
        (file.parent / "tokenizer.json").unlink(missing_ok=True)
        put(file, whole)
    os.utime(file)
    assert shelf_in(tmp_path / "kv", lm).load_prefix(session(lm), IDS) > 0  # the same bytes, whenever they were written


@pytest.mark.parametrize("what", ["torch", "transformers", "kvcli.models.catalog"])
def test_what_another_release_computed_is_not_taken(
    lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    answer(lm, shelf_in(tmp_path / "kv", lm), IDS)
    monkeypatch.setattr(f"{what}.__version__", "9.9")
    other = shelf_in(tmp_path / "kv", lm)
    assert other.load_prefix(session(lm), IDS) == 0
    assert [field.split()[0] for field in other.mismatch(session(lm))] == [what.removesuffix(".models.catalog")]


def test_a_block_behind_another_parent_is_not_taken(lm: LM, tmp_path: Path) -> None:
    """Of two texts that differ in their first token the later blocks have the same tokens and other keys and values."""
    shelf, twin = shelf_in(tmp_path / "kv", lm), [IDS[0] + 1, *IDS[1:]]
    answer(lm, shelf, IDS)
    answer(lm, shelf, twin)
    (folder,) = (tmp_path / "kv").iterdir()
    mine, its = ([path for path, _ in BlockTree(folder).places(ids)] for ids in (IDS, twin))
    for a, b in zip(mine[1:3], its[1:3], strict=True):
        shutil.copy(b, a)
    cached, said, logits = answer(lm, shelf_in(tmp_path / "kv", lm), IDS)
    assert cached < LENGTH + 1
    _, plain, alone = answer(lm, None, IDS)
    assert said == plain
    assert torch.equal(logits, alone)
    assert shelf.load_prefix(session(lm), IDS) == len(IDS) - 1  # and they were made again


def test_what_another_model_read_is_not_taken_whatever_its_folder_is_called(lm: LM, tmp_path: Path) -> None:
    mine, other = shelf_in(tmp_path / "kv", lm), shelf_in(tmp_path / "kv", lm)
    other._fields = {**other._fields, "weights": "another's"}
    for way in (INTACT, CacheConditions(False, {"policy.name": "another"})):
        assert not mine.save(read_all(lm, IDS), shaping=way).why_not
        mine._folder(session(lm), way).rename(other._folder(session(lm), way))
        assert other.load_prefix(session(lm), IDS, way) == 0


def test_another_model_is_no_reason(lm: LM, tmp_path: Path) -> None:
    """What was never kept was not made useless by what was."""
    answer(lm, shelf_in(tmp_path / "kv", lm), IDS)
    mine = lm.info
    try:
        lm.info = replace(mine, id="another", path="")
        assert not shelf_in(tmp_path / "kv", lm).mismatch(session(lm))
        lm.info = replace(mine, id="another", quant="int8")
        assert not shelf_in(tmp_path / "kv", lm).mismatch(session(lm))
    finally:
        lm.info = mine


def test_what_was_not_used_for_longest_makes_room(lm: LM, tmp_path: Path) -> None:
    shelf_in(tmp_path / "one", lm).save(read_all(lm, IDS))
    one = sum(p.stat().st_size for p in (tmp_path / "one").glob("*/*"))
    shelf = shelf_in(tmp_path / "kv", lm, int(2.5 * one))
    texts = [[start, *IDS[1:]] for start in range(4)]
    for ids in texts[:3]:
        answer(lm, shelf, ids)
        for path in (tmp_path / "kv").glob("*/*"):
            os.utime(path, (path.stat().st_mtime - 10, path.stat().st_mtime - 10))  # as time goes by
    held = sum(p.stat().st_size for p in (tmp_path / "kv").glob("*/*"))
    assert held < 2.5 * one
    assert [shelf.load_prefix(session(lm), ids) > LENGTH for ids in texts] == [False, True, True, False]
    assert "do not fit" in shelf_in(tmp_path / "kv", lm, one // 2).save(read_all(lm, texts[3])).why_not


def read_all(lm: LM, ids: list[int]) -> GenerationSession:
    s = session(lm)
    while run_to_end(s.prefill_chunk(ids)):
        pass
    return s


def test_what_is_read_in_a_moment_is_not_written(lm: LM, tmp_path: Path) -> None:
    assert PrefixCache(tmp_path / "kv", 1 << 30, lm).save(read_all(lm, IDS)) == SaveResult()
    assert not (tmp_path / "kv").exists()


def test_files_are_their_owners_alone(lm: LM, tmp_path: Path) -> None:
    answer(lm, shelf_in(tmp_path / "kv", lm), IDS)
    for path in (tmp_path / "kv").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


def test_a_folder_that_takes_nothing_costs_no_answer(lm: LM, tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("in the way")
    assert "not saved" in shelf_in(tmp_path / "kv", lm).save(read_all(lm, IDS)).why_not
    assert shelf_in(tmp_path / "kv", lm).load_prefix(session(lm), IDS) == 0


@pytest.fixture(scope="module")
def kept(lm: LM, tmp_path_factory: pytest.TempPathFactory) -> tuple[BlockTree, list[Path]]:
    folder = tmp_path_factory.mktemp("kv")
    answer(lm, shelf_in(folder, lm), IDS)
    return BlockTree(next(folder.iterdir())), sorted(folder.glob(f"*/*{block_tree.ENDS}"))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_no_damaged_file_is_believed(lm: LM, kept: tuple[BlockTree, list[Path]], tmp_path_factory, seed: int) -> None:  # type: ignore[no-untyped-def]
    noise = random.Random(seed)
    whole = kept[1][0].read_bytes()
    data = bytearray(whole)
    match noise.randrange(4):
        case 0:
            del data[noise.randrange(len(data)) :]
        case 1:
            data += noise.randbytes(noise.randrange(1, 9))
        case 2:
            data[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
        case _:
            at = noise.randrange(min(len(data), 4096))
            data[at : at + 8] = noise.randbytes(8)
    path = tmp_path_factory.getbasetemp() / kept[0].folder.name / kept[1][0].name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    with suppress(CorruptFile):
        assert 0 < len(read_tokens(path)[0]) <= LENGTH
    try:
        block = read(path, lm.shapes, lm.dtype)
    except CorruptFile:
        return
    assert block.ids  # a name of the header that says nothing may have changed
    path.write_bytes(whole)
    same = read(path, lm.shapes, lm.dtype)
    assert block.ids == same.ids
    assert all(torch.equal(a, b) for i in same.kv for a, b in zip(block.kv.get(i, same.kv[i]), same.kv[i], strict=True))


def test_what_a_text_has_already_is_not_read_from_the_disk_again(
    lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = shelf_in(tmp_path / "kv", lm)
    answer(lm, shelf, IDS)
    half, opened = read_all(lm, IDS[: 2 * LENGTH + 20]), list[Path]()
    monkeypatch.setattr(block_tree, "read", lambda path, *rest: (opened.append(path), read(path, *rest))[1])
    assert shelf.load_prefix(half, [*IDS[: 2 * LENGTH + 30], -1, *IDS]) == 2 * LENGTH + 19  # too little to fetch
    assert not opened
    assert shelf.load_prefix(half, IDS) == len(IDS) - 1
    assert len(opened) == 2
    fresh = read_all(lm, IDS)
    while run_to_end(half.prefill_chunk(IDS)):
        pass
    (made,), (same,) = (
        run([ForwardRequest(lm, Rows.chain(s.ids[-1:], len(s.ids) - 1), s.cache, want=[0])]) for s in (half, fresh)
    )
    assert torch.equal(made.logits, same.logits)


@pytest.mark.parametrize("how", ["empty", "cut", "numbers", "tokens", "pipe"])
def test_a_damaged_block_is_made_again(lm: LM, tmp_path: Path, how: str) -> None:
    shelf = shelf_in(tmp_path / "kv", lm)
    answer(lm, shelf, IDS)
    (folder,) = (tmp_path / "kv").iterdir()
    path = [path for path, _ in BlockTree(folder).places(IDS)][1]
    data = bytearray(path.read_bytes())
    match how:
        case "empty":
            data.clear()
        case "cut":
            del data[-100:]
        case "numbers":
            data[-1] ^= 1
        case "tokens":
            at = bytes(data).index(torch.tensor(IDS[LENGTH : 2 * LENGTH], dtype=torch.int32).numpy().tobytes())
            data[at] ^= 1
        case "pipe":
            path.unlink()
            os.mkfifo(path)
    if how != "pipe":
        path.write_bytes(data)
    cached, said, _ = answer(lm, shelf, IDS)
    assert cached in (0, LENGTH)  # a window may have lost what the block before needs
    assert said == answer(lm, None, IDS)[1]
    assert answer(lm, shelf, IDS)[0] == len(IDS) - 1


@pytest.mark.parametrize("ids", [1, LENGTH - 1], ids=["shorter", "other"])
def test_a_block_that_became_another_one_before_it_was_read_is_not_taken(
    lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: int
) -> None:
    """Between the look at its tokens and the reading another process may write there."""
    shelf = shelf_in(tmp_path / "kv", lm)
    answer(lm, shelf, IDS)
    replaced = list[Path]()

    def late(path: Path, *rest: object) -> Block:
        block = read(path, *rest)  # type: ignore[arg-type]
        if not replaced and path == [path for path, _ in BlockTree(path.parent).places(IDS)][1]:
            replaced.append(path)
            other = [*block.ids[: ids - 1], 5, *block.ids[ids:]]
            Block(other, {i: (k * 0, v * 0) for i, (k, v) in block.kv.items()}).write(path, Uncompressed())
            block = read(path, *rest)  # type: ignore[arg-type]
        return block

    monkeypatch.setattr(block_tree, "read", late)
    cached, said, logits = answer(lm, shelf, IDS)
    assert replaced
    assert cached in (0, LENGTH)  # a window may have lost what the block before needs
    _, plain, alone = answer(lm, None, IDS)
    assert said == plain
    assert torch.equal(logits, alone)


def test_a_whole_block_in_the_place_of_a_corrupt_one_stays(
    lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the reading of a corrupt file and its deletion another process may write the block anew."""
    shelf = shelf_in(tmp_path / "kv", lm)
    answer(lm, shelf, IDS)
    path, other = next(path for path, _ in BlockTree(next((tmp_path / "kv").iterdir())).places(IDS)), tmp_path / "other"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    def late(at: Path, *rest: object) -> Block:
        try:
            return read(at, *rest)  # type: ignore[arg-type]
        finally:
            other.write_bytes(data)
            other.replace(at)

    monkeypatch.setattr(block_tree, "read", late)
    with pytest.raises(snapshot_file.CorruptFile):
        block_tree.load(path, IDS[:LENGTH], {}, lm.shapes, torch.float32)
    assert path.read_bytes() == data


def test_a_whole_block_that_lacks_what_it_had_stays(tmp_path: Path, lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has replaced it since by one that has other slots."""
    path, half = tmp_path / "block", torch.zeros(2, LENGTH // 2, 4)
    path.write_bytes(b"whole")
    monkeypatch.setattr(block_tree, "read", lambda *_: Block(IDS[:LENGTH], {0: (half, half)}))
    with pytest.raises(snapshot_file.CorruptFile, match="replaced"):
        block_tree.load(path, IDS[:LENGTH], {0: slice(0, LENGTH)}, lm.shapes, torch.float32)
    assert path.exists()


def test_what_others_remove_meanwhile_is_no_failure(lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs make room at once: what one has listed is gone when it looks."""
    shelf, whole = shelf_in(tmp_path / "kv", lm), Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, *how: [*whole(self, *how), self / f"gone{block_tree.ENDS}"])
    assert not shelf.save(read_all(lm, IDS)).why_not


def test_on_a_full_disk_what_is_new_counts(lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = shelf_in(tmp_path / "kv", lm)
    shelf.save(read_all(lm, IDS[:-40]))
    left = sum(path.stat().st_size for path in (tmp_path / "kv").glob("*/*")) // 2
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=SPARE + left))
    assert not shelf.save(read_all(lm, IDS)).why_not
    assert "do not fit" in shelf.save(read_all(lm, [3, *IDS])).why_not


@pytest.mark.parametrize("have", [33, 88, LENGTH, 600])
def test_a_text_that_has_a_beginning_goes_on_to_the_same_bits(lm: LM, tmp_path: Path, have: int) -> None:
    """Where a window hides what lies between, slots must not lie otherwise than if all had been read."""
    shelf, far = shelf_in(tmp_path / "kv", lm), families.prompt(1100, seed=3)
    shelf.save(read_all(lm, far))
    begun, fresh = read_all(lm, far[:have]), read_all(lm, far)
    assert shelf.load_prefix(begun, far) == len(far) - 1
    assert not shelf.save(begun).why_not
    (made,), (same,) = (
        run([ForwardRequest(lm, Rows.chain(s.ids[-1:], len(s.ids) - 1), s.cache, want=[0])]) for s in (begun, fresh)
    )
    assert torch.equal(made.logits, same.logits)


def test_keeping_ends_between_blocks_when_it_is_stopped(lm: LM, tmp_path: Path) -> None:
    shelf, asked = shelf_in(tmp_path / "kv", lm), iter([False, False, True])
    assert "stopped" in shelf.save(read_all(lm, IDS), lambda: next(asked)).why_not
    assert len(list((tmp_path / "kv").glob(f"*/*{block_tree.ENDS}"))) == 2
    assert not shelf.save(read_all(lm, IDS)).why_not
    assert shelf.load_prefix(session(lm), IDS) == len(IDS) - 1


# --- room, errors of the system, stress tests

SNAP = prefix_cache_stress.SNAP


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LM:
    return prefix_cache_stress.model(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_what_was_kept(llama: LM, tmp_path: Path, kills: int) -> None:
    found = prefix_cache_stress.kills(tmp_path, llama, kills, seed=kills)
    assert found["bad"] == 0, found
    assert found["old"] + found["new"] + found["between"] == kills


@pytest.mark.parametrize("shaping", [INTACT, SNAP], ids=["whole", "shaped"])
def test_no_more_is_taken_than_there_is_room_for_not_even_meanwhile(
    llama: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shaping: CacheConditions
) -> None:
    shelf_in(tmp_path / "one", llama).save(prefix_cache_stress.read(llama, shaping, 850), shaping=shaping)
    most = int(1.7 * sum(path.stat().st_size for path in (tmp_path / "one").glob("*/*.kv")))
    shelf, seen = shelf_in(tmp_path / "kv", llama, most), list[int]()

    monkeypatch.setattr("kvcli.files.os.replace", lambda *of: (rename(*of), seen.append(held(tmp_path / "kv")))[0])
    for start in range(3):
        s = prefix_cache_stress.session(llama, shaping)
        list(iterate_events(s.read([start, *prefix_cache_stress.IDS[:850]])))
        assert not shelf.save(s, shaping=shaping).why_not
    assert most / 2 < max(seen) <= most


rename = os.replace


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*.kv"))


@pytest.mark.parametrize("shaping", [INTACT, SNAP], ids=["whole", "shaped"])
def test_what_the_system_would_not_open_is_not_damaged(
    llama: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shaping: CacheConditions
) -> None:
    shelf = shelf_in(tmp_path / "kv", llama)
    shelf.save(prefix_cache_stress.read(llama, shaping, 400), shaping=shaping)
    files = sorted((tmp_path / "kv").glob("*/*.kv"))

    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("kvcli.settings.small_file.os.open", full)
        assert shelf.load_prefix(prefix_cache_stress.session(llama, shaping), prefix_cache_stress.IDS, shaping) == 0
    assert sorted((tmp_path / "kv").glob("*/*.kv")) == files
    assert shelf.load_prefix(prefix_cache_stress.session(llama, shaping), prefix_cache_stress.IDS, shaping) == 399


@pytest.mark.parametrize("shaping", [INTACT, SNAP], ids=["whole", "shaped"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), MemoryError()], ids=["disk", "memory"])
def test_where_nothing_can_be_written_what_was_kept_stays(
    llama: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shaping: CacheConditions, error: Exception
) -> None:
    shelf = shelf_in(tmp_path / "kv", llama)
    shelf.save(prefix_cache_stress.read(llama, shaping, 400), shaping=shaping)

    def full(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("kvcli.files._temporary", full)
        why = shelf.save(prefix_cache_stress.read(llama, shaping, 850), shaping=shaping).why_not
    assert why.startswith("the KV cache of the prompt is not saved: ")
    assert shelf.load_prefix(prefix_cache_stress.session(llama, shaping), prefix_cache_stress.IDS, shaping) == 399


@pytest.mark.parametrize("shaping", [INTACT, SNAP], ids=["whole", "shaped"])
def test_two_processes_keep_and_take_at_once(llama: LM, tmp_path: Path, shaping: CacheConditions) -> None:
    """With room for little more than one text, so that each makes the other's go."""
    texts = [prefix_cache_stress.read(llama, shaping, n) for n in (400, 850)]
    shelf_in(tmp_path / "one", llama).save(texts[1], shaping=shaping)
    most, want = (
        int(1.3 * held(tmp_path / "one")),
        prefix_cache_stress.logits(prefix_cache_stress.session(llama, INTACT), prefix_cache_stress.IDS),
    )
    rights = {
        n - 1: prefix_cache_stress.logits(prefix_cache_stress.read(llama, SNAP, n), prefix_cache_stress.IDS)
        for n in (400, 850)
    }

    def one(mine: int) -> None:
        shelf = shelf_in(tmp_path / "kv", llama, most)
        for _ in range(12):
            assert not shelf.save(texts[mine], shaping=shaping).why_not
            s = prefix_cache_stress.session(llama, shaping)
            if have := shelf.load_prefix(s, prefix_cache_stress.IDS, shaping):
                right = want if shaping.is_intact else rights[have]
                assert torch.equal(prefix_cache_stress.logits(s, prefix_cache_stress.IDS), right)

    children = [_forked(partial(one, mine)) for mine in range(2)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert held(tmp_path / "kv") <= 2 * most
    assert not list((tmp_path / "kv").rglob("*.part"))


def _forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    with suppress(BaseException):
        work()
        status = 0
    os._exit(status)


def test_each_setting_that_shaped_a_kv_cache_is_named_where_it_differs(llama: LM, tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path / "kv", llama)
    shelf.save(prefix_cache_stress.read(llama, SNAP, 400), shaping=SNAP)
    for key, value in SNAP.settings.items():
        other, s = replace(SNAP, settings={**SNAP.settings, key: "another"}), prefix_cache_stress.session(llama, SNAP)
        assert shelf.load_prefix(s, prefix_cache_stress.IDS, other) == 0
        assert shelf.mismatch(s, other) == [f"{key} was {value}, is another"]
    fields = dict(shelf._fields)
    for field in fields:
        shelf._fields, s = fields | {field: "another"}, prefix_cache_stress.session(llama, SNAP)
        assert shelf.load_prefix(s, prefix_cache_stress.IDS, SNAP) == 0
        assert shelf.mismatch(s, SNAP) == [f"{field} was {fields[field]}, is another"]


def test_a_shaped_kv_cache_serves_a_text_that_goes_on_from_it_and_no_other(llama: LM, tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path / "kv", llama)
    shelf.save(prefix_cache_stress.read(llama, SNAP, 400), shaping=SNAP)
    for ids, n in (
        (prefix_cache_stress.IDS, 399),
        (prefix_cache_stress.IDS[:399], 0),
        ([*prefix_cache_stress.IDS[:398], 3, 4, 5], 0),
    ):
        s = prefix_cache_stress.session(llama, SNAP)
        assert shelf.load_prefix(s, ids, SNAP) == s.committed == n
    assert shelf.load_prefix(prefix_cache_stress.session(llama, INTACT), prefix_cache_stress.IDS) == 0


def test_a_shaped_kv_cache_under_the_name_of_another_text_is_not_taken(llama: LM, tmp_path: Path) -> None:
    shelf, other = shelf_in(tmp_path / "kv", llama), [*prefix_cache_stress.IDS[:200], 3, *prefix_cache_stress.IDS[201:]]
    shelf.save(prefix_cache_stress.read(llama, SNAP, 400), shaping=SNAP)
    (path,) = (tmp_path / "kv").glob("*/*.kv")
    path.rename(path_of(path.parent, other[:399]))
    s = prefix_cache_stress.session(llama, SNAP)
    assert shelf.load_prefix(s, other, SNAP) == s.committed == 0
    assert not list((tmp_path / "kv").glob("*/*.kv"))
    want = prefix_cache_stress.logits(prefix_cache_stress.session(llama, SNAP), other)
    assert torch.equal(prefix_cache_stress.logits(s, other), want)


@pytest.mark.parametrize("shaping", [INTACT, cache_conditions(Profile.load("lean"))], ids=["blocks", "snapshot"])
def test_the_files_of_a_prefix_can_be_read_before_it_is_loaded(
    llama: LM, tmp_path: Path, shaping: CacheConditions, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, opened = shelf_in(tmp_path, llama), list[Path]()
    assert not shelf.save(read_all(llama, IDS), shaping=shaping).why_not
    monkeypatch.setattr(shelves, "open_regular", lambda path: opened.append(path) or path.open("rb"))
    shelf.read_ahead(session(llama), [*IDS, 7], shaping)
    assert len(opened) == (4 if shaping.is_intact else 1)
    for path in opened:
        path.unlink()
    assert shelf.load_prefix(session(llama), [*IDS, 7], shaping) == 0


def test_a_longer_shaped_kv_cache_takes_the_place_of_its_beginning(llama: LM, tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path / "kv", llama)
    for n in (100, 400, 850):
        shelf.save(prefix_cache_stress.read(llama, SNAP, n), shaping=SNAP)
    (path,) = (tmp_path / "kv").glob("*/*.kv")
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_a_head_map_says_is_part_of_what_shaped_a_kv_cache(tmp_path: Path) -> None:
    (tmp_path / "map").write_text("1 2\n")
    changes = {"alloc": "headmap", "headmap": str(tmp_path / "map")}
    profile = Profile.load("snap").replace(policy=changes)
    before = cache_conditions(profile)
    assert before == cache_conditions(profile)
    (tmp_path / "map").write_text("2 1\n")
    assert {k for k, v in cache_conditions(profile).settings.items() if before.settings[k] != v} == {"policy.headmap"}
