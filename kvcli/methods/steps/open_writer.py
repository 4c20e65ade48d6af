"""Opening of the writer of reasoning steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.errors import BadConfig
from kvcli.kv.tiers.dense import Dense
from kvcli.methods.drafts.off import Off
from kvcli.methods.steps.lookahead_reasoning import CHECKPOINTS, LookaheadReasoning
from kvcli.methods.steps.step_writer import Writer, ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.engine.hf.lm import LM


def step_writer(settings: LookaheadReasoning, lm: LM, pair: ModelPair, words: PreTrainedTokenizerBase) -> Writer:
    """Return the writer of a sequence's answers. Raises BadConfig if the two models have different tokenizers."""
    if pair.spelling is not None:
        raise BadConfig(
            f"{settings.model} cannot write steps for {lm.info.id}: it has another tokenizer",
            code="other_tokenizer",
            try_=[
                "--set reasoning_steps.model=MODEL, one of the same family",
                "--draft MODEL: drafts may be tokenized again, steps not",
            ],
        )
    kv = Dense(pair.draft.shapes, pair.draft.dtype, pair.draft.device)
    draft = GenerationSession(pair.draft, kv, Off(), Sampler(), checkpoints=CHECKPOINTS)
    return Writer(settings, draft, ends(words, settings.ends))
