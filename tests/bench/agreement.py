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

Every outcome goes to `--resume` at once, so a run that was cut off goes on where it was. Counts do not depend on the
machine or its load.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import zip_longest
from math import exp
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.bench.texts import TEXTS, text_of
from kvcli.demo.report import write_report
from kvcli.kv.slots import nbytes
from kvcli.models.text import encode
from kvcli.quality.agree import PredictionDistance, TextWindow, cuts, predicted
from kvcli.quality.answer import kept
from kvcli.quality.fingerprint import fingerprint
from kvcli.quality.statistics import bootstrap
from tests.bench.harness import Floats, Ints, Row, Rows, Words, measurement, once
from tests.bench.kv_quality import BITS, Text, opened, published, rival

SCORED = 256  # tokens predicted behind a window
BEHIND = ((1, 16), (17, 64), (65, SCORED))  # tokens behind the compressed text
EVICT = "fastgen fastgen-paper kvzip snap snap-global expected keydiff lag h2o tova knorm streaming random".split()
RECALL = {"sketch": {"page": 4}, "minmax": {"page": 16}}
REPORT = 40_000  # tokens, about, of the demo's text

Changes = dict[str, Any]
Windows = dict[str, list[Row]]  # by text


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

    def answer(self, changes: Changes) -> tuple[Row, Any]:
        """What comes of such a session, and the session."""
        session = self.read(changes)
        far = PredictionDistance.of(predicted(session, self.cut.scored), self.truth, self.cut.scored)
        found: Row = {"kept": kept(session), "bytes": sum(nbytes(session.cache).values())}
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


def sides_of(
    window: Window, lot: int, at: str, asked: Sequence[str], shares: Sequence[float]
) -> Iterator[tuple[str, Row]]:
    """All sides that were asked for."""
    run, n = window.answer, len(window.cut.context) - 1
    is_asked: Callable[[str], bool] = lambda name: not asked or name.replace(" ", "") in asked  # noqa: E731
    yield "full", once(f"{at} full", lambda: run({})[0])
    for name, (k, v) in BITS.items():
        if is_asked(name):
            yield name, once(f"{at} {name}", lambda k=k, v=v: run({"kv": {"k_bits": k, "v_bits": v}})[0])
    for share in shares:
        first = {"policy": {"name": "fastgen", "keep": share}}
        ours = once(f"{at} fastgen {share}", lambda first=first: run(first)[0])
        for name in filter(is_asked, (*EVICT, *RECALL)):

            def make(name: str = name, share: float = ours["kept"]) -> Row:
                return published(run, share) if name == "fastgen-paper" else run(policy(name, share, n, lot))[0]

            outcome = ours if name == "fastgen" else once(f"{at} {name} {share}", make)
            yield f"{name} {share:.0%}", outcome


def texts(model: Any, is_demo: bool, files: Sequence[Path]) -> dict[str, list[int]]:
    """Ids of each text, by name."""
    if is_demo and not files:
        return {"reports": encode(model.tokenizer, write_report(Random(0), REPORT, 0.5).text)}
    read = {path.stem: path.read_text(encoding="utf-8") for path in files} or {t: text_of(t) for t in TEXTS}
    return {name: encode(model.tokenizer, text) for name, text in read.items()}


def each(windows: Windows, of: Callable[[Row], float]) -> dict[str, list[float]]:
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


def of_tokens(key: str, first: int = 1, last: int = SCORED) -> Callable[[Row], float]:
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


def columns(is_long: bool, has_control: bool) -> list[str]:
    """Those that a reader is shown."""
    if is_long:
        return ["context", "side", "kv bytes", "perplexity", "agree", "kl"]
    behind = [f"kl {a}-{b}" for a, b in BEHIND]
    control = ["below random"] * has_control
    return ["side", "kept", "kv bytes", "perplexity", "agree", "kl", *behind, *control]


@measurement(
    "Predictions of {model} beside the full cache's, {context} tokens read",
    note="In brackets: 95 % intervals, a bootstrap over windows. kv bytes: of a full cache in float32.",
    is_counts=True,
)
def agreement(
    model: str = "demo",
    text: tuple[Path, ...] = (),
    windows: Annotated[int, "of each text, at most"] = 4,
    context: Annotated[Ints, "tokens read"] = (1792,),
    sides: Annotated[Words, "by name without share and spaces; none = all"] = (),
    shares: Annotated[Floats, "that FastGen keeps"] = (0.5, 0.25),
    part: Annotated[str, "K/N: each Nth window from the Kth on; parts share one --resume"] = "1/1",
) -> Rows:
    settings = {"load.dtype": "fp32", "prefill.chunk": max(context)}
    loaded = opened(model, Path(tempfile.gettempdir(), "kvcli-agreement"), settings)
    key = sha256(fingerprint(loaded).encode()).hexdigest()[:12]
    number, of = map(int, part.split("/"))
    found: dict[tuple[int, str], Windows] = {}
    ids = texts(loaded, model == "demo", text)
    parts = [[(name, cut) for cut in cuts(ids[name], max(context), SCORED, windows)] for name in ids]
    order = [one for turn in zip_longest(*parts) for one in turn if one]  # a run that is stopped has some of each
    for lot, (name, cut) in enumerate(order):
        if lot % of != number - 1:
            continue
        for n in context:
            near = TextWindow(cut.context[-n:], cut.scored)
            at = f"{key} {sha256(repr(near).encode()).hexdigest()[:12]}"
            for side, outcome in sides_of(Window(loaded, near), lot, at, sides, shares):
                found.setdefault((n, side), {}).setdefault(name, []).append(outcome)
            print(f"\r{lot + 1} of {len(order)} windows, {n} tokens", end="", file=sys.stderr, flush=True)
    for (n, side), each_of in found.items():
        control = found.get((n, f"random {side.rpartition(' ')[2]}"))
        yield row(n, side, each_of, found[n, "full"], control)
    return {"windows": len(order), "columns": columns(len(context) > 1, not sides or "random" in sides)}


if __name__ == "__main__":
    agreement.main()
