"""Decoding of GGUF files beside llama.cpp on the same file, each side in a process of its own, by turns.

    python tests/bench/gguf_beside.py --llama /path/to/a/venv/bin/python [--types Q4_K_M,Q8_0,Q6_K] [--prompts 512,4096]

The interpreter of `--llama` has llama-cpp-python, which also quantizes: the random Llama of 152M parameters, unless
`--model FILE.gguf` names another, whose weights are quantized again. Both sides read the same token ids; a turn is
`--new` tokens of each on its own text, who begins alternates, and a ratio is of the medians of one turn. CPU: the same
ratio of CPU seconds, which other programs beside them change least. Then passes of 1, 8 and 16 rows of ours, in passes
of one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.harness import ROOT, Ints, Rows, Words, in_turns, measurement, quotients, spread

ROWS = (1, 8, 16)
KNOWN = ("F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K", "IQ4_XS", "IQ4_NL")  # both sides

# A side answers each line of JSON on standard input, ["read", ids], ["write", n] or ["rows", n], with one line of JSON:
# of `write` the CPU seconds of a token and the seconds of each. The first token of a turn pays for what begins a turn.
SERVE = """
import json, sys, time
print(json.dumps(nbytes), flush=True)
for line in sys.stdin:
    what, of = json.loads(line)
    if what == "write":
        cpu, began = time.process_time(), []
        took = write(of)
        print(json.dumps([(time.process_time() - cpu) / of, took]), flush=True)
    else:
        print(json.dumps(globals()[what](of)), flush=True)
"""
OURS = """
import sys
from pathlib import Path
from tests.bench.beside import Ours
from tests.bench.kv_speed import pass_seconds
from kvcli.engine.loading.open_lm import open_lm
from kvcli.models import source
from kvcli.models.gguf import convert
file, threads, cache = sys.argv[1:]
found = convert.convert_if_needed(source.find(file), "auto", Path(cache), keeps_on="cpu")
lm = open_lm(found, device="cpu", threads=int(threads))
side, nbytes = Ours(lm), lm.info.weight_bytes
def read(ids): return side.read(ids, 0)
def write(n): return side.write(n)
def rows(n): return pass_seconds(side.session, n)
"""
THEIRS = """
import sys, time
import llama_cpp as lib
file, threads, _ = sys.argv[1:]
quiet = lib.llama_log_callback(lambda *_: None)
lib.llama_log_set(quiet, None)
lib.llama_backend_init()
model = lib.llama_model_load_from_file(file.encode(), lib.llama_model_default_params())
greedy, context, nbytes = lib.llama_sampler_init_greedy(), None, lib.llama_model_size(model)
def feed(ids):
    array = (lib.llama_token * len(ids))(*ids)  # the batch points into it
    assert lib.llama_decode(context, lib.llama_batch_get_one(array, len(ids))) == 0
def read(ids):
    global context, last
    if context: lib.llama_free(context)
    asks = lib.llama_context_default_params()
    asks.n_ctx, asks.n_batch, asks.n_ubatch = len(ids) + 1024, 512, 512
    asks.n_threads = asks.n_threads_batch = int(threads)
    asks.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
    context, began = lib.llama_init_from_model(model, asks), time.perf_counter()
    for first in range(0, len(ids), 512): feed(ids[first : first + 512])
    last = lib.llama_sampler_sample(greedy, context, -1)
    return time.perf_counter() - began
def write(n):
    global last
    took = []
    for _ in range(n):
        began = time.perf_counter()
        feed([last])
        last = lib.llama_sampler_sample(greedy, context, -1)
        took.append(time.perf_counter() - began)
    return took
"""
QUANTIZE = """
import sys, llama_cpp as lib
quiet = lib.llama_log_callback(lambda *_: None)
lib.llama_log_set(quiet, None)
lib.llama_backend_init()
asks = lib.llama_model_quantize_default_params()
asks.ftype, asks.nthread, asks.allow_requantize = getattr(lib, "LLAMA_FTYPE_MOSTLY_" + sys.argv[3]), 1, True
sys.exit(lib.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), asks))
"""


class Side:
    """A program in a process of its own, with one model and one text."""

    def __init__(self, python: str, code: str, file: Path, threads: int, cache: Path) -> None:
        environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._process = subprocess.Popen(
            [python, "-c", code + SERVE, str(file), str(threads), str(cache)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT)},
        )
        self.nbytes = self._answer()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def ask(self, what: str, of: Any) -> Any:
        print(json.dumps([what, of]), file=self._process.stdin, flush=True)
        return self._answer()

    def write(self, n: int) -> tuple[float, float]:
        """CPU seconds of a token, and the median of the seconds of each but the first."""
        cpu, took = self.ask("write", n)
        return cpu, median(took[1:])

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            sys.exit("a side ended early; its error stands above")
        return json.loads(line)


def quantized(python: str, whole: Path, kind: str, folder: Path) -> Path:
    """The model in another type, by llama.cpp."""
    file = folder / f"{kind}.gguf"
    if subprocess.run([python, "-c", QUANTIZE, str(whole), str(file), kind], check=False).returncode:
        sys.exit(f"llama.cpp could not write {kind}; its error stands above")
    return file


def random_file(folder: Path) -> Path:
    """The random Llama as GGUF, in 16 bits."""
    from tests.bench.random_model import SHAPE
    from tests.gguf_files import write

    write(file := folder / "whole.gguf", "llama", ("F16",), ends="F16", words=SHAPE["vocab_size"], **SHAPE)
    return file


@measurement(
    "Decoding of GGUF files, times as fast as llama.cpp on the same file",
    columns=[
        "file",
        "threads",
        "prompt",
        "decoding",
        "CPU",
        "reading",
        "8 rows",
        "16 rows",
        "tok/s",
        "its tok/s",
        "MB",
    ],
    note="In brackets: least and most of all turns. Passes of 8 and 16 rows: in passes of one.",
)
def gguf_beside(
    llama: Annotated[str, "Python with llama-cpp-python"] = sys.executable,
    model: Annotated[str, "GGUF file in 16 bits; default: the random Llama"] = "",
    types: Annotated[Words, f"of {', '.join(KNOWN)}"] = ("Q4_K_M", "Q8_0", "Q6_K"),
    prompts: Ints = (512, 4096),
    threads: Ints = (1, 2),
    turns: int = 10,
    new: Annotated[int, "tokens of a turn"] = 8,
) -> Rows:
    from tests.bench.random_model import noise

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = Path(model) if model else random_file(folder)
        for kind in types:
            file = quantized(llama, whole, kind, folder)
            for n in threads:
                with ExitStack() as open_sides:
                    of_each = {"ours": (sys.executable, OURS), "theirs": (llama, THEIRS)}
                    sides = {
                        name: open_sides.enter_context(Side(python, code, file, n, folder / "cache"))
                        for name, (python, code) in of_each.items()
                    }
                    for prompt in prompts:
                        yield {"file": kind, "threads": n, "prompt": prompt} | compared(
                            sides, noise(prompt), turns, new
                        )


def compared(sides: dict[str, Side], ids: list[int], turns: int, new: int) -> dict[str, Any]:
    """One row of the table."""
    read = {name: [side.ask("read", ids)] for name, side in sides.items()}
    wrote = in_turns({name: lambda side=side: side.write(new) for name, side in sides.items()}, turns)
    (our_cpu, ours), (their_cpu, theirs) = (zip(*wrote[name], strict=True) for name in sides)
    rows = [[sides["ours"].ask("rows", m) for m in ROWS] for _ in range(9)]
    return {
        "decoding": quotients(theirs, ours),
        "CPU": quotients(their_cpu, our_cpu),
        "reading": round(read["theirs"][0] / read["ours"][0], 3),
        **{f"{m} rows": spread(took[i] / took[0] for took in rows) for i, m in enumerate(ROWS) if i},
        "tok/s": round(1 / median(ours), 1),
        "its tok/s": round(1 / median(theirs), 1),
        "MB": round(sides["ours"].nbytes / 1e6),
    }


if __name__ == "__main__":
    gguf_beside.main()
