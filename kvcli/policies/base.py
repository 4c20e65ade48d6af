"""What a policy is: the answer to one question, which slots to keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.feed import Asks
    from kvcli.kv.slots import Slots
    from kvcli.model import LM

# a prompt is being read in chunks; it has been read; the answer is being written
Phase = Literal["reading", "read", "answering"]


@dataclass(frozen=True, slots=True)
class Guard:
    """What no policy takes away: the engine keeps it whatever the policy says."""

    sinks: int = 0  # first tokens
    recent: int = 0  # newest tokens
    kinds: frozenset[int] = frozenset()  # kinds of tokens (kvcli.kinds), such as those of the system prompt

    def covers(self, s: Slots, kinds: Tensor) -> Tensor:
        """[K, S] bool: the slots that stay. `kinds` [T] by position."""
        newest = s.pos.amax(dim=1, keepdim=True) if s.n_slots else s.pos
        mask = (s.pos < self.sinks) | (s.pos > newest - self.recent)
        if self.kinds and kinds.shape[0]:
            of = kinds.to(s.pos.device)[s.pos.clamp(min=0).long()]
            for kind in self.kinds:
                mask |= of == kind
        return mask & (s.pos >= 0)


@dataclass(frozen=True, slots=True)
class Moment:
    """A boundary, as one layer sees it."""

    layer: int
    n_layers: int
    phase: Phase
    n_prompt: int  # tokens stored when the last prompt had been read; while one is being read, so far
    q: Tensor  # [H, w, D] the queries that the policy asked for, after rotary embedding; w may be 0
    q_pos: Tensor  # [w] their positions, rising; a query sees slots up to its own position
    kinds: Tensor  # [T] int8, token kinds by position; [0] where neither the policy nor its guard asks for them
    protected: Tensor  # [K, S] bool: slots that stay whatever the policy says
    scale: float  # of scores, before the softmax
    softcap: float = 0.0  # > 0: scores are bent by softcap * tanh(score / softcap)
    window: int | None = None  # tokens that this layer sees at all; None = all
    sink: Tensor | None = None  # [H] learned logits that take attention and give nothing (gpt-oss)

    @classmethod
    def of(
        cls,
        lm: LM,
        layer: int,
        phase: Phase,
        n_prompt: int,
        heard: tuple[Tensor, Tensor],
        kinds: Tensor,
        protected: Tensor,
    ) -> Moment:
        """In a layer of this model; `heard`: queries and their positions."""
        s, (q, pos) = lm.sights[layer], heard
        bends = s.scale, s.softcap, s.window
        return cls(layer, lm.n_layers, phase, n_prompt, q, pos, kinds, protected, *bends, lm.sinks[layer])


# slots to keep -> what that costs: nats by which the newest tokens of the prompt are predicted worse, on average
Loss = Callable[[Callable[["Slots", Moment], "Tensor"]], "Asks[float]"]


class Policy(Protocol):
    """Picks slots to keep. What happens to the rest (drop, demote, hide) is not its business."""

    @property
    def recent(self) -> int:
        """How many of the latest accepted queries it wants to see; 0 = none."""

    @property
    def lasting(self) -> bool:
        """Does it need the queries at probed positions also while the answer is written?"""

    @property
    def guard(self) -> Guard:
        """What stays whatever it says."""

    @property
    def wants_kinds(self) -> bool:
        """Does it tell kinds of tokens apart, beside its guard?"""

    @property
    def looks(self) -> bool:
        """Must it see all layers before it judges one?"""

    @property
    def replays(self) -> int:
        """How many of the newest tokens of a prompt to predict again before it chooses; 0 = none."""

    def probes(self, n: int) -> Sequence[int]:
        """Positions of a prompt of n tokens whose queries it wants to see once that is read."""

    def meet(self, lm: LM) -> None:
        """The model whose texts it will judge, before the first of them; raises BadModel for one that it cannot."""

    def start(self) -> None:
        """Forget what was learned of a text: another one begins."""

    def rereads(self, n: int) -> Sequence[tuple[int, int]]:
        """Pieces (start, end) of a text of n tokens to run once more behind it when a prompt has been read.

        Nothing of that is stored; `reread` hears of each piece before `look` and `keep`.
        """

    def reread(self, s: Slots, fresh: Slots, at: Moment) -> None:
        """One layer of a piece run once more: what is stored, the piece's own keys and values, and its queries."""

    def look(self, s: Slots, at: Moment) -> None:
        """A first sight of each layer in turn, before `keep` is asked of any; only if `looks`."""

    def settle_on(self, loss: Loss) -> Asks[None] | None:
        """When a prompt has been read, and all layers looked at: try out choices; each `loss` asks for a short pass."""

    def keep(self, s: Slots, at: Moment) -> Tensor:
        """Slots to keep -> bool [K, S]; heads may keep different numbers."""


class Quiet:
    """Needs no query, knows no model, remembers nothing."""

    recent = 0
    lasting = False

    def probes(self, n: int) -> Sequence[int]:
        return ()

    def meet(self, lm: LM) -> None:
        return

    def start(self) -> None:
        return

    def reread(self, s: Slots, fresh: Slots, at: Moment) -> None:
        return


class Plain(Quiet):
    """A policy that also judges each layer by itself: what most start from."""

    guard = Guard()
    wants_kinds = False
    looks = False
    replays = 0

    def rereads(self, n: int) -> Sequence[tuple[int, int]]:
        return ()

    def look(self, s: Slots, at: Moment) -> None:
        return

    def settle_on(self, loss: Loss) -> Asks[None] | None:
        return None


class Chosen(Protocol):
    """What the `[policy]` table of a profile becomes: each method's frozen dataclass."""

    @property
    def every(self) -> int | None:
        """Tokens between two boundaries while decoding; None = the past never changes."""

    def policy(self) -> Policy | None:
        """The policy of these settings, new and knowing no text; None = everything stays."""

    def slots(self, n: int) -> int:
        """How many of n slots a head keeps at a boundary, averaged over heads: what memory is planned with."""

    def reading(self, n: int) -> int:
        """How many slots a head holds at most while n tokens are read, the last chunk aside."""

    def again(self, n: int) -> int:
        """How many rows run once more behind a prompt of n tokens when it has been read: what its time is planned with.

        0 = it is read once. Each such row sees all that was stored by then. What the policy itself computes from its
        queries is not counted.
        """

    @property
    def is_uneven(self) -> bool:
        """May heads keep different numbers of slots?"""

    @property
    def keeps(self) -> str:
        """What stays of a text that is too long for it, in words; "" = everything."""


class Usual:
    """Settings under which a text is read once and forgotten from the start, alike in all heads."""

    def slots(self, n: int) -> int:
        raise NotImplementedError

    def reading(self, n: int) -> int:
        """As many while reading: each chunk's end is a boundary."""
        return self.slots(n)

    def again(self, n: int) -> int:
        """Nothing is read twice."""
        return 0

    @property
    def is_uneven(self) -> bool:
        return False


@dataclass(frozen=True)
class Everything(Usual):
    """Keep every token."""

    @property
    def every(self) -> int | None:
        return None

    def policy(self) -> Policy | None:
        return None

    def slots(self, n: int) -> int:
        return n

    @property
    def keeps(self) -> str:
        return ""
