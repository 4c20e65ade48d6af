"""An engine in a thread that the tasks of event loops share, and the memory that their answers share."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

from kvcli.api import Waiting
from kvcli.chat.admission import AdmissionQueue, Claim, EngineLimits, Pause
from kvcli.chat.engine_status import EngineStatus
from kvcli.engine.engine import Engine
from kvcli.engine.forward_request import ForwardRequest, ForwardResult
from kvcli.errors import Busy, DoesNotFit
from kvcli.kv.out_of_memory import Preempted

PIECE = 0.05  # seconds of work for one sequence, after which others take their engine steps


class EngineThread:
    """A thread that runs engine steps while there is work. It starts with the first work and ends with the model.

    An answer begins once the KV of its prompt and answer fits into the pool, beside those of all running answers. If
    memory runs out nevertheless, idle sessions lose their KV cache, then the answer that began last is preempted: it
    goes on later, with the same text. Only an answer that is alone gets the fallbacks of its profile. The state of this
    object changes in the thread alone.
    """

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        """`free_bytes`: measures the memory for KV, if `limits` has no number."""
        self.limits = EngineLimits()
        self.reused: Counter[str] = Counter()  # as in `EngineStatus`
        self._free_bytes = free_bytes
        self._engine = Engine()
        self._pool: ThreadPoolExecutor | None = None
        self._ident: int | None = None  # id of the thread
        self._is_turning = False
        self._queue = AdmissionQueue()
        self._running: list[Claim] = []  # in order of admission
        self._parked: deque[Claim] = deque()  # answers that have begun and wait for memory
        self._has_ended = False  # an answer has ended since a parked one went on
        self._sessions: WeakKeyDictionary[Any, None] = WeakKeyDictionary()  # used here before, longest ago first
        self._n_begun = self._n_preempted = 0
        self._answer_seconds = 1.0  # smoothed
        self._rows, self._alive_at = 0, time.monotonic()  # of the present step; its begin
        self._last_step = 0, 0.0  # rows and seconds

    async def events(self, claim: Claim) -> AsyncGenerator[Any]:
        """Yield the events of the claim's work; raises its error, Busy or DoesNotFit.

        Closing the generator, or cancelling the task that reads it, ends the work between two passes. A task that reads
        slowly delays no other sequence: its events are queued, at most those of one answer.
        """
        loop, said = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def tell(what: Any) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(said.put_nowait, what)

        claim.tell = tell
        self._pool = self._pool or ThreadPoolExecutor(1, "kvcli-engine")
        self._pool.submit(self._join, claim)
        try:
            while (event := await said.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            await self.apart(partial(self._leave, claim))  # afterwards the text session is free again

    def snapshot(self) -> EngineStatus:
        """Return the present status. Safe to call from any thread; it never waits for the engine."""
        found, busy = Counter[tuple[str, str]](), {claim.session for claim in [*self._running, *self._parked]}
        sessions = [session for ref in self._sessions.keyrefs() if (session := ref()) is not None]
        for session in sessions:
            for use in session.kv_table():
                found[str(use["tier"]), "running" if session in busy else "idle"] += use["nbytes"]
        return EngineStatus(
            running=len(self._running),
            waiting=len(self._queue) + len(self._parked),
            idle=sum(session not in busy and session.nbytes > 0 for session in sessions),
            kv_bytes=dict(found),
            pool_bytes=self._pool_bytes,
            promised_bytes=self._promised(),
            step_age=time.monotonic() - self._alive_at if self._running else None,
            step_rows=self._last_step[0],
            step_seconds=self._last_step[1],
            preempted=self._n_preempted,
            reused=dict(self.reused),
        )

    @property
    def sessions(self) -> list[Any]:
        """Sessions used here before, whose KV no pass changes now; [] outside of the thread."""
        return [*self._sessions] if get_ident() == self._ident else []

    def between_rounds(self, act: Callable[[], object], *, waits: bool = True) -> None:
        """Run `act`, which changes a sequence, between two engine steps and wait for it, unless `waits` is False."""
        if self._pool is None or get_ident() == self._ident:
            act()
        elif (done := self._pool.submit(act)) and waits:
            done.result()

    async def apart(self, act: Callable[[], object]) -> None:
        """Like `between_rounds`, without blocking the event loop. Cancelling the task does not stop `act`."""
        if self._pool is None:
            act()
        else:
            await asyncio.shield(asyncio.wrap_future(self._pool.submit(act)))

    def free_memory(self, session: Any) -> Generator[Waiting, None, bool]:
        """Free memory of other sequences for the session's answer, or wait until an answer ends. False = it is alone,
        or does not run here."""
        if (claim := next((one for one in self._running if one.session is session), None)) is None:
            return False
        if claim.is_preempted:  # it continues after a wait
            claim.is_preempted = False
            return True
        if idle := [session for session in self._idle() if session.can_drop]:
            for session in idle:
                session.drop()
            return True
        later = [other for other in self._running if other.order > claim.order]
        for other in sorted((*later, *self._parked), key=lambda one: one.order, reverse=True):
            if other.session.nbytes and other.run.restart():
                self._n_preempted += 1
                if other.task is not None and other in self._running:
                    other.is_preempted = True
                    other.task.cancel()
                    self._park(other)
                return True
        if len(self._running) > 1:
            yield Waiting(0)
            return True
        return False

    def in_turns(self, session: Any, work: Iterator[None]) -> Generator[Waiting]:
        """Run work for the session's answer in pieces of `PIECE` seconds, between which other answers run here take
        their engine steps."""
        began, is_here = time.monotonic(), any(claim.session is session for claim in self._running)
        for _ in work:
            if is_here and len(self._running) > 1 and time.monotonic() - began > PIECE:
                yield Pause(0)
                began = time.monotonic()

    @property
    def _pool_bytes(self) -> int:
        return self._free_bytes() if self.limits.pool_bytes is None else self.limits.pool_bytes

    def _promised(self) -> int:
        return sum(max(claim.need, claim.session.nbytes) for claim in [*self._running, *self._parked])

    def _idle(self) -> list[Any]:
        """Return the sessions that have KV and no answer, the one used longest ago first."""
        busy = {claim.session for claim in (*self._running, *self._parked)}
        return [session for session in self._sessions if session not in busy and session.nbytes]

    def _fits(self, claim: Claim, left: int) -> bool | None:
        """True if `left` bytes are enough for an answer; None while another prefills a prefix for it to copy."""
        for other in self._running:
            if other not in claim.copies:
                claim.copies[other] = claim.session.copies_from(claim.run.ids, other.session, other.run.ids)
            if other.session.session.committed < claim.copies[other]:
                return None
        return not self._running or claim.need <= left

    def _join(self, claim: Claim) -> None:
        self._ident = get_ident()
        try:
            if claim.need > (pool := self._pool_bytes):
                if not claim.can_shrink:
                    raise no_room(claim, pool)
                claim.need = pool
            self._queue.add(claim)
            self._admit()
        except Exception as error:
            self._queue.remove(claim)
            self._end(claim, error)
        if not self._is_turning and self._running and self._pool is not None:
            self._alive_at, self._is_turning = time.monotonic(), True
            self._pool.submit(self._round)  # behind others that join at the same time

    def _leave(self, claim: Claim) -> None:
        """End the work of a claim, wherever it is, so that its session and memory are free."""
        if claim.task is not None:
            claim.task.cancel()
        claim.work.close()
        self._queue.remove(claim)
        self._end(claim)
        self._admit()

    def _round(self) -> None:
        """Run one engine step, then queue the next after tasks that joined or left meanwhile."""
        began, self._rows = time.monotonic(), 0
        try:
            self._engine.step()
            self._admit()
        finally:
            self._alive_at = time.monotonic()
            self._last_step = self._rows, self._alive_at - began
            self._is_turning = bool(self._running)
            if self._is_turning and self._pool is not None:
                self._pool.submit(self._round)

    def _admit(self) -> None:
        """Let answers begin or continue for which there is memory, between two engine steps."""
        while self._parked and (self._has_ended or not self._running):
            self._has_ended = False
            self._run(self._parked.popleft())
        while self._queue and not self._parked:
            idle, promised = self._idle(), self._promised()
            left = self._pool_bytes - promised - sum(one.nbytes for one in idle if not one.can_drop)
            if (claim := self._queue.next(partial(self._fits, left=left), self.limits.skips)) is None:
                break
            self._n_begun += 1
            claim.order, claim.began = self._n_begun, time.monotonic()
            left -= claim.need + sum(one.nbytes for one in idle if one.can_drop and one is not claim.session)
            for session in idle:
                if left < 0 and session.can_drop and session is not claim.session:
                    left += session.nbytes
                    session.drop()
            self._run(claim)
        for ahead, claim in enumerate(order := self._queue.order()):
            if claim.ahead < 0 and len(order) > self.limits.queue:
                self._queue.remove(claim)
                self._end(claim, busy(len(order) - 1, self._answer_seconds / max(1, len(self._running))))
            elif claim.ahead != ahead:
                claim.ahead = ahead
                claim.tell(Waiting(ahead))

    def _run(self, claim: Claim) -> None:
        self._running.append(claim)
        self._sessions.pop(claim.session, None)
        self._sessions[claim.session] = None
        claim.task = self._engine.add(self._drive(claim), claim.tell)

    def _drive(self, claim: Claim) -> Generator[Any, ForwardResult, None]:
        """Run the work of a claim until it ends or waits for memory. Closing the generator only suspends the work."""
        work = claim.work
        try:
            output = work.throw(Preempted()) if claim.is_preempted else next(work)
            while not isinstance(output, Waiting):
                if not isinstance(output, ForwardRequest):
                    yield output
                    output = next(work)
                    continue
                try:
                    result = yield output
                    self._rows += output.rows.n_rows
                except Exception as error:
                    output = work.throw(error)
                else:
                    output = work.send(result)
            if isinstance(output, Pause) and self._pool is not None:
                self._pool.submit(self._resume, claim)  # behind the next engine step
            else:
                self._park(claim)
        except StopIteration:
            self._end(claim)
        except GeneratorExit:
            raise
        except BaseException as error:
            self._end(claim, error)
            raise

    def _resume(self, claim: Claim) -> None:
        """Continue a claim after a pause, unless it has left or was parked meanwhile."""
        if claim in self._running and claim.task is not None and claim.task.is_over:
            claim.task = self._engine.add(self._drive(claim), claim.tell)

    def _park(self, claim: Claim) -> None:
        claim.tell(Waiting(len(self._parked)))
        self._running.remove(claim)
        self._parked.append(claim)

    def _end(self, claim: Claim, error: BaseException | None = None) -> None:
        if claim in self._running:
            self._running.remove(claim)
            self._answer_seconds += (time.monotonic() - claim.began - self._answer_seconds) / 8
        elif claim in self._parked:
            self._parked.remove(claim)
        self._has_ended = True
        claim.tell(error)


def busy(n: int, answer_seconds: float) -> Busy:
    """Return the error for an answer beyond the n that may wait. An answer ends each `answer_seconds`."""
    return Busy(
        f"the queue is full: {n:,} requests wait", retry_after=max(1.0, n * answer_seconds), try_=["ask again later"]
    )


def no_room(claim: Claim, pool: int) -> DoesNotFit:
    """Return the error for an answer that needs more than the whole pool."""
    tokens = claim.run.most_tokens
    return DoesNotFit(
        f"prompt and answer of {tokens:,} tokens need {claim.need / (1 << 20):,.1f} MiB of KV cache",
        code="no_room",
        lines=[f"all answers together have {pool / (1 << 20):,.1f} MiB, about {tokens * pool // claim.need:,} tokens"],
        detail={"need": claim.need, "pool": pool, "tokens": tokens},
        try_=["a shorter prompt", "a smaller max_new_tokens", "-P lean, which stores keys and values in 4 bits"],
    )
