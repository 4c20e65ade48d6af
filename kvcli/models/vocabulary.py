"""Comparison of the vocabularies of two models on disk, by a sample of their words. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcli.models.gguf import header
from kvcli.settings.small_file import Unfit, parse_object, read_small

if TYPE_CHECKING:
    from kvcli.models.source import Source

SAME = 0.95  # share of the compared words
_LARGEST = 128 << 20  # bytes of a tokenizer.json

Words = Sequence[str | None]


def sample(source: Source) -> Words:
    """Words of the ids `header.SAMPLE`, after the letters that all vocabularies begin with; empty if unknown."""
    if source.is_gguf:
        listed = header.read(source.path).meta.get("tokenizer.ggml.tokens")
        return listed.words if isinstance(listed, header.Listed) else ()
    try:
        model = parse_object(read_small(source.path / "tokenizer.json", _LARGEST)).get("model")
    except (Unfit, OSError):
        return ()
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # pairs of a word and its score
        return [str(vocab[i][0]) if i < len(vocab) else None for i in header.SAMPLE]
    if not isinstance(vocab, dict):
        return ()
    by_id = {i: word for word, i in vocab.items()}
    return [by_id.get(i) for i in header.SAMPLE]


def alike(one: Words, other: Words) -> bool:
    """True if models with these words can read each other's ids."""
    same = sum(a == b for a, b in zip(one, other, strict=False) if a is not None)
    return same > 0 and same >= SAME * max(sum(word is not None for word in words) for words in (one, other))
