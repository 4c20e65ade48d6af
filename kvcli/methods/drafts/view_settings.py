"""Settings of every method whose rows may read through a cache view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from kvcli.drafts.draft_settings import DraftSettings
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import ViewSpec


@dataclass(frozen=True)
class ViewSettings(DraftSettings):
    """Settings of a cache view, for every method that uses one."""

    view: Literal["all", "stream", "quest"] = "all"  # tokens read: all, first and newest ones, or selected pages
    sinks: Annotated[int, Range(0, 4096)] = 16  # of a view: first tokens
    recent: Annotated[int, Range(1, 65536)] = 496  # of a view: newest tokens
    page: Annotated[int, Range(1, 256)] = 16  # of "quest": tokens per page
    pages: Annotated[int, Range(1, 4096)] = 32  # of "quest": pages per KV head
    refresh: Annotated[int, Range(1, 4096)] = 32  # of a view: tokens between two selections

    def ignored_keys(self) -> dict[str, str]:
        """Return the keys that have no effect: key -> the key that disables it. Adds keys of other views."""
        of = {"all": ("sinks", "recent", "refresh", "page", "pages"), "stream": ("page", "pages"), "quest": ()}
        return super().ignored_keys() | dict.fromkeys(of[self.view], "view")

    def view_slots(self, n: int) -> int:
        """Return how many of n slots per head the cache view copies; the bounds of a page of "quest" count as one."""
        pages, bounds = (self.page * self.pages, -(-n // self.page)) if self.view == "quest" else (0, 0)
        return 0 if self.view == "all" else min(n, self.sinks + self.recent + pages + self.refresh) + bounds

    def glance(self) -> ViewSpec | None:
        """Return the cache view; None = the whole KV cache."""
        from kvcli.engine.drafting.drafter import ViewSpec

        if self.view == "all":
            return None
        if self.view == "stream":
            return ViewSpec("stream", {"sinks": self.sinks, "window": self.recent}, self.refresh)
        settings = {"sinks": self.sinks, "recent": self.recent, "page": self.page, "pages": self.pages}
        return ViewSpec("quest", settings, self.refresh)
