"""Setup of a run whose model is on an OpenAI-compatible server (--engine openai)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from kvcli.commands.common.inputs import tell
from kvcli.commands.common.key_file import read_key
from kvcli.commands.common.run_setup import Flags, Setup
from kvcli.engines.http import Server
from kvcli.engines.openai import Endpoint, RemoteSession
from kvcli.errors import BadModel, UsageError
from kvcli.settings.schema import Model as Entry

if TYPE_CHECKING:
    from kvcli.chat.loaded_model import LoadedModel
    from kvcli.chat.text_session import TextSession
    from kvcli.commands.common.flags import EngineOptions
    from kvcli.commands.common.options import Options
    from kvcli.environment import Environment
    from kvcli.models.source import Source
    from kvcli.schemas.fit import PassTime
    from kvcli.settings.profile import Profile

# options of chat and summarize that mean the same with every engine
COMMON = set(
    "model words prompt file ocr system system_file continue_ resume no_save max_new_tokens temperature top_p top_k "
    "min_p repetition_penalty stop seed greedy show_thinking stats stream ctx think engine base_url key_file "
    "engine_timeout files length style focus lang cite check quotes pages type_ password_file each mode chunk overlap "
    "no_cache output format parallel".split()
)


@dataclass(frozen=True)
class RemoteSetup(Setup):
    """Request of a run with a model of a server. `model`: None = the server's only model."""

    server: Server = field(kw_only=True)

    @cached_property
    def endpoint(self) -> Endpoint:
        """The model, by the server's list. Asks the server, once."""
        return Endpoint.of(self.server, self.model, self.profile.name)

    @property
    def entry(self) -> Entry:
        return Entry(path=self.server.url)

    @property
    def name(self) -> str:
        return self.endpoint.model

    def look(self, profile: Profile) -> None:
        """Check the model and the settings, before documents are read."""
        self.open_elsewhere(profile)

    def fetch(self, profile: Profile, tell: Callable[[str], None] | None = None) -> Source:
        raise BadModel(f"the files of {self.server.url} are not here", code="model_not_found")

    def pass_times(self, model: LoadedModel, tell: object = None) -> list[PassTime]:
        return []

    def open_elsewhere(self, profile: Profile) -> TextSession:
        return cast("TextSession", RemoteSession(self.endpoint, profile, self.world.paths.data))


def remote_setup(
    world: Environment, options: Options, asked: EngineOptions, flags: Flags, allowed: set[str] = COMMON
) -> RemoteSetup:
    """Return the setup of the options. Refuses options that have no effect on a server: those not in `allowed`."""
    if asked.engine is None or asked.base_url is None:
        raise UsageError("--engine openai and --base-url URL belong together", try_=["--engine openai --base-url URL"])
    options.refuse_others("--engine openai", allowed)
    if not 0 < asked.engine_timeout < 1e6:
        raise UsageError("--engine-timeout takes a number of seconds above 0", try_=["--engine-timeout 600"])
    if world.options.offline:
        raise UsageError("--engine openai excludes --offline", try_=["only one of them"])
    key, values = key_for(world, asked.key_file, asked.base_url), options.values()
    # a pile of files waits a minute for a server that starts again
    server = Server(asked.base_url, key, first_byte=asked.engine_timeout, tries=8 if values.get("each") else 4)
    model = values.get("model")
    return RemoteSetup(world, str(model) if model else None, flags, is_typed=True, server=server)


def key_for(world: Environment, file: str | None, url: str) -> str:
    """Return the key of a file, if one is named, and say if the way to the server has no encryption."""
    key, address = "" if file is None else read_key(world, file), urlsplit(url)
    if key and address.scheme == "http" and address.hostname not in ("localhost", "127.0.0.1", "::1"):
        tell(world, f"the key is sent to {address.hostname} without encryption; https or an SSH tunnel protects it")
    return key
