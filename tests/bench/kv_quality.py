"""What policies and bits cost in answers: facts asked for once the text was compressed, at equal memory.

    python tests/bench/kv_quality.py [--model demo] [--tasks niah_single,mqar...] [--texts 200] [--length 2048]
        [--shares 0.5,0.25] [--allocs | --moved | --forms | --field | --losing] [--out FILE]

Four numbers are hidden in each held-out text, one in each quarter of it, and all are asked for when the text has been
read and compressed: nothing saw the questions before. An answer is right if greedy decoding writes the number token for
token. FastGen compresses first, to each of `shares`; what it kept of that very text is what all others then get, the
published FastGen by the T at which its heads keep at least as much. "map" is FastGen with the head map that
`kvcli profile-heads --probe ablate` makes of the model, from other texts. Intervals are paired bootstraps over texts:
the four questions about one text are not independent. `--allocs` compares who shares the budget instead, and `--moved`
where goes what a policy does not keep: away, or down a tier, and `--forms` in which form old slots lie: of the same
bits, or of fewer numbers. `--field` has every policy that keeps a share, by itself and with what is done to scores,
whose queries vote, who shares and what is one unit, between both controls. `--losing` has budgets of a share of worth
that may be lost. `--tasks` asks other questions, `--texts` of each, hidden in Moby-Dick: those that a model answers
from the full cache; what is found is told by task, with what the budget gives beside the best of all others at the same
share.

Every answer goes to `--resume` at once, so a run that was cut off goes on where it was. Counts do not depend on the
machine or its load; `ms` do: processor time of one thread, medians over texts, that compressing the text that was read
took, and the pass that answers all four questions.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli import load
from kvcli.bench.texts import text_of
from kvcli.engine.engine import run, run_to_end
from kvcli.engine.forward_request import ForwardRequest
from kvcli.engine.forward_request import Rows as PassRows
from kvcli.environment import Paths
from kvcli.heads.request import ProbeRequest
from kvcli.heads.run import probe
from kvcli.heads.sample import ProbeSample, samples
from kvcli.kv.slots import nbytes
from kvcli.methods.policies.fastgen.policy import FastGen
from kvcli.models import source
from kvcli.models.catalog import stands_for
from kvcli.models.gguf import convert
from kvcli.quality.answer import kept
from kvcli.quality.fingerprint import fingerprint
from kvcli.quality.statistics import bootstrap
from kvcli.quality.tasks import TASKS
from tests.bench.harness import Floats, Row, Rows, Words, belongs_to, measurement, once

HELD_OUT = 5_000  # seed of the texts
MAPPED = 1024  # tokens of the texts that the head map is made from
BITS = {"int8": (8, 8), "4 + 4 bits": (4, 4), "4 + 2 bits": (4, 2)}
RIVALS = ("fastgen + map", "fastgen-paper", "snap", "expected", "kvzip", "budget", "streaming", "random")
ALLOCS = ("ada", "global", "uniform", "pyramid")
SHARED = ("snap", "expected", "keydiff")  # methods whose allocations are compared
FOUR = {"kv": {"k_bits": 4, "v_bits": 4}}
FORMS: dict[str, dict[str, Any]] = {  # and how each is asked for
    "kivi": {},
    "kivi before rope": {"method": "kivi", "rope": "before"},
    **{name: {"method": name} for name in ("zipcache", "rotatekv", "qaq", "gear", "squat", "turboquant")},
}
FEWER: dict[str, dict[str, Any]] = {  # numbers of old slots, in 16 bits
    **{
        f"mustafar {s:.0%}": {"kv_format": {"method": "mustafar", "k_sparsity": s, "v_sparsity": s}} for s in (0.5, 0.7)
    },
    **{f"freqkv {r:.0%}": {"kv_format": {"method": "freqkv", "retained": r}} for r in (0.75, 0.5)},
    **{f"subgen {n}": {"kv_format": {"method": "subgen", "centers": n, "samples": n}} for n in (32, 16)},
    **{
        f"cskv {r}": {"kv": {"group": 256}, "kv_format": {"method": "cskv", "k_rank": r, "v_rank": r}} for r in (32, 16)
    },
}
READS = {"sparse": {"method": "sketch", "floor": 128}}  # tokens of what lies below that a head reads for a row
FILE = {"memory": {"disk": "4GiB"}}
MOVED: dict[str, dict[str, Any]] = {  # where goes what a policy does not keep
    "dropped": {},
    "recalled": READS,
    "in 4 bits": FOUR,
    "in 4 bits, recalled": FOUR | READS,
    "in a file, recalled": FILE | READS,
}
SNAP = {"name": "snap", "alloc": "uniform"}
VARIANTS: dict[str, dict[str, Any]] = {  # of policies, as `--field` has them beside what each does by default
    "snap": SNAP,
    "adakv": {"name": "snap"},
    "snap, all layers": SNAP | {"alloc": "global"},
    "pyramidkv": SNAP | {"alloc": "pyramid"},
    "prefixkv": SNAP | {"alloc": "prefix"},
    "laq": SNAP | {"lookahead": 16},
    "criticalkv": SNAP | {"post": "critical"},
    "graphkv": SNAP | {"post": "graph"},
    "kvcrush": SNAP | {"post": "crush"},
    "fair": SNAP | {"post": "fair"},
    "chunkkv": SNAP | {"unit": 16, "reuse_layers": 2},
    "sentences": SNAP | {"unit": "sentence"},
    "kvzip, all layers": {"name": "kvzip", "alloc": "global"},
    "kvzip+, all layers": {"name": "kvzip", "alloc": "global", "plus": True},
}
LOSES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)  # of worth
FINE = 2**-10  # of T
SINKS, NEWEST = 4, 64  # that lots leave alone

Sides = Iterator[tuple[str, Row]]
Answer = Callable[[dict[str, Any]], tuple[Row, Any]]  # changes of the profile -> what came of it, and the session


def opened(name: str, cache: Path, settings: dict[str, object]) -> Any:
    """The model under `exact` with these settings. A GGUF file is unpacked to float32: so passes of many rows are three
    times as fast, and no rounding of weights or rows makes more of a difference than there is."""
    found = source.find(stands_for(name, Paths.of(os.environ).data))
    files = convert.convert_if_needed(found, "fp32", cache, keeps_on="")
    return load(str(files.path), "exact", set=settings)


class Text:
    """One text, run through the model once for all sides: what is stored of it, and all its queries."""

    def __init__(self, model: Any, ids: list[int]) -> None:
        self.ids, self.n = ids, len(ids) - 1
        self.rows = PassRows.chain(self.ids[:-1], 0)
        (self.made,) = run(
            [ForwardRequest(model.lm, self.rows, model.new_session().cache, record_queries=range(self.n))]
        )

    def read_by(self, session: Any, fresh: Any = None) -> None:
        """What `session.read` does with a text of one chunk. `fresh`: keys and values in place of the text's."""
        assert self.n <= session.chunk_rows
        session.ids = list(self.ids)
        session.query_recorder.begin(self.n)
        hear, made = session.query_recorder.rows_to_record_in_chunk(0, self.n), self.made
        made = replace(made, queries=[q[:, hear] for q in made.queries] if hear else [], fresh=fresh or made.fresh)
        session.next_compression_at = self.n
        session._commit(self.rows, hear, made, range(self.n))
        run_to_end(session.compress_cache("read"))


def answered(model: Any, sample: ProbeSample, changes: dict[str, Any], text: Text | None = None) -> tuple[Row, Any]:
    """Read the text under a profile, then all questions in one pass behind it, of which nothing is stored."""
    session = model.with_profile(model.profile.replace(exactness="approx", **changes)).new_session()
    text = text or Text(model, sample.context)
    start = time.thread_time()
    text.read_by(session)
    read = time.thread_time()
    found = asked(model, sample, session)
    return found | {"ms": [round(1000 * s, 2) for s in (read - start, time.thread_time() - read)]}, session


def asked(model: Any, sample: ProbeSample, session: Any) -> Row:
    """All questions about the text that a session has read, in one pass of which nothing is stored."""
    rows, scored = sample.rows(), sample.scored()
    (made,) = run([ForwardRequest(model.lm, rows, session.cache, want=[row for row, _ in scored])])
    hits = (made.logits.argmax(-1) == torch.tensor([token for _, token in scored])).tolist()
    right = []
    for one in sample.asked:
        right.append(all(hits[: len(one.value)]))
        hits = hits[len(one.value) :]
    held = nbytes(session.cache)
    here = sum(n for tier, n in held.items() if tier not in ("disk", "host"))
    return {"right": right, "kept": kept(session), "bytes": sum(held.values()), "device": here}


def head_map(model: Any, path: Path) -> str:
    """The file of the model's own head map, made if it is not there."""
    if not path.exists():
        found = probe(model, ProbeRequest(probes=("ablate",), context=MAPPED, settings=FastGen(), seed=0))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"heads": found.heads.tolist()}))
    return str(path)


def rival(name: str, share: float, n: int, lot: int, mapped: str) -> dict[str, Any]:
    """The policy of a side that is to keep this share of n tokens."""
    budget = round(share * n)
    if name == "fastgen + map":
        return {"name": "fastgen", "keep": share, "headmap": mapped}
    if name == "budget":
        return {"name": "budget"}
    if name == "streaming":
        return {"name": "window", "sinks": SINKS, "window": budget - SINKS}
    if name == "random":
        return {"name": "random", "budget": budget, "sinks": SINKS, "window": NEWEST, "seed": lot}
    return {"name": name, "keep": share}


def percent(share: float) -> str:
    """As sides are named: 25%, 12.5%."""
    return f"{100 * share:g}%"


def spent(name: str, share: float) -> dict[str, Any]:
    """Bytes in place of tokens, for a side that spends those."""
    return {"memory": {"budget": f"{100 * share:.1f}%"}} if name == "budget" else {}


def published(answer: Answer, share: float) -> Row:
    """FastGen as published, with the lowest T at which its heads keep this share."""
    policy = {"name": "fastgen", "paper": True, "compression_interval": 1}
    _, session = answer({"policy": policy})
    low, high = 0.0, 1.0  # too little; enough
    while high - low > FINE:
        middle = (low + high) / 2
        low, high = (low, middle) if session.policy_record.state.kept_at(middle) >= share else (middle, high)
    outcome, _ = answer({"policy": policy | {"recovery": high}})
    return outcome | {"t": high}


def sides(answer: Answer, n: int, i: int, shares: Sequence[float], mapped: str) -> Sides:
    """All sides of one text of n tokens; those with a head map where there is one."""
    yield "full", once(f"{i} full", lambda: answer({})[0])
    for name, (k, v) in BITS.items():
        change = {"kv": {"k_bits": k, "v_bits": v}}
        yield name, once(f"{i} {name}", lambda change=change: answer(change)[0])
    shipped = {"policy": {"name": "fastgen", "paper": True, "recovery": 0.95, "compression_interval": 1}}
    yield "fastgen-paper T 0.95", once(f"{i} paper", lambda: answer(shipped)[0])
    for share in shares:
        first = {"policy": {"name": "fastgen", "keep": share}}
        ours = once(f"{i} fastgen {share}", lambda first=first: answer(first)[0])
        yield f"fastgen {percent(share)}", ours
        for name in RIVALS if mapped else RIVALS[1:]:

            def make(name: str = name, share: float = ours["kept"]) -> Row:
                if name == "fastgen-paper":
                    return published(answer, share)
                return answer({"policy": rival(name, share, n, i, mapped), **spent(name, share)})[0]

            yield f"{name} {percent(share)}", once(f"{i} {name} {share}", make)


def shared(answer: Answer, n: int, i: int, shares: Sequence[float], mapped: str) -> Sides:
    """Methods by who shares the budget."""
    for share in shares:
        for name in SHARED:
            for alloc in ALLOCS:
                policy = {"policy": {"name": name, "keep": share, "alloc": alloc}}
                side = f"{name} {percent(share)} {alloc}"
                yield side, once(f"{i} {side}", lambda policy=policy: answer(policy)[0])


def moved(answer: Answer, n: int, i: int, shares: Sequence[float], mapped: str) -> Sides:
    """Some policies by where goes what they do not keep, beside what keeps all."""
    whole: dict[str, dict[str, Any]] = {"full": {}, "recalled": READS, "in 4 bits": FOUR}
    for name, change in whole.items():
        yield name, once(f"{i} {name}", lambda change=change: answer(change)[0])
    for share in shares:
        for name in ("snap", "streaming", "random"):
            for way, more in MOVED.items():
                change = {"policy": rival(name, share, n, i, mapped), **more}
                change |= {"memory": {**more.get("memory", {}), "evicted": "demote"}} if more else {}
                side = f"{name} {percent(share)} {way}"
                yield side, once(f"{i} {side}", lambda change=change: answer(change)[0])
        for method in ("minmax", "cluster", "lowrank"):
            change = {"policy": rival("snap", share, n, i, mapped), "memory": {"evicted": "demote"}}
            change |= {"sparse": {"method": method, "floor": READS["sparse"]["floor"]}}
            side = f"snap {percent(share)} recalled by {method}"
            yield side, once(f"{i} {side}", lambda change=change: answer(change)[0])
        for way, more in {"dropped": {}, "in a file, recalled": FILE["memory"] | {"evicted": "demote"}}.items():
            spends = {"policy": {"name": "budget"}, "memory": {**spent("budget", share)["memory"], **more}}
            change = spends | (READS if more else {})
            side = f"budget {percent(share)} {way}"
            yield side, once(f"{i} {side}", lambda change=change: answer(change)[0])


def field(answer: Answer, n: int, i: int, shares: Sequence[float], mapped: str) -> Sides:
    """Every policy that keeps a share of a text, and controls."""
    from kvcli.policies.scoring.topk import TopK
    from kvcli.settings.resolve import method_class
    from kvcli.settings.schema import registries

    yield "full", once(f"{i} full", lambda: answer({})[0])
    for name, (k, v) in BITS.items():
        change = {"kv": {"k_bits": k, "v_bits": v}}
        yield name, once(f"{i} {name}", lambda change=change: answer(change)[0])
    found = {name: {"name": name} for name, of in registries()["policy"].items() if issubclass(method_class(of), TopK)}
    for share in shares:
        policies = {name: {**of, "keep": share} for name, of in (found | VARIANTS).items()}
        policies |= {name: rival(name, share, n, i, mapped) for name in ("fastgen", "streaming", "random")}
        policies |= {"fastgen + map": rival("fastgen + map", share, n, i, mapped)} if mapped else {}
        for name, policy in policies.items():
            side = f"{name} {percent(share)}"
            yield side, once(f"{i} field {side}", lambda policy=policy: answer({"policy": policy})[0])
        planned = {"policy": {"name": "budget"}, **spent("budget", share)}
        side = f"budget {percent(share)}"
        yield side, once(f"{i} field {side}", lambda planned=planned: answer(planned)[0])


def formed(answer: Answer, n: int, i: int, shares: Sequence[float], mapped: str) -> Sides:
    """Forms of old slots: of the same bits each, and of fewer numbers."""
    yield "full", once(f"{i} full", lambda: answer({})[0])
    for name, change in FEWER.items():
        yield name, once(f"{i} {name}", lambda change=change: answer(change)[0])
    for k, v in ((4, 4), (4, 2), (2, 2)):
        for name, form in FORMS.items():
            change = {"kv": {"k_bits": k, "v_bits": v}, "kv_format": form}
            yield f"{name} {k} + {v}", once(f"{i} {name} {k} {v}", lambda change=change: answer(change)[0])


def losing(answer: Answer, n: int, i: int, shares: Sequence[float], mapped: str) -> Sides:
    """What `memory.max_loss` takes and costs, by score, heads alike and weighed by their map."""
    yield "full", once(f"{i} full", lambda: answer({})[0])
    maps = {"": "", " + map": mapped} if mapped else {"": ""}
    for score in ("kvzip", "snap"):
        for words, headmap in maps.items():
            policy = {"policy": {"name": "budget", "score": score, "headmap": headmap}}
            for lose in LOSES:
                change = policy | {"memory": {"max_loss": lose}}
                side = f"{score}{words} lose {lose}"
                yield side, once(f"{i} {side}", lambda change=change: answer(change)[0])


MODES = {  # what is compared, in the words of the title
    "allocs": (shared, "who shares the budget"),
    "moved": (moved, "by where goes what a policy does not keep"),
    "forms": (formed, "by the form of old slots"),
    "field": (field, "every policy at equal memory"),
    "losing": (losing, "by the share of worth that a budget may lose"),
}


def row(name: str, found: list[Row], full: list[Row] | None, ours: list[Row] | None) -> dict[str, Any]:
    """One side, beside the full cache and, where it has a share to keep, beside FastGen."""
    right = [fmean(o["right"]) for o in found]
    out = {
        "side": name,
        "kept": round(fmean(o["kept"] for o in found), 4),
        "kv_mib": round(fmean(o["bytes"] for o in found) / 2**20, 3),
        "device_mib": round(fmean(o.get("device", o["bytes"]) for o in found) / 2**20, 3),  # older runs used no file
        "accuracy": round(fmean(right), 4),
    }
    for key, others in (("less than full", full), ("fastgen better by", ours)):
        out[key] = less(found, others) if others is not None and others is not found else None
    for at, key in enumerate(("compress ms", "answer ms")):
        timed = [o["ms"][at] for o in found if "ms" in o]
        out[key] = round(median(timed), 1) if timed else None
    return out


def less(found: list[Row], others: list[Row]) -> list[float]:
    """By how much the others are right more often: the mean, between the ends of its interval."""
    by = [fmean(o["right"]) - fmean(f["right"]) for o, f in zip(others, found, strict=True)]
    low, high = bootstrap({"": by}, 0) or (fmean(by), fmean(by))
    return [round(x, 4) for x in (low, fmean(by), high)]


def table(found: dict[str, list[Row]]) -> list[dict[str, Any]]:
    """A row a side."""
    share = {name: name.rpartition(" ")[2] for name in found}
    rows = [
        row(name, outcomes, found.get("full"), found.get(f"fastgen {share[name]}")) for name, outcomes in found.items()
    ]
    return [{key: each[key] for key in each if any(other[key] is not None for other in rows)} for each in rows]


def beside_best(found: dict[str, list[Row]]) -> dict[str, Any]:
    """By share: which side but the budget is right most often, and by how much more than the budget."""
    out = {}
    for name, ours in found.items():
        kind, _, share = name.rpartition(" ")
        if kind != "budget":
            continue
        others = {n: o for n, o in found.items() if n.rpartition(" ")[2] == share and o is not ours}
        best = max(others, key=lambda n: fmean(fmean(o["right"]) for o in others[n]))
        out[share] = {"best": best, "by": less(ours, others[best])}
    return out


@measurement(
    "Right answers about held-out texts of {length} tokens of {model}",
    note="In brackets: 95 % intervals, a paired bootstrap over texts. kept: slots; kv mib: what is allocated, device "
    "mib: but for files and host memory.",
    is_counts=True,
)
def kv_quality(
    model: str = "demo",
    tasks: Annotated[Words, "of kvcli bench --quality that have one answer"] = (),
    texts: int = 200,
    length: Annotated[int, "tokens of a text, answers included"] = 2048,
    shares: Annotated[Floats, "that FastGen keeps"] = (0.5, 0.25),
    allocs: bool = False,
    moved: bool = False,
    forms: bool = False,
    field: bool = False,
    losing: bool = False,
    part: Annotated[str, "K/N: each Nth text from the Kth on; parts share one --resume"] = "1/1",
) -> Rows:
    chosen = {"allocs": allocs, "moved": moved, "forms": forms, "field": field, "losing": losing}
    mode = next((name for name, is_chosen in chosen.items() if is_chosen), "")
    compared, what = MODES.get(mode, (sides, "at equal memory"))
    cache = Path(tempfile.gettempdir(), "kvcli-kv-quality")
    loaded = opened(model, cache, {})
    key = sha256(f"{fingerprint(loaded)} {length} {HELD_OUT} {','.join(tasks)}".encode()).hexdigest()[:12]
    belongs_to(key)
    mapped = head_map(loaded, cache / f"{key}.map.json") if not tasks and mode not in ("moved", "forms") else ""
    asked_of = samples(loaded, texts, length, HELD_OUT) if not tasks else []
    for task in tasks:
        asked_of += samples(loaded, texts, length, HELD_OUT, text_of("prose"), TASKS[task])
    found: dict[str, list[Row]] = {}
    by_task: dict[str, dict[str, list[Row]]] = {}
    number, of = map(int, part.split("/"))
    for i, sample in enumerate(asked_of):
        if i % of != number - 1:
            continue
        text = lru_cache(1)(lambda sample=sample: Text(loaded, sample.context))  # not run where everything is known
        answer = lambda changes, sample=sample, text=text: answered(loaded, sample, changes, text())  # noqa: E731
        of_task = by_task.setdefault((tasks or ("facts",))[i // texts], {})
        for side, outcome in compared(answer, len(sample.context) - 1, i, shares, mapped):
            found.setdefault(side, []).append(outcome)
            of_task.setdefault(side, []).append(outcome)
        print(f"\r{i + 1} of {len(asked_of)} texts", end="", file=sys.stderr, flush=True)
    for each in table(found):
        if len(by_task) > 1:
            each |= {task: round(fmean(fmean(o["right"]) for o in of[each["side"]]), 3) for task, of in by_task.items()}
        yield each
    best = {task: beside_best(of) for task, of in by_task.items()}
    return {
        "title": f"Right answers about {len(asked_of)} held-out texts of {length} tokens, {what}",
        "t": {side: sorted(o["t"] for o in each) for side, each in found.items() if "t" in each[0]},
        "best": best if any(best.values()) else {},
    }


if __name__ == "__main__":
    kv_quality.main()
