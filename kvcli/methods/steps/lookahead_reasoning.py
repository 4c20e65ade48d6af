"""Accept reasoning steps of a smaller model if they are judged equivalent (Lookahead Reasoning, arXiv
2506.19830).

The smaller model drafts several reasoning steps. One pass of the target model verifies them all. Where it would have
continued with other tokens it writes its own step, for all steps in parallel. The first rejected step is replaced by
the target model's own, and later drafted steps are dropped. Unlike draft tokens, accepted steps change the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from kvcli.kv.footprint import Footprint, ModelSizes
from kvcli.settings.profile import Needs
from kvcli.settings.schema import DraftModelRef, Quant, Range

Cut = Literal["line", "sentence", "paragraph"]
CHECKPOINTS = 8  # recurrent states of the smaller model, if it has recurrent layers


@dataclass(frozen=True)
class LookaheadReasoning:
    """Lookahead Reasoning (2025, arXiv 2506.19830): accepts steps of a smaller model that are judged equivalent.

    Summaries are 1.00 times as fast; 0.33 of 18 steps are accepted, and 0.68 of lines change (measurements/lab-log.md).
    """

    model: str = ""  # smaller model that drafts steps, as after -m; with the same tokenizer
    quant: Quant = "none"  # precision of its weights
    ahead: Annotated[int, Range(1, 16)] = 3  # steps that it drafts before they are judged
    ends: Cut = "line"  # unit of text that is one step
    tokens: Annotated[int, Range(1, 512)] = 64  # tokens per step, at most
    judge: Literal["exact", "likely", "alike"] = "alike"  # same tokens; likely enough; or similar to the model's step
    likely: Annotated[float, Range(0, 1)] = 0.5  # mean token probability above which a step is likely enough
    alike: Annotated[float, Range(0, 1)] = 0.9  # share of tokens in common, in order, at which steps are similar
    alpha: Annotated[float, Range(0, below=1)] = 0.0  # target share of wrong steps, by adapting `likely`; 0 = fixed
    audit: Annotated[int, Range(1)] = 4  # adapt `likely` on every Nth differing step; the model writes that step itself
    rate: Annotated[float, Range(above=0, most=1)] = 0.1  # step size of adapting `likely`

    needs: ClassVar[Needs] = Needs(frozenset({"drafts", "evicts", "prunes"}), "passes and KV of its own steps alone")

    def __post_init__(self) -> None:
        if self.alpha and self.judge != "likely":
            raise ValueError(f'alpha = {self.alpha} has no effect: it needs judge = "likely"')

    @property
    def second(self) -> DraftModelRef:
        """Model that drafts the steps. Raises BadConfig if none is named."""
        from kvcli.errors import BadConfig

        if not self.model:
            raise BadConfig(
                'reasoning_steps.method = "lookahead" needs a draft model',
                code="no_draft_model",
                try_=["--set reasoning_steps.model=MODEL", "--set reasoning_steps.method=none"],
            )
        return DraftModelRef(self.model, self.quant)

    @property
    def takes(self) -> str:
        """Parts of the answer that the smaller model writes, in words."""
        how = {"exact": "identical", "likely": "likely enough", "alike": "similar to its own"}[self.judge]
        return f"takes steps of {self.model or 'a smaller model'} that are {how}"

    @property
    def rows(self) -> int:
        """Maximum rows of a pass; for memory planning."""
        return 1 + self.ahead * self.tokens

    def draft_footprint(self, n: int, of: ModelSizes) -> Footprint:
        """Return the footprint of the smaller model: KV of all n tokens; recurrent states of the sequence and of a
        pass."""
        return Footprint(n, n, beside=(1 + CHECKPOINTS + 1) * of.state, chunk=2048, rows=1)
