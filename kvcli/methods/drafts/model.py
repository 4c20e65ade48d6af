"""Drafting with a separate, smaller model, over a part of the sequence that is small at any length (SpecExtend, arXiv
2505.20776).

Tokens are sampled from the target model and compared with draft tokens afterwards, so the answer is the same with any
draft model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from kvcli.drafts.tree.growth import Growth, Rule, rule
from kvcli.kv.footprint import Footprint, ModelSizes
from kvcli.methods.drafts.model_draft_settings import ModelDraftSettings
from kvcli.settings.schema import DraftModelRef, Pattern, Quant, Range
from kvcli.settings.values import keys_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvcli.drafts.draft_models.draft_model import DraftModel
    from kvcli.drafts.draft_models.separate_model import SeparateDraftModel
    from kvcli.drafts.tree.tree_drafter import TreeDrafter
    from kvcli.engine.drafting.drafter import ModelPair

_RETRIEVAL = Pattern(r"off|adaptive|every:[1-9]\d{0,4}", '"off", "adaptive" or "every:N" with N passes')
_READING = Pattern(r"lazy|full|window:[1-9]\d{0,8}", '"lazy", "full" or "window:N" with N tokens')


@dataclass(frozen=True)
class SeparateModelDraft(ModelDraftSettings):
    """Draft model (Leviathan et al., 2022, arXiv 2211.17192): drafts by a smaller model, and by prompt lookup.

    The widened demo answers lookups 1.82 times as fast; 0.741 of draft tokens are accepted (measurements/drafters.md).
    """

    model: str = ""  # draft model, as after -m; with another tokenizer its text is tokenized again
    quant: Quant = "none"  # precision of its weights
    depth: Annotated[int, Range(1, 64)] = 8  # draft tokens in a row, at most
    working: Annotated[int, Range(0)] = 1024  # tokens in the draft model's KV cache, first and newest; 0 = all
    sinks: Annotated[int, Range(0, 4096)] = 4  # first tokens among them
    prefill: Annotated[str, _READING] = "lazy"  # prompt tokens read: those it keeps; all; or all, attending to N tokens
    positions: Literal["original", "contiguous"] = "original"  # of kept tokens: as in the text, or consecutive
    tree: Literal["chain", "opt", "best", "sequoia", "cape"] = "chain"  # how draft passes form the draft tree
    tree_width: Annotated[int, Range(1, 64)] = 4  # draft tokens per draft pass, at most; a chain has one
    min_gain: Annotated[float, Range(0, 8)] = 0.0  # accepted tokens that a further draft pass must add; 0 = its cost
    lookup_verify: Annotated[int, Range(0, 32)] = 0  # copied tokens that a draft pass verifies, at most
    stop: Rule = "marginal"  # end of a draft: by measured times; "reject", "disco": also at `risk`
    risk: Annotated[float, Range(0, 1)] = 0.7  # rejection probability, of any or the newest token, to stop at
    # retrieval: some of the `working` tokens are chunks to which the target model attends
    retrieval: Annotated[str, _RETRIEVAL] = "off"  # when to choose chunks: never; when drafts fail; every N passes
    chunk: Annotated[int, Range(1, 1024)] = 32  # tokens per chunk
    recent: Annotated[int, Range(1)] = 256  # newest tokens, always kept
    scored_layers: Annotated[int, Range(1, 64)] = 1  # last layers of the target model whose attention scores chunks
    chunk_device: Literal["device", "host"] = "device"  # where the KV of all chunks is stored

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stop != "marginal" and not self.adaptive:
            raise ValueError(
                f'stop = "{self.stop}" needs adaptive = true: adaptive = false always drafts `depth` tokens'
            )
        if self.stop != "marginal" and self.min_gain:
            raise ValueError(f'min_gain = {self.min_gain} needs stop = "marginal", not stop = "{self.stop}"')
        if 0 < self.working <= self.sinks:
            raise ValueError(f"working = {self.working} must be more than sinks = {self.sinks}")
        if self.lookup_verify and not self.copies:
            raise ValueError(f"lookup_verify = {self.lookup_verify} needs copies = true")
        least = self.working if self.retrieval == "off" else self.recent
        if self._far and not 0 < least <= self._far:
            what = f"working = {self.working or 'all'}" if self.retrieval == "off" else f"recent = {self.recent}"
            raise ValueError(f'prefill = "{self.prefill}" covers fewer tokens than {what}')
        if self.retrieval != "off" and self._least > self.working:
            raise ValueError(
                f"working = {self.working or 'all'} is too small: sinks, recent and four chunks take "
                f'{self._least}; raise it, or set retrieval = "off"'
            )

    def ignored_keys(self) -> dict[str, str]:
        """Return the keys that have no effect: key -> the key that disables it."""
        needs = {
            "working": (self.working > 0, ("sinks", "positions")),
            "tree": (self.tree not in ("chain", "cape"), ("tree_width",)),
            "stop": (self.stop != "marginal", ("risk",)),
            "retrieval": (self.retrieval != "off", ("chunk", "recent", "scored_layers", "chunk_device")),
        }
        return super().ignored_keys() | {key: why for why, (reads, keys) in needs.items() if not reads for key in keys}

    @property
    def growth(self) -> Growth:
        return Growth(self.tree, self.branches, self.tree_width, self.max, self.min_gain)

    @property
    def _least(self) -> int:
        """Minimum `working` tokens with which a chunk can be chosen."""
        return self.sinks + self.recent + 4 * self.chunk

    @property
    def _far(self) -> int:
        """Tokens of the attention window of the draft model's prefill; 0 = none."""
        return int(self.prefill.partition(":")[2] or 0)

    @property
    def second(self) -> DraftModelRef:
        """Draft model of these settings. Raises BadConfig if none is named."""
        from kvcli.errors import BadConfig

        if not self.model:
            raise BadConfig(
                'spec.method = "model" needs a draft model',
                code="no_draft_model",
                try_=["--draft MODEL", "--set spec.model=MODEL"],
            )
        return DraftModelRef(self.model, self.quant)

    def footprint(self, n: int, of: ModelSizes) -> Footprint:
        """Return the memory of the sources, and of the draft model's copy of the token ids."""
        return super().footprint(n, of) + Footprint(host=8 * n)

    def draft_footprint(self, n: int, of: ModelSizes) -> Footprint:
        """Return the footprint of the draft model: the most of n tokens with KV on the device, in prefill and drafts,
        when more exist than are kept; recurrent states of the sequence, of draft tokens, and of a pass; and buffers of
        draft tokens. Captured are passes that catch up, draft passes, and a trial."""
        from kvcli.drafts.draft_models.separate_model import CHECKPOINTS, CHUNK
        from kvcli.drafts.sources.model_draft import LOOK
        from kvcli.kv.tiers.draft_buffers import ROOM

        ready = n if self.retrieval != "off" and (self.chunk_device == "device" or of.device == "cpu") else 0
        kept = min(n, max(self.working, self._far) + CHUNK) if self.working and self.prefill != "full" else n
        states, passes = (1 + CHECKPOINTS + self.depth + 1) * of.state, (1, 8, 1, 8, LOOK)
        return Footprint(ready + kept, ready + kept, states + ROOM * of.token, chunk=CHUNK, rows=LOOK, captured=passes)

    def drafter(self, ends: Collection[int] = (), pair: ModelPair | None = None) -> TreeDrafter:
        """Return a drafter without a sequence. Raises BadConfig if `working` exceeds the draft model's limit."""
        from kvcli.drafts.sources.model_draft import ModelDraft
        from kvcli.drafts.sources.prompt_lookup import PromptLookup
        from kvcli.errors import BadConfig

        assert pair is not None, "a drafter needs a model pair"
        draft, target = pair.draft, pair.target
        closes = self.positions == "contiguous" and self.working > 0
        of_keys = {
            "retrieval=off": (self.retrieval != "off", "retrieved chunks have no recurrent state"),
            "positions=original": (closes, "recurrent states cannot move to other positions"),
            "tree_width=1": (
                self.tree_width > 1 and "tree_width" not in self.ignored_keys(),
                "its drafts are a single chain",
            ),
        }
        for key, (is_asked, why) in of_keys.items():
            if is_asked:
                draft.recurrent_layers.refuse(draft.info.id, why, [f"--set spec.{key}"])
        if closes and self.working + self.depth > draft.limit:
            raise BadConfig(
                f"spec.working = {self.working:,} exceeds the context limit of draft model {draft.info.id}",
                code="beyond_model",
                lines=[f"the limit is {draft.limit:,} tokens, {self.depth} of them for drafts"],
                try_=[f"--set spec.working={draft.limit - self.depth}"],
            )
        copies = PromptLookup(self.min_match, self.max_match)
        sees = None if self.prefill == "lazy" else self._far
        chain = ModelDraft(
            self._guesser(pair, sees, closes),
            target,
            depth=self.depth,
            share=draft.info.weight_bytes / target.info.weight_bytes,
            ends=ends,
            growth=self.growth,
            cascade=(copies, self.lookup_verify) if self.lookup_verify else None,
        )
        return self.mixer(chain, copies, stop=rule(self.stop, self.risk))

    def _guesser(self, pair: ModelPair, sees: int | None, closes: bool) -> DraftModel:
        from kvcli.drafts.draft_models.cross_vocabulary import CrossVocabularyModel
        from kvcli.drafts.draft_models.separate_model import SeparateDraftModel
        from kvcli.errors import BadConfig

        wants = {
            "retrieval": self.retrieval != "off",
            "tree": self.tree not in ("chain", "cape"),
            "lookup_verify": self.lookup_verify,
        }
        asked = [key for key, is_asked in wants.items() if is_asked]
        if pair.spelling is not None and asked:
            raise BadConfig(
                f"spec.{asked[0]} needs a draft model with the tokenizer of {pair.target.info.id}",
                code="other_tokenizer",
                lines=[f"{pair.draft.info.id} has another tokenizer, and retokenized drafts are a single chain"],
                try_=[
                    " ".join(f"--set spec.{key}={keys_of(SeparateModelDraft)[key].default}" for key in asked),
                    "kvcli models show MODEL lists models that share it",
                ],
            )
        if self.retrieval != "off":
            return self._retrieval(pair, sees, closes)
        sibling = SeparateDraftModel(pair.draft, self.working, self.sinks, sees=sees, closes=closes)
        return sibling if pair.spelling is None else CrossVocabularyModel(sibling, pair.spelling)

    def _retrieval(self, pair: ModelPair, sees: int | None, closes: bool) -> SeparateDraftModel:
        from functools import partial

        from kvcli.drafts.draft_models.chunk_retrieval import ChunkRetrievalModel, scored_layers, trigger

        return ChunkRetrievalModel(
            pair.draft,
            self.working,
            self.sinks,
            sees=sees,
            closes=closes,
            size=self.chunk,
            recent=self.recent,
            attention_params=scored_layers(pair.target, self.scored_layers),
            trigger=partial(trigger, self.retrieval),
            is_far=self.chunk_device == "host",
        )
