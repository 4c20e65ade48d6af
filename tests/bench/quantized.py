"""llama.cpp's side of beside.py: GGUF files in its own rounding, and its plain buffers.

On a CPU with AMX, llama-cpp-python 0.3.36 ends at a fault in its own `ldtilecfg` on packed weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli.bench.llama_cpp import LlamaCpp

KINDS = {"none": "BF16", "int8": "Q8_0", "int4": "Q4_0"}  # ours: llama.cpp's
FTYPES = {"Q8_0": 7, "Q4_0": 2}  # llama.h


def quantized(whole: Path, kind: str) -> Path:
    """The GGUF file in llama.cpp's own rounding."""
    if kind not in FTYPES:
        return whole
    import llama_cpp

    wants, made = llama_cpp.llama_model_quantize_default_params(), whole.with_name(f"{kind}.gguf")
    wants.ftype = FTYPES[kind]
    assert not llama_cpp.llama_model_quantize(str(whole).encode(), str(made).encode(), wants)
    return made


class PlainBuffers(LlamaCpp):
    """Nothing is laid out anew for AMX."""

    def _load(self, file: Path) -> Any:
        usual = self._lib.llama_model_default_params

        def plain() -> Any:
            wants = usual()
            wants.use_extra_bufts = False
            return wants

        self._lib.llama_model_default_params = plain
        try:
            return super()._load(file)
        finally:
            self._lib.llama_model_default_params = usual


def llama_of(file: Path, threads: int, cache: Path) -> LlamaCpp:
    given: Any = SimpleNamespace(id=file.name, is_gguf=True, path=file, files=())
    return PlainBuffers(given, "bfloat16", threads, cache)
