"""What keys and values depend on beside the text: the same in every field, or what was kept is another model's."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvcli.kernels.native import native
from kvcli.settings.small_file import open_regular
from kvcli.version import __version__

if TYPE_CHECKING:
    from kvcli.engine.lm import LM

FORMAT = "kvcli.block/2"
LOOKS, LOOK = 64, 4096  # places of a file that are looked at, and bytes at each
NAMES = ("transformers_version", "_name_or_path", "_attn_implementation")  # in a config, and nothing to the numbers


def identity(lm: LM) -> dict[str, str]:
    """By field; {} for weights that lie in no files.

    Bits of a model differ between kinds of processors and between releases of what computes, so all are fields. Asked
    when a model was just loaded: files that are replaced later are another model's.
    """
    folder = Path(lm.info.path)
    files = sorted(folder.glob("*.safetensors")) if lm.info.path and folder.is_dir() else [folder]
    if not lm.info.path or not files or not all(file.is_file() for file in files):
        return {}
    code = sorted(folder.glob("*.py")) if folder.is_dir() else []  # some models bring their own
    text = lm.model.config.get_text_config().to_dict()
    return {
        "format": FORMAT,
        "kvcli": __version__,
        "torch": torch.__version__,
        "weights": " ".join(f"{file.name} {look(file)}" for file in (*files, *code)),
        "config": _short(json.dumps({k: v for k, v in text.items() if k not in NAMES}, sort_keys=True, default=str)),
        "load.quant": lm.info.quant,
        "load.dtype": lm.info.dtype,
        "device": _device(lm.device),
        "layers": lm.info.backend,
    }


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    served = native() if device.type == "cpu" else None
    return f"{device.type} {served.level}" if served is not None else device.type


def look(file: Path) -> str:
    """Of its size, when it was written, its beginning, and places all over it: reading gigabytes would take longer
    than it saves, and a model of which a few layers were trained further may differ between those places.
    """
    digest = hashlib.blake2b(digest_size=8)
    with open_regular(file) as stream:
        stat = os.fstat(stream.fileno())
        digest.update(f"{(size := stat.st_size)} {stat.st_mtime_ns}".encode())
        digest.update(stream.read(1 << 20))
        for i in range(LOOKS):
            stream.seek(size * i // LOOKS)
            digest.update(stream.read(LOOK))
    return digest.hexdigest()


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
