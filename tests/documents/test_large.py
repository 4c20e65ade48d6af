"""Long files: memory grows with the text, not with the file; and the real files of this system."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pypdf import PdfReader

from kvcli.documents import read_document
from tests.bench.extract import peak
from tests.documents import made

REAL = {
    "/usr/share/doc/libtasn1-doc/libtasn1.pdf": 36,
    "/usr/share/doc/shared-mime-info/shared-mime-info-spec.pdf": 17,
}


@pytest.mark.slow
def test_memory_is_bounded_for_two_thousand_pages(tmp_path: Path):
    path = tmp_path / "large.pdf"
    path.write_bytes(made.many_pages(2000).data)
    most = peak(path)
    assert most["pages"] == 2000
    assert most["parent"] < 160 * 2**20
    assert most["worker"] < 400 * 2**20


def test_every_page_of_a_long_file_is_its_own(tmp_path: Path):
    case = made.many_pages(60)
    path = tmp_path / "long.pdf"
    path.write_bytes(case.data)
    assert [" ".join(s.text.split()) for s in read_document(path).sections] == case.pages


@pytest.mark.parametrize("path", REAL)
def test_real_files_page_by_page(path: str):
    """Beside pypdf: nearly all its words stand on the same page, and nothing else does."""
    if not Path(path).is_file():
        pytest.skip(f"{path} is not on this system")
    document = read_document(path)
    assert document.n_pages == len(document.sections) == REAL[path]
    ours = {s.number: _words(s.text) for s in document.sections}
    for number, page in enumerate(PdfReader(path).pages, 1):
        theirs = _words(page.extract_text())
        shared = len(ours[number] & theirs)
        assert shared >= 0.85 * len(theirs)
        assert shared >= 0.85 * len(ours[number])


def test_what_runs_along_the_edges_of_a_real_file():
    path = Path("/usr/share/doc/libtasn1-doc/libtasn1.pdf")
    if not path.is_file():
        pytest.skip(f"{path} is not on this system")
    first = {s.number: s.text.split("\n")[0] for s in read_document(path).sections}
    assert [n for n in range(12, 27) if first[n].startswith("Chapter 4")] == []


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]{4,}", text.casefold()))
