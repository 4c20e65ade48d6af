"""The options of `kvcli bench`, as types for its signature."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from kvcli.commands.common.flags import option

_compared = partial(option, panel="Comparison")
_measured = partial(option, panel="Measurement")
_told = partial(option, panel="Output")

_BASELINE = "A profile, hf, hf-lookup, llama.cpp or an earlier FILE.json. Speedups (×) are relative to the first."
_WORKLOAD = (
    "prose, code, manual, article, rewrite, translate, talk; for the demo model summary, chat, copy, lookup;"
    " random; a text file. Several with commas. Default article (demo: summary)."
)
_QUALITY = "off, agree (identical text), all, or tasks separated by commas. Default agree."
_FAIL_IF = "Exit code 10 if true for a result: 'tok_s<-10%', 'same<100%', 'peak>600MiB'. Repeatable."

Format = Literal["table", "md", "csv", "json", "jsonl", "html"]

Profiles = Annotated[str | None, _compared("--profiles", metavar="A,B", help="Default: exact and the current one.")]
Varied = Annotated[list[str] | None, _compared("--vary", metavar="KEY=V1,V2", help="One result per value. Repeatable.")]
Baselines = Annotated[list[str] | None, _compared("--baseline", metavar="NAME", help=_BASELINE)]
Workloads = Annotated[str | None, _compared("--workload", "-w", metavar="NAME", help=_WORKLOAD)]
Ctx = Annotated[
    str | None, _compared("--ctx", metavar="N,N", help="Prompt and new tokens: 2k, or 1k,8k, or 512-4k*2. Default 2k.")
]

New = Annotated[str, _measured("--new", "-n", metavar="N", help="Number of new tokens. Default 128.")]
Reps = Annotated[int, _measured("--reps", "-r", metavar="N", help="Measured repetitions. Default 5.")]
Warmup = Annotated[int, _measured("--warmup", metavar="N", help="Warm-up repetitions. Default 1.", rare=True)]
Interleave = Annotated[bool, _measured("--interleave/--no-interleave", help="Alternate the profiles (on).", rare=True)]
Memory = Annotated[
    bool, _measured("--memory/--no-memory", help="Measure peak memory in separate runs (on).", rare=True)
]
Seed = Annotated[int, _measured("--seed", metavar="N", help="Random seed of the prompts.", rare=True)]
Quality = Annotated[str, _measured("--quality", metavar="WHAT", help=_QUALITY)]
QueryVisible = Annotated[
    bool,
    _measured("--query-visible", help="Quality: compress after the question (default: before).", rare=True),
]
QualityN = Annotated[
    int | None, _measured("--quality-n", metavar="N", help="Quality: contexts per task and length.", rare=True)
]
QualityLengths = Annotated[
    str | None, _measured("--quality-lengths", metavar="N,N", help="Quality: context lengths.", rare=True)
]
Calibrate = Annotated[
    bool, _measured("--calibrate", help="Measure this machine instead: pass times and bandwidths.", rare=True)
]

OutputFormat = Annotated[Format | None, _told("--format", help="Default: table, or by the name of FILE.")]
Output = Annotated[str | None, _told("--output", "-o", metavar="FILE", help="Also write the result to FILE.")]
Save = Annotated[bool, _told("--save", help="Save the result for --history.", rare=True)]
History = Annotated[bool, _told("--history", help="Show saved results over time, without a measurement.", rare=True)]
FailIf = Annotated[list[str] | None, _told("--fail-if", metavar="EXPR", help=_FAIL_IF, rare=True)]
DryRun = Annotated[bool, _told("--dry-run", help="Print the planned runs; load nothing.", rare=True)]
