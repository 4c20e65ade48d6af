"""What stands in for a method of a tokenizer whose files may come from a stranger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self
from weakref import ref

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Guarded:
    """Holds a process, and is held by its tokenizer. A copy of the tokenizer gets a process of its own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._whose = ref(tokenizer)  # in a circle, the process would wait for the garbage collector

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = self._whose()
        assert tokenizer is not None
        return tokenizer

    def __reduce__(self) -> tuple[type[Self], tuple[PreTrainedTokenizerBase]]:
        return type(self), (self._tokenizer,)
