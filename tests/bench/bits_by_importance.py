"""Bits by importance, and rounding by the queries: ZipCache's, QAQ's and SQuat's rules beside plain rounding.

    python tests/bench/bits_by_importance.py [--model demo] [--texts 16] [--windows 1] [--length 1024] [--out FILE]

Sides replace the keys and values of a text by what a KV format gives back; the 4 first and 60 newest slots stay in 16
bits. "4|2": in each head the half of the slots with the largest attention takes 4 bits, the rest 2, keys and values
alike, in blocks of one width. ZipCache (arXiv 2405.14256) divides the attention that probe rows (the newest 5 % and 5 %
by lot) pay a slot by the number of those that see it; QAQ (arXiv 2403.04643) takes the largest that one of them pays.
`budget` is the policy, with as many bytes, positions included; "in" a format, its slots in 8 and 4 bits are rounded by
that, in a few bytes more. SQuat (arXiv 2503.24358): errors of keys least along the main directions of the block's keys
(as kvcli does) or of 64 queries, the newest but 32; "all": along each direction, by its square.

right: of four facts in each text, asked afterwards. kl: nats a token, of the 128 tokens behind `--windows` windows of
each real text, or of the demo's reports. error: of the heads' outputs for the newest 32 queries, relative. bytes: of a
token in 16 bits, scales included.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.assemble import plan
from kvcli.bench.texts import text_of
from kvcli.heads.sample import samples
from kvcli.kv.formats.block_format import BlockFormat
from kvcli.kv.slots import POSITION, LayerShape
from kvcli.methods.formats.squat import Squat
from kvcli.quality.agree import PredictionDistance, cuts, predicted
from kvcli.settings.resolve import method_class
from kvcli.settings.schema import Kv, registries
from tests.bench.across_layers import HELD_OUT, KV, QUERIES, loss, through
from tests.bench.agreement import texts as texts_of
from tests.bench.harness import Row, Rows, measurement
from tests.bench.kv_quality import Text, asked, opened

SINKS, NEWEST = 4, 60  # slots that stay in 16 bits, as with policy `budget`
HEARD = 64  # queries that SQuat hears
PROBES = 0.05  # share of rows that are probes for being the newest, and as many more by lot
SALIENT = 0.5  # share of slots in 4 bits
ROUNDED = ("kivi", "zipcache", "qaq")  # by which the slots of `budget` are rounded; the first is the control
SCORED = 128  # tokens predicted behind a window


@dataclass(frozen=True)
class Spanned(Squat):
    """SQuat by given queries [1, N, D] of one head."""

    queries: Tensor | None = None
    is_whole: bool = False  # all directions count, each by its square

    def _carry(self, k: Tensor) -> Tensor:
        q = self.queries
        assert q is not None
        if not self.is_whole:
            return super()._carry(q)
        square = q.mT @ q
        square = square / square.diagonal(dim1=-2, dim2=-1).mean() * self.weight + torch.eye(q.shape[-1])
        return torch.linalg.cholesky(torch.linalg.inv(square), upper=True)


def form_of(name: str) -> BlockFormat:
    return method_class(registries()["kv_format"][name])()


class Layer:
    """Keys and values [K, S, D] of a layer, and the queries [K, G, N, D] of all rows."""

    def __init__(self, k: Tensor, v: Tensor, queries: Tensor, scale: float, lot: torch.Generator) -> None:
        self.k, self.v, self.scale = k, v, scale
        self.queries = queries.view(k.shape[0], -1, *queries.shape[1:])
        n = k.shape[1] - QUERIES  # the newest rows measure
        newest = max(1, round(PROBES * n))
        rows = torch.cat([torch.arange(n - newest, n), torch.randperm(n - newest, generator=lot)[:newest]])
        seen = torch.arange(k.shape[1]) <= rows[:, None]
        paid = (self.queries[:, :, rows] @ k.mT.unsqueeze(1) * scale).masked_fill(~seen, -torch.inf).softmax(-1)
        self.saliency = {
            "zipcache": paid.mean(1).sum(1) / seen.sum(0).clamp(min=1),
            "qaq": paid.amax((1, 2)),
            "lots": torch.rand(k.shape[:2], generator=lot),
        }

    def heard(self, head: int) -> Tensor:
        """The queries [1, G * N, D] of a head that SQuat hears."""
        return self.queries[head, :, -QUERIES - HEARD : -QUERIES].flatten(0, 1).unsqueeze(0)

    def rounded(self, round_: Callable[[Tensor, Tensor, int], KV]) -> KV:
        """The layer with its middle slots rounded, head by head."""
        middle = slice(SINKS, self.k.shape[1] - NEWEST)
        k, v = self.k.clone(), self.v.clone()
        for head in range(len(k)):
            at = slice(head, head + 1)
            k[at, middle], v[at, middle] = round_(k[at, middle], v[at, middle], head)
        return k, v

    def by_width(self, form: BlockFormat, by: str, share: float) -> KV:
        def round_(k: Tensor, v: Tensor, head: int) -> KV:
            score = self.saliency[by][head, SINKS : SINKS + k.shape[1]]
            order, n = score.argsort(descending=True), round(share * k.shape[1])
            k, v = k.clone(), v.clone()
            for bits, at in ((4, order[:n].sort().values), (2, order[n:].sort().values)):
                k[:, at], v[:, at] = through(form, Kv(k_bits=bits, v_bits=bits), k[:, at], v[:, at])
            return k, v

        return self.rounded(round_)

    def of_bits(self, k_bits: int, v_bits: int, form_of_head: Callable[[int], BlockFormat]) -> KV:
        kv = Kv(k_bits=k_bits, v_bits=v_bits)
        return self.rounded(lambda k, v, head: through(form_of_head(head), kv, k, v))


def slot_bytes(form: BlockFormat, k_bits: int, v_bits: int, shape: LayerShape) -> float:
    """Bytes of a slot of all heads, without its position."""
    return form.nbytes(shape, Kv(k_bits=k_bits, v_bits=v_bits), 2) - POSITION


Side = tuple[Callable[[Layer], KV], Callable[[LayerShape], float]]


def sides() -> dict[str, Side]:
    """By name: what becomes of a layer, and the bytes of one of its middle slots."""
    found: dict[str, Side] = {}

    def uniform(name: str, k_bits: int, v_bits: int, form: Callable[[Layer, int], BlockFormat]) -> None:
        found[f"{name} {k_bits} + {v_bits}"] = (
            lambda layer: layer.of_bits(k_bits, v_bits, lambda head: form(layer, head)),
            lambda shape: slot_bytes(form_of("kivi" if "squat" in name else name), k_bits, v_bits, shape),
        )

    def mixed(name: str, by: str) -> None:
        form = form_of(name)
        found[f"{name} 4|2 by {by}"] = (
            lambda layer: layer.by_width(form, by, SALIENT),
            lambda shape: SALIENT * slot_bytes(form, 4, 4, shape) + (1 - SALIENT) * slot_bytes(form, 2, 2, shape),
        )

    for name in ("kivi", "zipcache", "qaq"):
        for bits in ((4, 4), (4, 2), (2, 2)):
            uniform(name, *bits, lambda layer, head, name=name: form_of(name))  # type: ignore[misc]
        for by in ("zipcache", "qaq", "lots") if name == "kivi" else (name,):
            mixed(name, by)
    squats: dict[str, Mapping[str, Any]] = {
        "squat": {},
        "squat, 16 of keys": {"rank": 16},
        "squat, 4 of queries": {"queries": True},
        "squat, 16 of queries": {"queries": True, "rank": 16},
        "squat, all of queries": {"queries": True, "is_whole": True},
    }
    for name, keys in squats.items():

        def make(layer: Layer, head: int, keys: Mapping[str, Any] = keys) -> BlockFormat:
            return Spanned(**{**keys, "queries": layer.heard(head)}) if "queries" in keys else Squat(**keys)

        uniform(name, 2, 2, make)
    return found


class Held:
    """A text that the model has read, and what it answers over other keys and values."""

    def __init__(self, model: Any, context: list[int], lot: int) -> None:
        self.model, self.text = model, Text(model, context)
        made, g = self.text.made, torch.Generator().manual_seed(lot)
        self.at = sorted(made.fresh)
        self.queries = [made.queries[i].float() for i in range(len(made.queries))]
        self.layers = [
            Layer(made.fresh[at].k.float(), made.fresh[at].v.float(), q, model.lm.attention_params[at].scale, g)
            for at, q in zip(self.at, self.queries, strict=True)
        ]

    def over(self, layers: Sequence[KV]) -> Any:
        """A session over these keys and values."""
        fresh = {at: replace(self.text.made.fresh[at], k=k, v=v) for at, (k, v) in zip(self.at, layers, strict=True)}
        return self.read({}, fresh)

    def changed(self, changes: dict[str, Any]) -> Any:
        return self.model.with_profile(self.model.profile.replace(exactness="approx", **changes))

    def read(self, changes: dict[str, Any], fresh: Any = None) -> Any:
        session = self.changed(changes).new_session()
        self.text.read_by(session, fresh)
        return session

    def rounded_by(self, spent: Any, changes: dict[str, Any], form: BlockFormat) -> Any:
        """The slots of a session with policy `budget`, each in as many bits, by another format."""
        session, profile = self.model.new_session(), self.changed(changes).profile
        # nothing is rounded by its age: the levels of a budget alone have the format
        by_level = type("ByLevel", (type(form),), {"is_active": lambda form, kv: False})
        session.stored_kv.cache = replace(plan(self.model.lm, profile), form=by_level()).store()
        self.text.read_by(session)
        masks = []
        for at in self.at:
            s = spent.cache.slots(at)
            level = torch.cat([torch.full((span.n,), span.level) for span in s.levels])
            found = torch.full((len(s.pos), self.text.n), len(profile.memory.bits) + 1, dtype=torch.int8)
            for head, pos in enumerate(s.pos):
                found[head, pos[pos >= 0].long()] = level[pos >= 0].to(torch.int8)
            masks.append(found)
        session.cache.compress(masks)
        return session

    def error(self, layers: Sequence[KV]) -> float:
        was = [(layer.k, layer.v) for layer in self.layers]
        return loss([q[:, -QUERIES:] for q in self.queries], was, layers, [layer.scale for layer in self.layers])


def read_in_turn(model: Any, contexts: Sequence[Any], nbytes: float) -> Iterator[tuple[int, str, Any, float]]:
    """Of each text and side: number of the text, name of the side, a session, and the error of the heads' outputs.

    nbytes: of a token for policy `budget`."""
    for i, context in enumerate(contexts):
        held = Held(model, context, i)
        yield i, "full", held.read({}), 0.0
        for name, (make, _) in sides().items():
            layers = [make(layer) for layer in held.layers]
            yield i, name, held.over(layers), held.error(layers)
        # of a cache in 16 bits; the slots that always stay are held in float32 here
        always = (SINKS + NEWEST) * sum(shape.numbers for shape in model.lm.shapes)
        size = (nbytes * (held.text.n - SINKS - NEWEST) + 4 * always) / 1024
        change = {"policy": {"name": "budget"}, "memory": {"budget": f"{size:.2f}KiB"}}
        spent = held.read(change)
        yield i, "budget", spent, 0.0
        for name in ROUNDED:
            yield i, f"budget in {name}", held.rounded_by(spent, change, form_of(name)), 0.0
        print(f"\r{i + 1} of {len(contexts)} texts", end="", file=sys.stderr, flush=True)


@measurement("Bits by importance, and rounding by the queries: {model}, {length} tokens", is_counts=True)
def bits_by_importance(
    model: str = "demo",
    texts: Annotated[int, "with facts"] = 16,
    windows: Annotated[int, "of each text that is predicted"] = 1,
    length: int = 1024,
) -> Rows:
    settings = {"load.dtype": "fp32", "prefill.chunk": 2 * length}
    loaded: Any = opened(model, Path(tempfile.gettempdir(), "kvcli-kv-quality"), settings)
    is_demo = model == "demo"
    costs = {name: sum(of(shape) for shape in loaded.lm.shapes) for name, (_, of) in sides().items()}
    costs |= dict.fromkeys(("budget", *(f"budget in {name}" for name in ROUNDED)), costs["kivi 4|2 by zipcache"])
    costs["full"] = sum(shape.numbers * 2 for shape in loaded.lm.shapes)
    found: dict[str, Row] = {name: {"right": [], "kl": [], "error": []} for name in costs}
    facts = samples(loaded, texts, length, HELD_OUT, None if is_demo else text_of("prose"))
    for i, side, session, error in read_in_turn(loaded, [sample.context for sample in facts], costs["budget"]):
        found[side]["right"] += asked(loaded, facts[i], session)["right"]
        found[side]["error"].append(error)
    ids = texts_of(loaded, is_demo, ())
    behind = [cut for name in ids for cut in cuts(ids[name], length, SCORED, windows)]
    truth: Any = None
    for i, side, session, _ in read_in_turn(loaded, [cut.context for cut in behind], costs["budget"]):
        said = predicted(session, behind[i].scored)
        truth = said if side == "full" else truth
        found[side]["kl"].append(float(PredictionDistance.of(said, truth, behind[i].scored).kl.mean()))
    for side, of in sorted(found.items(), key=lambda one: -costs[one[0]]):
        yield {
            "side": side,
            "bytes": round(costs[side], 1),
            "right": round(fmean(of["right"]), 4),
            "kl": round(fmean(of["kl"]), 5),
            "error": None if side.startswith("budget") else round(fmean(of["error"]), 4),
        }


if __name__ == "__main__":
    bits_by_importance.main()
