"""Take steps that a smaller model writes where they are judged to say the same (LookaheadReasoning Reasoning, arXiv
2506.19830).

The smaller model writes some steps ahead. One pass of the model reads them all, and where it would have gone on in
other words it writes its own step, for all steps side by side. The first step that is not accepted is replaced by its
own, and what was drafted behind it goes. Unlike drafted tokens this changes the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from kvcli.settings.schema import DraftModelRef, Quant, Range

Cut = Literal["line", "sentence", "paragraph"]
CHECKPOINTS = 8  # of the smaller model's states, where some of its layers keep one


@dataclass(frozen=True)
class LookaheadReasoning:
    """Take steps that a smaller model writes where they are judged to say the same (arXiv 2506.19830)."""

    model: str = ""  # that writes them: as after -m; it needs the tokenizer of the one that judges
    quant: Quant = "none"  # precision of its weights
    ahead: Annotated[int, Range(1, 16)] = 3  # steps that it writes before they are judged
    ends: Cut = "line"  # what ends a step
    tokens: Annotated[int, Range(1, 512)] = 64  # of a step, at most
    judge: Literal["exact", "likely", "alike"] = "alike"  # the same tokens; likely enough; like the model's own step
    likely: Annotated[float, Range(0, 1)] = 0.5  # mean probability of its tokens from which a step is likely enough
    alike: Annotated[float, Range(0, 1)] = 0.9  # share of tokens in common, in order, from which two steps are alike
    alpha: Annotated[float, Range(0, below=1)] = 0.0  # share of wrong steps to hold `likely` to; 0 = it stays as set
    audit: Annotated[int, Range(1)] = 4  # of so many steps that differ the model writes one to learn `likely` from
    rate: Annotated[float, Range(above=0, most=1)] = 0.1  # how far `likely` moves by one of them

    # of the smaller model's passes, at most: of one that reads, and of one all of whose rows have logits
    second_rows: ClassVar[tuple[int, int]] = (2048, 1)

    def __post_init__(self) -> None:
        if self.alpha and self.judge != "likely":
            raise ValueError(f'alpha = {self.alpha} holds nothing: it is judge = "likely" that it moves')

    @property
    def second(self) -> DraftModelRef:
        """The model that writes ahead. Raises BadConfig where none is named."""
        from kvcli.errors import BadConfig

        if not self.model:
            raise BadConfig(
                'reasoning_steps.method = "lookahead" needs a model that writes ahead',
                code="no_draft_model",
                try_=["--set reasoning_steps.model=MODEL", "--set reasoning_steps.method=none"],
            )
        return DraftModelRef(self.model, self.quant, self)

    @property
    def takes(self) -> str:
        """What of the text is not the model's own, in words."""
        how = {"exact": "token by token the same", "likely": "likely enough", "alike": "like its own"}[self.judge]
        return f"takes steps of {self.model or 'a smaller model'} that are {how}"

    @property
    def rows(self) -> int:
        """Of a pass, at most: what memory is planned with."""
        return 1 + self.ahead * self.tokens

    @property
    def states(self) -> int:
        """Of layers of the smaller model that keep one, at most: of its text, and of a pass."""
        return 1 + CHECKPOINTS + 1

    def draft_slots(self, n: int, device: str = "cpu") -> int:
        """Of n tokens, those whose keys and values the smaller model has there."""
        return n
