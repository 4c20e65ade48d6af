"""Parse XML of an archive to a tree, without external look-ups and without entities."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lxml import etree

from kvcli.documents.dehyphenate import clean
from kvcli.documents.document import damaged


def parse_xml(data: bytes, name: str, what: str) -> Any:
    """Parse XML without entities or network, and no deeper than libxml2's limit."""
    parser = etree.XMLParser(
        resolve_entities=False, huge_tree=False, no_network=True, load_dtd=False, remove_pis=True, remove_comments=True
    )
    try:
        root = etree.fromstring(data, parser)
    except (etree.XMLSyntaxError, ValueError) as error:
        raise damaged(name, what, f"its XML is invalid: {error}"[:200]) from None
    declared = root.getroottree().docinfo.internalDTD
    if declared is not None and list(declared.iterentities()):
        raise damaged(name, what, "it declares XML entities, which are refused for safety")
    return root


def first_words(elements: Iterable[Any]) -> str | None:
    """Return the words of the first element that has any, on one line."""
    return next(filter(None, (clean(" ".join("".join(e.itertext()).split())) for e in elements)), None)
