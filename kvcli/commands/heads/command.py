"""`kvcli profile-heads`: analysis of the attention heads of a model, and which need the full KV cache."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import typer

from kvcli.commands.common import flags as o
from kvcli.commands.common.options import command
from kvcli.commands.heads.options import HeadsOptions
from kvcli.environment import Environment
from kvcli.errors import UsageError

if TYPE_CHECKING:
    from kvcli.commands.common.run_setup import Setup
    from kvcli.commands.heads.output import HeadsOutput
    from kvcli.heads.request import ProbeRequest
    from kvcli.methods.policies.fastgen.policy import FastGen
    from kvcli.render.bench.progress import Bar
    from kvcli.schemas.heads import Probe
    from kvcli.settings.profile import Profile

app = typer.Typer(add_completion=False)


@command(app)
def profile_heads(world: Environment, options: HeadsOptions) -> None:
    """Analyze attention heads: which need the full context.

    Probes: attention over a text (prompt), loss when a head sees only the
    first and newest tokens (ablate), heads that read hidden facts (needle),
    facts that other facts point to (reason), or continue repeats (repeat).
    Draws a grid, writes a report and a head map (policy.headmap).
    """
    from kvcli.commands.common.run_setup import Setup
    from kvcli.commands.heads.output import outlet

    setup = Setup(world, options.model, o.load_flags(options.values()))
    for name in ("top", "stability", "seed"):
        if (value := getattr(options, name)) < 0:
            raise UsageError(f"--{name} {value}: at least 0", try_=[f"--{name} 0"])
    profile = setup.profile
    ask = _request(setup, profile, options)
    _run(setup, profile, ask, outlet(world, setup.name, ask, options))


def _request(setup: Setup, profile: Profile, options: HeadsOptions) -> ProbeRequest:
    """Return the checked options, before anything is loaded."""
    from kvcli.bench.grid import contexts
    from kvcli.commands.common.document_files import read_file
    from kvcli.heads.request import ProbeRequest
    from kvcli.schemas.heads import TEXTS

    probes, texts, stability = _probes(options.probe), options.texts, options.stability
    first, *others = contexts(options.contexts, "--context")
    if stability and "prompt" not in probes:
        raise UsageError("--stability needs --probe prompt", try_=["--probe prompt --stability 64"])
    if texts is not None and (texts < 1 or not {"ablate", "needle"} & set(probes)):
        why = "at least 1" if texts < 1 else "only --probe ablate and needle use texts with hidden facts"
        raise UsageError(f"--texts {texts}: {why}", try_=["--probe ablate --texts 4"])
    return ProbeRequest(
        probes=probes,
        context=first,
        settings=_settings(profile, options),
        documents=tuple(read_file(setup.world, name) for name in options.prompts or ()),
        others=tuple(others),
        layers=_layers(options.layers),
        texts=texts or TEXTS,
        seed=options.seed,
        stability=stability,
    )


def _probes(text: str) -> tuple[Probe, ...]:
    from kvcli.heads.request import PROBES

    names = o.listed(text)
    if names == ["all"]:
        return PROBES
    unknown = [name for name in names if name not in PROBES]
    if unknown or not names:
        said = f"there is no probe {unknown[0]!r}" if unknown else "--probe names no probe"
        raise UsageError(said, try_=[f"--probe {name}" for name in (*PROBES, "all")])
    return tuple(name for name in PROBES if name in names)


def _settings(profile: Profile, options: HeadsOptions) -> FastGen:
    """Return the profile's [policy] if it is FastGen, else the defaults of FastGen, with the typed options on top."""
    typed = {"criterion": options.criterion, "recovery": options.recovery, "keep": options.keep}
    given: dict[str, object] = {name: value for name, value in typed.items() if value is not None}
    for name in ("recovery", "keep"):
        value = given.get(name)
        if isinstance(value, float) and not 0 < value <= 1:
            raise UsageError(f"--{name} {value:g}: a share above 0, at most 1", try_=[f"--{name} 0.5"])
    if "recovery" in given and "keep" in given:
        raise UsageError("--recovery and --keep exclude each other", try_=["only one of them"])
    if "recovery" in given:
        given["keep"] = 0.0
    settings: FastGen
    if profile.policy.method == "fastgen":
        settings = profile.replace(policy=given).policy.settings if given else profile.policy.settings
    else:
        settings = profile.replace(exactness="approx", policy={"name": "fastgen", **given}).policy.settings
    if settings.recovery == "auto":
        raise UsageError(
            'policy.recovery = "auto" is measured during prefill; profile-heads needs a number',
            try_=["--recovery 0.8", "--keep 0.5"],
        )
    return settings


def _layers(text: str | None) -> tuple[int, ...]:
    """Parse layer numbers: `0-11`, `3`, `0-3,8`."""
    found: set[int] = set()
    for part in (text or "").split(",") if text is not None else []:
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise UsageError(f"--layers takes numbers and ranges, not {part.strip()!r}", try_=["--layers 0-11"])
        found |= set(range(first, last + 1))
    return tuple(sorted(found))


def _run(setup: Setup, profile: Profile, ask: ProbeRequest, outlet: HeadsOutput) -> None:
    from kvcli.commands.common.exits import Interrupt, insisting
    from kvcli.render.bench.progress import progress
    from kvcli.render.terminal.screen import Screen

    with progress(Screen.of(setup.world)) as bar, Interrupt() as cancel:
        bar.show(0, 0, f"loading {setup.name}")
        with insisting():
            from kvcli.heads.report import document, strip
            from kvcli.heads.run import probe

        # no pass times are measured, because nothing is drafted here
        with setup.load(profile.replace(spec={"method": "off"}), bar.screen.note) as model:
            found = probe(model, ask, _tell(bar, cancel))
            made, tokens = document(model, ask, found), strip(model, found.reading)
    outlet.finish(made, tokens)


def _tell(bar: Bar, cancel: Any) -> Any:
    def tell(done: int, total: int, words: str) -> None:
        if cancel():
            raise KeyboardInterrupt
        bar.show(done, total, words)

    return tell
