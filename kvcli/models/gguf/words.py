"""Vocabulary of a GGUF file: keys that change what its tokens are, and rules that cut text: splits.toml."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tomli

from kvcli.errors import BadModel
from kvcli.models.gguf.header import Header, Listed
from kvcli.models.refusals import no_tokenizer

TABLE = Path(__file__).with_name("splits.toml")
# keys of the tokenizer: translated or without effect, as are token ids; None = any value
_WORDS: Mapping[str, tuple[object, ...] | None] = {
    **dict.fromkeys(("ggml.model", "ggml.pre", "ggml.tokens", "ggml.token_type", "ggml.scores", "ggml.merges")),
    **dict.fromkeys(("chat_template", "chat_templates", "huggingface.json", "ggml.token_type_count")),
    **dict.fromkeys(("ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_sep_token"), (True, False)),
    "ggml.add_space_prefix": (True, False),
    "ggml.remove_extra_whitespaces": (False,),
}


@cache
def splits() -> Mapping[str, Mapping[str, Any]]:
    """Rules by the names that a file may state."""
    rules = tomli.loads(TABLE.read_text(encoding="utf-8"))["rule"]
    return {name: rule for rule in rules for name in rule["names"]}


def check_words(header: Header, rows: int, leads: bool | None, refused: Callable[[str], BadModel], model: str) -> str:
    """Return the splitting rule of the tokenizer. Raises BadModel if the tokenizer is missing or of an unknown kind.

    `rows`: tokens that have an embedding. `leads`: whether a space leads text, if the architecture's class decides it.
    """
    meta = header.meta
    words, kind, split = (meta.get(f"tokenizer.ggml.{key}") for key in ("tokens", "model", "pre"))
    if not isinstance(words, Listed) or not words.count:
        raise no_tokenizer(model, "the file holds weights and no vocabulary", "another GGUF file of the model")
    if words.count > rows:
        raise refused(f"its vocabulary has {words.count:,} tokens, its embedding {rows:,} rows")
    if kind not in ("gpt2", "llama", "gemma4") or (kind == "gpt2" and split not in splits()):
        raise refused(f"tokenizer.ggml.model = {kind}, tokenizer.ggml.pre = {split} is not supported")
    kinds, stated = meta.get("tokenizer.ggml.token_type"), meta.get("tokenizer.ggml.add_space_prefix")
    if isinstance(kinds, Listed) and kinds.count != words.count:
        raise refused(f"its vocabulary has {words.count:,} tokens, but {kinds.count:,} token types")
    if stated is not None and stated != {"gpt2": False, "gemma4": False}.get(
        str(kind), stated if leads is None else leads
    ):
        raise refused(f"tokenizer.ggml.add_space_prefix = {stated} is not supported for its vocabulary")
    for key, value in meta.items():
        name = key.removeprefix("tokenizer.")
        if name != key and not name.startswith("chat_template.") and not name.endswith("_token_id"):
            harmless = _WORDS.get(name, ())
            if harmless is not None and value not in harmless:
                raise refused(f"{key} = {str(value)[:60]} is unknown and may change the output")
    return str(split) if kind == "gpt2" else ""
