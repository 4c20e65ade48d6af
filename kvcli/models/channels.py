"""An answer's channels: its text, and what a model thinks or tells tools beside it, however a family marks that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcli.models.text import Detokenizer, StopStrings, decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Piece = tuple[bool, str]  # whether it is a thought, and its text

_TAG = r"(?:\w+[:_])?(?:think(?:ing)?|thoughts?|reasoning)"
_CLOSE = rf"</{_TAG}(?::\w+)?>|<\|(?:/|end_(?:of_)?){_TAG}\|>|<\|{_TAG}_end\|>|\[/think\]|◁/think▷|<\|inner_suffix\|>"
_CLOSE += r"|<channel\|>|\[unused17\]|<unused95>|(?-i:Here(?: is|['’]s) my response:)"
_LABELLED = r"<\|channel>|<unused94>"  # a line with the channel's name follows
_LABEL = re.compile(r"\w*[ \t]*(\n?)")
_OPEN = rf"<{_TAG}(?::\w+)?>|<\|{_TAG}(?:_start)?\|>|\[think\]|◁think▷|<\|inner_prefix\|>|\[unused16\]|{_LABELLED}"
_OPEN += r"|(?-i:Here(?: is|['’]s) my thought process:)"
_MARK = re.compile(rf"(?P<close>{_CLOSE})|(?P<open>{_OPEN})|(?P<frame></?(?:answer|response)>)", re.IGNORECASE)
_BEGUN = re.compile(rf"(?P<open>{_OPEN})(?:thought)?\s*\Z", re.IGNORECASE)  # by the prompt
_PART = re.compile(r"(?:<[|/]?[\w:]{0,40}\|?|\[/?\w{0,9}|◁/?\w{0,9})\Z")  # of a mark, perhaps
_PHRASES = [f"Here{is_} my {what}:" for is_ in (" is", "'s", "’s") for what in ("thought process", "response")]
_HARMONY = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"})
_HEADED = re.compile(r"<\|start\|>assistant((?:(?!<\|start\|>|<\|end\|>).)*)\Z", re.DOTALL)
_QUOTES = frozenset("`\"'“«\u2018")
TAIL = 32  # tokens of a prompt that say how its answer begins


class Channels:
    """Ids in, pieces of each channel out. A mark that the answer quotes is text; one token or many may spell it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int] = (),
        stops: StopStrings | None = None,
        *,
        is_split: bool = True,
    ) -> None:
        """`prompt`: its end may begin a thought. `stops`: of the text. Without `is_split` all is text, as of JSON."""
        self.text = self.thinking = ""  # so far
        self._words, self._stops, self._is_split = Detokenizer(tokenizer), stops or StopStrings(()), is_split
        self._marks = mark_ids(tokenizer) if is_split else {}
        self._thinks = self._is_seam = self._is_gap = False
        self._opener = self._held = ""
        self._header: str | None = None  # of a message, as far as it goes
        tail = decode(tokenizer, prompt[-TAIL:]) if prompt and is_split else ""
        if "<|message|>" in self._marks.values() and (headed := _HEADED.search(tail)):
            self._header, is_over, _ = headed[1].replace("<|channel|>", " ").partition("<|message|>")
            self._mark("<|message|>" if is_over else "<|channel|>")
        elif begun := _BEGUN.search(tail):
            self._mark(begun["open"])
            self._header = None

    def push(self, token: int) -> list[Piece]:
        """The pieces that became certain with this token."""
        if token in self._marks:
            found = self._take(self._words.finish(), whole=True)
            return [*found, *self._mark(self._marks[token])]
        self._is_gap |= self._is_split and token in self._words.special
        return self._take(self._words.push([token]))

    def finish(self) -> list[Piece]:
        """What was held back, for the end of the answer."""
        found = self._take(self._words.finish(), whole=True)
        if self._header is not None and not self._thinks:  # a message whose header has no end
            name = re.match(r"\s*(?:assistant)?\s*(analysis|commentary|final)?", self._header)
            self._thinks = name is not None and name[1] not in (None, "final")
            found += self._say(self._header[name.end() if name else 0 :])
        rest = self._stops.finish()
        self.text += rest
        return [*found, (False, rest)] if rest else found

    def _take(self, text: str, *, whole: bool = False) -> list[Piece]:
        text, self._held, found = self._held + text, "", list[Piece]()
        if not self._is_split:
            return self._say(text)
        while text:
            if self._header is not None:
                text, self._header = self._header + text, None
                label = _LABEL.match(text)
                if not self._thinks or (label is not None and label.end() == len(text) and not label[1]):
                    text, self._header = "", text
                elif label is not None and label[1]:
                    text = text[label.end() :]
            elif mark := next((mark for mark in _MARK.finditer(text) if self._acts(mark)), None):
                found += [*self._say(text[: mark.start()]), *self._mark(mark[0])]
                text = text[mark.end() :]
            else:
                break
        if not whole and (begun := _PART.search(text)) is not None:
            text, self._held = text[: begun.start()], begun[0]
        elif not whole and (not self.text or self._opener.startswith("Here")):
            line = text.rpartition("\n")[2].lstrip()
            if line and any(phrase.startswith(line) for phrase in _PHRASES):
                text, self._held = text.removesuffix(line), line
        return found + self._say(text)

    def _acts(self, mark: re.Match[str]) -> bool:
        """Whether a mark in the text is one, and not spoken of."""
        is_phrase = mark[0].startswith("Here")
        if self._thinks:
            return mark["close"] is not None and (not is_phrase or self._opener.startswith("Here"))
        before = self.text + mark.string[: mark.start()]
        if before[-1:] in _QUOTES or before.count("```") % 2:
            return False
        if is_phrase:
            return mark["open"] is not None and not before.strip()
        return mark["frame"] is None or bool(self.thinking)

    def _mark(self, mark: str) -> list[Piece]:
        """Go where a mark leads."""
        found, self._is_seam = list[Piece](), True
        kind = _MARK.fullmatch(mark)
        if mark in ("<|start|>", "<|channel|>"):
            self._thinks, self._header = False, (self._header or "") + " " if mark == "<|channel|>" else ""
        elif mark == "<|message|>":
            header, self._header = re.findall(r"\w+", self._header or ""), None
            self._thinks = "final" not in header and bool({*header} - {"assistant"})
        elif kind is not None and kind["open"]:
            self._thinks, self._opener = True, mark
            self._header = "" if re.fullmatch(_LABELLED, mark) else None
        else:
            if kind is not None and kind["close"] and self.text and not (self._thinks or self.thinking):
                self.thinking, self.text = self.text, ""  # all so far was a thought that nothing began
                found = [(False, "\n")]
            self._thinks, self._header = False, None
        return found

    def _say(self, text: str) -> list[Piece]:
        before = self.thinking if self._thinks else self.text
        text = text.lstrip() if self._is_seam else text
        if not text:
            return []
        is_glued = self._is_gap and before[-1:].isalnum() and text[0].isalnum()  # a control token stood between
        if is_glued or (self._is_seam and before and not before.endswith("\n")):
            text = f"\n{text}"
        self._is_seam = self._is_gap = False
        if self._thinks:
            self.thinking += text
            return [(True, text)]
        text = self._stops.push(text)
        self.text += text
        return [(False, text)] if text else []


def mark_ids(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Tokens that lead from one channel to another, by id; those that are text as well are found in the text."""
    added = {i: (str(token), token.special) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    has_messages = {"<|channel|>", "<|message|>"} <= {name for name, _ in added.values()}
    return {
        i: name
        for i, (name, is_special) in added.items()
        if (name in _HARMONY and has_messages) or (is_special and _MARK.fullmatch(name))
    }
