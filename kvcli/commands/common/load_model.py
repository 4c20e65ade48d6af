"""Loading of a model from settings, with a message on the screen meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcli.chat.text_session import TextSession
    from kvcli.commands.common.memory_check import CheckedRun, MemoryWishes
    from kvcli.commands.common.run_setup import Setup
    from kvcli.render.terminal.screen import Screen
    from kvcli.settings.profile import Profile


def load_model(setup: Setup, profile: Profile, wanted: MemoryWishes, screen: Screen) -> tuple[CheckedRun, TextSession]:
    """Return the checked run, perhaps with a smaller context window, and a text session. Raises DoesNotFit."""
    from kvcli.commands.common.interrupt import insisting
    from kvcli.commands.common.memory_check import prepare
    from kvcli.render.turn.turn_view import busy_word

    with insisting(), busy_word(screen, f"loading {setup.name}") as busy:

        def tell(text: str) -> None:  # for a download, which draws its own progress bars
            if busy is not None:
                busy.stop()
            screen.note(text)

        run = prepare(setup, profile, wanted, tell)
        model = setup.load(run.profile, tell)
    run.notes = (*setup.overruled(run.profile), *run.notes, *(model.info.details if screen.verbose else ()))
    run.profile = model.profile  # the profile adapted to this model
    model.foretell, model.fits = run.estimate_memory, run.fits
    return run, model.open()
