"""The quality suite as a part of `kvcli bench`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcli.commands.common.flags import listed
from kvcli.errors import UsageError

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.commands.bench.request import BenchArguments
    from kvcli.environment import Environment
    from kvcli.render.bench.progress import Bar
    from kvcli.schemas.quality import QualityDocument
    from kvcli.settings.profile import Profile

Suite = Callable[["Model", "list[Profile]"], "QualityDocument | None"]


def suite(world: Environment, asked: BenchArguments, bar: Bar) -> Suite | None:
    """Return the suite that runs after the speed runs; None for --quality off and agree. Refuses unknown tasks."""
    typed = asked.args
    tasks = listed(typed.quality)
    if tasks in (["off"], ["agree"]):
        for flag, value in (
            ("--query-visible", typed.query_visible),
            ("--quality-n", typed.quality_n),
            ("--quality-lengths", typed.quality_lengths),
        ):
            if value:
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
