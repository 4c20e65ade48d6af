"""What a pass of an 8B Llama should take on GPUs, by compiled kernels. MODEL, not measured: no GPU was at hand.

    python tests/bench/gpu_model.py [--out FILE]

The longest of three decides what a kernel takes: bytes over 0.85 of the card's bandwidth, operations over 0.6 of its
matrix units, instructions over 0.6 of what its processors issue. Instructions are counted in the machine code that
Triton makes here for the card's architecture, the rest is arithmetic; a launch in a graph adds 2.1 microseconds, which
is what steps of an H200 left for each (docs/measurements/gpu.md), and a layer has as many as it is made of
(`LAUNCHES`). Cards by their makers' data sheets. The JSON also has a ladder (`LADDER`): the same pass with the kernels
that are built now, and with fewer launches, each by the share of the memory's rate that is assumed for it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.harness import Rows, measurement
from tests.kernels.compiled import Compiled, compiled, variants
from tests.kernels.variants import Variant

BANDWIDTH, MATRIX, ISSUE = 0.85, 0.6, 0.6  # of what a card has that kernels get
LAUNCH, AROUND = 2.1e-6, 20e-6  # seconds of one, as fitted to an H200, and of a pass beside its layers
FILLED = 1.0e-6  # of a launch whose first loads another hides: an assumption
READ = {90: 0.90}  # of a card's bandwidth that a plain read gets, by architecture; else
READ_ELSE = 0.92
LAYERS, HIDDEN, INNER, HEADS, KV, D, VOCAB = 32, 4096, 14_336, 32, 8, 128, 128_256
IN_LAYERS = LAYERS * (HIDDEN * (HIDDEN + 2 * KV * D) + HIDDEN * HIDDEN + 3 * HIDDEN * INNER)  # weights
OF_HEAD = VOCAB * HIDDEN
LAUNCHES = 8  # of a layer in int4, as tests/kernels/test_gpu_layer.py counts them
ROWS = (1, 8, 16, 32)
TAKEN = 1.2  # GiB of a card that are neither weights nor keys and values


@dataclass(frozen=True)
class Card:
    arch: int
    processors: int
    ghz: float
    gb_s: float
    tflop_s: float  # bf16 with sums in float32, dense
    gib: int


CARDS = {
    "RTX 4060 8 GB": Card(89, 24, 2.46, 272, 30, 8),
    "RTX 4070 Laptop 8 GB": Card(89, 36, 2.2, 256, 40, 8),
    "RTX 3060 12 GB": Card(86, 28, 1.78, 360, 25.5, 12),
    "RTX 3090": Card(86, 82, 1.70, 936, 71, 24),
    "RTX 4060 Ti 16 GB": Card(89, 34, 2.54, 288, 44, 16),
    "RTX 4090": Card(89, 128, 2.52, 1008, 165, 24),
    "RTX 5090": Card(120, 170, 2.41, 1792, 209, 32),
    "A10": Card(86, 72, 1.70, 600, 62, 24),
    "H100": Card(90, 132, 1.76, 3350, 989, 80),
}
# the op and its forms by rows of a tile, and bytes of a number with its share of scales
Forms = tuple[str, dict[int, str]]


def _of_product(kind: str) -> Forms:
    return "linear_skinny", {rows: f"{kind}, {rows} rows, bf16" for rows in (8, 16, 32)}


WEIGHTS: dict[str, tuple[Forms, float]] = {
    "bf16": (_of_product("plain"), 2.0),
    "int4": (_of_product("int4 by 128"), 0.5 + 4 / 128),
    "nf4": (_of_product("nf4 by 64"), 0.5 + 2 / 64),
}
STORED: dict[str, tuple[Forms, float]] = {
    "bf16": (("attend_invariant", {16: "16 rows", 32: "32 rows"}), 2.0),
    "4 bits": (
        ("attend_quantized", {16: "4 bits, 16 rows, heads of 128", 32: "4 bits, 32 rows, heads of 128"}),
        0.5 + 4 / 64,
    ),
}
SIDES = (
    ("bf16", "bf16", 4096),
    ("int4", "bf16", 4096),
    ("nf4", "bf16", 4096),
    ("int4", "bf16", 32_768),
    ("int4", "4 bits", 131_072),
)


@dataclass(frozen=True)
class Kernel:
    """A form on an architecture."""

    variant: Variant
    found: Compiled

    @property
    def density(self) -> float:
        """Bytes of memory for each instruction of a warp."""
        return self.variant.tile_bytes / (self.found.step * self.variant.warps)

    @property
    def flop(self) -> float:
        """Operations of the matrix units for each byte of memory, m16n8k16 each."""
        products = sum(n for name, n in self.found.counts.items() if name.startswith("HMMA"))
        return products * 2 * 16 * 8 * 16 * self.variant.warps / self.variant.tile_bytes

    def headroom(self, card: Card) -> float:
        """Instructions that the processors issue while the memory brings what they are for: 1 = no more than needed."""
        return card.processors * 4 * card.ghz * self.density / card.gb_s


Kernels = dict[tuple[str, str, int], Kernel]


def wanted() -> list[tuple[str, Variant]]:
    """Forms that the model asks for, each by its op."""
    of = {(op, one.name): one for op, listed in variants().items() for one in listed}
    names = [(op, name) for (op, each), _ in [*WEIGHTS.values(), *STORED.values()] for name in each.values()]
    return [(op, of[op, name]) for op, name in names]


def made(folder: Path) -> Kernels:
    """Each of them on each architecture of a card."""
    archs = sorted({card.arch for card in CARDS.values()})
    asked = [(op, one, arch) for op, one in wanted() for arch in archs]
    code = compiled([(one, arch) for _, one, arch in asked], folder)
    return {(op, one.name, arch): Kernel(one, found) for (op, one, arch), found in zip(asked, code, strict=True)}


def seconds(card: Card, forms: Forms, numbers: int, size: float, rows: int, kernels: Kernels) -> float:
    """To multiply so many numbers of `size` bytes with so many rows; memory brings them once for all rows."""
    op, by_tile = forms
    tile = next((n for n in by_tile if n >= rows), max(by_tile))
    kernel, blocks = kernels[op, by_tile[tile], card.arch], -(-rows // tile)
    return max(
        numbers * size / (BANDWIDTH * card.gb_s * 1e9),
        numbers * size * kernel.flop * blocks / (MATRIX * card.tflop_s * 1e12),
        numbers * size / kernel.density * blocks / (ISSUE * card.processors * 4 * card.ghz * 1e9),
    )


def ms_of_pass(card: Card, weights: str, stored: str, context: int, rows: int, kernels: Kernels) -> float:
    slots = LAYERS * KV * context * 2 * D  # numbers of keys and values
    took = seconds(card, WEIGHTS[weights][0], IN_LAYERS, WEIGHTS[weights][1], rows, kernels)
    took += seconds(card, WEIGHTS["bf16"][0], OF_HEAD, 2.0, rows, kernels)
    took += seconds(card, STORED[stored][0], slots, STORED[stored][1], rows * HEADS // KV, kernels)
    return 1e3 * (took + LAYERS * LAUNCHES * LAUNCH + AROUND)


def gib_of(weights: str, stored: str, context: int) -> float:
    numbers = LAYERS * KV * context * 2 * D
    return (IN_LAYERS * WEIGHTS[weights][1] + 2 * OF_HEAD * 2.0 + numbers * STORED[stored][1]) / 2**30


def passes(kernels: Kernels) -> list[dict[str, Any]]:
    """A row for each card and side; None where it does not fit."""
    rows = []
    for name, card in CARDS.items():
        for weights, stored, context in SIDES:
            row: dict[str, Any] = {"card": name, "weights": weights, "kv": stored, "context": context}
            needs = gib_of(weights, stored, context)
            fits = needs < card.gib - TAKEN
            ms = [ms_of_pass(card, weights, stored, context, n, kernels) if fits else None for n in ROWS]
            row |= {f"ms_{n}_rows": took and round(took, 2) for n, took in zip(ROWS, ms, strict=True)}
            row["16 over 1"] = ms[2] and ms[0] and round(ms[2] / ms[0], 2)
            rows.append(row | {"gib": round(needs, 1)})
    return rows


def forms(kernels: Kernels) -> list[dict[str, Any]]:
    """A row for each form, what it takes by architecture, and what it leaves of what a card issues."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for (op, name, arch), kernel in kernels.items():
        row = rows.setdefault((op, name), {"kernel": op, "form": name, "on": {}, "headroom": {}})
        row["on"][f"sm{arch}"] = {
            "registers": kernel.found.registers,
            "shared": kernel.found.shared,
            "programs": kernel.found.programs,
            "instructions": round(kernel.found.step),
            "bytes_an_instruction": round(kernel.density, 1),
        }
        row["headroom"] |= {c: round(kernel.headroom(card), 1) for c, card in CARDS.items() if card.arch == arch}
    return [{**row, "headroom": {card: row["headroom"][card] for card in CARDS}} for row in rows.values()]


@dataclass(frozen=True)
class Rung:
    """A layer made of so many launches."""

    launches: int
    head: str  # of WEIGHTS
    launch: float  # seconds


EIGHT = 1.0  # bytes of a weight of an output layer in 8 bits
LADDER = {
    "7 launches": Rung(7, "bf16", LAUNCH),
    "7, output layer in 8 bits": Rung(7, "int8", LAUNCH),
    "7, gaps filled": Rung(7, "int8", FILLED),
}


def ladder(kernels: Kernels) -> list[dict[str, Any]]:
    """By card: a plain pass of int4 weights at 4,096 tokens as built, then with each change of LADDER.

    `over`: times what its own bytes take at the rate of a plain read. A product in int4 whose operands lie in the order
    of the matrix unit is assumed to get 0.93 of that rate (0.85 with the memory of an H100), attention 0.85.
    """
    rows = []
    layers, stored = IN_LAYERS * WEIGHTS["int4"][1], LAYERS * KV * 4096 * 2 * D * 2.0
    for name, card in CARDS.items():
        rate, product = READ.get(card.arch, READ_ELSE) * card.gb_s * 1e9, 0.85 if card.arch == 90 else 0.93
        ms = ms_of_pass(card, "int4", "bf16", 4096, 1, kernels)
        floor = 1e3 * (layers + 2.0 * OF_HEAD + stored) / rate
        row: dict[str, Any] = {"card": name, "launches": LAUNCHES, "ms": round(ms, 2)}
        row |= {"over": round(ms / floor, 2), "then": {}}
        for what, rung in LADDER.items():
            head = OF_HEAD * (2.0 if rung.head == "bf16" else EIGHT)
            took = (layers / product + head / 0.97 + stored / 0.85) / rate + LAYERS * rung.launches * rung.launch
            took, floor = 1e3 * (took + AROUND), 1e3 * (layers + head + stored) / rate
            row["then"][what] = {"ms": round(took, 2), "over": round(took / floor, 2)}
        rows.append(row)
    return rows


@measurement(
    "MODEL, not measured: milliseconds of a recorded pass of an 8B Llama by its rows",
    columns=["card", "weights", "kv", "context", *(f"ms_{n}_rows" for n in ROWS), "16 over 1", "gib"],
    note="No times where weights, keys and values do not leave 1.2 GiB of the card's memory.",
    is_counts=True,
)
def gpu_model() -> Rows:
    import triton

    kernels = made(ROOT / ".pytest_cache" / "d" / "compiled")
    yield from passes(kernels)
    machine = f"no GPU; kernels compiled ahead of time by triton {triton.__version__}"
    return {"machine": machine, "kernels": forms(kernels), "ladder": ladder(kernels)}


if __name__ == "__main__":
    gpu_model.main()
