"""What is kept in fewer bytes is the same to the bit, and no bytes decide how much memory is taken."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcli.assemble import cache_conditions
from kvcli.kv.snapshot import SnapshotMismatch
from kvcli.prefix_cache import block_tree, snapshot_file
from kvcli.prefix_cache.block_tree import read
from kvcli.prefix_cache.codec import Lossless
from kvcli.prefix_cache.exponent_coding import decode, encode
from kvcli.prefix_cache.prefix_cache import INTACT, CacheConditions
from kvcli.prefix_cache.snapshot_file import CorruptFile
from kvcli.prefix_cache.tensor_codec import coded_state, decoded_state
from kvcli.settings.profile import Profile
from tests import prefix_cache_stress
from tests.prefix_cache_stress import IDS, SNAP, shelf_in

torch.set_num_threads(1)
CODING = CacheConditions(codec=Lossless())
SIZE = (2, 100, 24)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return prefix_cache_stress.model(tmp_path_factory.mktemp("llama"))


def kv(dtype: torch.dtype, *size: int, seed: int = 0) -> Tensor:
    """Channels of different widths, with what comes seldom."""
    noise = torch.Generator().manual_seed(seed)
    t = torch.randn(size or SIZE, generator=noise) * torch.rand(*(size or SIZE)[:-2], 1, (size or SIZE)[-1]).exp()
    t.view(-1)[::997] = torch.tensor([0.0, -0.0, 1e-30, -1e-38])[torch.arange(len(t.view(-1)[::997])) % 4]
    return t.to(dtype)


# --- a tensor


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([torch.bfloat16, torch.float32]), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data())
def test_lossless_has_every_bit(dtype: torch.dtype, size: list[int], data: st.DataObject) -> None:
    n = int(np.prod(size)) * dtype.itemsize
    raw = data.draw(st.binary(min_size=n, max_size=n))
    t = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).view(*size)
    if (made := encode(t)) is not None:
        assert len(made) < t.nbytes
        assert torch.equal(decode(made, size, dtype).view(torch.uint8), t.view(torch.uint8))


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.76), (torch.float32, 0.88)])
def test_lossless_takes_fewer_bytes(dtype: torch.dtype, share: float) -> None:
    t = kv(dtype, 2, 256, 64)
    made = encode(t)
    assert made is not None
    assert len(made) < share * t.nbytes
    assert torch.equal(decode(made, t.shape, dtype).view(torch.uint8), t.view(torch.uint8))
    turned = t.transpose(0, 1)  # not contiguous, as a part of a KV cache is
    state = coded_state({"k": turned}, Lossless())
    assert torch.equal(decoded_state(state)["k"].view(torch.uint8), turned.contiguous().view(torch.uint8))  # type: ignore[union-attr]


def test_numbers_that_would_take_more_stay_as_they_are() -> None:
    noise = torch.randint(0, 256, (2 * SIZE[0] * SIZE[1] * SIZE[2],), dtype=torch.uint8).view(torch.bfloat16).view(SIZE)
    for t in (noise, kv(torch.float16)):
        assert coded_state({"k": t}, Lossless())["k"] is t


# --- hostile


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_damaged_bytes_are_refused_or_of_the_right_size(seed: int) -> None:
    noise, t = random.Random(seed), kv(torch.bfloat16, 2, 33, 8)
    data = bytearray(encode(t) or b"")
    assert data
    match noise.randrange(3):
        case 0:
            del data[noise.randrange(len(data)) :]
        case 1:
            data += noise.randbytes(3)
        case _:
            at = noise.randrange(len(data))
            data[at : at + 4] = noise.randbytes(4)
    try:
        back = decode(bytes(data), t.shape, t.dtype)
    except ValueError:
        return
    assert back.shape == t.shape


STATE = {"own": 400, "kv": {"0": {"k": kv(torch.bfloat16), "v": kv(torch.bfloat16, seed=1), "gone": 0}}}
PART = coded_state(STATE, Lossless())["kv"]["0"]["k"]  # type: ignore[index,call-overload]
HOSTILE: Mapping[str, Mapping[str, object]] = {
    "more than it can be": {"1": 100_000_000},
    "endless": {"0": 1 << 62, "1": 1 << 62},
    "nothing of much": {"0": 0, "1": 1 << 40},
    "negative": {"0": -2, "1": -100},
    "many sizes": {str(i): 1 for i in range(5000)},
    "numbers that take long to multiply": {str(i): 10**4299 for i in range(2)},
    "no size": {"1": 0.5},
    "true": {"0": True},
    "no type": {"type": 9},
    "another type": {"type": 2},
    "no letter": {"coded": torch.zeros(9600, dtype=torch.uint8)},
    "numbers": {"coded": torch.zeros(4800, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_kv_cache_that_says_too_much_is_refused(how: str) -> None:
    with pytest.raises(SnapshotMismatch):
        decoded_state({"kv": {"0": {"k": {**PART, **HOSTILE[how]}}}})


# --- on the prefix cache


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"*/*{block_tree.ENDS}"))


@pytest.mark.parametrize("writes", [INTACT, CODING], ids=["as they are", "coded"])
@pytest.mark.parametrize("reads", [INTACT, CODING], ids=["as they are", "coded"])
def test_blocks_serve_each_other_with_the_same_bits(
    lm: Any, tmp_path: Path, writes: CacheConditions, reads: CacheConditions
) -> None:
    shelf = shelf_in(tmp_path / "kv", lm)
    assert not shelf.save(prefix_cache_stress.read(lm, INTACT, 400), shaping=writes).why_not
    s = prefix_cache_stress.session(lm, INTACT)
    assert shelf.load_prefix(s, IDS, reads) == 399
    assert torch.equal(
        prefix_cache_stress.logits(s, IDS), prefix_cache_stress.logits(prefix_cache_stress.read(lm, INTACT, 10), IDS)
    )


def test_a_damaged_coded_block_is_none(lm: Any, tmp_path: Path) -> None:
    shelf = shelf_in(tmp_path / "kv", lm)
    shelf.save(prefix_cache_stress.read(lm, INTACT, 400), shaping=CODING)
    for path in (tmp_path / "kv").glob(f"*/{block_tree.ROOT}-*{block_tree.ENDS}"):
        found: Any = snapshot_file.read(path)
        k = {**found["0"]["k"], "coded": found["0"]["k"]["coded"][:-1].clone()}
        snapshot_file.write(path, {**found, "0": {**found["0"], "k": k}})
        with pytest.raises(CorruptFile, match="its size does not fit its tensor"):
            read(path, lm.shapes, lm.dtype)
    assert shelf.load_prefix(prefix_cache_stress.session(lm, INTACT), IDS) == 0


def test_coded_files_are_smaller(lm: Any, tmp_path: Path) -> None:
    for name, each in {"as they are": INTACT, "coded": CODING}.items():
        shelf_in(tmp_path / name, lm).save(prefix_cache_stress.read(lm, INTACT, 850), shaping=each)
    assert size_of(tmp_path / "coded") < 0.93 * size_of(tmp_path / "as they are")


def test_a_shaped_kv_cache_in_fewer_bytes_goes_on_to_the_same_bits(lm: Any, tmp_path: Path) -> None:
    shelf, coding = shelf_in(tmp_path / "kv", lm), replace(SNAP, codec=Lossless())
    live = prefix_cache_stress.read(lm, SNAP, 850)
    assert not shelf.save(live, shaping=coding).why_not
    assert size_of(tmp_path / "kv") < 0.95 * snapshot_file.nbytes(live.state())
    for reads in (coding, SNAP):
        s = prefix_cache_stress.session(lm, SNAP)
        assert shelf.load_prefix(s, IDS, reads) == 849
        want = prefix_cache_stress.logits(prefix_cache_stress.read(lm, SNAP, 850), IDS)
        assert torch.equal(prefix_cache_stress.logits(s, IDS), want)


def test_a_profile_may_ask_for_it_and_promise_the_same_text() -> None:
    exact = Profile.load("exact")
    coding = exact.replace(prefix_cache={"codec": "lossless"})
    assert coding.exactness == "exact"
    assert cache_conditions(coding) == replace(cache_conditions(exact), codec=Lossless())
