"""When recall chooses pages, and by which query: at fixed points, where queries drift (LouisKV), by a probe (ActQKV).

    python tests/bench/recall_choice.py [--model demo] [--texts 8] [--length 2048] [--rows 128] [--intervals 8,32]
        [--share 0.0625] [--out FILE]

The last `--rows` tokens of a held-out text with four facts, and the rows of its four questions one after the other,
read pages of 16 of the tokens before; pages are chosen by the bounds of method minmax. Sides choose equally often:

  each row         for each row anew, the bound of what any side finds
  interval         at each N-th row, by its query, as `sparse.choice = "interval"` does
  drift            where the cosine of a row's query with that of the last choice falls below a limit, by that row's
                   query (arXiv 2510.11292); the limit of each layer is set afterwards, so that it chooses as often,
                   or less often where no limit does; a further side then chooses as often at fixed points
  probe of next    at each N-th row, by the mean query of these N rows, weighed by the activation bias of each, the
                   squared distance from the mean in standard deviations (arXiv 2502.13542); only a prompt knows them
  mean of next     the same without weights
  probe of last    the same by the N rows before, as an answer would have to

"attention": the share of attention to those tokens that the pages hold which rows read, the first 4 tokens and the
newest 16 among them in any case, mean over layers, heads and rows. Of each KV head the first query head is taken.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.bench.texts import text_of
from kvcli.engine.engine import run
from kvcli.engine.forward_request import ForwardRequest
from kvcli.heads.sample import samples
from tests.bench.harness import Ints, Rows, measurement
from tests.bench.kv_quality import Text, opened
from tests.bench.recall_units import HELD_OUT, always
from tests.bench.rounding import reads

LIMITS = 250  # limits tried between a cosine of 0 and of 1


def drifts(q: Tensor, most: int) -> list[int]:
    """Rows of q [K, R, D] that choose: as many as one limit for all of them allows, at most `most`."""
    unit = torch.nn.functional.normalize(q, dim=-1)
    alike = (torch.einsum("krd,ksd->rs", unit, unit) / q.shape[0]).tolist()  # mean cosine over heads

    def chosen(limit: float) -> list[int]:
        found = [0]
        for row in range(1, q.shape[1]):
            if alike[row][found[-1]] < limit:
                found.append(row)
        return found

    all_found = [chosen(step / LIMITS) for step in range(-LIMITS, LIMITS)]
    return max((each for each in all_found if len(each) <= most), key=len)


def probe(q: Tensor) -> Tensor:
    """The mean of queries q [K, N, D], weighed by activation bias, [K, 1, D]."""
    away = (q - q.mean(1, keepdim=True)).square() / q.var(1, keepdim=True, unbiased=False).clamp_min(1e-6)
    bias = away.sum(-1, keepdim=True)  # [K, N, 1]
    return (q * bias).sum(1, keepdim=True) / bias.sum(1, keepdim=True).clamp_min(1e-6)


def sides(q: Tensor, before: Tensor, every: int) -> Iterator[tuple[str, list[int], Tensor]]:
    """Sides, the rows at which they choose, and the queries [K, C, D] by which; `before`: the queries before q."""
    n = q.shape[1]
    starts = list(range(0, n, every))
    yield "each row", list(range(n)), q
    yield "interval", starts, q[:, starts]
    rows = drifts(q, len(starts))
    yield "drift", rows, q[:, rows]
    evenly = [i * n // len(rows) for i in range(len(rows))]
    yield "interval, as often as drift", evenly, q[:, evenly]
    windows = [q[:, at : at + every] for at in starts]
    yield "probe of next", starts, torch.cat([probe(each) for each in windows], 1)
    yield "mean of next", starts, torch.cat([each.mean(1, keepdim=True) for each in windows], 1)
    yield "probe of last", starts, torch.cat([probe(each) for each in [before[:, -every:], *windows[:-1]]], 1)


def found_by(q: Tensor, k: Tensor, v: Tensor, sight: Any, rows: list[int], by: Tensor, share: float) -> float:
    """Share of the attention of rows q [K, R, D] to k, v [K, S, ..] that is found by choices at `rows` by `by`."""
    mask = always(reads(by[:, None], k, v, sight, "minmax", share))  # [K, C, S]
    last = torch.bucketize(torch.arange(q.shape[1]), torch.tensor(rows), right=True) - 1
    p = (q @ k.mT * sight.scale).softmax(-1)
    return float((p * mask[:, last]).sum(-1).mean())


@measurement(
    "Attention that chosen pages hold of {length} tokens of {model}, {texts} texts, at a share of {share}",
    columns=["rows", "interval", "side", "choices", "attention"],
    is_counts=True,
)
def recall_choice(
    model: str = "demo",
    texts: int = 8,
    length: int = 2048,
    rows: int = 128,
    intervals: Ints = (8, 32),
    share: float = 0.0625,
) -> Rows:
    loaded: Any = opened(model, Path(tempfile.gettempdir(), "kvcli-kv-quality"), {"load.dtype": "fp32"})
    haystack = None if model == "demo" else text_of("prose")
    found: dict[tuple[str, int, str], list[tuple[int, float]]] = {}
    for sample in samples(loaded, texts, length, HELD_OUT, haystack):
        text, session = Text(loaded, sample.context), loaded.new_session()
        text.read_by(session)
        asked = sample.rows()
        (made,) = run([ForwardRequest(loaded.lm, asked, session.cache, record_queries=range(asked.n_rows))])
        for layer, (newest, q) in enumerate(zip(text.made.queries, made.queries, strict=True)):
            fresh, sight = text.made.fresh[layer], loaded.lm.attention_params[layer]
            first = slice(None, None, newest.shape[0] // fresh.k.shape[0])
            k, v, newest = fresh.k.contiguous(), fresh.v.contiguous(), newest[first]
            end = newest.shape[1] - rows
            cases = {
                "newest": (newest[:, end:], newest[:, :end], k[:, :end].contiguous(), v[:, :end].contiguous()),
                "questions": (q[first], newest, k, v),
            }
            for of, (each, before, *kv) in cases.items():
                for every in intervals:
                    for name, at, by in sides(each, before, every):
                        attention = found_by(each, *kv, sight, at, by, share)
                        found.setdefault((of, every, name), []).append((len(at), attention))
    for (of, every, name), each in found.items():
        choices, attention = (round(fmean(values), 4) for values in zip(*each, strict=True))
        yield {"rows": of, "interval": every, "side": name, "choices": choices, "attention": attention}
    return None


if __name__ == "__main__":
    recall_choice.main()
