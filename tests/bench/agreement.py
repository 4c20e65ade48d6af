"""How far policies, bits and recall move the predictions of real text, at equal memory: no questions, no skill asked.

    python tests/bench/agreement.py [--model FILE] [--text FILE...] [--windows 4] [--context 1792[,4096...]]
        [--sides int8,4+4bits...] [--shares 0.5,0.25] [--out FILE]

Windows are spread over each text. The first tokens of one are read in one chunk and compressed; the 256 behind are then
predicted one by one, each given the true ones before it, from the compressed past and from the full one. FastGen
compresses first, to each of `shares`; what it kept of that very window is what all others then get, the published
FastGen by the T at which its heads keep at least as much. Recall keeps everything and reads that share of it. Of
several contexts the same tokens are predicted from longer and longer stretches before them. The demo model reads the
reports that it was trained on. Intervals are bootstraps over windows, within each text.

kl, delta nll: nats a token. agree: tokens whose likeliest successor is the full cache's. The columns "kl 1-16" and so
on: by how many tokens behind the compressed text. "below random": by how much kl is, paired, with as much memory.

Every outcome goes to `--partial` at once, so a run that was cut off goes on where it was. Counts do not depend on the
machine or its load. Prints a table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property
from hashlib import sha256
from itertools import zip_longest
from math import exp
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli.bench.texts import TEXTS, text_of
from kvcli.demo.report import write_report
from kvcli.kv.slots import nbytes
from kvcli.models.text import encode
from kvcli.quality.agree import PredictionDistance, TextWindow, cuts, predicted
from kvcli.quality.answer import kept
from kvcli.quality.fingerprint import fingerprint
from kvcli.quality.statistics import bootstrap
from tests.bench.harness import Known, machine
from tests.bench.harness import Row as Outcome
from tests.bench.kv_quality import BITS, Text, opened, published, rival

SCORED = 256  # tokens predicted behind a window
BEHIND = ((1, 16), (17, 64), (65, SCORED))  # tokens behind the compressed text
EVICT = "fastgen fastgen-paper kvzip snap snap-global expected keydiff lag h2o tova knorm streaming random".split()
RECALL = {"sketch": {"page": 4}, "minmax": {"page": 16}}
REPORT = 40_000  # tokens, about, of the demo's text

Changes = dict[str, Any]
Windows = dict[str, list[Outcome]]  # by text


class Window:
    """One window, read and predicted once for all sides, and not at all where all of them are known."""

    def __init__(self, model: Any, cut: TextWindow) -> None:
        self.model, self.cut = model, cut

    @cached_property
    def text(self) -> Text:
        """What is stored of it."""
        return Text(self.model, self.cut.context)

    @cached_property
    def truth(self) -> Any:
        """[n, V]: what the full cache predicts."""
        return predicted(self.read({}), self.cut.scored)

    def read(self, changes: Changes) -> Any:
        """A session under a changed profile, its past compressed."""
        session = self.model.with_profile(self.model.profile.replace(exactness="approx", **changes)).new_session()
        self.text.read_by(session)
        return session

    def answer(self, changes: Changes) -> tuple[Outcome, Any]:
        """What comes of such a session, and the session."""
        session = self.read(changes)
        far = PredictionDistance.of(predicted(session, self.cut.scored), self.truth, self.cut.scored)
        found: Outcome = {"kept": kept(session), "bytes": sum(nbytes(session.cache).values())}
        for key in ("same", "kl", "nll", "delta"):
            found[key] = [round(x, 6) for x in getattr(far, key).float().tolist()]
        return found, session


def policy(name: str, share: float, n: int, lot: int) -> Changes:
    """The changes of a side that is to keep, or to read, this share of n tokens."""
    method, _, alloc = name.partition("-")
    if method in RECALL:
        return {"sparse": RECALL[method] | {"method": method, "fraction": share, "floor": 1, "dense_layers": 0}}
    if alloc == "global":
        return {"policy": {"name": method, "keep": share, "alloc": alloc}}
    return {"policy": rival(name, share, n, lot, "")}


def sides(window: Window, lot: int, at: str, args: Any, known: Known) -> Iterator[tuple[str, Outcome]]:
    """All sides that were asked for."""
    run, n = window.answer, len(window.cut.context) - 1
    asked = args.sides.split(",") if args.sides else None
    is_asked: Callable[[str], bool] = lambda name: asked is None or name.replace(" ", "") in asked  # noqa: E731
    yield "full", known.of(f"{at} full", lambda: run({})[0])
    for name, (k, v) in BITS.items():
        if is_asked(name):
            yield name, known.of(f"{at} {name}", lambda k=k, v=v: run({"kv": {"k_bits": k, "v_bits": v}})[0])
    for share in map(float, args.shares.split(",")):
        first = {"policy": {"name": "fastgen", "keep": share}}
        ours = known.of(f"{at} fastgen {share}", lambda first=first: run(first)[0])
        for name in filter(is_asked, (*EVICT, *RECALL)):

            def make(name: str = name, share: float = ours["kept"]) -> Outcome:
                return published(run, share) if name == "fastgen-paper" else run(policy(name, share, n, lot))[0]

            outcome = ours if name == "fastgen" else known.of(f"{at} {name} {share}", make)
            yield f"{name} {share:.0%}", outcome


def texts(model: Any, args: Any) -> dict[str, list[int]]:
    """Ids of each text, by name."""
    if args.model == "demo" and not args.text:
        return {"reports": encode(model.tokenizer, write_report(Random(0), REPORT, 0.5).text)}
    read = {path.stem: path.read_text(encoding="utf-8") for path in args.text} or {t: text_of(t) for t in TEXTS}
    return {name: encode(model.tokenizer, text) for name, text in read.items()}


def each(windows: Windows, of: Callable[[Outcome], float]) -> dict[str, list[float]]:
    """A number a window, by text."""
    return {text: [of(outcome) for outcome in some] for text, some in windows.items()}


def mean(values: dict[str, list[float]]) -> float:
    """Each text counts alike."""
    return round(fmean(map(fmean, values.values())), 6)


def between(values: dict[str, list[float]]) -> list[float]:
    """Low, mean, high; texts of one window say nothing of their spread, so that then all are drawn from together."""
    groups = values if min(map(len, values.values())) > 1 else {"": [x for some in values.values() for x in some]}
    low, high = bootstrap(groups, 0) or (mean(values), mean(values))
    return [round(low, 6), mean(values), round(high, 6)]


def of_tokens(key: str, first: int = 1, last: int = SCORED) -> Callable[[Outcome], float]:
    """The mean over tokens so far behind the compressed text."""
    return lambda outcome: fmean(outcome[key][first - 1 : last])


def row(context: int, side: str, found: Windows, full: Windows, control: Windows | None) -> dict[str, Any]:
    """One side."""
    share = mean(each(found, lambda o: o["bytes"])) / mean(each(full, lambda o: o["bytes"]))
    out: dict[str, Any] = {"context": context, "side": side, "kept": mean(each(found, lambda o: o["kept"]))}
    out |= {"kv bytes": round(share, 3), "perplexity": round(exp(mean(each(found, of_tokens("nll")))), 2)}
    if found is full:
        return out
    out |= {"agree": between(each(found, of_tokens("same"))), "kl": between(each(found, of_tokens("kl")))}
    out["delta nll"] = between(each(found, of_tokens("delta")))
    for a, b in BEHIND:
        out[f"kl {a}-{b}"] = mean(each(found, of_tokens("kl", a, b)))
    if control is not None and control is not found:
        ours, theirs = each(found, of_tokens("kl")), each(control, of_tokens("kl"))
        out["below random"] = between({t: [y - x for x, y in zip(ours[t], theirs[t], strict=True)] for t in ours})
    return out | {f"kl {text}": round(fmean(some), 6) for text, some in each(found, of_tokens("kl")).items()}


def columns(is_long: bool) -> list[str]:
    """Those that a reader is shown."""
    if is_long:
        return ["context", "side", "kv bytes", "perplexity", "agree", "kl"]
    behind = [f"kl {a}-{b}" for a, b in BEHIND]
    return ["side", "kept", "kv bytes", "perplexity", "agree", "kl", *behind, "below random"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, nargs="+", default=[])
    parser.add_argument("--windows", type=int, default=4, help="of each text, at most")
    parser.add_argument("--context", default="1792", help="tokens read, or several such numbers")
    parser.add_argument("--sides", default="", help="by name without share and spaces; none = all")
    parser.add_argument("--shares", default="0.5,0.25", help="that FastGen keeps")
    parser.add_argument("--part", default="1/1", help="K/N: each Nth window from the Kth on; parts share one --partial")
    parser.add_argument("--partial", type=Path, help="file that holds what is known so far")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    contexts = [int(n) for n in args.context.split(",")]
    cache = Path(tempfile.gettempdir(), "kvcli-agreement")
    model = opened(args.model, cache, {"load.dtype": "fp32", "prefill.chunk": max(contexts)})
    key = sha256(fingerprint(model).encode()).hexdigest()[:12]
    known = Known(args.partial or cache / f"{key}.jsonl")
    part, of = map(int, args.part.split("/"))
    found: dict[tuple[int, str], Windows] = {}
    ids = texts(model, args)
    parts = [[(text, cut) for cut in cuts(ids[text], max(contexts), SCORED, args.windows)] for text in ids]
    order = [one for turn in zip_longest(*parts) for one in turn if one]  # a run that is stopped has some of each
    for lot, (text, cut) in enumerate(order):
        if lot % of != part - 1:
            continue
        for n in contexts:
            near = TextWindow(cut.context[-n:], cut.scored)
            at = sha256(repr(near).encode()).hexdigest()[:12]
            for side, outcome in sides(Window(model, near), lot, at, args, known):
                found.setdefault((n, side), {}).setdefault(text, []).append(outcome)
            print(f"\r{lot + 1} of {len(order)} windows, {n} tokens", end="", file=sys.stderr, flush=True)
    rows = []
    for (n, side), windows in found.items():
        control = found.get((n, f"random {side.rpartition(' ')[2]}"))
        rows.append(row(n, side, windows, found[n, "full"], control))
        print(json.dumps(rows[-1]))
    about, what = machine(), "reports" if args.model == "demo" else "real texts"
    command = ["python tests/bench/agreement.py", *sys.argv[1:]]
    result = {
        "title": f"Predictions beside the full cache's: {len(order)} windows of {what}, {args.context} tokens read",
        "machine": f"torch {about['torch']}, commit {about['commit']}",
        "command": " ".join(command).partition(" --out")[0],
        "columns": columns(len(contexts) > 1),
        "rows": rows,
        "note": "In brackets: 95 % intervals, a bootstrap over windows. kv bytes: of a full cache in float32.",
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
