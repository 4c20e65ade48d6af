"""`kvcli doctor`: facts that a bug report needs, without names of people or secrets."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.commands.common.options import command
from kvcli.commands.common.output import print_json
from kvcli.commands.config import places
from kvcli.demo import weights_dir
from kvcli.environment import Environment
from kvcli.models import machine
from kvcli.models.machine import installed
from kvcli.render.terminal.terminal import Terminal, long_size
from kvcli.version import __version__
from kvcli.worker_process import means

if TYPE_CHECKING:
    from kvcli.schemas.listings import DoctorDocument

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "bitsandbytes", "triton", "typer", "rich")
VARIABLES = re.compile(
    r"(KVCLI|XDG|HF|TRANSFORMERS|TORCH|CUDA|OMP|MKL|NCCL|PYTORCH)_\w+|NO_COLOR|FORCE_COLOR|TERM|COLUMNS|LANG|LC_ALL"
)
SECRET = re.compile(r"token|key|secret|password|passwd|auth|credential", re.IGNORECASE)
TOKEN = re.compile(r"\b(hf|sk|ghp|gho|xox[bp])[_-][\w-]{8,}|(?<=://)[^/@\s]+@")

app = typer.Typer(add_completion=False)


@command(app)
def doctor(
    world: Environment,
    speed: Annotated[bool, typer.Option("--speed", help="Measure one and all threads; ten seconds.")] = False,
) -> None:
    """Print versions, devices, memory and paths, for a bug report."""
    document = examine(world)
    if speed:
        document = document.model_copy(update={"steps": steps_by_threads()})
    if world.options.json:
        print_json(world, document)
    else:
        out = Terminal.of(world, "stdout")
        lines = words(document)
        if out.is_tty:  # in a pipe, lines are not wrapped
            lines = [piece for line in lines for piece in wrapped(line, out.width)]
        out.write("\n".join(lines) + "\n")


def examine(world: Environment) -> DoctorDocument:
    """Collect all facts. This takes as long as importing torch, some seconds."""
    import psutil

    from kvcli.schemas.listings import DoctorDocument

    memory = psutil.virtual_memory()
    return DoctorDocument(
        versions={"kvcli": __version__, "python": platform.python_version(), **{p: installed(p) for p in PACKAGES}},
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        memory_total=memory.total,
        memory_free=memory.available,
        paths={name: redacted(str(path), world) for name, path in places(world).items()},
        environment={
            name: "(set)" if SECRET.search(name) else redacted(value, world)
            for name, value in sorted(world.environ.items())
            if VARIABLES.fullmatch(name)
        },
        sandbox=means(),
        demo_model=(weights_dir() / "model.safetensors").exists(),
        steps={},
        **hardware(world),
    )


def steps_by_threads() -> dict[int, float]:
    """Measure decoding steps per second with one thread and with all threads."""
    from kvcli.bench.scaling import random_model, steps_a_second

    return steps_a_second(random_model(), sorted({1, machine.threads()}))


def speed_words(steps: dict[int, float]) -> list[str]:
    """Return lines on the speed of one thread and of all; none if nothing was timed."""
    one = steps.get(1, 0.0)
    found = [f"{n} thread{'s' if n > 1 else ''} {rate:.1f}" for n, rate in steps.items()]
    more = [f"{rate / one:.2f}× one thread" for n, rate in steps.items() if n > 1]
    return [f"speed         {', '.join([*found, *more])} (steps per second, random 86M Llama in bf16)"] if steps else []


def hardware(world: Environment) -> dict[str, Any]:
    """Return the devices that torch finds. A torch that cannot be imported is reported, not raised."""
    from kvcli.schemas.listings import Device, Kernel

    try:
        return {
            "cpu": machine.cpu_name(),
            "cpu_flags": machine.cpu_flags(),
            "cores": machine.cores(),
            "threads": machine.threads(),
            "devices": [
                Device(kind=d.kind, name=d.name, total_bytes=d.total, free_bytes=d.free) for d in machine.devices()
            ],
            "kernels": [Kernel(device=d, op=op, choice=choice, reason=why) for d, op, choice, why in machine.kernels()],
            "quant": machine.quant_backends(),
            "problems": [],
        }
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        problem = redacted(f"torch does not work here: {type(error).__name__}: {error}", world)
        nothing: dict[str, Any] = {"cpu": None, "cpu_flags": [], "cores": None, "threads": None, "devices": []}
        return nothing | {"kernels": [], "quant": {}, "problems": [problem]}


def redacted(text: str, world: Environment) -> str:
    """Return text without the home folder, the user's name in it, and anything that looks like an access token."""
    for home in {world.environ.get("HOME", ""), str(Path.home())}:
        if len(home) > 1:
            text = re.sub(rf"{re.escape(home.rstrip('/'))}(?=/|:|$)", "~", text)
    return TOKEN.sub("(redacted)", text)


def sandbox_words(means: Sequence[str]) -> str:
    """Describe the sandbox of the document parsers. "limits" is the weakest one."""
    if not means:
        return "MISSING: the process that parses documents did not start"
    return "limits only (no seccomp on this system)" if [*means] == ["limits"] else " + ".join(means)


def wrapped(line: str, width: int) -> list[str]:
    """Wrap a line between words; paths stay in one piece."""
    cut = TextWrapper(width, subsequent_indent=" " * 14, break_long_words=False, break_on_hyphens=False)
    return cut.wrap(line) or [""]


def words(document: DoctorDocument) -> list[str]:
    """Return the document as lines for people."""

    versions = [f"{name:<14}{number or '–'}" for name, number in document.versions.items()]
    flags = ", ".join(document.cpu_flags) or "none of the flags that kernels use"
    machine = [
        f"system        {document.system}",
        f"cpu           {document.cpu or '–'}",
        f"              {flags}",
        f"              {document.cores} cores for this process, {document.threads} threads",
        f"sandbox       {sandbox_words(document.sandbox)}",
        f"memory        {long_size(document.memory_free)} free of {long_size(document.memory_total)}",
    ]
    for device in document.devices[1:]:
        size = f", {long_size(device.free_bytes or 0)} free of {long_size(device.total_bytes or 0)}"
        machine.append(f"{device.kind:<14}{device.name}{size if device.total_bytes else ''}")
    machine += speed_words(document.steps)
    kernels = [f"{k.device:<6} {k.op:<13} {k.choice}: {k.reason}" for k in document.kernels]
    kernels += [f"{device:<6} {'quant':<13} {backend}" for device, backend in document.quant.items()]
    paths = [f"{name:<14}{path}" for name, path in document.paths.items()]
    environment = [f"{name}={value}" for name, value in document.environment.items()]
    demo = ["demo model    " + ("installed" if document.demo_model else "MISSING: install kvcli again")]
    problems = [f"problem       {problem}" for problem in document.problems]
    sections = [problems, versions, machine, kernels, [*demo, *paths], environment]
    return [line for section in sections if section for line in [*section, ""]][:-1]
