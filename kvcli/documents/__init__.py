"""Documents: a file is read into sections that can be cited, or refused with the reason, and put before the question.

Text and markdown are read in this process. All other kinds are parsed in a separate process with limits on memory and
time (parse_in_process.py). Their parsers are imported nowhere else.
"""

from kvcli.documents.decode import decode as decode
from kvcli.documents.document import Counter as Counter
from kvcli.documents.document import Document as Document
from kvcli.documents.document import Section as Section
from kvcli.documents.document import Unit as Unit
from kvcli.documents.document import is_address as is_address
from kvcli.documents.document import listed as listed
from kvcli.documents.document import mark as mark
from kvcli.documents.document import marked as marked
from kvcli.documents.document import notes_of as notes_of
from kvcli.documents.document import parse_pages as parse_pages
from kvcli.documents.document import scanned as scanned
from kvcli.documents.document import split_pages as split_pages
from kvcli.documents.document import with_documents as with_documents
from kvcli.documents.read import BUNDLED as BUNDLED
from kvcli.documents.read import MAX_BYTES as MAX_BYTES
from kvcli.documents.read import document_of as document_of
from kvcli.documents.read import read_document as read_document
from kvcli.documents.read import too_large as too_large
from kvcli.worker_process import Limits as Limits
