"""Convert HTML to text under headings, with lists and tables as markdown; drop scripts, styles and hidden parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import IO, Any

from bs4 import BeautifulSoup, Comment
from bs4.dammit import EncodingDetector
from markdownify import MarkdownConverter

from kvcli.documents.decode import page_text
from kvcli.documents.dehyphenate import clean, tidy, unmarked
from kvcli.documents.document import Parsed, ParseJob, damaged
from kvcli.documents.numerals import numeral, whole
from kvcli.documents.plain import headed_text
from kvcli.documents.superscripts import LONGEST, apart

# elements without text for a reader, with deleted text, or with fallback text of the browser
DROPPED = ["script", "style", "noscript", "template", "head", "svg", "math", "iframe", "object", "embed", "canvas"]
DROPPED += ["audio", "video", "map", "datalist", "select", "del", "s", "strike", "rp"]
# elements on lines of their own, which markdownify would join with the words beside them
BLOCKS = "address aside button center details dialog dir fieldset figure footer form header hgroup legend main".split()
BLOCKS += "menu nav optgroup option search summary textarea".split()
HIDDEN = re.compile(
    r"(?<![\w-])(display\s*:\s*none|visibility\s*:\s*hidden|opacity\s*:\s*0(\.0+)?\s*(;|$)"
    r"|font-size\s*:\s*0(?![.\d]*[1-9]))",
    re.I,
)
SIGN = "\ue000"  # marks a heading line; removed from the input first, so that it is unambiguous
ENTITY = re.compile(r"<!ENTITY", re.I)
HEAD = 1 << 14  # bytes that are searched for the declared encoding
SPACES = re.compile(r"\n{3,}")
LEAD = "kvcli-lead"  # attribute with the number of a list entry
INDENTED = re.compile(r"\n(?=[^\n])")
INLINE = ["a", "abbr", "b", "big", "em", "font", "i", "small", "span", "strong", "sub", "sup", "u"]
# declarations that raise letters above their line, and the declaration of an ordered list's number format
RAISED = re.compile(
    r"(?<![\w-])(vertical-align\s*:\s*(super|text-top|0?\.[2-9]\d*r?em|[2-9]\d?%|[3-9](\.\d+)?p[xt])"
    r"|font-variant-position\s*:\s*super|top\s*:\s*-0?\.[2-9]\d*r?em)",
    re.I,
)
LISTED = re.compile(
    r"(?<![\w-])list-style(?:-type)?\s*:[^;]{0,80}?(?<![\w-])"
    r"(decimal(?:-leading-zero)?|(?:lower|upper)-(?:alpha|latin|roman)|cjk-ideographic|disc|circle|square)(?![\w-])",
    re.I,
)
RULES = dict.fromkeys(("sup", "super", "superscript"), "vertical-align:super")  # classes that need no style sheet
SELECTOR = re.compile(r"[\w-]*\.([\w-]+)")  # of a class alone
NOTED = re.compile(r"(?<![a-z])(doc-)?(note-?ref|footnote|endnote|fnref|fn)(?![a-z])|(foot|end)note-?ref", re.I)
NOTE = re.compile(r"\d{1,3}|[a-z]|[ivx]{1,5}|[*\u2020\u2021\u00a7]+", re.I)
WORDLIKE = re.compile(r"[\w.,;:!?'\"\u2019\u201d\u00bb)\]\u2026\u3002]")


class Plain(MarkdownConverter):
    """Markdown for structure only: no emphasis, no links, nothing escaped, so that quotes stay exact."""

    def convert_hN(self, n: int, el: Any, text: str, parent_tags: Any) -> str:
        heading = " ".join(text.split())
        if not heading or "_inline" in parent_tags:
            return str(text)
        return f"\n\n{SIGN}{'#' * max(1, min(6, n))} {heading}\n\n"

    def convert_sup(self, el: Any, text: str, parent_tags: Any) -> str:
        if "_noformat" in parent_tags or not text.strip():
            return text
        before, after = _beside(el)
        link = el if el.get("href") else el.find("a", href=True) or el.find_parent("a", href=True) or el
        # written as a power, a note number would change the number before it
        if "#" in link.get("href", "") or _is_note(link) or _is_note(el):
            if text.strip().startswith(("[", "(")):
                return text
            return f"{' ' * bool(before.strip())}[{text.strip()}]{' ' * after[:1].isalnum()}"
        return apart(text, before, after)

    def convert_sub(self, el: Any, text: str, parent_tags: Any) -> str:
        return text if "_noformat" in parent_tags else apart(text, *_beside(el), is_below=True)

    def convert_li(self, el: Any, text: str, parent_tags: Any) -> str:
        lead = f"{el.get(LEAD, '-')} "
        return f"{lead}{INDENTED.sub(chr(10) + ' ' * len(lead), text.strip())}\n" if text.strip() else "\n"

    def convert_rt(self, el: Any, text: str, parent_tags: Any) -> str:
        return f"({text.strip()})" if text.strip() else ""  # a reading aid follows its word


CONVERTER = Plain(
    strip=["a", "b", "strong", "em", "i", "u", "img", "code", "kbd", "samp"],
    bullets="-",
    escape_asterisks=False,
    escape_underscores=False,
    escape_misc=False,
    heading_style="atx",
)


def read(file: IO[bytes], job: ParseJob) -> Parsed:
    """Return the text of a page as a browser without style sheets would show it."""
    notes: list[str] = []
    title, headed = read_markup(file.read(), job.name, "HTML", notes)
    return headed_text(job, headed, "it has only tags, scripts or hidden parts", title=title, notes=notes)


def read_markup(
    data: bytes, name: str, what: str, notes: list[str], *, said: str = "", rules: Mapping[str, str] | None = None
) -> tuple[str | None, list[tuple[str, str]]]:
    """Return the title, and the text under each heading; text before the first heading has an empty heading.

    `said` is the declared encoding, and `rules` are those of accompanying style sheets. Guesses are added to `notes`.
    """
    head = _without(data[:HEAD].decode("latin-1"), "<!--", "-->")
    said = said or EncodingDetector.find_declared_encoding(head, is_html=True, search_entire_document=True) or ""
    page, guessed = page_text(data, name, said)
    notes += guessed
    if ENTITY.search(_without(page[: 1 << 16], "<!--", "-->")):
        raise damaged(name, what, "it declares XML entities, which are refused for safety")
    try:
        soup = BeautifulSoup(page.replace(SIGN, ""), "lxml")
        title = clean(" ".join(soup.title.get_text().split())) if soup.title else None
        rules = {**RULES, **(rules or {}), **rules_of(sheet.get_text() for sheet in soup.find_all("style"))}
        _drop(soup)
        for element in soup.find_all(BLOCKS):
            element.name = "div"
        _raise(soup, rules)
        _count(soup, rules)
        text = CONVERTER.convert_soup(soup)
    except RecursionError:
        raise damaged(name, what, "its elements are nested too deeply") from None
    return title or None, _headed(text)


def rules_of(sheets: Iterable[str]) -> dict[str, str]:
    """Return class -> its declarations in style sheets that raise letters or set a number format."""
    rules: dict[str, str] = {}
    for rule in (rule for sheet in sheets for rule in _without(sheet, "/*", "*/").split("}")):
        selectors, _, declared = rule.rpartition("{")
        if said := [found[0] for pattern in (RAISED, LISTED) if (found := pattern.search(declared))]:
            alone = (SELECTOR.fullmatch(each.strip()) for each in selectors.rpartition("{")[2].split(","))
            rules |= dict.fromkeys((found[1] for found in alone if found), ";".join(said))
    return rules


def _without(text: str, start: str, end: str) -> str:
    """Return the text without comments between these signs."""
    return "".join(part.partition(start)[0] for part in text.split(end))


def _style(el: Any, rules: Mapping[str, str]) -> str:
    return ";".join([*(rules.get(key, "") for key in el.get("class", ())), str(el.get("style", ""))])


def _raise(soup: BeautifulSoup, rules: Mapping[str, str]) -> None:
    """Rename raised elements to `sup`, and also links to notes that directly follow a word."""
    for el in soup.find_all(INLINE):  # sub and sup elements stay unchanged
        is_raised, is_note = bool(RAISED.search(_style(el, rules))), _is_note(el)
        is_link = el.name == "a" and "#" in el.get("href", "")
        if not (is_raised or is_note or is_link) or el.name == "sup" or el.find("sup") or el.find_parent("sup"):
            continue
        text = el.get_text().strip()
        if NOTE.fullmatch(text):
            is_raised |= is_note or (is_link and bool(WORDLIKE.match(_beside(el)[0])))
        if (is_raised and len(text) <= LONGEST) or (is_note and text.isdigit()):
            el.name = "sup"


def _is_note(el: Any) -> bool:
    """True if an element is marked as a link to a note."""
    said = (el.get("epub:type"), el.get("role"), el.get("rel"), el.get("class"))
    return any(NOTED.search(" ".join(value) if isinstance(value, list) else value) for value in said if value)


def _beside(el: Any) -> tuple[str, str]:
    """Return the characters before and after an element in its line."""
    found = []
    for side, end in (("previous_sibling", slice(-1, None)), ("next_sibling", slice(1))):
        at = el
        while getattr(at, side) is None and at.parent is not None and at.parent.name in INLINE:
            at = at.parent
        beside = getattr(at, side)
        found.append("" if beside is None else str(beside.get_text())[end])
    return found[0], found[1]


def _count(soup: BeautifulSoup, rules: Mapping[str, str]) -> None:
    """Store the browser's number of each entry of an ordered list as an attribute."""
    for ol in soup.find_all("ol"):
        entries = ol.find_all("li", recursive=False)
        is_down = "reversed" in ol.attrs
        n = whole(ol.get("start"), len(entries) if is_down else 1)
        for li in entries:
            n = whole(li.get("value"), n)
            styled = LISTED.search(_style(li, rules)) or LISTED.search(_style(ol, rules))
            form = styled[1] if styled else li.get("type", ol.get("type", ""))
            li[LEAD] = "-" if form in ("disc", "circle", "square") else f"{numeral(n, form)}."
            n += -1 if is_down else 1


def _drop(soup: BeautifulSoup) -> None:
    """Remove elements that a reader would not see; style sheets are not evaluated, only an element's own style."""
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
    first, *rest = re.split(f"^{SIGN}", tidy(text), flags=re.M)
    parts = [("", first), *((part.partition("\n")[0].replace(SIGN, "").lstrip("# "), part) for part in rest)]
    texts = [(head, unmarked(SPACES.sub("\n\n", part.replace(SIGN, "").strip("\n")))) for head, part in parts]
    return [(heading, body) for heading, body in texts if body.strip()]
