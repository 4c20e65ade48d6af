"""Open archives with limits on member count, inflated size, compression ratio and path names."""

from __future__ import annotations

import zipfile
from shlex import quote
from typing import IO

from kvcli.documents.document import damaged
from kvcli.errors import BadInput, KvcliError

MAX_MEMBERS = 20_000
MAX_TOTAL = 512 * 2**20  # bytes of all members, inflated
MAX_MEMBER = 64 * 2**20  # bytes of one member that is read
MAX_RATIO = 200  # inflated / compressed size of a member larger than SMALL; text compresses three to twenty times
SMALL = 1 << 20
CHUNK = 1 << 16
OTHERS = {  # prefixes of member names, and the kind of file that has them
    "xl/": "an Excel file",
    "ppt/": "a PowerPoint file",
    "content.xml": "an OpenDocument file",
    "Index/Document.iwa": "a file of Pages, Numbers or Keynote",
    "FixedDoc": "an XPS file",
    "Contents/content.hpf": "a HWPX file",
}


def open_zip(file: IO[bytes], name: str) -> zipfile.ZipFile:
    """Open the archive and check its index. Nothing is inflated yet."""
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise damaged(name, "an archive (EPUB, DOCX)", str(error)) from None
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        raise bomb(name, f"{len(members):,} files in it, at most {MAX_MEMBERS:,}")
    if (total := sum(m.file_size for m in members)) > MAX_TOTAL:
        raise bomb(name, f"{total / 2**20:,.0f} MiB inflated, at most {MAX_TOTAL / 2**20:,.0f}")
    for member in members:
        if member.flag_bits & 1:
            raise BadInput(f"{name} is encrypted", code="encrypted", lines=["its archive needs a password"])
        if _escapes(member.filename):
            raise damaged(name, "an archive (EPUB, DOCX)", f"a path in it leads outside: {member.filename[:80]!r}")
    return archive


def member(archive: zipfile.ZipFile, path: str, name: str) -> bytes:
    """Inflate one file of the archive. Its bytes are counted, because the sizes in the index may be wrong.

    Pictures are never inflated.
    """
    parts, size = [], 0
    try:
        packed = max(1, archive.getinfo(path).compress_size)
        with archive.open(path) as stream:
            while chunk := stream.read(CHUNK):
                size += len(chunk)
                if size > MAX_MEMBER:
                    raise bomb(name, f"{path[:80]!r} in it is larger than {MAX_MEMBER / 2**20:,.0f} MiB")
                if size > max(SMALL, MAX_RATIO * packed):
                    raise bomb(name, f"{path[:80]!r} in it inflates more than {MAX_RATIO} times")
                parts.append(chunk)
    except KeyError:
        raise damaged(name, "an archive (EPUB, DOCX)", f"a file is missing in it: {path[:80]!r}") from None
    except (KvcliError, MemoryError):
        raise
    except Exception as error:  # each compression method raises its own errors: zlib.error, lzma.LZMAError
        raise damaged(name, "an archive (EPUB, DOCX)", f"{path[:80]!r} in it: {error}") from None
    return b"".join(parts)


def kind_of(file: IO[bytes], name: str) -> str:
    """Return "epub" or "docx"; refuse an archive that is neither."""
    names = set(open_zip(file, name).namelist())
    if "META-INF/container.xml" in names:
        return "epub"
    if "word/document.xml" in names or ("_rels/.rels" in names and any(n.startswith("word/") for n in names)):
        return "docx"  # the main part may have another name
    what = next((what for start, what in OTHERS.items() if any(n.startswith(start) for n in names)), "a zip archive")
    raise BadInput(
        f"{name} is {what}; the only supported archives are EPUB and DOCX",
        code="not_text",
        try_=[f"unzip {quote(name)}" if what == "a zip archive" else "save it as DOCX or PDF"],
    )


def bomb(name: str, why: str) -> BadInput:
    return BadInput(
        f"{name} is too large after decompression",
        code="document_too_heavy",
        lines=[f"{why}; the file may be an attack (zip bomb)"],
    )


def _escapes(path: str) -> bool:
    return path.startswith(("/", "\\")) or ".." in path.replace("\\", "/").split("/") or "\0" in path
