"""Events of a streamed answer, and the finished turn. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from kvcli.engine.sequence.state import Repetition
    from kvcli.engine.stats import Stats

Finish = Literal["stop", "length", "interrupted", "loop", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """The answer waits for memory that other answers use, or for a prompt that it shares. Only `astream` yields it."""

    ahead: int  # requests that wait before this one


@dataclass(frozen=True, slots=True)
class Read:
    """Progress of the prefill, after each chunk."""

    done: int  # tokens, cached ones included
    total: int
    cached: int
    seconds: float


MOST_TOP = 20  # of `top_logprobs`


class TokenScore(NamedTuple):
    """The log-probability of a token, and the most likely tokens in its place, with theirs.

    It is the model's own, of its log-softmax in float64: before temperature, truncation, penalties, bias, constraint.
    """

    id: int
    logprob: float | None  # None = input, not predicted: the first token of a prompt, and the forced end of a thought
    top: tuple[tuple[int, float], ...] = ()  # id and log-probability, the most likely first


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer, whole characters only; `ids` are the tokens since the piece before."""

    text: str
    ids: tuple[int, ...]
    scores: tuple[TokenScore, ...] = ()  # of `ids`, if `top_logprobs` asks for them


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the model's thinking, or of other text not for the user, before or in its answer."""

    text: str
    ids: tuple[int, ...]
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the model asks for, after its text. Nothing runs it but the caller."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Live:
    """Statistics of the turn so far: one object that is updated in place, safe to read from another thread."""

    stats: Stats


@dataclass(frozen=True, slots=True)
class End:
    """The finished turn, last event of every stream."""

    turn: Turn


Event = Waiting | Read | Text | Thought | ToolCall | Live | End


@dataclass(frozen=True, slots=True)
class Turn:
    """A finished answer."""

    text: str
    ids: tuple[int, ...]  # tokens of the answer, the stop token included if one ended it
    finish: Finish
    stats: Stats
    loop: Repetition | None = None  # the repetition that ended it, if finish is "loop"
    thinking: str = ""  # not in the text
    tool_calls: tuple[ToolCall, ...] = ()  # not in the text; finish is then "tool_calls"
    scores: tuple[TokenScore, ...] = ()  # of `ids`, if `top_logprobs` asks for them
    prompt_scores: tuple[TokenScore, ...] = ()  # of the prompt's tokens, if `prompt_logprobs` asks for them


Cancel = Callable[[], bool]  # called between passes; True ends the turn and keeps the text
Prompt = str | Sequence[int]
Events = Iterator[Event]


def turn_of(events: Iterable[Event]) -> Turn:
    """Consume a stream and return its answer."""
    for event in events:
        if isinstance(event, End):
            return event.turn
    raise AssertionError("a stream ends with End")
