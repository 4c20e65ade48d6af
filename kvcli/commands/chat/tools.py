"""Tools of a chat: their definitions, and what runs a call: an MCP server, a command of the user, or the user."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from kvcli.commands.common.inputs import answer_to, split_command
from kvcli.errors import BadInput, UsageError
from kvcli.render.terminal.screen import Screen, echo
from kvcli.settings.small_file import Unfit, read_small

if TYPE_CHECKING:
    from kvcli.api import Cancel, ToolCall, Turn
    from kvcli.commands.chat.mcp_server import McpServer
    from kvcli.environment import Environment

LARGEST = 1 << 20  # bytes of a file of tools, and of a result
MOST_ROUNDS = 25  # answers to results, for one question
REFUSED = "error: the user did not allow this call"


def read_json(world: Environment, name: str, code: str) -> Any:
    """Return the value in a JSON file; - is standard input."""
    try:
        raw = world.read_stdin(LARGEST) if name == "-" else read_small(world.path(name), LARGEST)
        return json.loads(raw)
    except (Unfit, ValueError, RecursionError) as error:
        raise BadInput(f"{name} {error if isinstance(error, Unfit) else f'is not JSON: {error}'}", code=code) from None


def read_results(world: Environment, name: str) -> list[str]:
    """Return the results of tool calls, in their order: a JSON list of texts, or of objects with `content`."""
    found = read_json(world, name, "bad_results")
    each = found if isinstance(found, list) else []
    texts: list[Any] = [one.get("content") if isinstance(one, dict) else one for one in each]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise BadInput(f"{name} is no list of results", code="bad_results", try_=['["sunny, 21 degrees"]'])
    return texts


@contextmanager
def open_tools(
    world: Environment, file: str | None, servers: Sequence[str], command: str | None
) -> Iterator[ChatTools | None]:
    """Yield the tools of the options, with their MCP servers running; None if there are none."""
    if file is None and not servers:
        if command is not None:
            raise UsageError("--tool-command needs the tools that it runs", try_=["--tools FILE"])
        yield None
        return
    from kvcli.models.tool_calls import check_tools

    definitions = check_tools(read_json(world, file, "bad_tools"), file) if file is not None else []
    with ExitStack() as stack:
        by_tool: dict[str, McpServer] = {}
        for typed in servers:
            from kvcli.commands.chat.mcp_server import mcp_server

            server = stack.enter_context(mcp_server(typed, world.cwd))
            by_tool |= {tool["function"]["name"]: server for tool in server.tools}
            definitions += server.tools
        yield ChatTools(world, check_tools(definitions, "the list of all tools"), by_tool, command)


class ChatTools:
    """Function definitions, and what runs each: an MCP server, the user's command, or the user."""

    def __init__(
        self,
        world: Environment,
        definitions: Sequence[Mapping[str, Any]],
        servers: Mapping[str, McpServer],
        command: str | None,
    ) -> None:
        self.world, self.screen, self.definitions = world, Screen.of(world), definitions
        self._servers = servers
        self._command = split_command(command, "--tool-command") if command is not None else None
        self._always = set[str]()  # tools that run without a question

    def follow(self, turn: Turn, again: Callable[[list[str]], Turn], cancel: Cancel) -> Turn:
        """Run the calls of a turn and of the turns that answer to their results; return the last turn.

        `again`: gives results to the model, and returns its answer.
        """
        for _ in range(MOST_ROUNDS):
            if turn.finish != "tool_calls" or cancel() or (results := self._run_all(turn.tool_calls)) is None:
                return turn
            turn = again(results)
        self.screen.note(f"stopped after {MOST_ROUNDS} answers with tool calls")
        return turn

    def _run_all(self, calls: Sequence[ToolCall]) -> list[str] | None:
        """Return the results of calls; None if nothing can run one of them."""
        results = list[str]()
        for call in calls:
            if (result := self._run(call)) is None:
                return None
            results.append(result)
            shown = " ".join(result.split())
            self.screen.note(f"{call.name} returned {shown[:200]}{'…' * (len(shown) > 200)}")
        return results

    def _run(self, call: ToolCall) -> str | None:
        if (server := self._servers.get(call.name)) is not None:
            may = self._may(call.name)
            return may if may is None else server.call(call.name, call.arguments) if may else REFUSED
        if self._command is not None:
            return self._by_command(self._command, call)
        if not self._can_ask:
            return None
        with echo(self.screen.stdin, on=True):
            return answer_to(self.world, f"result of {call.name} (empty: none): ", as_typed=True) or None

    @property
    def _can_ask(self) -> bool:
        return self.world.may_ask and self.world.is_tty("stderr") and not self.world.options.json

    def _may(self, name: str) -> bool | None:
        """Ask whether a tool of a server may run; None if nobody can be asked."""
        if name in self._always:
            return True
        if not self._can_ask:
            self.screen.note(f"{name} was not run: a call of an MCP server needs a terminal, to ask you")
            return None
        with echo(self.screen.stdin, on=True):
            answer = answer_to(self.world, f"run {name}? [y]es, [n]o, [a]lways: ")
        self._always |= {name} if answer in ("a", "always") else set()
        return answer in ("y", "yes", "a", "always")

    def _by_command(self, command: Sequence[str], call: ToolCall) -> str:
        """Run the user's command with the call as JSON on standard input, and return its output."""
        said = json.dumps({"id": call.id, "name": call.name, "arguments": call.arguments})
        try:
            done = subprocess.run(command, input=said.encode(), capture_output=True, check=False, cwd=self.world.cwd)
        except OSError as error:
            ways = ["--tool-command 'COMMAND ARGS'"]
            raise BadInput(f"cannot run {command[0]}: {error.strerror}", code="tool_failed", try_=ways) from None
        text = done.stdout[:LARGEST].decode(errors="replace").strip()
        if done.returncode:
            text = f"error: exit status {done.returncode}\n{text}\n{done.stderr[-2000:].decode(errors='replace')}"
        return text.strip()
