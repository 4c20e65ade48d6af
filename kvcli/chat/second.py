"""The model that drafts for another one: found by name, and loaded with what their words have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from kvcli.engine.drafter import Pair
from kvcli.models.spelling import spelling
from kvcli.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from kvcli.engine.lm import LM
    from kvcli.models.source import Source
    from kvcli.settings.schema import Load, Second

Tell = Callable[[str], None]


def load_second(
    target: LM,
    wanted: Second,
    words: PreTrainedTokenizerBase,
    load: Load,
    find: Callable[[str], Source],
    cache: Path,
    tell: Tell | None = None,
) -> Pair:
    """Load it beside `target`, whose words are given and which was loaded so; the same files are loaded once.

    Raises BadModel where it cannot draft. Neither its code nor its pickle files are trusted, whatever is of the
    other's: a profile may name it, too.
    """
    from kvcli.engine.lm import LM
    from kvcli.engine.weights import keeps_blocks
    from kvcli.models.gguf import unpack

    untrusted = replace(load, quant=wanted.quant, allow_pickle=False, trust_remote_code=False)
    wants = replace(untrusted, layers_on_gpu="auto")  # what was chosen is for the other's layers
    found = unpack.ready(find(wanted.model), wants.dtype, cache, packs=keeps_blocks(wants), tell=tell)
    if untrusted == load and (str(found.path), found.revision) == (target.info.path, target.info.revision):
        return Pair(target, target)
    respelled = spelling(words, load_tokenizer(found, wants.trust_remote_code))
    return Pair(target, LM.load(found, **asdict(wants)), respelled)
