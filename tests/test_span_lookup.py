"""Documents that stood behind another beginning: found among kept blocks by content, and read if damaged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import kvcli
from kvcli.engine.engine import run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import install_kernels, wrap_lm
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.methods.reuse.cacheblend import CacheBlend
from kvcli.methods.reuse.pie import Pie
from kvcli.methods.reuse.span_reuse import SpanReuse
from kvcli.prefix_cache import span_lookup as finding
from kvcli.prefix_cache.block_tree import LENGTH, Block, BlockTree
from kvcli.prefix_cache.block_tree import read as read_block
from kvcli.prefix_cache.codec import Uncompressed
from kvcli.prefix_cache.prefix_cache import INTACT, PrefixCache
from kvcli.settings.profile import Profile
from tests import families, make

LEAST = 64
A, B, C = (families.prompt(n, seed=n) for n in (300, 600, 700))
NEW = [3, 4, 5, *C, 6, *A, 7, *B, 8]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LM:
    folder = tmp_path_factory.mktemp("model")
    model = families.build("llama", max_position_embeddings=4096)
    save_file({n: p.detach().clone() for n, p in model.named_parameters()}, folder / "model.safetensors")
    lm = wrap_lm(model, path=str(folder))
    install_kernels(lm)
    return lm


def session(lm: LM, how: Pie | None = None) -> GenerationSession:
    kv = make.dense(lm, windows=make.windows(lm))
    return make.session(lm, kv, chunk=200, reusing=how)


def spans(s: GenerationSession) -> SpanReuse:
    found = s.find(SpanReuse)
    assert found is not None
    return found


def shelf_of(folder: Path, lm: LM, *texts: Sequence[int]) -> PrefixCache:
    """With texts that were read, each by itself."""
    shelf = PrefixCache(folder, 1 << 30, lm, min_work=0)
    for ids in texts:
        one = session(lm)
        run_to_end(one.read(ids))
        assert not shelf.save(one).why_not
    return PrefixCache(folder, 1 << 30, lm, min_work=0)


def read(lm: LM, prefix_cache: PrefixCache, how: Pie | None, ids: Sequence[int] = NEW) -> tuple[GenerationSession, int]:
    """A prompt behind what lies on a prefix cache; how many of its tokens were taken over."""
    one, took = session(lm, how), 0
    one.start_answer(ids, Sampler())
    prefix_cache.load_prefix(one, ids)
    if (reuse := one.find(SpanReuse)) is not None:
        reuse.add(prefix_cache.find_spans(one, ids, INTACT, LEAST))
    while True:
        before, is_run = (
            one.committed,
            reuse is not None and any(run.new <= one.committed < run.end for run, _ in reuse._found),
        )
        if not run_to_end(one.prefill_chunk(ids)):
            return one, took
        took += one.committed - before if is_run else 0


def same(a: GenerationSession, b: GenerationSession) -> bool:
    each = [(a.cache.slots(i), b.cache.slots(i)) for i in range(a.lm.n_layers)]
    return all(torch.equal(s.k, t.k) and torch.equal(s.v, t.v) for s, t in each)


@pytest.mark.parametrize("select", ["kv", "hidden"])
def test_documents_in_another_order_are_taken_from_the_texts_that_have_them(
    lm: LM, tmp_path: Path, select: str
) -> None:
    shelf = shelf_of(tmp_path, lm, [9, *A, *B, 9], [10, 10, *C, 9])
    one, took = read(lm, shelf, Pie(LEAST))
    assert took == len(A) + len(B) + len(C)
    assert "reused" in one.approximations
    again, took = read(lm, shelf, CacheBlend(LEAST, 1.0, select))  # type: ignore[arg-type]
    assert took == len(A) + len(B) + len(C)
    plain, took = read(lm, shelf, None)
    assert took == 0
    assert same(again, plain)
    some, _ = read(lm, shelf, CacheBlend(LEAST, 0.3, select))  # type: ignore[arg-type]
    assert not same(some, plain)
    for i in range(lm.n_layers):  # values are those that were read, and in the first layer those of any text
        s, t = some.cache.slots(i), one.cache.slots(i)
        assert (s.v == t.v).all(-1).float().mean() > (0.99 if i == 0 else 0.2 if i > 1 else 0)


def test_what_this_text_had_goes_first_and_gaps_are_filled_from_others(lm: LM, tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path, lm, [9, *B, *C])
    one = session(lm, Pie(LEAST))
    run_to_end(one.read([9, 9, *A, *B[:100], 9]))
    new = [3, *A, 7, *B, 8]
    one.start_answer(new, Sampler())
    spans(one).add(shelf.find_spans(one, new, INTACT, LEAST))
    before = one.committed
    while run_to_end(one.prefill_chunk(new)):
        pass
    assert (before, one.committed) == (0, len(new) - 1)
    plain = session(lm)
    run_to_end(plain.read(new))
    first = [s.cache.slots(0) for s in (one, plain)]
    assert torch.equal(first[0].v, first[1].v)
    assert torch.allclose(first[0].k, first[1].k, atol=1e-4)
    late = [s.cache.slots(2).v[:, len(A) + 120 : len(A) + 500] for s in (one, plain)]
    assert not torch.allclose(*late)


def test_what_lies_in_the_midst_of_a_block_or_is_short_is_read(lm: LM, tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path, lm, [*A[:90], *B[:80], *A[90:]])
    assert read(lm, shelf, Pie(LEAST), [3, *B[:80], 5])[1] == 0
    assert read(lm, shelf, Pie(LEAST), [3, *A[: LEAST - 1], 5])[1] == 0
    assert read(lm, shelf, Pie(LEAST), [3, *A[:LEAST], 5])[1] == LEAST


@pytest.mark.parametrize("how", ["numbers", "gone", "closed", "other", "layers"])
def test_a_block_that_is_no_longer_what_it_was_is_read(lm: LM, tmp_path: Path, how: str) -> None:
    text = [9, *C, 9]
    shelf = shelf_of(tmp_path, lm, text)
    (folder,) = tmp_path.iterdir()
    path = [path for path, _ in BlockTree(folder).places(text[:-1])][1]
    one = session(lm, Pie(LEAST))
    one.start_answer(NEW, Sampler())
    spans(one).add(shelf.find_spans(one, NEW, INTACT, LEAST))
    data = bytearray(path.read_bytes())
    if how == "numbers":
        data[-1] ^= 1
        path.write_bytes(data)
    elif how == "gone":
        path.unlink()
    elif how == "layers":
        block = read_block(path, lm.shapes, lm.dtype)
        Block(block.ids, {0: block.kv[0]}).write(path, Uncompressed())
    elif how == "closed":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(next(path for path, _ in BlockTree(folder).places(text[:-1])).read_bytes())
    while run_to_end(one.prefill_chunk(NEW)):
        pass
    plain = session(lm)
    run_to_end(plain.read(NEW))
    assert one.committed == plain.committed
    s, t = one.cache.slots(0), plain.cache.slots(0)
    assert torch.equal(s.pos, t.pos)
    assert torch.equal(s.v, t.v)
    assert path.exists() == (how in {"closed", "layers"})  # a whole file may be another process's


def test_names_that_do_not_fit_and_tokens_of_no_vocabulary_are_passed_over(lm: LM, tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path, lm, [9, *C, 9])
    (folder,) = tmp_path.iterdir()
    paths = [path for path, _ in BlockTree(folder).places([9, *C])]
    for i, path in enumerate(paths):
        (folder / f"{'0' * 32}-{'ab' * 16}{i}.kv").write_bytes(path.read_bytes())
        (folder / f"{path.name[:32]}-{'cd' * 16}.kv").write_bytes(b"\xff" * 40)
    assert read(lm, shelf, Pie(LEAST))[1] == len(C)
    was, lm.vocab = lm.vocab, 4
    try:
        assert list(shelf_of(tmp_path, lm).find_spans(session(lm, Pie(LEAST)), NEW, INTACT, LEAST)) == []
    finally:
        lm.vocab = was


def test_another_models_blocks_are_not_looked_at(lm: LM, tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path, lm, [9, *C, 9])
    shelf._fields = shelf._fields | {"weights": "another"}
    assert read(lm, shelf, Pie(LEAST))[1] == 0


def test_no_more_is_looked_at_than_so_many_blocks_and_texts(
    lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = shelf_of(tmp_path, lm, *([at, *C[at:], 9] for at in range(12)))
    opened = list[Path]()
    whole = finding.read_tokens
    monkeypatch.setattr(finding, "read_tokens", lambda path: (opened.append(path), whole(path))[1])
    one = session(lm, Pie(LEAST))
    found = list(shelf.find_spans(one, NEW, INTACT, LEAST))
    assert len({id(source) for _, source in found}) == finding.TEXTS
    n = len(opened)
    assert list(shelf.find_spans(one, NEW, INTACT, LEAST))
    assert len(opened) == n, "files never change"
    monkeypatch.setattr(finding, "MOST", 5)
    fresh = PrefixCache(tmp_path, 1 << 30, lm, min_work=0)
    list(fresh.find_spans(one, NEW, INTACT, LEAST))
    assert len(opened) == n + 5


def test_windows_that_lost_what_lies_far_back_leave_it_to_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = families.build("gemma3", max_position_embeddings=4096, sliding_window=100)
    save_file({n: p.detach().clone() for n, p in model.named_parameters()}, folder / "model.safetensors")
    lm = wrap_lm(model, path=str(folder))
    shelf = shelf_of(tmp_path / "kv", lm, [9, *B, *C])
    one, took = read(lm, shelf, Pie(LEAST), [3, *B, *C, 5])
    begins = (len(B) + len(C) - 100 - 192) // 64 * 64
    assert begins % LENGTH, "in the midst of a block"
    assert took == (len(B) + len(C)) // LENGTH * LENGTH - begins
    plain = session(lm)
    run_to_end(plain.read([3, *B, *C, 5]))
    assert [torch.equal(one.cache.slots(i).pos, plain.cache.slots(i).pos) for i in range(lm.n_layers)] == [
        True
    ] * lm.n_layers


def test_what_is_taken_is_marked_as_used(lm: LM, tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path, lm, [9, *C, 9])
    (folder,) = tmp_path.iterdir()
    paths = [path for path, _ in BlockTree(folder).places([9, *C])]
    for path in paths:
        os.utime(path, (1, 1))
    read(lm, shelf, Pie(LEAST))
    assert all(path.stat().st_mtime > 1e9 for path in paths)


def test_what_one_chat_read_another_takes_over_and_nobody_takes_that_for_read(tmp_path: Path) -> None:
    exact = Profile.load("exact").replace(exactness="approx")
    ids = families.prompt(500, vocab=200)
    with kvcli.load("demo", exact) as model:
        model.prefix_cache = PrefixCache(tmp_path, 1 << 30, model.lm, min_work=0)
        blend = exact.replace(reuse={"method": "blend"})
        with model.open(exact) as text:
            text.generate([9, *ids, 11], max_new_tokens=1)
            assert not text.keep().why_not
        with model.open(blend) as text:
            turn = text.generate([7, 7, *ids, 12], max_new_tokens=4)
            assert (turn.stats.cached, turn.stats.reused) == (0, 500)
            assert turn.stats.approx
            assert not text.keep().why_not
        with model.open(exact) as text:
            assert text.generate([7, 7, *ids, 12], max_new_tokens=4).stats.cached == 0
        with model.open(blend) as text:
            again = text.generate([7, 7, *ids, 12, *turn.ids, 13], max_new_tokens=4)
            assert again.stats.cached == 500 + 3 + len(turn.ids) - 1
            assert again.stats.approx
            own = text.generate([8, *ids[:100], 13], max_new_tokens=1)
            assert own.stats.reused == 100
        with model.open(blend) as text:
            assert not text.generate([5, *reversed(ids)], max_new_tokens=1).stats.approx
            assert not text.keep().why_not
        with model.open(exact) as text:
            assert text.generate([5, *reversed(ids)], max_new_tokens=1).stats.cached == 500
