"""Head maps that ship with kvcli, for the bundled model and SmolLM2-135M.

A file of `headmaps/` is the `profile.json` of `kvcli profile-heads MODEL --probe ablate --context 1k`, renamed after
its model. It is used for the weight files that it names by their hash, and for no others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM

FOLDER = Path(__file__).parent / "headmaps"


def shipped_map(lm: LM) -> Path | None:
    """Return the file of the head map that ships for the weights of `lm`; None if there is none, or adapters change
    the weights."""
    files = lm.files.get("weights", [])
    if not files or "adapters" in lm.files:
        return None
    for path in sorted(FOLDER.glob("*.json")):
        made = json.loads(path.read_text(encoding="utf-8"))
        # only the files of a model of this shape are hashed, which takes a while for a large one
        is_alike = (made["layers"], made["kv_heads"], made["query_heads"]) == (lm.n_layers, lm.n_kv_heads, lm.n_heads)
        if is_alike and made["weights"] == lm.hashes.of(files):
            return path
    return None
