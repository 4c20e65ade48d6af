"""A model in a folder, as others publish them, that says what it is told to, token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.small_tokenizers import CHAT, marked


def parrot(
    folder: Path,
    says: Sequence[str],
    *,
    special: tuple[str, ...] = (),
    template: str | None = CHAT,
    eos: Sequence[int] = (),
    generation: Mapping[str, Any] | None = None,
    variables: Mapping[str, Any] | None = None,
    **config: Any,
) -> Any:
    """Behind the last letter of a prompt it says these pieces, none twice, each a token, and the last one for ever."""
    tokenizer = marked(special, tuple(piece for piece in says if piece not in special and len(piece) > 1), template)
    asked = {"tokenize": False, "add_generation_prompt": True, **(variables or {})}
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], **asked) if template else "?"
    ids = [tokenizer.encode(prompt)[-1], *(tokenizer.encode(piece)[0] for piece in says)]
    vocab = -(-len(tokenizer) // 32) * 32
    about = {"hidden_size": vocab, "vocab_size": vocab, "intermediate_size": 32, "num_hidden_layers": 1}
    about |= {"num_attention_heads": 4, "num_key_value_heads": 4, "eos_token_id": list(eos) or None}
    model = LlamaForCausalLM(LlamaConfig(**about | {"bos_token_id": None} | config))
    for name, weight in model.named_parameters():
        weight.data = torch.ones_like(weight) if name.endswith("norm.weight") else torch.zeros_like(weight)
    model.model.embed_tokens.weight.data = torch.eye(vocab)
    for now, then in zip(ids, [*ids[1:], ids[-1]], strict=True):
        model.lm_head.weight.data[then, now] = 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": list(eos) or None, **(generation or {})})
    )
    return tokenizer
