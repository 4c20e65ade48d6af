"""`kvcli stop`: end the servers of this user."""

from __future__ import annotations

from contextlib import suppress

import typer

from kvcli.commands.common import flags as o
from kvcli.commands.common.inputs import tell
from kvcli.commands.common.options import command
from kvcli.commands.resident.ps import servers
from kvcli.environment import Environment
from kvcli.errors import BadInput
from kvcli.render.terminal.terminal import plural

app = typer.Typer(add_completion=False)
SECONDS = 5.0  # for a server to end


@command(app)
def stop(world: Environment, model: o.ModelName = None) -> None:
    """End kvcli serve, for one model or for all. Commands that run go on to their end."""
    import psutil

    found = servers(world)
    named = [each for each in found if model in (None, each.model, each.path)]
    if model is not None and not named:
        here = [f"kvcli stop {each.model}" for each in found]
        raise BadInput(f"no server has {model} loaded", code="not_running", try_=here or [f"kvcli serve {model}"])
    if not named:
        tell(world, "no server has a model loaded")
    for each in named:
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            process = psutil.Process(each.pid)
            process.terminate()
            process.wait(SECONDS)
        left = f"; still running: {plural(each.running, 'command')}" if each.running else ""
        tell(world, f"{each.model} ends{left}")
