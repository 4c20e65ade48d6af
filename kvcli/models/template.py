"""Chat templates of untrusted models, rendered in a sandboxed process.

A template is a program. The sandbox of jinja2 protects our objects, but not from endless loops or full memory; a
process can be killed. It starts with the tokenizer, to be ready when the weights are, and lives as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kvcli.errors import BadModel, UsageError
from kvcli.models.guarded import Guarded
from kvcli.worker_process import Limits, Standby, WorkerProcess

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROOM = 8 << 20  # bytes of a conversation for which the first process is sized
BASE, FOLD = 256 << 20, 24  # bytes of address space: fixed, and per byte of conversation
OUTPUT = 1 << 20  # bytes of rendered text beyond the conversation: no model's own words are as long
LONGER = 8  # bytes of rendered text per byte of conversation, in addition
LIFE = 3600  # s of CPU time for everything that one process renders
START, SECONDS, PACE = 60.0, 5.0, 1 << 21  # s to start, s to render, bytes of conversation per further s
REPAIR = "get the model again, or repair its chat_template.jinja or tokenizer_config.json"
ASKED = {"tokenize": False, "add_generation_prompt": True}


class Chats(Guarded):
    """Replacement for a tokenizer's `apply_chat_template`: renders text with the beginning of an answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        self._standby = Standby(_started, ROOM, START, _failed)
        self.start = self._standby.start

    def __call__(self, conversation: Sequence[Mapping[str, str]], *others: Any, **options: Any) -> str:
        """Render the chat as text. Raises jinja2.TemplateError if the template refuses it, BadModel if it is bad."""
        if others or options != ASKED:  # transformers would run the template in this process, without the sandbox
            raise UsageError(
                "the chat template of a model that kvcli loaded only returns the text of a prompt",
                lines=["it runs in a separate process, which has no other options"],
                try_=["tokenize=False, add_generation_prompt=True", "transformers.AutoTokenizer, if you trust it"],
            )
        variables = {**self._tokenizer.special_tokens_map, "messages": conversation, "tools": None, "documents": None}
        asked = {
            "template": self._source(),
            "variables": variables | {"add_generation_prompt": True},
            "now": datetime.now().isoformat(),
        }
        found = self._standby.ask(asked, lambda size: (SECONDS + size / PACE, OUTPUT + LONGER * size))
        if "refused" in found:
            from jinja2 import TemplateError

            raise TemplateError(str(found["refused"]))
        if not isinstance(found.get("text"), str):
            raise broken("its process returned no text")
        return str(found["text"])

    def _source(self) -> str:
        try:
            return str(self._tokenizer.get_chat_template())
        except ValueError as error:  # several templates without a default
            raise broken(str(error)) from None


def _started(room: int) -> WorkerProcess:
    return WorkerProcess("kvcli.models.template_worker", Limits(memory=BASE + FOLD * room, cpu=LIFE, wall=0.0))


def _failed(how: str, why: str) -> BadModel:
    if how != "heavy":
        return broken(why)
    return BadModel("the model's chat template cannot be used", code="template_too_heavy", lines=[why], try_=[REPAIR])


def broken(why: str) -> BadModel:
    return BadModel("the model's chat template cannot be used", code="bad_template", lines=[why], try_=[REPAIR])
