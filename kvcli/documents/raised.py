"""What stands raised above its line, written so that a `10` with a raised `6` does not become 106."""

from __future__ import annotations

import re

LONGEST = 40  # characters; what is longer was raised for its looks
WORD = re.compile(r"[^\W\d_]{2,}\.?")  # 1st, Mme, a trade mark
NUMBER = re.compile(r"[-+\u2212\u2013]?[\w.,]+")


def raised(text: str) -> str:
    """`^6` or `^(n + 1)`; words, signs such as an asterisk, and what is in square brackets stay as they are."""
    inner = text.strip()
    if len(inner) > LONGEST or "\n" in inner or inner.startswith("[") or not any(c.isalnum() for c in inner):
        return text
    if WORD.fullmatch(inner):
        return text
    return text.replace(inner, f"^{grouped(inner)}", 1)


def grouped(text: str) -> str:
    """In brackets where a sign beside it would take hold of a part only."""
    inner = text.strip()
    return inner if NUMBER.fullmatch(inner) or (inner[:1], inner[-1:]) == ("(", ")") else f"({inner})"


def apart(text: str, before: str, after: str, *, is_below: bool = False) -> str:
    """What is raised or lowered, kept out of the numbers on either side: `10^6`, `3 1/2`, `101_2`, but `H2O`."""
    inner, follows = text.strip(), before[-1:].isdigit()
    if is_below:
        text = f"_{text}" if follows and inner[:1].isdigit() else text
    elif inner.isdigit() and after[:1] in ("/", "\u2044"):
        text = f" {text}" if follows else text
    else:
        text = raised(text)
    return f"{text} " if text[-1:].isdigit() and after[:1].isdigit() else text
