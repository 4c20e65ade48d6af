"""Everything a human sees. No torch, and nothing that is slow to import."""

from __future__ import annotations

from kvcli.render.errors import print_error, print_note, print_warning
from kvcli.render.live import Look, Memory, process_memory
from kvcli.render.screen import Screen, StatsMode
from kvcli.render.stream import busy_word, show_summary, show_turn
from kvcli.render.summary import Opening, header, summary

__all__ = [
    "Look",
    "Memory",
    "Opening",
    "Screen",
    "StatsMode",
    "busy_word",
    "header",
    "print_error",
    "print_note",
    "print_warning",
    "process_memory",
    "show_summary",
    "show_turn",
    "summary",
]
