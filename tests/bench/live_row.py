"""What the live row costs: the same turn with and without it, rounds interleaved, on a terminal that somebody reads.

    python tests/bench/live_row.py [--model demo] [--new 128] [--reps 7] [--out FILE]

Three sides: `silent` takes the events and shows nothing, `off` is --stats off (the answer alone), `live` the default.
The renderer's own CPU time is counted inside its calls, by thread, so it means something on a busy machine too.

"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.api import End
from kvcli.render.terminal.screen import Screen
from kvcli.render.terminal.terminal import Terminal
from kvcli.render.turn.status_row import RowOptions
from kvcli.render.turn.turn_view import TurnView
from tests.bench.harness import Rows, in_turns, measurement

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


def measure(name: str, new: int, reps: int) -> dict[str, list[dict[str, float]]]:
    import kvcli

    with kvcli.load(name, set={"sample.temperature": 0.0}) as model, terminal() as stream:
        prompt = model.encode("Write about the wells of Bethden.")
        one_turn(model, prompt, new, "silent", stream)
        return in_turns({side: partial(one_turn, model, prompt, new, side, stream) for side in SIDES}, reps, 0)


@measurement("What the live row costs")
def live_row(model: str = "demo", new: int = 128, reps: int = 7) -> Rows:
    rounds = measure(model, new, reps)
    for side in SIDES:
        speeds = [r["tok_s"] for r in rounds[side]]
        pairs = [r["tok_s"] / s["tok_s"] for r, s in zip(rounds[side], rounds["silent"], strict=True)]
        row: dict[str, Any] = {"side": side, "tok_s": median(speeds), "lowest": min(speeds)}
        row |= {"highest": max(speeds), "of_silent": median(pairs)}
        if side != "silent":
            row["cpu_share"] = median(r["share"] for r in rounds[side])
            row["ms_a_tick"] = median(1e3 * r["cpu_s"] / max(1, r["ticks"]) for r in rounds[side])
        yield row


if __name__ == "__main__":
    live_row.main()
