"""Forward requests and results: what one sequence asks of one forward pass over one model, and what it gets.

Code that needs a model (a session, a drafter, a policy) is a generator that yields a `ForwardRequest` and is sent the
`ForwardResult`. It never calls a model itself. So the same code runs one sequence or many in a batch, and the engine
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

LogitsHook = Callable[["Tensor"], "Tensor"]  # logits [n, V] -> m numbers per row [n, m]

E = TypeVar("E")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """A request for one forward pass over rows of one sequence. `cache` holds the KV that they attend to. The pass does
    not commit their KV."""

    lm: LM
    rows: Rows
    cache: CacheReader  # KV that draft tree rows attend to
    view: Attendable | None = None  # KV that lookahead rows attend to; None = `cache`
    want: Sequence[int] = ()  # rows whose logits are computed; the tree's first if tokens are sampled
    draw: SamplingContext | None = None  # how the token after each tree row is sampled; None = no sampling
    logits_hook: LogitsHook | None = None  # computes further numbers from the logits of each wanted row, for the host
    record_queries: Sequence[int] = ()  # rows whose queries are returned
    grows: int = 0  # tokens that may be committed before a policy evicts, or the answer ends
    # recurrent states of the sequence (recurrent_layers.py); None = not used in this pass
    states: RecurrentStates | None = None
    is_prompt: bool = False  # prompt rows: every tier attends to all of its slots
    # layers to run; None = all, an empty range past the last = norm and output layer, range(0) = embedding
    layers: range | None = None
    # [N, E]: input of the first of these layers, or of a draft head beside its tokens; None = embed the tokens
    hidden: Tensor | None = None
    only_kv: bool = False  # the pass ends once the last of these layers has its keys and values
    record_hidden_states: bool = False  # return the hidden state of each wanted row, as the output layer gets it


@dataclass(slots=True)  # not frozen: one is made per layer and pass, and freezing takes four times as long
class NewKV:
    """New KV: keys and values that a pass computed in one layer. They are not in the KV cache."""

    k: Tensor  # [K, N, D]
    v: Tensor  # [K, N, D]


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The result of one forward request. The next pass may overwrite its tensors."""

    logits: Tensor  # [len(want), V]; empty if the next pass has been launched already
    # tree row -> the token sampled after it; raises BadModel if the logits are NaN or infinite
    drawn: Callable[[int], int]
    hook_output: Callable[[int], list[float]]  # index into `want` -> output of the logits hook
    fresh: Mapping[int, NewKV]  # by layer; none for layers that share another layer's slots, nor with `keep`
    queries: Sequence[Tensor]  # per layer [H, len(record_queries), D]; empty if no queries are recorded
    # [N, E]: output of layers that end below the last; [len(want), E]: with `record_hidden_states`
    hidden: Tensor | None = None
    # commits these rows on the device; None = the host commits them
    keep: Callable[[Sequence[int]], None] | None = None
    # advances the recurrent states by so many rows; None = no recurrent layers
    fold: Callable[[int], None] | None = None


Steps = Generator[ForwardRequest, ForwardResult, T]  # generator that may request passes; it returns T
Coroutine = Generator[ForwardRequest | E, ForwardResult, T]  # generator that also yields events E


def run_until_cancelled(work: Steps[T], cancel: Callable[[], bool]) -> Steps[T | None]:
    """Run the passes of `work` until `cancel()` returns True between two of them. None if cancelled."""
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
    """Return a result, or run the passes of a generator and return its result."""
    if isgenerator(found):
        plain: T = yield from found
        return plain
    return found  # type: ignore[return-value]
