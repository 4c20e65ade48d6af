"""Read a head map: a file with one number per KV head that says how much of the KV cache the head needs.

Two file formats are read: the table of DuoAttention (arXiv 2410.10819; one line per layer, one number per KV head,
separated by tabs or spaces), and JSON with such lists under "heads", as `kvcli profile-heads` writes it.
"""

from __future__ import annotations

import json
import math
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.errors import BadInput, BadModel

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM


def read_headmap(path: str | Path) -> list[list[float]]:
    """Return the head weights [L][K], none negative. Raises BadInput for a missing file or other content."""
    path = Path(expanduser(path))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise _bad(path, f"it cannot be read: {why}") from None
    rows = _of_json(path, text) if text.lstrip()[:1] in ("{", "[") else _of_table(path, text)
    if not rows or len({len(row) for row in rows}) != 1 or not rows[0]:
        raise _bad(path, "its lines have different lengths, or there are none")
    if not all(math.isfinite(value) and value >= 0 for row in rows for value in row):
        raise _bad(path, "it holds numbers that are negative or not finite")
    return rows


def head_rows(path: str, lm: LM) -> list[list[float]]:
    """Return the head weights for `lm`. Raises BadInput if the shape differs, BadModel if heads store no own keys."""
    refuse_latents(lm, f"the head map {path}")
    rows = read_headmap(path)
    if len({(of.n_kv_heads, of.shared_from) for of in lm.shapes}) > 1:
        raise BadInput(
            f"the head map {path} is not for this model",
            code="bad_headmap",
            lines=["its layers differ in their KV heads, or share them, and a head map has as many in every layer"],
            try_=["--set policy.name=snap, which needs none"],
        )
    if (shape := (len(rows), len(rows[0]))) != (lm.n_layers, lm.n_kv_heads):
        raise BadInput(
            f"the head map {path} is of another model",
            code="bad_headmap",
            lines=[f"{shape[0]} layers x {shape[1]} KV heads, and this model has {lm.n_layers} x {lm.n_kv_heads}"],
            try_=["kvcli profile-heads writes one of this model"],
        )
    return rows


def refuse_latents(lm: LM, what: str) -> None:
    """Raise BadModel if heads share their keys (MLA), because evicting a slot for one head evicts it for all."""
    if any(of.rank for of in lm.shapes):
        raise BadModel(
            f"{what} needs KV per head, and heads of {lm.info.id} ({lm.info.family}) share latents",
            code="policy_unsupported",
            lines=["latent attention stores one vector a token and layer, which all heads read"],
            try_=["--set policy.name=snap", "--set policy.name=keydiff"],
        )


def _of_json(path: Path, text: str) -> list[list[float]]:
    try:
        found = json.loads(text)
        rows = found["heads"] if isinstance(found, dict) else found
        return [[float(value) for value in row] for row in rows]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise _bad(path, 'it has no lists of numbers under "heads"') from None


def _of_table(path: Path, text: str) -> list[list[float]]:
    try:
        return [[float(word) for word in line.split()] for line in text.splitlines() if line.strip()]
    except ValueError:
        raise _bad(path, "it is no table of numbers") from None


def _bad(path: Path, why: str) -> BadInput:
    return BadInput(
        f"{path} is no head map: {why}",
        code="bad_headmap",
        lines=["a head map has one line a layer, with one number a KV head"],
        try_=["kvcli profile-heads writes one"],
    )
