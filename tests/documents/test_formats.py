"""HTML, EPUB, DOCX, markdown and text: their sections, what they are called, and how the kind is found out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvcli.documents import document_of, mark, read_document
from kvcli.errors import BadInput, UsageError
from kvcli.installing import pip
from tests.documents import books, made

ROOT = Path(__file__).parents[2]
PAGE = """<!DOCTYPE html><html><head><title>River &amp; board</title><style>p {color: red}</style></head><body>
<script>alert("stolen")</script><!-- nobody sees this -->
<p>Before all.</p><h1>The <em>river</em></h1><p>It is ef\u00adfi\u00adcient, well-known and 5 &lt; 6.</p>
<ul><li>one</li><li>two</li></ul><p style="display: none">hidden words</p><div hidden>more hidden</div>
<span aria-hidden="true">icon</span><noscript>turn it on</noscript>
<h2>A [table]</h2><table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>
<pre># not a heading
  kept</pre><p># nor this</p><h2>The river</h2><p>Again.</p></body></html>"""


def sections(document):
    return [(s.label, s.text) for s in document.sections]


def test_html_is_what_a_reader_sees_under_its_headings():
    document = document_of(PAGE.encode(), "p.html")
    assert (document.kind, document.unit, document.title) == ("html", "heading", "River & board")
    assert sections(document) == [
        ("Opening", "Before all."),
        ("The river", "# The river\n\nIt is efficient, well-known and 5 < 6.\n\n- one\n- two"),
        (
            "A (table)",
            "## A [table]\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\n```\n# not a heading\n  kept\n```\n\n# nor this",
        ),
        ("The river (2)", "## The river\n\nAgain."),
    ]
    assert document.text == "\n\n".join(s.text for s in document.sections) + "\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "latin-1"])
def test_html_in_other_encodings(encoding):
    said = '<meta charset="latin-1">' if encoding == "latin-1" else ""
    page = f"<html><head>{said}</head><body><p>Bäume über dem Fluß</p></body></html>"
    assert document_of(page.encode(encoding), "p.html").text == "Bäume über dem Fluß\n"


def test_an_epub_has_chapters_named_by_its_contents():
    document = document_of(books.epub(), "b.epub")
    assert (document.kind, document.unit, document.title) == ("epub", "chapter", "A Book of Rivers")
    assert sections(document) == [
        ("Of the river", "# The river\n\nIce on the river."),
        ("Of the bridge", "# The bridge\n\nThe bridge held.\n\n## Repairs\n\nIt was mended."),
        ("t", "A last word."),
    ]


def test_a_docx_as_it_stands_after_all_changes():
    document = document_of(books.docx_file(), "l.docx")
    assert (document.kind, document.unit, document.title) == ("docx", "heading", "A letter about rivers")
    assert sections(document) == [
        ("Opening", "Before all headings."),
        ("Methods", "# Methods\n\nWe measured the efficient gauge.\n\n| depot | stock |\n| Gimness | 59 |"),
        ("Results", "## Results\n\nIt was good"),
        ("Results (2)", "## Results\n\nSaid again."),
    ]


def test_footnotes_of_a_docx_stand_under_their_section():
    import io
    import zipfile

    w = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    note = '<w:footnote w:id="2"><w:p><w:r><w:t>See the survey.</w:t></w:r></w:p></w:footnote>'
    notes = f"<w:footnotes {w}>{note}</w:footnotes>"
    kind = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/footnotes"
    with zipfile.ZipFile(io.BytesIO(books.docx_file())) as z:
        files = {n: z.read(n) for n in z.namelist()}
    rels = "word/_rels/document.xml.rels"
    files[rels] = files[rels].replace(
        b"</Relationships>", f'<Relationship Id="rId99" Type="{kind}" Target="footnotes.xml"/></Relationships>'.encode()
    )
    files["[Content_Types].xml"] = files["[Content_Types].xml"].replace(
        b"</Types>",
        b'<Override PartName="/word/footnotes.xml" ContentType="application/vnd.openxmlformats-officedocument.'
        b'wordprocessingml.footnotes+xml"/></Types>',
    )
    files["word/footnotes.xml"] = notes
    files["word/document.xml"] = files["word/document.xml"].replace(
        b"Said again.</w:t></w:r>", b'Said again.</w:t></w:r><w:r><w:footnoteReference w:id="2"/></w:r>'
    )
    document = document_of(books.zipped(files), "l.docx")
    assert document.sections[-1].text == "## Results\n\nSaid again. [note 1]\n\n[note 1] See the survey."


MARKDOWN = """intro

# First
text
```
# a comment
```

Second
------
more
## First
again
"""


def test_markdown_sections_are_the_whole_text():
    document = document_of(MARKDOWN.encode(), "m.md")
    assert document.text == MARKDOWN
    assert "".join(s.text for s in document.sections) == MARKDOWN
    assert [s.label for s in document.sections] == ["Opening", "First", "Second", "First (2)"]
    assert (document.unit, document.kind, document.title) == ("heading", "markdown", "First")


def test_text_comes_in_blocks_of_lines_that_end_with_a_paragraph():
    text = "".join(f"line {i}\n" + "\n" * (i % 30 == 0) for i in range(1, 101))
    document = document_of(text.encode(), "t.txt")
    assert document.unit == "line"
    assert [s.label for s in document.sections] == ["1-31", "32-62", "63-93", "94-103"]
    assert "".join(s.text for s in document.sections) == document.text == text
    assert mark("line", "1-31") == "[l. 1-31]"


def test_marks_and_form_feeds_make_pages():
    marked = document_of(b"Title\n[p. 3]\nthree\n[p. 4]\nfour [p. 3]\n[p. 6]\nsix\n", "r.md")
    assert [(s.number, s.text) for s in marked.sections] == [(3, "Title\nthree"), (4, "four [p. 3]"), (6, "six")]
    assert marked.unit == "page"
    feeds = document_of(b"one\n\f\ftwo\nlines\n\f", "r.txt")
    assert [(s.number, s.text) for s in feeds.sections] == [(1, "one"), (3, "two\nlines")]
    assert (feeds.without_text, feeds.n_pages) == ((2,), 3)
    assert feeds.text == "[p. 1]\none\n\n[p. 3]\ntwo\nlines\n"


def test_the_bundled_report_has_pages():
    document = read_document("demo:report")
    assert (document.unit, document.n_pages, len(document.sections)) == ("page", 18, 18)
    part = read_document("demo:report:3-4")
    assert [s.number for s in part.sections] == [3, 4]
    assert part.name == "demo:report"
    assert part.text == f"[p. 3]\n{document.sections[2].text}\n\n[p. 4]\n{document.sections[3].text}\n"


# --- pages


def test_pages_are_chosen_in_the_name_or_beside_it(tmp_path):
    case = made.numbered(made.Random(3))
    path = tmp_path / "paper.pdf"
    path.write_bytes(case.data)
    by_name = read_document(f"{path}:2-3,6")
    assert by_name == read_document(path, pages="2-3, 6")
    got = {s.number: " ".join(s.text.split()) for s in by_name.sections}
    assert got == {n: case.pages[n - 1] for n in (2, 3, 6)}  # what runs along the edges is known from other pages
    assert (by_name.name, by_name.n_pages) == ("paper.pdf", 7)


def test_a_file_of_the_whole_name_wins(tmp_path):
    (tmp_path / "notes:3-9").write_text("all of it")
    assert read_document(tmp_path / "notes:3-9").text == "all of it"


@pytest.mark.parametrize(
    ("name", "options", "kind", "code"),
    [
        ("paper.pdf:9", {}, BadInput, "no_such_page"),
        ("paper.pdf", {"pages": "3-99"}, BadInput, "no_such_page"),
        ("paper.pdf", {"pages": "0"}, UsageError, "bad_pages"),
        ("paper.pdf", {"pages": "5-3"}, UsageError, "bad_pages"),
        ("paper.pdf", {"pages": "a"}, UsageError, "bad_pages"),
        ("paper.pdf:1", {"pages": "1"}, UsageError, "bad_pages"),
        ("page.html:1", {}, BadInput, "no_pages"),
        ("notes.txt:1", {}, BadInput, "no_pages"),
        ("paper.pdf", {"type": "word"}, UsageError, "unknown_type"),
    ],
)
def test_pages_that_cannot_be(tmp_path, name, options, kind, code):
    (tmp_path / "paper.pdf").write_bytes(made.numbered(made.Random(3)).data)
    (tmp_path / "page.html").write_text(PAGE)
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(kind) as caught:
        read_document(tmp_path / name, **options)
    assert caught.value.code == code


# --- kinds


@pytest.mark.parametrize(
    ("data", "name", "kind", "note"),
    [
        (made.plain(made.Random(1)).data, "standard input", "pdf", None),
        (made.plain(made.Random(1)).data, "paper.txt", "pdf", "paper.txt is named .txt but its content is PDF"),
        (b"\n junk \n" + made.plain(made.Random(1)).data, "paper.pdf", "pdf", None),
        (PAGE.encode(), "standard input", "html", None),
        (PAGE.encode(), "paper.pdf", "html", "paper.pdf is named .pdf but its content is HTML"),
        (b"<p>only a tag</p>", "p.html", "html", None),
        (b"<p>only a tag</p>", "p.md", "markdown", None),
        (b"plain words", "p.html", "text", "p.html is named .html but its content is text"),
        (books.epub(), "standard input", "epub", None),
        (books.epub(), "b.docx", "epub", "b.docx is named .docx but its content is EPUB"),
        (books.docx_file(), "standard input", "docx", None),
        (b"# A\n\ntext\n\n# B\n\ntext\n", "standard input", "markdown", None),
        (b"#!/bin/sh\n# a\n\n# b\n\n", "standard input", "text", None),
        (b"int x;\n", "x.c", "text", None),
    ],
)
def test_content_says_the_kind_before_the_name_does(data, name, kind, note):
    document = document_of(data, name)
    assert document.kind == kind
    assert [n.partition(";")[0] for n in document.notes] == ([note] if note else [])


def test_a_type_that_is_said_overrides():
    assert document_of(PAGE.encode(), "p.html", type="text").text == PAGE
    assert document_of(b"<b>bold</b> words", "x", type="html").text == "bold words\n"
    with pytest.raises(BadInput, match="cannot be read as a PDF"):
        document_of(b"plain words", "x", type="pdf")
    with pytest.raises(BadInput, match=r"is a PDF, not text"):
        document_of(made.plain(made.Random(1)).data, "x", type="text")


def test_without_the_extra_the_command_that_installs_it(tmp_path):
    for blocked in ("bs4", "lxml", "docx", "rapidocr"):
        (tmp_path / f"{blocked}.py").write_text(f"raise ModuleNotFoundError('no', name='{blocked}')")
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from kvcli.documents import document_of\nfrom kvcli.errors import KvcliError\n"
        "import tests.documents.books as b\n"
        "word = b.zipped({'word/document.xml': ''})\n"
        "from tests.documents.made import plain, Random\n"
        "more = ('b.epub', b.epub()), ('d.docx', word), ('a.pdf', plain(Random(1)).data)\n"
        "for name, data in (('p.html', b'<html><p>x'), *more):\n"
        "    try:\n        document_of(data, name, ocr='on')\n"
        "    except KvcliError as e:\n        print(e.exit, e.code, *e.try_)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(ROOT)], capture_output=True, text=True, check=False
    )
    *docs, ocr = run.stdout.splitlines()
    assert docs == [f"3 missing_extra {pip('beautifulsoup4', 'lxml', 'markdownify')}"] * 3, run.stderr
    assert ocr.startswith(f"3 missing_extra {pip('rapidocr', 'onnxruntime')}")
