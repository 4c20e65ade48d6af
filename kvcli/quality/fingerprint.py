"""Which weights answered: equal for the same files loaded alike, different for others."""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.version import __version__

if TYPE_CHECKING:
    from kvcli.chat.local import Model

CODE = (".py", ".so", ".pyd")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
PLAIN = ("family", "parameters", "layers", "heads", "kv_heads", "head_dim", "vocab", "dtype", "quant", "revision")


def fingerprint(model: Model) -> str:
    """Sixteen digits from the files' names, sizes and times, the shape, a look at the embedding, and this package's
    own files: in a checkout, an answer of the code before a change says nothing of the code behind it.

    Reading all weights again would take longer than the suite; a file that was merely copied counts as another.
    """
    facts = asdict(model.info)
    said: list[object] = [
        __version__,
        _files(Path(__file__).resolve().parents[1], CODE, "**/*"),
        [facts[key] for key in PLAIN],
    ]
    folder = Path(model.info.path)
    if model.info.path and folder.is_dir():
        said.append(_files(folder, WEIGHTS, "*"))
    first = model.lm.model.get_input_embeddings().weight.detach()
    said.append(first.flatten()[:4096].double().cpu().tolist())
    return sha256(json.dumps(said).encode()).hexdigest()[:16]


def _files(folder: Path, endings: tuple[str, ...], where: str) -> list[tuple[str, int, int]]:
    """Name, size and time of the files with such an ending."""
    found = sorted(path for path in folder.glob(where) if path.suffix in endings)
    stats = ((path.relative_to(folder).as_posix(), path.stat()) for path in found)
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
