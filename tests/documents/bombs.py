"""Files made to keep a reader busy, to fill memory, or to lead it astray."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Mapping

from tests.documents.books import CHAPTERS, epub, relations, zipped

Objects = dict[int, bytes]


def pdf(objects: Mapping[int, bytes]) -> bytes:
    """A PDF of these objects, the first of them its root."""
    out, places = io.BytesIO(), {}
    out.write(b"%PDF-1.7\n")
    for n, body in objects.items():
        places[n] = out.tell()
        out.write(b"%d 0 obj\n" % n + body + b"\nendobj\n")
    table, most = out.tell(), max(objects) + 1
    out.write(b"xref\n0 %d\n0000000000 65535 f \n" % most)
    out.writelines(b"%010d 00000 n \n" % places.get(n, 0) for n in range(1, most))
    out.write(b"trailer\n<</Size %d /Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (most, table))
    return out.getvalue()


def stream(data: bytes, entries: bytes = b"") -> bytes:
    packed = zlib.compress(data, 9)
    return b"<<%s /Length %d /Filter /FlateDecode>>\nstream\n" % (entries, len(packed)) + packed + b"\nendstream"


def page(content: bytes, resources: bytes = b"/Font<</F 4 0 R>>") -> Objects:
    """One page with that content."""
    return {
        1: b"<</Type/Catalog/Pages 2 0 R>>",
        2: b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        3: b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Contents 5 0 R/Resources<<" + resources + b">>>>",
        4: b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        5: stream(content),
    }


WORDS = b"BT /F 9 Tf 60 700 Td (some words of text) Tj ET "


def forms(width: int, depth: int) -> bytes:
    """A page that draws a form, which draws another ten times, and so on."""
    objects = page(b"/X6 Do", b"/XObject<</X6 6 0 R>>")
    for n in range(6, 6 + depth):
        last = n == 5 + depth
        inner = b"/Font<</F 4 0 R>>" if last else b"/XObject<</X%d %d 0 R>>" % (n + 1, n + 1)
        entries = b"/Type/XObject/Subtype/Form/BBox[0 0 600 800]/Resources<<" + inner + b">>"
        objects[n] = stream(WORDS if last else b"/X%d Do " % (n + 1) * width, entries)
    return pdf(objects)


def deep_arrays() -> bytes:
    deep = b"[" * 500_000 + b"]" * 500_000
    return pdf(page(WORDS) | {2: b"<</Type/Pages/Kids[3 0 R]/Count 1/X " + deep + b">>", 6: deep})


def endless_pages() -> bytes:
    return pdf(page(WORDS) | {2: b"<</Type/Pages/Kids[2 0 R]/Count 1000000000>>"})


def many_objects() -> bytes:
    return pdf(page(WORDS) | {n: b"<</A %d 0 R>>" % (n + 1) for n in range(6, 200_000)})


def too_many_pages() -> bytes:
    return pdf(page(WORDS) | {2: b"<</Type/Pages/Count 200000/Kids[" + b"3 0 R " * 200_000 + b"]>>"})


def swollen() -> bytes:
    """A quarter of a megabyte that is a hundred once inflated."""
    return pdf(page(WORDS * 2_000_000))


LAUGHS = (
    '<!DOCTYPE lolz [<!ENTITY a "ha">'
    + "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    + "]>"
)


def zip_bomb() -> bytes:
    return epub({"text/one.xhtml": " " * 40 * 2**20})


def zip_lies() -> bytes:
    """An index that calls a large chapter small."""
    data = bytearray(epub(CHAPTERS | {"text/three.xhtml": "<p>" + "A last word. " * 400_000 + "</p>"}))
    at = data.rindex(b"PK\x01\x02", 0, data.rindex(b"text/three.xhtml"))
    data[at + 24 : at + 28] = struct.pack("<I", 100)
    return bytes(data)


def escaping_member() -> bytes:
    return epub(more={"../../../tmp/outside.txt": "x"})


def escaping_link() -> bytes:
    return epub(hrefs={"text/one.xhtml": "../../../../etc/passwd"})


def crowded() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("META-INF/container.xml", "x")
        for i in range(20_001):
            archive.writestr(str(i), "")
    return out.getvalue()


def deep_xml() -> bytes:
    return epub(package="book.opf", more={"book.opf": "<package>" * 100_000})


def docx_laughs() -> bytes:
    body = f'<?xml version="1.0"?><!--{"x" * 5000}-->{LAUGHS}<w:document xmlns:w="w"><w:body>&i;</w:body></w:document>'
    return zipped({"_rels/.rels": relations({"officeDocument": "word/document.xml"}), "word/document.xml": body})
