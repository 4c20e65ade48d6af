"""A pack: a folder of documents with their KV cache, so that many questions start without prefill.

    NAME.kvs/manifest.json   description of the pack (kvcli.schemas.pack)
             chat.json       the documents, as a chat without questions (kvcli.schemas.turn)
             past.kv         snapshot of the KV cache after the prefill (kvcli.prefix_cache.snapshot_file)

A pack may come from another machine. So the manifest may name no other files, file sizes are checked before the files
are read, and their content is checked by digest.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from kvcli import assemble
from kvcli.chat.transcript import documents_of
from kvcli.documents import Document
from kvcli.engine.sequence.session import GenerationSession
from kvcli.errors import BadInput
from kvcli.files import replacing_folder, write_private
from kvcli.kv.snapshot import SnapshotMismatch
from kvcli.prefix_cache import snapshot_file
from kvcli.prefix_cache.prefix_cache import cache_key, fields_of
from kvcli.prefix_cache.snapshot_file import CorruptFile
from kvcli.prefix_cache.tensor_codec import coded_state, decoded_state
from kvcli.schemas.pack import PackDocument, PackedFile
from kvcli.schemas.turn import ChatDocument
from kvcli.settings.config import set_value
from kvcli.settings.profile import Profile
from kvcli.settings.small_file import Unfit, open_regular, read_small

MANIFEST, CHAT, PAST = "manifest.json", "chat.json", "past.kv"
OF_MODEL = ("exactness", "load.quant", "load.dtype", "kv.dtype")  # exactness and number formats of the KV cache
SMALL, LARGE = 1 << 20, 1 << 30  # maximum bytes of the manifest and of the documents


@dataclass(frozen=True, slots=True)
class Pack:
    """An opened pack. Its KV cache is loaded when a question needs it."""

    folder: Path
    about: PackDocument
    chat: ChatDocument

    @property
    def documents(self) -> list[Document]:
        return list(documents_of(self.chat.pending))

    def fetch(self, session: GenerationSession, ids: Sequence[int]) -> None:
        """Load the pack's KV cache into a session if the prompt `ids` begins with the pack's tokens.

        Raises BadInput if the snapshot is damaged or of another token sequence.
        """
        n = self.about.tokens
        if session.committed >= n or len(ids) <= n or snapshot_file.digest(ids[:n]) != self.about.ids:
            return
        try:
            self._check(PAST)
            session.restore(decoded_state(snapshot_file.read(self.folder / PAST)), ids[n])
        except (CorruptFile, SnapshotMismatch, Unfit) as error:
            raise _bad(self.folder, f"{PAST}: {error}") from None
        except OSError as error:
            raise _bad(self.folder, f"{PAST} cannot be read: {error.strerror or error}") from None
        if session.ids[:n] != list(ids[:n]):
            session.rewind(0)
            raise _bad(self.folder, f"{PAST} belongs to another text")
        session.resume(ids)  # as at the start of every question

    def differs(self, session: GenerationSession, profile: Profile) -> list[str]:
        """Return the fields in which the model or its KV cache settings differ from those of the pack."""
        return _unlike(_fingerprint(session, profile), self.about.fingerprint)

    def refuse_other(self, session: GenerationSession, profile: Profile) -> None:
        """Raise BadInput if a session of this profile cannot use the pack."""
        self._refuse(_fingerprint(session, profile), self.about.fingerprint)

    def refuse_under(self, profile: Profile) -> None:
        """Raise BadInput if settings differ; needs no model. `OF_MODEL` is skipped: loading resolves its "auto"."""
        of_past = {key: was for key, was in self.about.settings.items() if key not in OF_MODEL}
        mine = {key: set_value(profile.values[key]) for key in of_past if key in profile.values}
        self._refuse(mine, of_past)

    def _refuse(self, mine: Mapping[str, str], its: Mapping[str, str]) -> None:
        if not (fields := _unlike(mine, its)):
            return
        again = f"kvcli pack FILE -o {shlex.quote(self.folder.name)}, to prefill the documents again"
        is_settings = all(key in self.about.settings or key not in its for key in fields)
        raise BadInput(
            f"{self.folder.name} was made with another model or other settings: {fields[0]}",
            code="other_pack",
            lines=[f"{key} was {its.get(key, 'not set')}, is {mine.get(key, 'not set')}" for key in fields],
            detail={"fields": fields},
            try_=["leave out -P and --set of these keys: the pack has its own", again] if is_settings else [again],
        )

    def _check(self, name: str) -> None:
        """Raise Unfit if the file is missing, a link, or differs in size or digest from the manifest."""
        path, said = self.folder / name, self.about.files[name]
        if path.is_symlink():
            raise Unfit("it is a link")
        with open_regular(path) as file:
            if path.stat().st_size != said.bytes or hashlib.file_digest(file, "sha256").hexdigest() != said.sha256:
                raise Unfit("its content does not match the manifest")


def open_pack(folder: Path) -> Pack:
    """Return the pack in a folder. Raises BadInput if the folder is no pack or is incomplete."""
    try:
        if (folder / MANIFEST).is_symlink():
            raise Unfit("it is a link")
        about = PackDocument.model_validate_json(read_small(folder / MANIFEST, SMALL))
        if set(about.files) != {CHAT, PAST}:
            raise Unfit(f"it names other files than {CHAT} and {PAST}")
        if not all(map(_is_of_past, about.settings)):
            raise Unfit("it has settings that do not affect the KV cache")
        pack = Pack(folder, about, ChatDocument.model_construct())
        if about.files[CHAT].bytes > LARGE:
            raise Unfit("it is too large")
        pack._check(CHAT)
        chat = ChatDocument.model_validate_json(read_small(folder / CHAT, min(LARGE, about.files[CHAT].bytes)))
    except (Unfit, ValidationError, RecursionError) as error:
        what = f"its {error.title} is invalid" if isinstance(error, ValidationError) else str(error)
        raise _bad(folder, what) from None
    if chat.messages or not chat.pending:
        raise _bad(folder, "it contains a chat without documents")
    return Pack(folder, about, chat)


def write_pack(
    folder: Path,
    chat: ChatDocument,
    session: GenerationSession,
    profile: Profile,
    promise: str,
    made_by: Mapping[str, str],
) -> PackDocument:
    """Write the pack of a chat without questions, whose documents `session` has prefilled.

    `promise`: exactness of the profile on this model. `made_by`: the cache key of the model from before the prefill.
    """
    ids = session.ids[: session.committed]
    shaping, values = assemble.cache_conditions(profile), profile.values
    with replacing_folder(folder) as made:
        snapshot_file.write(made / PAST, coded_state(session.state(), shaping.codec))
        write_private(made / CHAT, json.dumps(chat.document(), ensure_ascii=False))
        about = PackDocument(
            schema="kvcli.pack/1",
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            model=chat.model,
            profile=profile.name,
            promise=promise,
            documents=[document.name for document in chat.pending],
            tokens=len(ids),
            ids=snapshot_file.digest(ids),
            fingerprint=fields_of(made_by, session, shaping),
            settings={key: set_value(values[key]) for key in (*OF_MODEL, *shaping.settings)},
            files={name: _packed(made / name) for name in (CHAT, PAST)},
        )
        write_private(made / MANIFEST, about.model_dump_json(by_alias=True, indent=1) + "\n")
    return about


def _fingerprint(session: GenerationSession, profile: Profile) -> dict[str, str]:
    """Return everything that the KV cache of a session depends on, by field."""
    return fields_of(cache_key(session.lm), session, assemble.cache_conditions(profile))


def _unlike(mine: Mapping[str, str], its: Mapping[str, str]) -> list[str]:
    return [key for key in dict.fromkeys((*mine, *its)) if mine.get(key) != its.get(key)]


def _is_of_past(key: str) -> bool:
    return key in OF_MODEL or (key.partition(".")[0] in assemble.SHAPE and "=" not in key)


def _packed(path: Path) -> PackedFile:
    with path.open("rb") as file:
        return PackedFile(bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def _bad(folder: Path, why: str) -> BadInput:
    return BadInput(
        f"{folder.name} is not a usable pack: {why}",
        code="bad_pack",
        try_=[f"kvcli pack FILE -o {folder.name}, to prefill the documents again", "kvcli chat -f FILE"],
    )
