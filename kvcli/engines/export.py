"""Options of another engine that come nearest to a profile, and what of the profile it lacks."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli

if TYPE_CHECKING:
    from kvcli.settings.profile import Profile

TABLE = tomli.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ENGINES = tuple(name for name in TABLE if name != "all")


@dataclass
class ExportedProfile:
    """A command line, or the fields of a `generation_config.json` if there is none, and differences by profile key."""

    words: list[str]
    fields: dict[str, Any] = field(default_factory=dict)
    approximated: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)


def export(profile: Profile, engine: str) -> ExportedProfile:
    """Translate the settings of a profile that are no defaults, by export.toml."""
    keys, why = TABLE[engine]["keys"], TABLE["all"]["lost"]
    options, made = dict[str, list[str]](), ExportedProfile(list(TABLE[engine]["start"]))
    objects = dict[str, dict[str, Any]]()  # of options whose value is JSON: several keys share one
    used = set[str]()

    def filled(word: str, value: object) -> str:
        def said(at: re.Match[str]) -> str:
            used.add(at[1])
            one = profile.values.get(at[1], value)
            return json.dumps(one) if word.startswith("{") else str(one)

        return re.sub(r"<([\w.]*)>", said, word)

    for key, value in profile.written.items():
        entry: list[str] | None = keys.get(f"{key}={str(value).lower()}", keys.get(key))
        if entry is None:
            made.lost[key] = why[key.partition(".")[0]]
            continue
        name = ""
        for word in entry:
            if word.startswith("~"):
                made.approximated[key] = word[1:]
            elif word.startswith("{"):
                objects.setdefault(name, {}).update(json.loads(filled(word, value)))
                options[name] = [json.dumps(objects[name])]
            elif word.startswith("--") or not word:
                options[name := word] = []
            else:
                options[name] = [filled(word, value)]
    made.fields = objects.get("", {})
    made.lost = {key: said for key, said in made.lost.items() if key not in used}
    made.words += [word for name, values in options.items() if name for word in (name, *values)]
    return made
