"""Rules by which a segment of a prompt can choose pages under CritiPrefill (arXiv 2409.12490).

    python tests/bench/segment_choice.py [--model demo] [--texts 8] [--length 2048] [--shares 0.125,0.25] [--out FILE]

A segment is the newest 256 tokens of a held-out text; pages have 32. Scores of pages are those of kvcli's method.
"largest of heads" ranks by the largest share in any query head of a KV head, as kvcli does; "mean of heads" and "mean,
a quarter of the layer below" are the published code's rules; "the attention itself" is the bound. attention: share of
a row's attention to earlier segments that the read pages hold, mean over layers, heads and rows.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.bench.texts import text_of
from kvcli.heads.sample import samples
from kvcli.methods.sparse.critiprefill import CritiPrefill
from tests.bench.harness import Floats, Row, Rows, measurement
from tests.bench.kv_quality import Text, opened
from tests.bench.recall_units import HELD_OUT

SEGMENT, PAGE, DENSE, BELOW = 256, 32, 2, 0.25


def held(p: Tensor, score: Tensor, share: float) -> float:
    """Share of attention p [K, G, N, P] that the best pages by score [K, P] hold."""
    best = score.topk(max(1, round(share * score.shape[1])), -1).indices
    mask = torch.zeros_like(score).scatter(1, best, 1.0)
    return float((p * mask[:, None, None]).sum(-1).mean() / p.sum(-1).mean())


@measurement(
    "Attention that a segment of {model} finds by its choice of pages, {texts} texts of {length} tokens", is_counts=True
)
def segment_choice(model: str = "demo", texts: int = 8, length: int = 2048, shares: Floats = (0.125, 0.25)) -> Rows:
    loaded: Any = opened(model, Path(tempfile.gettempdir(), "kvcli-kv-quality"), {"load.dtype": "fp32"})
    method, found = CritiPrefill(), dict[tuple[float, str], list[float]]()
    haystack = None if model == "demo" else text_of("prose")
    for i, sample in enumerate(samples(loaded, texts, length, HELD_OUT, haystack)):
        made, below = Text(loaded, sample.context).made, None
        for layer, q in enumerate(made.queries):
            k, sight = made.fresh[layer].k, loaded.lm.attention_params[layer]
            n = (k.shape[1] - SEGMENT) // PAGE * PAGE
            rows = q[:, -SEGMENT:].unflatten(0, (k.shape[0], -1))  # [K, G, N, D]
            pages = k[:, :n].unflatten(1, (-1, PAGE))
            score = method.score(rows, method.summarize(pages, ()), (), sight)[:, :, 0].softmax(-1)  # [K, G, P]
            p = (rows @ k[:, None, :n].mT * sight.scale).softmax(-1).unflatten(-1, (-1, PAGE)).sum(-1)
            mean = score.mean(1)
            mixed = mean if below is None else (1 - BELOW) * mean + BELOW * below
            sides: dict[str, Tensor] = {"largest of heads": score.amax(1), "mean of heads": mean}
            sides |= {"mean, a quarter of the layer below": mixed, "the attention itself": p.mean((1, 2))}
            below = mean
            for share in shares if layer >= DENSE else ():
                for side, each in sides.items():
                    found.setdefault((share, side), []).append(held(p, each, share))
        print(f"\r{i + 1} of {texts} texts", end="", file=sys.stderr, flush=True)
    for (share, side), values in found.items():
        row: Row = {"share": share, "side": side, "attention": round(fmean(values), 4)}
        yield row
    return None


if __name__ == "__main__":
    segment_choice.main()
