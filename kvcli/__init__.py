"""kvcli: chat with long documents on your own machine.

    import kvcli
    with kvcli.load("demo") as model:
        print(model.generate("Hello").text)

Importing this package imports nothing heavy; the names below are looked up when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcli.version import __version__

if TYPE_CHECKING:  # named twice, so that type checkers take the names as exported
    from kvcli.chat.conversation import Chat as Chat
    from kvcli.chat.model import Model as Model
    from kvcli.documents import Document as Document
    from kvcli.documents import read_document as read_document
    from kvcli.door import load as load
    from kvcli.engine.engine import generate_together as generate_together
    from kvcli.errors import KvcliError as KvcliError
    from kvcli.models.grammar import Grammar as Grammar
    from kvcli.settings.profile import Profile as Profile

_HOMES = {
    "load": "kvcli.door",
    "Model": "kvcli.chat.model",
    "generate_together": "kvcli.engine.engine",
    "Chat": "kvcli.chat.conversation",
    "Document": "kvcli.documents",
    "read_document": "kvcli.documents",
    "Grammar": "kvcli.models.grammar",
    "KvcliError": "kvcli.errors",
    "Profile": "kvcli.settings.profile",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
