"""Prompts whose segments select pages: how fast a prompt is read where it is long, and what that costs in answers.

    python tests/bench/prompt_segments.py [--only speed|answers] [--model random-152M] [--tokens 4096,8192,16384]
        [--sides xattention,critiprefill,xattention+mass=0.8] [--kv FILE] [--reps 3] [--n 7] [--out FILE]

Speed: by length, the seconds of the next `--rows` tokens of a prompt of which so many are stored, everything included
(the index, the selection, the compression point), sides by turns, in turned order. The stored KV is that of a prompt
read in full, and with `--kv` comes from a file, so that it need not be computed again; for random weights it is noise.
"reading" is the speed of the whole prompt up to there by the times at these points: a modelled figure. "share" is what
of the pages a segment and KV head selected. Noise attracts attention almost evenly, so a share of the attention is a
like share of the pages: there, only a method that reads a share of the text shows its speed. With `--resume FILE`,
lengths may be measured in several runs.
Answers: lookups alone (prune_asked.py), read and answered greedily; points lost have 95% ranges by a paired bootstrap.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli import load
from kvcli.bench.texts import text_of
from kvcli.engine.engine import run_to_end
from kvcli.environment import Paths
from kvcli.models import source
from kvcli.models.catalog import stands_for
from kvcli.models.gguf import convert
from kvcli.quality.statistics import bootstrap
from tests.bench import prune_asked
from tests.bench.harness import Ints, Rows, Words, in_turns, measurement, once, seconds
from tests.bench.prune import answered
from tests.bench.random_model import noise, write

WARM = 256  # tokens read before those that are timed: the index of what is stored is made in their first pass


def table_of(side: str) -> dict[str, Any]:
    """The table [sparse] of a side: a method, and keys behind plus signs."""
    method, *keys = side.split("+")
    given = dict(key.split("=") for key in keys)
    return {"method": method, **{key: float(n) if "." in n else int(n) for key, n in given.items()}}


def opened(name: str, folder: str, threads: int) -> Any:
    if name == "random-152M":
        write(Path(name := str(Path(folder, name))))
    given = source.find(stands_for(name, Paths.of(os.environ).data) if name != "demo" else name)
    files = convert.convert_if_needed(given, "bf16", Path(folder), keeps_on="")
    return load(str(files.path), "exact", {"load.threads": threads})


def stored(model: Any, name: str, n: int, file: str) -> list[tuple[int, Any, Any, int]]:
    """The KV of the first n tokens."""
    if file and Path(file).exists():
        return torch.load(file)
    if name == "random-152M":
        torch.manual_seed(0)
        sizes = [(at, model.lm.shapes[at]) for at in model.lm.storing]
        return [(at, *torch.randn(2, s.n_kv_heads, n, s.k_dim).to(model.lm.dtype), 0) for at, s in sizes]
    session = model.new_session()
    run_to_end(session.read(text(model, name, n + 1)))
    found = [(at, s.k.clone(), s.v.clone(), 0) for at in model.lm.storing for s in [session.cache.slots(at)]]
    if file:
        torch.save(found, file)
    return found


def text(model: Any, name: str, n: int) -> list[int]:
    return noise(n) if name == "random-152M" else (model.tokenizer.encode(text_of("prose")) * 9)[:n]


def at_length(
    model: Any, sides: dict[str, Any], name: str, n: int, past: Sequence[Any], rows: int, reps: int
) -> dict[str, dict[str, float]]:
    """Seconds of a token behind n others, and the share of the pages read, by side."""
    ids = text(model, name, n + WARM + (reps + 1) * rows + 1)
    sessions = {side: of.new_session() for side, of in sides.items()}
    for session in sessions.values():
        if n:
            session.adopt(ids, n, [(at, k[:, :n], v[:, :n], 0) for at, k, v, _ in past])
        advance(session, ids, n + WARM)

    def timed(session: Any) -> float:
        return seconds(lambda: advance(session, ids, session.committed + rows))

    took = in_turns({side: partial(timed, session) for side, session in sessions.items()}, reps)
    found = {side: {"seconds": median(took[side]) / rows, "share": 1.0} for side in sides}
    for side, session in sessions.items():
        tally = getattr(session.cache, "tally", None)
        if tally is not None and tally.asked:
            pages = (n + WARM + (reps + 1) * rows / 2) / sides[side].profile.sparse.page  # on average
            found[side]["share"] = tally.pages / tally.asked / pages
    return found


def speed(model: Any, sides: dict[str, Any], name: str, tokens: Ints, rows: int, reps: int, kv: str) -> Iterator[Any]:
    past, whole = None, dict[str, list[tuple[int, float]]]()
    for n in (0, *tokens):
        key = f"{name} {n} {rows} {reps} {' '.join(sides)}"

        def measured(n: int = n) -> dict[str, dict[str, float]]:
            nonlocal past
            past = past or (stored(model, name, max(tokens), kv) if n else [])
            return at_length(model, sides if n else {"none": model}, name, n, past, rows, reps)

        found = once(key, measured)
        for side in sides:
            whole.setdefault(side, []).append((n, found.get(side, found["none"])["seconds"]))
        for side, of in found.items() if n else ():
            row = {"tokens": n, "side": side, "tokens per second": 1 / of["seconds"], "share": of["share"]}
            row["times as fast"] = found["none"]["seconds"] / of["seconds"]
            yield row | {"reading": area(whole["none"]) / area(whole[side])}


def advance(session: Any, ids: Sequence[int], to: int) -> None:
    """Read the prompt up to so many tokens, as passes of a longer prompt do."""
    session.next_compression_at = float("inf")
    while session.committed < to:
        run_to_end(session.prefill_chunk(ids[: to + 1]))


def area(points: Sequence[tuple[int, float]]) -> float:
    """Seconds of a prompt, by the seconds of a token at some of its positions."""
    return sum((b - a) * (x + y) / 2 for (a, x), (b, y) in pairwise(points))


def judged(model: Any, sides: dict[str, Any], name: str, tokens: int, n: int) -> Iterator[Any]:
    ask = prune_asked.of_demo if name == "demo" else prune_asked.lookups
    asked = [one for one in ask(model, tokens, n) if one.kind == "lookup"]
    found: dict[str, list[Any]] = {side: [] for side in sides}
    for i, one in enumerate(asked):
        for side, of in sides.items():
            found[side].append(once(f"{name} {tokens} {n} {i} {side}", partial(answered, of, one)))
        print(f"\r{i + 1} of {len(asked)} at {tokens:,}", end="", file=sys.stderr, flush=True)
    for side, mine in found.items():
        lost = [100 * (a["score"] - b["score"]) for a, b in zip(found["none"], mine, strict=True)]
        low, high = bootstrap({"lookup": lost}, 0) or (min(lost), max(lost))
        row = {"tokens": tokens, "side": side, "lookups": len(mine), "right": 100 * fmean(of["score"] for of in mine)}
        yield row | {"lost": [low, fmean(lost), high]}


@measurement("{model}: prompts whose segments select pages", schema="kvcli.bench.prompt_segments/1")
def prompt_segments(
    model: str = "random-152M",
    only: Annotated[Literal["speed", "answers"], "what is measured"] = "speed",
    tokens: Ints = (4096, 8192, 16384),
    sides: Words = ("xattention", "critiprefill"),
    rows: Annotated[int, "tokens that are timed at once"] = 256,
    reps: int = 3,
    n: Annotated[int, "lookups of a kind"] = 7,
    kv: Annotated[str, "file that keeps the stored KV for another run"] = "",
    threads: int = 0,
) -> Rows:
    with tempfile.TemporaryDirectory() as folder:
        whole = opened(model, folder, threads)
        under = {side: whole.profile.replace(exactness="approx", sparse=table_of(side)) for side in sides}
        models = {"none": whole, **{side: whole.with_profile(profile) for side, profile in under.items()}}
        if only == "speed":
            yield from speed(whole, models, model, tokens, rows, reps, kv)
        else:
            for length in tokens:
                yield from judged(whole, models, model, length, n)
    return {"table": {side: vars(of.profile.sparse.settings) for side, of in models.items()}}


if __name__ == "__main__":
    prompt_segments.main()
