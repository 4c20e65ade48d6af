"""Real GGUF files beside transformers and llama.cpp: pytest tests/test_gguf_real.py -m models --models FOLDER."""

from __future__ import annotations

from pathlib import Path

import pytest

FILES = ("SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-it.gguf")


@pytest.fixture(params=FILES)
def file(request: pytest.FixtureRequest) -> Path:
    folder = request.config.getoption("--models")
    if folder is None or not (found := Path(folder) / request.param).exists():
        pytest.skip(f"no {request.param} in --models {folder}")
    return found


@pytest.mark.models
def test_logits_are_those_of_others(file: Path):
    for package in ("accelerate", "llama_cpp"):
        pytest.importorskip(package, reason=f"{package}, which the other side needs, is absent")
    from tests.bench.gguf_models import compare

    found = compare(file, 2000, [])
    assert found["tokens"] == 2000
    assert found["relative_error"] < 1e-4
    assert found["top_as_llama_cpp_in_float"] >= 0.98
    # llama.cpp rounds what packed weights are multiplied by to 8 bits, and is then as far from itself in float
    assert found["top_as_llama_cpp"] == pytest.approx(found["top_of_llama_cpp_with_itself"], abs=0.01)
    assert found["tokens_as_llama_cpp"]
