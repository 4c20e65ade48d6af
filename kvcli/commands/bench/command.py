"""`kvcli bench`: compare profiles on the same prompts in one run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import typer

from kvcli.commands.common import flags as f
from kvcli.commands.common.options import Options, choice, command
from kvcli.environment import Environment
from kvcli.errors import ExitStatus, UsageError
from kvcli.schemas.bench import Format

if TYPE_CHECKING:
    from kvcli.bench.run import Bench, Quality
    from kvcli.chat.model import Model
    from kvcli.commands.bench.output import BenchOutput
    from kvcli.commands.bench.request import BenchArguments
    from kvcli.commands.common.run_setup import Setup
    from kvcli.models.source import Source
    from kvcli.render.bench.progress import Bar
    from kvcli.schemas.quality import QualityDocument
    from kvcli.settings.profile import Profile

app = typer.Typer(add_completion=False)

_compared, _measured, _told = (partial(choice, panel=panel) for panel in ("Comparison", "Measurement", "Output"))

_BASELINE = "A profile, hf, hf-lookup, llama.cpp or an earlier FILE.json. Speedups (×) are relative to the first."
_CTX = "Prompt and new tokens: 2k, or 1k,8k, or 512-4k*2. Default 2k."
_WORKLOAD = (
    "prose, code, manual, article, rewrite, translate, talk; for the demo model summary, chat, copy, lookup;"
    " random; a text file. Several with commas. Default article (demo: summary)."
)
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


@command(app)
def bench(world: Environment, options: BenchOptions) -> int:
    """Compare profiles: speed, memory, agreement, quality.

    All profiles continue the same prompts, greedily or with --set sample.temperature=0.8. They alternate, so a slowdown
    of the machine affects all of them.
    """
    from kvcli.commands.bench.output import outlet, print_history
    from kvcli.commands.common.run_setup import Setup

    setup = Setup(world, options.model, f.load_flags(options.values()))
    if options.calibrate:
        options.refuse_others("--calibrate", {"calibrate", "model", "device", "dtype", "quant", "allow_pickle"})
        from kvcli.commands.bench.calibrate import print_calibration

        return print_calibration(setup)
    if options.history:
        options.refuse_others("--history", {"history", "model", "ctx", "workloads"})
        return print_history(world, setup.name, options.ctx, options.workloads)
    out = outlet(world, options.format, options.output, options.save)
    return run(setup, options, out)


def run(setup: Setup, options: BenchOptions, out: BenchOutput) -> int:
    """Check all options and models first, then measure."""
    from kvcli.bench.run import check_room, refuse_unbuilt
    from kvcli.commands.bench.request import parse_request
    from kvcli.models.shape import of_source
    from kvcli.render.bench.progress import progress
    from kvcli.render.terminal.screen import Screen

    asked = parse_request(setup, options)
    with progress(Screen.of(setup.world)) as bar:
        quality = suite(setup.world, asked, bar)
        found = setup.fetch(asked.sides[0][2], None if options.dry_run else bar.screen.note)
        check_room(asked.args.ctx, asked.args.new, of_source(found).limit, setup.name)
        if options.dry_run:
            from kvcli.commands.bench.output import print_dry_run

            return print_dry_run(setup.world, asked)
        refuse_unbuilt()
        bench = prepare(setup, asked, found, quality, bar)
        status = measure(bench)
    return out.finish(bench, status)


def prepare(setup: Setup, asked: BenchArguments, found: Source, quality: Quality | None, bar: Bar) -> Bench:
    """Return the benchmark, with no model loaded yet."""
    bar.show(0, 0, f"loading {setup.name}")
    from kvcli.commands.common.exits import insisting

    with insisting():
        from kvcli.bench.profile_side import Models
        from kvcli.bench.run import Bench, BenchRequest

    world = setup.world
    recipes = asked.recipes(str(found.path), world.paths.cache, setup.draft)
    ask = BenchRequest(asked.args, recipes, asked.files, asked.earlier, asked.earlier_name, quality, asked.notes)
    models = Models(lambda profile: setup.load(profile, bar.screen.note))
    return Bench(ask, models, world.environ, lambda step: bar.show(step.done, step.total, step.words))


def measure(bench: Bench) -> int:
    """Run the benchmark. After Ctrl-C, the results so far are kept."""
    try:
        bench.run()
    except KeyboardInterrupt:
        if not any(series.samples for series in bench.series):
            raise
        return ExitStatus.INTERRUPTED
    finally:
        bench.close()  # a baseline may run in a process of its own
    return ExitStatus.OK if bench.complete else ExitStatus.INTERRUPTED


def suite(world: Environment, asked: BenchArguments, bar: Bar) -> Quality | None:
    """Return the suite that runs after the speed runs; None for --quality off and agree. Refuses unknown tasks."""
    typed = asked.args
    tasks = f.listed(typed.quality)
    if tasks in (["off"], ["agree"]):
        for name in ("query_visible", "quality_n", "quality_lengths"):
            if getattr(typed, name):
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} needs --quality all or tasks", try_=[f"--quality all {flag}"])
        return None
    from kvcli.bench.grid import contexts
    from kvcli.quality.tasks import chosen

    names = None if tasks == ["all"] else [task.name for task in chosen(tasks)]
    lengths = contexts(typed.quality_lengths, "--quality-lengths") if typed.quality_lengths else None

    def run(model: Model, profiles: list[Profile]) -> QualityDocument | None:
        from kvcli.commands.common.exits import Interrupt
        from kvcli.files import private_folder
        from kvcli.quality.agree import agreement
        from kvcli.quality.run import LENGTHS, N, run_quality

        folder = private_folder(world.paths.cache / "quality")
        file = next(iter(asked.files.values()), None)
        agreed = None
        with Interrupt() as cancel:
            if file is not None:  # first: refuse a text that is too short, before minutes of work
                agreed = agreement(model, profiles, file.text, seed=typed.seed, tell=bar.show, cancel=cancel)
            result = run_quality(
                model,
                profiles,
                lengths=lengths or LENGTHS,
                n=typed.quality_n or N,
                tasks=names,
                seed=typed.seed,
                query_visible=typed.query_visible,
                haystack=file.text if file is not None else None,
                partial=folder / "samples.jsonl",
                tell=lambda done, total, label: bar.show(done, total, f"quality {label}"),
                cancel=cancel,
            )
        if not result.is_complete and not result.outcomes:
            raise KeyboardInterrupt
        document = result.document()
        document.agreement = agreed
        return document

    return run
