"""Output of `kvcli bench`: printed tables, files, saved results, and the exit code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.bench.grid import contexts
from kvcli.commands.bench.options import Format
from kvcli.commands.common.flags import listed
from kvcli.commands.common.output import output_file, print_json, print_lines, print_table
from kvcli.errors import BadInput, ExitStatus, KvcliError, UsageError, writing
from kvcli.files import try_folder, write_output
from kvcli.render.bench.progress import progress
from kvcli.render.report import markdown, terminal_lines
from kvcli.render.terminal.screen import Screen
from kvcli.render.terminal.terminal import ASCII, Terminal, plural
from kvcli.safe_output import escaped, neutralise

if TYPE_CHECKING:
    from kvcli.bench.run import Bench
    from kvcli.commands.bench.request import BenchArguments
    from kvcli.commands.common.run_setup import Setup
    from kvcli.environment import Environment
    from kvcli.schemas.bench import BenchDocument

ENDINGS: dict[str, Format] = {
    ".md": "md", ".csv": "csv", ".json": "json", ".jsonl": "jsonl", ".html": "html", ".htm": "html", ".txt": "table"
}  # fmt: skip
FILE_WIDTH = 100  # columns of a table in a file


class Regression(KvcliError):
    code, exit = "regression", ExitStatus.REGRESSION


@dataclass(frozen=True)
class BenchOutput:
    """Destination of the result. With a file, the table (or, with --json, the object) is also printed."""

    world: Environment
    shown: Format  # on standard output
    file: Path | None = None
    written: Format = "json"  # in the file
    save: bool = False

    def finish(self, bench: Bench, status: int) -> int:
        """Print, write and save the result, and report failed conditions; returns the exit code."""
        from kvcli.bench.document import document_of

        document = document_of(bench)
        missed = [*self._keep(document)]
        self._print(document)
        if missed:  # last, when the figures are on the screen
            raise missed[0]
        failed = [check for check in document.checks if check.failed]
        if failed and status == ExitStatus.OK:
            from kvcli.bench.fail_if import words

            raise Regression(
                f"{plural(len(failed), 'condition')} of --fail-if are true",
                lines=[words(check) for check in failed],
                detail={"checks": [check.document() for check in failed]},
            )
        return status

    def _keep(self, document: BenchDocument) -> Iterator[BadInput]:
        """Write and save the result; yields the errors of failed writes."""
        for keep in (self._write, self._save):
            try:
                keep(document)
            except BadInput as error:
                yield error
        tables = {self.shown, self.written if self.file is not None else self.shown}
        if document.quality is not None and (lacking := tables & {"csv", "jsonl"}):
            self._tell(f"{' and '.join(sorted(lacking))} cannot contain the quality suite; json, md and html can")

    def _print(self, document: BenchDocument) -> None:
        out = Terminal.of(self.world, "stdout")
        if self.shown == "json":
            print_json(self.world, document)
            return
        text = rendered(document, self.shown, out.width, self.world)
        if self.shown == "table" and not out.unicode:
            text = text.replace("±", "+-").translate(ASCII)
        out.write(text)

    def _write(self, document: BenchDocument) -> None:
        if self.file is not None:
            with writing(self.file):
                write_output(self.file, rendered(document, self.written, FILE_WIDTH, self.world))
            self._tell(f"wrote {self.file}")

    def _save(self, document: BenchDocument) -> None:
        from kvcli.bench.history import save

        if self.save:
            with writing(folder(self.world)):
                path = save(folder(self.world), document)
            self._tell(f"saved {path}")

    def _tell(self, text: str) -> None:
        if not self.world.options.quiet:
            self.world.stderr.write(f"{text}\n")


def outlet(world: Environment, format: Format | None, output: str | None, save: bool) -> BenchOutput:
    """Return the destination. Refuses files that cannot be written, before anything is measured."""
    if world.options.json and format not in (None, "json") and output is None:
        raise UsageError(f"--json and --format {format} exclude each other", try_=["only one of them"])
    shown: Format = "json" if world.options.json else "table" if output else format or "table"
    if save:
        with writing(folder(world)):
            try_folder(folder(world))
    if output is None:
        return BenchOutput(world, shown, save=save)
    file, written = output_file(world, output, ENDINGS, format)
    return BenchOutput(world, shown, file, written, save)


def folder(world: Environment) -> Path:
    """Return the folder of saved results."""
    return world.paths.data / "bench"


def rendered(document: BenchDocument, format: Format, width: int, world: Environment) -> str:
    """Return the document in one of the formats, with a newline at the end."""
    from kvcli.render.bench import text

    if format == "json":
        return escaped(document.model_dump_json(by_alias=True)) + "\n"
    if format == "jsonl":
        return text.json_lines(document)
    if format == "md":
        return markdown(text.blocks(document))
    if format == "html":
        from kvcli.render.bench.html import html

        return html(document)
    if format == "csv" or world.options.plain:
        return text.separated(document, tabs=format != "csv")
    lines = terminal_lines(text.blocks(document, width), width)
    return "".join(f"{neutralise(line, one_line=True)}\n" for line in lines)


def print_history(world: Environment, model: str, ctx: str | None, workload: str | None) -> int:
    """Print earlier results of a model."""
    from kvcli.bench.history import history
    from kvcli.render.bench.text import trend

    note = Screen.of(world).note
    workloads = listed(workload or "")
    document = history(folder(world), model, contexts(ctx) if ctx else [], workloads, note)
    if world.options.json:
        print_json(world, document)
        return ExitStatus.OK
    if not document.entries:
        note(f"no saved result matches; to save one: kvcli bench {model} --save")
    for i, table in enumerate(trend(document)):
        if i:
            world.stdout.write("\n")
        print_table(world, table)
    return ExitStatus.OK


def print_dry_run(world: Environment, asked: BenchArguments) -> int:
    """Print the profiles and baselines, the prompts and the number of runs."""
    from kvcli.schemas.bench import BenchPlanDocument, PlannedSide

    args = asked.args
    cases = len(args.ctx) * len(args.workloads)
    document = BenchPlanDocument(
        args=args,
        baseline=asked.earlier_name or asked.sides[0][0],
        sides=[
            PlannedSide(name=name, kind=kind, profile_hash=profile.hash if kind == "profile" else None)
            for name, kind, profile in asked.sides
        ],
        runs=cases * len(asked.sides) * (args.reps + args.warmup),
        memory_runs=cases * len(asked.sides) if args.memory else 0,
        notes=asked.notes,
    )
    if world.options.json:
        print_json(world, document)
        return ExitStatus.OK
    sides = [[s.name, "profile" if s.kind == "profile" else "baseline", s.profile_hash or "–"] for s in document.sides]
    print_table(world, [["side", "kind", "profile hash"], *sides])
    prompts = plural(cases, "prompt")
    lines = [
        "",
        f"model      {args.model}",
        f"baseline   {document.baseline}",
        f"workloads  {', '.join(args.workloads)}",
        f"contexts   {', '.join(f'{n:,}' for n in args.ctx)} tokens, including {args.new:,} new tokens",
        f"runs       {document.runs}: {len(sides)} sides, {prompts}, {args.warmup} + {args.reps} repetitions",
        f"memory     {document.memory_runs} runs in separate processes",
        f"quality    {args.quality}",
        *(f"note: {note}" for note in document.notes),
    ]
    Terminal.of(world, "stdout").write("".join(f"{line}\n" for line in lines))
    return ExitStatus.OK


# ---- bench --calibrate ----


def print_calibration(setup: Setup) -> int:
    """Measure, and print a JSON object with --json, one line per figure with --plain, else sentences."""
    from kvcli.bench.run import refuse_unbuilt
    from kvcli.fit.calibrate import run_calibration

    world = setup.world
    refuse_unbuilt()
    with progress(Screen.of(world)) as bar:
        bar.show(0, 0, f"loading {setup.name}")
        document = run_calibration(world, setup.load, setup.profile, lambda words: bar.show(0, 0, words))
    if world.options.json:
        print_json(world, document)
    elif not world.options.plain:
        from kvcli.render.fit.plans import calibration_lines

        print_lines(world, calibration_lines(document, world.width()))
    else:
        said = document.document()
        passes = (said.get("model") or {}).pop("passes", [])
        print_table(world, [["figure", "value"], *(list(pair) for pair in flat("", said))])
        if passes:
            rows = [[str(p["rows"]), f"{p['context']:,}", f"{1000 * p['seconds']:.2f} ms"] for p in passes]
            world.stdout.write("\n")
            print_table(world, [["rows", "context", "one pass"], *rows])
    return ExitStatus.OK


def flat(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield all values of a document with their dotted names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from flat(f"{name}.{i}", inner)
    else:
        yield name, f"{value:.6g}" if isinstance(value, float) else str(value)
