"""Runs in a terminal of the tests: `kvcli summarize` on a model that is told what to say.

python -m tests.summarize_driver summarize '{"args": ["a.txt"], "delay": 0.01}'
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

from kvcli.api import Read, Text
from kvcli.cli import run
from kvcli.commands.common.run_setup import Setup
from kvcli.commands.summarize.run import SummaryRun
from kvcli.environment import Environment
from kvcli.fit import memory
from tests.fake_model import count
from tests.summarize.scribe import Scribe, first_sentences


@dataclass
class Slow(Scribe):
    """Takes its time, and counts as a model does."""

    delay: float = 0.0
    cautions: tuple[str, ...] = ()
    promise: str = "exact"
    engine: None = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def stream(self, prompt, **more):
        stats = None
        for event in super().stream(prompt, **more):
            stats = getattr(event, "stats", stats)
            if isinstance(event, Read):
                for i in range(4):
                    time.sleep(self.delay)
                    yield Read(event.total * i // 4, event.total, 0, self.delay * (i + 1))
            elif isinstance(event, Text):
                time.sleep(self.delay)
                count(stats, 1 + len(event.ids), self.delay or 0.01)
            yield event


def main(facts):
    clerk = Slow(first_sentences, delay=facts.get("delay", 0.0))

    def load(self, profile, tell=None):
        clerk.profile = profile
        return clerk

    Setup.load = load
    Setup.pass_times = lambda self, model: []
    SummaryRun.refuse_early = lambda run: None
    memory.here = lambda: memory.BASE  # it imports transformers, to see what that takes
    return run(["summarize", "-m", "demo", *facts["args"]], Environment.real())


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[2])))
