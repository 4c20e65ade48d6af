"""Benchmark side for llama.cpp: the same weights as GGUF, by the C interface of llama-cpp-python, from ids to ids."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcli.bench.side import TimedSample
from kvcli.errors import BadModel, UsageError
from kvcli.installing import EXTRAS, pip

if TYPE_CHECKING:
    from kvcli.models.source import Source

DTYPES = ("bfloat16", "float16", "float32")
BATCH = 512  # prompt tokens per llama.cpp pass, its default
_WHOLE = ("F32", "F16", "BF16")  # dtypes of tensors that are not quantized
# Some builds crash in the first product of quantized weights on CPUs with AMX, because a compiler drops the tile sizes
# (ggml-org/llama.cpp pull request 26954). Decoding a few tokens in another process shows whether this build does.
_FEW_TOKENS = """
import sys, llama_cpp as lib
lib.llama_backend_init()
model = lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params())
wants = lib.llama_context_default_params()
wants.n_ctx, ids = 64, (lib.llama_token * 32)(*[1] * 32)
sys.exit(lib.llama_decode(lib.llama_init_from_model(model, wants), lib.llama_batch_get_one(ids, 32)))
"""


def refuse_conversion(found: Source, dtype: str, cache: Path) -> Path:
    """Raise BadModel: only a checkout can convert other files to GGUF, with tests/recipes/gguf_export.py."""
    raise BadModel(
        f"llama.cpp cannot be compared on {found.id}: it is no GGUF file",
        code="gguf_unsupported",
        try_=["a GGUF file as MODEL", "in a checkout: python tests/recipes/bench.py", "--baseline hf"],
    )


def require() -> None:
    """Raise UsageError, with the command to install it, if the package of the extra is missing."""
    if find_spec("llama_cpp") is None:
        raise UsageError(
            "--baseline llama.cpp needs llama-cpp-python, which is not installed",
            code="missing_extra",
            lines=[
                "installing llama-cpp-python builds llama.cpp from source with cmake and gcc,",
                "about 10 minutes on 2 cores",
            ],
            try_=[pip(*EXTRAS["llama"])],
        )


class LlamaCpp:
    """Benchmark side for llama.cpp, with flash attention unless in float32. Each prompt starts with an empty cache."""

    name = "llama.cpp"
    peak_bytes: int | None = None  # it runs in this process

    def __init__(
        self,
        found: Source,
        dtype: str,
        threads: int,
        cache: Path,
        *,
        device: str = "cpu",
        temperature: float = 0.0,
        seed: int = 0,
        to_gguf: Callable[[Source, str, Path], Path] = refuse_conversion,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`dtype` (bfloat16, float16, float32) is the run's; the GGUF file remains below `cache` for the next time."""
        if dtype not in DTYPES:
            raise UsageError(f"llama.cpp does not support {dtype}", try_=["--dtype fp32, bf16 or fp16"])
        require()
        self._lib: Any = import_module("llama_cpp")
        self.threads, self.device, self.clock = threads, device, clock
        self._dtype, self._id = dtype, found.id
        # A run in float32 is for comparing texts. On the CPU llama.cpp's flash attention rounds to float16 internally,
        # even with a float32 cache: logits of a tiny model then differ by 5e-3, and by 6e-6 without it.
        self._is_exact = dtype == "float32"
        self._kv = "float32" if self._is_exact else "float16"  # float16 is its own default
        self._check_device()
        self._ear = _ear()
        self._context: Any = None
        self._room = 0  # tokens of the context
        self._sampler = self._draws(temperature, seed) if temperature else None
        packed = Counter(t.dtype for file in found.files for t in file.tensors.values() if t.dtype not in _WHOLE)
        self._is_own, self._quant = found.is_gguf, " and ".join(kind for kind, _ in packed.most_common())
        self._file = found.path if found.is_gguf else to_gguf(found, dtype, cache)
        self._has_amx = not self._is_own or "AMX_INT8 = 1" not in self._system() or _survives(self._file)
        self._model = self._load(self._file)
        vocab = self._lib.llama_model_get_vocab(self._model)
        self.vocab = int(self._lib.llama_vocab_n_tokens(vocab))

    @property
    def setup(self) -> dict[str, str]:
        no_amx = "" if self._has_amx else "without AMX and repacked weights, because this build crashes with them"
        return {
            "engine": f"llama.cpp through llama-cpp-python {version('llama-cpp-python')}",
            "dtype": self._dtype,
            "kv": self._kv,
            "device": self.device,
            "threads": str(self.threads),
            "attention": "plain, because flash attention would round to float16" if self._is_exact else "flash",
            "batch": str(BATCH),
            **({"quant": self._quant} if self._is_own and self._quant else {}),
            "weights": ", ".join(filter(None, ["the GGUF file itself", self._quant, no_amx]))
            if self._is_own
            else f"GGUF from the same files, matrices in {self._dtype}, norms in float32",
            "file": str(self._file),
            "system": self._system(),
        }

    def run(self, prompt: Sequence[int], new: int) -> TimedSample:
        """Continue `prompt`. The context is sized for these tokens; allocating it is not timed."""
        self._make_room(len(prompt) + new)
        lib, context = self._lib, self._context
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        if self._sampler is not None:
            lib.llama_sampler_reset(self._sampler)  # the same text in every repetition
        ids, at = list[int](), list[float]()
        began = self.clock()
        for first in range(0, len(prompt), BATCH):
            self._feed(prompt[first : first + BATCH])
        while True:
            ids.append(self._next())
            at.append(self.clock() - began)
            if len(ids) == new:
                break
            self._feed(ids[-1:])
        return TimedSample(tuple(ids), tuple(at), len(prompt), self._kv_bytes())

    def close(self) -> None:
        if self._context is not None:
            self._lib.llama_free(self._context)
        if self._sampler is not None:
            self._lib.llama_sampler_free(self._sampler)
        if self._model is not None:
            self._lib.llama_model_free(self._model)
        self._context = self._model = self._sampler = None
        self._room = 0

    # ---- the C interface ----

    def _load(self, file: Path) -> Any:
        lib = self._lib
        wants = lib.llama_model_default_params()
        wants.n_gpu_layers = 0 if self.device == "cpu" else -1
        wants.use_extra_bufts = self._has_amx
        self._ear.said.clear()
        lib.llama_backend_init()
        model = lib.llama_model_load_from_file(str(file).encode(), wants)
        if not model:
            raise BadModel(
                f"llama.cpp could not load the weights of {self._id}",
                code="gguf_unsupported",
                lines=[*self._ear.said, str(file)],
                try_=[*([] if self._is_own else [f"rm {file}"]), "leave --baseline llama.cpp out"],
            )
        return model

    def _make_room(self, tokens: int) -> None:
        if self._room == tokens:
            return
        lib = self._lib
        if self._context is not None:
            lib.llama_free(self._context)
            self._context = None
        wants = lib.llama_context_default_params()
        wants.n_ctx = tokens
        wants.n_batch = wants.n_ubatch = BATCH
        wants.n_threads = wants.n_threads_batch = self.threads
        wants.flash_attn_type = (
            lib.LLAMA_FLASH_ATTN_TYPE_DISABLED if self._is_exact else lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        )
        wants.type_k = wants.type_v = int({"float32": lib.GGML_TYPE_F32, "float16": lib.GGML_TYPE_F16}[self._kv])
        wants.offload_kqv = wants.op_offload = self.device != "cpu"
        self._ear.said.clear()
        self._context = lib.llama_init_from_model(self._model, wants)
        if not self._context:
            raise BadModel(
                f"llama.cpp could not allocate {tokens:,} tokens of {self._id}",
                code="gguf_unsupported",
                lines=list(self._ear.said),
                try_=["a smaller --ctx", "leave --baseline llama.cpp out"],
            )
        self._room = tokens

    def _feed(self, ids: Sequence[int]) -> None:
        array = (self._lib.llama_token * len(ids))(*ids)
        code = self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(array, len(ids)))
        if code:
            raise BadModel(
                f"llama.cpp failed during a text of {self._id}",
                code="gguf_unsupported",
                lines=[f"llama_decode returned {code}", *self._ear.said],
                try_=["a smaller --ctx", "leave --baseline llama.cpp out"],
            )

    def _draws(self, temperature: float, seed: int) -> Any:
        """llama.cpp's own sampler, with its own random numbers."""
        lib = self._lib
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(temperature))
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(seed % 2**32))
        return chain

    def _next(self) -> int:
        """Return the sampled token, or the most likely one; of equal logits the first, as in torch."""
        if self._sampler is not None:
            return int(self._lib.llama_sampler_sample(self._sampler, self._context, -1))
        logits = self._lib.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())

    def _kv_bytes(self) -> int:
        """Bytes of llama.cpp's KV cache, computed because it reports none: each layer has a cell per context token."""
        lib, model = self._lib, self._model
        layers, heads = lib.llama_model_n_layer(model), lib.llama_model_n_head_kv(model)
        usual = lib.llama_model_n_embd(model) // lib.llama_model_n_head(model)
        head = sum(int(self._meta(f"attention.{kind}_length") or usual) for kind in ("key", "value"))
        cells = int(lib.llama_n_ctx(self._context))
        return cells * int(layers) * int(heads) * head * {"float32": 4, "float16": 2}[self._kv]

    def _meta(self, key: str) -> str:
        """A value of the GGUF file's metadata; "" if it is missing."""
        lib, text = self._lib, ctypes.create_string_buffer(64)
        lib.llama_model_meta_val_str(self._model, b"general.architecture", text, len(text))
        full = f"{text.value.decode()}.{key}".encode()
        lib.llama_model_meta_val_str(self._model, full, text, len(text))
        return text.value.decode()

    def _system(self) -> str:
        """Instruction sets of the build, as llama.cpp prints them."""
        return str(self._lib.llama_print_system_info().decode()).strip(" |")

    def _check_device(self) -> None:
        if self.device != "cpu" and not self._lib.llama_supports_gpu_offload():
            raise UsageError(
                f"the model runs on {self.device}, and this llama-cpp-python was built without GPU support",
                code="missing_extra",
                try_=[
                    "CMAKE_ARGS=-DGGML_CUDA=on " + pip("--force-reinstall", "--no-cache-dir", *EXTRAS["llama"]),
                    "--device cpu",
                ],
            )


class _StderrCapture:
    """Capture of llama.cpp's log on stderr. Its last warnings and errors are stored for an error message of kvcli."""

    def __init__(self, lib: Any) -> None:
        self.said: deque[str] = deque(maxlen=3)
        self._hear = lib.llama_log_callback(self._take)  # must exist as long as llama.cpp may call it
        lib.llama_log_set(self._hear, None)

    def _take(self, level: int, text: bytes, _: Any) -> None:
        if level in (3, 4):  # GGML_LOG_LEVEL_WARN and _ERROR in ggml.h; the package's own table is out of date
            self.said += [line for line in text.decode(errors="replace").splitlines() if line.strip()]


@cache
def _survives(file: Path) -> bool:
    """True if a process that decodes a few tokens with these weights does not crash."""
    done = subprocess.run([sys.executable, "-c", _FEW_TOKENS, str(file)], capture_output=True, check=False)
    return done.returncode == 0


@cache
def _ear() -> _StderrCapture:
    """Capture of this process; llama.cpp accepts only one log callback."""
    return _StderrCapture(import_module("llama_cpp"))
