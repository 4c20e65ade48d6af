"""Fingerprint of a loaded model: equal for the same files loaded the same way, different otherwise."""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import sha256
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from kvcli.models.catalog import code_hash
from kvcli.version import __version__

if TYPE_CHECKING:
    from kvcli.chat.model import Model

PLAIN = ("family", "parameters", "layers", "heads", "kv_heads", "head_dim", "vocab", "dtype", "quant", "revision")


def fingerprint(model: Model) -> str:
    """Return sixteen digits from hashes of the model's files, the shape, the first embedding weights, and the bytes of
    this package. The package counts because, in a checkout, answers from before a code change are not valid after it.
    """
    facts = asdict(model.info)
    said: list[object] = [__version__, code_hash(), [facts[key] for key in PLAIN]]
    said += [*(model.lm.hashes.of(files) for files in model.lm.files.values()), *model.profile.load.adapters]
    embedding = model.lm.model.get_input_embeddings().weight
    rows = torch.arange(max(1, 4096 // embedding.shape[1]), device=embedding.device)
    said.append(functional.embedding(rows, embedding).flatten().double().cpu().tolist())
    return sha256(json.dumps(said).encode()).hexdigest()[:16]
