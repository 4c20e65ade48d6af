"""Documents: a file is read into sections that can be cited, or refused with the reason, and put before the question.

Text and markdown are read in this process. All other kinds are parsed in a separate process with limits on memory and
time (parse_in_process.py). Their parsers are imported nowhere else.
"""

from kvcli.documents.decode import decode
from kvcli.documents.document import (
    Counter,
    Document,
    Section,
    Unit,
    is_address,
    listed,
    mark,
    marked,
    parse_pages,
    split_pages,
    with_documents,
)
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
    "is_address",
    "listed",
    "mark",
    "marked",
    "parse_pages",
    "read_document",
    "split_pages",
    "too_large",
    "with_documents",
]
