"""`kvcli bench`: compare profiles on the same prompts in one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kvcli.commands.bench.options import BenchOptions
from kvcli.commands.common import flags as f
from kvcli.commands.common.options import command
from kvcli.environment import Environment
from kvcli.errors import ExitStatus, UsageError

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


@command(app)
def bench(world: Environment, options: BenchOptions) -> int:
    """Compare profiles: speed, memory, agreement, quality.

    All profiles continue the same prompts, greedily or with --set sample.temperature=0.8. They alternate, so a slowdown
    of the machine affects all of them.
    """
    from kvcli.commands.bench.output import outlet, print_calibration, print_history
    from kvcli.commands.common.run_setup import Setup

    if options.serve or options.engine.typed.keys() & {"engine", "base_url", "key_file", "engine_timeout"}:
        from kvcli.commands.bench.server import bench_server

        return bench_server(world, options)
    if options.clients:
        ways = ["--serve", "--engine openai --base-url URL", "--batch N, for texts side by side in this process"]
        raise UsageError("--clients needs a server", try_=ways)
    setup = Setup(world, options.model, f.load_flags(options.values()))
    if options.calibrate:
        options.refuse_others("--calibrate", {"calibrate", "model", "device", "dtype", "quant", "allow_pickle"})
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
    return Bench(ask, models, world.environ, bar.show)


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
