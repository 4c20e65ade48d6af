"""`kvcli fit`: estimate if a model, a profile and a context fit in memory, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvcli.commands.common import flags as o
from kvcli.commands.common.options import Options, choice, command, flag
from kvcli.environment import Environment
from kvcli.errors import BadConfig, BadInput, BadModel, ExitStatus, KvcliError, UsageError

if TYPE_CHECKING:
    from kvcli.commands.common.run_setup import Setup
    from kvcli.fit.plan import Plan, PlannedModel
    from kvcli.fit.preflight import Preflight
    from kvcli.schemas.fit import CalibrationDocument
    from kvcli.settings.profile import Profile

app = typer.Typer(add_completion=False)


_CTX = "Context lengths in tokens, separated by commas; auto = the largest that fits."


class FitOptions(Options):
    model: o.ModelName = None
    contexts: str | None = choice("--ctx", metavar="N,..|auto", help=_CTX)
    all_: bool = flag(help="Compare all profiles.")
    profiles: str | None = choice(metavar="A,B", help="Compare these profiles.")
    explain: bool = flag(help="Explain memory use and which settings reduce it.")
    vram: str | None = choice(metavar="SIZE", help="GPU memory of another machine: 12GiB.")
    ram: str | None = choice(metavar="SIZE", help="Memory of another machine.")
    weights: o.Weights
    budget: o.Budget = None
    draft: o.Draft = None
    allow_pickle: o.Pickle = False
    online: bool = flag(help=o.ONLINE)


@command(app)
def fit(world: Environment, options: FitOptions) -> int:
    """Estimate memory before loading: model, profile and context.

    Reads only config.json and the headers of the weight files, with --online
    from the hub. A model that is not downloaded is estimated by kvcli's list.
    Exit code 0: at least one combination fits; 5: none fits.
    """
    from kvcli.commands.common.run_setup import Setup

    if options.all_ and options.profiles is not None:
        raise UsageError("--all and --profiles exclude each other", try_=["only one of them"])
    setup = Setup(world, options.model, o.profile_flags(options.values()))
    contexts = list(dict.fromkeys(_context(part) for part in (options.contexts or "auto").split(",")))
    notes: list[str] = []
    chosen = dict(_chosen(setup, options.all_, options.profiles, notes))
    from kvcli.render.terminal.screen import Screen
    from kvcli.render.turn.turn_view import busy_word

    with busy_word(Screen.of(world), f"reading the headers of {setup.name}"):
        outlook = look(setup, next(iter(chosen.values())), options.vram, options.ram, notes, options.online)
        plans = _plans(outlook, chosen, contexts, notes if options.all_ else None)
    return _print(setup, outlook, plans, contexts[0], notes, options.explain)


def _plans(
    outlook: Preflight, chosen: Mapping[str, Profile], contexts: Sequence[int | None], notes: list[str] | None
) -> list[Plan]:
    """Plan each profile at each context. With `notes`, refused profiles are left out, unless all are refused."""
    from kvcli.policies.scoring.headmap import read_headmap

    plans: list[Plan] = []
    refused: dict[str, UsageError | BadConfig | BadInput] = {}
    for name, profile in chosen.items():
        if name == "gpu" and notes is not None and len(outlook.found) == 1:
            notes.append("profile gpu is not shown: this machine has no GPU")
            continue
        try:
            if (path := profile.values.get("policy.headmap", "")) not in ("", "auto", "shipped"):
                read_headmap(str(path))
            plans += [outlook.plan(profile, n) for n in contexts]
        except (UsageError, BadConfig, BadInput) as error:
            refused[name] = error
    if refused and (notes is None or not plans):
        raise next(iter(refused.values()))
    if notes is not None:
        notes += [f"profile {name} is not shown: {error.message}" for name, error in refused.items()]
    return plans


def look(
    setup: Setup, profile: Profile, vram: str | None, ram: str | None, notes: list[str], online: bool = False
) -> Preflight:
    """Return the sizes of the model and of this machine, or of the machine described by --vram and --ram."""
    subject = _subject(setup, profile, notes, online)  # before large imports: a typing error shows at once
    from kvcli.fit import memory
    from kvcli.fit.available_memory import rooms, size
    from kvcli.fit.cuda_overhead import CONTEXT
    from kvcli.fit.preflight import Preflight

    found = rooms(size(vram, "--vram") if vram else None, size(ram, "--ram") if ram else None)
    if vram:
        notes.append(f"on a GPU, CUDA itself takes {CONTEXT >> 20} MiB; the program's own memory is in host memory")
    paths = setup.world.paths
    return Preflight(subject, setup.name, paths.data, found, memory.elsewhere(paths.cache), find=setup.sizes())


def _subject(setup: Setup, profile: Profile, notes: list[str], online: bool) -> PlannedModel:
    """Return the model's sizes from its files, from config.json alone if the weights are missing, or from the list."""
    from kvcli.commands.common.run_setup import find_or_look_up, in_list
    from kvcli.models.source import Source, read_config

    try:
        found = find_or_look_up(setup, profile.load.allow_pickle, online)
    except BadModel as error:
        if known := in_list(setup, error, notes):
            from kvcli.fit.plan import listed

            return listed(known)
        folder = Path(expanduser(setup.entry.path))
        if error.code != "model_incomplete" or not (folder / "config.json").is_file():
            raise
        notes.append(f"{error.message}; sizes are estimated from config.json")
        found = Source(setup.name, folder, "", read_config(folder, setup.name), (), False)
    from kvcli.fit.plan import subject_of

    subject = subject_of(found)
    if found.files and subject.is_assumed:
        notes.append("the weight files have no tensor sizes; sizes are estimated from config.json")
    return subject


def _context(text: str) -> int | None:
    part = text.strip()
    return None if part == "auto" else o.tokens(part, "--ctx", 'tokens or "auto"')


def _chosen(setup: Setup, all_: bool, names: str | None, notes: list[str]) -> Iterator[tuple[str, Profile]]:
    """Yield the profiles to plan for, by name. With --all, those that conflict with the settings become notes."""
    sets = setup.world.options.set
    if not all_ and names is None:
        profile = setup.profile
        yield profile.name, profile
        return
    wanted = setup.config.names() if all_ else list(dict.fromkeys(o.listed(names or "")))
    if not wanted:
        raise UsageError(f"--profiles takes names, not {names!r}", try_=["--profiles exact,ngram", "--all"])
    for name in wanted:
        try:
            yield name, setup.resolve(name, sets)
        except KvcliError as error:
            if not all_:
                raise
            notes.append(f"profile {name} is not shown: {' '.join([error.message, *error.lines[:1]])}")


def others_of(setup: Setup) -> Mapping[str, Profile]:
    """Return every profile that allows the settings typed: alternatives for a plan that does not fit."""
    return dict(_chosen(setup, True, None, []))


def _calibrations(setup: Setup, outlook: Preflight, plans: Sequence[Plan]) -> Mapping[str, CalibrationDocument]:
    """Return the measurements of this machine for each profile; none for a described machine."""
    from kvcli.fit.calibrate import fingerprint_in
    from kvcli.fit.run_log import load_calibration, machine_fingerprint

    found: dict[str, CalibrationDocument] = {}
    for plan in plans:
        if plan.room.is_described:
            continue
        machine = machine_fingerprint(plan.room.device, plan.profile.load.threads)
        for model in (fingerprint_in(plan, outlook.subject, setup.name, setup.world.paths.cache), ""):
            known = load_calibration(setup.world.paths.cache, machine, model, outlook.notes.append)
            if known is not None and plan.profile.name not in found:
                found[plan.profile.name] = known
    return found


def _host(setup: Setup, outlook: Preflight, plans: Sequence[Plan]) -> CalibrationDocument | None:
    """Return the measurements of this machine's CPU, if a plan splits the layers between GPU and CPU."""
    from kvcli.fit.run_log import load_calibration, machine_fingerprint

    if all(plan.run.on_card is None for plan in plans) or outlook.found["cpu"].is_described:
        return None
    return load_calibration(setup.world.paths.cache, machine_fingerprint("cpu"), "", outlook.notes.append)


def _has_map(setup: Setup, plans: Sequence[Plan]) -> bool:
    """True if a plan uses the model's own head map and the map exists."""
    if all(plan.profile.values.get("policy.headmap") != "auto" for plan in plans):
        return False
    from kvcli.heads.auto_headmap import was_made

    return was_made(setup.name, setup.world.paths.data / "heads")


def _print(
    setup: Setup, outlook: Preflight, plans: Sequence[Plan], context: int | None, notes: Sequence[str], explains: bool
) -> int:
    from kvcli.commands.common.output import print_cells, print_json
    from kvcli.fit.report import document

    world = setup.world
    known = _calibrations(setup, outlook, plans)
    others = {} if all(plan.fits for plan in plans) else others_of(setup)
    of = (outlook, plans, others, known, context, notes, _host(setup, outlook, plans))
    made = document(*of, explains=explains, has_map=_has_map(setup, plans))
    if world.options.json:
        print_json(world, made)
    else:
        from kvcli.render.fit.plans import fit_lines, plain_rows
        from kvcli.render.terminal.terminal import Terminal

        out = Terminal.of(world, "stdout")
        if world.options.plain:
            print_cells(world, plain_rows(made))
        else:
            for spans in fit_lines(made, out.width, explains):
                out.line(*spans)
    return ExitStatus.OK if any(plan.fits for plan in plans) else ExitStatus.DOES_NOT_FIT
