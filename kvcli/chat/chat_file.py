"""A conversation as a JSON file: what `/save` writes, what earlier versions kept, and what others send."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from pydantic import ValidationError

from kvcli.errors import BadInput, reading, writing
from kvcli.files import private_folder, write_private
from kvcli.schemas.chat import ChatDocument
from kvcli.settings.small_file import Unfit, read_small

MOST = 512 << 20  # bytes that are read of a file; several times the largest document


def read_chat(path: Path) -> tuple[ChatDocument, str]:
    """What it holds, and its digest. Raises BadInput for what is no file, too large, or no conversation."""
    with reading(path):
        if not path.exists():
            raise BadInput(f"no such chat file: {path}", code="file_missing")
    try:
        data = read_small(path, MOST)
        return ChatDocument.model_validate_json(data), sha256(data).hexdigest()
    except Unfit as error:
        raise BadInput(f"{path} {error}", code="not_a_chat") from None
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise BadInput(f"{path} is not a saved chat", code="not_a_chat", lines=[why]) from None


def write_chat(path: Path, saved: ChatDocument) -> str:
    """Returns the file's digest."""
    data = (json.dumps(saved.document(), ensure_ascii=False, indent=1) + "\n").encode()
    with writing(path):
        private_folder(path.parent)
        write_private(path, data)
    return sha256(data).hexdigest()
