"""Decode bytes to text, or refuse them with the reason."""

from __future__ import annotations

import codecs
import re
from shlex import quote

from kvcli.errors import BadInput

SNIFFED = 1 << 16  # bytes checked to tell text from binary
MAX_CONTROL_SHARE = 0.05  # of the sniffed bytes; text has almost none

# order matters: the UTF-16 mark is a prefix of the UTF-32 mark
MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
CONTROLS = bytes(sorted(({*range(32)} | {127}) - set(b"\t\n\v\f\r\b\x1b")))
# the line alone, because a text may begin with words about it
PDF_HEADER = re.compile(rb"\s{0,1024}%PDF-\d\.\d[ \t]*[\r\n]")
CONVERT = "convert it to one of these first"
KNOWN = (  # offset, magic bytes, kind of file, and the command to type; {} is the file name
    (0, b"PK\x03\x04", "a zip archive", "unzip {}"),
    (0, b"\x1f\x8b", "compressed with gzip", "gunzip < {} > unpacked"),
    (4, b"1AY&SY", "compressed with bzip2", "bunzip2 < {} > unpacked"),
    (0, b"\xfd7zXZ\0", "compressed with xz", "unxz < {} > unpacked"),
    (0, b"\x28\xb5\x2f\xfd", "compressed with zstd", "unzstd < {} > unpacked"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", "7z x {}"),
    (0, b"Rar!\x1a\x07", "a RAR archive", "unrar x {}"),
    (257, b"ustar", "a tar archive", "tar xf {}"),
    (0, b"\xd0\xcf\x11\xe0", "an old Office file or a message of Outlook (.doc, .xls, .ppt, .msg)", ""),
    (0, b"{\\rtf", "an RTF file", ""),
    (0, b"%!PS", "PostScript", "ps2pdf {}"),
    (0, b"bplist00", "a property list, such as a web archive of Safari", ""),
    (0, b"WARC/", "a web crawl (WARC)", ""),
    (60, b"BOOKMOBI", "a Kindle book", ""),
    (0, b"AT&TFORM", "a DjVu file", ""),
    (0, b"SQLite format 3", "a database (SQLite)", ""),
    (0, b"\x89PNG", "an image (PNG)", ""),
    (0, b"\xff\xd8\xff", "an image (JPEG)", ""),
)
# XML that a program displays as a document
SHOWN = re.compile(rb"<(FictionBook|office:document|w:wordDocument|pkg:package|fo:root)[\s>]|>(WebMainResource)<")


def decode(data: bytes, name: str) -> str:
    """Decode UTF-8, or the encoding named by the byte order mark. Line ends become newlines."""
    mark, encoding = next(((m, e) for m, e in MARKS if data.startswith(m)), (b"", "utf-8"))
    body = data[len(mark) :]
    if not mark:
        _refuse_binary(body, name)
    try:
        text = body.decode(encoding)
    except UnicodeDecodeError as error:
        raise _bad_encoding(body, len(mark), encoding, error, name) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _refuse_binary(data: bytes, name: str) -> None:
    known = ((kind, command) for at, start, kind, command in KNOWN if data.startswith(start, at))
    kind, command = ("a PDF", "") if PDF_HEADER.match(data) else next(known, ("", ""))
    if not kind and data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<") and (shown := SHOWN.search(data[:SNIFFED])):
        kind = f"a document in XML ({(shown[1] or shown[2]).decode()})"
    if kind:
        if command and (name.endswith(".tgz") or ".tar." in name):
            command = "tar xf {}"
        raise BadInput(
            f"{name} is {kind}, not text",
            code="not_text",
            lines=["supported: PDF, HTML, EPUB, DOCX, mail, web archives (MHTML), notebooks, markdown and text"],
            try_=[command.format(quote(name)) if command else CONVERT],
        )
    head, zero = data[:SNIFFED], data.find(b"\0")
    odd = len(head) - len(head.translate(None, CONTROLS))
    if zero >= 0:
        why, detail = f"it has a zero byte at offset {zero:,}", {"offset": zero}
    elif odd > MAX_CONTROL_SHARE * len(head):
        why = f"{odd / len(head):.0%} of its first bytes are control characters"
        detail = {"control_bytes": odd, "looked_at": len(head)}
    else:
        return
    raise BadInput(
        f"{name} is not text: {why}", code="not_text", detail=detail, try_=["convert it to UTF-8 text first"]
    )


def _bad_encoding(body: bytes, start: int, encoding: str, error: UnicodeDecodeError, name: str) -> BadInput:
    newline = "\n".encode(encoding)
    line = body.count(newline, 0, error.start) + 1
    offset = start + error.start
    return BadInput(
        f"{name} is not valid {encoding.upper()}: byte {offset:,}, line {line:,}",
        code="bad_encoding",
        lines=[f"byte 0x{body[error.start]:02x}: {error.reason}"],
        detail={"encoding": encoding, "offset": offset, "line": line},
        try_=[f"iconv -f latin1 -t utf-8 {quote(name)} > utf8.txt" if encoding == "utf-8" else "save it as UTF-8"],
    )
