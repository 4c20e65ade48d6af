"""`kvcli chat` under torchrun: one process for each part of a model, of which rank 0 alone reads and prints."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcli.commands.common.inputs import has_piped_input, read_stdin
from kvcli.environment import nothing
from kvcli.errors import UsageError

if TYPE_CHECKING:
    from kvcli.environment import Environment

# options that read or change what is saved, or run programs, which only one process may do
REFUSED = ("--continue", "-c", "--resume", "-r", "--pack", "--mcp", "--tool-command")
PATIENCE = 10.0  # seconds that a failed rank waits for rank 0


def join(world: Environment, command: str, args: Sequence[str]) -> None:
    """Join the processes that torchrun started. Raises UsageError for a command that they cannot run together.

    Every rank runs the whole command. Those above 0 print nothing and get rank 0's standard input. None saves a chat.
    """
    from kvcli.engine.ranks import from_first, join_ranks

    index = int(world.environ["RANK"])
    if index:
        world.stdout, world.stderr = nothing("w"), io.StringIO()
    if command != "chat":
        raise UsageError(
            "torchrun runs kvcli chat only",
            try_=["torchrun --nproc-per-node 2 -m kvcli chat MODEL -p TEXT", "the command without torchrun"],
        )
    if wrong := next((one for one in args if one.partition("=")[0] in REFUSED), ""):
        raise UsageError(f"{wrong} does not work under torchrun", try_=["leave it out", "one process"])
    if not has_piped_input(world) and not any(one.startswith(("-p", "--prompt")) for one in args):
        ways = ["-p TEXT", "echo TEXT | torchrun ...", "one process, without torchrun, for a chat in the terminal"]
        raise UsageError("torchrun runs a chat with one question", try_=ways)
    if join_ranks(int(world.environ["LOCAL_RANK"])) == 1:
        return
    world.keeps = False
    piped = read_stdin(world) if index == 0 and has_piped_input(world) else b""  # which a chat always reads
    world.stdin = io.TextIOWrapper(io.BytesIO(from_first(piped)), encoding="utf-8")


def end(world: Environment) -> None:
    """End a command that failed. torchrun ends all ranks with the first, so one above 0 waits for rank 0 to report the
    error. It prints its own if rank 0 goes on."""
    if world.environ["RANK"] != "0":
        time.sleep(PATIENCE)
        sys.stderr.write(f"rank {world.environ['RANK']}: {getattr(world.stderr, 'getvalue', str)()}")
