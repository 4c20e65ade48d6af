"""The tokenizer that lies beside the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.errors import BadModel
from kvcli.template import Chats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvcli.source import Source


def load_tokenizer(found: Source, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Read it from the model's folder, with no limit of its own. Raises BadModel."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            found.path, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        said = [line for line in str(error).splitlines() if line.strip() and not line.rstrip().endswith(":")]
        said = said or [type(error).__name__]
        raise BadModel(
            f"{found.id} has no tokenizer that can be read",
            code="bad_tokenizer",
            lines=[said[0]],
            try_=["put tokenizer.json and tokenizer_config.json beside config.json"],
        ) from error
    tokenizer.model_max_length = 1 << 40  # the window is checked here, with numbers; no second warning
    # one that renders by code of its own asks no template
    if type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:
        tokenizer.apply_chat_template = chats = Chats(tokenizer)
        if tokenizer.chat_template:
            chats.start()
    return tokenizer
