"""Logits of tiny GGUF files of every architecture in llama.cpp and in kvcli, for the same token ids.

    python -m tests.bench.gguf_control --llama /path/to/a/venv/bin/python [--only qwen35,gemma4]

The interpreter of `--llama` has llama-cpp-python. Each file is F32; llama.cpp gets an F32 KV cache and no flash
attention. Prints for each architecture the largest relative error of a position's logits, or why llama.cpp does not
load the file; exit status 1 if one differs by more than `MOST`. Names in KNOWN differ for the reason stated there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import kvcli
from kvcli.models import source
from kvcli.models.gguf import convert
from tests.families import prompt
from tests.gguf_archs import KINDS, write

MOST = 0.01
TOKENS, NEW = 40, 24
KNOWN = {
    "gpt_oss": "llama.cpp rounds the bounds of YaRN's ramp, the model does not (gpt_oss_plain has no YaRN)",
    "phi3_window": "llama.cpp leaves Phi-3's window out",
    "phi3_long": "transformers' logits of a short text have the short factors; both texts have the long ones",
}
LLAMA = """
import json, sys
import numpy as np
from llama_cpp import Llama
said = dict(n_ctx=128, n_batch=128, n_threads=1, type_k=0, type_v=0, flash_attn=False)
llm = Llama(sys.argv[1], logits_all=True, verbose=False, **said)
llm.eval(json.loads(sys.argv[2]))
logits, text = np.array(llm.scores[: llm.n_tokens]), []
for _ in range(int(sys.argv[4])):
    text.append(int(llm.scores[llm.n_tokens - 1].argmax()))
    llm.eval(text[-1:])
np.save(sys.argv[3], logits)
print(json.dumps(text))
"""


def theirs(python: str, file: Path, ids: list[int]) -> tuple[np.ndarray, list[int]] | str:
    """Logits of llama.cpp [N, vocabulary] and its greedy text, or its last lines if it fails."""
    out = file.with_suffix(".npy")
    command = [python, "-c", LLAMA, str(file), json.dumps(ids), str(out), str(NEW)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        return "; ".join((done.stderr or f"exit {done.returncode}").strip().splitlines()[-3:])
    return np.load(out), json.loads(done.stdout.splitlines()[-1])


def mine(file: Path, ids: list[int]) -> tuple[np.ndarray, list[int]]:
    """Logits of the model that kvcli loads, by transformers, and the greedy text by kvcli."""
    made = convert.convert_if_needed(source.find(str(file)), "fp32", file.parent / "cache", keeps_on="").path
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    said = {"load.dtype": "fp32", "load.device": "cpu", "sample.temperature": 0.0, "sample.repetition_penalty": 1.0}
    with kvcli.load(str(file), "exact", said, cache=file.parent / "cache") as loaded:
        return logits, list(loaded.generate(ids, NEW).ids)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", required=True)
    parser.add_argument("--only", default=",".join(KINDS))
    given, bad = parser.parse_args(), 0
    for name in given.only.split(","):
        with TemporaryDirectory() as folder:
            file, ids = Path(folder) / "tiny.gguf", prompt(TOKENS)
            write(file, name)
            right = theirs(given.llama, file, ids)
            if isinstance(right, str):
                print(f"{name:24} not loaded by llama.cpp: {right[:150]}", flush=True)
                continue
            (logits, text), (ours, written) = right, mine(file, ids)
            error = np.sqrt(((ours - logits) ** 2).mean(1) / (logits**2).mean(1)).max()
            same = written == text[: len(written)]
            said = f"text of {len(written)} tokens {'equal' if same else 'differs'}"
            print(f"{name:24} error {error:.1e}  {said}  {KNOWN.get(name, '')}", flush=True)
            bad += not (same and error < MOST) and name not in KNOWN
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
