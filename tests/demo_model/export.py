"""Turn a training checkpoint into the folder that transformers loads.

python -m tests.demo_model.export RUN_FOLDER/last.pt OUT_FOLDER [--model demo-small]
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from kvcli.demo import BUNDLED, weights_dir
from tests.demo_model.network import Network, Shape
from tests.demo_model.tokenizer import BOS, END, PAD, save_tokenizer


def load_checkpoint(path: Path) -> Network:
    """The network of a training checkpoint, ready to be evaluated."""
    state = torch.load(path, weights_only=True)
    network = Network(Shape(**state["shape"]))
    network.load_state_dict(state["network"])
    return network.eval()


def config(shape: Shape) -> dict[str, object]:
    """The transformers configuration; its positions are those that were trained."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head_width,
        "intermediate_size": shape.ffn,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "max_position_embeddings": shape.max_positions,
        "initializer_range": 0.05,
        "dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": BOS,
        "eos_token_id": END,
        "pad_token_id": PAD,
    }


def export(network: Network, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights in bfloat16, configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: w.detach().to(torch.bfloat16).contiguous() for name, w in network.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the library leaves it to its owner alone
    (folder / "config.json").write_text(json.dumps(config(network.shape), indent=2) + "\n")
    generation = {"bos_token_id": BOS, "eos_token_id": END, "pad_token_id": PAD, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.demo_model.export", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=BUNDLED, default="demo", help="whose card goes with it")
    parser.add_argument("--tokenizer", type=Path, default=weights_dir() / "tokenizer.json")
    options = parser.parse_args(arguments)
    export(load_checkpoint(options.checkpoint), Tokenizer.from_file(str(options.tokenizer)), options.folder)
    card = weights_dir(options.model) / "README.md"
    if card.exists() and not (options.folder / "README.md").exists():
        shutil.copy(card, options.folder / "README.md")


if __name__ == "__main__":
    main()
