"""Reading with tokens left behind: what it saves of the first token's time, and what it costs in answers.

    python tests/bench/prune.py [--n 20] [--tokens 4096] [--budgets lazy,lazy-fast] [--hf 3] [--out FILE]
    python tests/bench/prune.py --model smollm2-135m
    python tests/bench/prune.py --model random-152M --tokens 16384 --n 3 --hf 0

Every method stands at the cost of a profile, its budget: the mean share of the tokens that a layer is given. Beside
it stand the baselines of LazyLLM's paper: `random` leaves as many behind by lot, `static` cuts once, by the attention
of an early layer, and `compressed` reads the whole prompt for each token's self-information and then anew only the
tokens that have most of it (Selective Context, Li et al., EMNLP 2023, by tokens instead of phrases). What is asked
stands in prune_asked.py; the random model is timed alone. Greedy, without drafts, sides by turns, in turned order; all
compute with the same weights, those of a GGUF file unpacked to 16 bits. "kept" counts the rows that layers were given
in fact, a look ahead included, so 1 / kept is the speed-up to expect of reading ("expected"); "but the last" is that
without the last layer, of which reading needs keys and values alone. "a token" is the speed of decoding. The first
`--hf` prompts are read by transformers as well, in one pass with either of its attentions. Speeds are medians over
prompts with their quartiles, points lost have 95% ranges by a paired bootstrap over prompts.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli import load
from kvcli.bench.hf import load_hf
from kvcli.engine.engine import iterate_events, run, run_to_end
from kvcli.engine.forward_request import ForwardRequest
from kvcli.engine.forward_request import Rows as PassRows
from kvcli.engine.sequence.commit import commit
from kvcli.engine.sequence.sampler import Sampler
from kvcli.environment import Paths
from kvcli.models import source
from kvcli.models.catalog import stands_for
from kvcli.models.gguf import convert
from kvcli.models.text import decode
from kvcli.quality.statistics import bootstrap
from kvcli.settings.profile import Profile
from tests.bench import prune_asked
from tests.bench.harness import Rows, Words, measurement, once
from tests.bench.prune_asked import Asked
from tests.bench.random_model import write

ONE_CUT = 0.5  # share of depth below which methods with one cut let all on
EARLY = 0.1  # of `static`, which judges by the first few layers
SCHEDULE = ("start_prune_layer", "end_prune_layer", "num_prune", "start_keep_ratio", "end_keep_ratio", "ratio_of")
GUARD = ("recent", "sinks", "protect", "min_prompt")
SPARED = 64  # newest tokens that `compressed` leaves as they are: the question
PART = 512  # rows of a pass whose logits it reads
WARM = 260  # tokens of the first reading, which does not count: gates are put up
THEIRS = ("sdpa", "eager")  # attentions of transformers

Table = dict[str, Any]
Took = dict[str, float]


def mean_kept(table: Table, lm: Any) -> float:
    """The share that a schedule gives a layer, tokens that always go on aside."""
    from kvcli.methods.prune.lazy import LazyLLM

    left, shares = 1.0, []
    cuts = LazyLLM(**{k: v for k, v in table.items() if k != "method"}).cuts(lm)
    for layer in range(lm.n_layers):
        left = cuts.get(layer, left)
        shares.append(left)
    return fmean(shares)


def sides_of(budget: str, lm: Any, only: Sequence[str], min_prompt: int) -> dict[str, Table]:
    """Tables of [prune] by name, all of the cost that the profile of this name has."""
    own = vars(Profile.load(budget).prune.settings)
    own |= {"min_prompt": min(min_prompt, own["min_prompt"])}
    guard = {name: own[name] for name in GUARD}
    schedule = guard | {name: own[name] for name in SCHEDULE}
    n, cost = lm.n_layers, mean_kept(schedule, lm)
    back = {"scope": "prefill+decode"}
    found: dict[str, Table] = {
        "lazy": {"method": "lazy", **own},
        "lazy, one row": {"method": "lazy", **schedule},
        "lazy, peak": {"method": "lazy", **own, "heads": "max"},
        "lazy, peak of 5": {"method": "lazy", **own, "heads": "max", "score_layers": 5},
        "lazy, back": {"method": "lazy", **own, **back},
        "lazy, back, selected": {"method": "lazy", **own, **back, "attend_to": "selected"},
        "chunked": {"method": "chunked", **schedule, **{name: own[name] for name in ("score_queries", "pool")}},
        "random": {"method": "random", **schedule},
        "compressed": {"compress": cost},
    }
    for name, depth, more in (
        ("static", EARLY, {"window": 1, "pool": 1}),
        ("cut", ONE_CUT, {}),
        ("cut, again", ONE_CUT, {"again": True}),
    ):
        below = max(1, round(depth * n))
        if (upper := cost * n - below) > 0:
            share = upper / (n if more.get("again") else n - below)
            found[name] = {"method": "cut", "layer": depth, "keep": max(0.01, share), **guard, **more}
    asked = {name.replace(" ", "").replace(",", "-") for name in only}
    plain = {name: name.replace(" ", "").replace(",", "-") for name in found}
    chosen = {n: found[n] for n, name in plain.items() if not only or {name, f"{budget}:{name}"} & asked}
    first = {repr(table): name for name, table in reversed(chosen.items())}  # a profile may have the settings of a side
    return {f"{budget}: {name}": table for name, table in chosen.items() if first[repr(table)] == name}


def compressed(model: Any, ids: list[int], share: float) -> list[int]:
    """The prompt without the tokens that the model finds likeliest where they stand."""
    cache, known = model.new_session().cache, [0.0]
    for at in range(0, len(ids) - 1, PART):
        rows = PassRows.chain(ids[at : at + PART], at)
        (made,) = run([ForwardRequest(model.lm, rows, cache, want=range(rows.n_rows))])
        commit(cache, rows, made, range(rows.n_rows))
        after = torch.tensor(ids[at + 1 : at + PART + 1])
        logprobs = made.logits[: len(after)].float().log_softmax(-1)
        known += (-logprobs.gather(1, after[:, None])[:, 0]).tolist()
    order = sorted(range(len(ids) - SPARED), key=known.__getitem__, reverse=True)
    stay = {0, *order[: max(0, round(share * len(ids)) - SPARED)], *range(len(ids) - SPARED, len(ids))}
    return [token for i, token in enumerate(ids) if i in stay]


def answered(model: Any, asked: Asked, share: float | None = None) -> Took:
    """Seconds to the end of reading, to the first token and to the end, rows that layers were given, and the score.
    With `share` it reads a compressed prompt; compressing counts as reading."""
    before = time.perf_counter()
    asked = asked if share is None else replace(asked, ids=compressed(model, asked.ids, share))
    before = time.perf_counter() - before
    session = model.new_session()
    session.start_answer(asked.ids, Sampler())
    given, append, take = [0] * model.lm.n_layers, session.cache.append, session.cache.take

    def appended(layer: int, k: Any, *rest: Any) -> None:
        given[layer] += k.shape[1]
        append(layer, k, *rest)

    def taken(layer: int, slots: Any) -> None:
        given[layer] += slots.n_slots
        take(layer, slots)

    session.cache.append, session.cache.take = appended, taken
    began = time.perf_counter()
    while run_to_end(session.prefill_chunk(asked.ids)):
        pass
    read, kept = time.perf_counter() - began + before, [n / session.committed for n in given]
    found = {"read": read, "kept": fmean(kept), "kept_below": fmean(kept[:-1])}
    if asked.follow:
        found["score"] = asked.named(session)
    began = time.perf_counter() - read
    said = list(run_to_end(session.step()).new)
    found["first"] = time.perf_counter() - began
    stop = model.lm.stop_ids if asked.score is not None else ()
    if asked.new > 1 and said[-1] not in stop:
        said += [i for step in iterate_events(session.stream(asked.new - 1, stop)) for i in step.new]
    found["whole"] = time.perf_counter() - began
    if len(said) > 1:
        found["each"] = (found["whole"] - found["first"]) / (len(said) - 1)
    if asked.score is not None:
        found["score"] = asked.score(decode(model.tokenizer, [i for i in said if i not in stop]))
    return found


def theirs(model: Any, attention: str, ids: list[int]) -> Took:
    """Seconds to the first token in one pass of transformers."""
    model.set_attn_implementation(attention)
    began = time.perf_counter()
    with torch.inference_mode():
        model(torch.tensor([ids]), use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()
    return {"first": time.perf_counter() - began}


def row_of(side: str, table: Table | None, asked: list[Asked], found: dict[str, list[Took]]) -> Table:
    """What one side made of everything, beside reading all of it."""
    mine, whole = found[side], found["exact"]
    share = (table or {}).get("compress", 1.0)  # of the prompt; the rest is read once, for its self-information
    kept = share * fmean(of["kept"] for of in mine)
    row: Table = {"side": side, "kept": kept, "expected": 1 / kept}
    row["but the last"] = 1 / share / fmean(of["kept_below"] for of in mine)
    row["reading"] = gain("read", whole, mine)
    row["first token"] = gain("first", whole, mine)
    both = [(a, b) for a, b in zip(whole, mine, strict=True) if "each" in a and "each" in b]
    row["a token"] = gain("each", *map(list, zip(*both, strict=True))) if both else None
    for attention in THEIRS:
        row[f"over {attention}"] = gain("first", found[attention], mine) if found.get(attention) else None
    for kind in dict.fromkeys(one.kind for one in asked if one.kind != "none"):
        at = [i for i, one in enumerate(asked) if one.kind == kind]
        lost = [100 * (whole[i]["score"] - mine[i]["score"]) for i in at]
        low, high = bootstrap({kind: lost}, 0) or (min(lost), max(lost))
        row[f"{kind}, whole"] = gain("whole", [whole[i] for i in at], [mine[i] for i in at])
        row[kind] = 100 * fmean(mine[i]["score"] for i in at)
        row[f"{kind}, lost"] = [low, fmean(lost), high]
    return row | {"seconds": {name: median(of[name] for of in mine) for name in ("read", "first")}, "prune": table}


def gain(name: str, slow: list[Took], fast: list[Took]) -> list[float]:
    """Lower quartile, median and upper quartile of how many times as fast, prompt by prompt as far as both go."""
    gains = sorted(a[name] / b[name] for a, b in zip(slow, fast, strict=False))
    return [gains[len(gains) // 4], median(gains), gains[3 * len(gains) // 4]]


@measurement("{model}, {tokens:,} tokens: times the speed of reading everything, and points lost")
def prune(
    model: str = "demo",
    tokens: int = 4096,
    n: Annotated[int, "lookups of a kind; half as many of what else is asked"] = 20,
    budgets: Words = ("lazy", "lazy-fast"),
    sides: Annotated[str, "only these, such as lazy+lazy-fast:lazy-back"] = "",
    kinds: Annotated[Words, "only these: lookup, prose, summary"] = (),
    min_prompt: Annotated[int, "pruned from so many tokens on, or as the profile says"] = 1024,
    hf: Annotated[int, "prompts that transformers reads as well"] = 3,
    threads: int = 0,
) -> Rows:
    with tempfile.TemporaryDirectory() as folder:
        name = model
        if name == "random-152M" and not Path(name).exists():
            write(Path(name := str(Path(folder, name))))
        given = source.find(stands_for(name, Paths.of(os.environ).data) if name != "demo" else name)
        files = convert.convert_if_needed(given, "bf16", Path(folder), keeps_on="")
        whole = load(str(files.path), "exact", {"load.threads": threads})
        ask = {"demo": prune_asked.of_demo, "random-152M": prune_asked.plain}.get(model, prune_asked.of_suite)
        asked = [one for one in ask(whole, tokens, n) if one.kind in (kinds or (one.kind,))]
        other = load_hf(files, whole.profile, Path(folder)) if hf else None
        tables: dict[str, Table | None] = {"exact": None}
        for budget in budgets:
            tables |= sides_of(budget, whole.lm, sides.split("+") if sides else (), min_prompt)
        shares = {side: table["compress"] for side, table in tables.items() if table and "compress" in table}
        models = {
            side: whole
            if table is None or side in shares
            else whole.with_profile(whole.profile.replace(exactness="approx", prune=table))
            for side, table in tables.items()
        }
        found: dict[str, list[Took]] = {side: [] for side in (*tables, *(THEIRS if hf else ()))}
        for side in found:
            warm = replace(asked[0], ids=asked[0].ids[-WARM:], new=1, follow=())
            theirs(other, side, warm.ids) if side in THEIRS else answered(models[side], warm, shares.get(side))
        for i, one in enumerate(asked):
            for side in list(found)[:: -1 if i % 2 else 1]:
                if side not in THEIRS:
                    make = partial(answered, models[side], one, shares.get(side))
                elif i < hf:
                    make = partial(theirs, other, side, one.ids)
                else:
                    continue
                found[side].append(once(f"{model} {tokens} {n} {i} {side}", make))
            print(f"\r{i + 1} of {len(asked)}", end="", file=sys.stderr, flush=True)
    for side, table in tables.items():
        yield (row := row_of(side, table, asked, found))
    kinds = Counter(one.kind for one in asked)
    counts = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()).replace("none", "plain text")
    return {
        "columns": [name for name in row if name not in ("seconds", "prune") and row[name] is not None],
        "note": f"Prompts: {counts}. Speeds with quartiles, losses with 95% ranges.",
        "transformers": {side: median(took["first"] for took in found[side]) for side in THEIRS if found.get(side)},
    }


if __name__ == "__main__":
    prune.main()
