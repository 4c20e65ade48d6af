"""Words at the edge of a program of ids: chat template, pieces of text, stop strings, harmless display."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcli.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, str]]
Note = Callable[[str], None]


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, note: Note | None = None) -> list[int]:
    """The ids that ask the model for the next answer. `note` hears what had to be done differently.

    A template without a system role gets the system text at the head of the first user message; a tokenizer
    without a template gets the plain texts, blank lines between them.
    """
    return encode(tokenizer, *render_text(tokenizer, messages, note=note))


def render_text(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, note: Note | None = None
) -> tuple[str, bool]:
    """The prompt as text, and whether special tokens must still be added (they must when there is no template)."""
    tell = note or (lambda _: None)
    if not messages:
        raise BadInput("there is nothing to ask", code="empty_prompt")
    if not getattr(tokenizer, "chat_template", None):
        tell("this model has no chat template: it continues the plain text")
        return "\n\n".join(m["content"] for m in messages), True
    system = messages[0]["content"].strip() if messages[0]["role"] == "system" else ""
    try:
        text = _template(tokenizer, messages)
        if system in text:  # some templates drop what they do not know without a word
            return text, False
    except BadInput:
        if not system:
            raise
    text = _template(tokenizer, fold_system(messages))
    tell("this model's chat template has no system role: the system text heads the first question")
    return text, False


def encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> list[int]:
    """Text to ids; `special` adds what the tokenizer puts around a text, a beginning-of-text token for example."""
    return [int(i) for i in tokenizer.encode(text, add_special_tokens=special)]


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Ids to text, exactly: special tokens shown, spaces left alone."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def fold_system(messages: Messages) -> list[Mapping[str, str]]:
    """The same messages with the system text at the head of the first user message."""
    system, first, *rest = messages
    return [{"role": first["role"], "content": f"{system['content']}\n\n{first['content']}"}, *rest]


def _template(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str:
    from jinja2 import TemplateError

    as_dicts: list[dict[str, Any]] = [dict(m) for m in messages]
    try:
        return str(tokenizer.apply_chat_template(as_dicts, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        roles = ", ".join(m["role"] for m in messages)
        raise BadInput(
            f"the model's chat template refuses this conversation: {error}",
            code="chat_template",
            lines=[f"messages: {roles}"],
            try_=["ask without a system message"],
        ) from None


def resume_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, heard: tuple[str, Sequence[int]], *, special: bool = False
) -> list[int]:
    """Ids of `text`, beginning with the ids already heard where `text` begins with what was heard.

    A model may spell its answer in other tokens than the tokenizer would, and then nothing after that place
    could be reused. So the heard ids stay, and only the text after them is taken from the tokenizer.
    """
    known, ids = heard
    if not known or special or not text.startswith(known) or not getattr(tokenizer, "is_fast", False):
        return encode(tokenizer, text, special)
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    fresh: list[int] = [int(i) for i in whole["input_ids"]]
    spans = [(int(start), int(end)) for start, end in whole["offset_mapping"]]
    cut = next((i for i, (start, _) in enumerate(spans) if start >= len(known)), len(fresh))
    if cut and spans[cut - 1][1] > len(known):
        return fresh  # a token spans the seam
    return [*ids, *fresh[cut:]]
