"""Experts in packed form beside those in bf16: bytes, reading and decoding, sides by turns.

    python tests/bench/experts.py [--layers 2] [--prompt 512] [--new 24] [--reps 3] [--threads 1] [--check 24]

A random model of the shape of Qwen3.6-35B-A3B (256 experts, 8 of them and a shared one a token), cut to its layers with
full attention, and its vocabulary to as large a share of what it has. Ratios are to bf16, of pairs of turns. `--check`:
so many tokens, in fp32, are those of the same codes unpacked and multiplied in plain PyTorch; 0 leaves that out. Takes
3.3 GB of memory for two layers, and as much again for the side in bf16.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import install_kernels, wrap_lm
from kvcli.kernels.linear_quantized import quantize_, quantize_experts_
from tests.bench.decode import ours
from tests.bench.harness import Rows, in_turns, measurement, quotients
from tests.bench.random_model import noise, opened

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
    lm = wrap_lm(sharing(model), quant=kind)
    install_kernels(lm)
    return lm


def unpacked(model: Any, kind: str) -> LM:
    """The same codes, in plain PyTorch."""
    made, bits, plain = sharing(model), 8 if kind == "int8" else 4, torch.device("cpu")
    quantize_(made.model.layers, bits, device=plain)
    quantize_experts_(made.model.layers, bits, device=plain)
    return wrap_lm(made)


def text(lm: LM, new: int) -> list[int]:
    ids, session = noise(17, lm.vocab), opened(lm)
    run_to_end(session.read(ids))
    list(iterate_events(session.stream(new)))
    return session.ids[len(ids) :]


def same_tokens(layers: int, new: int) -> dict[str, str]:
    """How many of the first tokens are the same; a layer of a quarter of the experts, which plain PyTorch unpacks."""
    model = build(layers, torch.float32, num_experts=64)
    found = {}
    for kind in KINDS[1:]:
        mine, theirs = (text(make(model, kind), new) for make in (packed, unpacked))
        same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), new)
        found[kind] = f"{same} of {new}"
    return found


@measurement("Experts in packed form beside those in bf16", schema="kvcli.bench.experts/1")
def experts(
    layers: int = 2, prompt: int = 512, new: int = 24, reps: int = 3, threads: int = 1, check: int = 24
) -> Rows:
    torch.set_num_threads(threads)
    same = same_tokens(layers, check) if check else {}
    model = build(layers, torch.bfloat16)
    sides = {kind: packed(model, kind) for kind in KINDS}
    whole = sides["none"].info.weight_bytes
    del model

    def once(lm: LM) -> tuple[float, float]:
        ids = noise(prompt, lm.vocab)
        first, steps, _ = ours(lm, ids, new)
        return first, median(steps)

    took = in_turns({kind: partial(once, lm) for kind, lm in sides.items()}, reps)
    for kind, lm in sides.items():
        row: dict[str, Any] = {"kind": kind, "bytes": lm.info.weight_bytes, "of_bf16": lm.info.weight_bytes / whole}
        row |= {"parameters": lm.info.parameters, "exact_rows": lm.is_row_invariant, "same": same.get(kind, "")}
        for i, (what, tokens) in enumerate((("read", prompt), ("step", 1))):
            plain, mine = ([each[i] for each in took[side]] for side in ("none", kind))
            row |= {what: quotients(plain, mine, 3), f"{what}_tok_s": round(tokens / median(mine), 2)}
        yield row
    return {"layers": layers}


if __name__ == "__main__":
    experts.main()
