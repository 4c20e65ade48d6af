"""Options of another engine that come nearest to a profile, and what of the profile it lacks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli

from kvcli.schemas.listings import ExportedProfile

if TYPE_CHECKING:
    from kvcli.settings.profile import Profile

TABLE = tomli.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ENGINES = tuple(name for name in TABLE if name != "all")


def export(profile: Profile, engine: str) -> ExportedProfile:
    """Translate the settings of a profile that are no defaults, by export.toml, to a command line or to fields."""
    keys, why = TABLE[engine]["keys"], TABLE["all"]["lost"]
    options, approximated, lost = dict[str, list[str]](), dict[str, str](), dict[str, str]()
    objects = dict[str, dict[str, Any]]()  # of options whose value is JSON: several keys share one
    used = set[str]()

    def filled(word: str, value: object) -> str:
        def said(at: re.Match[str]) -> str:
            used.add(at[1])
            one = profile.values.get(at[1], value) or "DRAFT"  # a draft model that kvcli chooses has no name here
            return json.dumps(one) if word.startswith("{") else str(one)

        return re.sub(r"<([\w.]*)>", said, word)

    for key, value in profile.written.items():
        entry: list[str] | None = keys.get(f"{key}={str(value).lower()}", keys.get(key))
        if entry is None:
            lost[key] = why[key.partition(".")[0]]
            continue
        name = ""
        for word in entry:
            if word.startswith("~"):
                approximated[key] = word[1:]
            elif word.startswith("{"):
                objects.setdefault(name, {}).update(json.loads(filled(word, value)))
                options[name] = [json.dumps(objects[name])]
            elif word.startswith("--") or not word:
                options[name := word] = []
            else:
                options[name] = [filled(word, value)]
    words = [*TABLE[engine]["start"], *(word for name, values in options.items() if name for word in (name, *values))]
    lost = {key: said for key, said in lost.items() if key not in used}
    return ExportedProfile(engine=engine, words=words, fields=objects.get("", {}), approximated=approximated, lost=lost)
