"""Process in which an untrusted tokenizer encodes and decodes slow inputs. See tokenizer.py."""

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
    """Run each request line of standard input with the tokenizer.json of the descriptor."""
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
        """Return the result of the named function, after loading the tokenizer."""
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
    """Encode every string of a JSON text, to test the tokenizer."""
    for word in re.findall(r'"(?:[^"\\]|\\.)*"', words):
        tokenizer.encode(json.loads(word))


DOES = {does.__name__: does for does in (encode, decode, check, encode_among, normalize)}
