"""An MCP server that the user named: a process whose tools the model may call."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvcli.commands.common.inputs import split_command
from kvcli.errors import BadInput
from kvcli.installing import EXTRAS, pip
from kvcli.models.tool_calls import check_tools

SECONDS = 60.0  # to start, and for one answer
MOST_PAGES = 20  # of a list of tools


class McpServer:
    """A running server. `tools` are its function definitions."""

    def __init__(self, name: str, client: Any, wait: Callable[..., Any]) -> None:
        """`wait`: calls a coroutine function and returns its result."""
        self._client, self._wait = client, wait
        found, cursor = list[Any](), None
        for _ in range(MOST_PAGES):
            page = wait(partial(client.list_tools, cursor=cursor))
            found, cursor = [*found, *page.tools], page.next_cursor
            if cursor is None:
                break
        each = [
            {"name": one.name, "description": one.description or "", "parameters": one.input_schema} for one in found
        ]
        self.tools = check_tools([{"type": "function", "function": one} for one in each], name)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a call's result; its error as text too, so that the model can answer to it."""
        try:
            done = self._wait(partial(self._client.call_tool, name, arguments))
        except Exception as error:  # the server's, in whatever form
            return f"error: {error}"
        texts = [getattr(block, "text", f"[{block.type}, which is not supported]") for block in done.content]
        return ("error: " if done.is_error else "") + "\n".join(texts)


@contextmanager
def mcp_server(typed: str, folder: Path) -> Iterator[McpServer]:
    """Start a server (`COMMAND ARGS`) and yield it; it ends with the block. Of the environment, it gets HOME, PATH,
    USER and the like. Raises BadInput."""
    command, *args = split_command(typed, "--mcp")
    if find_spec("mcp") is None:
        raise BadInput("--mcp needs the package mcp", code="missing_extra", try_=[pip(*EXTRAS["mcp"])])
    from anyio.from_thread import start_blocking_portal
    from mcp import Client, StdioServerParameters, stdio_client

    parameters = StdioServerParameters(command=command, args=args, cwd=folder)
    with ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
        try:
            portal = stack.enter_context(start_blocking_portal())
            client = Client(stdio_client(parameters, errors), read_timeout_seconds=SECONDS)
            stack.enter_context(portal.wrap_async_context_manager(client))
            server = McpServer(typed, client, portal.call)
        except BadInput:
            raise
        except Exception as error:  # of the process, of the protocol, or a group of both
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            errors.seek(0)
            said = errors.read().strip().splitlines()[-3:]
            raise BadInput(
                f"the MCP server {typed[:80]} did not start: {type(error).__name__}: {error}",
                code="mcp_failed",
                lines=said,
                try_=["run its command alone"],
            ) from None
        yield server
