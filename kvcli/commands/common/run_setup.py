"""Setup of a run from the command line: the profile with its flags, then the model loaded under it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, cached_property, partial
from os.path import exists, expanduser
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.commands.common.exits import insisting
from kvcli.commands.common.flags import refuse_implied
from kvcli.demo import BUNDLED
from kvcli.errors import BadConfig, BadModel, KvcliError, UsageError
from kvcli.files import free_bytes
from kvcli.models import source
from kvcli.models.catalog import BY_NAME, CatalogModel, listed, stands_for
from kvcli.settings.config import Config, Sources, from_environ, from_sets, load_config, set_value
from kvcli.settings.profile import LOSSY, SMALLER, Profile, load_profile
from kvcli.settings.schema import METHOD_TABLES, Kv, Load, plain_value
from kvcli.settings.schema import Model as Entry

if TYPE_CHECKING:
    from kvcli.chat.loaded_model import LoadedModel
    from kvcli.chat.model import Model
    from kvcli.chat.text_session import TextSession
    from kvcli.engine.drafting.drafter import Costs
    from kvcli.environment import Environment
    from kvcli.fit.plan import PlannedModel
    from kvcli.schemas.fit import PassTime
    from kvcli.schemas.pack import PackDocument

Flags = Mapping[str, tuple[object, str]]  # dotted key -> value and its flag
SYSTEM_CONFIG = Path("/etc/xdg/kvcli/config.toml")

SIXTEEN_BITS = ("kv.k_bits=16", "kv.v_bits=16")  # settings that --budget needs in a profile that quantizes by age

log = logging.getLogger("kvcli.setup")


def sources(world: Environment) -> Sources:
    """Return the sources of settings for this environment."""
    home = world.environ.get("HOME")
    return Sources(
        system=SYSTEM_CONFIG,
        user=world.paths.config,
        cwd=world.cwd,
        home=Path(home) if home else None,
        config=world.options.config,
        environ=world.environ,
    )


def config_of(world: Environment) -> Config:
    """Return the settings of the config files. Raises BadConfig."""
    return load_config(sources(world))


def entry_of(world: Environment, config: Config, name: str | None) -> Entry:
    """Return the entry of a model name in the config files, or else in the list of models."""
    entry = config.model(name)
    return replace(entry, path=stands_for(entry.path, world.paths.data))


def find(
    world: Environment,
    name: str | None,
    allow_pickle: bool,
    tell: Callable[[str], None] | None = None,
    *,
    may_assist: bool = False,
    revision: str | None = None,
    config: Config | None = None,
) -> source.Source:
    """Return the checked files of a model by any of its names. Downloads only with a `tell`. Raises BadModel."""
    config = config or config_of(world)
    entry, offline = entry_of(world, config, name), world.options.offline
    if entry.path in BY_NAME and not exists(expanduser(entry.path)):
        raise BadModel(
            f"{entry.path} is not on this machine",
            code="model_not_found",
            lines=[f"it can be downloaded: {BY_NAME[entry.path].about}"],
            try_=[f"kvcli models get {entry.path}"],
        )
    if tell is not None and world.options.quiet:
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
    try:
        return source.find(
            entry.path,
            offline=offline,
            revision=revision or entry.revision or None,
            allow_pickle=allow_pickle,
            tell=tell,
            may_assist=may_assist,
        )
    except BadModel as error:
        if error.code == "model_not_found":
            listed = [f"kvcli models get {one.name}" for one in BY_NAME.values() if entry.path in (one.id, one.source)]
            here = [f.parent.name for f in world.cwd.glob("*/config.json")]
            near = get_close_matches(entry.path, {*BUNDLED, *config.models, *BY_NAME, *source.cached_ids(), *here}, 2)
            error.try_ = (*listed, *(f"did you mean {one}?" for one in near), *error.try_)
        raise


def find_or_look_up(setup: Setup, allow_pickle: bool, online: bool) -> source.Source:
    """Return the files of the model on this machine, or else with `online` by headers of the hub. Raises BadModel."""
    if online and setup.world.options.offline:
        raise UsageError("--online and --offline exclude each other", try_=["only one of them"])
    try:
        return find(setup.world, setup.name, allow_pickle)
    except BadModel as error:
        if not source.may_fetch(setup.entry.path, error):
            raise
        if not online:
            error.try_ = ("the same command with --online, which downloads the headers", *error.try_)
            raise
    return source.look_up(setup.entry.path, setup.entry.revision or None)


def in_list(setup: Setup, error: BadModel, notes: list[str]) -> CatalogModel | None:
    """Return the catalog entry of a model that is not on this machine, with a note that says so; None: not listed."""
    known = listed(setup.entry.path) if error.code == "model_not_found" else None
    if known is not None:
        said = f"its sizes are those of kvcli's list of models, read on {known.date}"
        notes.append(f"{setup.name} is not on this machine; {said}")
    return known


def at_hand(world: Environment, *, may_assist: bool = False) -> dict[str, source.Source]:
    """Return the checked files of all models with a name on this machine, by name; models with errors are left out."""
    from kvcli.commands.models.model_names import known

    found, config = dict[str, source.Source](), config_of(world)
    for name, _ in known(config, world.paths.data):
        with suppress(KvcliError):  # `kvcli models list` reports the error
            found[name] = find(world, name, allow_pickle=False, may_assist=may_assist, config=config)
    return found


@dataclass(frozen=True)
class Setup:
    """Request of a run: a model name and the settings of the command line. Nothing is loaded before `load`."""

    world: Environment
    model: str | None = None  # as typed, or from a saved chat; None = the default model
    flags: Flags = field(default_factory=dict)
    exact: bool = False
    revision: str | None = None  # of a hub id, in place of the config's
    is_typed: bool = True  # False if `model` comes from a saved chat
    reuses: bool = False  # True if sessions use the prefix cache; False for measurements, which must prefill
    pack: PackDocument | None = None  # pack whose profile and settings are used, unless a profile is typed
    # the model's files by `load.allow_pickle`, once they were found
    _files: dict[bool, source.Source] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def config(self) -> Config:
        """The config files as they were when the command began."""
        return config_of(self.world)

    @property
    def entry(self) -> Entry:
        """The entry of the model's name."""
        return entry_of(self.world, self.config, self.model)

    @property
    def name(self) -> str:
        return self.model or self.config.default_model

    @property
    def keeps(self) -> bool:
        """True if chats and KV caches may be saved."""
        return self.world.keeps and self.config.keep_chats

    @property
    def lasting_name(self) -> str:
        """Name of the model that is valid in any working folder."""
        name = self.name
        is_folder = name not in BUNDLED and self.entry.path == name and exists(expanduser(name))
        return str(Path(expanduser(name)).absolute()) if is_folder else name

    @property
    def is_named(self) -> bool:
        """True if the user chose the model: typed, or as `default_model` of a config file."""
        return self.is_typed if self.model is not None else "default_model" in self.config.top

    @cached_property
    def profile(self) -> Profile:
        """The profile of the command line."""
        return self._read(self._profile_name, self.world.options.set, self.flags, self.taken)

    @property
    def _profile_name(self) -> str | None:
        usual = self.pack.profile if self.pack is not None and self.pack.profile in self.config.profiles else None
        return self.world.options.profile or usual

    @cached_property
    def taken(self) -> Sequence[str]:
        """Settings of the pack that differ from those of its profile, as for `--set`; none if a profile is typed."""
        if self.pack is None or self.world.options.profile:
            return ()
        values = {key: set_value(value) for key, value in self._read(self._profile_name, (), {}).values.items()}
        return [f"{key}={value}" for key, value in self.pack.settings.items() if values.get(key) != value]

    def resolve(self, name: str, sets: Sequence[str]) -> Profile:
        """Return another profile. Settings of `sets` beyond those of the command line override its flags."""
        typed = self.world.options.set
        new = sets[len(typed) :] if list(sets[: len(typed)]) == typed else sets
        changed = {item.partition("=")[0].strip() for item in new}
        # a new method drops the flags of the old one
        other = {table for table, (key, _) in METHOD_TABLES.items() if f"{table}.{key}" in changed}
        flags = {key: flag for key, flag in self.flags.items() if key not in changed and key.split(".")[0] not in other}
        return self._read(name, sets, flags, self.taken if self.taken and name == self.profile.name else ())

    def _read(self, name: str | None, sets: Sequence[str], flags: Flags, taken: Sequence[str] = ()) -> Profile:
        own, sets = from_sets(sets)[0], [*taken, *sets]
        refuse_implied(flags, from_environ(self.world.environ) | from_sets(sets)[0], own)
        read = partial(
            load_profile, name, sources=sources(self.world), config=self.config, model=self.model, flags=flags
        )
        try:
            profile = read(sets=sets)
        except BadConfig as error:
            if "memory.budget" in flags:
                with suppress(BadConfig):  # another error remains with 16 bits
                    read(sets=[*sets, *SIXTEEN_BITS])
                    error.try_ = (" ".join(f"--set {one}" for one in SIXTEEN_BITS), "leave --budget out", *error.try_)
            raise
        self._refuse_other_policy(profile)
        if self.exact:
            refuse_inexact(profile)
            changes: dict[str, object] = {"load.quant": "none"}  # set explicitly, so that no other value is chosen
            if profile.spec.method != "off":
                changes["spec.require_batch_invariance"] = True
            profile = profile.changed(changes, "--exact")
        profile = self.suited(profile)
        log.info("profile %s, hash %s", profile.name, profile.hash)
        for key, value in profile.values.items():
            log.debug("%s = %r (%s)", key, value, profile.origins[key])
        return profile

    def suited(self, profile: Profile) -> Profile:
        """Return the profile with the drafting method that suits its draft model. "auto" selects "mtp", the cheapest
        drafter, if the model's files contain a layer for it, or else an assistant on this machine made for the model.
        A draft model that is an assistant or an EAGLE-3 head is used as one.
        A profile that sets more of the draft model than its name is unchanged."""
        said = {key for key, at in profile.origins.items() if key.startswith("spec.") and at != "default"}
        open_to_all = {f"spec.{key}" for key in ("method", "model", "require_batch_invariance", "quant")}
        if profile.spec.method != "model" or said - open_to_all:
            return profile
        from kvcli.models.draft_heads import assistant_for, has_mtp
        from kvcli.models.refusals import head_method

        wanted = {"method": "assistant", "model": profile.spec.model}
        wanted |= {"quant": profile.spec.quant} if "spec.quant" in said else {}
        with suppress(KvcliError):  # reported when the model is loaded
            if self._names_draft_model(profile):
                found = find(self.world, profile.spec.model, False, may_assist=True, config=self.config)
                by = profile.origins["spec.model"]
                wanted |= {"method": head_method(found.config)}
                return profile.changed({"spec": wanted}, by) if wanted["method"] else profile
            found = self.fetch(profile)
            if has_mtp(found) and "spec.quant" not in said:
                return profile.replace(spec={"method": "mtp"})
            if name := assistant_for(found, at_hand(self.world, may_assist=True)):
                return profile.replace(spec=wanted | {"model": name})
        return profile

    def _names_draft_model(self, profile: Profile) -> bool:
        """True if `spec.model` is a name, not "auto"."""
        return profile.spec.model != "auto" or "auto" in self.config.models

    def _refuse_other_policy(self, profile: Profile) -> None:
        """Raise UsageError if --budget replaces the eviction policy of a profile."""
        said = self._said(profile, ("policy", "name"), "none")
        if profile.origins["policy.name"] == "--budget" and said not in ("none", "budget"):
            raise UsageError(
                f"--budget and profile {profile.name} exclude each other: its policy is {said}",
                try_=[f"-P exact --budget {profile.memory.budget}", "leave --budget out"],
            )

    def _said(self, profile: Profile, key: tuple[str, str], usual: str) -> object:
        """Return the value of a key in the files of a profile, without the command line."""
        files = (self.config.profiles[name].get(key) for name in profile.chain)
        return next((setting.value for setting in files if setting is not None), usual)

    def overruled(self, profile: Profile) -> list[str]:
        """Return a note if --draft makes a profile draft that does not draft by itself."""
        if profile.origins["spec.method"] != "--draft":
            return []
        said = self._said(profile, ("spec", "method"), "off")
        about = f"profile {profile.name} does not draft; --draft adds draft model {profile.spec.model} (same text)"
        return [about] if said == "off" else []

    def look(self, profile: Profile) -> None:
        """Find the model, or check that it can be downloaded, before documents are read and anything is imported."""
        try:
            self.fetch(profile)
        except BadModel as error:
            if self.world.options.offline or not source.may_fetch(self.entry.path, error):
                raise

    def fetch(self, profile: Profile, tell: Callable[[str], None] | None = None) -> source.Source:
        """Return the model's checked files; `tell` receives messages about a download."""
        trusts = profile.load.allow_pickle
        if trusts not in self._files:
            try:
                found = find(self.world, self.model, trusts, tell, revision=self.revision, config=self.config)
            except BadModel as error:
                if self.model is not None and not self.is_typed:  # a saved chat names it
                    server = "--engine openai --base-url URL, if a server has it"
                    error.try_ = ("-m MODEL, for another model", server, *error.try_)
                raise
            self._files[trusts] = found
        return self._files[trusts]

    def draft(self, name: str, tell: Callable[[str], None] | None = None) -> source.Source:
        """Return the checked files of a draft model; "auto" = one on this machine. Pickle files are not trusted."""
        if name == "auto" and name not in self.config.models:
            from kvcli.commands.models.draft_candidates import choose

            name = choose(self.fetch(self.profile, tell), self.name, at_hand(self.world))
        return replace(find(self.world, name, False, tell, may_assist=True, config=self.config), id=name)

    def sizes(self, tell: Callable[[str], None] | None = None) -> Callable[[str], PlannedModel]:
        """Return a function from a draft model's name to its sizes for a plan."""
        from kvcli.fit.plan import subject_of

        return cache(lambda name: subject_of(self.draft(name, tell)))

    def load(self, profile: Profile, tell: Callable[[str], None] | None = None, *, times: bool = True) -> Model:
        """Load the model; `tell` receives messages about a download and about methods of other packages. `times`:
        measure pass times."""
        found = self.fetch(profile, tell)
        for note in profile.foreign:
            (tell or log.info)(note)
        if tell is not None and profile.spec.method == "model" and self._names_draft_model(profile):
            self.draft(profile.spec.model, tell)  # its files show if it is an assistant, and may have to be downloaded
            profile = self.suited(profile)
        # transformers reads it when imported; kvcli itself checks what its warnings are about
        self.world.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        with insisting():
            from kvcli.chat.model import load

            if self.world.is_own_process:  # later collections skip what was imported
                gc.freeze()
                gc.set_threshold(20_000)
            cache, shared = self.world.paths.cache, self.world.shared if self.reuses else None
            model = load(found, profile, tell=tell, cache=cache, find=partial(self.draft, tell=tell), shared=shared)
        info = model.info = replace(model.info, id=self.name)
        model.time_passes = partial(self.costs, tell=tell or log.info) if times else None
        model.map_heads = partial(self.map_heads, tell=tell or log.info)
        model.prepare()
        if self.reuses and self.keeps and (most := self.config.prefix_cache_size(free_bytes(cache))):
            from kvcli.prefix_cache.prefix_cache import PrefixCache

            model.prefix_cache = PrefixCache(cache / "kv", most, model.lm)
        refuse_beyond(profile, info.limit, self.name)
        log.info("loaded %s from %s in %.2f s: %s %s", info.id, info.path, info.load_seconds, info.dtype, info.backend)
        return model

    def open_elsewhere(self, profile: Profile) -> TextSession | None:
        """Return a session of another engine's model; None = the model runs here."""
        return None

    def map_heads(self, model: Model, tell: Callable[[str], None] = log.info) -> Path:
        """Return the file of the model's own head map, and make it if it is missing."""
        from kvcli.heads.auto_headmap import auto_headmap

        return auto_headmap(model, self.world.paths.data / "heads", tell)

    def costs(self, model: LoadedModel, tell: Callable[[str], None] = log.info) -> Costs | None:
        """Return initial pass times for drafters; None = they could not be measured."""
        from kvcli.fit.speed import units

        passes = self.pass_times(model, tell) if model.lm.ranks.n == 1 else []
        return (lambda context: units(passes, context)) if passes else None

    def pass_times(self, model: LoadedModel, tell: Callable[[str], None] = log.info) -> list[PassTime]:
        """Return pass times of this model from `kvcli bench --calibrate`, or from a short measurement."""
        from kvcli.fit.calibrate import quick_costs

        return quick_costs(model, self.world.paths.cache, log.info, tell)


def refuse_inexact(profile: Profile) -> None:
    """Raise BadConfig if a key can change the text (--exact)."""
    values, effects = profile.verifying_profile.values, profile.verifying_profile.effects
    keys = ["exactness", *(f"load.{key}" for key in Load.lossy), *(f"kv.{key}" for key in Kv.lossy)]
    of_cache = {key: effect for effect, causes in effects.items() if effect in LOSSY for key in causes}
    wants = {key: plain_value(key) for key in (*keys, *of_cache)}
    if profile.spec.method != "off" and profile.origins["spec.require_batch_invariance"] != "default":
        wants["spec.require_batch_invariance"] = True  # drafts that round differently contradict --exact
    wrong = [key for key, value in wants.items() if values[key] != value]
    if wrong:
        origins = dict.fromkeys(profile.origins[key] for key in wrong)
        flags = [flag for flag in origins if flag.startswith("--") and flag != "--set"]  # --set does not override these
        # drafts from the smaller cache can be verified with the full cache
        checked = (
            ["--set exactness=exact --set spec.method=self"]
            if wrong[0] == "exactness" and SMALLER.issuperset(map(of_cache.get, wrong[1:])) and not flags
            else []
        )
        sets = [f"--set {key}={set_value(wants[key])}" for key in wrong if profile.origins[key] not in flags]
        raise BadConfig(
            f"--exact conflicts with profile {profile.name}",
            code="not_exact",
            lines=[f"{key} = {set_value(values[key])} ({profile.origins[key]}) can change the text" for key in wrong],
            detail={key: values[key] for key in wrong},
            try_=[*(f"leave {flag} out" for flag in flags), *(["-P exact", *checked] if sets else []), *sets],
        )


def refuse_beyond(profile: Profile, most: int, model: str) -> None:
    """Raise BadConfig if the context window exceeds the model's limit, instead of shrinking it silently."""
    asked = profile.context.limit
    if asked != "auto" and int(asked) > most > 0:
        raise BadConfig(
            f"context.limit = {asked:,} exceeds the context limit of {model}",
            code="beyond_model",
            lines=[f"the limit is {most:,} tokens; {profile.origins['context.limit']} sets {asked:,}"],
            detail={"asked": asked, "limit": most},
            try_=["--ctx max", f"--ctx {most}"],
        )
