"""Disk cache of answers about parts, so that an interrupted run can continue.

An entry is keyed by the text, the model, the profile and the options. Files are private to their owner (0600) and
written atomically. A damaged entry is computed again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvcli.api import Turn
from kvcli.engine.stats import Stats
from kvcli.files import private_folder, write_private
from kvcli.models.catalog import Hashes, Stamped
from kvcli.settings.schema import Order

if TYPE_CHECKING:
    from kvcli.engine.model_info import ModelInfo
    from kvcli.settings.profile import Profile

SCHEMA = "kvcli.part/2"
FOLDER = "summaries"


@dataclass(frozen=True)
class Cache:
    """A folder of answers."""

    folder: Path  # kvcli's cache folder; entries are in a subfolder
    model: str  # fingerprint
    profile: str  # hash
    is_fresh: bool = False  # True: ignore results of earlier runs, but save those of this run

    @classmethod
    def of(cls, folder: Path, info: ModelInfo, profile: Profile, *, is_fresh: bool = False) -> Cache:
        return cls(folder / FOLDER, fingerprint(info, Hashes(folder)), profile.hash, is_fresh)

    def get(self, messages: Sequence[Mapping[str, str]], most: int) -> Turn | None:
        """Return the answer to the same question under the same settings, or None."""
        if self.is_fresh:
            return None
        try:
            saved = _entry_type().model_validate_json(self._file(messages, most).read_bytes())
        except (OSError, ValueError):  # missing, damaged, or of another version
            return None
        return Turn(saved.text, saved.ids, saved.finish, saved.stats, thinking=saved.thinking)

    def put(self, messages: Sequence[Mapping[str, str]], most: int, turn: Turn) -> str:
        """Save a finished answer; return the reason if that failed, or else ""."""
        file = self._file(messages, most)
        entry = {"schema": SCHEMA, "stats": dataclasses.asdict(turn.stats)}
        entry |= {name: getattr(turn, name) for name in ("text", "thinking", "ids", "finish")}
        try:
            private_folder(file.parent)
            write_private(file, json.dumps(entry, ensure_ascii=False))
        except OSError as error:
            return f"results of parts cannot be saved in {self.folder}: {error.strerror or error}"
        return ""

    def _file(self, messages: Sequence[Mapping[str, str]], most: int) -> Path:
        """Return the file of an entry. The messages contain all options except the length of the answer."""
        asked = json.dumps([SCHEMA, self.model, self.profile, most, [dict(m) for m in messages]], ensure_ascii=False)
        return self.folder / f"{hashlib.sha256(asked.encode()).hexdigest()[:32]}.json"


class _Entry(BaseModel):
    """A saved answer."""

    model_config = ConfigDict(strict=True)

    schema_: Literal["kvcli.part/2"] = Field(alias="schema")
    text: str
    thinking: str
    ids: tuple[int, ...]
    finish: Literal["stop", "length", "loop"]
    stats: Stats


@cache
def _entry_type() -> type[_Entry]:
    """The type of entries, complete: the module of Stats imports some types for type checkers only."""
    _Entry.model_rebuild(_types_namespace={"Order": Order, "Stats": Stats})
    return _Entry


def fingerprint(info: ModelInfo, hashes: Hashes) -> str:
    """Return a hash of the model's files, by content, and of the load settings."""
    facts: list[object] = [info.id, info.path, info.revision, info.dtype, info.quant, info.device.partition(":")[0]]
    try:
        files = sorted(p for p in Path(info.path).iterdir() if p.is_file())
    except OSError:  # no folder on this disk
        files = []
    facts.append(hashes.of([Stamped.of(file) for file in files]))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
