"""`kvcli bench`: compare profiles on the same prompts in one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kvcli.commands.bench import options as o
from kvcli.commands.common import flags as f
from kvcli.errors import ExitStatus

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from kvcli.bench.run import Bench, Quality
    from kvcli.commands.bench.output import BenchOutput
    from kvcli.commands.bench.request import BenchArguments
    from kvcli.commands.common.run_setup import Setup
    from kvcli.environment import Environment
    from kvcli.models.source import Source
    from kvcli.render.bench.progress import Bar

app = typer.Typer(add_completion=False)


@app.command()
def bench(
    context: typer.Context,
    model: f.ModelName = None,
    profiles: o.Profiles = None,
    vary: o.Varied = None,
    baseline: o.Baselines = None,
    workload: o.Workloads = None,
    ctx: o.Ctx = None,
    device: f.Device = None,
    dtype: f.Dtype = None,
    quant: f.Quant = None,
    budget: f.Budget = None,
    allow_pickle: f.Pickle = False,
    new: o.New = "128",
    reps: o.Reps = 5,
    warmup: o.Warmup = 1,
    interleave: o.Interleave = True,
    memory: o.Memory = True,
    seed: o.Seed = 0,
    quality: o.Quality = "agree",
    query_visible: o.QueryVisible = False,
    quality_n: o.QualityN = None,
    quality_lengths: o.QualityLengths = None,
    calibrate: o.Calibrate = False,
    format: o.OutputFormat = None,
    output: o.Output = None,
    save: o.Save = False,
    history: o.History = False,
    fail_if: o.FailIf = None,
    dry_run: o.DryRun = False,
) -> int:
    """Compare profiles: speed, memory, agreement, quality.

    All profiles continue the same prompts, greedily or with --set sample.temperature=0.8. They alternate, so a slowdown
    of the machine affects all of them.
    """
    from kvcli.commands.bench.output import outlet
    from kvcli.commands.common.run_setup import Setup

    world: Environment = context.obj
    setup = Setup(world, model, f.load_flags(context.params))
    if calibrate:
        f.refuse_others(context, "--calibrate", {"calibrate", "model", "device", "dtype", "quant", "allow_pickle"})
        from kvcli.commands.bench.calibrate import print_calibration

        return print_calibration(setup)
    if history:
        f.refuse_others(context, "--history", {"history", "model", "ctx", "workload"})
        from kvcli.commands.bench.output import print_history

        return print_history(world, setup.name, ctx, workload)
    out = outlet(world, format, output, save)
    return run(setup, context.params, out, dry_run)


def run(setup: Setup, typed: Mapping[str, Any], out: BenchOutput, dry_run: bool) -> int:
    """Check all options and models first, then measure."""
    from kvcli.bench.run import check_room, refuse_unbuilt
    from kvcli.commands.bench.quality import suite
    from kvcli.commands.bench.request import parse_request
    from kvcli.models.shape import of_source
    from kvcli.render.bench.progress import progress
    from kvcli.render.terminal.screen import Screen

    asked = parse_request(setup, typed)
    with progress(Screen.of(setup.world)) as bar:
        quality = suite(setup.world, asked, bar)
        found = setup.fetch(asked.sides[0][2], None if dry_run else bar.screen.note)
        check_room(asked.args.ctx, asked.args.new, of_source(found).limit, setup.name)
        if dry_run:
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
