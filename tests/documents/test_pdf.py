"""PDF files page by page: made ones whose every letter is known, and real ones of this system."""

from __future__ import annotations

from random import Random

import pytest

from kvcli.documents import document_of
from tests.documents import made


@pytest.mark.parametrize("name", made.CASES)
def test_pages_have_the_text_that_was_put_on_them(name: str):
    case = made.CASES[name](Random(11))
    document = document_of(case.data, "made.pdf", **case.options)
    got = {s.number: " ".join(s.text.split()) for s in document.sections}
    assert got == {i: text for i, text in enumerate(case.pages, 1) if text}
    assert document.without_text == tuple(i for i, text in enumerate(case.pages, 1) if not text)
    assert (document.unit, document.kind, document.n_pages) == ("page", "pdf", len(case.pages))
    assert document.title == case.title
