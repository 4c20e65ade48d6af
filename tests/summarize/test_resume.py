"""A run that was killed goes on where it was: with the bundled model, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvcli
from kvcli.api import Live
from kvcli.documents import read_document
from kvcli.models.text import render_prompt
from kvcli.summarize.cache import Cache
from kvcli.summarize.events import Done, PartBegan
from kvcli.summarize.plan import PlanWindow, make_plan
from kvcli.summarize.request import Request
from kvcli.summarize.run import summarize
from kvcli.summarize.wording import Wording, part_messages

ROOT = Path(__file__).parents[2]
BRIEF = {"sample.max_new_tokens": 24}  # the answers themselves do not matter here
CHUNK = 950  # tokens: five parts
KILLED = f"""
import os, signal, sys
from pathlib import Path
import kvcli
from kvcli.api import Text
from kvcli.documents import read_document
from kvcli.summarize.cache import Cache
from kvcli.summarize.events import PartBegan
from kvcli.summarize.request import Request
from kvcli.summarize.run import summarize

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started without
part = 0
with kvcli.load("demo", set={BRIEF}) as model:
    cache = Cache.of(Path(sys.argv[1]), model.info, model.profile)
    for event in summarize(model, [read_document("demo:report")], Request(chunk={CHUNK}), cache=cache):
        part += isinstance(event, PartBegan)
        if part == 3 and isinstance(event, Text):
            os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_killed_in_part_three_of_five(tmp_path: Path, name: str):
    run = [sys.executable, "-c", KILLED, str(tmp_path), name]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(run, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert killed.returncode == -getattr(signal, name), killed.stderr
    with kvcli.load("demo", set=BRIEF) as model:
        cache = Cache.of(tmp_path, model.info, model.profile)
        events = list(summarize(model, [read_document("demo:report")], Request(chunk=CHUNK), cache=cache))
    assert [event.is_cached for event in events if isinstance(event, PartBegan)] == [True, True, False, False, False]
    assert isinstance(events[-1], Done)
    assert sum(isinstance(event, Live) for event in events) == 3  # turns of the model
    assert [answered.is_cached for answered in events[-1].summary.turns] == [True, True, False, False, False]


def test_parts_reuse_what_all_of_them_share():
    """The rules before the text are read once; later parts find them in memory."""
    request, document = Request(chunk=CHUNK), read_document("demo:report")
    with kvcli.load("demo", set=BRIEF) as model:
        plan = make_plan([document], request, PlanWindow.of(model), Wording(merges=False))
        events = list(summarize(model, [document], plan=plan))
        rules = part_messages(plan.wording, request, plan.parts[0], plan.unit)[:1]
        shared = len(render_prompt(model.tokenizer, rules))
    assert isinstance(events[-1], Done)
    cached = [answered.turn.stats.cached for answered in events[-1].summary.turns]
    assert cached[0] == 0
    assert min(cached[1:]) > 0.9 * shared > 50
