"""Text of a new profile file: every key, commented out, with its current value and meaning."""

from __future__ import annotations

from kvcli.settings.problems import any_of
from kvcli.settings.profile import Method, Profile
from kvcli.settings.schema import METHOD_TABLES, ORDER
from kvcli.settings.small_file import toml_value
from kvcli.settings.values import comments_of, keys_of


def new_profile(name: str, base: Profile) -> str:
    """Text of a profile that extends `base` and changes nothing yet."""
    lines = [
        f"# kvcli chat -P {name}",
        f"# Take the # off a line to set it. What stays commented is as in {base.name}, whose values are shown.",
        "schema = 1",
        f"extends = {toml_value(base.name)}",
        'description = ""',
        f"# exactness = {toml_value(base.exactness)}",
    ]
    for table in ORDER:
        lines += ["", f"[{table}]"]
        filled = getattr(base, table)
        if isinstance(filled, Method):
            names = any_of([toml_value(known) for known in base.rules.registries[table]])
            lines.append(_commented(METHOD_TABLES[table][0], filled.method, names))
            filled = filled.settings
        schema: type = type(filled)
        comments = comments_of(schema)
        lines += [_commented(key, getattr(filled, key), comments.get(key, "")) for key in keys_of(schema)]
    return "\n".join(lines) + "\n"


def _commented(key: str, value: object, comment: str) -> str:
    shown = "..." if value is None else toml_value(value)
    comment = f"the model's unless set; {comment}" if value is None else comment
    return f"{f'# {key} = {shown}':<32}  # {comment}"
