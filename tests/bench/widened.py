"""Write the widened demo to a folder: the demo model's function at the cost of a model of 150M parameters.

    python tests/bench/widened.py FOLDER

The bundled demo model is so small that a pass of it is all overhead, and a second model could not be cheap beside it.
Here it stands in the corner of a larger one. Its stream is four times as wide, with zeros; a norm over it takes four
times as small a mean, which weights of half the size make up for to the bit. Further heads, feed-forward numbers and
layers are random, computed like any others, and leave by weights of zero. So its texts are the demo's, what the small
sibling of the demo drafts is as often right, and times are those of a model of this size. Further layers come first:
the last ones look at the text, as those of a model do that was trained.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

WIDER = 4  # a power of four, for its root to be one of two
LAYERS, HEADS, KEY_HEADS, FFN = 10, 16, 8, 2816
OUT = ("o_proj.weight", "down_proj.weight")  # through which a layer adds to the stream


def widened(demo: Any) -> Any:
    """The model as transformers has it."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig.from_dict(demo.config.to_dict())
    config.hidden_size *= WIDER
    config.rms_norm_eps /= WIDER
    config.num_hidden_layers, config.intermediate_size = LAYERS, FFN
    config.num_attention_heads, config.num_key_value_heads = HEADS, KEY_HEADS
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    small = dict(demo.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(OUT) or "embed" in name:
                weight.zero_()
            if (corner := small.get(_of_demo(name, LAYERS - demo.config.num_hidden_layers))) is None:
                continue
            corner = corner * WIDER**-0.5 if corner.ndim == 1 else corner
            weight[tuple(slice(n) for n in corner.shape)] = corner
    return model


def _of_demo(name: str, before: int) -> str:
    """The name in the demo, whose layers have so many others before them."""
    return re.sub(r"(?<=layers\.)\d+", lambda at: str(int(at[0]) - before), name)


def write(folder: Path) -> None:
    """The weights as safetensors, beside the demo's tokenizer and settings."""
    from transformers import AutoModelForCausalLM

    from kvcli.demo import weights_dir

    widened(AutoModelForCausalLM.from_pretrained(weights_dir(), dtype=torch.bfloat16)).save_pretrained(folder)
    for file in (*weights_dir().glob("*token*"), weights_dir() / "chat_template.jinja"):
        shutil.copy(file, folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
