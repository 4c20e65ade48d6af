"""What the live row costs: the same turn with and without it, rounds interleaved, on a terminal that somebody reads.

    python tests/bench/live_row.py [--model demo] [--new 128] [--reps 7] [--out FILE]

Three sides: `silent` takes the events and shows nothing, `off` is --stats off (the answer alone), `live` the default.
The renderer's own CPU time is counted inside its calls, by thread, so it means something on a busy machine too.
Prints a table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import pty
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli.api import End
from kvcli.render.terminal.screen import Screen
from kvcli.render.terminal.terminal import Terminal
from kvcli.render.turn.status_row import RowOptions
from kvcli.render.turn.turn_view import TurnView

SIDES = ("silent", "off", "live")


class Timed(TurnView):
    """Counts the CPU time of its own calls."""

    cpu = 0.0
    ticks = 0

    def tick(self) -> None:
        began = time.thread_time()
        super().tick()
        self.cpu += time.thread_time() - began
        self.ticks += 1

    def on(self, event: Any) -> None:
        began = time.thread_time()
        super().on(event)
        self.cpu += time.thread_time() - began


@contextmanager
def terminal() -> Iterator[TextIO]:
    """A pseudo terminal whose other end another process reads."""
    reader, writer = pty.openpty()
    drain = subprocess.Popen(["cat"], stdin=reader, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        yield stream
    drain.kill()
    drain.wait()


def one_turn(model: Any, prompt: list[int], new: int, side: str, stream: TextIO) -> dict[str, float]:
    """Speed of the turn and what the renderer took."""
    events = model.stream(prompt, max_new_tokens=new, ignore_eos=True)
    view = None
    if side == "silent":
        turn = next(event.turn for event in events if isinstance(event, End))
    else:
        out = Terminal(stream, lambda: 80, is_tty=True, colour=True, live=True)
        err = Terminal(stream, lambda: 80, is_tty=True, colour=True, live=True)
        view = Timed(Screen(out, err, stats=side, shared=True), RowOptions("bench"))
        with view.running():
            for event in events:
                view.on(event)
        turn = view.turn
    stats = turn.stats
    result = {"tok_s": stats.decode_tok_s, "decode_s": stats.decode}
    if view is not None:
        result |= {"cpu_s": view.cpu, "ticks": view.ticks, "share": view.cpu / (stats.read + stats.decode)}
    return result


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    import kvcli

    rounds: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with kvcli.load(args.model, set={"sample.temperature": 0.0}) as model, terminal() as stream:
        prompt = model.encode("Write about the wells of Bethden.")
        one_turn(model, prompt, args.new, "silent", stream)
        for i in range(args.reps):
            for side in SIDES[i % 3 :] + SIDES[: i % 3]:
                rounds[side].append(one_turn(model, prompt, args.new, side, stream))
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rounds = measure(args)
    rows = []
    for side in SIDES:
        speeds = [r["tok_s"] for r in rounds[side]]
        pairs = [r["tok_s"] / s["tok_s"] for r, s in zip(rounds[side], rounds["silent"], strict=True)]
        row: dict[str, Any] = {"side": side, "tok_s": statistics.median(speeds), "lowest": min(speeds)}
        row |= {"highest": max(speeds), "of_silent": statistics.median(pairs)}
        if side != "silent":
            row["cpu_share"] = statistics.median(r["share"] for r in rounds[side])
            row["ms_a_tick"] = statistics.median(1e3 * r["cpu_s"] / max(1, r["ticks"]) for r in rounds[side])
        rows.append(row)
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{v:<6}" for k, v in row.items()))
    result = {
        "title": "What the live row costs",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "command": f"python tests/bench/live_row.py --model {args.model} --new {args.new} --reps {args.reps}",
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
