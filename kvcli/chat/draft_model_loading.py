"""The model that drafts for another one: found by name, and loaded with what their words have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from kvcli.engine.drafting.drafter import ModelPair
from kvcli.errors import BadModel
from kvcli.models.draft_heads import is_assistant
from kvcli.models.retokenizer import spelling
from kvcli.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from kvcli.engine.hf.lm import LM
    from kvcli.models.source import Source
    from kvcli.settings.schema import DraftModelRef, Load

Tell = Callable[[str], None]


def load_draft_model(
    target: LM,
    wanted: DraftModelRef,
    words: PreTrainedTokenizerBase,
    load: Load,
    find: Callable[[str], Source],
    cache: Path,
    tell: Tell | None = None,
) -> ModelPair:
    """Load it beside `target`, whose words are given and which was loaded so; the same files are loaded once.

    Raises BadModel where it cannot draft. Neither its code nor its pickle files are trusted, whatever is of the
    other's: a profile may name it, too.
    """
    from kvcli.engine.drafting.gemma4_assistant import load_assistant
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.loading.weights import keeps_quantized
    from kvcli.models.gguf import convert

    untrusted = replace(load, quant=wanted.quant, allow_pickle=False, trust_remote_code=False)
    wants = replace(untrusted, layers_on_gpu="auto")  # what was chosen is for the other's layers
    found = convert.convert_if_needed(find(wanted.model), wants.dtype, cache, packs=keeps_quantized(wants), tell=tell)
    if is_assistant(found.config) != wanted.is_assistant:
        raise _of_another_method(wanted)
    if untrusted == load and (str(found.path), found.revision) == (target.info.path, target.info.revision):
        return ModelPair(target, target)
    if wanted.is_assistant:
        return ModelPair(target, load_assistant(target, found, wants))
    respelled = spelling(words, load_tokenizer(found, wants.trust_remote_code))
    return ModelPair(target, LM.load(found, **asdict(wants)), respelled)


def _of_another_method(wanted: DraftModelRef) -> BadModel:
    what, other = ("no assistant of a Gemma 4", "model") if wanted.is_assistant else ("an assistant", "assistant")
    return BadModel(
        f"{wanted.model} is {what}",
        code="draft_head",
        lines=["a complete model drafts with spec.method = model, an assistant with spec.method = assistant"],
        try_=[f"--set spec.method={other} --set spec.model={wanted.model}, instead of --draft", "--spec ngram"],
    )
