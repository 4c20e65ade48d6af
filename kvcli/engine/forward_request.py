"""What one text wants of one pass over one model, and what the pass made of it.

Whoever needs a model (a session, a drafter, a policy) is a generator that yields a `ForwardRequest` and is sent the
`ForwardResult`: it never calls a model itself. So one text, or many side by side, run the same code, and the engine
decides.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from inspect import isgenerator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.hf.lm import LM
    from kvcli.engine.rows import Rows
    from kvcli.engine.sequence.sampler import SamplingContext
    from kvcli.kv.recurrent_state import RecurrentStates
    from kvcli.kv.slots import Attendable, CacheReader

LogitsHook = Callable[["Tensor"], "Tensor"]  # logits [n, V] -> a few numbers [n, m] each

E = TypeVar("E")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """Rows of one text for one pass. What they read is in `cache`; nothing of them is stored."""

    lm: LM
    rows: Rows
    cache: CacheReader  # what tree rows read
    view: Attendable | None = None  # what scout rows read; None = past
    want: Sequence[int] = ()  # rows whose logits are computed, those of the tree first where anything is drawn
    draw: SamplingContext | None = None  # how the tokens behind the tree's rows are drawn; None = none is
    logits_hook: LogitsHook | None = None  # what else the host is to learn of each wanted row's logits
    record_queries: Sequence[int] = ()  # rows whose queries are handed back
    grows: int = 0  # tokens that may be stored before a policy lets some go, or the answer ends
    states: RecurrentStates | None = (
        None  # what mixers know of the past (recurrent_layers.py); None = this way of reading has none
    )
    is_prompt: bool = False  # the rows are of a text being read: no tier leaves anything out for them
    # that it goes through; None = all; none behind the last = norm and head, range(0) = embedding
    layers: range | None = None
    hidden: Tensor | None = None  # [N, E]: what goes into the first of these, or a head beside its tokens; None = those
    only_kv: bool = False  # it ends where the last of these has keys and values
    record_hidden_states: bool = (
        False  # is the hidden state of each wanted row handed back, as the output layer is given it?
    )


@dataclass(slots=True)  # not frozen: one is made in each layer of a pass, and freezing takes four times as long
class NewKV:
    """Keys and values that a pass made in one layer; never in the store."""

    k: Tensor  # [K, N, D]
    v: Tensor  # [K, N, D]


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What a pass made of a feed. Its tensors may be those of the next pass by the time of that one."""

    logits: Tensor  # [len(want), V]; none where the next pass is under way already
    drawn: Callable[[int], int]  # tree row -> the token behind it; raises BadModel where the logits are no numbers
    hook_output: Callable[[int], list[float]]  # index into want -> what was hook_output
    fresh: Mapping[int, NewKV]  # by layer; none of a layer that shares the slots of another, nor with `keep`
    queries: Sequence[Tensor]  # per layer [H, len(hear), D]; nothing where nothing is heard
    hidden: Tensor | None = None  # [N, E]: what its layers gave, where they end below the last; [len(want), E]: shown
    keep: Callable[[Sequence[int]], None] | None = None  # has the device store these rows; None = the host does it
    fold: Callable[[int], None] | None = None  # has mixers take in so many of the rows; None = there are none


Steps = Generator[ForwardRequest, ForwardResult, T]  # work that may need passes, and what comes of it
Coroutine = Generator[ForwardRequest | E, ForwardResult, T]  # work that has something to say on the way, too


def run_until_cancelled(work: Steps[T], cancel: Callable[[], bool]) -> Steps[T | None]:
    """Its passes, as long as `cancel()` does not say otherwise between two; None where it did."""
    try:
        feed = next(work)
        while not cancel():
            feed = work.send((yield feed))
    except StopIteration as end:
        found: T = end.value
        return found
    finally:
        work.close()
    return None


def await_passes(found: Steps[T] | T) -> Steps[T]:
    """What came of something that may need passes, or was there at once."""
    if isgenerator(found):
        plain: T = yield from found
        return plain
    return found  # type: ignore[return-value]
