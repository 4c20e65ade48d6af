"""The process in which a tokenizer of a stranger cuts and joins what might take it long. See tokenizing.py."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from kvcli.models.control_words import encode_among, normalize
from kvcli.sandbox import preload, serve, set_limits


def main(parent: int, limits: dict[str, Any], descriptor: int) -> int:
    """Do what each line on standard input says, with the tokenizer.json of the descriptor."""
    set_limits(parent, limits)
    preload("encodings")
    made = os.pread(descriptor, os.fstat(descriptor).st_size, 0)

    @cache
    def tokenizer() -> Tokenizer:
        its = Tokenizer.from_buffer(made)
        its.no_padding()
        its.no_truncation()
        return its

    def answered(asked: Any) -> dict[str, Any]:
        """What the function of this name makes of what is given, once the tokenizer is there."""
        its, (name, *given) = tokenizer(), asked or ["check", "[]"]
        return {"made": DOES[name](its, *given)}

    return serve(answered)


def encode(tokenizer: Tokenizer, text: str, special: bool, letters: bool, places: bool) -> tuple[list[int], Any]:
    tokenizer.encode_special_tokens = letters
    encoding = tokenizer.encode(text, add_special_tokens=special)
    return encoding.ids, encoding.offsets if places else []


def decode(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=skip))


def check(tokenizer: Tokenizer, words: str) -> None:
    """Every string in these, JSON, goes through."""
    for word in re.findall(r'"(?:[^"\\]|\\.)*"', words):
        tokenizer.encode(json.loads(word))


DOES = {does.__name__: does for does in (encode, decode, check, encode_among, normalize)}
