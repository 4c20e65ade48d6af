"""Worker that runs a press of kvpress on a model, for tests/recipes/bench.py. kvpress's own interpreter starts it.

kvcli is not installed there. Messages are one JSON object a line: first a setting, answered by `ready`; then prompts,
each answered by the tokens and their times. A failure is answered by `error`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import AutoModelForCausalLM, DynamicCache


def main() -> None:
    # output that the libraries print must not mix with the answers
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, out, load)


def serve(lines: TextIO, out: TextIO, load: Callable[[dict[str, Any]], tuple[Any, Any]]) -> None:
    """Answer every line until the input ends."""
    held: tuple[Any, Any] | None = None
    for line in lines:
        asked = json.loads(line)
        try:
            if held is None:
                held = load(asked)
                answer = ready()
            else:
                answer = run(*held, asked["prompt"], int(asked["new"]))
        except Exception as error:  # any failure of a press is an answer, which the reader handles
            answer = {"error": f"{type(error).__name__}: {error}".strip()}
        print(json.dumps(answer), file=out, flush=True)


def ready() -> dict[str, Any]:
    return {"ready": {name: version(name) for name in ("kvpress", "transformers", "torch")}}


def load(asked: dict[str, Any]) -> tuple[Any, Any]:
    """Load the model and the press."""
    presses = import_module("kvpress")
    if not hasattr(presses, asked["press"]):
        raise ValueError(f"kvpress {version('kvpress')} has no {asked['press']}")
    press = getattr(presses, asked["press"])(compression_ratio=asked["ratio"])
    torch.set_num_threads(asked["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        asked["model"], dtype=getattr(torch, asked["dtype"]), attn_implementation="sdpa", local_files_only=True
    )
    return model.to(asked["device"]).eval().requires_grad_(False), press


@torch.inference_mode()
def run(model: Any, press: Any, prompt: Sequence[int], new: int) -> dict[str, Any]:
    """Prefill the prompt in one pass, after which a press compresses the cache, then decode greedily.

    Positions continue from the prompt's true length, however many slots remain after compression.
    """
    cache, ids, at = DynamicCache(), list[int](), list[float]()
    began = time.perf_counter()
    with press(model):
        logits = model(torch.tensor([prompt], device=model.device), past_key_values=cache, logits_to_keep=1).logits
    while True:
        ids.append(int(logits[0, -1].argmax()))
        at.append(time.perf_counter() - began)
        if len(ids) == new:
            break
        place = torch.tensor([[len(prompt) + len(ids) - 1]], device=model.device)
        last = torch.tensor([ids[-1:]], device=model.device)
        logits = model(last, past_key_values=cache, position_ids=place).logits
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return {"ids": ids, "at": at, "kv_bytes": held, "peak_bytes": peak_bytes(model.device)}


def peak_bytes(device: Any) -> int | None:
    """Peak memory of this process in bytes; None if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)


if __name__ == "__main__":
    main()
