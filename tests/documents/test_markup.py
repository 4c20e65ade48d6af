"""HTML and EPUB: what a reader of the page sees is taken in, what is hidden or struck out is not."""

# ruff: noqa: RUF001 - letters of many alphabets

from __future__ import annotations

import pytest

from kvcli.documents import document_of
from kvcli.documents.decode import codec_of
from kvcli.errors import BadInput
from tests.documents import books


def text_of(body: str) -> str:
    return document_of(f"<html><body>{body}</body></html>".encode(), "a.html").text.rstrip("\n")


@pytest.mark.parametrize(
    "style",
    [
        "font-size:0.9em",
        "font-size: 0.05rem",
        "font-size:00.5px",
        "--mask-display:none",
        "fill-opacity:0",
        "x-visibility:hidden",
        "opacity:0.5",
    ],
)
def test_small_text_and_other_properties_are_read(style):
    assert text_of(f'<p style="{style}">seen</p><p>too</p>') == "seen\n\ntoo"


BESIDE = "address article aside blockquote button center details dialog div fieldset figcaption figure footer form"
BESIDE += " header hgroup legend main menu nav option p pre search section summary table textarea ul"


def test_an_element_on_lines_of_its_own_is_joined_with_no_word_beside_it():
    """A minified page has no space between them, and 18 beside 48 would be another number."""
    for name in BESIDE.split():
        one = f"<{name} open>48</{name}>"
        assert {"18", "48", "7"} <= {*text_of(f"<div>18{one}{one}7</div>").split()}, name
    assert text_of("<header>18</header><main><h2>48</h2>7</main>") == "18\n\n## 48\n\n7"


@pytest.mark.parametrize(
    "style", ["font-size:0", "font-size: 0.0em", "color:red;display : NONE", "opacity:0", "visibility:hidden;"]
)
def test_what_an_elements_own_style_hides_is_not_read(style):
    assert text_of(f'<p style="{style}">unseen</p><p>seen</p>') == "seen"


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("10<sup>6</sup>", "10^6"),
        ("10<sup>-6</sup> m", "10^-6 m"),
        ("x<sup>n + 1</sup>", "x^(n + 1)"),
        ("x<sup>(2)</sup>", "x^(2)"),
        ("the 1<sup>st</sup> day", "the 1st day"),
        ("so<sup>*</sup>", "so*"),
        ("H<sub>2</sub>O", "H2O"),
        ('in 1984<sup><a href="#n3">3</a></sup>.', "in 1984 [3]."),
        ('in 1984<a href="notes.xhtml#n3"><sup>3</sup></a>.', "in 1984 [3]."),
        ('in 1984<sup><a href="#n3">[3]</a></sup>.', "in 1984[3]."),
        ("<pre>a<sup>2</sup></pre>", "```\na2\n```"),
        ("<del>100</del> 80 <s>old</s><strike>older</strike>", "80"),
        ("80 <ins>now</ins>", "80 now"),
        ("<dialog open>asked</dialog><dialog>not yet</dialog>", "asked"),
        ("<textarea>typed in</textarea>", "typed in"),
        ("<!-- <!ENTITY x> --><p>read</p>", "read"),
        ('in 1848<a epub:type="noteref" href="#n7">7</a> gave', "in 1848 [7] gave"),
        ('in 1848<a role="doc-noteref" href="x">12</a>Then', "in 1848 [12] Then"),
        ('300<a class="fn" href="#n8">8</a> ships', "300 [8] ships"),
        ('in 1848.<a href="notes.xhtml#n7">7</a> Then', "in 1848. [7] Then"),
        ('said<a href="#n">*</a> so', "said [*] so"),
        ('<span style="vertical-align: super"><a href="#n7">7</a></span> A note', "[7] A note"),
        ('see <a href="#s7">7</a>, <a href="#y">1848</a> and <a href="/p/2">2</a>', "see 7, 1848 and 2"),
        ('10<span style="font-size:70%; vertical-align:super">6</span> m', "10^6 m"),
        ('10<span class="superscript">6</span> and x<i style="vertical-align:30%">2</i>', "10^6 and x^2"),
        (
            "<style>/* up */ b.u, .v { vertical-align: super }</style>10<b class=u>6</b>, 10<i class=v>7</i>",
            "10^6, 10^7",
        ),
        ("3<sup>1</sup>/<sub>2</sub> in", "3 1/2 in"),
        ("101<sub>2</sub> and log<sub>2</sub>8 and CO<sub>2</sub>", "101_2 and log2 8 and CO2"),
        ("<sup>7</sup>300 ships", "^7 300 ships"),
        ("<ruby>漢字<rt>かんじ</rt></ruby>を読む", "漢字(かんじ)を読む"),
        ("<ruby>2024<rp>(</rp><rt>5</rt><rp>)</rp></ruby>", "2024(5)"),
    ],
)
def test_what_is_raised_struck_out_open_or_commented(markup, text):
    assert text_of(markup).strip() == text


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("<ol type=a start=3><li>x<li>y</ol>", "c. x\nd. y"),
        ("<ol type=I start=4><li>x<li type=1>y</ol>", "IV. x\n5. y"),
        ("<ol reversed><li>x<li>y<li>z</ol>", "3. x\n2. y\n1. z"),
        ("<ol><li value=7>x<li>y<ol type=i><li>in</ol></ol>", "7. x\n8. y\n   i. in"),
        ("<ol start=-1><li>x<li>y</ol>", "-1. x\n0. y"),
        ('<ol type=a start=26 style="list-style: inside upper-alpha"><li>x<li>y<li>z</ol>', "Z. x\nAA. y\nAB. z"),
        ("<style>.r {list-style-type: lower-roman}</style><ol class=r><li>x<li>y</ol>", "i. x\nii. y"),
        ("<ol start=9><li>x<p>more<li>y</ol>", "9. x\n\n   more\n10. y"),
        ("<ol start=x><li value=y>x<li><ul><li>deep</ul></ol>", "1. x\n2. - deep"),
    ],
)
def test_the_entries_of_a_list_are_numbered_as_a_browser_does(markup, text):
    assert text_of(markup) == text


def test_a_comment_about_entities_before_the_page():
    page = b"<!-- <!ENTITY x> --><!doctype html><html><p>read"
    assert document_of(page, "a.html").text == "read\n"
    with pytest.raises(BadInput, match="cannot be read as HTML"):
        document_of(b"<!-- a -->" + b'<!doctype html [<!ENTITY x "y">]><html><p>&x;', "a.html")


@pytest.mark.parametrize("size", [2_000, 60_000])
def test_entities_behind_much_else_are_found_too(size: int):
    for much in (b"<!-- " + b"a " * (size // 2) + b"-->", b"<!-- a -->" * (size // 10), b" " * size):
        with pytest.raises(BadInput, match="cannot be read as HTML"):
            document_of(b"<!doctype html>" + much + b'<!DOCTYPE html [<!ENTITY x "y">]><html><p>&x;', "a.html")


# --- encodings


SAID = "Zażółć gęślą jaźń, proszę pana."
GUESSED = {  # what a page does not say -> a text in it
    "shift_jis": "橋は五月に閉鎖された。",
    "euc-jp": "橋は五月に閉鎖された。住民はこれを知らない。",
    "gbk": "这座桥在五月关闭了，我们不知道为什么。",
    "big5": "這座橋在五月關閉了，我們不知道為什麼。",
    "euc-kr": "이 다리는 오월에 폐쇄되었다. 주민들은 이를 알지 못했다.",
    "windows-1251": "Мост закрыли в мае, и никто не знал почему.",
    "koi8-u": "Міст закрили у травні, і ніхто не знав чому.",
    "windows-1253": "Η γέφυρα έκλεισε τον Μάιο και κανείς δεν ήξερε γιατί.",
    "windows-1255": "הגשר נסגר בחודש מאי ואיש לא ידע מדוע",
    "windows-1252": "Die Brücke wurde im Mai für alle geschlossen – “größer” als gedacht.",
    "windows-1250": "Most został zamknięty w maju, a nikt nie wiedział, dlaczego się tak stało.",
}


@pytest.mark.parametrize(
    ("label", "codec", "text"),
    [
        ("iso-8859-1", "cp1252", "It costs €5 – “at most”."),
        ("us-ascii", "cp1252", "It costs €5 – “at most”."),
        ("LATIN1", "cp1252", "It costs €5 – “at most”."),
        ("iso-8859-9", "cp1254", "“ığdır” €"),
        ("latin2", "iso8859-2", SAID),
        ("x-cp1250", "cp1250", SAID),
        ("tis-620", "cp874", "สะพาน €"),
        ("gb2312", "gb18030", "镕基 €"),
        ("x-sjis", "cp932", "①橋㈱"),
        ("x-euc-jp", "euc_jis_2004", "①橋㈱"),
        ("ks_c_5601-1987", "cp949", "똠방각하"),
        ("koi8", "koi8-r", "Мост"),
        ("x-mac-cyrillic", "mac-cyrillic", "Мост"),
        ("macintosh", "mac-roman", "Brücke"),
        ("iso-8859-8-i", "iso8859-8", "גשר"),
        ("big5", "big5hkscs", "橋嘅"),
        ("iso-2022-jp", "iso2022_jp", "橋"),
        ("utf-16", "utf-8", "Brücke"),
    ],
)
def test_a_declared_encoding_is_that_of_browsers(label, codec, text):
    for declared in (f'<meta charset="{label}">', f'<meta content="text/html; charset={label}" http-equiv=x>'):
        document = document_of(f"<html><head>{declared}<p>{text}".encode(codec), "a.html")
        assert (document.text, document.notes) == (f"{text}\n", ())


@pytest.mark.parametrize("label", GUESSED)
def test_an_encoding_that_is_not_declared_is_guessed_by_its_letters_and_said(label):
    document = document_of(f"<html><p>{GUESSED[label]}".encode(codec_of(label)), "a.html")
    assert document.text == f"{GUESSED[label]}\n"
    assert document.notes == (f"a.html does not declare its encoding; read as {label}, guessed from its letters",)


def test_what_declares_an_encoding_that_it_is_not():
    page = '<html><meta charset="{}"><p>Die Brücke über den Fluß war für alle zu.'
    for label, codec, words in (
        ("iso-8859-1", "utf-8", "declares 'iso-8859-1', but is valid UTF-8"),
        ("utf-8", "cp1252", "declares 'utf-8', but has another encoding; read as windows-1252"),
        ("klingon", "cp1252", "declares 'klingon', but has another encoding; read as windows-1252"),
        ("zip", "cp1252", "declares 'zip', but has another encoding"),
    ):
        document = document_of(page.format(label).encode(codec), "a.html")
        assert document.text == "Die Brücke über den Fluß war für alle zu.\n"
        assert words in document.notes[0]


def test_a_place_that_is_broken_is_said():
    document = document_of("<html><p>Brücke ".encode() * 60 + b"\xc3(", "a.html")
    assert document.notes == ("a.html has bytes that are not valid UTF-8; 1 became \ufffd",)


@pytest.mark.parametrize("data", [bytes(range(128, 256)) * 4, b"\x81\x8d\x8f"])
def test_letters_that_show_no_encoding_are_refused(data):
    with pytest.raises(BadInput, match="could not be guessed") as caught:
        document_of(b"<html><p>" + data, "a.html")
    assert caught.value.code == "bad_encoding"


# --- EPUB


SEVERAL = {"all.xhtml": "<p>By nobody.</p><h1 id='a'>One</h1><p>first</p><h1 id='b'>Two</h1><p>second</p>"}


def labels(nav: str, chapters: dict[str, str]) -> list[str]:
    page = f'<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops"><body>{nav}</body></html>'
    return [s.label for s in document_of(books.epub(chapters, more={"OEBPS/nav.xhtml": page}), "a.epub").sections]


def test_chapters_that_share_a_file_keep_their_names():
    nav = '<nav><a href="all.xhtml#a">One</a><a href="all.xhtml#b">Two</a></nav>'
    page = f'<html xmlns="http://www.w3.org/1999/xhtml"><body>{nav}</body></html>'
    document = document_of(books.epub(SEVERAL, more={"OEBPS/nav.xhtml": page}), "a.epub")
    assert [(s.label, s.text) for s in document.sections] == [
        ("One", "By nobody.\n\n# One\n\nfirst"),
        ("Two", "# Two\n\nsecond"),
    ]


@pytest.mark.parametrize(
    "nav",
    [
        '<nav><a href="all.xhtml#a">The book</a><a href="all.xhtml">The book</a></nav>',
        '<nav epub:type="page-list"><a href="all.xhtml#p1">1</a><a href="all.xhtml#p2">2</a></nav>'
        '<nav epub:type="toc"><a href="all.xhtml">The book</a></nav>'
        '<nav epub:type="landmarks"><a href="all.xhtml">Start</a></nav>',
    ],
    ids=["the same name twice", "printed pages and landmarks"],
)
def test_a_chapter_in_a_file_of_its_own_is_whole(nav):
    assert labels(nav, SEVERAL) == ["The book"]


def test_chapters_without_headings_stay_together():
    nav = '<nav><a href="all.xhtml#a">One</a><a href="all.xhtml#b">Two</a></nav>'
    assert labels(nav, {"all.xhtml": "<p id='a'>first</p><p id='b'>second</p>"}) == ["One"]


def test_the_style_sheet_of_a_book_raises_letters():
    text = '<p>In 1848<span class="c3">7</span> and 10<span class="c4">6</span></p>'
    book = books.unzipped(books.epub({"a.xhtml": text}))
    files = {"OEBPS/s.css": ".c3, .c4 {font-size: 0.7em; vertical-align: super}"}
    item = '<item id="css" href="s.css" media-type="text/css"/><item id="gone" href="gone.css" media-type="text/css"/>'
    files["OEBPS/book.opf"] = book["OEBPS/book.opf"].decode().replace("</manifest>", f"{item}</manifest>")
    document = document_of(books.zipped(book | files), "a.epub")
    assert document.text == "In 1848^7 and 10^6\n"
