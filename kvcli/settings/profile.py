"""Profile: every setting of a run, checked, with its origin.

`load_profile` merges files, environment, `--set` and flags. The tables are defined in `schema.py`, their sources in
`config.py`, the checks in `resolve.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args, overload

from kvcli.errors import BadConfig
from kvcli.settings.config import (
    Config,
    Sources,
    chosen_profile,
    from_arguments,
    from_environ,
    from_flags,
    from_sets,
    read_config,
)
from kvcli.settings.problems import Problem, bad_config
from kvcli.settings.resolve import Resolved, extended_names, lineage, resolve
from kvcli.settings.schema import (
    METHOD_TABLES,
    ORDER,
    Context,
    DraftModelRef,
    Exactness,
    Header,
    Kv,
    Load,
    Memory,
    Prefill,
    Registries,
    Sample,
    Thinking,
    foreign,
    plain_value,
    registries,
    size_of,
)
from kvcli.settings.values import DEFAULT, Setting, Settings, merge

# Effects of settings on the KV cache and its passes, and needs of methods: effects that must be absent.
#
# A method declares `needs` in its class; a method without it needs nothing. Conflicts are the effects that a need and
# the other settings share.

Effect = Literal[
    "quantizes", "offloads", "caps", "demotes", "spends", "evicts", "selects", "degrades",
    "skims", "prunes", "reuses", "condenses", "steps", "drafts", "views",
]  # fmt: skip
EFFECTS: Sequence[Effect] = get_args(Effect)  # in the order of reports
WORDS: Mapping[Effect, str] = {  # of the setting that has the effect
    "quantizes": "rounds keys and values",
    "offloads": "moves old tokens to other memory",
    "caps": "limits the KV cache on the device",
    "demotes": "moves tokens that the policy evicts to other memory",
    "spends": "spreads the KV cache over several precisions",
    "evicts": "evicts tokens",
    "selects": "reads only a part of the KV cache",
    "degrades": "changes the KV cache when memory runs out",
    "skims": "lets tokens of a prompt read only a part of the text",
    "prunes": "drops tokens of a prompt",
    "reuses": "reuses KV of another text",
    "condenses": "compresses a chat that outgrows its context window",
    "steps": "accepts reasoning steps of another model",
    "drafts": "drafts token by token",
    "views": "drafts with a part of the KV cache",
}
TIERS: frozenset[Effect] = frozenset({"quantizes", "offloads", "caps", "demotes", "spends"})  # more than one dense tier
# with any of these, rows do not read the KV of all tokens, as computed, in one tier
NOT_WHOLE: frozenset[Effect] = TIERS | {"evicts", "selects", "skims"}
ALTERED: frozenset[Effect] = NOT_WHOLE | {"prunes", "reuses"}  # other texts cannot continue from such KV
SMALLER: frozenset[Effect] = frozenset({"quantizes", "evicts", "selects"})  # drafts from such a cache may be verified
LOSSY: frozenset[Effect] = SMALLER | {"prunes", "reuses", "condenses", "steps", "skims"}  # they change the text
KV_OF_ALL = "the KV of all tokens as computed, in one place"


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of a method on the other settings."""

    absent: frozenset[Effect] = frozenset()  # effects with which it does not work
    words: str = ""  # the same, after "needs": what it needs instead
    key: str = ""  # key of the method's table that asks for it; "" = the key that names the method


ALIKE_HEADS = Needs(frozenset({"evicts"}), "heads with the same tokens: set kv_format.joint = 1", "joint")


def is_there(size: str) -> bool:
    """True if a size of `[memory]` enables its tier."""
    return size == "auto" or size_of(size) > 0


def tier_effects(kv: Kv, form: Any, memory: Memory) -> Mapping[Effect, Sequence[str]]:
    """Effects of `[kv]`, the KV format and `[memory]`, each with the keys that cause it; none = one dense tier."""
    bits = [f"kv.{key}" for key in ("k_bits", "v_bits") if getattr(kv, key) < 16]
    away = [f"memory.{key}" for key in ("host", "disk") if is_there(getattr(memory, key))]
    found: dict[Effect, Sequence[str]] = {
        "quantizes": (bits or ["kv_format.method"]) if form.is_active(kv) else bits,
        "offloads": away,
        "caps": ["memory.device"] if memory.device != "auto" else [],
        "demotes": ["memory.evicted"] if memory.demotes else [],
        "spends": ["memory.budget" if memory.budget else "memory.max_loss"] if memory.spends else [],
    }
    return {effect: keys for effect, keys in found.items() if keys}


def effects(profile: Profile) -> Mapping[Effect, Sequence[str]]:
    """Effects of a profile, each with the keys that cause it."""
    spec, steps, sparse = profile.spec, profile.memory.fallbacks, profile.sparse
    others: dict[Effect, tuple[object, str]] = {
        "evicts": (profile.policy.compression_interval is not None, "policy.name"),
        "selects": (sparse.describe_read and not sparse.segment, "sparse.method"),
        "skims": (sparse.segment, "sparse.method"),
        "degrades": (any(step.startswith(("kv.", "memory.")) for step in steps), "memory.fallbacks"),
        "prunes": (profile.prune.describe_read, "prune.method"),
        "reuses": (profile.reuse.describe_reused, "reuse.method"),
        "condenses": (profile.context.on_overflow == "compress", "context.on_overflow"),
        "steps": (profile.reasoning_steps.takes, "reasoning_steps.method"),
        "drafts": (spec.method != "off", "spec.method"),
        "views": (spec.view_slots(1) or spec.checks, "spec.method"),
    }
    tiers = tier_effects(profile.kv, profile.kv_format.settings, profile.memory)
    return {**tiers, **{effect: [key] for effect, (is_set, key) in others.items() if is_set}}


__all__ = ["Conflict", "Method", "Outcome", "Profile", "Rules", "Sources", "load_profile", "resolve_profile"]


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two settings that exclude each other. The conflict is shown at `key`, and `other` is the reason."""

    key: str  # dotted
    other: str  # dotted
    message: str  # about `key`: '"exact" is impossible'
    because: str = ""  # about `other`: "which changes the output"


@dataclass(frozen=True, slots=True)
class Method:
    """A table filled by a method. Its keys are attributes: `profile.spec.method`, `profile.spec.max`."""

    method: str  # name in the registry
    settings: Any  # the method's own frozen dataclass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling read attributes before the fields are set
            raise AttributeError(name)
        return getattr(self.settings, name)


@dataclass(frozen=True)
class Rules:
    """Available methods, and the check for settings that exclude each other."""

    registries: Registries
    clashes: Callable[[Profile], Sequence[Conflict]] | None = None

    @classmethod
    def shipped(cls) -> Rules:
        """Rules of the installed methods."""
        return cls(registries(), importlib.import_module("kvcli.settings.conflicts").clashes)


class _Load:
    """Descriptor: `Profile.load("ngram")` reads a profile; on a profile, `load` is its table of that name."""

    @overload
    def __get__(self, profile: None, owner: type[Profile]) -> Callable[..., Profile]: ...
    @overload
    def __get__(self, profile: Profile, owner: type[Profile]) -> Load: ...
    def __get__(self, profile: Profile | None, owner: type[Profile]) -> Callable[..., Profile] | Load:
        return load_profile if profile is None else profile.load_table


@dataclass(frozen=True)
class Profile:
    """Every setting of a run. Tables are attributes, as in TOML: `profile.kv.dtype`, `profile.spec.method`."""

    name: str
    description: str
    purpose: str
    exactness: Exactness  # how far cache, policy and prefill may change the text; drafting does not count
    chain: tuple[str, ...]  # the profile and all it extends, nearest first
    load_table: Load  # `profile.load`; `Profile.load` is the function that reads a profile
    prefill: Prefill
    prune: Method
    reuse: Method
    kv: Kv
    kv_format: Method
    memory: Memory
    prefix_cache: Method
    policy: Method
    sparse: Method
    spec: Method
    reasoning_steps: Method
    decode: Method
    sample: Sample
    thinking: Thinking
    context: Context
    settings: Settings = field(repr=False, compare=False)  # settings with a written origin
    rules: Rules = field(repr=False, compare=False)

    load = _Load()

    def replace(self, **changes: object) -> Profile:
        """Return a copy with other settings: `replace(spec={"max": 4}, name="mine")`, `replace(**{"spec.max": 4})`."""
        return self.changed(changes, "replace()")

    def changed(self, changes: Mapping[str, object], where: str, why: str = "") -> Profile:
        """Return a copy with other settings. `where` is the place that an error names. `why`: the reason for users, if
        a model requires the changes."""
        names = {key: str(changes[key]) for key in ("name", "description") if key in changes}
        given = from_arguments({key: changes[key] for key in changes if key not in names}, where)
        new = {keys: dataclasses.replace(setting, why=why) for keys, setting in given.items()}
        resolved = resolve([self.settings, new], self.rules.registries)
        profile = _profile(resolved, names.get("name", self.name), self.chain, self.rules)
        if problems := resolved.problems or clash_problems(profile):
            raise bad_config(problems)
        return dataclasses.replace(profile, description=names.get("description", self.description))

    @cached_property
    def effects(self) -> Mapping[Effect, Sequence[str]]:
        """Effects of the settings on the KV cache and its passes, each with the keys that cause it."""
        return effects(self)

    @cached_property
    def second_models(self) -> Mapping[str, DraftModelRef]:
        """The second model by table of methods that use one: all the same. Raises BadConfig if not, or if unnamed."""
        named = ((table, getattr(getattr(self, table).settings, "second", None)) for table in METHOD_TABLES)
        found = {table: of for table, of in named if of is not None}
        if len({*found.values()}) > 1:
            said = " and ".join(f"{table}.model = {of.model} (quant {of.quant})" for table, of in found.items())
            try_ = [" ".join(f"--set {table}.model={of.model}" for table in found) for of in found.values()]
            raise BadConfig(f"{said} differ: one draft model is loaded", code="two_draft_models", try_=try_)
        return found

    @property
    def second(self) -> DraftModelRef | None:
        """The model that methods use beside the target model; None = none. Raises BadConfig as `second_models`."""
        return next(iter(self.second_models.values()), None)

    @property
    def is_checked(self) -> bool:
        """True if the full cache verifies drafts of a smaller cache (`[kv]`, `[policy]`, `[kv_format]`, `[sparse]`)."""
        return bool(self.exactness == "exact" and self.spec.checks and SMALLER & self.effects.keys())

    @cached_property
    def verifying_profile(self) -> Profile:
        """Profile of the cache that verifies: this profile, or a full cache if drafts are made on a compressed one."""
        if not self.is_checked:
            return self
        kv = {**dataclasses.asdict(Kv()), "dtype": self.kv.dtype}
        usual = {table: {METHOD_TABLES[table].key: METHOD_TABLES[table].default} for table in ("kv_format", "sparse")}
        return self.replace(kv=kv, policy={"name": "none"}, **usual)

    @property
    def adaptations(self) -> list[str]:
        """Reasons of the settings that differ from those asked for because the model required it."""
        return list(dict.fromkeys(setting.why for setting in self.settings.values() if setting.why))

    @property
    def extends(self) -> tuple[str, ...]:
        """Profiles that the profile itself extends, by its own file."""
        return tuple(extended_names(self.settings.get(("extends",))))

    @property
    def foreign(self) -> list[str]:
        """Notes on methods of the profile that are code of other packages."""
        chosen = [(table, key, getattr(self, table).method) for table, (key, _) in METHOD_TABLES.items()]
        return [
            f'{table}.{key} = "{name}" is code of {package}'
            for table, key, name in chosen
            if (package := foreign().get(self.rules.registries[table][name]))
        ]

    @cached_property
    def values(self) -> dict[str, object]:
        """Dotted key -> value, in the order of the tables; None = the model decides."""
        found: dict[str, object] = {"exactness": self.exactness}
        for table in ORDER:
            filled = getattr(self, table)
            if isinstance(filled, Method):
                found[f"{table}.{METHOD_TABLES[table][0]}"] = filled.method
                filled = filled.settings
            found |= {f"{table}.{f.name}": getattr(filled, f.name) for f in dataclasses.fields(filled) if f.init}
        return found

    @property
    def written(self) -> dict[str, object]:
        """The values that a file, a flag or a variable sets, other than the defaults, without the label."""
        given = ((key, value) for key, value in self.values.items() if self.origins[key] != DEFAULT.name)
        return {key: value for key, value in given if key != "exactness" and value != plain_value(key)}

    @cached_property
    def hash(self) -> str:
        """Hash of the settings in twelve digits, whatever the profile is called."""
        text = json.dumps(self.values, sort_keys=True, separators=(",", ":"), default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @cached_property
    def origins(self) -> dict[str, str]:
        """Dotted key -> its origin: "built-in exact", "~/.config/kvcli/config.toml:30", "--set", "default"."""
        written = {".".join(keys): setting.origin.name for keys, setting in self.settings.items()}
        return {key: written.get(key, DEFAULT.name) for key in self.values}


def load_profile(
    name: str | None = None,
    *,
    sources: Sources | None = None,
    config: Config | None = None,
    rules: Rules | None = None,
    model: str | None = None,
    sets: Sequence[str] = (),
    flags: Mapping[str, tuple[object, str]] | None = None,
) -> Profile:
    """Build the profile of a run: files, `[models.X].profile`, environment, `--set` and flags, lowest first.

    `flags` maps a dotted key to (value, name of the flag). Without `sources`, only built-in profiles are visible.
    `config`: the files of `sources`, if they were read already. `rules`: default: those of the installed methods.
    Raises one BadConfig with all problems.
    """
    sources, rules = sources or Sources(), rules or Rules.shipped()
    config = config or read_config(sources)
    if config.problems:
        raise bad_config(config.problems)
    above, problems = from_sets(sets)
    over = merge(merge(from_environ(sources.environ), above), from_flags(flags or {}))
    found = resolve_profile(
        chosen_profile(name, config, sources.environ, model), config, rules, model=model, above=over
    )
    problems += found.problems or _borrowed_trust(found.profile, config, model)
    if problems:
        raise bad_config(problems)
    return found.profile


@dataclass(frozen=True, slots=True)
class Outcome:
    """A profile and its problems. With problems, only its name and its origins are valid."""

    profile: Profile
    problems: list[Problem]


def resolve_profile(
    name: str, config: Config, rules: Rules, *, model: str | None = None, above: Settings | None = None
) -> Outcome:
    """Resolve one profile of the merged files, with `above` laid over it. `name` must be one of `config.profiles`."""
    names, problems = lineage(name, config)
    layers = [_of_model(config, model), *(config.profiles[n] for n in names), above or {}]
    resolved = resolve(layers, rules.registries)
    for keys in (("description",), ("extends",), ("purpose",)):  # not inherited
        if keys not in config.profiles[name]:
            resolved.settings.pop(keys, None)
    profile = _profile(resolved, name, tuple(reversed(names)), rules)
    return Outcome(profile, [*resolved.problems, *problems] or clash_problems(profile))


def _of_model(config: Config, model: str | None) -> Settings:
    trust = config.models.get(model or config.default_model, {}).get(("trust_remote_code",))
    return {("load", "trust_remote_code"): trust} if trust is not None else {}


def _profile(resolved: Resolved, name: str, chain: tuple[str, ...], rules: Rules) -> Profile:
    settings, tables = resolved.settings, dict(resolved.tables)
    tables["load_table"] = tables.pop("load")
    for table, (key, _) in METHOD_TABLES.items():
        tables[table] = Method(str(settings[table, key].value), tables.get(table))
    given = {key: settings[key,].value for key in ("description", "purpose", "exactness") if (key,) in settings}
    header = Header(**given)  # type: ignore[arg-type]  # each value was checked against its field
    return Profile(
        name=name,
        description=header.description,
        purpose=header.purpose,
        exactness=header.exactness,
        chain=chain,
        settings=settings,
        rules=rules,
        **tables,
    )


def clash_problems(profile: Profile) -> list[Problem]:
    """Conflicts of a profile as problems, each at the line of its key and naming the line of the other."""
    clashes = profile.rules.clashes
    return [_clash_problem(clash, profile.settings) for clash in clashes(profile)] if clashes is not None else []


def _clash_problem(clash: Conflict, settings: Settings) -> Problem:
    key, other = (tuple(dotted.split(".")) for dotted in (clash.key, clash.other))
    here, there = settings.get(key), settings.get(other)
    message = clash.message
    if here is None:  # a default: only the other key has a line to show
        here, key, there, message = there or Setting(None, DEFAULT), other, None, f"{clash.key}: {clash.message}"
    problem = here.problem(key, message, clash.because)
    if there is None:
        return problem
    place = there.origin.document.place_of(there.origin.base + other)
    where = f"line {place.line}" if place.line and place.source == problem.place.source else there.origin.name
    return dataclasses.replace(problem, hint=f"but {where} sets {clash.other}, {clash.because}".rstrip(", "))


def _borrowed_trust(profile: Profile, config: Config, model: str | None) -> list[Problem]:
    """Problems of a project file's model that gets trust from the user's files: both together are refused."""
    chosen = config.chosen_by_project(model)
    if chosen is None:
        return []
    problems = []
    for key in ("trust_remote_code", "allow_pickle"):
        setting = profile.settings.get(("load", key))
        if setting is not None and setting.value is True and setting.origin.level != "typed":
            hint = f"to run its code: --set load.{key}=true"
            message = f"a project file chose this model, and {setting.origin.name} sets load.{key}"
            problems.append(chosen.problem(chosen.origin.keys, message, hint))
    return problems
