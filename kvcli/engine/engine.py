"""The engine: runs what texts want of their models. The only file that calls a model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor

from kvcli.engine.cuda_graphs.readback import Readback, fetch
from kvcli.engine.forward import BatchedPass, ForwardPass
from kvcli.engine.forward_request import Coroutine, E, ForwardRequest, ForwardResult, Steps, T
from kvcli.engine.hf.cache_shim import CacheShim, active_pass, cache_name
from kvcli.engine.hf.layer_gates import StopForward
from kvcli.engine.threads import one_pool, use_device

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM


def run(feeds: Sequence[ForwardRequest]) -> list[ForwardResult]:
    """One pass over each model, the rows of all its feeds side by side; in the order of the feeds.

    Feeds that go through other layers of a model make another pass.
    """
    made: dict[int, ForwardResult] = {}
    for some in group_requests(feeds):
        lm, its = feeds[some[0]].lm, [feeds[i] for i in some]
        with one_pool(lm.has_pool and not any(feed.is_prompt for feed in its)):  # what torch does of a prompt is large
            made |= zip(some, _run(lm, its), strict=True)
    return [made[i] for i in range(len(feeds))]


def group_requests(feeds: Sequence[ForwardRequest]) -> list[list[int]]:
    """Which feeds share a pass: those through the same layers of a model, and no more than leaves rows their bits."""
    alike: dict[tuple[object, ...], list[list[int]]] = {}
    for i, feed in enumerate(feeds):
        most = feed.lm.max_invariant_rows
        layers = None if feed.layers is None else (feed.layers.start, feed.layers.stop)  # empty ranges are all equal
        key = id(feed.lm), layers, feed.only_kv, most is not None and feed.is_prompt
        passes = alike.setdefault(key, [[]])
        rows = sum(feeds[other].rows.n_rows for other in passes[-1])
        if most is not None and rows and not feed.is_prompt and rows + feed.rows.n_rows > most:
            passes.append([])
        passes[-1].append(i)
    return [some for passes in alike.values() for some in passes]


def _run(lm: LM, feeds: Sequence[ForwardRequest]) -> Iterator[ForwardResult]:
    use_device(lm.device)
    if any(feed.record_hidden_states for feed in feeds):
        lm.enable_hidden_states()
    if lm.frames is not None and (replayed := lm.frames.run(feeds)) is not None:
        yield from replayed
        return
    passes = [ForwardPass(feed) for feed in feeds]
    if feeds[0].layers is not None and lm.straight is None:
        lm.check_layer_gates()
    way = BatchedPass(passes) if len(passes) > 1 else passes[0]
    if lm.mixers:
        way.trial = lm.mixers.trial(feeds, way.trial)
    logits, hidden = _forward(lm, feeds, way)
    wanted = [len(feed.want) for feed in feeds]
    each = torch.split(logits, wanted) if len(feeds) > 1 else [logits]
    gave = [None] * len(feeds) if hidden is None else torch.split(hidden, [feed.rows.n_rows for feed in feeds])
    if way.shown is not None:
        gave = torch.split(way.shown, wanted)
    backs = [Readback(feed, rows, lm.has_pool) for feed, rows in zip(feeds, each, strict=True)]
    if lm.is_apart:
        fetch(backs)
    for i, (p, rows, back, left) in enumerate(zip(passes, each, backs, gave, strict=True)):
        yield ForwardResult(
            rows, back.drawn, back.hook_output, p.fresh, p.queries, left, fold=way.trial.advance_state(i)
        )


def _forward(
    lm: LM, feeds: Sequence[ForwardRequest], attends: ForwardPass | BatchedPass
) -> tuple[Tensor, Tensor | None]:
    """Logits of all wanted rows, and the hidden states of all where their layers end below the last.

    With none wanted, as in reading, a pass ends where the last layer that stores has its keys and values: what comes
    behind would be thrown away, unless somebody hears queries there.
    """
    starts = [0]
    for feed in feeds:
        starts.append(starts[-1] + feed.rows.n_rows)
    want: list[int] | None = [start + row for start, feed in zip(starts, feeds, strict=False) for row in feed.want]
    is_below = attends.layers.stop < lm.n_layers and not feeds[0].only_kv
    at_end = want or is_below or lm.mixers.are_last
    attends.last = -1 if at_end else _last(lm, feeds, attends.layers)
    if want == list(range(starts[-1])):
        want = None  # all: nothing to pick
    ids, pos = feeds[0].rows.ids, feeds[0].rows.pos
    if len(feeds) > 1:
        ids, pos = [i for feed in feeds for i in feed.rows.ids], [i for feed in feeds for i in feed.rows.pos]
    try:
        if lm.straight is not None:
            gave = lm.straight(ids, pos, want, attends, attends.layers, attends.hidden)
            return (_no_logits(lm), gave) if is_below else (gave, None)
        return call(lm.model, ids, pos, want, device=lm.entry, its_pass=attends, trial=attends.trial), None
    except StopForward:
        return _no_logits(lm), attends.hidden if is_below else None


def _last(lm: LM, feeds: Sequence[ForwardRequest], layers: range) -> int:
    """Behind which of these layers nothing is wanted."""
    storing = () if any(feed.record_queries for feed in feeds) else (i for i in lm.storing if i in layers)
    return max(storing, default=layers.stop - 1)


def _no_logits(lm: LM) -> Tensor:
    return torch.empty(0, lm.vocab, dtype=lm.dtype, device=lm.device)


def call(
    model: Any,
    ids: Sequence[int] | Tensor,
    pos: Sequence[int] | Tensor | None = None,
    want: Sequence[int] | None = None,
    *,
    device: torch.device | None = None,
    its_pass: object = None,
    trial: CacheShim | None = None,
) -> Tensor:
    """Logits [len(want), V] of one trip of these tokens through a transformers model; by itself it counts positions
    from 0, and wants all rows. Tensors are where the model is, int64.

    `device`: where the model is, which takes a search through its modules to find out. `its_pass`: what our attention
    hands its rows to, or what travels in its place; None = the attention in place is another. Such a call gives layers
    a `trial` for their cache, an empty one if none is given.
    """
    where = device or model.device

    def tensor(numbers: Sequence[int] | Tensor) -> Tensor:
        return numbers if isinstance(numbers, Tensor) else torch.tensor(list(numbers), dtype=torch.int64, device=where)

    more: dict[str, object] = {}
    trial = trial or CacheShim()
    if its_pass is not None and (name := cache_name(model.__class__)) is not None:
        more[name] = trial
    if pos is not None:
        more["position_ids"] = tensor(pos).unsqueeze(0)
    if want is not None:
        more["logits_to_keep"] = tensor(want)
    with torch.inference_mode(), active_pass(its_pass, trial):
        logits: Tensor = model(input_ids=tensor(ids).unsqueeze(0), use_cache=False, **more).logits[0]
    return logits


def iterate_events(work: Coroutine[E, T]) -> Generator[E, None, T]:
    """The work of one text alone, pass by pass: what it has to say on the way, and what came of it.

    What breaks a pass is thrown into the work, at the feed that it broke; closing this closes the work.
    """
    try:
        said = next(work)
        while True:
            if not isinstance(said, ForwardRequest):
                yield said
                said = next(work)
                continue
            try:
                (made,) = run([said])
            except BaseException as error:
                said = work.throw(error)
            else:
                said = work.send(made)
    except StopIteration as end:
        found: T = end.value
        return found
    finally:
        work.close()


def run_to_end(work: Coroutine[object, T] | Steps[T]) -> T:
    """The same to its end, whatever it says on the way."""
    saying = iterate_events(work)
    while True:
        try:
            next(saying)
        except StopIteration as end:
            found: T = end.value
            return found


class EngineTask(Generic[E, T]):
    """One text among others: its work, and what came of it."""

    def __init__(self, work: Coroutine[E, T], outbox: Callable[[E], object]) -> None:
        self._work, self._outbox = work, outbox
        self.feed: ForwardRequest | None = None  # what it waits for; None = it is over
        self.error: BaseException | None = None  # that ended it
        self._found: T | None = None
        self._go_on(lambda: next(work))

    @property
    def is_over(self) -> bool:
        return self.feed is None

    def result(self) -> T:
        """What came of it, once it is over; raises what ended it, CancelledError if somebody did."""
        assert self.is_over, "not over yet"
        if self.error is not None:
            raise self.error
        return self._found  # type: ignore[return-value]

    def cancel(self) -> None:
        """End it between two passes; what it has stored stays as it is."""
        if not self.is_over:
            self._work.close()
            self.feed, self.error = None, CancelledError()

    def send(self, made: ForwardResult) -> None:
        """Its feed was run."""
        self._go_on(lambda: self._work.send(made))

    def throw(self, error: Exception) -> None:
        """Its feed failed, even alone."""
        self._go_on(lambda: self._work.throw(error))

    def _go_on(self, step: Callable[[], ForwardRequest | E]) -> None:
        """To the next feed, handing out what the work says on the way."""
        try:
            said = step()
            while not isinstance(said, ForwardRequest):
                self._outbox(said)
                said = next(self._work)
            self.feed = said
        except StopIteration as end:
            self._found, self.feed = end.value, None
        except Exception as error:  # of this text, or its outbox; the others go on
            self._work.close()
            self.error, self.feed = error, None


class Engine:
    """Several texts at once: each round is one pass over each model, the rows of all texts side by side.

    Texts that are being written go first, then chunks of prompts up to a number of rows. Behind a round with prompts
    comes one without, as long as anybody writes: so a long prompt delays a token by a chunk at most, and the first
    answer to a short question, too. The weights are read once a round, whoever shares it.
    """

    def __init__(self, rows: int = 2048) -> None:
        """`rows`: of prompts in a round; a larger chunk is the only one of its round."""
        self._rows = rows
        self._n_waiting = 0  # of the tickets, those in front
        self._has_read = False  # were there prompts in the last round?
        self._tickets: list[EngineTask[Any, Any]] = []

    def add(self, work: Coroutine[E, T], outbox: Callable[[E], object] = lambda said: None) -> EngineTask[E, T]:
        """Another text. `outbox` hears what its work says on the way, in the thread that runs the rounds."""
        ticket = EngineTask(work, outbox)
        self._tickets.insert(self._n_waiting, ticket)  # before those that had the last round
        self._n_waiting += 1
        return ticket

    def step(self) -> bool:
        """One pass for those whose turn it is; False when no text is left."""
        self._tickets = [ticket for ticket in self._tickets if not ticket.is_over]
        if turn := self._turn():
            self._tickets.sort(key=turn.__contains__)  # who had to wait is first next time
            self._n_waiting = len(self._tickets) - len(turn)
            self._pass(turn)
        return bool(turn)

    def _turn(self) -> list[EngineTask[Any, Any]]:
        waiting = [(ticket, ticket.feed) for ticket in self._tickets if ticket.feed is not None]
        found = [ticket for ticket, feed in waiting if not feed.is_prompt]
        room = 0 if found and self._has_read else self._rows
        self._has_read = False
        for ticket, feed in waiting:
            if feed.is_prompt and (room >= feed.rows.n_rows or room == self._rows):
                found.append(ticket)
                room -= feed.rows.n_rows
                self._has_read = True
        return found

    def _pass(self, tickets: list[EngineTask[Any, Any]]) -> None:
        """Those together, or, where that fails, by halves: a lack of memory concerns whom it hits alone."""
        tickets = [ticket for ticket in tickets if not ticket.is_over]  # an outbox may have cancelled one
        try:
            made = run([ticket.feed for ticket in tickets if ticket.feed is not None])
        except Exception as error:
            if len(tickets) == 1:
                tickets[0].throw(error)
                return
            half = len(tickets) // 2
            self._pass(tickets[:half])
            self._pass(tickets[half:])
        else:
            for ticket, of in zip(tickets, made, strict=True):
                ticket.send(of)


def generate_together(*works: Coroutine[E, T]) -> list[EngineTask[E, T]]:
    """Several texts side by side, each to its end; the tickets, in the order of the works, have what came of them."""
    many = Engine()
    tickets = [many.add(work) for work in works]
    while many.step():
        pass
    return tickets
