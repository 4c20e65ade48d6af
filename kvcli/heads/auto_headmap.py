"""Automatic head map of a model: computed once by the ablation probe and saved for later runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING

from kvcli.errors import BadConfig
from kvcli.files import private_folder, write_private
from kvcli.heads.request import ProbeRequest
from kvcli.heads.run import probe
from kvcli.methods.policies.fastgen.shipped_map import FOLDER, shipped_map
from kvcli.prefix_cache.prefix_cache import cache_key
from kvcli.quality.controls import full_profile
from kvcli.schemas.heads import SAMPLE

if TYPE_CHECKING:
    from pathlib import Path

    from kvcli.chat.model import Model
    from kvcli.engine.hf.lm import LM

FORMAT = "kvcli.heads/1"  # to be changed when the probe or its request changes
FIELDS = ("kvcli", "torch", "transformers", "weights", "files", "config", "load.quant", "load.dtype")  # of a cache key


def auto_headmap(model: Model, folder: Path, tell: Callable[[str], None] = lambda said: None) -> Path:
    """Return the path of the model's head map: the one that ships with kvcli, or one in `folder`, computed if missing.

    The `ablate` probe is used, because it also finds heads that act through other heads. Raises BadConfig for weights
    that are in no files, and BadModel if heads share their keys (MLA).
    """
    if (shipped := shipped_map(model.lm)) is not None:
        return shipped
    if (path := place(model.lm, folder)) is None:
        raise BadConfig(
            'policy.headmap = "auto" saves a map per model folder, and this model has none',
            code="no_headmap",
            try_=["--set policy.headmap=FILE, written by kvcli profile-heads"],
        )
    if not path.exists():
        tell(f"measuring which heads of {model.info.id} need the whole context (once, saved in {path})")
        plain = full_profile(model.profile).replace(exactness="approx", policy={"name": "fastgen"})
        asked = ProbeRequest(probes=("ablate",), context=min(SAMPLE, model.limit), settings=plain.policy.settings)
        found = probe(model, asked)
        private_folder(path.parent)
        write_private(path, json.dumps({"format": FORMAT, "model": model.info.id, "heads": found.heads.tolist()}))
    return path


def was_made(model: str, folder: Path) -> bool:
    """Return True if there is a map for a model of this name, whose files may have changed since."""
    for path in (*FOLDER.glob("*.json"), *folder.glob("*.json")):
        try:
            if json.loads(path.read_text(encoding="utf-8")).get("model") == model:
                return True
        except (OSError, ValueError, AttributeError):  # reported or recomputed when it is used
            continue
    return False


def place(lm: LM, folder: Path) -> Path | None:
    """Return the path of a loaded model's head map, which may not exist; None if its weights are in no files."""
    known = cache_key(lm)
    if not known:
        return None
    name = blake2b(json.dumps([FORMAT, *(known[field] for field in FIELDS)]).encode(), digest_size=16).hexdigest()
    return folder / f"{name}.json"
