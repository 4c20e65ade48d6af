"""Draft model candidates for a model: models on this machine, and models to download with the same tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from kvcli.demo import BUNDLED
from kvcli.errors import BadModel
from kvcli.models.catalog import BY_NAME, CatalogModel
from kvcli.models.tokenizer import alike, sample

if TYPE_CHECKING:
    from kvcli.models.source import Source
    from kvcli.schemas.listings import SiblingEntry

How = Literal["same tokenizer", "by re-encoding"]

MOST = 0.5  # bytes of a draft model over those of the target, at most
FOREIGN = 0.25  # the same, if draft tokens are re-encoded


def siblings(found: Source, here: Mapping[str, Source]) -> list[SiblingEntry]:
    """Return draft model candidates for `found`: same tokenizer first, smallest first; models to download last."""
    from kvcli.schemas.listings import SiblingEntry

    words, entries, listed = sample(found), list[SiblingEntry](), _listed(found)
    for name, other in here.items():
        share = other.nbytes / max(1, found.nbytes)
        is_same = alike(words, sample(other))
        is_toy = name in BUNDLED and not is_same  # it was trained on one kind of text
        if other.path != found.path and other.has_words and not is_toy and share <= (MOST if is_same else FOREIGN):
            how: How = "same tokenizer" if is_same else "by re-encoding"
            entries.append(SiblingEntry(name=name, how=how, bytes=other.nbytes, cost=round(share, 3), here=True))
    for one in BY_NAME.values():
        share = one.download / max(1, found.nbytes)
        if one.name not in here and one.is_offered and _family(one) == listed and share <= MOST:
            entry = SiblingEntry(
                name=one.name, how="same tokenizer", bytes=one.download, cost=round(share, 3), here=False
            )
            entries.append(entry)
    return sorted(entries, key=lambda e: (not e.here, e.how != "same tokenizer", e.bytes))


def drafted(one: SiblingEntry) -> str:
    """Describe a candidate in one line."""
    from kvcli.render.terminal.terminal import long_size

    get = "" if one.here else f"; kvcli models get {one.name}"
    return f"{one.name}: {one.how}, {long_size(one.bytes)}, one pass about {one.cost:.2f} passes of the model{get}"


def choose(found: Source, target: str, here: Mapping[str, Source]) -> str:
    """Return the name of a draft model on this machine. Raises BadModel with models to download."""
    able = siblings(found, here)
    if able and able[0].here:
        return able[0].name
    raise BadModel(
        f"no model on this machine can draft for {target}",
        code="no_draft_model",
        lines=[f"a draft model has at most {FOREIGN:.0%} of its size, or {MOST:.0%} with the same tokenizer"],
        try_=[*(f"kvcli models get {e.name}" for e in able), "--draft MODEL", "--spec ngram, which needs none"],
    )


def _listed(found: Source) -> tuple[str, int] | None:
    """Return the family of a model of the list; None for other models."""
    stem = found.path.name.removesuffix(".gguf")
    names = {said: one for one in BY_NAME.values() for said in (one.name, one.id, one.source)}
    one = names.get(found.id) or names.get(stem)
    return _family(one) if one else None


def _family(one: CatalogModel) -> tuple[str, int]:
    """Return what models with one tokenizer have in common: the first word of their class, and the vocabulary size."""
    return str(one.config["model_type"]).partition("_")[0], one.shape.vocab
