"""Render the heads of a model as one HTML file: maps that a script recolours, with no other resource loaded.

The page has all figures as data and one script of kvcli; its policy allows only that script, by its hash.
"""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any

from kvcli.render.heads import cells as c
from kvcli.render.heads.text import facts, next_step, top_table
from kvcli.render.html import Markup, bullets, cards, data_table, file, page, plain, section, tag
from kvcli.render.terminal.terminal import long_size

if TYPE_CHECKING:
    from kvcli.heads.report import Strip
    from kvcli.schemas.heads import HeadsDocument

LISTED = 20  # heads in the table


def html(document: HeadsDocument, strip: Strip | None, folder: str | None = None) -> str:
    """Return the HTML page of a document.

    `strip` has the tokens of its prompt, which the document does not store. `folder` is the path of its map, as typed.
    """
    return page(
        f"{document.model}: kvcli profile-heads",
        ["bench_report.css", "heads_report.css"],
        _title(document),
        bullets(document.notes, "warnings"),
        _glance(document),
        *_views(document, strip),
        _list(document),
        _words(),
        _next(document, folder),
        script=file("heads_report.js"),
        data=_data(document, strip),
    )


def _title(document: HeadsDocument) -> Markup:
    said = [
        f"{document.layers} layers × {document.kv_heads} KV heads",
        f"{document.query_heads // document.kv_heads} query heads each",
        f"probes: {', '.join(document.probes)}",
        f"context {document.ctx:,}",
        f"kvcli {document.kvcli}",
    ]
    return tag("header", tag("h1", f"Heads of {document.model}"), tag("p", " · ".join(said), class_="sub"))


def _glance(document: HeadsDocument) -> Markup:
    said = bullets(list(facts(document, beside=True)), "legendtext")
    return section("At a glance", cards(_cards(document)), said)


def _cards(document: HeadsDocument) -> list[tuple[str, str, str]]:
    found = []
    kv, policy, total = document.kv[0], document.policy, len(document.probed) * document.kv_heads
    if policy is not None and kv.policy is not None:
        small = f"of {long_size(kv.whole)} at {kv.context:,} tokens; {100 * policy.kept:.1f} % of the tokens are kept"
        found.append(("Memory under these policies", long_size(kv.policy), small))
        found.append(("Attention recovered", f"{policy.recovered:.3f}", f"{policy.worst:.3f} in the worst rows"))
    if document.ranked_by != "prompt":
        few = f"{len(document.suggest.full)} of {total}"
        by = f"{100 * document.suggest.carried:.0f} % of the scores of probe “{document.ranked_by}”"
        found.append(("Heads that need the full context", few, f"{by}; {long_size(kv.headmap)} if only these are full"))
    if (check := document.check) is not None:
        found.append(
            (
                "Hidden facts, others restricted",
                f"{check.restricted} of {check.of}",
                f"{check.whole} whole, {check.without} without these",
            )
        )
    return found


def _views(document: HeadsDocument, strip: Strip | None) -> list[Markup]:
    """Return empty sections that the script fills."""
    none = tag("noscript", tag("p", "The drawings need scripts; the figures are in the table below.", class_="note"))
    views = [
        section(
            "Heads", none, tag("div", id="controls"), tag("div", id="map", class_="scroll"), tag("div", id="scale")
        ),
        section("One head", tag("div", id="one")),
    ]
    if document.policy is not None:
        views.insert(1, section("Recovery and cost", tag("div", id="frontier")))
        views.insert(2, section("Policies by layer", tag("div", id="shares", class_="scroll")))
    if strip is not None:
        views.append(section("Tokens", tag("div", id="strip")))
    if document.compare is not None:
        views.append(section(f"Against {document.compare.name}", tag("div", id="compare", class_="scroll")))
    return views


def _list(document: HeadsDocument) -> Markup:
    first, *rest = top_table(document, LISTED)
    return section("Heads by the head map", data_table(first, rest))


def _words() -> Markup:
    """Return the meaning of the terms on the page."""
    said = [line.split(": ", 1) for line in file("heads_words.txt").splitlines()]
    return section("The words", tag("dl", [tag("div", tag("dt", word), tag("dd", text)) for word, text in said]))


def _next(document: HeadsDocument, folder: str | None) -> Markup:
    """Return the commands to type next."""
    what, typed = next_step(document, folder)
    steps = [(what, typed)]
    if what != "use it" and folder is not None:
        steps.append(
            ("use this map", f"kvcli chat {document.model} -P fastgen --set policy.headmap={folder}/profile.json")
        )
    return section(
        "What to type next", [tag("p", f"{what}: ", tag("code", typed), class_="step") for what, typed in steps]
    )


def _data(document: HeadsDocument, strip: Strip | None) -> dict[str, Any]:
    """Return the data for the script."""
    held = document.document()
    wanted = ("layers", "kv_heads", "query_heads", "probed", "windows", "ctx", "scalars", "query", "offsets", "policy",
              "distances", "kinds", "suggest", "compare", "kv")  # fmt: skip
    data = {name: held[name] for name in wanted}
    data["top"] = None if document.top is None else [
        [[[t.position, plain(t.text), t.mass] for t in head] for head in layer] for layer in document.top
    ]  # fmt: skip
    data["words"] = {name: c.WORDS.get(name, name) for name in ("policy", *document.scalars)}
    data["shares"] = sorted(c.SHARES & document.scalars.keys())
    data["ramp"], data["palette"] = c.RAMP, {letter: [colour, c.ink(colour)] for letter, colour in c.PALETTE.items()}
    data["letters"] = c.letters(document)
    data["forced"] = document.policy.forced if document.policy is not None else []
    data["strip"] = None if strip is None else {
        "texts": [_shown(text) for text in strip.texts],
        "kinds": strip.kinds, "punct": strip.punct, "width": strip.width, "tokens": strip.tokens,
        "frequent": {layer: [b64encode(row).decode() for row in rows] for layer, rows in strip.frequent.items()},
    }  # fmt: skip
    return data


def _shown(text: str) -> str:
    """Return a text with line ends as a mark and a new line; other control characters are escaped."""
    return "↵\n".join(plain(part) for part in text.split("\n"))
