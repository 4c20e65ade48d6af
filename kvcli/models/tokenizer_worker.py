"""The process in which a tokenizer of a stranger cuts and joins what might take it long. See tokenizing.py."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from kvcli.models.control_words import encode_among, normalize
from kvcli.sandbox import bound, preload, shut


def main(parent: int, limits: dict[str, Any], descriptor: int) -> int:
    """Do what each line on standard input says, with the tokenizer.json of the descriptor; a line each in answer."""
    bound(parent, limits)
    preload("encodings")
    made = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    shut()
    tokenizer = None
    for line in sys.stdin.buffer:
        try:
            tokenizer = tokenizer or Tokenizer.from_buffer(made)
            tokenizer.no_padding()
            tokenizer.no_truncation()
            answer = answered(tokenizer, json.loads(line))
        except MemoryError:
            answer = {"heavy": "it takes too much memory"}
        except BaseException as error:  # a panic of what is written in Rust is no Exception
            answer = {"broken": f"{type(error).__name__}: {error}"[:300]}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
    return 0


def answered(tokenizer: Tokenizer, asked: dict[str, Any] | None) -> dict[str, Any]:
    """{"ids", "places"} of a "text", {"text"} of "ids", or {} once every word in "words", JSON, went through.

    Of a text "among" added words {"tokens"}, or {"normal"} where it is null.
    """
    if asked is None or "words" in asked:
        for word in _words(json.loads(asked["words"])) if asked else ():
            tokenizer.encode(word)
        return {}
    if "ids" in asked:
        return {"text": tokenizer.decode(asked["ids"], skip_special_tokens=asked["skip"])}
    if "among" in asked:
        text, words = asked["text"], asked["among"]
        return (
            {"normal": normalize(tokenizer, text)}
            if words is None
            else {"tokens": encode_among(tokenizer, text, words)}
        )
    tokenizer.encode_special_tokens = asked["letters"]
    encoding = tokenizer.encode(asked["text"], add_special_tokens=asked["special"])
    return {"ids": encoding.ids, "places": encoding.offsets if asked["places"] else []}


def _words(value: object) -> Iterator[str]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict | list):
            waiting += [*one.keys(), *one.values()] if isinstance(one, dict) else one
