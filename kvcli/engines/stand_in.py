"""Base of text sessions whose model another process runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

from kvcli.chat.side_by_side import Threads

if TYPE_CHECKING:
    from kvcli.api import Cancel
    from kvcli.prefix_cache.prefix_cache import SaveResult
    from kvcli.schemas.turn import EngineFacts


class StandIn(ExitStack):  # for `with` and `close`
    """The members of TextSession that chats and summaries use, without a KV cache in this process."""

    pack = foretell = None
    drafts_by, n_workers = "", 1
    engine: EngineFacts | None = None
    template_variables: Mapping[str, Any] = {}
    new_engine: ClassVar[type[Threads]] = Threads
    idle = why_again = kv_table = is_compressed_prefix = staticmethod(lambda *_: [])

    def keep(self, cancel: Cancel) -> SaveResult:
        from kvcli.prefix_cache.prefix_cache import SaveResult  # late: it needs torch

        return SaveResult()

    def take_cache(self, other: object) -> bool:
        return True
