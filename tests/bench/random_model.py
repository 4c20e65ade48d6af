"""Write the random 152M Llama of the benchmarks to a folder, with a tokenizer, so that every command can load it.

    python tests/bench/random_model.py FOLDER

Its text means nothing and its speed is that of any Llama of its size: what is timed is arithmetic, not words.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests import make
from tests.bench.harness import ran

SHAPE = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16384,
    "intermediate_size": 2816,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


def build() -> Any:
    """The model as transformers has it."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**SHAPE, eos_token_id=None)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def ours_of(model: Any) -> Any:
    """The same model as kvcli loads it."""
    from kvcli.engine.loading.open_lm import install_kernels, wrap_lm

    lm = wrap_lm(model)
    install_kernels(lm)
    return ran(lm)


def noise(n: int, vocab: int = 16384, seed: int = 1) -> list[int]:
    """So many tokens without meaning, none of them a special one."""
    return torch.randint(8, vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def opened(lm: Any, cache: Any = None, drafter: Any = None, **more: Any) -> Any:
    """A greedy session over the model, by default over a dense cache and without drafting."""

    cache = make.dense(lm) if cache is None else cache
    return make.session(lm, cache, drafter, **more)


def write(folder: Path) -> None:
    """The weights as safetensors, beside the demo model's tokenizer; ids beyond its words have no text."""
    from kvcli.demo import weights_dir

    build().save_pretrained(folder)
    for file in weights_dir().glob("*token*"):
        shutil.copy(file, folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
