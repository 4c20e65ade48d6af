"""The one sentence that counts of a small model's answer: the first statement that is about the passage at all."""

from __future__ import annotations

import re

from kvcli.summarize.claim_words import sentences, words

# Share of a sentence's words that stand in the passage. Below it, nearly all that SmolLM2-135M said of 57 passages, in
# four wordings, was about itself or "the text above", or made up
LEAST = 0.6
FEWEST = 4  # different words of a statement: "2.1." ends as one and says nothing
_STATED = re.compile(r"[.!…\u3002\uff01][\"')\]”’»]*\Z")  # no heading, no question, no "as follows:"


def sentence_of(answer: str, passage: str) -> str:
    """As a point of a list; nothing where no whole sentence is about the passage."""
    there = {word.key for word in words(passage)}
    for start, end in sentences(answer):
        said = answer[start:end]
        told = {word.key for word in words(said)}
        if len(told) >= FEWEST and len(told & there) >= LEAST * len(told) and _STATED.search(said):
            return f"- {' '.join(said.split()).lstrip('-*•# ')}"
    return ""
