"""Base class of replacements for methods of a tokenizer whose files may be untrusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self
from weakref import ref

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Guarded:
    """Owner of a worker process, stored in its tokenizer. A copy of the tokenizer gets a separate process."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._whose = ref(tokenizer)  # a reference cycle would keep the process alive until garbage collection

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = self._whose()
        assert tokenizer is not None
        return tokenizer

    def __reduce__(self) -> tuple[type[Self], tuple[PreTrainedTokenizerBase]]:
        return type(self), (self._tokenizer,)
