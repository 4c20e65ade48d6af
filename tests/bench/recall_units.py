"""What recall finds by sentences (SentenceKV), and what rows would gain by pages of later rows (RetroAttention).

    python tests/bench/recall_units.py [--model demo] [--texts 24] [--length 2048] [--shares 0.0625,0.125] [--out FILE]

Four numbers are hidden in each held-out text. Of the rows of the four questions: share of attention that is paid to the
slots that a row reads, and the error of the heads' outputs over these alone, relative. Units are pages of 16 slots or
sentences (arXiv 2504.00970), both with the mean of their keys, and the methods of [sparse] as they are; the first 4
slots and the newest 16 are read in any case. Of each KV head the first query head is taken. "later": of the newest rows
of the text, what each would read with the choices of the 16 rows after it beside its own (arXiv 2508.09001), which
correct its output when those are computed; "as much": its own choice of as many slots. read: share of slots.
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
from tests.bench.harness import Floats, Row, Rows, Words, measurement
from tests.bench.kv_quality import Text, opened
from tests.bench.rounding import reads

HELD_OUT = 5_000  # seed of the texts
PAGE, SINKS, NEWEST, LATER, ROWS = 16, 4, 16, 16, 64
ENDS = (".", "!", "?", "\n")


def sentences(words: list[str]) -> Tensor:
    """The sentence of each token [S], counted from 0."""
    ends = torch.tensor([word.rstrip(" ").endswith(ENDS) for word in words])
    return torch.cat([ends.new_zeros(1), ends[:-1]]).cumsum(0)


def by_mean(q: Tensor, k: Tensor, unit: Tensor, share: float) -> Tensor:
    """Slots that rows q [K, R, D] read of k [K, S, D] by the mean keys of units [S], best units first, [K, R, S]."""
    n = int(unit[-1]) + 1
    sums = k.new_zeros(k.shape[0], n, k.shape[2]).index_add_(1, unit, k)
    size = torch.bincount(unit, minlength=n)
    order = (q @ (sums / size[:, None]).mT).argsort(-1, descending=True)  # [K, R, n]
    within = size[order].cumsum(-1) <= max(1, round(share * len(unit)))
    within[..., 0] = True
    return torch.zeros(order.shape, dtype=torch.bool).scatter(-1, order, within)[..., unit]


def always(mask: Tensor) -> Tensor:
    """What is read in any case, too."""
    mask = mask.clone()
    mask[..., :SINKS] = mask[..., -NEWEST:] = True
    return mask


def quality(p: Tensor, v: Tensor, mask: Tensor) -> Row:
    """Of attention p [K, R, S] over v [K, S, E] when slots of the mask alone are read."""
    mass = (p * mask).sum(-1)
    out = p @ v
    some = (p * mask) @ v / mass[..., None].clamp_min(1e-12)
    return {
        "read": float(mask.float().mean()),
        "attention": float(mass.mean()),
        "error": float((some - out).norm() / out.norm()),
    }


def of_questions(
    q: Tensor, k: Tensor, v: Tensor, sight: Any, unit: Tensor, how: Words, share: float
) -> Iterator[tuple[str, Row]]:
    """Ways to choose for the rows q [K, R, D] of the questions."""
    p = (q @ k.mT * sight.scale).softmax(-1)
    pages = torch.arange(k.shape[1]) // PAGE
    yield "pages by mean key", quality(p, v, always(by_mean(q, k, pages, share)))
    yield "sentences by mean key", quality(p, v, always(by_mean(q, k, unit, share)))
    for name in how:
        chosen = reads(q[:, None], k, v, sight, name, share)
        yield name, quality(p, v, always(chosen))


def of_later(q: Tensor, k: Tensor, v: Tensor, sight: Any, share: float) -> Iterator[tuple[str, Row]]:
    """What rows q [K, R, D] read, with the choices of later rows, and by themselves as much."""
    p = (q @ k.mT * sight.scale).softmax(-1)
    own = reads(q[:, None], k, v, sight, "minmax", share)
    later = torch.stack([own[:, at : at + LATER + 1].any(1) for at in range(q.shape[1])], 1)
    yield "minmax", quality(p, v, always(own))
    yield "minmax, later rows' choices too", quality(p, v, always(later))
    as_much = min(1.0, share * float(later.float().mean() / own.float().mean()))
    yield "minmax, as much by itself", quality(p, v, always(reads(q[:, None], k, v, sight, "minmax", as_much)))


@measurement(
    "What is read of {length} tokens of {model}, {texts} texts, means over layers, heads and rows", is_counts=True
)
def recall_units(
    model: str = "demo",
    texts: int = 24,
    length: int = 2048,
    shares: Floats = (0.0625, 0.125),
    methods: Words = ("minmax", "sketch", "cluster"),
) -> Rows:
    loaded: Any = opened(model, Path(tempfile.gettempdir(), "kvcli-kv-quality"), {"load.dtype": "fp32"})
    haystack = None if model == "demo" else text_of("prose")
    found: dict[tuple[str, float, str], list[Row]] = {}
    for i, sample in enumerate(samples(loaded, texts, length, HELD_OUT, haystack)):
        text, session = Text(loaded, sample.context), loaded.new_session()
        text.read_by(session)
        asked = [row for row, _ in sample.scored()]
        rows = sample.rows()
        (made,) = run([ForwardRequest(loaded.lm, rows, session.cache, record_queries=range(rows.n_rows))])
        unit = sentences([loaded.tokenizer.decode([token]) for token in sample.context[:-1]])
        for layer, (newest, q) in enumerate(zip(text.made.queries, made.queries, strict=True)):
            fresh, sight = text.made.fresh[layer], loaded.lm.attention_params[layer]
            heads = newest.shape[0] // fresh.k.shape[0]
            before = fresh.k[:, :-ROWS].contiguous(), fresh.v[:, :-ROWS].contiguous()
            for share in shares:
                for name, each in of_questions(q[::heads, asked], fresh.k, fresh.v, sight, unit, methods, share):
                    found.setdefault(("questions", share, name), []).append(each)
                for name, each in of_later(newest[::heads, -ROWS:], *before, sight, share):
                    found.setdefault(("newest", share, name), []).append(each)
        print(f"\r{i + 1} of {texts} texts", end="", file=sys.stderr, flush=True)
    for (of, share, name), each in found.items():
        yield {"rows": of, "share": share, "side": name} | {
            key: round(fmean(one[key] for one in each), 4) for key in ("read", "attention", "error")
        }
    return None


if __name__ == "__main__":
    recall_units.main()
