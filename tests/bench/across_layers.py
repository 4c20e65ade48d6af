"""What a layer's keys and values tell of the next layer's: AQUA-KV and MiniCache, beside few bits of each layer alone.

    python tests/bench/across_layers.py [--model demo] [--texts 24] [--length 2048] [--out FILE]

Four numbers are hidden in each held-out text, and all are asked for when the keys and values of the whole text were
replaced by what a format gives back. AQUA-KV (arXiv 2501.19392): keys before RoPE are predicted from the layer below,
values from those below and the layer's keys, by least squares on other texts; the rest is stored by a method of
[kv_format], which is also a side by itself. No slot stays in full precision. MiniCache (arXiv 2405.14366): from the
middle on, two layers share directions, interpolated between theirs; lengths are each layer's own, and the 5 % of slots
that differ most are kept as they are. explained: share of the square of what a layer's mean leaves, with which
prediction does away. error: of the heads' outputs for the newest 32 queries, relative, mean over layers. bytes: of one
token, scales and lengths included, the predictors not. Unless they are held in full, each pass predicts all keys and
values anew; how long that takes is told in passes of one row over the same text in full precision, by CPU time.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.bench.texts import text_of
from kvcli.engine.engine import run
from kvcli.engine.forward_request import ForwardRequest
from kvcli.engine.forward_request import Rows as PassRows
from kvcli.engine.hf.rope import rotaries
from kvcli.heads.sample import ProbeSample, samples
from kvcli.kernels.rope import rotate, unrotate
from kvcli.kv.formats.block_format import BlockFormat
from kvcli.kv.slots import POSITION, LayerShape
from kvcli.settings.resolve import method_class
from kvcli.settings.schema import Kv, registries
from tests.bench.harness import Row, Rows, measurement
from tests.bench.kv_quality import Text, asked, opened

HELD_OUT, OTHERS = 5_000, 6_000  # seeds of the texts that are asked about, and of those that predictors are fitted on
FITTED = 2  # texts
QUERIES, REPS = 32, 7  # newest rows whose outputs are compared; of times
APART = 0.05  # share of slots that MiniCache keeps as they are
TOWARDS = 0.6  # how far from the lower layer's direction to the upper one's
KV = tuple[Tensor, Tensor]  # keys and values of a layer [K, S, D]


@dataclass(frozen=True)
class Few:
    """A method of [kv_format] in so many bits of keys and of values, in blocks of 64 slots."""

    name: str
    bits: int

    def __call__(self, k: Tensor, v: Tensor) -> KV:
        """k, v [K, S, D] as they are read again."""
        return through(
            method_class(registries()["kv_format"][self.name])(), Kv(k_bits=self.bits, v_bits=self.bits), k, v
        )

    def bits_of(self, k: Tensor, v: Tensor) -> float:
        """Bits of a number, scales and what else is stored included."""
        form, kv = method_class(registries()["kv_format"][self.name])(), Kv(k_bits=self.bits, v_bits=self.bits)
        shape = LayerShape(k.shape[0], k.shape[2], v.shape[2])
        return 8 * (form.nbytes(shape, kv, 2) - POSITION) / (k.shape[0] * (k.shape[2] + v.shape[2]))

    def __str__(self) -> str:
        return f"{self.name}, {self.bits} bits"


def through(form: BlockFormat, kv: Kv, k: Tensor, v: Tensor) -> KV:
    """k, v [K, S, D] as a KV format gives them back."""
    heads, pad = form.heads(k.shape[0]), -k.shape[1] % kv.group
    blocks = [
        torch.cat([x, x[:, -1:].expand(-1, pad, -1)], 1)
        .unflatten(1, (-1, kv.group))
        .unflatten(0, (-1, heads))
        .transpose(1, 2)
        .flatten(0, 1)
        for x in (k, v)
    ]  # [B, h, g, D]
    got = form.dequantize(form.quantize(*blocks, kv), kv, (k.shape[2], v.shape[2]), torch.float32)
    groups = k.shape[0] // heads
    read = [x.unflatten(0, (groups, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)[:, : k.shape[1]] for x in got]
    return read[0], read[1]


def by_slots(*parts: Tensor) -> Tensor:
    """Parts [K, S, D] of all heads beside one another, and a one: [S, n]."""
    flat = [part.transpose(0, 1).flatten(1) for part in parts]
    return torch.cat([*flat, flat[0].new_ones(len(flat[0]), 1)], 1)


def fit(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
    """Weights [n, m] that predict outputs [S, m] from inputs [S, n], by ridge regression over all texts."""
    x, y = torch.cat(list(inputs)).double(), torch.cat(list(outputs)).double()
    square = x.T @ x
    ridge = 1e-4 * square.diagonal().mean() * torch.eye(len(square), dtype=torch.float64)
    return torch.linalg.solve(square + ridge, x.T @ y).float()


class Aqua:
    """AQUA-KV: predictors of each layer but the first, fitted on what the format itself gives back below."""

    def __init__(self, texts: Sequence[Sequence[KV]], few: Few) -> None:
        """`texts`: by text the keys before RoPE and the values of each layer."""
        self.few, self.weights = few, list[KV | None]()
        self.explained: list[list[float]] = []  # by layer, of keys and values
        below: list[KV] = []
        for layer in range(len(texts[0])):
            held = [text[layer] for text in texts]
            found = None
            if layer:
                keys = fit([by_slots(k) for k, _ in below], [by_slots(k)[:, :-1] for k, _ in held])
                got = [self._rest(k, by_slots(b[0]) @ keys, is_key=True) for b, (k, _) in zip(below, held, strict=True)]
                inputs = [by_slots(b[1], k) for b, k in zip(below, got, strict=True)]
                found = keys, fit(inputs, [by_slots(v)[:, :-1] for _, v in held])
            self.weights.append(found)
            below = [self._layer(layer, kv, under) for kv, under in zip(held, below or held, strict=True)]

    def __call__(self, layers: Sequence[KV]) -> list[KV]:
        """All layers of a text as the format gives them back."""
        out: list[KV] = []
        for layer, kv in enumerate(layers):
            out.append(self._layer(layer, kv, out[-1] if out else kv))
            if (weights := self.weights[layer]) is not None:
                guesses = by_slots(out[-2][0]) @ weights[0], by_slots(out[-2][1], out[-1][0]) @ weights[1]
                self.explained.append([explained(x, guess) for x, guess in zip(kv, guesses, strict=True)])
        return out

    def _layer(self, layer: int, kv: KV, below: KV) -> KV:
        if (weights := self.weights[layer]) is None:
            return self.few(*kv)
        k = self._rest(kv[0], by_slots(below[0]) @ weights[0], is_key=True)
        return k, self._rest(kv[1], by_slots(below[1], k) @ weights[1], is_key=False)

    def _rest(self, x: Tensor, guess: Tensor, *, is_key: bool) -> Tensor:
        """x where its distance to the guess [S, K * D] is stored in few bits."""
        guess = guess.unflatten(1, (x.shape[0], -1)).transpose(0, 1)
        return guess + self.few(x - guess, x - guess)[0 if is_key else 1]


def explained(x: Tensor, guess: Tensor) -> float:
    """Share of the square of x [K, S, D] about its mean that a guess [S, K * D] explains."""
    flat = by_slots(x)[:, :-1]
    return float(1 - (flat - guess).square().sum() / (flat - flat.mean(0)).square().sum())


def minicache(layers: Sequence[KV]) -> list[KV]:
    """Pairs of layers from the middle on, merged; where heads differ in size nothing is."""
    out = list(layers)
    for low in range(len(layers) // 2, len(layers) - 1, 2):
        merged = [merge(a, b) for a, b in zip(layers[low], layers[low + 1], strict=True)]
        out[low], out[low + 1] = (merged[0][0], merged[1][0]), (merged[0][1], merged[1][1])
    return out


def merge(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [K, S, D] of two layers, from one direction interpolated on the sphere, but where both differ most."""
    sizes = [x.norm(dim=-1, keepdim=True).clamp_min(1e-9) for x in (low, high)]
    a, b = low / sizes[0], high / sizes[1]
    angle = (a * b).sum(-1, keepdim=True).clamp(-0.9999, 0.9999).acos()
    way = (((1 - TOWARDS) * angle).sin() * a + (TOWARDS * angle).sin() * b) / angle.sin()
    is_apart = angle >= angle.quantile(1 - APART, dim=1, keepdim=True)
    return torch.where(is_apart, low, way * sizes[0]), torch.where(is_apart, high, way * sizes[1])


def loss(queries: Sequence[Tensor], was: Sequence[KV], now: Sequence[KV], scales: Sequence[float]) -> float:
    """Relative error of the outputs of heads for queries [H, N, D], mean over layers."""
    found = []
    for q, before, after, scale in zip(queries, was, now, scales, strict=True):
        groups = q.reshape(before[0].shape[0], -1, q.shape[-1])  # [K, G * N, D]
        outs = [(groups @ k[:, :-QUERIES].mT * scale).softmax(-1) @ v[:, :-QUERIES] for k, v in (before, after)]
        found.append(float((outs[1] - outs[0]).norm() / outs[0].norm()))
    return fmean(found)


class Held:
    """A text that the model has read: its keys and values, and what the model answers over others in their place."""

    def __init__(self, model: Any, sample: ProbeSample) -> None:
        self.model, self.sample, self.text = model, sample, Text(model, sample.context)
        fresh = self.text.made.fresh
        self.layers: list[KV] = [(fresh[at].k.float(), fresh[at].v.float()) for at in sorted(fresh)]
        self.at = torch.arange(self.text.n)

    def unrotated(self) -> list[KV]:
        """Keys before RoPE."""
        return [
            (k if rotary is None else unrotate(k, self.at, rotary), v)
            for (k, v), rotary in zip(self.layers, rotaries(self.model.lm), strict=True)
        ]

    def rotated(self, layers: Sequence[KV]) -> list[KV]:
        return [
            (k if rotary is None else rotate(k, self.at, rotary), v)
            for (k, v), rotary in zip(layers, rotaries(self.model.lm), strict=True)
        ]

    def answers(self, layers: Sequence[KV]) -> Row:
        """Share of right answers over these keys and values, and the error of the heads' outputs."""
        made = self.text.made
        kinds = sorted(made.fresh)
        fresh = {
            at: replace(made.fresh[at], k=k.to(made.fresh[at].k), v=v.to(made.fresh[at].v))
            for at, (k, v) in zip(kinds, layers, strict=True)
        }
        session = self.model.new_session()
        self.text.read_by(session, fresh)
        scales = [self.model.lm.attention_params[at].scale for at in kinds]
        newest = [q[:, -QUERIES:].float() for q in made.queries]
        right = fmean(asked(self.model, self.sample, session)["right"])
        return {"right": right, "error": loss(newest, self.layers, layers, scales)}


def times_of_a_pass(held: Held, aqua: Aqua) -> float:
    """How many passes of one row behind the text take as long as predicting its keys and values, which each needs."""
    session, layers = held.model.new_session(), held.unrotated()
    held.text.read_by(session)
    rows = PassRows.chain(held.sample.context[-1:], held.text.n)

    def predict() -> None:
        for below, (k, _), weights in zip(layers[:-1], layers[1:], aqua.weights[1:], strict=True):
            assert weights is not None
            by_slots(below[0]) @ weights[0], by_slots(below[1], k) @ weights[1]

    def plain() -> None:
        run([ForwardRequest(held.model.lm, rows, session.cache, want=range(1))])

    took: dict[Any, list[float]] = {predict: [], plain: []}
    for work in [predict, plain] * (REPS + 1):
        began = time.thread_time()
        work()
        took[work].append(time.thread_time() - began)
    return median(took[predict][1:]) / median(took[plain][1:])


def token_bytes(layers: Sequence[KV], bits: Callable[[int, int], float]) -> float:
    """Bytes of a token where an element of a layer takes so many bits; `bits`(layer, head size)."""
    return sum(x.shape[0] * x.shape[2] * bits(layer, x.shape[2]) / 8 for layer, kv in enumerate(layers) for x in kv)


def half(n: int) -> Callable[[int, int], float]:
    """Bits of MiniCache in n layers: pairs share 16 bits and keep a 16-bit length each, and some slots whole."""
    merged = set(range(n // 2, n // 2 + (n - n // 2) // 2 * 2))
    return lambda layer, dim: (1 - APART) * (8 + 16 / dim) + APART * 16 if layer in merged else 16


Side = tuple[Callable[[Held], Sequence[KV]], Callable[[int, int], float]]


def sides(fitted: Sequence[Held], aquas: Mapping[Few, Aqua]) -> dict[str, Side]:
    """By name: what a format gives back of a text, and its bits of a number."""

    def alone(few: Few) -> Callable[[Held], Sequence[KV]]:
        return lambda held: held.rotated([few(*kv) for kv in held.unrotated()])

    def predicted(aqua: Aqua) -> Callable[[Held], Sequence[KV]]:
        return lambda held: held.rotated(aqua(held.unrotated()))

    layer, n_layers = fitted[0].layers[0], len(fitted[0].layers)
    found: dict[str, Side] = {"full": (lambda held: held.layers, lambda layer, dim: 16)}
    for few, aqua in aquas.items():
        found[str(few)] = alone(few), lambda at, dim, few=few: few.bits_of(*layer)  # type: ignore[misc]
        found[f"AQUA over {few}"] = predicted(aqua), found[str(few)][1]
    eight = Few("kivi", 8)
    found[str(eight)] = alone(eight), lambda at, dim: eight.bits_of(*layer)
    found["MiniCache"] = lambda held: minicache(held.layers), half(n_layers)
    return found


@measurement(
    "Keys and values predicted from, or merged with, another layer's: {model}, {texts} texts of {length} tokens",
)
def across_layers(model: str = "demo", texts: int = 24, length: int = 2048) -> Rows:
    loaded: Any = opened(model, Path(tempfile.gettempdir(), "kvcli-kv-quality"), {"load.dtype": "fp32"})
    haystack = None if model == "demo" else text_of("prose")
    fitted = [Held(loaded, sample) for sample in samples(loaded, FITTED, length, OTHERS, haystack)]
    forms = [Few(name, bits) for bits in (2, 4) for name in ("kivi", "rotatekv")]
    aquas = {few: Aqua([held.unrotated() for held in fitted], few) for few in forms}
    compared = sides(fitted, aquas)
    found: dict[str, list[Row]] = {name: [] for name in compared}
    for i, sample in enumerate(samples(loaded, texts, length, HELD_OUT, haystack)):
        held = Held(loaded, sample)
        for name, (given, _) in compared.items():
            found[name].append(held.answers(given(held)))
        print(f"\r{i + 1} of {texts} texts", end="", file=sys.stderr, flush=True)
    for name, each in found.items():
        yield {
            "side": name,
            "bytes": round(token_bytes(fitted[0].layers, compared[name][1]), 1),
            "accuracy": round(fmean(o["right"] for o in each), 4),
            "error": round(fmean(o["error"] for o in each), 4),
        }
    said = [
        "{}: {:.1%} of keys and {:.1%} of values".format(
            few, *(fmean(each) for each in zip(*aqua.explained, strict=True))
        )
        for few, aqua in aquas.items()
    ]
    times = times_of_a_pass(fitted[0], aquas[forms[0]])
    return {"note": f"Predictions take {times:.2f} passes of one row. They explain, over {'; over '.join(said)}."}


if __name__ == "__main__":
    across_layers.main()
