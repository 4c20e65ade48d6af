"""Reading and answering that survive a lack of memory: the declared steps are taken in turn, and said.

What a pass was about to add is lost with it and made again; what was added before stays, in the text as in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

from kvcli import build
from kvcli.errors import KvcliError
from kvcli.kv.shortage import Shortage, as_shortage
from kvcli.kv.slots import nbytes
from kvcli.policies.base import Phase
from kvcli.profile import Profile
from kvcli.relief import relieve
from kvcli.schema import size_of
from kvcli.session import Session
from kvcli.stats import Stats


class Owner(Protocol):
    """Who has a session and the profile it runs under; both may be others after a lack of memory."""

    session: Session
    profile: Profile

    @property
    def limit(self) -> int: ...


def read(owner: Owner, ids: Sequence[int], new: int, stats: Stats) -> Iterator[int]:
    """Have the session read `ids`, of which its text may be the beginning. Yields tokens committed, per chunk.

    `new`: tokens of the answer to come, for which the ways out of a lack of memory leave room.
    """
    session = owner.session
    while True:
        try:
            yield from session.read(ids[len(session.ids) :])
            return
        except Exception as error:
            lack = _lack(error)
        _relieve(owner, lack, stats, "read" if session.committed == len(ids) - 1 else "reading", len(ids) + new)
        if len(ids) >= owner.limit:
            raise _explained(owner, lack, stats.prompt, len(ids) + new)


def answer(
    owner: Owner, new: int, stop: Collection[int], cancel: Callable[[], bool], stats: Stats, said: Sequence[str]
) -> Iterator[Sequence[int]]:
    """`Session.stream` -> the tokens that each pass added, its steps folded into `stats`.

    `said`: the answer in words, as far as it goes by then; an error hands it back.
    """
    session = owner.session
    text, end = list(session.ids), len(session.ids) + new
    while True:
        try:
            if len(session.ids) < len(text):  # the past was lost; the last token is pending again after this
                session.feed(text[len(session.ids) :])
            for step in session.stream(end - len(text), stop, cancel):
                stats.fold(step)
                text += step.new
                yield step.new
            return
        except Exception as error:
            lack = _lack(error)
        if rest := session.ids[len(text) :]:  # added by the pass that broke, which nobody heard of
            stats.passes += 1
            stats.new += len(rest)
            text += rest
            yield rest
            if rest[-1] in stop:
                return
        _relieve(owner, lack, stats, "answering", end, said)
        end = min(end, owner.limit)
        if len(text) >= end:
            return


def _lack(error: Exception) -> Shortage:
    """The lack of memory that the error is, without the frames of the pass, which hold on to its tensors."""
    lack = as_shortage(error)
    if lack is None:
        raise error
    lack.__context__ = None
    return lack.with_traceback(None)


def _relieve(owner: Owner, lack: Shortage, stats: Stats, phase: Phase, wanted: int, said: Sequence[str] = ()) -> None:
    """Take the next steps and say so; raises the lack, explained, when there are none."""
    at = owner.session.committed if phase == "reading" else len(owner.session.ids)
    found = relieve(owner.session, owner.profile, owner.limit, phase)
    owner.profile = found.profile
    stats.limit = owner.limit
    if found.steps:
        stats.shortages.append(f"memory ran out at {at:,} tokens: {', '.join(found.steps)} from here on")
    if not found.is_over:
        raise _explained(owner, lack, stats.prompt, wanted, said)


def _explained(owner: Owner, lack: Shortage, prompt: int, wanted: int, said: Sequence[str] = ()) -> Shortage:
    """The lack with what there was room for, and what has room for a text of `wanted` tokens."""
    session, profile = owner.session, owner.profile
    held = sum(nbytes(session.kv, session.view).values())
    lines = list(lack.lines)
    if session.committed:
        lines.append(f"keys and values of {session.committed:,} tokens take {held / (1 << 20):,.1f} MiB")
    detail = {**lack.detail, "tokens": session.committed, "kv_bytes": held, "answer": "".join(said)}
    ways = _shorter(lack.most or session.committed, prompt, profile)
    ways += [words for words, changes in _larger(session, profile) if _holds(session, profile, changes, wanted)]
    return Shortage(lack.message, lines=lines, detail=detail, try_=lack.try_ or ways)


def _larger(session: Session, profile: Profile) -> Iterator[tuple[str, dict[str, Any]]]:
    """What may leave more room: as it is typed, and as changes of the profile."""
    if profile.memory.device != "auto":
        yield "--set memory.device=auto", {"memory": {"device": "auto"}}
    if profile.kv.k_bits == profile.kv.v_bits == 16:
        rounding = "--set exactness=approx " if profile.exactness != "approx" else ""
        bits = {"k_bits": 8, "v_bits": 8}
        yield f"{rounding}--set kv.k_bits=8 --set kv.v_bits=8", {"exactness": "approx", "kv": bits}
    if not size_of(profile.memory.disk):
        yield "--set memory.disk=8GiB", {"memory": {"disk": "8GiB"}}
    if (chunk := build.chunk(session.lm, profile) // 4) >= 1:
        yield f"--set prefill.chunk={chunk}", {"prefill": {"chunk": chunk}}


def _holds(session: Session, profile: Profile, changes: dict[str, Any], n: int) -> bool:
    """Whether a store under the changed profile can be made, and has room for a text of n tokens."""
    try:
        changed = profile.replace(**changes)
        plan = build.plan(session.lm, changed, nbytes(session.kv).get(session.lm.device.type, 0))
        plan.store()
        return plan.room.holds(max(changed.policy.slots(n), changed.policy.reading(n)))
    except Exception as error:
        if not isinstance(error, KvcliError) and as_shortage(error) is None:
            raise
        return False


def _shorter(most: int, prompt: int, profile: Profile) -> list[str]:
    """A window of `most` tokens, if it leaves an answer to a prompt of so many."""
    room = most - prompt
    if room < 1:
        return []
    enough = room >= min(profile.context.reserve, profile.sample.max_new_tokens)
    return [f"--ctx {most}" if enough else f"--ctx {most} --max-new-tokens {room}"]
