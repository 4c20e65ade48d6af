"""HTML and SVG elements with all outside text escaped, and axes that begin at zero."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from math import ceil, floor, log10
from typing import Any

from kvcli.safe_output import neutralise

VOID = frozenset({"meta", "br"})


class Markup(str):
    """Text that is HTML already; any other string is escaped when it is inserted."""

    __slots__ = ()


def tag(name: str, /, *children: str | Iterable[str], **attributes: object) -> Markup:
    """Return an element. `class_` is class, `font_size` is font-size; None leaves an attribute out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(plain(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{said}>")
    inner = "".join(_text(c) for child in children for c in ([child] if isinstance(child, str) else child))
    return Markup(f"<{name}{said}>{inner}</{name}>")


def join(parts: Iterable[str]) -> Markup:
    return Markup("".join(map(_text, parts)))


def section(title: str, *inner: str | Iterable[str]) -> Markup:
    return tag("section", tag("h2", title), *inner)


def bullets(lines: Sequence[str], kind: str) -> Markup:
    """Return a list with a class of the style sheet; nothing without lines."""
    return tag("ul", [tag("li", line) for line in lines], class_=kind) if lines else Markup("")


def cards(facts: Iterable[tuple[str, str, str]]) -> Markup:
    """Return facts side by side: a heading, a figure in large letters, and a remark each."""
    shown = [tag("div", tag("h3", what), tag("p", big, class_="big"), tag("p", small)) for what, big, small in facts]
    return tag("div", shown, class_="cards")


def data_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> Markup:
    """Return a table with a name in each line; it scrolls separately on a narrow page."""
    top = tag("tr", [tag("th", cell, scope="col") for cell in head])
    rest = [tag("tr", tag("th", line[0], scope="row"), [tag("td", cell) for cell in line[1:]]) for line in lines]
    return tag("div", tag("table", tag("thead", top), tag("tbody", rest)), class_="scroll", tabindex="0")


def plain(text: str) -> str:
    """Return a text without control characters that could affect its display."""
    return neutralise(text, one_line=True)


def _text(text: str) -> str:
    return text if isinstance(text, Markup) else escape(plain(text))


def percent(share: float) -> str:
    """Return a position or length relative to the drawing's width."""
    return f"{100 * share:.2f}%"


def ticks(top: float, most: int = 5) -> list[float]:
    """Return round numbers from zero up to the first that is at least `top`."""
    if top <= 0:
        return [0.0, 1.0]
    rough = top / most
    unit = 10.0 ** floor(log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * (1 - 1e-9))
    return [i * step for i in range(ceil(top / step - 1e-9) + 1)]


def number(value: float) -> str:
    """Format a number with about three digits."""
    if value == 0 or abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 0.995 else f"{value:.2g}"


def page(title: str, sheets: Sequence[str], *main: Markup, lang: str = "en", script: str = "", data: Any = None) -> str:
    """Return an HTML file with style sheets of this package. It loads nothing, even if a name has HTML.

    It runs only `script`, which finds `data` as the JSON text of the element with that id.
    """
    policy, scripts = "default-src 'none'; style-src 'unsafe-inline'", list[Markup]()
    if script:
        policy += f"; script-src 'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"
        # `<` is escaped, because a text in the data may be `</script>`, which would end the element
        held = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        scripts = [tag("script", Markup(held), type="application/json", id="data"), tag("script", Markup(script))]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("title", title),
        tag("style", Markup("".join(map(file, sheets)))),
    )
    body = tag("body", tag("main", *main), *scripts)
    return f"<!doctype html>\n{tag('html', head, body, lang=lang)}\n"


def file(name: str) -> str:
    """Read a file of this package."""
    return (files("kvcli.render") / name).read_text(encoding="utf-8")
