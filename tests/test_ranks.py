"""A model split over the processes of torchrun: same tokens as in one process, or a refusal by name."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvcli import assemble
from kvcli.commands.common.torchrun import join
from kvcli.drafts.draft_settings import clock_of
from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.ranks import Ranks
from kvcli.errors import BadConfig, BadModel, UsageError
from kvcli.models.refusals import refuse_across_ranks
from kvcli.policies.scoring import budget_split
from kvcli.settings.profile import load_profile

REFUSED = {"budget", "fastgen", "fastgen-paper"}
WEIGHTS = {"cpu", "gpu"}  # refused when the model is loaded, because they quantize it
SECOND = {"draft", "specextend", "specextend-paper"}  # need a draft model
SHIPPED = {path.stem for path in (Path(__file__).parents[1] / "profiles").glob("*.toml")}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ASKED = ["demo", "-f", "demo:report", "--set", "load.dtype=fp32", "-q", "--seed", "3"]


@pytest.mark.parametrize("name", sorted(SHIPPED - SECOND))
def test_a_profile_that_compares_heads_is_refused_by_name(name):
    lm, profile = SimpleNamespace(ranks=SimpleNamespace(n=2)), load_profile(name)
    if name not in REFUSED:
        assemble.refuse_across_ranks(lm, profile)
        return
    with pytest.raises(BadConfig, match=f"policy.name = {profile.policy.method} does not work in 2 processes"):
        assemble.refuse_across_ranks(lm, profile)
    assemble.refuse_across_ranks(SimpleNamespace(ranks=Ranks()), profile)  # one process takes it


SETTINGS = [
    {"policy": {"name": "tova"}},
    {"policy": {"name": "random"}},
    {"policy": {"name": "snap", "post": "critical"}},
    {"kv_format": {"method": "gear"}, "kv": {"k_bits": 4, "v_bits": 4}},
    {"reuse": {"method": "blend"}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_method_that_needs_all_heads_is_refused(settings):
    profile = load_profile("exact").replace(exactness="approx", **settings)
    with pytest.raises(BadConfig, match="it needs all heads"):
        assemble.refuse_across_ranks(SimpleNamespace(ranks=SimpleNamespace(n=2)), profile)


def test_quantized_weights_are_refused_by_name():
    with pytest.raises(BadModel, match="demo cannot be shared by several processes with quantization") as found:
        refuse_across_ranks("demo", quantization=True, adapters=False)
    assert found.value.code == "no_ranks"


@pytest.mark.parametrize("args", [["summarize", "a.pdf"], ["chat", "-c"], ["chat", "--resume=x"]], ids=str)
def test_a_command_that_torchrun_cannot_run_is_refused(args):
    with pytest.raises(UsageError, match="torchrun"):
        join(SimpleNamespace(environ={"RANK": "0"}), args[0], args)


def test_a_chat_in_a_terminal_is_refused_with_what_to_type():
    with pytest.raises(UsageError, match="one question") as found:
        join(SimpleNamespace(environ={"RANK": "0"}, stdin=None, is_tty=lambda _: True), "chat", ["chat", "demo"])
    assert "-p TEXT" in found.value.try_


class Both(Ranks):
    """One of two ranks, which knows what the other one sends."""

    def __init__(self, index, parts):
        self.n, self.index, self._parts, self._sent = 2, index, parts, iter(())

    def exchange(self, what, number=0.0):
        return [part[1].shape[1] for part in self._parts]

    def _gather(self, of):
        # scores are sent before positions
        which = 0 if of.is_floating_point() else 1
        fill = (-torch.inf, -1)[which]
        wide = of.shape[1]
        return [torch.nn.functional.pad(p[which], (0, wide - p[which].shape[1]), value=fill) for p in self._parts]


SHARES = [partial(budget_split.ada, floor=0.2), partial(budget_split.all_layers, floor=0.2)]


@pytest.mark.parametrize("share", SHARES, ids=["ada", "global"])
def test_ranks_divide_a_budget_as_one_process_does(share):
    noise = torch.Generator().manual_seed(0)
    score = torch.rand(4, 12, generator=noise) * torch.tensor([[1.0], [5.0], [1.0], [20.0]])
    pos = torch.arange(12).repeat(4, 1)
    score[:2, 9:], pos[:2, 9:] = -torch.inf, -1  # the first rank has evicted some: it stores 9 slots
    whole = next(iter(share([(score, pos)], 4, 12)))
    parts = [(score[:2, :9], pos[:2, :9]), (score[2:], pos[2:])]
    for index, part in enumerate(parts):
        (kept,) = Both(index, parts).across_heads(share, [part], 4, 12)
        assert torch.equal(kept, whole[2 * index : 2 * index + 2, : part[1].shape[1]])
    alone = next(iter(share([parts[1]], 4, 12)))
    assert not torch.equal(alone, whole[2:])  # the budget of a rank alone is another one


def test_drafters_read_the_clock_that_all_ranks_share():
    """With a clock of its own in each process the ranks would draft differently, and end with an error."""
    root = Path(__file__).parents[1] / "kvcli"
    files = [path for folder in ("drafts", "methods") for path in (root / folder).rglob("*.py")]
    reads = {
        path.name for path in files if re.search(r"^(import time|from time import)", path.read_text(), re.MULTILINE)
    }
    assert reads == {"draft_settings.py"}  # without a model pair, in tests
    lm = SimpleNamespace(clock=lambda: 7.0)
    assert clock_of(ModelPair(lm, lm))() == 7.0


@pytest.mark.slow
def test_two_processes_write_the_tokens_of_one(tmp_path):
    names = sorted(SHIPPED - REFUSED - WEIGHTS - SECOND)
    worker = [str(Path(__file__).with_name("ranks.py")), str(tmp_path), *names]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    for start in ([sys.executable], TORCHRUN):
        subprocess.run([*start, *worker], env=environ, check=True, timeout=600)
    whole, first, second = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("whole-0", "split-0", "split-1"))
    assert first == second
    assert (first.pop("heads"), whole.pop("heads")) == ([1, 2], [2, 2])
    assert (first.pop("differ"), whole.pop("differ")) == ("ranks_differ", "none")
    assert first == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["-P", "fafo"], *(["-P", n, "--draft", "demo-small"] for n in sorted(SECOND))], ids=str
)
def test_chat_under_torchrun_prints_the_answer_once(tmp_path, options):
    environ = os.environ | {"KVCLI_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    said = [
        subprocess.run(
            [*start, "-m", "kvcli", "chat", *ASKED, *options],
            input="What is the stock of depot Gimness?",
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout
        for start in ([sys.executable], TORCHRUN)
    ]
    assert said[0] == said[1]
    assert "Gimness" in said[0]
