"""Writers of answers: objects that write in place of plain decoding, if a method of the profile asks for it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.engine.forward_request import Passes
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.engine.stats import Step
    from kvcli.kv.slots import Usage
    from kvcli.settings.profile import Profile


class AnswerWriter(Protocol):
    """A writer of one sequence's answers, as a method of `[reasoning_steps]` or `[decode]` makes it."""

    def step(self, session: GenerationSession, stop: Collection[int], most: float) -> Passes[Step]:
        """Add at least one and at most `most` tokens, up to the first in `stop`; else as `GenerationSession.step`."""

    def usage(self) -> list[Usage]:
        """Return the memory that it holds between two steps."""


def writer_table(profile: Profile) -> str:
    """Return the table of the method that writes answers in place of plain decoding; "" = none does."""
    found = {"reasoning_steps": profile.reasoning_steps.takes, "decode": profile.decode.writer is not None}
    return next((table for table, writes in found.items() if writes), "")


def answer_writer(
    profile: Profile, lm: LM, pair: ModelPair | None, words: PreTrainedTokenizerBase
) -> AnswerWriter | None:
    """Return the writer of a sequence's answers; None = plain decoding. `pair`: the model and the one of the table.

    Raises BadConfig or BadModel if the method does not work with these models.
    """
    if "reasoning_steps" in profile.second_models:
        from kvcli.methods.steps.open_writer import step_writer

        assert pair is not None, "reasoning steps need a model pair"
        return step_writer(profile.reasoning_steps.settings, lm, pair, words)
    found: AnswerWriter | None = profile.decode.writer(lm) if writer_table(profile) else None
    return found
