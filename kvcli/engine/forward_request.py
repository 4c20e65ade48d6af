"""Forward requests and results: what one sequence asks of one forward pass over one model, and what it gets.

Code that needs a model (a session, a drafter, a policy) is a generator that yields a `ForwardRequest` and is sent the
`ForwardResult`. It never calls a model itself. So the caller of the generator decides whether a pass runs one sequence
or a batch of many.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isgenerator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from kvcli.engine.sequence.sampler import STUCK, Sampler
from kvcli.engine.sequence.token_history import TokenHistory
from kvcli.kernels.attend_invariant.tables import sent

if TYPE_CHECKING:
    from kvcli.engine.drafting.pass_timer import Company
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.sequence.constraint import Constraint
    from kvcli.kv.recurrent_state import RecurrentStates
    from kvcli.kv.slots import CacheReader
    from kvcli.kv.views.view import CompactView

# Rows: the tokens of one forward pass, laid out as a draft tree followed by lookahead rows.


LAST_STATE = (-1,)  # the input of the output layer


class NeededTensors(NamedTuple):
    """Tensors of a step's tree rows that its drafter reads."""

    states: tuple[int, ...] = ()  # inputs of layers, as `record_hidden_states`
    queries: bool = False


class Choice(NamedTuple):
    """A draft token that the host need not have read: one of the likeliest tokens after a row of a captured pass."""

    of: ForwardResult
    row: int  # index into `want` of the pass
    rank: int  # 0 = the likeliest

    def read(self) -> int:
        """Return the token's id, once its pass has ended."""
        return int(self.of.hook_output(self.row)[self.rank])


RanRow = tuple["ForwardResult", int]  # row of a pass: the pass, and the index into its `want`
# rows whose tokens are choices, level by level: index of the row before (0 = a root, 1 = the first of these), rank
ChosenRows = Sequence[tuple[int, int]]


class TokenIds(Sequence[int]):
    """Token ids, the last of which are choices. To read one of these waits for its pass."""

    def __init__(self, ids: Sequence[int], choices: Sequence[Choice]) -> None:
        self._ids, self._choices = ids, choices

    def __len__(self) -> int:
        return len(self._ids) + len(self._choices)

    def __getitem__(self, i: Any) -> Any:
        at = range(len(self))[i]
        return self._ids[at] if at < len(self._ids) else self._choices[at - len(self._ids)].read()

    @staticmethod
    def of(ids: Sequence[int], choices: Sequence[Choice]) -> Sequence[int]:
        """Return these ids, then the choices if there are any."""
        return TokenIds(ids, choices) if choices else ids


@dataclass(frozen=True, slots=True)
class LookaheadRows:
    """Lookahead rows, which are not verified and serve the drafter only (FAFO's fumbling, Lookahead's Jacobi
    window)."""

    ids: list[int]  # F tokens
    offset: list[int]  # position minus the pending token's position, one per row
    sees: Tensor  # [F, F] bool: row i attends to row j
    wanted: list[int]  # rows whose logits the drafter needs, rising; the output layer runs only for these


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposal of a drafter: a tree of draft tokens below the pending token.

    `parent[i]` is an index into `ids`, or -1 for a child of the pending token; a parent comes before its children.
    Siblings have different ids.
    """

    ids: Sequence[int]
    parent: list[int]
    lookahead: LookaheadRows | None = None
    # tensors to return, in `Step.queries` and `Step.hidden`
    needs: NeededTensors = field(default_factory=NeededTensors)
    ahead: int = 0  # without draft tokens: one-row passes to come, which a captured pass may start early
    choices: Sequence[Choice] = ()  # draft tokens after `ids`, by reference; then without lookahead rows

    @staticmethod
    def chain(ids: Sequence[int]) -> Draft:
        """Return a draft without branches."""
        return Draft(list(ids), list(range(-1, len(ids) - 1)))

    def depth(self) -> list[int]:
        """Return the depth of each node: 1 for a child of the pending token."""
        depth: list[int] = []
        for p in self.parent:
            depth.append(1 if p < 0 else depth[p] + 1)
        return depth


@dataclass(frozen=True, slots=True)
class Rows:
    """The N tokens of one forward pass, in host memory. A pass copies to the device what it needs there."""

    ids: Sequence[int]  # N
    pos: Sequence[int]  # N, absolute; a range for a chain
    tree_mask: Tensor | None  # [N, N] bool on the CPU: row i attends to row j of the pass; None = causal chain
    tree: int  # rows [0:tree] are the draft tree, row 0 the pending token; the rest are lookahead rows
    parent: tuple[int, ...]  # [tree], -1 for row 0
    wanted: tuple[int, ...] = ()  # lookahead rows whose logits are wanted, after the tree's
    ahead: int = 0  # as in `Draft`; each such pass runs the token that the pass before it sampled
    choices: Sequence[Choice] = ()  # the tokens of the last rows, if they are choices: `ids` may have to wait for them

    @property
    def want(self) -> list[int]:
        """Rows whose logits are computed: the tree's, then the wanted lookahead rows."""
        return [*range(self.tree), *self.wanted]

    @property
    def n_rows(self) -> int:
        return len(self.ids)

    @staticmethod
    def chain(ids: Sequence[int], start: int, ahead: int = 0, choices: Sequence[Choice] = ()) -> Rows:
        """Return rows for consecutive tokens at positions start, start + 1, ...: prefill, or one plain decoding row."""
        n = len(ids)
        return Rows(ids, range(start, start + n), None, n, tuple(range(-1, n - 1)), ahead=ahead, choices=choices)

    @staticmethod
    def build(pending: int, at: int, draft: Draft) -> Rows:
        """Return rows for the pending token at position `at`, the draft's tree below it, then its lookahead rows."""
        if not draft.parent and draft.lookahead is None:
            return Rows.chain([pending], at, draft.ahead)
        parent = [-1, *(p + 1 for p in draft.parent)]  # node i of the draft is row i + 1
        is_chain = all(p == i - 1 for i, p in enumerate(parent))
        ids = TokenIds.of([pending, *draft.ids], draft.choices)
        if is_chain and draft.lookahead is None:
            return Rows.chain(ids, at, choices=draft.choices)
        tree = len(parent)
        offset = [0, *draft.depth()]
        n = tree + (len(draft.lookahead.ids) if draft.lookahead is not None else 0)
        sees = np.zeros((n, n), dtype=np.bool_)  # numpy is faster: updating one row in torch takes six times as long
        sees.flat[:: n + 1] = True  # like `eye`, in a fifth of the time
        for row, p in enumerate(parent[1:], start=1):
            sees[row] |= sees[p]
        if draft.lookahead is not None:
            sees[tree:, 0] = True  # a lookahead row attends to the pending token, never to a draft token
            sees[tree:, tree:] = draft.lookahead.sees
            ids, offset = [*ids, *draft.lookahead.ids], offset + draft.lookahead.offset
        return Rows(
            ids=ids,
            pos=[at + i for i in offset],
            tree_mask=torch.from_numpy(sees),
            tree=tree,
            parent=tuple(parent),
            wanted=tuple(tree + i for i in draft.lookahead.wanted) if draft.lookahead else (),
            choices=draft.choices,
        )

    def only(self, rows: Sequence[int]) -> Rows:
        """Return only these rows of a chain, in rising order. Prefill uses the result, so it has no parents."""
        assert self.tree_mask is None, "rows of a draft tree cannot be separated"
        return Rows(_picked(self.ids, rows), _picked(self.pos, rows), tree_mask=None, tree=len(rows), parent=())

    def children(self) -> list[list[int]]:
        """Return the child rows of each tree row: children()[i] lists those whose parent is row i."""
        below: list[list[int]] = [[] for _ in range(self.tree)]
        for row, p in enumerate(self.parent):
            if p >= 0:
                below[p].append(row)
        return below

    def ancestors(self, row: int) -> list[int]:
        """Return the tree rows that a row attends to: itself and its ancestors, nearest first."""
        ancestors = []
        while row >= 0:
            ancestors.append(row)
            row = self.parent[row]
        return ancestors

    def path(self, row: int) -> list[int]:
        """Return the draft tokens from the pending token, which is row 0, down to a tree row."""
        return [self.ids[above] for above in self.ancestors(row)[-2::-1]]


def _picked(of: Sequence[int], rows: Sequence[int]) -> Sequence[int]:
    """Select elements. A range of consecutive rows is sliced, so that the positions of a chain remain a range."""
    return of[rows.start : rows.stop] if isinstance(rows, range) else [of[row] for row in rows]


# How the token after each row is sampled.


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """The context in which tokens after the rows of one sequence are sampled."""

    sampler: Sampler
    history: TokenHistory
    constraint: Constraint | None = None
    text: Sequence[int] = ()  # up to the pending token
    answer_at: int = 0  # start of the answer, which the constraint restricts
    is_scored: bool = False  # the logits are read after later passes

    def behind(self, rows: Rows, which: range, logits: Tensor) -> Tensor:
        """Sample the token after each of these tree rows, from logits [tree, V] -> ids [len(which)].

        The id is -1 if logits are NaN or infinite, STUCK if the constraint allows no token.
        """
        pos = sent(torch.tensor([rows.pos[row] for row in which]), logits.device)
        facts = None
        if self.sampler.penalties:
            facts = self.sampler.facts(self.history, [rows.path(row) for row in which], self.answer_at)
        logits = logits[which.start : which.stop]
        if (mask := self._allowed(rows, which, logits)) is None:
            return self.sampler(logits, pos, facts)
        drawn = self.sampler(logits.masked_fill(~mask, -torch.inf), pos, facts)
        return drawn.masked_fill(~mask.any(-1), STUCK)

    def _allowed(self, rows: Rows, which: range, logits: Tensor) -> Tensor | None:
        """Return the mask [len(which), V] of tokens allowed after each row, by its path; None = any token."""
        if self.constraint is None:
            return None
        every, answer = np.ones(logits.shape[-1], np.bool_), self.text[self.answer_at :]
        found: dict[int, np.ndarray] = {}
        for row in which:
            before = found.get(rows.parent[row], every)
            if before[rows.ids[row]]:
                mask = self.constraint.allowed([*answer, *rows.path(row)])
                found[row] = every if mask is None else mask.numpy()
            else:  # the row violates the constraint: neither it nor its descendants can be accepted
                found[row] = np.zeros_like(every)
        return sent(torch.from_numpy(np.stack([found[row] for row in which])), logits.device)


LogitsHook = Callable[["Tensor"], "Tensor"]  # logits [n, V] -> m numbers per row [n, m]

E = TypeVar("E")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """A request for one forward pass over rows of one sequence. `cache` holds the KV that the rows attend to. The pass
    does not store the KV of its rows."""

    lm: LM
    rows: Rows
    cache: CacheReader  # KV that the rows of the draft tree attend to
    view: CompactView | None = None  # KV that lookahead rows attend to; None = `cache`
    want: Sequence[int] = ()  # rows whose logits are computed; if tokens are sampled, all tree rows come first
    draw: SamplingContext | None = None  # how the token after each tree row is sampled; None = no sampling
    logits_hook: LogitsHook | None = None  # computes further numbers from the logits of each wanted row, for the host
    record_queries: Sequence[int] = ()  # rows whose queries are returned
    grows: int = 0  # tokens that may be committed before a policy evicts; captured passes reserve capacity for them
    # recurrent states of the sequence (recurrent_layers.py); None = not used in this pass
    states: RecurrentStates | None = None
    is_prompt: bool = False  # rows of a prompt: they attend to all slots of every tier, without sparse selection
    # layers to run; None = all, range(n, n) of n layers = only norm and output layer, range(0) = only the embedding
    layers: range | None = None
    # [N, E]: input of the first of these layers, or what an MTP layer or assistant combines with its embedded tokens;
    # None = the embedded tokens are the input
    hidden: Tensor | None = None
    only_kv: bool = False  # the pass ends once it has the keys and values of the last of these layers
    # layers whose inputs are returned, of wanted rows; -1 = the output layer
    record_hidden_states: tuple[int, ...] = ()

    @property
    def is_preparing(self) -> bool:
        """True if the pass neither samples a token nor prefills a prompt: it prepares such a pass."""
        return self.draw is None and not self.is_prompt


@dataclass(slots=True)  # not frozen: one is made per layer and pass, and freezing takes four times as long
class NewKV:
    """New KV: keys and values that a pass computed in one layer. They are not in the KV cache."""

    k: Tensor  # [K, N, D]
    v: Tensor  # [K, N, D]


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The result of one forward request. The next pass may overwrite its tensors."""

    logits: Tensor  # [len(want), V]; empty if the next captured pass was launched, which overwrites them
    # tree row -> the token sampled after it; raises BadModel for NaN logits, BadInput if a constraint allows no token
    drawn: Callable[[int], int]
    hook_output: Callable[[int], list[float]]  # index into `want` -> output of the logits hook
    # new KV by layer, without layers that share another layer's slots; empty if there is `commit_rows`
    fresh: Mapping[int, NewKV]
    queries: Sequence[Tensor]  # per layer [H, len(record_queries), D]; empty if no queries are recorded
    # [N, E]: output of layers that end below the last; [len(want), n E]: of n layers in `record_hidden_states`
    hidden: Tensor | None = None
    # commits these rows on the device; None = the host commits them
    commit_rows: Callable[[Sequence[int]], None] | None = None
    # advances the recurrent states by so many rows; None = no recurrent layers
    fold: Callable[[int], None] | None = None
    company: Company | None = None  # what shared a decoding pass; None = nothing
    # of a draft pass [n, m]: hook output on the device, which no later pass overwrites; None = only the host has it
    choices: Tensor | None = None


Passes = Generator[ForwardRequest, ForwardResult, T]  # generator that may request forward passes; it returns T
Coroutine = Generator[ForwardRequest | E, ForwardResult, T]  # generator that also yields events E


def run_until_cancelled(work: Passes[T], cancel: Callable[[], bool]) -> Passes[T | None]:
    """Run the passes of `work` until `cancel()` returns True between two of them. None if cancelled."""
    try:
        request = next(work)
        while not cancel():
            request = work.send((yield request))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        work.close()
    return None


def await_passes(work: Passes[T] | T) -> Passes[T]:
    """Return `work` if it is a result already; if it is a generator, run its passes and return its result."""
    if isgenerator(work):
        result: T = yield from work
        return result
    return work  # type: ignore[return-value]
