"""Keep what scores best: SnapKV, Expected Attention, KeyDiff and their like, one name each.

All share who is protected, how much is kept, how it is shared among heads and what counts as one unit; each adds the
keys of its own score. The scores and their papers are in `scores.py`, phases in `phases.py`, shares in `budgets.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from kvcli.policies.base import Usual
from kvcli.schema import Range

if TYPE_CHECKING:
    from kvcli.policies.allocs import Alloc
    from kvcli.policies.base import Policy
    from kvcli.policies.scorers import Scorer

Share = Literal["uniform", "ada", "pyramid", "headmap", "global"]


@dataclass(frozen=True)
class TopK(Usual):
    """What all of them have in common."""

    keep: Annotated[float, Range(above=0, most=1)] = 0.5  # share of a prompt's tokens kept, averaged over heads
    budget: Annotated[int, Range(0)] = 0  # tokens a head keeps of all prompts instead; 0 = by keep
    keep_new: Annotated[int, Range(0)] = 0  # tokens a head keeps of what was generated since; 0 = all
    per_chunk: bool = False  # compress after each chunk of a prompt: bounded memory while reading, poorer choice
    alloc: Share = "ada"  # who shares: heads equally, heads of a layer, layers by height, heads by a file, all heads
    floor: Annotated[float, Range(0, 1)] = 0.2  # share of the average that ada, headmap and global leave every head
    beta: Annotated[float, Range(1)] = 20.0  # of pyramid: the last layer keeps 1 / beta of the average
    headmap: str = ""  # of headmap: file of `kvcli profile-heads` or DuoAttention with a number for each head
    unit: Annotated[int, Range(1)] = 1  # neighbouring tokens judged together; ChunkKV takes 10 to 20
    sinks: Annotated[int, Range(0)] = 4  # first tokens, always kept
    guard: Annotated[int, Range(1)] = 64  # newest tokens, always kept
    protect: bool = True  # always keep the system prompt
    every: Annotated[int, Range(1)] = 64  # tokens between two evictions while answering

    name: ClassVar[str]  # in a profile
    by: ClassVar[str]  # what says how much a token is worth, in words

    def __post_init__(self) -> None:
        always = self.sinks + self.guard
        for key in ("budget", "keep_new"):
            if 0 < getattr(self, key) < always:
                raise ValueError(f"{key} = {getattr(self, key)} is less than sinks + guard = {always}")
        if (self.alloc == "headmap") != bool(self.headmap):
            asked = 'alloc = "headmap"' if self.alloc == "headmap" else f'headmap = "{self.headmap}"'
            needs = "headmap, the name of a file" if self.alloc == "headmap" else 'alloc = "headmap"'
            raise ValueError(f"{asked} needs {needs}")

    def policy(self) -> Policy:
        """A policy that has read no text yet. Raises BadInput for a head map that cannot be read."""
        from kvcli.policies.phases import Phases

        return Phases(self, self.scorer(), self._shared())

    def scorer(self) -> Scorer:
        """What says how much slots are worth."""
        raise NotImplementedError

    def share(self, n: int) -> int:
        """Of n tokens of a prompt, how many a head keeps on average; what is protected may be more."""
        return min(n, max(1, round(self.keep * n))) if n > 0 else 0

    def slots(self, n: int) -> int:
        """Of a prompt of n tokens, once it has been read."""
        return min(n, self.budget or max(self.share(n), self.sinks + self.guard))

    def reading(self, n: int) -> int:
        """All of a prompt, unless it is compressed chunk by chunk."""
        return self.slots(n) if self.per_chunk else n

    @property
    def is_uneven(self) -> bool:
        return self.alloc != "uniform"

    @property
    def keeps(self) -> str:
        share = f"{self.budget:,} tokens a head of a prompt" if self.budget else f"{self.keep:.0%} of a prompt"
        return f"{share}, by {self.by}"

    def _shared(self) -> Alloc:
        from kvcli.policies import allocs
        from kvcli.policies.headmap import read_headmap

        match self.alloc:
            case "uniform":
                return allocs.Uniform()
            case "ada":
                return allocs.Ada(self.floor)
            case "pyramid":
                return allocs.Pyramid(self.beta)
            case "headmap":
                return allocs.HeadMap(read_headmap(self.headmap), self.floor, self.headmap)
            case "global":
                return allocs.Global(self.floor)


@dataclass(frozen=True)
class Snap(TopK):
    """Keep what the newest queries look at, with its neighbours (SnapKV, arXiv 2404.14469)."""

    queries: Annotated[int, Range(1)] = 32  # newest tokens whose queries vote
    pool: Annotated[int, Range(1)] = 7  # positions over which a vote is spread; odd
    pooling: Literal["max", "avg"] = "max"  # how

    name: ClassVar[str] = "snap"
    by: ClassVar[str] = "what its end looks at"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool % 2 == 0:
            raise ValueError(f"pool = {self.pool} has no middle: use an odd number")

    def scorer(self) -> Scorer:
        from kvcli.policies import scores
        from kvcli.policies.scorers import Stateless

        return Stateless(lambda s, at: scores.snap(s, at, self.queries, self.pool, self.pooling), self.queries)


@dataclass(frozen=True)
class Tova(TopK):
    """Keep what the newest query looks at, the same in all heads of a layer (TOVA, arXiv 2401.06104)."""

    alloc: Share = "uniform"

    name: ClassVar[str] = "tova"
    by: ClassVar[str] = "what its last token looks at"

    def scorer(self) -> Scorer:
        from kvcli.policies import scores
        from kvcli.policies.scorers import Stateless

        return Stateless(scores.tova, 1)


@dataclass(frozen=True)
class Expected(TopK):
    """Keep what queries to come are expected to look at, by value norm (Expected Attention, arXiv 2510.00636)."""

    samples: Annotated[int, Range(2)] = 256  # queries of the prompt that stand for those to come
    horizon: Annotated[int, Range(1)] = 512  # positions ahead over which their rotation is averaged
    covariance: bool = True  # count how queries vary, beside their mean
    epsilon: Annotated[float, Range(0)] = 0.0  # added to an expected attention before it is weighed by the value

    name: ClassVar[str] = "expected"
    by: ClassVar[str] = "what later questions should look at"

    def scorer(self) -> Scorer:
        from kvcli.policies.scorers import Expected as Scorer_

        return Scorer_(self.samples, self.horizon, self.covariance, self.epsilon, self.sinks)


@dataclass(frozen=True)
class KeyDiff(TopK):
    """Keep keys that are unlike the others (KeyDiff, arXiv 2504.15364); needs no queries."""

    name: ClassVar[str] = "keydiff"
    by: ClassVar[str] = "how unlike the others its keys are"

    def scorer(self) -> Scorer:
        from kvcli.policies import scores
        from kvcli.policies.scorers import Stateless

        return Stateless(lambda s, at: scores.keydiff(s))


@dataclass(frozen=True)
class KNorm(TopK):
    """Keep the shortest keys (L2 norm, arXiv 2406.11430): cheap, and weaker than lots on retrieval."""

    alloc: Share = "uniform"

    name: ClassVar[str] = "knorm"
    by: ClassVar[str] = "how short its keys are"

    def scorer(self) -> Scorer:
        from kvcli.policies import scores
        from kvcli.policies.scorers import Stateless

        return Stateless(lambda s, at: scores.knorm(s))


@dataclass(frozen=True)
class Lag(TopK):
    """Keep keys and values that stand out in the range of the part behind theirs (LagKV, arXiv 2504.04704)."""

    alloc: Share = "uniform"
    part: Annotated[int, Range(2)] = 128  # tokens of a part
    across: bool = False  # compare tokens of different parts, instead of keeping the same share of each

    name: ClassVar[str] = "lag"
    by: ClassVar[str] = "how far it stands out"

    def scorer(self) -> Scorer:
        from kvcli.policies import scores
        from kvcli.policies.scorers import Stateless

        return Stateless(lambda s, at: scores.lag(s, self.sinks, self.part, self.across))


@dataclass(frozen=True)
class H2O(TopK):
    """Keep what was looked at most so far: heavy hitters (H2O, arXiv 2306.14048; Scissorhands, 2305.17118)."""

    keep_new: Annotated[int, Range(0)] = 512  # tokens a head keeps of what was generated since; 0 = all
    queries: Annotated[int, Range(1)] = 64  # newest queries heard at a boundary; at least every, so that all count

    name: ClassVar[str] = "h2o"
    by: ClassVar[str] = "what was looked at most"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.queries < self.every:
            raise ValueError(f"queries = {self.queries} is less than every = {self.every}: some would never be heard")

    def scorer(self) -> Scorer:
        from kvcli.policies.scorers import Cumulative

        return Cumulative(recent=self.queries)
