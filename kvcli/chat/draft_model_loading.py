"""Loading of a draft model: found by name, and paired with the target model by the tokens that both know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from kvcli.engine.drafting.drafter import ModelPair
from kvcli.errors import BadModel
from kvcli.models.refusals import is_assistant
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
    """Load a draft model beside `target`, whose tokenizer is `words` and whose settings are `load`.

    A model that drafts for itself is loaded once. Raises BadModel if the model cannot draft. Its code and pickle files
    are never trusted, even if those of the target are, because a profile may name the draft model.
    """
    from kvcli.engine.drafting.gemma4_assistant import load_assistant
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.loading.weights import keeps_quantized
    from kvcli.models.gguf import convert

    untrusted = replace(load, quant=wanted.quant, allow_pickle=False, trust_remote_code=False)
    wants = replace(untrusted, layers_on_gpu="auto")  # the user's choice counts layers of the target
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
        lines=["a model of its own drafts by spec.method = model, an assistant by spec.method = assistant"],
        try_=[f"--set spec.method={other} --set spec.model={wanted.model}, in place of --draft", "--spec ngram"],
    )
