"""`kvcli bench --calibrate`: measure the speed of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvcli.commands.common.output import print_json, print_lines, print_table
from kvcli.errors import ExitStatus

if TYPE_CHECKING:
    from kvcli.commands.common.run_setup import Setup


def print_calibration(setup: Setup) -> int:
    """Measure, and print a JSON object with --json, one line per figure with --plain, else sentences."""
    from kvcli.bench.run import refuse_unbuilt
    from kvcli.fit.calibrate import run_calibration
    from kvcli.render.bench.progress import progress
    from kvcli.render.terminal.screen import Screen

    world = setup.world
    refuse_unbuilt()
    with progress(Screen.of(world)) as bar:
        bar.show(0, 0, f"loading {setup.name}")
        document = run_calibration(world, setup.load, setup.profile(), lambda words: bar.show(0, 0, words))
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
