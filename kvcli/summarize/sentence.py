"""Select the one sentence of a small model's answer that is used: the first statement about the passage."""

from __future__ import annotations

import re

from kvcli.summarize.claim_words import sentences, words

# Share of a sentence's words that the passage has. Below it, nearly all sentences that SmolLM2-135M wrote about 57
# passages, with four wordings, were about itself or "the text above", or made up.
LEAST = 0.6
FEWEST = 4  # different words of a statement: "2.1." ends like a sentence but states nothing
_STATED = re.compile(r"[.!…\u3002\uff01][\"')\]”’»]*\Z")  # no heading, no question, no "as follows:"


def sentence_of(answer: str, passage: str) -> str:
    """Return the sentence as a list item, or "" if no whole sentence is about the passage."""
    there = {word.key for word in words(passage)}
    for start, end in sentences(answer):
        said = answer[start:end]
        told = {word.key for word in words(said)}
        if len(told) >= FEWEST and len(told & there) >= LEAST * len(told) and _STATED.search(said):
            return f"- {' '.join(said.split()).lstrip('-*•# ')}"
    return ""
