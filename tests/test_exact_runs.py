"""What `--exact` promises: the text of plain decoding to the letter, and no draft where rounding could part them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from kvcli import assemble
from kvcli.chat.model import Model
from kvcli.engine.loading.open_lm import install_kernels
from kvcli.kernels.linear_skinny import MOST
from kvcli.kernels.native import native
from kvcli.settings.profile import Profile
from kvcli.summarize.request import Request
from tests import make, small_tokenizers
from tests.bench import stress_summaries
from tests.bench.stress_exact import storm

ROOT = Path(__file__).parents[1]
DRAFTING = ["ngram", "lookahead", "fafo", "fafo-paper"]


def model(profile: Profile, dtype: torch.dtype) -> Model:
    return Model(make.model("llama", dtype), small_tokenizers.demo(), profile)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", DRAFTING)
def test_a_strict_profile_drafts_only_where_rows_round_alike_and_says_so(name: str, dtype: torch.dtype) -> None:
    made = model(Profile.load(name).replace(spec={"require_batch_invariance": True}), dtype)
    if dtype == torch.float32:
        assert (made.profile.spec.method, made.cautions) == (Profile.load(name).spec.method, [])
    else:
        assert made.profile.spec.method == "off"
        (caution,) = made.cautions
        assert caution.startswith("no drafting: in ")
        assert str(dtype).removeprefix("torch.") in caution
        assert made.profile.origins["spec.method"] == "the model"
        other = made.with_profile(made.profile.replace(sample={"seed": 3}))
        assert other.cautions == [caution], "it does not draft either"
    assert made.exactness_label == "exact"


@pytest.mark.skipif(native() is None, reason="nothing is drafted in 16 bits without native kernels")
@pytest.mark.parametrize(
    ("changes", "by"),
    [
        ({"kv": {"k_bits": 4, "v_bits": 4}}, ""),
        ({"kv": {"dtype": "fp32"}}, ""),
        ({"kv": {"dtype": "fp16"}}, "kv.dtype"),
        ({"kv": {"k_bits": 4, "v_bits": 4, "rotate": "hadamard"}}, ""),
        ({"kv": {"v_bits": 8}}, ""),
        ({"sparse": {"method": "sketch"}}, ""),
        ({"sparse": {"method": "certified"}, "kv": {"k_bits": 8}, "memory": {"disk": "1GiB"}}, ""),
        ({"sparse": {"method": "minmax"}, "kv": {"dtype": "fp16"}}, "kv.dtype"),
        ({"memory": {"disk": "1GiB", "fallbacks": ["kv.k_bits=2"]}}, ""),
    ],
)
def test_a_store_that_is_not_read_natively_is_not_drafted_over_by_a_strict_profile(
    changes: dict[str, dict[str, object]], by: str
) -> None:
    of = make.model("llama", torch.bfloat16)
    install_kernels(of)
    assert of.is_row_invariant
    wanted = Profile.load("ngram").replace(exactness="approx", spec={"require_batch_invariance": True}, **changes)
    profile = assemble.adapted_profile(of, wanted)
    why = "".join(profile.adaptations)
    assert profile.spec.method == ("off" if by else "ngram")
    assert by in why
    assert bool(why) == bool(by)


def test_passes_of_more_rows_than_a_gpu_serves_alike_are_not_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    of = make.model("llama", torch.bfloat16)
    install_kernels(of)
    few, many = Profile.load("ngram"), Profile.load("fafo-paper").replace(exactness="exact")
    assert few.spec.rows <= MOST < many.spec.rows
    for is_apart, said in ((False, "bit-exact"), (True, "exact up to 16-bit rounding")):
        monkeypatch.setattr(of, "is_on_accelerator", is_apart)
        assert (assemble.exactness_label(of, few), assemble.exactness_label(of, many)) == ("bit-exact", said)
        profile = assemble.adapted_profile(of, many.replace(spec={"require_batch_invariance": True}))
        why = "".join(profile.adaptations)
        assert (profile.spec.method == "off", f"more than {MOST} tokens" in why) == (is_apart, is_apart)


def test_only_what_is_exact_is_called_so() -> None:
    def said(name: str, dtype: torch.dtype) -> str:
        return assemble.exactness_label(make.model("llama", dtype), Profile.load(name))

    assert {said(name, torch.bfloat16) for name in DRAFTING} == {"exact up to 16-bit rounding"}
    assert {said(name, torch.float32) for name in DRAFTING} == {"exact"}
    assert (said("exact", torch.bfloat16), said("lean", torch.bfloat16)) == ("exact", "approx")


def test_exact_runs_write_one_text_whatever_passes_take() -> None:
    found = storm(6)
    assert (found["tried"], found["bad"]) == (6, 0)
    assert found["drafted_fp32"] > 0
    assert (found["drafted_bf16"] > 0) is (native() is not None)  # elsewhere rows of 16 bits know their neighbours


def test_readme_says_of_the_stress_test_what_it_gave() -> None:
    kept = json.loads((ROOT / "docs" / "benchmarks" / "reliability.json").read_text())
    (row,) = [row for row in kept["rows"] if row["storm"] == "stress_exact"]
    (tokens,) = re.findall(r"([\d,]+) tokens in bf16$", row["what"])
    assert "of 100,000 tokens" in (ROOT / "README.md").read_text()
    assert (row["bad"], int(tokens.replace(",", "")) >= 100_000) == (0, True)


@pytest.mark.slow
def test_two_hundred_exact_runs_write_one_text() -> None:
    found = storm(200, seed=1)
    assert (found["tried"], found["bad"]) == (200, 0)


def test_a_summary_is_one_text_whatever_its_passes_take() -> None:
    found = stress_summaries.storm(2, Request(chunk=700), file="demo:pdf:1-4")
    assert (found["tried"], found["bad"]) == (2, 0)
    assert (found["drafted"] > 0) is (native() is not None)


@pytest.mark.slow
def test_fifty_summaries_are_one_text() -> None:
    found = stress_summaries.storm(50, Request(chunk=1200), seed=1)
    assert (found["tried"], found["bad"]) == (50, 0)
    assert found["stopped"] > 10
