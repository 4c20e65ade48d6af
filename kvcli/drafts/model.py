"""Draft with a second, smaller model that shares the tokenizer (Leviathan et al., arXiv 2211.17192), over a part of the
past that stays small however long the text is (SpecExtend, arXiv 2505.20776).

Tokens are drawn from the model that writes and compared with guesses afterwards, so whatever drafts, the text is the
same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from kvcli.drafts.ngram import Ngram
from kvcli.settings.schema import Form, Quant, Range, Second

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvcli.drafts.mixer import Mixer
    from kvcli.engine.drafter import Pair

_READING = Form(r"lazy|full|window:[1-9]\d{0,8}", '"lazy", "full" or "window:N" with N tokens')


@dataclass(frozen=True)
class Model(Ngram):
    """Guess with a second, smaller model of the same tokenizer, and copy where the text repeats itself."""

    model: str = ""  # that drafts: as after -m; it needs the tokenizer of the one that writes
    quant: Quant = "none"  # precision of its weights
    depth: Annotated[int, Range(1, 64)] = 8  # tokens that it guesses in a row, at most
    working: Annotated[int, Range(0)] = 1024  # tokens that it keeps of the text, the first and the newest; 0 = all
    sinks: Annotated[int, Range(0, 4096)] = 4  # first tokens among them
    prefill: Annotated[str, _READING] = "lazy"  # what of a prompt it reads: what it keeps; all; or all, N tokens far
    positions: Literal["original", "contiguous"] = "original"  # of what it keeps: as in the text, or closed up
    copies: bool = True  # guess from the text as well; where a copy is all but sure, the model is not asked

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.working <= self.sinks:
            raise ValueError(f"working = {self.working} leaves nothing beside sinks = {self.sinks}")
        if self._far and not 0 < self.working <= self._far:
            raise ValueError(f'prefill = "{self.prefill}" reads no farther than working = {self.working or "all"}')

    @property
    def _far(self) -> int:
        """Tokens of a window in which a prompt is read, 0 = none."""
        return int(self.prefill.partition(":")[2] or 0)

    @property
    def second(self) -> Second:
        """The model that drafts. Raises BadConfig where none is named."""
        from kvcli.errors import BadConfig

        if not self.model:
            raise BadConfig(
                'spec.method = "model" needs a model that drafts',
                code="no_draft_model",
                try_=["--draft MODEL", "--set spec.model=MODEL"],
            )
        return Second(self.model, self.quant)

    def kept(self, n: int) -> int:
        """Of n tokens, those whose keys and values it has at most: more than stay while it reads, or guesses."""
        from kvcli.drafts.sibling import CHUNK

        return min(n, max(self.working, self._far) + CHUNK) if self.working and self.prefill != "full" else n

    def tables(self, n: int) -> int:
        """Bytes of the index of n tokens, and of the text, which the model's side keeps as well."""
        return 8 * n + (super().tables(n) if self.copies else 0)

    def drafter(self, ends: Collection[int] = (), pair: Pair | None = None) -> Mixer:
        """A drafter that knows no text yet. Raises BadConfig where `working` tokens are more than the model that drafts
        was made for."""
        from kvcli.drafts.chain import Chain
        from kvcli.drafts.copies import Copies
        from kvcli.drafts.mixer import Mixer
        from kvcli.drafts.sibling import Sibling
        from kvcli.errors import BadConfig

        assert pair is not None, "somebody must draft"
        draft, target = pair.draft, pair.target
        closes = self.positions == "contiguous" and self.working > 0
        if closes and self.working + self.depth > draft.limit:
            raise BadConfig(
                f"spec.working = {self.working:,} is more than {draft.info.id}, which drafts, was made for",
                code="beyond_model",
                lines=[f"its limit is {draft.limit:,} tokens, {self.depth} of them for guesses"],
                try_=[f"--set spec.working={draft.limit - self.depth}"],
            )
        chain = Chain(
            Sibling(draft, self.working, self.sinks, closes=closes),
            depth=self.depth,
            sees=None if self.prefill == "lazy" else self._far,
            vocab=target.vocab,
            share=draft.info.weight_bytes / target.info.weight_bytes,
            ends=ends,
        )
        copies = [Copies(self.min_match, self.max_match)] if self.copies else []
        return Mixer(self, [*copies, chain], chain=chain)
