"""Saved chats as JSON files, written by `/save`, by earlier versions or by other users."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from pydantic import ValidationError

from kvcli.errors import BadInput, reading, writing
from kvcli.files import private_folder, write_private
from kvcli.schemas.chat import ChatDocument
from kvcli.settings.small_file import Unfit, read_small

MOST = 512 << 20  # bytes of a file that is read, at most; several times the largest document


def read_chat(path: Path) -> tuple[ChatDocument, str]:
    """Return the chat in a file and the file's digest. Raises BadInput if the file is missing, too large or no chat."""
    with reading(path):
        if not path.exists():
            raise BadInput(f"no such conversation: {path}", code="file_missing")
    try:
        data = read_small(path, MOST)
        return ChatDocument.model_validate_json(data), sha256(data).hexdigest()
    except Unfit as error:
        raise BadInput(f"{path} {error}", code="not_a_chat") from None
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise BadInput(f"{path} is not a saved conversation", code="not_a_chat", lines=[why]) from None


def write_chat(path: Path, saved: ChatDocument) -> str:
    """Write the chat to a file and return the file's digest."""
    data = (json.dumps(saved.document(), ensure_ascii=False, indent=1) + "\n").encode()
    with writing(path):
        private_folder(path.parent)
        write_private(path, data)
    return sha256(data).hexdigest()
