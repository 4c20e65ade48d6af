"""Names of the models on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.demo import BUNDLED
from kvcli.models.catalog import BY_NAME, file_of
from kvcli.models.source import cached_ids

if TYPE_CHECKING:
    from pathlib import Path

    from kvcli.settings.config import Config


def known(config: Config, data: Path) -> list[tuple[str, str]]:
    """Return names and their origin: the bundled model, config files, downloaded models, the Hugging Face cache."""
    names = {**dict.fromkeys(BUNDLED, "demo"), **dict.fromkeys(config.models, "config")}
    for one in BY_NAME.values():
        if one.package and file_of(one, data).exists():
            names.setdefault(one.name, "fetched")
    for name in cached_ids():
        names.setdefault(name, "cache")
    return list(names.items())
