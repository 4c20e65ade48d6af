"""`kvcli spec`: measure and tune speculative decoding on this machine."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.commands.common import flags as o
from kvcli.errors import ContextOverflow, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvcli.chat.model import Model
    from kvcli.commands.common.run_setup import Setup
    from kvcli.render.bench.progress import Bar

app = typer.Typer(help="Speculative decoding: measure and tune.", add_completion=False)


Workload = Annotated[str | None, o.option("--workload", "-w", metavar="NAME", help="Test text, as for kvcli bench.")]
_WORKLOADS = "Test texts, as for kvcli bench. Default article,talk,code; for the demo summary,chat,copy."
Workloads = Annotated[str | None, o.option("--workload", "-w", metavar="NAME,..", help=_WORKLOADS)]
Ctx = Annotated[str, o.option("--ctx", metavar="N", help="Prompt and new tokens together. Default 2k.")]
New = Annotated[int, o.option("--new", "-n", metavar="N", help="Number of new tokens. Default 128.")]
Reps = Annotated[int, o.option("--reps", "-r", metavar="N", help="Measured repetitions. Default 3.")]
Save = Annotated[str | None, o.option("--save", metavar="NAME", help="Save the best settings as a profile.")]
Output = Annotated[Path | None, o.option("--output", "-o", metavar="FILE", help="Write it to FILE; - = stdout.")]


@app.command()
def doctor(
    context: typer.Context,
    model: o.ModelName = None,
    workload: Workload = None,
    ctx: Ctx = "2k",
    new: New = 128,
    reps: Reps = 3,
    device: o.Device = None,
    dtype: o.Dtype = None,
    quant: o.Quant = None,
    allow_pickle: o.Pickle = False,
) -> None:
    """Measure speculative decoding of a profile on this machine.

    Plain decoding and the profile alternate on one text. Shows the time of
    verification passes by draft size, the acceptance rate of each draft
    source, and what lookahead adds.
    """
    from kvcli.commands.common.output import print_json, print_lines
    from kvcli.render.spec import doctor_lines

    setup = _setup(context)
    world = setup.world
    with _model(setup) as (loaded, bar):
        from kvcli.commands.spec.results import examine

        if loaded.profile.spec.method == "off":
            raise UsageError(f"profile {loaded.profile.name} does not draft", try_=["-P ngram", "-P fafo"])
        name, prompt = next(iter(_prompts(setup, loaded, workload, ctx, new, 1).items()))
        found = examine(
            setup.name, loaded, setup.pass_times(loaded), name, prompt, new, _at_least(1, reps, "--reps 3"), bar
        )
    if world.options.json:
        print_json(world, found)
    else:
        print_lines(world, doctor_lines(found, world.width()))


@app.command()
def tune(
    context: typer.Context,
    model: o.ModelName = None,
    workload: Workloads = None,
    ctx: Ctx = "2k",
    new: New = 96,
    reps: Reps = 3,
    save: Save = None,
    output: Output = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    quant: o.Quant = None,
    allow_pickle: o.Pickle = False,
) -> None:
    """Find the fastest [spec] settings for a model on this machine, and save them as a profile.

    Each text is prefilled once; then all settings continue it alternately.
    """
    from kvcli.commands.common.output import print_json, print_lines
    from kvcli.commands.spec.tuned_profile import place, write
    from kvcli.render.spec import tune_lines

    setup = _setup(context)
    world = setup.world
    if world.options.json and output == Path("-"):
        raise UsageError("the profile and the JSON cannot both go to stdout", try_=["-o FILE --json", "-o -"])
    where = place(setup, save, output)  # refuse before minutes of measuring, not after
    with _model(setup) as (loaded, bar):
        from kvcli.bench.drafting import tune as measure
        from kvcli.commands.spec.results import tuned

        prompts = _prompts(setup, loaded, workload, ctx, new)
        rivals = measure(loaded, prompts, new, _at_least(1, reps, "--reps 3"), bar.show)
        found = tuned(setup.name, loaded, rivals, list(prompts), new, reps, max(map(len, prompts.values())))
    written = write(setup, where, rivals[0], found)
    if world.options.json:
        print_json(world, written)
    elif where.path != Path("-"):
        print_lines(world, tune_lines(written, world.width()))


def _setup(context: typer.Context) -> Setup:
    from kvcli.commands.common.run_setup import Setup

    return Setup(context.obj, context.params.get("model"), o.load_flags(context.params))


@contextmanager
def _model(setup: Setup) -> Iterator[tuple[Model, Bar]]:
    """Load the model under its profile, with sampling as in a benchmark."""
    from kvcli.bench.recipe import drawing
    from kvcli.commands.bench.request import temperature
    from kvcli.commands.common.exits import insisting
    from kvcli.render.bench.progress import progress
    from kvcli.render.terminal.screen import Screen

    with progress(Screen.of(setup.world)) as bar:
        bar.show(0, 0, f"loading {setup.name}")
        with insisting():
            model = setup.load(drawing(setup.profile, temperature(setup)), bar.screen.note)
        with model as loaded:
            yield loaded, bar


def _prompts(
    setup: Setup, model: Model, text: str | None, ctx: str, new: int, most: int = 3
) -> Mapping[str, Sequence[int]]:
    """Return a prompt per workload; with the new tokens it fills the context. `most`: number of default workloads."""
    from kvcli.bench.grid import contexts
    from kvcli.bench.workloads import prompt_of
    from kvcli.commands.bench.request import read_workloads

    (size,) = contexts(ctx)[:1]
    if _at_least(2, new, "--new 128") >= size - 8:
        raise UsageError(
            f"-n {new} leaves no tokens for a prompt in --ctx {ctx}", try_=["a larger --ctx", "a smaller -n"]
        )
    if size > model.limit:
        raise ContextOverflow(f"{size:,} tokens exceed the context window", try_=[f"--ctx {model.limit}"])
    names, files = read_workloads(setup, text, most)
    tokenizer, vocab = model.tokenizer, model.lm.vocab
    return {name: prompt_of(name, files, tokenizer, vocab, size, new) for name in names}


def _at_least(least: int, n: int, instead: str) -> int:
    """Refuse fewer than `least` new tokens: two are needed, because the first one's time is that of the prefill."""
    if n < least:
        raise UsageError(f"expected at least {least}, not {n}", try_=[instead])
    return n
