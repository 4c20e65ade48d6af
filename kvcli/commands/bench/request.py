"""Parsing of the options of `kvcli bench`: every name is checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.bench.fail_if import Condition
from kvcli.bench.grid import Vary, check_keys, contexts, variants
from kvcli.bench.history import read
from kvcli.bench.side_factory import BASELINES, Recipe, baseline_of, drawing
from kvcli.bench.workloads import NAMES, usual
from kvcli.commands.common.document_files import read_file
from kvcli.commands.common.flags import listed, tokens
from kvcli.errors import UsageError
from kvcli.schemas.bench import BenchArgs, BenchDocument

if TYPE_CHECKING:
    from kvcli.commands.bench.options import BenchOptions
    from kvcli.commands.common.run_setup import Setup
    from kvcli.documents import Document
    from kvcli.models.source import Source
    from kvcli.settings.profile import Profile


@dataclass
class BenchArguments:
    """The runs to measure. The baseline is `earlier`, or else the first of `sides`."""

    args: BenchArgs
    sides: list[tuple[str, str, Profile]]  # name, kind, and the profile that it is or has to match
    files: Mapping[str, Document]
    earlier: BenchDocument | None = None
    earlier_name: str = ""
    notes: list[str] = field(default_factory=list)

    def recipes(self, folder: str, cache: Path, draft: Callable[[str], Source]) -> list[Recipe]:
        """Return the recipe of each side. `draft`: finds a draft model by name, as other processes lack the config."""
        drawn, where, found = (self.args.temperature, self.args.seed), (folder, str(cache)), []
        for name, kind, profile in self.sides:
            same = drawing(profile, *drawn)
            for table, second in same.second_models.items():
                same = same.replace(**{f"{table}.model": str(draft(second.model).path)})
            found.append(Recipe.of(name, same, *where, kind, self.args.batch))
        return found


def parse_request(setup: Setup, options: BenchOptions) -> BenchArguments:
    """Check and complete the options. Raises KvcliError subclasses."""
    for name, least in (("reps", 1), ("batch", 1), ("warmup", 0), ("seed", 0), ("quality_n", 1)):
        flag, value = f"--{name.replace('_', '-')}", getattr(options, name)
        if value is not None and value < least:
            raise UsageError(f"{flag} {value}: at least {least}", try_=[f"{flag} {max(least, 1)}"])
    for text in options.fail_if or ():
        Condition.of(text)
    names, files = read_workloads(setup, options.workloads)
    args = BenchArgs.from_attributes(
        options,
        options.weights,
        model=setup.name,
        profiles=[],
        vary=options.vary or [],
        baselines=options.baselines or [],
        ctx=contexts(options.ctx or "2k"),
        new=tokens(options.new, "--new"),
        workloads=names,
        temperature=temperature(setup),
        set=list(setup.world.options.set),
        fail_if=options.fail_if or [],
        named=None if options.profiles is None else listed(options.profiles),
        current=setup.world.options.profile,
    )
    asked = BenchArguments(args, [], files)
    profiles = _profiles(setup, asked)
    asked.sides = _with_baselines(setup, args.baselines, profiles, asked)
    args.profiles = [name for name, kind, _ in asked.sides if kind == "profile"]
    return asked


def temperature(setup: Setup) -> float:
    """Return the temperature from `--set`, else 0. Sampling settings of profiles and config files are ignored."""
    typed = [item for item in setup.world.options.set if item.strip().startswith("sample.")]
    for item in typed:
        if (key := item.partition("=")[0].strip()) != "sample.temperature":
            raise UsageError(
                f"--set {key}: all profiles sample in the same way, by temperature and seed",
                try_=["--set sample.temperature=0.8", "--seed 7"],
            )
    return (setup.resolve("exact", typed).sample.temperature or 0.0) if typed else 0.0


def read_workloads(setup: Setup, text: str | None, most: int = 1) -> tuple[list[str], dict[str, Document]]:
    """Return workload names, and documents for those that are files. `most`: number of default workloads."""
    names = list(dict.fromkeys(usual(setup.entry.path)[:most] if text is None else listed(text)))
    files = {}
    for name in names:
        if name in NAMES:
            continue
        is_path = any(c in name for c in "./\\:") or setup.world.path(name).exists()
        if not is_path:
            near = get_close_matches(name, NAMES, 1)
            raise UsageError(
                f"there is no workload {name!r}",
                lines=[f"workloads: {', '.join(NAMES)}, or a text file"],
                try_=[f"--workload {n}" for n in near] or ["--workload article"],
            )
        files[name] = read_file(setup.world, name)
    if not names:
        raise UsageError("--workload names none", try_=["--workload article"])
    return names, files


def _profiles(setup: Setup, asked: BenchArguments) -> list[tuple[str, str, Profile]]:
    """Return the profiles, each with its --vary variants."""
    current, names = setup.profile, asked.args.named
    if names == []:
        raise UsageError("--profiles names none", try_=["--profiles exact,ngram"])
    loading = [item for item in setup.world.options.set if item.strip().startswith(("load.", "sample."))]
    plain = replace(setup, flags={key: flag for key, flag in setup.flags.items() if key.startswith("load.")})
    is_plain = setup.flags == plain.flags  # a flag that changes the text applies to every named profile
    fixed = [] if names and is_plain else [plain.resolve("exact", loading)]  # plain decoding with the same weights
    found = [setup.resolve(name, setup.world.options.set) for name in names or ()] or [current]
    if names and fixed:
        asked.notes.append("profile exact runs first without --budget, for comparison")
    varies = [Vary.of(text) for text in asked.args.vary]
    check_keys(varies, {profile.name: list(profile.values) for profile in [*fixed, *found]})
    sides = [(profile.name, profile) for profile in fixed if names or varies or profile.hash != current.hash]
    for profile in found:
        sides += _varied(setup, profile, varies, asked)
    return [(name, "profile", profile) for name, profile in _distinct(sides)]


def _varied(setup: Setup, profile: Profile, varies: Sequence[Vary], asked: BenchArguments) -> list[tuple[str, Profile]]:
    has = [vary for vary in varies if vary.key in profile.values]
    for vary in varies:
        if vary not in has:
            asked.notes.append(f"profile {profile.name} has no key {vary.key}, so it is not varied")
    if not has:
        return [(profile.name, profile)]
    typed = setup.world.options.set
    return [(f"{profile.name} {label}", setup.resolve(profile.name, [*typed, *sets])) for label, sets in variants(has)]


def _distinct(sides: Sequence[tuple[str, Profile]]) -> list[tuple[str, Profile]]:
    """Number repeated names. A profile named twice runs twice, which shows how far equal runs differ."""
    seen: dict[str, int] = {}
    found = []
    for name, profile in sides:
        seen[name] = seen.get(name, 0) + 1
        found.append((f"{name} #{seen[name]}" if seen[name] > 1 else name, profile))
    return found


def _with_baselines(
    setup: Setup, names: Sequence[str], profiles: list[tuple[str, str, Profile]], asked: BenchArguments
) -> list[tuple[str, str, Profile]]:
    """Return all sides: the first baseline, then profiles, then other baselines, each name once."""
    first: list[tuple[str, str, Profile]] = []
    last: list[tuple[str, str, Profile]] = []
    for i, name in enumerate(dict.fromkeys(names)):
        if name.endswith(".json"):
            if i:
                raise UsageError("a file can only be the first --baseline", try_=[f"--baseline {name} first"])
            asked.earlier, asked.earlier_name = read(setup.world.path(name)), Path(name).name
            continue
        side = _baseline(setup, name, profiles, asked)
        first, last = ([side], last) if i == 0 else (first, [*last, side])
    taken = {name for name, _, _ in [*first, *last]}
    return [*first, *(side for side in profiles if side[0] not in taken), *last]


def _baseline(
    setup: Setup, name: str, profiles: Sequence[tuple[str, str, Profile]], asked: BenchArguments
) -> tuple[str, str, Profile]:
    kind = baseline_of(name)
    if kind is not None:
        if asked.args.batch > 1:
            raise UsageError(f"--baseline {name} runs one text, and --batch is {asked.args.batch}", try_=["--batch 1"])
        if asked.args.temperature and not BASELINES[kind].draws:
            raise UsageError(
                f"--baseline {name} is greedy, and sample.temperature is {asked.args.temperature:g}",
                try_=[f"leave --baseline {name} out", "--set sample.temperature=0"],
            )
        BASELINES[kind].require(name, setup.world.paths.cache)
        return name, kind, profiles[0][2]
    known = next((side for side in profiles if side[0] == name), None)
    if known is not None:
        return known
    if name in setup.config.names():
        return name, "profile", setup.resolve(name, setup.world.options.set)
    choices = [*BASELINES, *setup.config.names()]
    near = get_close_matches(name, choices, 1)
    raise UsageError(
        f"there is no baseline {name!r}",
        lines=[f"baselines: {', '.join(choices)}, or FILE.json"],
        try_=[f"--baseline {n}" for n in near] or ["--baseline hf"],
    )
