"""Context lengths, varied keys, and near ties."""

from __future__ import annotations

import pytest
import torch

from kvcli.bench.environment import is_quiet
from kvcli.bench.grid import Vary, check_keys, contexts, variants
from kvcli.bench.run import check_room
from kvcli.bench.text_agreement import first_difference, tie_of
from kvcli.errors import ContextOverflow, UsageError


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("2k", [2048]),
        ("1k,8k,32k", [1024, 8192, 32768]),
        ("512-4k*2", [512, 1024, 2048, 4096]),
        ("512-4k", [512, 1024, 2048, 4096]),
        ("1k-4k+1k", [1024, 2048, 3072, 4096]),
        ("100-1000*3,300", [100, 300, 900]),
        ("1.5k, 1_000", [1536, 1000]),
    ],
)
def test_lengths(text: str, lengths: list[int]):
    assert contexts(text) == lengths


@pytest.mark.parametrize("text", ["", ",", "x", "0", "-5", "4k-1k", "1k-4k*1", "1k-4k*", "1-100k+1", "1.0001k"])
def test_lengths_that_mean_nothing(text: str):
    with pytest.raises(UsageError):
        contexts(text)


def test_every_combination_has_a_name():
    found = list(variants([Vary.of("spec.max=2,4"), Vary.of("prefill.chunk=512")]))
    assert found == [
        ("max=2 chunk=512", ["spec.max=2", "prefill.chunk=512"]),
        ("max=4 chunk=512", ["spec.max=4", "prefill.chunk=512"]),
    ]


def test_keys_with_one_end_are_named_whole():
    ((label, _),) = variants([Vary.of("a.max=1"), Vary.of("b.max=2")])
    assert label == "a.max=1 b.max=2"


def test_a_key_that_no_profile_has_is_told_the_nearest():
    with pytest.raises(UsageError) as caught:
        check_keys([Vary.of("spec.mx=1")], {"exact": ["spec.method"], "ngram": ["spec.method", "spec.max"]})
    assert caught.value.try_[0] == "--vary spec.max=1"
    check_keys([Vary.of("spec.max=1")], {"exact": ["spec.method"], "ngram": ["spec.max"]})


def test_what_a_benchmark_decides_is_not_varied():
    with pytest.raises(UsageError, match="all profiles sample in the same way"):
        check_keys([Vary.of("sample.top_p=0.9")], {"exact": ["sample.top_p"]})


def test_room_for_the_prompt_and_the_answer():
    check_room([129, 2048], 128, 2048, "demo")
    with pytest.raises(ContextOverflow) as caught:
        check_room([1024, 2049], 128, 2048, "demo")
    assert caught.value.detail == {"ctx": 2049, "limit": 2048}
    with pytest.raises(UsageError, match="leaves no tokens"):
        check_room([128], 128, 2048, "demo")
    with pytest.raises(UsageError) as caught:
        check_room([1024], 1024, 2048, "demo")
    assert caught.value.try_ == ("-n 256",)  # no context that the model does not have


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2], [1, 2, 3]) is None


@pytest.mark.parametrize(
    ("second", "dtype", "near"),
    [(15.75, torch.bfloat16, True), (14.0, torch.bfloat16, False), (15.75, torch.float32, False)],
)
def test_a_near_tie_is_as_wide_as_rounding(second: float, dtype: torch.dtype, near: bool):
    logits = torch.tensor([1.0, 16.0, second, -3.0], dtype=dtype)
    tie = tie_of(logits, 1, 2)
    assert tie.margin == pytest.approx(16 - second)
    assert tie.is_near is near
    assert tie_of(logits, 2, 1) == tie


def test_noise_moves_the_margin_and_not_what_rounding_reaches():
    logits = torch.tensor([1.0, 16.0, 12.0], dtype=torch.bfloat16)
    tie, plain = tie_of(logits, 1, 2, torch.tensor([0.0, 0.0, 4.125], dtype=torch.float64)), tie_of(logits, 1, 2)
    assert (tie.margin, tie.bound) == (pytest.approx(0.125), plain.bound)
    assert (tie.is_near, plain.is_near) == (True, False)


def test_a_token_that_neither_side_should_have_taken_is_no_tie():
    """Both tokens are equally likely, and both are far behind the best one."""
    assert not tie_of(torch.tensor([16.0, 3.0, 3.0], dtype=torch.bfloat16), 1, 2).is_near


def test_a_busy_machine_is_noticed():
    assert is_quiet([0.1, 0, 0], [1.1, 0, 0], cores=2, threads=1)
    assert not is_quiet([1.1, 0, 0], [1.1, 0, 0], cores=2, threads=1)
    assert not is_quiet([0.1, 0, 0], [2.0, 0, 0], cores=2, threads=1)
    assert is_quiet(None, None, cores=2, threads=1) is None
