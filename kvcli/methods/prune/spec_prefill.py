"""A small model chooses the chunks of a prompt that the large one reads: SpecPrefill (Liu et al., arXiv 2502.02789).

A token's score is the attention of the prompt's last token, and of tokens that the draft model writes after it, as a
mean: the highest of any head of any layer, each averaged over neighbours. Chosen tokens keep their positions. The draft
model reads the whole text for each prompt, so that its choice depends on nothing else, and none of its KV stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

from kvcli.errors import BadConfig, ContextOverflow
from kvcli.kv.footprint import Footprint, ModelSizes
from kvcli.methods.prune.layer_pruner import at_first
from kvcli.methods.prune.protected_tokens import PruneSettings
from kvcli.settings.schema import DraftModelRef, Quant, Range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.engine.forward_request import Passes, Rows
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.prefill.layerwise import Pruner
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.methods.prune.pruned_prefill import PrunedPrefill

PART = 512  # most rows of a pass of the draft model
OFF = "--set prune.method=none"


@dataclass(frozen=True)
class SpecPrefill(PruneSettings):
    """SpecPrefill (Liu et al., 2025, arXiv 2502.02789): reads the chunks of a prompt that a draft model attends to.

    Without looking ahead, lookups of the widened demo begin 2.97 times sooner (measurements/lab-log.md).
    """

    model: str = ""  # draft model with the same tokenizer, as after -m
    quant: Quant = "none"  # precision of its weights
    keep: Annotated[float, Range(above=0, most=1)] = 0.3  # share of the prompt that is chosen, besides protected tokens
    chunk: Annotated[int, Range(1, 1024)] = 32  # tokens that are chosen together
    ahead: Annotated[int, Range(0, 64)] = 8  # tokens that the draft model writes, whose attention counts as well
    pool: Annotated[int, Range(1)] = 13  # neighbours over which attention is averaged

    @property
    def second(self) -> DraftModelRef:
        """Draft model of these settings. Raises BadConfig if none is named."""
        if not self.model:
            said = 'prune.method = "spec_prefill" needs a draft model'
            raise BadConfig(said, code="no_draft_model", try_=["--set prune.model=MODEL", OFF])
        return DraftModelRef(self.model, self.quant)

    @property
    def describe_read(self) -> str:
        """Share of a long prompt that is read, in words."""
        return f"{self.keep:.0%} of a prompt of {self.min_prompt:,} tokens or more, chosen by a draft model"

    def describe(self, lm: LM) -> str:
        """Describe what is read. Raises BadModel if the model has recurrent layers."""
        lm.recurrent_layers.refuse(lm.info.id, "they read every token of a prompt", [OFF])
        how = f"{self.keep:.0%} continue, in chunks of {self.chunk} that the draft model attends to most"
        return f"of a prompt of {self.min_prompt:,} tokens or more {how}; {self.always}"

    def draft_footprint(self, n: int, of: ModelSizes) -> Footprint:
        """Return the footprint of the draft model while it reads: KV of all tokens, recurrent states of two passes."""
        return Footprint(n, n, beside=2 * of.state, chunk=PART, rows=1, captured=(1,))

    def companion(self, pair: ModelPair) -> PrunedPrefill:
        """Return the companion of a sequence whose prompts are read in part. Raises BadConfig for another tokenizer."""
        from kvcli.methods.prune.pruned_prefill import PrunedPrefill

        if pair.spelling is not None:
            said = f"prune.model = {self.model} has another tokenizer than {pair.target.info.id}"
            raise BadConfig(said, code="other_tokenizer", try_=["kvcli models show MODEL lists others", OFF])
        return PrunedPrefill(pair, self)

    def bind(self, pair: ModelPair, text: GenerationSession, rows: Rows, must: set[int]) -> Passes[Pruner | None]:
        """Return the pruner, or None for a short prompt. Raises ContextOverflow if the draft model reads less."""
        if rows.n_rows < self.min_prompt:
            return None
        if len(text.ids) > (most := pair.draft.limit - self.ahead):
            said = f"prune.model = {self.model} reads at most {most:,} tokens, not {len(text.ids):,}"
            raise ContextOverflow(said, try_=[f"--ctx {most}", OFF])
        import torch

        scores = (yield from self._scores(pair.draft, text.ids))[rows.pos[0] :]
        means, chosen = [float(part.mean()) for part in torch.split(scores, self.chunk)], set[int]()
        for i in sorted(range(len(means)), key=lambda i: -means[i]):
            if len(chosen) < self.keep * len(scores):
                chosen |= {*range(i * self.chunk, min(len(scores), (i + 1) * self.chunk))}
        return partial(at_first, sorted(must | chosen & {*range(rows.n_rows)}))  # the last token waits for its pass

    def _scores(self, lm: LM, text: Sequence[int]) -> Passes[Tensor]:
        """Return the score of each token [n] by attention of the draft model `lm`."""
        import torch
        from torch.nn.functional import avg_pool1d

        from kvcli.engine.forward_request import ForwardRequest, Rows
        from kvcli.engine.sequence.commit import commit
        from kvcli.kernels.attention_mass import attention_mass
        from kvcli.kv.recurrent_state import RecurrentStates
        from kvcli.kv.tiers.dense import Dense

        kv, states = Dense(lm.shapes, lm.dtype, lm.device), RecurrentStates(lm.recurrent_layers.like, 1)
        ids, n, at = [min(i, lm.vocab - 1) for i in text], len(text), 0  # padding ids are higher
        found: list[Tensor] = []
        kv.reserve(n + self.ahead)
        while at < len(ids):
            rows = Rows.chain(ids[at : max(at + 1, min(at + PART, n - 1))], at)
            want = [0] if at >= n - 1 else []
            made = yield ForwardRequest(lm, rows, kv, want=want, record_queries=want, is_prompt=not want, states=states)
            commit(kv, rows, made, range(rows.n_rows))
            best = torch.zeros(n, device=lm.device)
            for layer in lm.storing if want else ():
                s, of, newest = kv.slots(layer), lm.attention_params[layer], torch.tensor([at], device=lm.device)
                seen = made.queries[layer], newest, s.k, s.pos, of.scale
                mass = attention_mass(*seen, softcap=of.softcap, window=of.window, over="none").flatten(0, 2)[:, :n]
                best = best.maximum(avg_pool1d(mass, self.pool, 1, self.pool // 2, False, False).amax(0)[:n])
            if want:
                found.append(lm.ranks.reduce(best, "max").cpu())
                if len(found) <= self.ahead and (token := int(made.logits[0].argmax())) not in lm.stop_ids:
                    ids.append(token)
            at += rows.n_rows
        return torch.stack(found).mean(0)
