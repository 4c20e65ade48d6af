"""Channels of an answer: split the text from thoughts and tool calls, by the marks of each model family."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from kvcli.models.control_words import OPEN
from kvcli.models.text import Detokenizer, StopStrings, decode, render_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# End of an answer: stop tokens and stop strings from a tokenizer and its chat template. Stop tokens from a model's
# configs are read in engine/hf/model_settings.py.


# stop tokens, whatever the files declare as end of text (llama.cpp checks for them too)
_NAMES = """<|im_end|> <|eot_id|> <|eom_id|> <end_of_turn> <turn|> <|end|> <|return|> <|call|> <|endoftext|>
    <|end_of_text|>""".split()
_SAID = "Well, 71."
_ASKED = [{"role": r, "content": c} for r, c in (("user", "How many?"), ("assistant", _SAID), ("user", "Why?"))]


def ends(tokenizer: PreTrainedTokenizerBase, vocab: int) -> tuple[frozenset[int], tuple[str, ...]]:
    """Stop tokens within `vocab`, and stop strings of a template whose marks are no tokens."""
    words = {str(token): i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if str(token)}
    # marks between channels
    between = {i for i, name in mark_ids(tokenizer).items() if name not in _NAMES or name == "<|end|>"}
    found = {words[name] for name in _NAMES if name in words} | {getattr(tokenizer, "eos_token_id", None)}
    behind = ""
    with suppress(Exception):  # a bad template is reported at the first question
        text, has_template = render_text(tokenizer, _ASKED)
        behind = text.rpartition(_SAID)[2] if has_template and _SAID in text else ""
    word = re.compile(rf"\s*({'|'.join(map(re.escape, sorted(words, key=len, reverse=True))) or '(?!)'})")
    while (mark := word.match(behind)) and words[mark[1]] in between:
        behind = behind[mark.end() :]
    found |= {words[mark[1]]} if mark else set()
    strings = [] if mark else re.findall(r"\A\s*(<\|[^\s|]{1,40}\|>)", behind)
    return frozenset(i for i in found - between if type(i) is int and 0 <= i < vocab), tuple(strings)


Piece = tuple[bool, str]  # True if the piece is a thought; its text

TAIL = 32  # last tokens of a prompt, which show how its answer begins
_TAG = r"(?:\w+[:_])?(?:think(?:ing)?|thoughts?|reasoning)"
_CLOSE = rf"</{_TAG}(?::\w+)?>|<\|(?:/|end_(?:of_)?){_TAG}\|>|<\|{_TAG}_end\|>|\[/think\]|◁/think▷|<\|inner_suffix\|>"
_CLOSE += r"|<channel\|>|\[unused17\]|<unused95>|(?-i:Here(?: is|['’]s) my response:)"
_LABELLED = r"(?:<\|channel>|<unused94>)"  # a line with the channel's name may follow
_BEGIN = rf"<{_TAG}(?::\w+)?>|<\|{_TAG}(?:_start)?\|>|\[think\]|◁think▷|<\|inner_prefix\|>|\[unused16\]"
_BEGIN += rf"|(?-i:Here(?: is|['’]s) my thought process:)|{_LABELLED}(?:\w+[ \t]*\n)?"
# OPEN precedes the text of a control token. A Harmony message has a header: start, role, channel, its name
_HEAD = rf"(?:{OPEN}<\|(?:start|channel)\|>[^{OPEN}]*)+"
_MESSAGE = rf"(?P<head>{_HEAD}(?:{OPEN}<\|message\|>|\Z))|{OPEN}<\|(?:message|end|call|return)\|>"
BEGIN, CLOSE = re.compile(_BEGIN, re.IGNORECASE), re.compile(_CLOSE, re.IGNORECASE)
_PHRASES = [f"Here{is_} my {what}:" for is_ in (" is", "'s", "’s") for what in ("thought process", "response")]
_PHRASE = "|".join({phrase[:n] for phrase in _PHRASES for n in range(1, len(phrase))})
_TORN = rf"{_HEAD}|{OPEN}?{_LABELLED}\w*[ \t]*|<[|/]?[\w:]{{0,40}}\|?|\[/?\w{{0,9}}|◁/?\w{{0,9}}|^[ \t]*(?:{_PHRASE})"
_BEGUN = re.compile(rf"(?:{_BEGIN})(?:thought)?\s*\Z", re.IGNORECASE)  # a thought that the prompt began
_HEADED = re.compile(r"<\|start\|>(?:(?!<\|(?:start|end)\|>).)*\Z", re.DOTALL)
_HARMONY = re.compile(r"<\|(?:start|channel|message|end|call|return)\|>")
_NAME = re.compile(r"\A\s*(?:assistant)?\s*(analysis|commentary|final|)")


@cache
def _patterns(begin: str = "", close: str = "") -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the pattern of a mark, with further marks of a template, and that of a beginning of one at the end."""
    first, last = (f"{re.escape(mark)}|" if mark else "" for mark in (begin, close))
    torn = "".join(f"{OPEN}?{re.escape(mark[:n])}|" for mark in (begin, close) for n in range(1, len(mark)))
    both = rf"{OPEN}?(?:(?P<close>{last}{_CLOSE})|(?P<begin>{first}{_BEGIN}))|(?P<frame></?(?:answer|response)>)"
    whole = f"{both}|{_MESSAGE}" if last else f"{_MESSAGE}|{both}"
    return re.compile(whole, re.IGNORECASE), re.compile(rf"(?:{torn}{_TORN})\Z", re.MULTILINE)


class Channels:
    """Splitter of token ids into text pieces of each channel.

    A mark may span several tokens. A mark that the answer quotes is text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int] = (),
        stops: StopStrings | None = None,
        *,
        is_split: bool = True,
        begin: str = "",
        end: str = "",
    ) -> None:
        """`prompt`: its end may begin a thought. `stops`: stop strings. `is_split` false: all is text, as for JSON.
        `begin`, `end`: text around a thought, by the template.
        """
        self.text = self.thinking = ""  # text and thoughts so far
        self._words, self._stops, self._is_split = Detokenizer(tokenizer), stops or StopStrings(()), is_split
        self._marks = mark_ids(tokenizer) if is_split else {}
        self._mark, self._part = _patterns()
        self._others = re.compile("(?!)")  # control tokens of the template's marks, elsewhere
        if end.strip() and not (CLOSE.search(end) or "<|channel|>" in end):  # no mark that is known
            self._learn(tokenizer, begin.strip(), end.strip())
        tail = decode(tokenizer, prompt[-TAIL:]) if prompt and is_split else ""
        begun, headed = _BEGUN.search(tail), _HEADED.search(tail)
        self.is_open = self._is_seam = begun is not None or bool(is_split and end and prompt and not begin)
        self._opener, self._is_gap = begun[0] if begun else "", False
        has_messages = headed is not None and "<|message|>" in self._marks.values()
        self._held = _HARMONY.sub(lambda mark: OPEN + mark[0], headed[0]) if headed and has_messages else ""

    def _learn(self, tokenizer: PreTrainedTokenizerBase, begin: str, end: str) -> None:
        """Add marks that no pattern knows."""
        added = getattr(tokenizer, "added_tokens_decoder", {})
        found = {i: str(added[i]) for i in tokenizer.encode(begin + end, add_special_tokens=False) if i in added}
        self._marks |= {i: name for i, name in found.items() if added[i].special}
        names = "|".join(re.escape(self._marks[i]) for i in found if i in self._marks) or "(?!)"
        spelled = (re.sub(f"({names})", rf"{OPEN}\1", mark).removeprefix(OPEN) for mark in (begin, end))
        (self._mark, self._part), self._others = _patterns(*spelled), re.compile(f"{OPEN}(?:{names})")

    @property
    def thinks(self) -> bool:
        """True inside a thought (`is_open`), and in the header of a message."""
        return self.is_open or self._held.startswith(OPEN)

    def stop_splitting(self) -> None:
        """Take all further tokens as text."""
        self._is_split, self._marks = False, {}

    def push(self, token: int) -> list[Piece]:
        """Return the pieces that became certain with this token."""
        if token in self._marks:
            return self._take(f"{self._words.finish()}{OPEN}{self._marks[token]}")
        self._is_gap |= self._is_split and token in self._words.special
        return self._take(self._words.push([token]))

    def finish(self) -> list[Piece]:
        """Return the pieces held back until the end of the answer."""
        found, rest = self._take(self._words.finish(), whole=True), self._stops.finish()
        self.text += rest
        return [*found, (False, rest)] if rest else found

    def _take(self, text: str, *, whole: bool = False) -> list[Piece]:
        text, self._held, found, at = self._held + text, "", list[Piece](), 0
        if self._is_split and not whole and (part := self._part.search(text)) is not None:
            text, self._held = text[: part.start()], part[0]
        for mark in self._mark.finditer(text) if self._is_split else ():
            if mark[0].startswith(OPEN) or self._acts(mark, text[at : mark.start()]):
                found += [*self._say(text[at : mark.start()]), *self._go(mark)]
                at = mark.end()
        return found + self._say(text[at:])

    def _acts(self, mark: re.Match[str], before: str) -> bool:
        """True if a mark spelled as text switches the channel; false if the text only quotes the mark."""
        is_phrase = mark[0].startswith("Here")
        if self.is_open:
            return mark["close"] is not None and (not is_phrase or self._opener.startswith("Here"))
        before = self.text + before
        if before.endswith(tuple("`\"'“«\u2018")) or before.count("```") % 2:
            return False
        if is_phrase:
            return mark["begin"] is not None and not before.strip()
        return mark["frame"] is None or bool(self.thinking)

    def _go(self, mark: re.Match[str]) -> list[Piece]:
        """Switch to the channel that a mark leads to."""
        is_orphan = mark["close"] is not None and not (self.is_open or self.thinking) and self.text
        self._is_seam, self.is_open = True, mark["begin"] is not None
        if self.is_open:
            self._opener = mark["begin"]
        elif mark["head"] is not None:
            _, name, rest = _NAME.split(_HARMONY.sub(" ", mark["head"].replace(OPEN, "")), maxsplit=1)
            is_whole = mark["head"].endswith("<|message|>")
            self.is_open = name != "final" and bool(name or (is_whole and rest.strip()))
            return [] if is_whole else self._say(rest)
        elif is_orphan:  # all text so far was a thought without an opening mark
            self.thinking, self.text = self.text, ""
            return [(False, "\n")]
        return []

    def _say(self, text: str) -> list[Piece]:
        before = self.thinking if self.is_open else self.text
        text = self._others.sub("", text)
        text = text.lstrip() if self._is_seam else text
        if not text:
            return []
        # a control token separated the two words
        is_glued = self._is_gap and before[-1:].isalnum() and text[0].isalnum()
        if is_glued or (self._is_seam and before and not before.endswith("\n")):
            text = f"\n{text}"
        self._is_seam = self._is_gap = False
        if self.is_open:
            self.thinking += text
            return [(True, text)]
        text = self._stops.push(text)
        self.text += text
        return [(False, text)] if text else []


def mark_ids(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Ids and names of the control tokens that switch channels."""
    added = {i: (str(token), token.special) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    names = {name for name, _ in added.values()}
    marks = {i: name for i, (name, is_special) in added.items() if is_special and _patterns()[0].fullmatch(name)}
    if {"<|channel|>", "<|message|>"} <= names:
        marks |= {i: name for i, (name, _) in added.items() if _HARMONY.fullmatch(name)}
    return marks
