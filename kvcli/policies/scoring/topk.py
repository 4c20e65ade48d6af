"""Keep what scores best: what SnapKV, Expected Attention, KeyDiff and their like share. One file adds one score.

All share who is protected, how much is kept, how it is shared among heads (budget_split.py) and what counts as one
unit.

The prompt and the answer are apart, each with a budget of its own (SCOPE, arXiv 2412.13649). A prompt is compressed
once, when it has been read (or after each of its chunks, which bounds memory while reading), and then left alone. What
is generated later has its own places, filled anew at each boundary: the newest tokens and, of the others, those that
score best. A later prompt of a chat is compressed with what came since the one before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from kvcli.engine.policy.policy import PolicyDefaults, PolicyRequirements, ProtectedTokens
from kvcli.errors import BadModel
from kvcli.policies.scoring.headmap import head_rows
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.forward_request import Steps
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.compression_point import CompressionPoint
    from kvcli.engine.policy.policy import LayerContext
    from kvcli.engine.policy.projected_values import ProjectedValueNorms
    from kvcli.kv.slots import Masks, Slots
    from kvcli.kv.snapshot import SnapshotReader, Snapshottable, State
    from kvcli.policies.scoring.budget_split import Share

Alloc = Literal["uniform", "ada", "pyramid", "headmap", "global", "prefix"]
Unit = Literal["sentence", "shot"] | Annotated[int, Range(1)]
Post = Literal["none", "critical", "graph", "crush", "fair"]

SCORE = 6  # bytes of one while tokens are judged by attention: itself, whether it counts, and spare room


@dataclass(frozen=True, slots=True)
class Selection:
    """Who competes at a boundary, and for how much."""

    first: int  # slots from this position on
    each: int  # slots kept a head, on average
    most: int  # slots that a head can hold of those
    is_prompt: bool


@dataclass(slots=True)
class ScoreState:
    """Of one text."""

    heads: list[list[float]] = field(default_factory=list)  # [L][K] what the head map says, if there is one
    done: int = 0  # tokens of the prompts that were compressed
    asked: int = 0  # the same, should the last boundary have forgotten anything
    own: Snapshottable | None = None  # what the score remembers
    known: Any = None  # what it knows of the model
    outward: ProjectedValueNorms | None = None  # norms of what values add, where they count

    def snapshot(self) -> State:
        """What was compressed, and what the score remembers."""
        return {"done": self.done, "asked": self.asked, "own": self.own.snapshot() if self.own is not None else {}}

    def restore(self, given: SnapshotReader) -> None:
        """Become what gave this."""
        self.done, self.asked = given.number("done", given.n), given.number("asked", given.n)
        if self.own is not None:
            self.own.restore(given.part("own"))

    def compressed(self, at: CompressionPoint) -> int:
        """Tokens that compete no more; to be asked at each boundary, and again where that one failed.

        While nothing was forgotten, a text may be taken back and go on in another way: then all of it competes again.
        """
        is_again = at.phase == "read" and at.n_prompt == self.asked
        if self.asked and not at.is_whole and not is_again:
            self.done = self.asked
        self.asked = at.n_prompt if at.phase == "read" else 0
        return self.done


@dataclass(frozen=True)
class TopK(PolicyDefaults):
    """What all of them have in common; each defines `score`."""

    keep: Annotated[float, Range(above=0, most=1)] = 0.5  # share of a prompt's tokens kept, averaged over heads
    budget: Annotated[int, Range(0)] = 0  # tokens a head keeps of all prompts instead; 0 = by keep
    keep_new: Annotated[int, Range(0)] = 0  # tokens a head keeps of what was generated since; 0 = all
    grow_new: Annotated[int, Range(0)] = 0  # tokens of an answer over which keep_new is reached; 0 = from the first on
    per_chunk: bool = False  # compress after each chunk of a prompt: bounded memory while reading, poorer choice
    alloc: Alloc = "ada"  # who shares: heads alike, of a layer, all, by a file; layers by height, by what they hold
    floor: Annotated[float, Range(0, 1)] = 0.2  # share of the average that ada, headmap and global leave every head
    beta: Annotated[float, Range(1)] = 20.0  # of pyramid: the last layer keeps 1 / beta of the average
    headmap: str = ""  # of headmap: file of `kvcli profile-heads` or DuoAttention; auto = made once
    unit: Unit = 1  # judged together: neighbouring tokens (ChunkKV: 10 to 20), a sentence, an example of the prompt
    reuse_layers: Annotated[int, Range(1)] = 1  # layers on end that keep what the first of them does; ChunkKV takes 2
    post: Post = "none"  # done with scores: values weighed, likeness damped, representatives kept, each paragraph heard
    sinks: Annotated[int, Range(0)] = 4  # first tokens, always kept
    recent: Annotated[int, Range(1)] = 64  # newest tokens, always kept
    protect: bool = True  # always keep the system prompt and what tools said
    protect_question: bool = False  # always keep what the last message asks
    compression_interval: Annotated[int, Range(1)] = 64  # tokens between two evictions while answering

    name: ClassVar[str]  # in a profile
    by: ClassVar[str]  # what says how much a token is worth, in words
    is_share: ClassVar[bool] = True  # is a score a share of something, which can be weighed and added up?

    def __post_init__(self) -> None:
        always = self.sinks + self.recent
        for key in ("budget", "keep_new"):
            if 0 < getattr(self, key) < always:
                raise ValueError(f"{key} = {getattr(self, key)} is less than sinks + guard = {always}")
        if (self.alloc == "headmap") != bool(self.headmap):
            asked = 'alloc = "headmap"' if self.alloc == "headmap" else f'headmap = "{self.headmap}"'
            needs = "headmap, the name of a file" if self.alloc == "headmap" else 'alloc = "headmap"'
            raise ValueError(f"{asked} needs {needs}")
        if self.post != "none" and self.unit != 1:
            raise ValueError(f'post = "{self.post}" judges tokens one by one: it needs unit = 1')
        for key, value in (("post", self.post), ("alloc", self.alloc)):
            if value in ("critical", "graph", "prefix") and not self.is_share:
                raise ValueError(f'{key} = "{value}" needs scores that add up, and "{self.name}" has none: take "snap"')
        if self.grow_new and not self.recent < self.keep_new < self.grow_new:
            raise ValueError(f"grow_new = {self.grow_new} needs guard < keep_new < grow_new")
        if self.reuse_layers > 1 and self.alloc == "headmap":
            raise ValueError(f'reuse_layers = {self.reuse_layers} keeps a choice that alloc = "headmap" makes by layer')

    def score(self, s: Slots, at: LayerContext) -> Tensor:
        """How much the slots of one layer are worth: [K, S], higher = more; whatever for empty ones."""
        raise NotImplementedError

    def requirements(self, lm: LM) -> PolicyRequirements:
        """Raises BadInput for a head map that cannot be read, or is of another model."""
        return self.want(lm)

    def want(
        self, lm: LM, own: Callable[[], Snapshottable | None] = lambda: None, known: Any = None, **more: Any
    ) -> PolicyRequirements:
        """What all of them want, and what this score wants: `own` is what it remembers of a text, `known` what it knows
        of the model, `more` of PolicyRequirements.
        """
        from kvcli.engine.policy.projected_values import ProjectedValueNorms
        from kvcli.engine.sequence.token_kinds import QUESTION, SHOT, SYSTEM, TOOLS

        heads = head_rows(self.headmap, lm) if self.headmap else []
        asked = {QUESTION} if self.protect_question else set()
        guard = ProtectedTokens(
            self.sinks, self.recent, frozenset(asked | ({SYSTEM, TOOLS} if self.protect else set()))
        )
        spans = self.unit == "shot" or self.post == "fair"
        marks = frozenset(asked | ({SHOT} if spans else set()))
        outward = ProjectedValueNorms(lm, f"policy.{self.weighs}") if self.weighs else None
        if self.reuse_layers > 1 and len({of.n_kv_heads for of in lm.shapes}) > 1:
            raise BadModel(
                f"policy.reuse_layers = {self.reuse_layers} needs layers alike, and {lm.info.id} has uneven ones",
                code="policy_unsupported",
                try_=["--set policy.reuse_layers=1"],
            )
        given = {"kinds": spans or self.unit == "sentence", "marks": marks, "guard": guard, **more}
        return PolicyRequirements(memory=lambda: ScoreState(heads, own=own(), known=known, outward=outward), **given)

    @property
    def weighs(self) -> str:
        """The setting by which values count behind the output projection; "" = none."""
        return 'post = "critical"' if self.post == "critical" else ""

    def score_by_repetition(self, at: CompressionPoint, first: int) -> Steps[None] | None:
        """What a score has to see of the tokens from `first` on, before it scores them."""

    def select(self, at: CompressionPoint) -> Steps[Masks] | Masks:
        """What competes now and wins, and all that does not compete."""
        return self.best(at, at.memory.compressed(at))

    def best(self, at: CompressionPoint, done: int) -> Masks:
        """The same, where so many tokens of the text compete no more. A sliding layer keeps itself."""
        import torch

        from kvcli.policies.scoring import selection, token_units
        from kvcli.policies.scoring.score_stages import POSTS

        masks: list[Tensor | None] = [None] * len(at.layers)
        if (now := self._round(at, done)) is None or not at.open:
            return masks
        judged: deque[tuple[Tensor, Tensor, Tensor]] = deque()

        def scored() -> Iterator[tuple[Tensor, Tensor]]:
            for i in at.open[:: self.reuse_layers]:
                s, moment = at.layer(i)
                score, unit = self._score(s, moment, now)
                judged.append((s.pos, unit, score))
                yield score, s.pos

        firsts = at.open[:: self.reuse_layers]
        chosen = self._share(at, now)(scored(), now.each, now.most)
        for i, mask in zip(firsts, chosen, strict=True):
            pos, unit, score = judged.popleft()
            mask = token_units.uncut(mask, pos, unit, score.isfinite()) if self.unit != 1 else mask
            if self.post != "none":
                counts = (mask & (score > -torch.inf)).sum(1)  # [K]
                mask = selection.top(POSTS[self.post](score, *at.layer(i), counts), pos, counts)
            masks[i] = (mask | (pos < now.first)) & (pos >= 0)
        return self._reused(at, masks, firsts) if self.reuse_layers > 1 else masks

    def _reused(self, at: CompressionPoint, masks: list[Tensor | None], firsts: Sequence[int]) -> list[Tensor | None]:
        """What each first layer keeps, kept by those that go with it: the same positions of the same heads."""
        from kvcli.policies.scoring.token_units import by_position

        for first in firsts:
            mask, n = masks[first], len(at.ids)
            assert mask is not None
            kept = by_position(mask.byte(), at.layer(first)[0].pos, n, 0)  # [K, n]
            at_ = at.open.index(first)
            for i in at.open[at_ + 1 : at_ + self.reuse_layers]:
                pos = at.layer(i)[0].pos
                masks[i] = (kept.gather(1, pos.clamp(min=0).long()) > 0) & (pos >= 0)
        return masks

    def share(self, n: int) -> int:
        """Of n tokens of a prompt, how many a head keeps on average; what is protected may be more."""
        return min(n, max(1, round(self.keep * n))) if n > 0 else 0

    def room_new(self, written: int) -> int:
        """Places for an answer of so many tokens: a region that slides or, with `grow_new`, gets one more each so many.

        SCOPE's adaptive strategy: from the newest alone up to `keep_new`, in equal steps, as in the authors' code.
        """
        if not self.grow_new:
            return self.keep_new
        step = (self.grow_new - self.recent) // (self.keep_new - self.recent)
        return min(self.keep_new, self.recent + max(0, written - self.recent) // step)

    def slots(self, n: int) -> int:
        """Of a prompt of n tokens, once it has been read."""
        return min(n, self.budget or max(self.share(n), self.sinks + self.recent))

    def max_slots_in_prefill(self, n: int) -> int:
        """All of a prompt, unless it is compressed chunk by chunk."""
        return self.slots(n) if self.per_chunk else n

    def scoring_bytes(self, n: int, heads: int, kind: str, number: int) -> int:
        """One block of attention in float32; scores that look at keys alone take less at most lengths."""
        from kvcli.kernels.attention_mass.reference import ROWS, SCORES

        return SCORE * min(SCORES, ROWS * heads * n)

    @property
    def is_uneven(self) -> bool:  # type: ignore[override]
        return self.alloc != "uniform"

    @property
    def describe_kept(self) -> str:
        share = f"{self.budget:,} tokens a head of a prompt" if self.budget else f"{self.keep:.0%} of a prompt"
        return f"{share}, by {self.by}"

    def _round(self, at: CompressionPoint, done: int) -> Selection | None:
        """None: nobody competes now."""
        if at.phase == "answering":
            new = self.room_new(len(at.ids) - at.n_prompt)
            now = Selection(at.n_prompt, new, new, is_prompt=False)
        elif at.phase == "reading" and not self.per_chunk:
            return None
        elif self.budget:  # of all prompts together
            now = Selection(0, self.budget, at.n_prompt, is_prompt=True)
        else:
            now = Selection(done, self.share(at.n_prompt - done), at.n_prompt - done, is_prompt=True)
        return now if now.each >= 1 and now.most >= 1 else None

    def _score(self, s: Slots, at: LayerContext, now: Selection) -> tuple[Tensor, Tensor]:
        """[K, S]: -inf for those who do not compete, +inf for those who need not; [n] units by position, or none."""
        from kvcli.policies.scoring import token_units

        competes = s.pos >= max(0, now.first)
        score, unit = self.score(s, at), s.pos[0, :0]
        if self.unit != 1:
            unit = token_units.numbered(self.unit, at.kinds, at.n, s.pos.device)
            score = token_units.chunked(score, s.pos, unit, competes & ~at.protected)
        score = score.masked_fill(at.protected, float("inf"))
        return score.masked_fill(~competes, float("-inf")), unit

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
                return partial(budget_split.pyramid, beta=self.beta, n_layers=len(at.open[:: self.reuse_layers]))
            case "headmap":
                return partial(budget_split.headmap, heads=[at.memory.heads[i] for i in at.open], floor=self.floor)
            case "global":
                return partial(budget_split.all_layers, floor=self.floor)
            case "prefix":
                return budget_split.prefix
