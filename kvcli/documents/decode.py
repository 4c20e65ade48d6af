"""Decode bytes to text, or refuse them with the reason."""

from __future__ import annotations

import codecs
import re
from contextlib import suppress
from pathlib import Path, PurePath
from shlex import quote

from kvcli.errors import BadInput, UsageError

# Find the encoding of a page by byte order mark, declared label, UTF-8, or a guess from its letters (with a note).
#
# Labels are mapped as browsers map them (encoding.spec.whatwg.org): `iso-8859-1` is decoded as windows-1252.


# ruff: noqa: RUF001 - letters of many alphabets

BEYOND = bytes(range(128, 256))
SAMPLE = 1 << 16  # bytes that the guess reads, from the first one beyond ASCII
# smallest share of a language's common letters among the characters beyond ASCII, and its lead over the second
LEAST, APART = 0.4, 0.04
ISO = re.compile(r"iso[-_]?8859[-_]?(\d+)(?:[-_]?[ei])?")
# labels that Python does not know; codecs where browsers read a wider encoding; all other labels that browsers read
OTHER = {"koi": "koi8-r", "koi8": "koi8-r", "koi8-ru": "koi8-u", "mac": "mac-roman", "macintosh": "mac-roman"}
OTHER |= {"dos-874": "cp874", "windows-874": "cp874", "logical": "iso8859-8", "visual": "iso8859-8", "cn-big5": "big5"}
OTHER |= dict.fromkeys("windows-949 iso-ir-149 ksc_5601 ks_c_5601-1989 ksc56011987".split(), "cp949")
OTHER |= {"gb_2312": "gbk", "gb_2312-80": "gbk", "windows-31j": "cp932", "sun_eu_greek": "iso8859-7"}
OTHER |= {"isolatin9": "iso8859-15", "mac-ukrainian": "mac-cyrillic", "user-defined": "cp1252", "unicode": "utf-8"}
WIDER = {"ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874", "tis-620": "cp874"}
WIDER |= {"gb2312": "gb18030", "gbk": "gb18030", "big5": "big5hkscs", "euc_kr": "cp949", "shift_jis": "cp932"}
WIDER |= {"euc_jp": "euc_jis_2004", "utf-16": "utf-8", "utf-16-le": "utf-8", "utf-16-be": "utf-8"}
SINGLE = re.compile(r"cp(125\d|8\d\d)|iso8859-\d+|koi8-[ru]|mac-(roman|cyrillic)")  # one byte per character
SEVERAL = ("utf-8", "cp932", "cp949", "gb18030", "big5hkscs", "iso2022_jp", "euc_jis_2004")
# encodings that the guess tries, with the letters that make up most characters beyond ASCII in a language, or in each
# of several languages; the first encoding is the browsers' default
ALPHABETS = {
    "windows-1252": "éèàêçôâîûùëïœ äöüß áéíóúñü ãáâàçéêíóôõú åäöæø àèéìòù áéíóúýþðæö àçèéíïòóúü",
    "windows-1250 iso-8859-2": "ąćęłńóśźż áčďéěíňřšťúůýž áéíóöőúüű ăâîşţ čćšžđ áäčďéíľĺňóôŕšťúýž",
    "windows-1254": "çğıöşü",
    "windows-1257": "ąčęėįšųūž āčēģīķļņšūž äõöüšž",
    "windows-1251 koi8-u ibm866 iso-8859-5": "оеаинтсрвлкмдпуяыізьбгчй",
    "windows-1253": "αοιετνσρκπυηλμςόίάέήώύθγδ",
    "windows-1255": "יוהלאתרבמשנדםקחעפט",
    "windows-1256": "اليمنترهوبسعدقفةكحپیک",
    "windows-874": "านรกอเงมยวลดทสต่้ัิีะแคหปขโไบ",
    "shift_jis euc-jp": "のにたいをはとるがしでてなかっれらもすりこさんくまあスントルイー、。・「」",
    "gbk": "的一是不了在人有我他这中大来上个国到说们以时要和就出会可也你对生能而子那得于下自之年过发后作里，。：、“",
    "big5": "的一是不了在人有我他這中大來上個國到說們以時要和就出會可也你對生能而子那得於下自之年過發後作裡，。：、「",
    "euc-kr": "이다는에의을가고를한은하로지기사도인어서자나대아그시리으일해정수있전라보부들제여만과장주상적조게스구원",
}
LETTERS = {label: letters for labels, letters in ALPHABETS.items() for label in labels.split()}
SIGNS = "“”„‘’‚–—…«»€£§°©®·\u00a0"
ALONG = r"(?<=[a-zA-Z])[{0}]|[{0}](?=[a-zA-Z])|(?<!\w)([{0}](?!\w)|[{1}](?=[a-z]))|[{2}]"  # letters of a Latin word
# letters of any other alphabet
APART_FROM = r"(?<=[^\W\d_a-zA-Z])[{0}](?![a-zA-Z])|(?<![a-zA-Z])[{0}](?=[^\W\d_a-zA-Z])|[{2}]"


def page_text(data: bytes, name: str, said: str = "") -> tuple[str, list[str]]:
    """Return the text of a page, and notes on a guessed encoding or undecodable bytes; `said` is its declared label."""
    for mark, encoding in MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, "replace"), []
    codec, notes = codec_of(said), []
    if codec is None and b"\x1b$" in data[:SAMPLE]:
        codec = "iso2022_jp"
    text = data.decode("utf-8", "replace")
    beyond = len(data) - len(data.translate(None, BEYOND))
    lost = text.count("\ufffd") - data.count("\ufffd".encode())
    if codec in (None, "utf-8") and lost * 50 <= beyond:
        codec = "utf-8"  # a few broken bytes do not rule out UTF-8
    elif codec in (None, "utf-8"):
        why = f"declares {said[:40]!r}, but has another encoding" if said else "does not declare its encoding"
        label, codec = _guessed(data, name)
        notes.append(f"{name} {why}; read as {label}, guessed from its letters")
    elif beyond and not lost and SINGLE.fullmatch(codec):
        codec = "utf-8"
        notes.append(f"{name} declares {said[:40]!r}, but is valid UTF-8; read as UTF-8")
    if codec != "utf-8":
        text = data.decode(codec, "replace")
        lost = text.count("\ufffd")
    if lost:
        notes.append(f"{name} has bytes that are not valid {codec.upper()}; {lost:,} became \ufffd")
    return text, notes


def codec_of(label: str) -> str | None:
    """Return the codec for a declared label, or None if browsers do not know the label."""
    plain = re.sub(r"^(x-)+", "", label.strip().lower())
    for key in (plain, plain.removeprefix("cs")):
        iso = ISO.fullmatch(key)
        try:
            known = codecs.lookup(f"iso8859-{iso[1]}" if iso else OTHER.get(key, key)).name
        except (LookupError, ValueError):
            continue
        codec = WIDER.get(known, known)
        return codec if SINGLE.fullmatch(codec) or codec in SEVERAL else None
    return None


def _guessed(data: bytes, name: str) -> tuple[str, str]:
    """Return the label whose letters fit the text best, and its codec; refuse if no alphabet is clearly ahead."""
    start = next(re.finditer(rb"[\x80-\xff]", data)).start()
    sample = b" ".join(part.rpartition(b">")[2] for part in data[start : start + SAMPLE].split(b"<"))
    tried = sorted(((_share(sample, label), label) for label in LETTERS), reverse=True)
    share, label = tried[0]
    second = next(other for other, with_ in tried if not (_is_latin(label) and _is_latin(with_)) and with_ != label)
    if share < LEAST or share - second < APART:
        raise BadInput(
            f"{name} does not declare its encoding, and the encoding could not be guessed",
            code="bad_encoding",
            lines=[f"byte {start:,} is 0x{data[start]:02x}, which is not valid UTF-8"],
            detail={"offset": start},
            try_=[f"iconv -f ENCODING -t utf-8 {quote(name)} > utf8.html"],
        )
    return label, codec_of(label) or "utf-8"


def _is_latin(label: str) -> bool:
    return LETTERS[label] < "\u0250"


def _share(sample: bytes, label: str) -> float:
    """Return the share of non-ASCII characters that are letters of a label, in fitting words; 0 if undecodable."""
    try:
        text = codecs.getincrementaldecoder(codec_of(label) or "")().decode(sample)
    except UnicodeDecodeError:
        return 0.0
    is_cjk = LETTERS[label] > "\u2e80"
    where = "[{0}]" if is_cjk else ALONG if _is_latin(label) else APART_FROM
    found = max(
        sum(1 for _ in re.finditer(where.format(each, each.upper(), SIGNS), text)) for each in LETTERS[label].split()
    )
    share = found / max(1, sum(c > "\x7f" for c in text))
    # common signs make up half of a Chinese text; windows-1252 wins a tie
    return min(1.0, 2 * share if is_cjk else share) + APART * (label == "windows-1252")


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
    newline, label = "\n".encode(encoding), "ENCODING"
    with suppress(BadInput):
        label = _guessed(body, name)[0] if encoding == "utf-8" else label
    line = body.count(newline, 0, error.start) + 1
    offset = start + error.start
    return BadInput(
        f"{name} is not valid {encoding.upper()}: byte {offset:,}, line {line:,}",
        code="bad_encoding",
        lines=[f"byte 0x{body[error.start]:02x}: {error.reason}"],
        detail={"encoding": encoding, "offset": offset, "line": line},
        try_=[f"iconv -f {label} -t utf-8 {quote(name)} > utf8.txt" if encoding == "utf-8" else "save it as UTF-8"],
    )


# Detect the kind of a file from its content, and from its name only if the content is ambiguous.

NAMED = {  # kind -> suffixes of such files
    "pdf": "pdf",
    "html": "html htm xhtml",
    "epub": "epub",
    "docx": "docx",
    "mail": "eml mbox",
    "mhtml": "mhtml mht",
    "notebook": "ipynb",
    "markdown": "md markdown",
    "text": "txt text",
}
KINDS = tuple(NAMED)
SUFFIXES = {f".{end}": kind for kind, ends in NAMED.items() for end in ends.split()}
WORDS = {"pdf": "PDF", "html": "HTML", "epub": "EPUB", "docx": "DOCX", "markdown": "markdown", "text": "text"}
WORDS |= {"mail": "mail", "mhtml": "MHTML", "notebook": "a notebook"}
HEAD = 4096  # bytes examined
PDF_WITHIN = 1024  # bytes before the header that PDF readers tolerate
COMMENTS = rb"(<!--((?!-->).){0,2000}-->\s*)*"  # one way to match each comment: no exponential backtracking
HTML = re.compile(rb"\s*(<\?xml[^>]{0,200}>\s*)?" + COMMENTS + rb"(<!doctype\s+html|<html[\s>])", re.I | re.S)
TAG = re.compile(rb"\s*(<\?xml[^>]{0,200}>\s*)?<[!a-zA-Z]", re.S)
HEADERS = re.compile(rb"(?:From [^\n]*\n)?(?:[A-Za-z][\w-]*:[^\n]*(?:\n|\Z)(?:[ \t][^\n]*(?:\n|\Z))*)+")
# headers that people do not write by hand
POSTED = {b"message-id", b"received", b"mime-version", b"return-path", b"delivered-to"}
USUAL = POSTED | {b"from", b"to", b"date", b"subject", b"content-type", b"dkim-signature", b"arc-seal"}
NOTEBOOK = re.compile(rb'\s*\{\s*"(cells|metadata|nbformat|worksheets)"\s*:')
HEADING = re.compile(rb"^#{1,6} \S.*\n\s*\n", re.M)


def named_kind(name: str) -> str | None:
    """Return the kind that the file suffix indicates."""
    return SUFFIXES.get(PurePath(name).suffix.lower())


def check_type(type: str | None) -> str | None:
    """Return a kind as typed; refuse an unknown word."""
    kind = SUFFIXES.get(f".{type}", type) if type else None
    if kind is not None and kind not in KINDS:
        raise UsageError(f"there is no type {type!r}", code="unknown_type", try_=[f"--type {k}" for k in KINDS])
    return kind


def sniff(head: bytes, name: str) -> str:
    """Return the kind of a file from its first bytes: one of KINDS, or "zip" if only the archive's index shows it."""
    promised = named_kind(name)
    body = head.removeprefix(b"\xef\xbb\xbf")
    if promised in ("markdown", "text"):
        is_pdf = bool(PDF_HEADER.match(body))
    else:
        is_pdf = body.lstrip().startswith(b"%PDF-") or (promised == "pdf" and b"%PDF-" in head[:PDF_WITHIN])
    if is_pdf:
        return "pdf"
    if head.startswith(b"PK\x03\x04"):
        return "zip"
    if HTML.match(_narrow(body)) or (promised == "html" and TAG.match(_narrow(body))):
        return "html"
    if (posted := _posted(body, promised)) is not None:
        return posted
    if NOTEBOOK.match(body) and (promised == "notebook" or b'"cell_type"' in body or b'"nbformat"' in body):
        return "notebook"
    if promised in ("markdown", "text"):
        return promised
    if PurePath(name).suffix == "" and not body.startswith(b"#!") and len(HEADING.findall(body)) > 1:
        return "markdown"
    return "text"


def looks_readable(file: Path) -> bool:
    """True if the first bytes of an unnamed file of a folder look like a document."""
    with file.open("rb") as stream:
        head = stream.read(HEAD)
    kind, promised = sniff(head, file.name), named_kind(file.name)
    return bool(promised) or kind in ("pdf", "html") or (kind != "zip" and b"\0" not in head and bool(head.strip()))


def _posted(head: bytes, promised: str | None) -> str | None:
    """Return "mail" or "mhtml" from the headers, or None without such headers."""
    found = HEADERS.match(head)
    names = {name.lower() for name in re.findall(rb"^([\w-]+):", found[0], re.M)} if found else set()
    if promised not in ("mail", "mhtml") and (len(names & USUAL) < 3 or not names & POSTED):
        return None
    if b"multipart/related" in head and (promised == "mhtml" or not names & {b"to", b"received", b"message-id"}):
        return "mhtml"
    return "mail" if names else None


def disagreement(name: str, kind: str) -> str | None:
    """Return a note if the name indicates another kind than the content."""
    promised = named_kind(name)
    if promised in (None, kind) or {promised, kind} == {"markdown", "text"}:
        return None
    return f"{name} is named {PurePath(name).suffix} but its content is {WORDS[kind]}; read as {WORDS[kind]}"


def _narrow(head: bytes) -> bytes:
    """Return UTF-16 markup as single bytes, which suffices for its first tag."""
    return head[2:].replace(b"\0", b"") if head[:2] in (b"\xff\xfe", b"\xfe\xff") else head
