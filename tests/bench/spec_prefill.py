"""A small model chooses the tokens of a prompt that a large one reads: what it saves, and what it costs in answers.

    python tests/bench/spec_prefill.py [--model demo] [--draft demo-small] [--tokens 1024] [--shares 0.5,0.3,0.1]

SpecPrefill (Liu et al., 2025, arXiv 2502.02789): a draft model of the same vocabulary reads the prompt and writes a few
tokens. Each row, that of the last token of the prompt and those of the tokens it writes, attends to the prompt. The
shares of attention are averaged over 13 neighbours in each head; a token's score is the highest one in any head of any
layer, and then the mean over rows. The model that answers reads the chunks of 32 tokens with the highest mean scores,
at their own positions, up to a share of the prompt, and nothing else.

Sides of each share: `method` is kvcli's own, `prune.method = "spec_prefill"` with `prune.ahead = 0`,
and keeps protected tokens beside the share. `draft` is the rule above in its plainest form, which tests hold it to,
`draft, guarded` keeps the first 4 and the newest 64 tokens beside it within the
same share, `lots` draws the chunks instead, `lazy` is LazyLLM with one cut, early enough for the same share as a mean
over layers (none where a layer alone is more than that), with the guard and the scores of profile `lazy`, which stands
beside them as it is. `--model demo-wide` is the demo at the cost of 150M parameters (tests/bench/widened.py): what is
right is the demo's, what it takes is a larger model's. Profile `lazy` judges by layers that are random there. A model
that chooses for itself (`--draft` the same) shows how well such choices can be, and no speed.

Greedy, without drafts, sides by turns. "kept" counts the rows that layers of the large model were given. "expected" is
1 / (kept + cost of a draft row), by the numbers of their layers, without attention and without the tokens written; a
draft that is the model itself costs a whole reading. With `--times` the first token is timed, choosing included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kvcli
from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.engine import run, run_to_end
from kvcli.engine.forward_request import ForwardRequest
from kvcli.engine.forward_request import Rows as PassRows
from kvcli.engine.sequence.commit import commit
from kvcli.engine.sequence.sampler import Sampler
from kvcli.kernels.attention_mass import attention_mass
from kvcli.methods.prune.layer_pruner import at_first
from kvcli.methods.prune.protected_tokens import PruneSettings
from kvcli.methods.prune.pruned_prefill import PrunedPrefill
from kvcli.quality.statistics import bootstrap
from kvcli.settings.profile import Profile
from tests.bench import prune_asked
from tests.bench.harness import Floats, Rows, Words, measurement, once
from tests.bench.prune import GUARD, WARM, Took, answered, gain
from tests.bench.prune_asked import Asked
from tests.bench.widened import write

CHUNK, POOL = 32, 13  # tokens, as in the paper's code
SIDES = ("method", "draft", "draft, guarded", "lots", "lazy")
FIRST, NEWEST = 4, 64  # guarded tokens
LAZY = {"method": "lazy", **vars(Profile.load("lazy").prune.settings), "min_prompt": 1}


@dataclass(frozen=True)
class Chosen(PruneSettings):
    """Prefill of chosen tokens through all layers, and of no others."""

    protect: bool = False
    sinks: int = 0
    recent: int = 1
    rows: Sequence[int] = field(default=())

    def describe(self, lm: Any) -> str:
        return ""

    def bind(self, pair: Any, text: Any, rows: PassRows, must: set[int]) -> Any:
        return partial(at_first, sorted(must.union(self.rows)))


class Reader:
    """A model whose sessions read the chosen tokens of a prompt alone."""

    def __init__(self, model: Any, rows: Sequence[int]) -> None:
        self.lm, self.tokenizer, self._model, self._rows = model.lm, model.tokenizer, model, rows

    def new_session(self) -> Any:
        session = self._model.new_session()
        session.companions.insert(2, PrunedPrefill(ModelPair(self.lm, self.lm), Chosen(rows=self._rows)))
        return session


def importance(draft: Any, ahead: int, ids: Sequence[int], pool: int = POOL) -> Tensor:
    """Score of each token of the prompt [n], by the attention of its last one and of at most `ahead` written ones."""
    session, lm, found = draft.new_session(), draft.lm, []
    session.start_answer(ids, Sampler())
    while run_to_end(session.prefill_chunk(ids)):
        pass
    token, kv = ids[-1], session.cache
    for at in range(len(ids) - 1, len(ids) + ahead):
        rows = PassRows.chain([token], at)
        (made,) = run([ForwardRequest(lm, rows, kv, want=[0], record_queries=[0])])
        commit(kv, rows, made, [0])
        each = [_highest(lm, kv, layer, queries, at, len(ids), pool) for layer, queries in enumerate(made.queries)]
        found.append(torch.stack(each).amax(0))
        token = int(made.logits[0].argmax())
        if token in lm.stop_ids:
            break
    return torch.stack(found).mean(0)


def _highest(lm: Any, kv: Any, layer: int, queries: Tensor, at: int, n: int, pool: int) -> Tensor:
    """Highest smoothed attention of any head of a layer to each of the first n tokens [n]."""
    slots, how = kv.slots(layer), lm.attention_params[layer]
    assert slots.pos[0].tolist() == list(range(at + 1)), "nothing is evicted"
    newest, window = torch.tensor([at], device=slots.k.device), lm.windows[layer]
    mass = attention_mass(
        queries, newest, slots.k, slots.pos, how.scale, softcap=how.softcap, window=window, over="none"
    )
    return avg_pool1d(mass.flatten(0, 2)[:, :n], pool, 1, pool // 2, count_include_pad=False).amax(0)


def chosen(scores: Tensor, share: float, guard: set[int], size: int = CHUNK) -> list[int]:
    """The guarded tokens and the chunks with the highest mean scores, until they are this share of the prompt."""
    n, rows = len(scores), set(guard)
    means = [float(chunk.mean()) for chunk in scores.split(size)]
    for chunk in sorted(range(len(means)), key=lambda i: -means[i]):
        if len(rows) >= share * n:
            break
        rows |= {*range(chunk * size, min(n, (chunk + 1) * size))}
    return sorted(rows)


def lazy_of(share: float, n_layers: int) -> dict[str, Any] | None:
    """LazyLLM whose layers are given this share of the tokens as a mean; None = one layer alone is more."""
    below = max(1, round(share * n_layers / 2))
    if (keep := (share - below / n_layers) / (1 - below / n_layers)) <= 0:
        return None
    at = {"start_prune_layer": below / n_layers, "end_prune_layer": below / n_layers, "num_prune": 1}
    scored = {name: LAZY[name] for name in ("method", *GUARD, "score_queries", "pool")}
    return {**scored, **at, "start_keep_ratio": keep, "end_keep_ratio": keep}


def by_draft(model: Any, judge: Callable[[tuple[int, ...]], Tensor], asked: Asked, share: float, side: str) -> Took:
    """What the model makes of a prompt of which another has chosen, or the lot, what it reads."""
    began, n = perf_counter(), len(asked.ids)
    guard = {n - 1} if side == "draft" else {*range(FIRST), *range(n - NEWEST, n)}
    if side == "lots":
        scores = torch.rand(n // CHUNK + 1, generator=torch.Generator().manual_seed(n)).repeat_interleave(CHUNK)[:n]
    else:
        scores = judge(tuple(asked.ids))
    rows = chosen(scores, share, guard)
    choosing = perf_counter() - began
    found = answered(Reader(model, rows), asked)
    return found | {name: found[name] + choosing for name in ("read", "first", "whole")} | {"choosing": choosing}


def pruned(model: Any, table: dict[str, Any]) -> Any:
    """The same weights with another `[prune]`."""
    return model.with_profile(model.profile.replace(exactness="approx", prune=table))


def numbers(lm: Any) -> int:
    """Numbers of the layers' matrices."""
    of = lm.model.config.get_text_config()
    size = getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads
    heads = 2 * (of.num_attention_heads + of.num_key_value_heads) * size
    return int(of.num_hidden_layers * of.hidden_size * (heads + 3 * of.intermediate_size))


@measurement("{model}, {tokens:,} tokens chosen by {draft}: lookups right, and times the speed of reading everything")
def spec_prefill(
    model: str = "demo",
    draft: str = "demo-small",
    tokens: int = 1024,
    n: Annotated[int, "lookups of a kind"] = 4,
    shares: Floats = (0.5, 0.3, 0.1),
    sides: Annotated[Words, "only these, such as draft,lazy"] = SIDES,
    ahead: Annotated[int, "tokens that the draft model writes, at most"] = 8,
    times: bool = False,
) -> Rows:
    with TemporaryDirectory() as folder:
        if model == "demo-wide":
            write(Path(folder))
        whole = kvcli.load(folder if model == "demo-wide" else model, profile="exact")
        other = whole if draft == model else kvcli.load(draft, profile="exact")
    cost = numbers(other.lm) / numbers(whole.lm)
    prompts = list(prune_asked.lookups(whole, tokens, n))
    judge = partial(importance, other, ahead)
    judge = judge if times else cache(judge)
    makers: dict[str, Any] = {
        "exact": partial(answered, whole),
        "profile lazy": partial(answered, pruned(whole, LAZY)),
    }
    for share in shares:
        for side in sides:
            if side == "method":
                table = {"method": "spec_prefill", "model": draft, "keep": share, "min_prompt": 1, "ahead": 0}
                makers[f"{side} {share}"] = partial(answered, pruned(whole, table))
            elif side != "lazy":
                makers[f"{side} {share}"] = partial(by_draft, whole, judge, share=share, side=side)
            elif (table := lazy_of(share, whole.lm.n_layers)) is not None:
                makers[f"{side} {share}"] = partial(answered, pruned(whole, table))
    if times:  # the first reading of either model does not count
        short = replace(prompts[0], ids=prompts[0].ids[-WARM:])
        own = [make for side, make in makers.items() if side == "exact" or side.startswith("method")]
        for make in (*own, partial(by_draft, whole, judge, share=0.5, side="draft")):
            make(short)
    found: dict[str, list[Took]] = {side: [] for side in makers}
    for i, one in enumerate(prompts):
        for side in list(makers)[:: -1 if i % 2 else 1]:
            found[side].append(once(f"{model} {draft} {tokens} {n} {ahead} {i} {side}", partial(makers[side], one)))
        print(f"\r{i + 1} of {len(prompts)}", end="", file=sys.stderr, flush=True)
    for side, took in found.items():
        kept = fmean(of["kept"] for of in took)
        lost = [100 * (a["score"] - b["score"]) for a, b in zip(found["exact"], took, strict=True)]
        low, high = bootstrap({"lookup": lost}, 0) or (min(lost), max(lost))
        row = {
            "side": side,
            "kept": kept,
            "expected": 1 / (kept + cost * (side.startswith(("method", "draft")))),
        }
        if times:
            row["first token"] = gain("first", found["exact"], took)
        yield row | {"right": 100 * fmean(of["score"] for of in took), "lost": [low, fmean(lost), high]}
    note = f"{len(prompts)} lookups. A row of the draft model costs {cost:.3g} of a row of the large one, by numbers."
    return {"note": f"{note} Losses have 95% ranges."}


if __name__ == "__main__":
    spec_prefill.main()
