"""Thinking aloud before an answer, as a chat template writes it: its variables, and the text around a thought.

Nothing is known by a model's name. The template is rendered with each variable that its source mentions, and with a
thought in each field from which templates read one. The change of the prompt shows their effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcli.errors import BadConfig, BadInput, BadModel
from kvcli.models.channels import BEGIN, CLOSE
from kvcli.models.control_words import PLACE
from kvcli.models.template import Layout, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Variables = Mapping[str, Any]
_ABOUT = re.compile(rf"think|reason|effort|{CLOSE.pattern}", re.IGNORECASE)
# names that may be variables: no attributes, no text, no calls
_NAME = re.compile(r"(?<![\w.'\"<|/\[])(?=\w*(?:think|reason|effort))[a-z]\w*(?![\w'\">|(:])")
MOST = 12  # names tried, at most
# values that switch thinking on and off; words are tried only if the template's source has both of them
SWITCHES = ((True, False), ("on", "off"), ("enabled", "disabled"), ("thinking", "chat"), ("high", "no_think"))
LEVELS = ("low", "medium", "high")
FIELDS = ("reasoning_content", "reasoning", "thinking")  # of an answer, from which templates read its thought
_QUESTION, _THOUGHT, _ANSWER = (PLACE.format(i) for i in range(3))
_ASKED = {"role": "user", "content": _QUESTION}


@dataclass(frozen=True, slots=True)
class ThinkingFormat:
    """Control of a model's thinking, and the text around a thought."""

    modes: Mapping[str, Variables] = field(default_factory=dict)  # "on", "off", "low", ... -> variables of the template
    is_usual: bool = False  # the model thinks if no mode is chosen
    begin: str = ""  # all text between a question and the thought
    end: str = ""  # text between a thought and the answer; "" = the model has no thinking

    def variables(self, mode: str) -> Variables:
        """Return the template variables of a mode; "auto" has none. Raises BadConfig for a mode that it lacks."""
        if mode == "auto" or mode in self.modes or (mode == "off" and not self.end):
            return self.modes.get(mode, {})
        lacks = {"on": "has no thinking", "off": "cannot turn thinking off"}.get(mode, "has no levels of thinking")
        ways = [f"--think {other}" for other in (*self.modes, "auto") if mode != "off" or other != "on"]
        ways += ["--think 256, which ends the thought after 256 tokens"] if mode == "off" else []
        said = [f'thinking.mode = "{mode}", but it has {", ".join(["auto", *self.modes])}']
        raise BadConfig(f"the chat template of this model {lacks}", code="no_thinking", lines=said, try_=ways)

    def thinks(self, mode: str) -> bool:
        """True if the model is to think under this mode."""
        return bool(self.end) and (self.is_usual if mode == "auto" else mode != "off")

    def opener(self, prompt: str) -> str | None:
        """Return the text that begins a thought after the end of a prompt, "" if it has begun, None if it cannot."""
        known = (n for n in range(len(self.begin), 0, -1) if prompt.endswith(self.begin[:n]))
        return None if (n := next(known, None)) is None else self.begin[n:]


Render = Callable[..., str]  # variables and answers -> the prompt, or a finished conversation; "" = it is refused


def thinking_format(tokenizer: PreTrainedTokenizerBase) -> ThinkingFormat:
    """Find out how the template of a tokenizer writes thoughts. Raises BadModel if the template takes too long."""
    source = getattr(tokenizer, "chat_template", None)
    if not isinstance(source, str) or not _ABOUT.search(source):
        return ThinkingFormat()
    rendered = partial(_rendered, tokenizer)
    modes: dict[str, Variables] = dict(_modes(source, rendered))
    plain, on, off = rendered({}), rendered(modes.get("on", {})), rendered(modes["off"]) if "off" in modes else ""
    added = map(str, getattr(tokenizer, "added_tokens_decoder", {}).values())
    begin, end = _by_fields(rendered, modes.get("on", {}), on) or _by_marks(on, off, [source, *added])
    if not end:
        return ThinkingFormat()
    is_usual = plain != off if off else bool(modes or plain.endswith(begin) or BEGIN.search(plain))
    return ThinkingFormat({"on": {}, **modes} if "off" not in modes else modes, is_usual, begin, end)


def _rendered(tokenizer: PreTrainedTokenizerBase, variables: Variables, *answer: Mapping[str, Any]) -> str:
    """Return the prompt of one question, or the conversation with this answer; "" if the template refuses it."""
    messages: list[Any] = [_ASKED, *answer]
    laid = Layout(messages, {**variables, "add_generation_prompt": not answer})
    try:
        return render(tokenizer, laid, [m["content"] for m in messages])
    except (BadInput, BadModel) as error:
        if error.code == "template_too_heavy":
            raise
        return ""


def _modes(source: str, rendered: Render) -> Iterator[tuple[str, Variables]]:
    """Yield modes with their variables: the first variable that switches thinking, and the first that has levels."""
    names, usual = list(dict.fromkeys(_NAME.findall(source)))[:MOST], dict[str, Any]()
    # a budget is a number of tokens
    for name, (yes, no) in ((name, pair) for pair in SWITCHES for name in names if "budget" not in name):
        if isinstance(yes, bool) or all(re.search(f"['\"]{word}['\"]", source) for word in (yes, no)):
            on, off = (rendered({name: value}) for value in (yes, no))
            if on and off and on != off:
                usual = {name: yes}
                yield from (("on", usual), ("off", {name: no}))
                break
    for name in names:
        prompts = [rendered({**usual, name: level}) for level in LEVELS]
        if all(prompts) and prompts[0] != prompts[-1]:
            yield from ((level, {**usual, name: level}) for level in LEVELS)
            break


def _by_fields(rendered: Render, variables: Variables, prompt: str) -> tuple[str, str] | None:
    """Return the text before and after a thought of an answer with one; None if the template does not write it."""
    parts = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _ANSWER}]
    answers: list[dict[str, Any]] = [*({"content": _ANSWER, name: _THOUGHT} for name in FIELDS), {"content": parts}]
    for said in answers:
        whole = rendered(variables, {"role": "assistant", **said}).partition(_QUESTION)[2]
        begin, _, rest = whole.partition(_THOUGHT)
        end, found, _ = rest.partition(_ANSWER)
        if found and end.strip() and "type" not in end:  # some templates write a list of parts as it is
            tail = prompt.partition(_QUESTION)[2]
            return (tail if tail.startswith(begin) else begin), end
    return None


def _by_marks(on: str, off: str, others: list[str]) -> tuple[str, str]:
    """Return the text before and after a thought, by marks in prompts, in the template or among the added tokens."""
    tail, empty = on.partition(_QUESTION)[2], off.partition(_QUESTION)[2]
    close = next((found[0] for text in (empty, on, *others) if (found := CLOSE.search(text))), "")
    begin = next((found[0] for text in (tail, empty, on, *others) if (found := BEGIN.search(text))), "")
    close = close or (f"</{begin[1:]}" if begin.startswith("<") else "")
    if not begin or not close:
        return "", ""
    at = empty.rfind(close)
    end = empty[at:] if at >= 0 and not empty[at + len(close) :].strip() else f"\n{close}\n\n"
    return tail if begin in tail else tail + begin, end
