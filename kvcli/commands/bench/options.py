"""The options of `kvcli bench`, as types for its signature."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from kvcli.commands.common.flags import option

_compared = partial(option, panel="What is compared")
_measured = partial(option, panel="How it is measured")
_told = partial(option, panel="What comes out")

_BASELINE = "A profile, hf, hf-lookup, llama.cpp or an earlier FILE.json; × compares with the first."
_WORKLOAD = (
    "prose, code, manual, article, rewrite, translate, talk; in the demo's language summary, chat, copy, lookup;"
    " random; a text file. Several with commas. Default article, for the demo summary."
)
_QUALITY = "off, agree (same text as the baseline), all, or tasks with commas. Default agree."
_FAIL_IF = "Exit 10 if so for any row: 'tok_s<-10%', 'same<100%', 'peak>600MiB'; repeatable."

Format = Literal["table", "md", "csv", "json", "jsonl", "html"]

Profiles = Annotated[str | None, _compared("--profiles", metavar="A,B", help="Default: exact and the current one.")]
Varied = Annotated[list[str] | None, _compared("--vary", metavar="KEY=V1,V2", help="One row per value; repeatable.")]
Baselines = Annotated[list[str] | None, _compared("--baseline", metavar="NAME", help=_BASELINE)]
Workloads = Annotated[str | None, _compared("--workload", "-w", metavar="NAME", help=_WORKLOAD)]
Ctx = Annotated[
    str | None, _compared("--ctx", metavar="N,N", help="Prompt and new tokens: 2k, or 1k,8k, or 512-4k*2. Default 2k.")
]

New = Annotated[str, _measured("--new", "-n", metavar="N", help="Tokens that every side writes. Default 128.")]
Reps = Annotated[int, _measured("--reps", "-r", metavar="N", help="Repetitions that count. Default 5.")]
Warmup = Annotated[
    int, _measured("--warmup", metavar="N", help="Repetitions before, which do not. Default 1.", rare=True)
]
Interleave = Annotated[bool, _measured("--interleave/--no-interleave", help="Sides take turns (on).", rare=True)]
Memory = Annotated[
    bool, _measured("--memory/--no-memory", help="Peak memory, each row once more by itself (on).", rare=True)
]
Seed = Annotated[int, _measured("--seed", metavar="N", help="Same seed, same prompts.", rare=True)]
Quality = Annotated[str, _measured("--quality", metavar="WHAT", help=_QUALITY)]
QueryVisible = Annotated[
    bool, _measured("--query-visible", help="Quality: the question is seen before anything goes.", rare=True)
]
QualityN = Annotated[
    int | None, _measured("--quality-n", metavar="N", help="Quality: contexts per task and length.", rare=True)
]
QualityLengths = Annotated[
    str | None, _measured("--quality-lengths", metavar="N,N", help="Quality: context lengths.", rare=True)
]
Calibrate = Annotated[
    bool, _measured("--calibrate", help="Measure this machine instead: pass times, bandwidths.", rare=True)
]

OutputFormat = Annotated[Format | None, _told("--format", help="Default table, or what -o ends in.")]
Output = Annotated[str | None, _told("--output", "-o", metavar="FILE", help="Write the result there too.")]
Save = Annotated[bool, _told("--save", help="Keep the result for --history.", rare=True)]
History = Annotated[bool, _told("--history", help="Saved results as a trend; measures nothing.", rare=True)]
FailIf = Annotated[list[str] | None, _told("--fail-if", metavar="EXPR", help=_FAIL_IF, rare=True)]
DryRun = Annotated[bool, _told("--dry-run", help="Print what would run; load nothing.", rare=True)]
