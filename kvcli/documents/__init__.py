"""Files as documents: read or refused with the reason, in sections that can be cited, ready to stand before a question.

Text and markdown are read in this process. All other kinds are parsed in a process of their own whose
memory and time are bounded (parse_in_process.py), and their parsers are imported nowhere else.
"""

from kvcli.documents.decode import decode
from kvcli.documents.document import Counter, Document, Section, Unit, mark, marked, with_documents
from kvcli.documents.pages import listed, parse_pages, split_pages
from kvcli.documents.read import BUNDLED, MAX_BYTES, document_of, read_document, too_large
from kvcli.worker_process import Limits

__all__ = [
    "BUNDLED",
    "MAX_BYTES",
    "Counter",
    "Document",
    "Limits",
    "Section",
    "Unit",
    "decode",
    "document_of",
    "listed",
    "mark",
    "marked",
    "parse_pages",
    "read_document",
    "split_pages",
    "too_large",
    "with_documents",
]
