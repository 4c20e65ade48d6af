"""Base of score-based eviction policies (SnapKV, Expected Attention, KeyDiff, ...), which keep the best-scoring slots.

Each policy file adds one score. Protected tokens, budgets, their split among heads (budget_split.py) and selection
units are shared.

Prompt and answer have separate budgets (SCOPE, arXiv 2412.13649). A prompt is compressed once, after prefill (or after
each prefill chunk, which bounds memory during prefill), and then left unchanged. Generated tokens have their own
budget, selected anew at each compression point: the newest tokens and the best-scoring older ones. A later prompt of a
chat is compressed together with the tokens since the previous prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from kvcli.engine.policy.policy import CompressionPoint, LayerContext, Policy, PolicyRequirements, ProtectedTokens
from kvcli.errors import BadModel
from kvcli.kv.footprint import NO_SIZES, Footprint, ModelSizes
from kvcli.policies.scoring.headmap import head_rows
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.forward_request import Passes
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.policy_inputs import ProjectedValueNorms
    from kvcli.kv.slots import Masks, Slots
    from kvcli.kv.snapshot import SnapshotReader, Snapshottable, State
    from kvcli.policies.scoring.budget_split import Share

Alloc = Literal["uniform", "ada", "pyramid", "headmap", "global", "prefix"]
Unit = Literal["sentence", "shot"] | Annotated[int, Range(1)]
Post = Literal["none", "critical", "graph", "crush", "fair"]

SCORE = 6  # bytes per score while tokens are scored by attention: the score, its mask, and spare capacity


def _scoring_bytes(n: int, heads: int) -> int:
    """Return the bytes of one float32 block of attention; scores from keys alone need less at most lengths."""
    from kvcli.kernels.attention_mass.reference import ROWS, SCORES  # late, because it imports torch

    return SCORE * min(SCORES, ROWS * heads * n)


@dataclass(frozen=True, slots=True)
class Selection:
    """The slots that compete at a compression point, and their budget."""

    first: int  # slots from this position on compete
    each: int  # slots kept per head, on average
    most: int  # most competing slots of a head
    is_prompt: bool


@dataclass(slots=True)
class ScoreState:
    """Scoring state of one sequence."""

    heads: list[list[float]] = field(default_factory=list)  # [L][K] weights of the head map, if any
    done: int = 0  # tokens of the prompts that were compressed
    asked: int = 0  # prompt tokens at the last compression point; 0 if that was in an answer
    own: Snapshottable | None = None  # per-sequence state of the score
    known: Any = None  # per-model data of the score
    outward: ProjectedValueNorms | None = None  # norms of projected values, if a stage uses them

    def snapshot(self) -> State:
        """Return the token counts that were compressed, and the per-sequence state of the score."""
        return {"done": self.done, "asked": self.asked, "own": self.own.snapshot() if self.own is not None else {}}

    def restore(self, given: SnapshotReader) -> None:
        """Load the state of a snapshot."""
        self.done, self.asked = given.number("done", given.n), given.number("asked", given.n)
        if self.own is not None:
            self.own.restore(given.part("own"))

    def compressed(self, at: CompressionPoint) -> int:
        """Return the number of tokens that no longer compete. Call it at each compression point, and again on a retry.

        While no slot was evicted, a sequence may be cropped and continued differently: then all its tokens compete.
        """
        is_again = at.phase == "read" and at.n_prompt == self.asked
        if self.asked and not at.is_whole and not is_again:
            self.done = self.asked
        self.asked = at.n_prompt if at.phase == "read" else 0
        return self.done


@dataclass(frozen=True)
class TopK(Policy):
    """Base class of score-based eviction policies; each subclass defines `score`."""

    keep: Annotated[float, Range(above=0, most=1)] = 0.5  # share of a prompt's tokens kept, averaged over heads
    budget: Annotated[int, Range(0)] = 0  # tokens of all prompts kept per head, instead of `keep`; 0 = use keep
    keep_new: Annotated[int, Range(0)] = 0  # generated tokens kept per head; 0 = all
    grow_new: Annotated[int, Range(0)] = 0  # answer tokens until keep_new grows to its full value; 0 = at once
    per_chunk: bool = False  # compress after each prefill chunk: bounded memory in prefill, worse selection
    alloc: Alloc = "ada"  # budget per head: equal, AdaKV, PyramidKV, from a file, over all heads, PrefixKV
    floor: Annotated[float, Range(0, 1)] = 0.2  # of ada, headmap, global: minimum of a head, as share of the average
    beta: Annotated[float, Range(1)] = 20.0  # of pyramid: the last layer keeps 1 / beta of the average
    headmap: str = ""  # of headmap: file of `kvcli profile-heads` or DuoAttention; auto = measured once
    unit: Unit = 1  # tokens selected together (ChunkKV: 10 to 20), or a sentence, or an example of the prompt
    reuse_layers: Annotated[int, Range(1)] = 1  # successive layers with the selection of the first; ChunkKV uses 2
    post: Post = "none"  # after scoring: CriticalKV, GraphKV, KVCrush, or a share for each paragraph (fair)
    sinks: Annotated[int, Range(0)] = 4  # first tokens, always kept
    recent: Annotated[int, Range(1)] = 64  # newest tokens, always kept
    protect: bool = True  # always keep the system prompt and tool results
    protect_question: bool = False  # always keep the question of the last message
    compression_interval: Annotated[int, Range(1)] = 64  # generated tokens between two compression points

    name: ClassVar[str]  # `policy.name` in a profile
    by: ClassVar[str]  # basis of the score: ends "keeps 50% of a prompt, by ...", where "its" is the prompt's
    is_share: ClassVar[bool] = True  # True if scores are shares of a total, which can be multiplied and added

    def __post_init__(self) -> None:
        always = self.sinks + self.recent
        for key in ("budget", "keep_new"):
            if 0 < getattr(self, key) < always:
                raise ValueError(f"{key} = {getattr(self, key)} is less than sinks + recent = {always}")
        if (self.alloc == "headmap") != bool(self.headmap):
            asked = 'alloc = "headmap"' if self.alloc == "headmap" else f'headmap = "{self.headmap}"'
            needs = "headmap, the name of a file" if self.alloc == "headmap" else 'alloc = "headmap"'
            raise ValueError(f"{asked} needs {needs}")
        if self.post != "none" and self.unit != 1:
            raise ValueError(f'post = "{self.post}" scores single tokens: it needs unit = 1')
        for key, value in (("post", self.post), ("alloc", self.alloc)):
            if value in ("critical", "graph", "prefix") and not self.is_share:
                raise ValueError(f'{key} = "{value}" needs scores that add up, unlike "{self.name}": use "snap"')
        if self.grow_new and not self.recent < self.keep_new < self.grow_new:
            raise ValueError(f"grow_new = {self.grow_new} needs recent < keep_new < grow_new")
        if self.reuse_layers > 1 and self.alloc == "headmap":
            raise ValueError(f'reuse_layers = {self.reuse_layers} keeps a choice that alloc = "headmap" makes by layer')

    def score(self, s: Slots, at: LayerContext) -> Tensor:
        """Return the scores of one layer's slots [K, S], higher = kept first; any value for empty slots."""
        raise NotImplementedError

    def requirements(self, lm: LM) -> PolicyRequirements:
        """Return the policy's requirements. Raises BadInput for an unreadable head map or one of another model."""
        return self.want(lm)

    def want(
        self, lm: LM, own: Callable[[], Snapshottable | None] = lambda: None, known: Any = None, **more: Any
    ) -> PolicyRequirements:
        """Return the requirements of all score policies and of this score. `own` makes its per-sequence state, `known`
        is its per-model data, `more` are further fields of PolicyRequirements.
        """
        from kvcli.engine.policy.policy_inputs import ProjectedValueNorms
        from kvcli.engine.sequence.state import QUESTION, SHOT, SYSTEM, TOOLS

        heads = head_rows(self.headmap, lm) if self.headmap else []
        asked = {QUESTION} if self.protect_question else set()
        always = frozenset(asked | ({SYSTEM, TOOLS} if self.protect else set()))
        guard = ProtectedTokens(self.sinks, self.recent, always)
        spans = self.unit == "shot" or self.post == "fair"
        marks = frozenset(asked | ({SHOT} if spans else set()))
        outward = ProjectedValueNorms(lm, f"policy.{self.weighs}") if self.weighs else None
        if self.reuse_layers > 1 and len({of.n_kv_heads for of in lm.shapes}) > 1:
            raise BadModel(
                f"policy.reuse_layers = {self.reuse_layers} needs layers alike, and {lm.info.id} has uneven ones",
                code="policy_unsupported",
                try_=["--set policy.reuse_layers=1"],
            )
        kinds = spans or self.unit == "sentence"
        given = {"recent_queries": self.queries, "kinds": kinds, "marks": marks, "guard": guard, **more}
        given["policy_state"] = lambda: ScoreState(heads, own=own(), known=known, outward=outward)
        return PolicyRequirements(**given)

    @property
    def splits_heads(self) -> bool:  # type: ignore[override]  # depends on settings
        return self.post == "none" and self.alloc != "headmap" and not self.weighs

    @property
    def queries(self) -> int:
        """Number of newest queries to record; 0 = the score is by keys and values alone."""
        return 0

    @property
    def weighs(self) -> str:
        """The setting that needs norms of projected values (W_o v); "" = none."""
        return 'post = "critical"' if self.post == "critical" else ""

    def score_by_repetition(self, at: CompressionPoint, first: int) -> Passes[None] | None:
        """Run the passes that a score needs before it scores the tokens from `first` on."""

    def select(self, at: CompressionPoint) -> Passes[Masks] | Masks:
        """Keep the best of the competing slots, and all slots that do not compete."""
        return self.best(at, at.policy_state.compressed(at))

    def best(self, at: CompressionPoint, done: int) -> Masks:
        """Select slots, where the first `done` tokens no longer compete. Sliding-window layers are not selected."""
        import torch

        from kvcli.policies.scoring import selection, token_units
        from kvcli.policies.scoring.score_stages import POSTS

        masks: list[Tensor | None] = [None] * len(at.layers)
        if (now := self._round(at, done)) is None or not at.full_layers:
            return masks
        judged: deque[tuple[Tensor, Tensor, Tensor]] = deque()

        def scored() -> Iterator[tuple[Tensor, Tensor]]:
            for i in at.full_layers[:: self.reuse_layers]:
                s, moment = at.layer(i)
                score, unit = self._score(s, moment, now)
                judged.append((s.pos, unit, score))
                yield score, s.pos

        firsts = at.full_layers[:: self.reuse_layers]
        share, ranks = self._share(at, now), at.lm.ranks
        spread = share if ranks.n == 1 or self._is_by_head(now) else partial(ranks.across_heads, share)
        chosen = spread(scored(), now.each, now.most)
        for i, mask in zip(firsts, chosen, strict=True):
            pos, unit, score = judged.popleft()
            mask = token_units.uncut(mask, pos, unit, score.isfinite()) if self.unit != 1 else mask
            if self.post != "none":
                counts = (mask & (score > -torch.inf)).sum(1)  # [K]
                mask = selection.top(POSTS[self.post](score, *at.layer(i), counts), pos, counts)
            masks[i] = (mask | (pos < now.first)) & (pos >= 0)
        return self._reused(at, masks, firsts) if self.reuse_layers > 1 else masks

    def _reused(self, at: CompressionPoint, masks: list[Tensor | None], firsts: Sequence[int]) -> list[Tensor | None]:
        """Copy the selection of each first layer to the next `reuse_layers` - 1 layers: same positions, same heads."""
        from kvcli.policies.scoring.token_units import by_position

        for first in firsts:
            mask, n = masks[first], len(at.ids)
            assert mask is not None
            kept = by_position(mask.byte(), at.layer(first)[0].pos, n, 0)  # [K, n]
            at_ = at.full_layers.index(first)
            for i in at.full_layers[at_ + 1 : at_ + self.reuse_layers]:
                pos = at.layer(i)[0].pos
                masks[i] = (kept.gather(1, pos.clamp(min=0).long()) > 0) & (pos >= 0)
        return masks

    def share(self, n: int) -> int:
        """Return how many of n prompt tokens a head keeps on average; there may be more protected tokens."""
        return min(n, max(1, round(self.keep * n))) if n > 0 else 0

    def room_new(self, written: int) -> int:
        """Return the budget of an answer of `written` tokens: constant or, with `grow_new`, growing with the answer.

        SCOPE's adaptive strategy: from `recent` tokens up to `keep_new`, in equal steps, as in the authors' code.
        """
        if not self.grow_new:
            return self.keep_new
        step = (self.grow_new - self.recent) // (self.keep_new - self.recent)
        return min(self.keep_new, self.recent + max(0, written - self.recent) // step)

    def footprint(self, n: int, of: ModelSizes = NO_SIZES) -> Footprint:
        """Return the footprint: all slots until the prompt is compressed, which is after each chunk or at its end."""
        kept = min(n, self.budget or max(self.share(n), self.sinks + self.recent))
        share = f"{self.budget:,} tokens per head of a prompt" if self.budget else f"{self.keep:.0%} of a prompt"
        return Footprint(
            kept,
            kept if self.per_chunk else n,
            scratch=_scoring_bytes(n, of.heads) if of.heads else 0,
            says=f"{share}, by {self.by}",
            is_uneven=self.alloc != "uniform",
        )

    def _round(self, at: CompressionPoint, done: int) -> Selection | None:
        """Return the competing slots and their budget, or None if no slot competes now."""
        if at.phase == "answering":
            new = self.room_new(len(at.ids) - at.n_prompt)
            now = Selection(at.n_prompt, new, new, is_prompt=False)
        elif at.phase == "reading" and not self.per_chunk:
            return None
        elif self.budget:  # one budget for all prompts together
            now = Selection(0, self.budget, at.n_prompt, is_prompt=True)
        else:
            now = Selection(done, self.share(at.n_prompt - done), at.n_prompt - done, is_prompt=True)
        return now if now.each >= 1 and now.most >= 1 else None

    def _score(self, s: Slots, at: LayerContext, now: Selection) -> tuple[Tensor, Tensor]:
        """Return scores [K, S], -inf = not competing, +inf = protected; and units by position [n], or none [0]."""
        from kvcli.policies.scoring import token_units

        competes = s.pos >= max(0, now.first)
        score, unit = self.score(s, at), s.pos[0, :0]
        if self.unit != 1:
            unit = token_units.numbered(self.unit, at.kinds, at.n, s.pos.device)
            score = token_units.chunked(score, s.pos, unit, competes & ~at.protected)
        score = score.masked_fill(at.protected, float("inf"))
        return score.masked_fill(~competes, float("-inf")), unit

    def _is_by_head(self, now: Selection) -> bool:
        """True if every head gets the same budget, whatever the other heads score."""
        return not now.is_prompt or self.alloc == "uniform"

    def _share(self, at: CompressionPoint, now: Selection) -> Share:
        from kvcli.policies.scoring import budget_split

        if not now.is_prompt:
            return budget_split.uniform
        match self.alloc:
            case "uniform":
                return budget_split.uniform
            case "ada":
                return partial(budget_split.ada, floor=self.floor)
            case "pyramid":
                return partial(budget_split.pyramid, beta=self.beta, n_layers=len(at.full_layers[:: self.reuse_layers]))
            case "headmap":
                heads = [at.policy_state.heads[i] for i in at.full_layers]
                return partial(budget_split.headmap, heads=heads, floor=self.floor)
            case "global":
                return partial(budget_split.all_layers, floor=self.floor)
            case "prefix":
                return budget_split.prefix
