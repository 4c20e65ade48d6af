"""The model that drafts for another one: found by name, held against the other's words, and loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from kvcli.errors import BadModel
from kvcli.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from kvcli.engine.lm import LM
    from kvcli.models.source import Source
    from kvcli.settings.schema import Load, Second

Tell = Callable[[str], None]


def load_second(
    wanted: Second,
    words: PreTrainedTokenizerBase,
    target: str,
    load: Load,
    find: Callable[[str], Source],
    cache: Path,
    tell: Tell | None = None,
) -> LM:
    """Load it beside `target`, whose words are given and which was loaded so; raises BadModel where it cannot draft.

    Neither its code nor its pickle files are trusted, whatever is of the other's: a profile may name it, too.
    """
    from kvcli.engine.lm import LM
    from kvcli.engine.weights import keeps_blocks
    from kvcli.models.gguf import unpack

    wants = replace(load, quant=wanted.quant, allow_pickle=False, trust_remote_code=False)
    found = unpack.ready(find(wanted.model), wants.dtype, cache, packs=keeps_blocks(wants), tell=tell)
    refuse_other_words(words, load_tokenizer(found, wants.trust_remote_code), target, found.id)
    return LM.load(found, **asdict(wants))


def refuse_other_words(words: PreTrainedTokenizerBase, its: PreTrainedTokenizerBase, target: str, draft: str) -> None:
    """Raises BadModel where an id is another token in either, but for tokens that were added to a vocabulary: of these,
    such as the marks of a chat template, siblings often have their own."""
    known, drafted = (_ordinary(tokenizer) for tokenizer in (words, its))
    if known and known == drafted:
        return
    other = sum(drafted.get(word) != i for word, i in known.items())
    raise BadModel(
        f"{draft} cannot draft for {target}: it has another tokenizer",
        code="other_tokenizer",
        lines=[f"of {len(known):,} tokens {other:,} are others or stand elsewhere; {draft} has {len(drafted):,}"],
        try_=["a smaller model of the same family as --draft MODEL", "--spec ngram, which needs no second model"],
    )


def _ordinary(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    added = tokenizer.get_added_vocab()
    return {word: i for word, i in tokenizer.get_vocab().items() if word not in added}
