"""Cache key: the fields besides the token ids on which KV depends. All fields must match to use saved KV."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvcli.kernels.native import native
from kvcli.models.hashes import model_files, releases

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM

FORMAT = "kvcli.block/3"
NAMES = ("transformers_version", "_name_or_path", "_attn_implementation")  # in a config, without effect on the numbers


def cache_key(lm: LM) -> dict[str, str]:
    """Return the fields; {} for weights that are in no files.

    Bits of a model differ between kinds of processors and between library releases, so all of these are fields. Files
    count as they were when the model was loaded. Raises BadModel if they were replaced since and never hashed.
    """
    files = lm.files or (model_files(Path(lm.info.path)) if lm.info.path else {})
    if not files.get("weights"):
        return {}
    text = {k: v for k, v in lm.model.config.get_text_config().to_dict().items() if k not in NAMES}
    return {
        "format": FORMAT,
        **releases(),
        **{part: lm.hashes.of(its) for part, its in files.items()},
        "config": blake2b(json.dumps(text, sort_keys=True, default=str).encode(), digest_size=16).hexdigest(),
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
