"""Weights and tokenizer of a model, opened once for the processes that are forked from this one."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvcli.engine.loading.open_lm import files_of, is_invariant, open_lm
from kvcli.engine.resources import use_threads
from kvcli.errors import KvcliError
from kvcli.models.channels import ends
from kvcli.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvcli.engine.hf.lm import LM
    from kvcli.models.source import Source
    from kvcli.settings.schema import Load

log = logging.getLogger("kvcli.server")


@dataclass(frozen=True)
class SharedWeights:
    """A model as its files were opened. This process computes nothing with it, so every fork begins with the same."""

    given: Source  # as found by name
    found: Source  # the same, or a copy converted from GGUF
    load: Load
    tokenizer: PreTrainedTokenizerBase
    lm: LM
    threads: int  # used where `load.threads` is 0
    nbytes: int  # memory that the forks share and that belongs to no file
    base: int  # memory of the program before

    @classmethod
    def open(cls, given: Source, found: Source, load: Load, base: int) -> SharedWeights:
        """Open the files on one thread: OpenMP's threads do not survive a fork, and a fork would wait for them."""
        before, threads = _private_bytes(), torch.get_num_threads()
        use_threads(1)
        tokenizer, lm = open_model(found, replace(load, threads=1))
        if (chats := vars(tokenizer).get("apply_chat_template")) is not None:
            chats.stop()
        return cls(given, found, load, tokenizer, lm, threads, max(0, _private_bytes() - before), base)

    def matches(self, found: Source, load: Load) -> bool:
        """True if these are the weights of the same files, unchanged since, under the same settings."""
        why = f"the server has {self.given.id}" if replace(found, files=()) != replace(self.found, files=()) else ""
        loaded, wanted = asdict(self.load), asdict(load)
        others = [f"load.{key}" for key in wanted if wanted[key] != loaded[key] and key != "threads"]
        if not why and others:
            why = f"the server has another {' and '.join(others)}"
        try:
            if not why and files_of(found, load.adapters) != self.lm.files:
                why = "its files changed since the server loaded them"
        except KvcliError as error:  # reported where they are loaded
            why = error.message
        if why:
            log.info("this command loads the model itself: %s", why)
        return not why

    def take(self, load: Load) -> tuple[PreTrainedTokenizerBase, LM]:
        """Return tokenizer and weights for a process that was forked, and use its number of threads."""
        threads = load.threads or self.threads
        use_threads(threads)
        if threads > 1:  # torch's layers may divide their sums among them
            self.lm.is_row_invariant = is_invariant(self.lm)
        return self.tokenizer, self.lm

    def begin(self) -> None:
        """Start the sandbox of the chat template, for which the first question of a process would wait."""
        if (chats := vars(self.tokenizer).get("apply_chat_template")) and self.tokenizer.chat_template:
            chats.start()


def open_model(found: Source, load: Load) -> tuple[PreTrainedTokenizerBase, LM]:
    """Open tokenizer and weights, and find out what ends an answer."""
    # first: its errors show at once, and its chat template is compiled while the weights are loaded
    tokenizer = load_tokenizer(found, load.trust_remote_code)
    lm = open_lm(found, **asdict(load))  # the keys of [load] are the parameters
    ids, strings = ends(tokenizer, lm.vocab)
    lm.stop_ids, lm.stop_strings = lm.stop_ids | ids, (*lm.stop_strings, *strings)
    return tokenizer, lm


def _private_bytes() -> int:
    """Return the resident bytes of this process that are not mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)
