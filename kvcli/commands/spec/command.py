"""`kvcli spec`: measure and tune speculative decoding on this machine."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvcli.commands.common import flags as o
from kvcli.commands.common.options import Options, choice, command
from kvcli.environment import Environment
from kvcli.errors import ContextOverflow, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvcli.chat.model import Model
    from kvcli.commands.common.run_setup import Setup
    from kvcli.render.bench.progress import Bar

app = typer.Typer(help="Speculative decoding: measure and tune.", add_completion=False)


_WORKLOADS = "Test texts, as for kvcli bench. Default article,talk,code; for the demo summary,chat,copy."


class DoctorOptions(Options):
    """Options of `kvcli spec doctor`."""

    model: o.ModelName = None
    workload: str | None = choice("-w", metavar="NAME", help="Test text, as for kvcli bench.")
    ctx: str = choice(default="2k", metavar="N", help="Prompt and new tokens together. Default 2k.")
    new: int = choice("-n", default=128, metavar="N", help="Number of new tokens. Default 128.")
    reps: int = choice("-r", default=3, metavar="N", help="Measured repetitions. Default 3.")
    weights: o.Weights
    allow_pickle: o.Pickle = False


class TuneOptions(DoctorOptions):
    """Options of `kvcli spec tune`."""

    workload: str | None = choice("-w", metavar="NAME,..", help=_WORKLOADS)
    new: int = choice("-n", default=96, metavar="N", help="Number of new tokens. Default 96.")
    save: str | None = choice(metavar="NAME", help="Save the best settings as a profile.")
    output: Path | None = choice("-o", metavar="FILE", help="Write it to FILE; - = stdout.")


@command(app)
def doctor(world: Environment, options: DoctorOptions) -> None:
    """Measure speculative decoding of a profile on this machine.

    Plain decoding and the profile alternate on one text. Shows the time of
    verification passes by draft size, the acceptance rate of each draft
    source, and what lookahead adds.
    """
    from kvcli.commands.common.output import print_json, print_lines
    from kvcli.render.spec import doctor_lines

    setup = _setup(world, options)
    with _model(setup) as (loaded, bar):
        from kvcli.bench.drafting import examine

        if loaded.profile.spec.method == "off":
            raise UsageError(f"profile {loaded.profile.name} does not draft", try_=["-P ngram", "-P fafo"])
        name, prompt = next(iter(_prompts(setup, loaded, options, 1).items()))
        reps = _at_least(1, options.reps, "--reps 3")
        found = examine(setup.name, loaded, setup.pass_times(loaded), name, prompt, options.new, reps, bar.show)
    if world.options.json:
        print_json(world, found)
    else:
        print_lines(world, doctor_lines(found, world.width()))


@command(app)
def tune(world: Environment, options: TuneOptions) -> None:
    """Find the fastest [spec] settings for a model on this machine, and save them as a profile.

    Each text is prefilled once; then all settings continue it alternately.
    """
    from kvcli.commands.common.output import print_json, print_lines
    from kvcli.commands.spec.tuned_profile import place, write
    from kvcli.render.spec import tune_lines

    setup = _setup(world, options)
    if world.options.json and options.output == Path("-"):
        raise UsageError("the profile and the JSON cannot both go to stdout", try_=["-o FILE --json", "-o -"])
    where = place(setup, options.save, options.output)  # refuse before minutes of measuring, not after
    with _model(setup) as (loaded, bar):
        from kvcli.bench.drafting import tune as measure

        prompts, reps = _prompts(setup, loaded, options), _at_least(1, options.reps, "--reps 3")
        found = measure(setup.name, loaded, prompts, options.new, reps, bar.show)
    written = write(setup, where, found)
    if world.options.json:
        print_json(world, written)
    elif where.path != Path("-"):
        print_lines(world, tune_lines(written, world.width()))


def _setup(world: Environment, options: DoctorOptions) -> Setup:
    from kvcli.commands.common.run_setup import Setup

    return Setup(world, options.model, o.load_flags(options.values()))


@contextmanager
def _model(setup: Setup) -> Iterator[tuple[Model, Bar]]:
    """Load the model under its profile, with sampling as in a benchmark."""
    from kvcli.bench.side_factory import drawing
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


def _prompts(setup: Setup, model: Model, options: DoctorOptions, most: int = 3) -> Mapping[str, Sequence[int]]:
    """Return a prompt per workload; with the new tokens it fills the context. `most`: number of default workloads."""
    from kvcli.bench.grid import contexts
    from kvcli.bench.workloads import prompt_of
    from kvcli.commands.bench.request import read_workloads

    (size,), new = contexts(options.ctx)[:1], options.new
    if _at_least(2, new, "--new 128") >= size - 8:
        raise UsageError(
            f"-n {new} leaves no tokens for a prompt in --ctx {options.ctx}", try_=["a larger --ctx", "a smaller -n"]
        )
    if size > model.limit:
        raise ContextOverflow(f"{size:,} tokens exceed the context window", try_=[f"--ctx {model.limit}"])
    names, files = read_workloads(setup, options.workload, most)
    tokenizer, vocab = model.tokenizer, model.lm.vocab
    return {name: prompt_of(name, files, tokenizer, vocab, size, new) for name in names}


def _at_least(least: int, n: int, instead: str) -> int:
    """Refuse fewer than `least` new tokens: two are needed, because the first one's time is that of the prefill."""
    if n < least:
        raise UsageError(f"expected at least {least}, not {n}", try_=[instead])
    return n
