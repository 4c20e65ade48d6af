"""Options of `kvcli bench`: the command line, its help, and what a result records of them."""

from __future__ import annotations

from functools import partial
from typing import Literal

from kvcli.commands.common import flags as f
from kvcli.commands.common.options import Options, choice

Format = Literal["table", "md", "csv", "json", "jsonl", "html"]

_compared, _measured, _told = (partial(choice, panel=panel) for panel in ("Comparison", "Measurement", "Output"))

_BASELINE = "A profile, hf, hf-lookup, llama.cpp or an earlier FILE.json. Speedups (×) are relative to the first."
_CTX = "Prompt and new tokens: 2k, or 1k,8k, or 512-4k*2. Default 2k."
_WORKLOAD = (
    "prose, code, manual, article, rewrite, translate, talk; for the demo model summary, chat, copy, lookup;"
    " random; a text file. Several with commas. Default article (demo: summary)."
)
_BATCH = "Texts that each profile continues side by side; tok/s is that of all together. Default 1."
_CLIENTS = "Clients that ask a server at the same time: 1,4. One result for each number. Default 1."
_SERVE = "Measure the kvcli serve of this user that runs, as its clients see it."
_MEMORY = "Measure peak memory in separate runs (on)."
_QUALITY = "off, agree (identical text), all, or tasks separated by commas. Default agree."
_VISIBLE = "Quality: compress after the question (default: before)."
_CALIBRATE = "Measure this machine instead: pass times and bandwidths."
_HISTORY = "Show saved results over time, without a measurement."
_FAIL_IF = "Exit code 10 if true for a result: 'tok_s<-10%', 'same<100%', 'peak>600MiB'. Repeatable."


class BenchOptions(Options):
    """Options of `kvcli bench`. Those that are fields of `BenchArgs` too are recorded in the result as typed."""

    model: f.ModelName = None
    profiles: str | None = _compared(metavar="A,B", help="Default: exact and the current one.")
    vary: list[str] | None = _compared(metavar="KEY=V1,V2", help="One result per value. Repeatable.")
    baselines: list[str] | None = _compared("--baseline", metavar="NAME", help=_BASELINE)
    workloads: str | None = _compared("--workload", "-w", metavar="NAME", help=_WORKLOAD)
    ctx: str | None = _compared(metavar="N,N", help=_CTX)
    weights: f.Weights
    budget: f.Budget = None
    allow_pickle: f.Pickle = False
    new: str = _measured("-n", default="128", metavar="N", help="Number of new tokens. Default 128.")
    batch: int = _measured(default=1, metavar="N", help=_BATCH, rare=True)
    clients: str | None = _measured(metavar="N,N", help=_CLIENTS, rare=True)
    serve: bool = _measured(default=False, help=_SERVE, rare=True)
    engine: f.EngineOptions
    reps: int = _measured("-r", default=5, metavar="N", help="Measured repetitions. Default 5.")
    warmup: int = _measured(default=1, metavar="N", help="Warm-up repetitions. Default 1.", rare=True)
    interleave: bool = _measured(
        "--interleave/--no-interleave", default=True, help="Alternate the profiles (on).", rare=True
    )
    memory: bool = _measured("--memory/--no-memory", default=True, help=_MEMORY, rare=True)
    seed: int = _measured(default=0, metavar="N", help="Random seed of the prompts.", rare=True)
    quality: str = _measured(default="agree", metavar="WHAT", help=_QUALITY)
    query_visible: bool = _measured(default=False, help=_VISIBLE, rare=True)
    quality_n: int | None = _measured(metavar="N", help="Quality: contexts per task and length.", rare=True)
    quality_lengths: str | None = _measured(metavar="N,N", help="Quality: context lengths.", rare=True)
    calibrate: bool = _measured(default=False, help=_CALIBRATE, rare=True)
    format: Format | None = _told(help="Default: table, or by the name of FILE.")
    output: str | None = _told("-o", metavar="FILE", help="Also write the result to FILE.")
    save: bool = _told(default=False, help="Save the result for --history.", rare=True)
    history: bool = _told(default=False, help=_HISTORY, rare=True)
    fail_if: list[str] | None = _told(metavar="EXPR", help=_FAIL_IF, rare=True)
    dry_run: bool = _told(default=False, help="Print the planned runs; load nothing.", rare=True)
