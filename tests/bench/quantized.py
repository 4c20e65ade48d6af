"""Plain and packed weights beside llama.cpp's: reading and decoding, sides by turns in one run. Ratios; last line JSON.

    python tests/bench/quantized.py [--prompts 512,4096] [--new 32] [--reps 3] [--threads 1] [--kinds none,int8] [--hf]

The random Llama of 152M parameters, its own weights rounded by each side: bf16 against BF16, int8 against Q8_0, int4
against Q4_0, of which llama.cpp makes its files here. --hf: transformers' `generate` in bf16 as well. llama.cpp keeps
its plain buffers: on a CPU with AMX version 0.3.36 ends at a fault in its own `ldtilecfg` on packed weights, alone too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli.bench.llama_cpp import LlamaCpp
from kvcli.engine.hf.lm import LM
from kvcli.models.source import find
from tests.bench.decode import ours, theirs
from tests.bench.harness import machine
from tests.bench.random_model import write
from tests.recipes.gguf_export import export

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


def measure(sides: dict[str, Any], n: int, new: int, reps: int) -> dict[str, dict[str, list[float]]]:
    """Seconds to the first token and of each later one, by side; the first turn is not counted."""
    ids = torch.randint(8, 16384, (n,), generator=torch.Generator().manual_seed(1)).tolist()
    found: dict[str, dict[str, list[float]]] = {name: {"read": [], "step": []} for name in sides}
    for rep in range(reps + 1):
        for name, side in sides.items():
            if name == "hf":
                first, steps = theirs(side, ids, new)[:2]
            elif isinstance(side, LlamaCpp):
                at = side.run(ids, new).at
                first, steps = at[0], [b - a for a, b in pairwise(at)]
            else:
                first, steps = ours(side, ids, new)[:2]
            if rep:
                found[name]["read"].append(first)
                found[name]["step"].append(statistics.median(steps))
    return found


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--prompts", default="512,4096")
    ask.add_argument("--new", type=int, default=32)
    ask.add_argument("--reps", type=int, default=3)
    ask.add_argument("--threads", type=int, default=1)
    ask.add_argument("--kinds", default=",".join(KINDS))
    ask.add_argument("--hf", action="store_true")
    args = ask.parse_args()
    about, table = machine() | {"threads": args.threads}, []
    with tempfile.TemporaryDirectory() as name:
        folder, sides = Path(name), dict[str, Any]()
        write(folder)
        whole = export(find(name), "bfloat16", folder)
        for kind in args.kinds.split(","):
            sides[kind] = LM.load(find(name), quant=kind, device="cpu", threads=args.threads)
            sides[KINDS[kind]] = llama_of(quantized(whole, KINDS[kind]), args.threads, folder)
        if args.hf:
            from transformers import AutoModelForCausalLM

            sides["hf"] = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        print(f"{args.threads} threads, load {about['load_average']}; times as fast: least, median, most of the turns")
        print("prompt  sides            reading              decoding            tokens/s read    decoded")
        for n in map(int, args.prompts.split(",")):
            took = measure(sides, n, args.new, args.reps)
            pairs = [(kind, KINDS[kind]) for kind in args.kinds.split(",")] + [("none", "hf")] * args.hf
            for mine, other in pairs:
                row: dict[str, Any] = {"prompt": n, "ours": mine, "theirs": other}
                for what in ("read", "step"):
                    a, b = took[mine][what], took[other][what]
                    each = sorted(y / x for x, y in zip(a, b, strict=True))
                    row[what] = [round(x, 3) for x in (each[0], statistics.median(each), each[-1])]
                    rates = [(n if what == "read" else 1) / statistics.median(x) for x in (a, b)]
                    row[f"{what}_tok_s"] = [round(x, 1) for x in rates]
                table.append(row)
                read, step = ("  ".join(f"{x:.2f}" for x in row[what]) for what in ("read", "step"))
                speed = "  ".join("{:6.1f} {:6.1f}".format(*row[f"{w}_tok_s"]) for w in ("read", "step"))
                print(f"{n:6}  {mine:4} {other:5}   {read}   {step}   {speed}", flush=True)
    print(json.dumps({"schema": "kvcli.bench.quantized/1", "environment": about, "table": table}))


if __name__ == "__main__":
    main()
