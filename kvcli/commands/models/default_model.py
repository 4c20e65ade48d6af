"""Writing of `default_model` to the user's config file, with the rest of it unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.commands.common.inputs import agrees, tell
from kvcli.commands.common.run_setup import config_of
from kvcli.errors import writing
from kvcli.files import private_folder, write_output
from kvcli.settings.problems import bad_config
from kvcli.settings.toml_positions import parse_document, read_document, toml_value

if TYPE_CHECKING:
    from kvcli.environment import Environment

KEY = "default_model"


def offer_default(world: Environment, name: str, wanted: bool) -> None:
    """Make the model the default, if `wanted` or after a yes of the user."""
    if config_of(world).default_model == name:
        if wanted:
            tell(world, f"{KEY} is {name} already")
        return
    if not wanted and not agrees(world, "make it the default model?"):
        return
    file = world.paths.config / "config.toml"
    with writing(file):
        private_folder(file.parent)
        old = read_document(file, str(file)) if file.exists() else parse_document("", str(file))
        if old.problems:
            raise bad_config(old.problems)
        write_output(file, with_default(old.text, name))
    after = config_of(world).default_model
    tell(world, f"{KEY} is {name} now, in {file}" + ("" if after == name else f", but here {after} by another file"))


def with_default(text: str, name: str) -> str:
    """Return the text of a config file with another default model."""
    mark = parse_document(text, "").marks.get((KEY,))
    if mark is None:  # a new key is the first line, which is in no table
        return f"{KEY} = {toml_value(name)}\n{text}"
    lines = text.split("\n")
    (first, start), (last, end) = mark.value, mark.end
    lines[first - 1 : last] = [lines[first - 1][: start - 1] + toml_value(name) + lines[last - 1][end - 1 :]]
    return "\n".join(lines)
