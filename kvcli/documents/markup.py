"""HTML to text under headings, lists and tables as markdown; scripts, styles, comments and hidden parts are dropped."""

from __future__ import annotations

import re
from typing import Any

from bs4 import BeautifulSoup, Comment, UnicodeDammit
from markdownify import MarkdownConverter

from kvcli.documents.parsed import damaged
from kvcli.documents.raised import raised
from kvcli.documents.repair import clean, unmarked

# holds no text for a reader, text that no longer holds, or text that a browser shows only when something fails
DROPPED = ["script", "style", "noscript", "template", "head", "svg", "math", "iframe", "object", "embed", "canvas"]
DROPPED += ["audio", "video", "map", "datalist", "select", "del", "s", "strike"]
HIDDEN = re.compile(
    r"(?<![\w-])(display\s*:\s*none|visibility\s*:\s*hidden|opacity\s*:\s*0(\.0+)?\s*(;|$)"
    r"|font-size\s*:\s*0(?![.\d]*[1-9]))",
    re.I,
)
SIGN = "\ue000"  # leads the line of a heading; taken out of the text first, so it is ours alone
ENTITY = re.compile(rb"<!ENTITY", re.I)
SPACES = re.compile(r"\n{3,}")


class Plain(MarkdownConverter):
    """Markdown as far as it carries structure: no emphasis, no links, nothing escaped, so that quotes stay exact."""

    def convert_hN(self, n: int, el: Any, text: str, parent_tags: Any) -> str:
        heading = " ".join(text.split())
        if not heading or "_inline" in parent_tags:
            return str(text)
        return f"\n\n{SIGN}{'#' * max(1, min(6, n))} {heading}\n\n"

    def convert_sup(self, el: Any, text: str, parent_tags: Any) -> str:
        if "_noformat" in parent_tags or not text.strip():
            return text
        link = el.find("a", href=True) or el.find_parent("a", href=True)
        if link is not None and "#" in link["href"]:  # points at a note; as a power it would change a number
            return text if text.strip().startswith(("[", "(")) else f" [{text.strip()}]"
        return raised(text)


CONVERTER = Plain(
    strip=["a", "b", "strong", "em", "i", "u", "sub", "img", "code", "kbd", "samp"],
    bullets="-",
    escape_asterisks=False,
    escape_underscores=False,
    escape_misc=False,
    heading_style="atx",
)


def read_markup(data: bytes, name: str, what: str) -> tuple[str | None, list[tuple[str, str]]]:
    """The title, and the text under each heading; what stands before the first one has an empty heading."""
    if ENTITY.search(_without_comments(data[: 1 << 16])):
        raise damaged(name, what, "it declares entities of its own, which can be made to fill memory")
    try:
        page = UnicodeDammit(data, is_html=True).unicode_markup or ""
        soup = BeautifulSoup(page.replace(SIGN, ""), "lxml")
        title = clean(" ".join(soup.title.get_text().split())) if soup.title else None
        _drop(soup)
        text = CONVERTER.convert_soup(soup)
    except RecursionError:
        raise damaged(name, what, "its elements are nested too deeply") from None
    return title or None, _headed(text)


def _without_comments(head: bytes) -> bytes:
    return b"".join(part.partition(b"<!--")[0] for part in head.split(b"-->"))


def _drop(soup: BeautifulSoup) -> None:
    """Take out what a reader of the page would not see; style sheets are not evaluated, only an element's own style."""
    for element in soup.find_all(DROPPED):
        element.decompose()
    for element in [e for e in soup.find_all(True) if _is_hidden(e)]:
        if not element.decomposed:
            element.decompose()
    for comment in soup.find_all(string=lambda s: isinstance(s, Comment)):
        comment.extract()


def _is_hidden(element: Any) -> bool:
    if element.name == "dialog" and "open" not in element.attrs:
        return True
    if not element.attrs:
        return False
    hides = "hidden" in element.attrs or str(element.attrs.get("aria-hidden", "")).lower() == "true"
    return hides or bool(HIDDEN.search(str(element.attrs.get("style", ""))))


def _headed(text: str) -> list[tuple[str, str]]:
    parts: list[tuple[str, list[str]]] = [("", [])]
    for line in text.split("\n"):
        line = clean(line.rstrip()).rstrip("\u00ad")
        if line.startswith(SIGN):
            line = line.replace(SIGN, "")
            parts.append((line.lstrip("# "), []))
        parts[-1][1].append(line.replace(SIGN, ""))
    texts = [(heading, unmarked(SPACES.sub("\n\n", "\n".join(lines)).strip("\n"))) for heading, lines in parts]
    return [(heading, body) for heading, body in texts if body.strip()]
