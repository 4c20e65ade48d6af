"""Experts in packed form beside those in bf16: bytes, reading and decoding, sides by turns. Last line JSON.

    python tests/bench/experts.py [--layers 2] [--prompt 512] [--new 24] [--reps 3] [--threads 1] [--check 24]

A random model of the shape of Qwen3.6-35B-A3B (256 experts, 8 of them and a shared one a token), cut to its layers with
full attention, and its vocabulary to as large a share of what it has. Ratios are to bf16, of pairs of turns. `--check`:
so many tokens, in fp32, are those of the same codes unpacked and multiplied in plain PyTorch; 0 leaves that out. Takes
3.3 GB of memory for two layers, and as much again for the side in bf16.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.kernels.linear_quantized.experts import quantize_experts_
from kvcli.kernels.linear_quantized.module import quantize_
from tests.bench.decode import ours
from tests.bench.harness import machine

LAYERS, VOCAB = 40, 248_320  # of the whole model
KINDS = ("none", "int8", "int4")


def build(layers: int, dtype: torch.dtype, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB * layers // LAYERS,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "eos_token_id": None,
    } | changes
    kinds = ["full_attention"] * layers
    config = AutoConfig.for_model("qwen3_next", num_hidden_layers=layers, layer_types=kinds, **sizes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()


def sharing(model: Any) -> Any:
    """A copy with the same weights in memory."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def packed(model: Any, kind: str) -> LM:
    lm = LM.of(sharing(model), quant=kind)
    lm.install_kernels()
    return lm


def unpacked(model: Any, kind: str) -> LM:
    """The same codes, in plain PyTorch."""
    made, bits, plain = sharing(model), 8 if kind == "int8" else 4, torch.device("cpu")
    quantize_(made.model.layers, bits, device=plain)
    quantize_experts_(made.model.layers, bits, device=plain)
    return LM.of(made)


def text(lm: LM, new: int) -> list[int]:
    from kvcli.engine.sequence.sampler import Sampler
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.kv.tiers.dense import Dense
    from kvcli.methods.drafts.off import Off

    ids = torch.randint(8, lm.vocab, (17,), generator=torch.Generator().manual_seed(1)).tolist()
    session = GenerationSession(lm, Dense(lm.shapes, lm.dtype), Off(), Sampler())
    run_to_end(session.read(ids))
    list(iterate_events(session.stream(new)))
    return session.ids[len(ids) :]


def check(layers: int, new: int) -> dict[str, str]:
    """How many of the first tokens are the same; a layer of a quarter of the experts, which plain PyTorch unpacks."""
    model = build(layers, torch.float32, num_experts=64)
    found = {}
    for kind in KINDS[1:]:
        mine, theirs = (text(make(model, kind), new) for make in (packed, unpacked))
        same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), new)
        found[kind] = f"{same} of {new}"
    return found


def measure(sides: dict[str, LM], n: int, new: int, reps: int) -> dict[str, dict[str, list[float]]]:
    """Seconds to the first token and of each later one, by side; the first turn is not counted."""
    found: dict[str, dict[str, list[float]]] = {kind: {"read": [], "step": []} for kind in sides}
    for rep in range(reps + 1):
        for kind, lm in sides.items():
            ids = torch.randint(8, lm.vocab, (n,), generator=torch.Generator().manual_seed(rep)).tolist()
            first, steps, _ = ours(lm, ids, new)
            if rep:
                found[kind]["read"].append(first)
                found[kind]["step"].append(statistics.median(steps))
    return found


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in {"layers": 2, "prompt": 512, "new": 24, "reps": 3, "threads": 1, "check": 24}.items():
        ask.add_argument(f"--{name}", type=int, default=number)
    args = ask.parse_args()
    torch.set_num_threads(args.threads)
    about, same = machine(), check(args.layers, args.check) if args.check else {}
    model = build(args.layers, torch.bfloat16)
    sides = {kind: packed(model, kind) for kind in KINDS}
    whole, table = sides["none"].info.weight_bytes, []
    del model
    took = measure(sides, args.prompt, args.new, args.reps)
    for kind, lm in sides.items():
        row: dict[str, Any] = {"kind": kind, "bytes": lm.info.weight_bytes, "of_bf16": lm.info.weight_bytes / whole}
        row |= {"parameters": lm.info.parameters, "exact_rows": lm.is_row_invariant, "same": same.get(kind, "")}
        for what, tokens in (("read", args.prompt), ("step", 1)):
            each = sorted(a / b for a, b in zip(took["none"][what], took[kind][what], strict=True))
            row[what] = [round(x, 3) for x in (each[0], statistics.median(each), each[-1])]
            row[f"{what}_tok_s"] = round(tokens / statistics.median(took[kind][what]), 2)
        table.append(row)
        each = "   ".join(f"{what} {row[f'{what}_tok_s']:7.1f} tok/s {row[what]}" for what in ("read", "step"))
        size = f"{row['bytes'] / 2**20:7.0f} MiB  {row['of_bf16']:.3f}x bf16"
        print(f"{kind:5} {size}   {each}   same {row['same'] or '-'}", flush=True)
    print(json.dumps({"schema": "kvcli.bench.experts/1", "environment": about, "layers": args.layers, "table": table}))


if __name__ == "__main__":
    main()
