"""A turn as JSON on stdout: one object at its end, or one line for each event as it comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from kvcli.api import End, Event, Live, ModelInfo, Read, Text, Turn
from kvcli.errors import KvcliError
from kvcli.render.screen import Screen
from kvcli.render.stream import HERTZ
from kvcli.schemas import (
    EndEvent,
    ErrorEvent,
    Json,
    ReadEvent,
    Start,
    StatsEvent,
    TextEvent,
    TurnDocument,
    error_document,
    model_facts,
)
from kvcli.stats import Stats

Finished = Callable[[Turn], TurnDocument]  # the turn as its document: only the caller knows session and profile


class JsonSink:
    """`--json`, with `--stream` if `is_stream`. Nothing but JSON goes to stdout."""

    def __init__(self, screen: Screen, info: ModelInfo, profile: str, finished: Finished, is_stream: bool) -> None:
        self.screen, self.info, self.profile = screen, info, profile
        self.finished, self.is_stream = finished, is_stream
        self.stats: Stats | None = None
        self._told = 0.0  # when figures were last written

    def show(self, events: Iterable[Event]) -> Turn:
        """Write the events and return the finished turn. If the stream raises, the caller writes the error."""
        if self.is_stream:
            self._write(self._start())
        for event in events:
            if isinstance(event, End):
                turn = self.finished(event.turn)
                self._write(EndEvent(event="end", turn=turn) if self.is_stream else turn)
                return event.turn
            if self.is_stream:
                self._on(event)
        raise AssertionError("a stream ends with End")

    def _on(self, event: Event) -> None:
        if isinstance(event, Live):
            self.stats = event.stats
        elif isinstance(event, Read):
            read = ReadEvent(
                event="read", done=event.done, total=event.total, cached=event.cached, seconds=event.seconds
            )
            self._write(read)
        elif isinstance(event, Text):
            self._write(TextEvent(event="text", text=event.text, tokens=len(event.ids)))
            self._figures()

    def _figures(self) -> None:
        """A `stats` event, as often as a live row is redrawn."""
        now = self.screen.clock()
        if self.stats is None or now - self._told < 1 / HERTZ:
            return
        self._told = now
        stats = self.stats
        self._write(
            StatsEvent(
                event="stats",
                new=stats.new,
                context=stats.context,
                decode=stats.decode,
                decode_tok_s=stats.decode_tok_s or None,
                mean_acceptance_length=stats.mean_acceptance_length if stats.drafted_passes else None,
                kv_bytes=stats.kv_bytes,
            )
        )

    def _start(self) -> Start:
        from kvcli import __version__

        model = model_facts(self.info)
        return Start(
            event="start",
            schema="kvcli.event/1",
            kvcli=__version__,
            model=model,
            engine="local",
            profile=self.profile,
        )

    def _write(self, part: Json) -> None:
        write_json(self.screen, part)


def write_json(screen: Screen, part: Json) -> None:
    """One object on one line of stdout. On a terminal, everything but ASCII is escaped: it may be a model's text."""
    out = screen.out
    out.write(json.dumps(part.document(), ensure_ascii=out.is_tty or not out.unicode) + "\n")


def write_json_error(screen: Screen, error: KvcliError, is_stream: bool = False) -> None:
    """The error as `kvcli.error/1`, or as the last event of a stream."""
    document = error_document(error)
    write_json(screen, ErrorEvent(event="error", error=document) if is_stream else document)
