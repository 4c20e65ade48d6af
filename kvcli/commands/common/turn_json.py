"""A turn as JSON: one document at its end, or a line for each event."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvcli.api import End, Event, Live, Read, Text, Thought, Turn, turn_of
from kvcli.commands.common.output import print_json
from kvcli.engine.stats import ModelInfo
from kvcli.schemas.turn import (
    EndEvent,
    Memory,
    ModelFacts,
    ReadEvent,
    Spec,
    Speed,
    Start,
    StatsEvent,
    TextEvent,
    Times,
    Tokens,
    TurnDocument,
)
from kvcli.version import __version__

if TYPE_CHECKING:
    from kvcli.chat.text_session import TextSession
    from kvcli.engine.stats import Stats
    from kvcli.environment import Environment
    from kvcli.settings.profile import Profile

EVERY = 0.5  # seconds between two stats lines


@dataclass(frozen=True, slots=True)
class Run:
    """Settings and notes of a turn, besides the model."""

    profile: str
    method: str = "off"  # drafting method
    profile_hash: str | None = None
    exactness: str | None = None
    number: int = 1
    cautions: Sequence[str] = ()  # warnings about the profile
    notes: Sequence[str] = ()  # deviations from the settings; may grow during the turn

    @classmethod
    def of(cls, profile: Profile, session: TextSession, notes: Sequence[str] = ()) -> Run:
        """Return the settings of a turn of the session."""
        method = profile.spec.method
        return cls(profile.name, method, profile.hash, session.promise, cautions=session.cautions, notes=notes)


def turn_document(turn: Turn, info: ModelInfo, run: Run) -> TurnDocument:
    """Return the document `kvcli.turn/2` of a finished turn."""
    stats = turn.stats
    load, first, total = stats.load or info.load_seconds or None, stats.first_token or None, stats.read + stats.decode
    return TurnDocument.from_attributes(
        turn,
        run,
        stats,
        kvcli=__version__,
        turn=run.number,
        model=model_facts(info),
        approx=bool(stats.approx),
        tokens=Tokens.from_attributes(stats),
        time=Times.from_attributes(stats, load=load, first_token=first, total=total),
        speed=Speed.from_attributes(
            stats, read_tok_s=stats.read_tok_s or None, decode_tok_s=stats.decode_tok_s or None
        ),
        spec=spec_figures(stats, run.method),
        memory=memory_figures(stats, info.device),
        events=[
            *({"kind": "caution", "text": caution} for caution in run.cautions),
            *({"kind": "note", "text": note} for note in (*info.notes, *info.details, *run.notes)),
            *({"kind": "shortage", "text": words} for words in stats.shortages),
            *([{"kind": "approx", "text": stats.approx}] if stats.approx else []),
            *([{"kind": "loop", "text": str(turn.loop)}] if turn.loop else []),
        ],
    )


def spec_figures(stats: Stats, method: str) -> Spec:
    """Return figures of drafting; ratios with a zero denominator are null."""
    of_drafts = () if stats.drafted_passes else ("mean_acceptance_length", "acceptance_rate")
    of_passes = () if stats.passes else ("tokens_per_pass", "rows_per_pass")
    return Spec.from_attributes(stats, method=method, **dict.fromkeys((*of_drafts, *of_passes)))


def memory_figures(stats: Stats, device: str) -> Memory:
    return Memory(
        kv_bytes=stats.kv_bytes,
        kv_bytes_fp16=stats.kv_fp16 or None,
        kv_tiers=dict(stats.kv),
        near_hits=stats.page_hit_rate,
        host_reach=stats.host_access or None,
        peak_bytes=stats.peak or None,
        used_bytes=stats.used or None,
        estimate_bytes=stats.estimate or None,
        device=device,
        limit_bytes=stats.available or None,
    )


def model_facts(info: ModelInfo) -> ModelFacts:
    return ModelFacts.from_attributes(info, revision=info.revision or None)


def print_turn(world: Environment, events: Iterable[Event], info: ModelInfo, run: Run) -> Turn:
    """Print one document when the turn has ended."""
    turn = turn_of(events)
    print_json(world, turn_document(turn, info, run))
    return turn


def print_events(world: Environment, events: Iterable[Event], info: ModelInfo, run: Run) -> Turn:
    """Print a line for each event, `start` first and `end` with the whole document last."""
    print_json(world, Start(event="start", kvcli=__version__, model=model_facts(info), profile=run.profile))
    tell_stats, tokens = _stats_lines(world), 0
    for event in events:
        if isinstance(event, Read):
            print_json(world, ReadEvent.from_attributes(event, event="read"))
        elif isinstance(event, Text | Thought):
            tokens += len(event.ids)
            kind: Literal["text", "thinking"] = "thinking" if isinstance(event, Thought) else "text"
            print_json(world, TextEvent(event=kind, text=event.text, tokens=tokens))
            tell_stats(None)
        elif isinstance(event, Live):
            tell_stats(event.stats)
        elif isinstance(event, End):
            print_json(world, EndEvent(event="end", turn=turn_document(event.turn, info, run)))
            return event.turn
    raise AssertionError("a stream ends with End")


def _stats_lines(world: Environment) -> Callable[[Stats | None], None]:
    """Return a function that stores the statistics object of the turn and prints it each `EVERY` seconds."""
    seen: list[Stats] = []
    last = [world.clock()]

    def tell(stats: Stats | None) -> None:
        if stats is not None:
            seen[:] = [stats]
        elif seen and world.clock() - last[0] >= EVERY:
            last[0] = world.clock()
            print_json(world, _stats_event(seen[0]))

    return tell


def _stats_event(stats: Stats) -> StatsEvent:
    accepted = stats.mean_acceptance_length if stats.drafted_passes else None
    return StatsEvent.from_attributes(
        stats, event="stats", decode_tok_s=stats.decode_tok_s or None, mean_acceptance_length=accepted
    )
