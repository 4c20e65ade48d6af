"""End of an answer: stop tokens and stop strings from a tokenizer and its chat template. Stop tokens from a model's
configs are read in engine/hf/model_settings.py."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

from kvcli.models.channels import mark_ids
from kvcli.models.text import render_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# stop tokens, whatever the files declare as end of text (llama.cpp checks for them too)
_NAMES = """<|im_end|> <|eot_id|> <|eom_id|> <end_of_turn> <turn|> <|end|> <|return|> <|call|> <|endoftext|>
    <|end_of_text|>""".split()
_SAID = "Well, 71."
_ASKED = [{"role": r, "content": c} for r, c in (("user", "How many?"), ("assistant", _SAID), ("user", "Why?"))]


def ends(tokenizer: PreTrainedTokenizerBase, vocab: int) -> tuple[frozenset[int], tuple[str, ...]]:
    """Stop tokens within `vocab`, and stop strings of a template whose marks are no tokens."""
    words = {str(token): i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if str(token)}
    # marks between channels
    between = {i for i, name in mark_ids(tokenizer).items() if name not in _NAMES or name == "<|end|>"}
    found = {words[name] for name in _NAMES if name in words} | {getattr(tokenizer, "eos_token_id", None)}
    behind = ""
    with suppress(Exception):  # a bad template is reported at the first question
        text, has_template = render_text(tokenizer, _ASKED)
        behind = text.rpartition(_SAID)[2] if has_template and _SAID in text else ""
    word = re.compile(rf"\s*({'|'.join(map(re.escape, sorted(words, key=len, reverse=True))) or '(?!)'})")
    while (mark := word.match(behind)) and words[mark[1]] in between:
        behind = behind[mark.end() :]
    found |= {words[mark[1]]} if mark else set()
    strings = [] if mark else re.findall(r"\A\s*(<\|[^\s|]{1,40}\|>)", behind)
    return frozenset(i for i in found - between if type(i) is int and 0 <= i < vocab), tuple(strings)
