"""EPUB and DOCX files written here."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping

CONTAINER = (
    '<?xml version="1.0"?><container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container">'
    '<rootfiles><rootfile full-path="{}" media-type="application/oebps-package+xml"/></rootfiles></container>'
)
PAGE = '<html xmlns="http://www.w3.org/1999/xhtml"><head><title>t</title></head><body>{}</body></html>'
XHTML = "application/xhtml+xml"
CHAPTERS = {
    "text/one.xhtml": "<h1>The river</h1><p>Ice on the river.</p>",
    "text/two.xhtml": "<h1>The bridge</h1><p>The bridge held.</p><h2>Repairs</h2><p>It was mended.</p>",
    "text/three.xhtml": "<p>A last word.</p>",
}
CONTENTS = {"text/one.xhtml": "Of the river", "text/two.xhtml#top": "Of the bridge"}


def epub(
    chapters: Mapping[str, str] | None = None,
    *,
    package: str = "OEBPS/book.opf",
    hrefs: Mapping[str, str] | None = None,
    more: Mapping[str, str | bytes] | None = None,
    dtd: str = "",
) -> bytes:
    """A book with these chapters by path below the package's folder; `hrefs` says other links for some."""
    chapters = CHAPTERS if chapters is None else chapters
    links = {path: (hrefs or {}).get(path, path) for path in chapters}
    items = "".join(f'<item id="c{i}" href="{link}" media-type="{XHTML}"/>' for i, link in enumerate(links.values()))
    refs = "".join(f'<itemref idref="c{i}"/>' for i in range(len(chapters)))
    nav = "".join(f'<li><a href="{href}">{name}</a></li>' for href, name in CONTENTS.items())
    opf = (
        f'<?xml version="1.0"?>{dtd}<package xmlns="http://www.idpf.org/2007/opf" version="3.0"><metadata '
        'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>A Book of Rivers</dc:title></metadata>'
        f'<manifest>{items}<item id="nav" href="nav.xhtml" media-type="{XHTML}" properties="nav"/></manifest>'
        f"<spine>{refs}</spine></package>"
    )
    folder = package.rpartition("/")[0]
    base = f"{folder}/" if folder else ""
    files: dict[str, str | bytes] = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": CONTAINER.format(package),
        package: opf,
        f"{base}nav.xhtml": f'<html xmlns="http://www.w3.org/1999/xhtml"><body><nav><ol>{nav}</ol></nav></body></html>',
    }
    for path, body in chapters.items():
        files[base + path] = PAGE.format(body)
    return zipped(files | dict(more or {}))


def zipped(files: Mapping[str, str | bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


def unzipped(data: bytes) -> dict[str, str | bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
RELATED = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
MATH = "http://schemas.openxmlformats.org/officeDocument/2006/math"
TYPES = (
    '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    '<Default Extension="xml" ContentType="application/xml"/><Default Extension="bmp" ContentType="image/bmp"/>'
    '<Override PartName="/word/styles.xml"'
    ' ContentType="application/vnd.openxmlformats-officedocument.wordprocessingml.styles+xml"/><Override PartName="/{}"'
    ' ContentType="application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/></Types>'
)
CHOICES = "http://schemas.openxmlformats.org/markup-compatibility/2006"


def relations(targets: Mapping[str, str], base: str = RELATED) -> str:
    """What a part points at: kind -> path."""
    each = "".join(f'<Relationship Id="{k}" Type="{base}/{k}" Target="{path}"/>' for k, path in targets.items())
    return f'<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">{each}</Relationships>'


def word(
    body: str,
    *,
    main: str = "word/document.xml",
    targets: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    styles: str = "",
    space: str = WORD,
    base: str = RELATED,
) -> bytes:
    """A DOCX with this text; `targets` are further relations of it, `files` further parts."""
    spaces = f'xmlns:w="{space}" xmlns:m="{MATH}" xmlns:mc="{CHOICES}"'
    folder, _, name = main.rpartition("/")
    pointed = {"styles": "styles.xml"} | dict(targets or {})
    parts = {
        "[Content_Types].xml": TYPES.format(main),
        "_rels/.rels": relations({"officeDocument": main}, base),
        main: f"<w:document {spaces}><w:body>{body}</w:body></w:document>",
        f"{folder}/_rels/{name}.rels": relations(pointed, base),
        f"{folder}/styles.xml": f"<w:styles {spaces}>{styles}</w:styles>",
    }
    return zipped(parts | dict(files or {}))


def paragraph(text: str, properties: str = "", style: str = "") -> str:
    """A paragraph of one run; `properties` are those of the run."""
    led = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f'<w:p>{led}<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r></w:p>'


def docx_file() -> bytes:
    """Headings, a table, a list, and text in tracked changes."""
    import docx
    from docx.oxml import parse_xml
    from docx.oxml.ns import nsdecls

    document = docx.Document()
    document.core_properties.title = "A letter about rivers"
    document.add_paragraph("Before all headings.")
    document.add_heading("Methods", 1)
    document.add_paragraph("We measured the ef\ufb01cient gauge.")
    table = document.add_table(rows=2, cols=2)
    for i, word in enumerate(("depot", "stock", "Gimness", "59")):
        table.cell(i // 2, i % 2).text = word
    document.add_heading("Results", 2)
    paragraph = document.add_paragraph("It was ")
    w = nsdecls("w")
    paragraph._p.append(parse_xml(f"<w:del {w}><w:r><w:delText>bad</w:delText></w:r></w:del>"))
    paragraph._p.append(parse_xml(f"<w:ins {w}><w:r><w:t>good</w:t></w:r></w:ins>"))
    paragraph._p.append(parse_xml(f"<w:r {w}><w:rPr><w:vanish/></w:rPr><w:t>secret</w:t></w:r>"))
    document.add_heading("Results", 2)
    document.add_paragraph("Said again.")
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()
