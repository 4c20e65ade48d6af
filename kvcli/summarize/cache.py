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
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

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
            saved = json.loads(self._file(messages, most).read_text(encoding="utf-8"))
            if saved["schema"] != SCHEMA:
                return None
            text, thinking, ids, stats = saved["text"], saved["thinking"], saved["ids"], Stats(**saved["stats"])
            if not type(text) is type(thinking) is str or not _is_whole(stats):
                return None
            if saved["finish"] not in ("stop", "length", "loop"):
                return None
            if not isinstance(ids, list) or not all(type(i) is int for i in ids):
                return None
            # a lone surrogate cannot be written to any output
            json.dumps([text, thinking, saved["stats"]], ensure_ascii=False).encode()
            return Turn(text, tuple(ids), saved["finish"], stats, thinking=thinking)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # missing, damaged, or of another version
            return None

    def put(self, messages: Sequence[Mapping[str, str]], most: int, turn: Turn) -> str:
        """Save a finished answer; return the reason if that failed, or else ""."""
        file = self._file(messages, most)
        entry: dict[str, Any] = {
            "schema": SCHEMA,
            "text": turn.text,
            "thinking": turn.thinking,
            "ids": list(turn.ids),
            "finish": turn.finish,
            "stats": dataclasses.asdict(turn.stats),
        }
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


def _is_whole(stats: Stats) -> bool:
    """True if each figure has the type of a new Stats object's figure."""
    fresh = Stats()
    for one in dataclasses.fields(Stats):
        value, wanted = getattr(stats, one.name), getattr(fresh, one.name)
        if isinstance(wanted, dict):
            kinds: tuple[type, ...] = (int, float) if one.name == "sampling" else (int,)
            is_good = isinstance(value, dict) and all(type(n) in kinds for n in value.values())
        elif isinstance(wanted, list):
            kinds = {"shortages": (str,), "plain": (float, int)}.get(one.name, (int,))
            is_good = isinstance(value, list) and all(type(item) in kinds for item in value)
        elif isinstance(wanted, float):
            is_good = type(value) in (int, float)
        else:
            is_good = type(value) is type(wanted) or (wanted is None and type(value) is int)
        if not is_good:
            return False
    return stats.order in get_args(Order)


def fingerprint(info: ModelInfo, hashes: Hashes) -> str:
    """Return a hash of the model's files, by content, and of the load settings."""
    facts: list[object] = [info.id, info.path, info.revision, info.dtype, info.quant, info.device.partition(":")[0]]
    try:
        files = sorted(p for p in Path(info.path).iterdir() if p.is_file())
    except OSError:  # no folder on this disk
        files = []
    facts.append(hashes.of([Stamped.of(file) for file in files]))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
