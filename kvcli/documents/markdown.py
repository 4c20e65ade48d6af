"""Split markdown at its headings and keep the text under each unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

# backticks followed by text with another backtick are inline code and open no fence
FENCE = re.compile(r" {0,3}(`{3,}(?=[^`\n]*$)|~{3,})")
ATX = re.compile(r" {0,3}#{1,6}[ \t]+(\S.*)$")  # its end is trimmed afterwards: in the pattern that takes cubic time
SETEXT = re.compile(r" {0,3}(=+|-{2,})[ \t]*$")
# no pattern below crosses a second opening sign of its kind, so each takes linear time
LINK = re.compile(r"!?\[([^\[\]]*)\]\([^()\s]*\)")
CODE = re.compile(r"`([^`]+)`")
STRESS = re.compile(r"(?<![\w*])(\*{1,3}|_{1,3})(?=\S)([^*_]+)(?<=\S)\1(?![\w*])")
FIELD = re.compile(r"[\w.-]+[ \t]*:|#|---\s*$")  # second line of front matter


def headed_markdown(text: str) -> Iterator[tuple[str, str]]:
    """Yield each heading with the text up to the next one, heading line included; "" is the heading of leading text."""
    lines = text.splitlines(keepends=True)
    first = _front_matter(lines)
    heading, start, fence = "", 0, ""
    for i, line in enumerate(lines[first:], first):
        found = FENCE.match(line)
        if found and (not fence or (found[1].startswith(fence) and not line.strip(" \n`~"))):
            fence = "" if fence else found[1]
        if fence or found:
            continue
        title, at = None, i
        if atx := ATX.match(line):
            title = _unclosed(atx[1].rstrip())
        elif SETEXT.match(line) and i > max(start, first) and _may_head(lines, i - 1, first):
            title, at = lines[i - 1].strip(), i - 1
        if title is not None:
            if at > start:
                yield heading, "".join(lines[start:at])
            heading, start = _bare(title), at
    yield heading, "".join(lines[start:])


def _front_matter(lines: Sequence[str]) -> int:
    """Return the number of front matter lines, rules included; a rule alone starts no front matter."""
    if len(lines) < 2 or lines[0].rstrip() != "---" or not FIELD.match(lines[1]):
        return 0
    return next((i for i, line in enumerate(lines[1:], 2) if line.rstrip() in ("---", "...")), 0)


def _unclosed(title: str) -> str:
    """Return a title without its closing `#` signs. They follow a space, so `C#` is unchanged."""
    words = title.rstrip("#")
    return words.rstrip() if words != words.rstrip() else title


def _may_head(lines: Sequence[str], i: int, first: int) -> bool:
    """True if an underline makes line `i` a heading: one line of a paragraph, not a list or a table."""
    alone = i == first or not lines[i - 1].strip()
    return alone and bool(lines[i].strip()) and lines[i].lstrip()[0] not in "-*+>|#=`~"


def _bare(title: str) -> str:
    """Return a title as displayed: the words of links, no stars, no backticks."""
    return STRESS.sub(r"\2", CODE.sub(r"\1", LINK.sub(r"\1", title))) or title
