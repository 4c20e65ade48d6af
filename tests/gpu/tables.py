"""What `python -m tests.gpu` found, as the tables of docs/measurements/gpu.md.

    python -m tests.gpu.tables NAME FILE ..      writes docs/benchmarks/gpu-{checks,steps,kernels}-NAME.json

Of several FILEs of one card each stage is taken from the one in which it got furthest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PLACE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
SIZED = (
    "attend_invariant",
    "attend_quantized",
)  # by slots; a line for those that windows limit would count what nobody reads
Row = dict[str, Any]


def stages_of(files: list[Row]) -> dict[str, Row]:
    """By name, the one with most rows."""
    names = dict.fromkeys(name for file in files for name in file["stages"])
    return {
        name: max((file["stages"][name] for file in files if name in file["stages"]), key=lambda s: len(s["rows"]))
        for name in names
    }


def machine(stages: dict[str, Row]) -> str:
    """The card and what ran on it."""
    found = {row["what"]: row for row in stages["environment"]["rows"] if row["what"] in ("gpu", "rates")}
    versions = {row["name"]: row["found"] for row in stages["environment"]["rows"] if row["what"] == "package"}
    said = [f"{name} {versions[name]['version']}" for name in ("torch", "triton", "transformers") if name in versions]
    rates = found["rates"]
    card = f"{found['gpu']['name']} (copies at {rates['copy_gb_s']:,.0f} GB/s, "
    card += f"matrix products at {rates['matmul_bf16_tflop_s']:.0f} TFLOP/s)"
    return ", ".join([card, *said, f"CUDA {found['gpu']['cuda']}"])


def checks(stages: dict[str, Row]) -> Iterator[Row]:
    """A line a stage: how it ended, and what its rows count."""
    for name, stage in stages.items():
        rows = stage["rows"]
        says = next((row["says"] for row in reversed(rows) if "says" in row), "")
        told = [row for row in rows if "same" in row]
        if name == "bandwidth":
            says = f"{len(rows) - 1} timings, in a table of their own"
        elif name == "exact":
            equal, tried = (sum(row.get(key, 0) for row in rows) for key in ("equal", "tried"))
            faults, parted = (
                sum(row.get("n_faults", 0) for row in rows),
                [p for r in rows for p in r.get("parted", ())],
            )
            says = f"{equal} of {tried} drafted texts are plain ones, {len(parted)} part, {faults} not made"
        elif told:
            says = f"{sum(row['same'] for row in told)} of {len(told)} texts are the same"
        yield {"stage": name, "ended": "yes" if stage["status"] == "done" else "ran out of time", "found": says or "–"}


def steps(stages: dict[str, Row]) -> Iterator[Row]:
    for row in stages["steps"]["rows"]:
        if row.get("what") == "step" and "ms" in row and row["rows"] in (1, 8, 32):
            some = {key: row[key] for key in ("model", "context", "rows")}
            yield {
                **some,
                "recorded": "yes" if row["records"] else "no",
                "ms": row["ms"],
                "over": round(row["over"], 2),
            }


def kernels(stages: dict[str, Row]) -> Iterator[Row]:
    for row in stages["bandwidth"]["rows"]:
        if row.get("us") and row.get("of_copy", 0) > 0.02 and row["op"] != "attend, limits":
            slots = row["slots"] if row["op"].startswith((*SIZED, "torch's att")) else "–"
            yield {
                "kernel": row["op"],
                "slots": slots,
                "rows": row["rows"],
                "us": round(row["us"], 1),
                "of_copy": round(row["of_copy"], 3),
            }


TABLES = {
    "checks": (checks, "What was counted on a GPU", "A stage has a share of the time and ends with it."),
    "steps": (
        steps,
        "Steps on a GPU: random models, dense keys and values in bf16",
        "Least, median and most, in milliseconds. over: the median as a multiple of what weights, keys and values take "
        "at the rate of a copy, the input embedding counted, which no step reads.",
    ),
    "kernels": (
        kernels,
        "Kernels on a GPU: of a layer of an 8B Llama, from cold memory",
        "us: microseconds. of copy: the rate at which weights, or keys and values, are read, of the rate of a copy.",
    ),
}


def main(name: str, *paths: str) -> None:
    files = [json.loads(Path(path).read_text()) for path in paths]
    stages, commits = stages_of(files), sorted({file["commit"] for file in files})
    for table, (rows, title, note) in TABLES.items():
        found = list(rows(stages))
        document = {
            "title": title,
            "command": "python -m tests.gpu, python -m tests.gpu.tables",
            "machine": machine(stages),
            "columns": list(found[0]),
            "rows": found,
            "note": f"{note} Commit {', '.join(commits)}.",
        }
        (PLACE / f"gpu-{table}-{name}.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
