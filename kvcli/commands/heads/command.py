"""`kvcli profile-heads`: analysis of the attention heads of a model, and which need the full KV cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvcli.commands.common import flags as o
from kvcli.errors import UsageError

if TYPE_CHECKING:
    from kvcli.commands.common.run_setup import Setup
    from kvcli.commands.heads.output import HeadsOutput
    from kvcli.environment import Environment
    from kvcli.heads.request import ProbeRequest
    from kvcli.methods.policies.fastgen.policy import FastGen
    from kvcli.render.bench.progress import Bar
    from kvcli.schemas.heads import Probe
    from kvcli.settings.profile import Profile

app = typer.Typer(add_completion=False)


Criterion = Literal["cvar10", "mean", "p05"]

_PROMPT = "Text for the measurement. Repeatable. Default: a field report."
_PROBE = "prompt, ablate, needle, reason, repeat, or all. Default prompt."
_CRITERION = "Recovery over tokens: cvar10 (mean of the worst 10 %), mean, or p05 (5th percentile)."
_CONTEXT = "Prompt length; further values: context lengths for the memory estimate. Default 2k."
_SHOW = "Values in the grid: policy, retrieval, or any scalar of profile.json."
_COMPARE = "Compare with an earlier run or a DuoAttention table."
_EMIT = "Files to write: html, json, npz, tsv, md, toml, or none. Default json,html."

Prompts = Annotated[list[str] | None, o.option("--prompt", metavar="FILE", help=_PROMPT)]
Probes = Annotated[str, o.option("--probe", metavar="NAME,..", help=_PROBE)]
By = Annotated[Criterion | None, o.option("--criterion", metavar="NAME", help=_CRITERION, rare=True)]
Recovery = Annotated[
    float | None,
    o.option("--recovery", metavar="F", help="Share of attention that the policy of a head must keep.", rare=True),
]
Keep = Annotated[
    float | None, o.option("--keep", metavar="F", help="Instead: share of tokens that all heads keep.", rare=True)
]
Context = Annotated[str, o.option("--context", metavar="N,..", help=_CONTEXT)]
Layers = Annotated[str | None, o.option("--layers", metavar="A-B", help="Layers to measure. Default: all.", rare=True)]
Show = Annotated[str | None, o.option("--show", metavar="NAME", help=_SHOW, rare=True)]
Top = Annotated[int, o.option("--top", metavar="N", help="Heads listed below the grid. Default 10.", rare=True)]
Stability = Annotated[
    int, o.option("--stability", metavar="K", help="Repeat the probe every K generated tokens.", rare=True)
]
Compare = Annotated[str | None, o.option("--compare", metavar="RUN", help=_COMPARE, rare=True)]
Texts = Annotated[
    int | None,
    o.option("--texts", metavar="N", help="Texts with four hidden facts each. Default 4.", rare=True),
]
Seed = Annotated[int, o.option("--seed", metavar="N", help="Random seed of the texts. Default 0.", rare=True)]
Out = Annotated[str | None, o.option("--out", metavar="DIR", help="Output folder. Default ./heads-MODEL/.")]
Emit = Annotated[str, o.option("--emit", metavar="A,..", help=_EMIT, rare=True)]


@app.command()
def profile_heads(
    context: typer.Context,
    model: o.ModelName = None,
    prompt: Prompts = None,
    probe: Probes = "prompt",
    criterion: By = None,
    recovery: Recovery = None,
    keep: Keep = None,
    context_: Context = "2k",
    layers: Layers = None,
    show: Show = None,
    top: Top = 10,
    stability: Stability = 0,
    compare: Compare = None,
    texts: Texts = None,
    seed: Seed = 0,
    out: Out = None,
    emit: Emit = "json,html",
    device: o.Device = None,
    dtype: o.Dtype = None,
    quant: o.Quant = None,
    allow_pickle: o.Pickle = False,
) -> None:
    """Analyze attention heads: which need the full context.

    Probes: attention over a text (prompt), loss when a head sees only the
    first and newest tokens (ablate), heads that read hidden facts (needle),
    facts that other facts point to (reason), or continue repeats (repeat).
    Draws a grid, writes a report and a head map (policy.headmap).
    """
    from kvcli.commands.common.run_setup import Setup
    from kvcli.commands.heads.output import outlet

    world: Environment = context.obj
    setup = Setup(world, model, o.load_flags(context.params))
    for flag, value, least in (("--top", top, 0), ("--stability", stability, 0), ("--seed", seed, 0)):
        if value < least:
            raise UsageError(f"{flag} {value}: at least {least}", try_=[f"{flag} {least}"])
    profile = setup.profile
    chosen: dict[str, object] = {"criterion": criterion, "recovery": recovery, "keep": keep}
    ask = _ask(setup, profile, chosen, probe, context_, layers, prompt or [], texts, seed, stability)
    _run(setup, profile, ask, outlet(world, setup.name, ask, show, top, compare, out, emit))


def _ask(
    setup: Setup,
    profile: Profile,
    chosen: dict[str, object],
    probe: str,
    context: str,
    layers: str | None,
    prompts: Sequence[str],
    texts: int | None,
    seed: int,
    stability: int,
) -> ProbeRequest:
    """Return the checked options, before anything is loaded."""
    from kvcli.bench.grid import contexts
    from kvcli.commands.common.inputs import read_file
    from kvcli.heads.request import ProbeRequest
    from kvcli.schemas.heads import TEXTS

    probes = _probes(probe)
    first, *others = contexts(context, "--context")
    if stability and "prompt" not in probes:
        raise UsageError("--stability needs --probe prompt", try_=["--probe prompt --stability 64"])
    if texts is not None and (texts < 1 or not {"ablate", "needle"} & set(probes)):
        why = "at least 1" if texts < 1 else "only --probe ablate and needle use texts with hidden facts"
        raise UsageError(f"--texts {texts}: {why}", try_=["--probe ablate --texts 4"])
    return ProbeRequest(
        probes=probes,
        context=first,
        settings=_settings(profile, chosen),
        documents=tuple(read_file(setup.world, name) for name in prompts),
        others=tuple(others),
        layers=_layers(layers),
        texts=texts or TEXTS,
        seed=seed,
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


def _settings(profile: Profile, chosen: dict[str, object]) -> FastGen:
    """Return the profile's [policy] if it is FastGen, else the defaults of FastGen, with the typed options on top."""
    given = {name: value for name, value in chosen.items() if value is not None}
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
