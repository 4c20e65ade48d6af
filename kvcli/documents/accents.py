"""Join accents that a font draws as separate characters (TeX fonts do) with the letter above or below them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import cache

from kvcli.documents.pdf_calls import Box

# grave, acute, circumflex, tilde, macron, breve, dot, diaeresis, ring, double acute, caron, cedilla, ogonek
SIGNS = "`\u00b4\u02c6\u02dc\u00af\u02d8\u02d9\u00a8\u02da\u02dd\u02c7\u00b8\u02db"
MARKS = "\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327\u0328"
ACCENTS = dict(zip(SIGNS, MARKS, strict=True))
LOOSE = re.compile(f"[{SIGNS}]")
DOTLESS = {"\u0131": "i", "\u0237": "j"}
NEAR = 100  # characters before and after an accent that are searched for its letter
APART = 0.35  # largest gap between letter and accent, in heights of the letter
GONE = "\u200b"  # replaces the accent, so that offsets in the text still match the page


def with_accents(text: str, box: Callable[[int], Box]) -> str:
    """Return the text of a page, same length, with loose accents joined; `box(i)` is the ink box of character i."""
    signs, box = list(text), cache(box)
    for found in LOOSE.finditer(text):
        at, mark = found.start(), ACCENTS[found[0]]
        around = range(max(0, at - NEAR), min(len(text), at + NEAR))
        letters = [i for i in around if signs[i].isalpha() and text[i] not in ACCENTS]
        for i in (i for i in letters if _carries(box(i), box(at), unicodedata.combining(mark) < 220)):
            whole = unicodedata.normalize("NFC", DOTLESS.get(signs[i], signs[i]) + mark)
            if len(whole) == 1:
                signs[i], signs[at] = whole, GONE
                if text[at - 1 : at + 2 : 2] == "  ":
                    signs[at - 1] = GONE
                break
    return "".join(signs)


def _carries(letter: Box, accent: Box, is_below: bool) -> bool:
    """True if an accent is directly above a letter, or directly below it."""
    middle, height = (accent[0] + accent[2]) / 2, letter[3] - letter[1]
    if not letter[0] <= middle <= letter[2]:
        return False
    gap = letter[1] - accent[3] if is_below else accent[1] - letter[3]
    return -height / 2 < gap < APART * height
