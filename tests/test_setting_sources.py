"""Where settings come from: which layer wins, what methods leave behind, what a cloned repository may not say."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvcli.errors import BadConfig
from kvcli.settings.config import load_config
from kvcli.settings.profile import Profile, Rules, Sources, load_profile
from kvcli.settings.small_file import Document
from kvcli.settings.values import Origin, Setting, merge

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Off:
    """Nothing."""


@dataclass(frozen=True)
class Copy:
    """Copy from the text."""

    max: int = 6  # rows
    least: int = 2  # tokens


@dataclass(frozen=True)
class Guess:
    """Guess."""

    max: int = 3  # rows
    names: tuple[str, ...] = ()  # words


REGISTRIES = {
    "prune": {"none": "kvcli.methods.prune.no_pruning:NoPruning"},
    "reuse": {"none": "kvcli.methods.reuse.prefix_only:PrefixOnly"},
    "kv_format": {"kivi": "kvcli.kv.formats.kivi:Kivi"},
    "prefix_cache": {"none": "kvcli.prefix_cache.codec:Uncompressed"},
    "policy": {"none": "kvcli.methods.policies.keep_all:KeepAll"},
    "sparse": {"none": "kvcli.kv.sparse.settings:FullAttention"},
    "spec": {
        "off": f"{__name__}:Off",
        "copy": f"{__name__}:Copy",
        "guess": f"{__name__}:Guess",
        "ngram": f"{__name__}:Copy",
    },
    "reasoning_steps": {"none": "kvcli.methods.steps.no_steps:NoSteps"},
    "decode": {"none": "kvcli.methods.decode.no_forks:NoForks"},
}


@dataclass(frozen=True)
class Machine:
    """A made-up machine: a user's folder, a repository below home, and a folder for the system."""

    sources: Sources

    def write(self, name: str, text: str) -> None:
        folders = {"system": self.sources.system, "project": self.root / ".kvcli.toml"}
        path = folders.get(name) or Path(str(self.sources.user)) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    @property
    def root(self) -> Path:
        return Path(str(self.sources.home)) / "repo"

    def load(self, name: str | None = None, environ: dict[str, str] | None = None, **given: object) -> Profile:
        return load_profile(
            name,
            sources=replace(self.sources, environ=environ or {}),
            rules=Rules(REGISTRIES),
            **given,  # type: ignore[arg-type]
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    home = tmp_path / "home"
    (home / "repo" / ".git").mkdir(parents=True)
    (home / "repo" / "deep" / "er").mkdir(parents=True)
    sources = Sources(system=tmp_path / "etc.toml", user=home / "conf", cwd=home / "repo" / "deep" / "er", home=home)
    return Machine(sources)


LAYERS = ["system", "config.toml", "profiles/mine.toml", "project", "environ", "sets", "flags"]


@pytest.mark.parametrize("lower", range(len(LAYERS)))
def test_each_layer_wins_over_those_below(machine: Machine, lower: int) -> None:
    given: dict[str, object] = {}
    for i, layer in enumerate(LAYERS[: lower + 1]):
        if layer == "environ":
            given["environ"] = {"KVCLI_PREFILL__CHUNK": str(i + 1)}
        elif layer == "sets":
            given["sets"] = [f"prefill.chunk={i + 1}"]
        elif layer == "flags":
            given["flags"] = {"prefill.chunk": (i + 1, "--chunk"), "kv.dtype": (None, "--kv")}
        else:
            head = "prefill" if layer.startswith("profiles") else "profiles.mine.prefill"
            machine.write(layer, f"[{head}]\nchunk = {i + 1}\n")

    profile = machine.load("mine", **given)  # type: ignore[arg-type]

    assert profile.prefill.chunk == lower + 1


def test_the_profile_is_the_one_asked_for_then_of_the_environment_the_model_and_the_files(machine: Machine) -> None:
    machine.write("system", "default_profile = 'a'\n[profiles.a]\n[profiles.b]\n[profiles.c]\n")
    assert machine.load().name == "a"
    machine.write("config.toml", "default_profile = 'b'\n[models.big]\nprofile = 'c'")
    assert machine.load().name == "b"
    machine.write("project", "default_profile = 'exact'")

    assert machine.load().name == "exact"
    assert machine.load(model="big").name == "c"
    assert machine.load(model="big", environ={"KVCLI_PROFILE": "a"}).name == "a"
    assert machine.load("b", model="big", environ={"KVCLI_PROFILE": "a"}).name == "b"


def test_without_files_the_default_profile_drafts(machine: Machine) -> None:
    profile = machine.load()

    assert (profile.name, profile.chain, profile.exactness) == ("ngram", ("ngram", "exact"), "exact")
    assert profile.spec.method == "ngram"
    assert profile.load.device == "auto"
    assert profile.sample.temperature is None


def test_later_parents_win_and_a_shared_one_counts_once(machine: Machine) -> None:
    machine.write(
        "config.toml",
        """
        [profiles.root]
        prefill.chunk = 1
        context.reserve = 1
        [profiles.left]
        extends = "root"
        prefill.chunk = 2
        context.reserve = 2
        [profiles.right]
        extends = "root"
        context.reserve = 3
        [profiles.mine]
        extends = ["left", "right"]
        """,
    )

    profile = machine.load("mine")

    assert profile.chain == ("mine", "right", "left", "root")
    assert (profile.prefill.chunk, profile.context.reserve) == (2, 3)


def test_a_name_in_two_files_merges_before_anything_extends_it(machine: Machine) -> None:
    machine.write(
        "config.toml", "[profiles.base]\nextends = 'exact'\nspec.least = 4\n[profiles.mine]\nextends = 'base'\n"
    )
    machine.write("project", "[profiles.base]\nspec.method = 'copy'\ndescription = 'both'\n")

    assert machine.load("mine").spec.least == 4
    assert machine.load("base").description == "both"
    assert machine.load("mine").description == ""  # a description is a profile's own


METHOD_CHANGES = [
    ("spec.method = 'copy'\nspec.max = 9", "spec.method = 'guess'", {"method": "guess", "max": 3}),
    ("spec.method = 'copy'\nspec.max = 9", "spec.method = 'copy'", {"method": "copy", "max": 9}),
    ("spec.method = 'copy'\nspec.max = 9", "spec.least = 5", {"method": "copy", "max": 9, "least": 5}),
    ("spec.method = 'copy'\nspec.least = 9", "spec.method = 'guess'\nspec.max = 2", {"method": "guess", "max": 2}),
    ("spec.method = 'copy'\nspec.max = 9", "spec.method = 'off'", {"method": "off"}),
    ("spec.method = 'guess'", "spec.names = ['a', 'b']", {"method": "guess", "names": ("a", "b")}),
]


@pytest.mark.parametrize(("below", "above", "expected"), METHOD_CHANGES)
def test_another_method_leaves_the_keys_of_the_old_one_behind(
    machine: Machine, below: str, above: str, expected: dict[str, object]
) -> None:
    machine.write("config.toml", f"[profiles.base]\n{below}\n[profiles.mine]\nextends = 'base'\n{above}\n")

    profile = machine.load("mine")

    assert {key: getattr(profile.spec, key) for key in expected} == expected


def test_typed_keys_stay_when_the_method_is_typed_too(machine: Machine) -> None:
    machine.write("config.toml", "[profiles.mine]\nspec.method = 'copy'\nspec.max = 9\n")

    profile = machine.load("mine", environ={"KVCLI_SPEC__MAX": "8"}, sets=["spec.max=7", "spec.method=guess"])

    assert (profile.spec.method, profile.spec.max) == ("guess", 7)


@pytest.mark.parametrize("seed", range(20))
def test_merging_is_the_later_one_key_by_key_and_needs_no_brackets(seed: int) -> None:
    draw = random.Random(seed)
    keys = [("kv", "dtype"), ("prefill", "chunk"), ("sample", "seed"), ("spec", "max"), ("spec", "least")]

    def layer(name: str) -> dict[tuple[str, ...], Setting]:
        chosen = draw.sample(keys, draw.randrange(len(keys))) + [("spec", "method")] * draw.randrange(2)
        origin = Origin(Document(name, "", {}, level="typed"))
        return {
            k: Setting(draw.choice(["copy", "guess"]) if k[1] == "method" else draw.random(), origin) for k in chosen
        }

    a, b = layer("a") | {("spec", "method"): Setting("copy", Origin(Document("a", "", {}, level="typed")))}, layer("b")

    merged = merge(a, b)

    stays = ("spec", "method") not in b or b["spec", "method"].value == "copy"
    assert all(merged[k] is b[k] for k in b)
    assert {k for k in merged if k not in b} == {k for k in a if k not in b and (stays or k[0] != "spec")}
    assert merge(merged, {}) == merged == merge({}, merged)
    assert merge(merged, b) == merged


TYPED = [
    ("load.device=cpu", "cpu"),
    ("load.device=cuda:1", "cuda:1"),
    ("load.device='cpu'", "cpu"),
    ("prefill.chunk = 64", 64),
    ("prefill.chunk=1_024", 1024),
    ("sample.temperature=0", 0.0),
    ("sample.temperature=7e-1", 0.7),
    ("load.verify=false", False),
    ("context.limit=auto", "auto"),
    ("exactness=approx", "approx"),
    ("kv={dtype = 'fp16'}", "fp16"),
]


@pytest.mark.parametrize(("text", "value"), TYPED)
def test_a_typed_value_is_toml_or_else_text(machine: Machine, text: str, value: object) -> None:
    key = text.partition("=")[0].strip().replace("kv", "kv.dtype")

    profile = machine.load("exact", sets=[text])

    assert profile.values[key] == value
    assert type(profile.values[key]) is type(value)
    assert profile.origins[key] == "--set"


def test_origins_name_the_file_and_the_line(machine: Machine) -> None:
    machine.write("config.toml", "[profiles.mine]\nextends = 'ngram'\n\n[profiles.mine.kv]\ndtype = 'fp16'\n")
    machine.write("project", "[profiles.mine.prefill]\nchunk = 5\n")

    profile = machine.load(
        "mine",
        environ={"KVCLI_SPEC__MAX": "6", "KVCLI_KV__DTYPE": "", "KVCLI_HOME": "/x"},
        sets=["sample.seed=3"],
        flags={"load.device": ("cpu", "--device")},
    )

    assert {key: origin for key, origin in profile.origins.items() if origin != "default"} == {
        "exactness": "built-in ngram",
        "load.device": "--device",
        "prefill.chunk": "~/repo/.kvcli.toml:2",
        "kv.dtype": "~/conf/config.toml:5",
        "spec.method": "built-in ngram",
        "spec.max": "env KVCLI_SPEC__MAX",
        "sample.seed": "--set",
    }
    assert profile.replace(spec={"max": 2}).origins["spec.max"] == "replace()"


REFUSED = {
    "trust_remote_code in a profile": ("[profiles.mine.load]\ntrust_remote_code = true", "2:1: profiles.mine.load."),
    "allow_pickle in a profile": ("[profiles.mine]\nload.allow_pickle = true", "2:6: profiles.mine.load."),
    "trust_remote_code of a model": ("[models.new]\ntrust_remote_code = true", "2:1: models.new."),
    "a model outside": ("[models.new]\npath = '../../weights'", "2:1: models.new.path"),
    "a model in home": ("[models.new]\npath = '~/weights'", "2:1: models.new.path"),
    "a default model outside": ("default_model = '/tmp/weights'", "1:1: default_model"),
    "another path of the user's model": ("[models.big]\npath = 'evil/model'", "2:1: models.big.path"),
    "another path for an id": ("[models.'good/model']\npath = 'evil/model'", "2:1: models.good/model.path"),
    "another demo": ("[models.demo]\npath = 'evil/model'", "2:1: models.demo.path"),
    "another revision of the user's model": ("[models.big]\nrevision = 'evil'", "2:1: models.big.revision"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_project_file_may_not_redirect_text_or_run_code(machine: Machine, kind: str) -> None:
    text, place = REFUSED[kind]
    machine.write("config.toml", "[models.big]\npath = 'good/model'\n[profiles.mine]\n")
    machine.write("project", text)

    with pytest.raises(BadConfig) as caught:
        machine.load("mine")

    assert caught.value.exit == 9
    assert caught.value.message == "1 problem in 1 file"
    assert caught.value.lines[0].startswith(f"~/repo/.kvcli.toml:{place}")
    assert "a project file may not" in caught.value.lines[0]


GIB = 1 << 30


@pytest.mark.parametrize(
    ("said", "free", "most"),
    [
        ("", 500, 8.0),
        ("", 20, 2.0),
        ("", 0, 0.0),
        ("prefix_cache_size = '12GiB'", 20, 12.0),
        ("prefix_cache_size = '0GiB'", 500, 0.0),
    ],
)
def test_what_is_kept_takes_a_tenth_of_a_disk_at_most_unless_more_is_said(
    machine: Machine, said: str, free: int, most: float
) -> None:
    machine.write("config.toml", said)

    assert load_config(machine.sources).prefix_cache_size(free * GIB) == most * GIB


def test_a_project_file_may_name_models_and_profiles_of_its_own(machine: Machine) -> None:
    machine.write(
        "project", "default_model = 'local'\n[models.local]\npath = 'weights'\nprofile = 'fast'\n[profiles.fast]\n"
    )

    assert machine.load().name == "fast"
    assert load_config(machine.sources).model().path == "weights"
    assert load_config(machine.sources).model("a/b").path == "a/b"


@pytest.mark.parametrize(
    "project", ["default_model = 'evil/model'", "default_model = 'm'\n[models.m]\npath = 'evil/model'"]
)
@pytest.mark.parametrize("key", ["trust_remote_code", "allow_pickle"])
def test_trust_that_the_user_gives_does_not_reach_a_model_that_a_project_file_chose(
    machine: Machine, project: str, key: str
) -> None:
    machine.write("config.toml", f"default_profile = 'mine'\n[profiles.mine.load]\n{key} = true\n")
    machine.write("project", project)

    with pytest.raises(BadConfig) as caught:
        machine.load()

    assert f"a project file chose this model, and ~/conf/config.toml:3 sets load.{key}" in caught.value.lines[0]
    assert getattr(machine.load(model="good/model").load, key) is True
    assert getattr(machine.load(sets=[f"load.{key}=true"]).load, key) is True


def test_trust_in_a_model_lies_below_the_profiles(machine: Machine) -> None:
    machine.write(
        "config.toml", "[models.big]\ntrust_remote_code = true\n[profiles.no.load]\ntrust_remote_code = false\n"
    )

    assert machine.load(model="big").load.trust_remote_code is True
    assert machine.load("no", model="big").load.trust_remote_code is False
    assert machine.load().load.trust_remote_code is False


def test_the_project_file_is_the_nearest_one_in_the_repository_or_below_home(machine: Machine, tmp_path: Path) -> None:
    home, deep = machine.root.parent, machine.root / "deep" / "er"
    other = tmp_path / "elsewhere" / "below"
    for folder in (tmp_path, home, machine.root, deep.parent, other.parent, other):
        folder.mkdir(parents=True, exist_ok=True)

    def found(cwd: Path, *with_file: Path) -> Path | None:
        for folder in with_file:
            (folder / ".kvcli.toml").write_text("", encoding="utf-8")
        project = Sources(cwd=cwd, home=home).project()
        for folder in with_file:
            (folder / ".kvcli.toml").unlink()
        return project and project.parent

    assert found(deep, machine.root, deep.parent) == deep.parent
    assert found(deep, machine.root) == machine.root
    assert found(deep, home, tmp_path) is None  # the repository ends the search
    (home / "plain").mkdir()
    assert found(home / "plain", home) == home
    assert found(home / "plain", tmp_path) is None
    assert found(other, other) == other
    assert found(other, other.parent) is None  # neither in a repository nor below home


def test_a_config_file_asked_for_stands_above_the_project_file(machine: Machine, tmp_path: Path) -> None:
    machine.write("project", "[profiles.mine.prefill]\nchunk = 5\n")
    (tmp_path / "more.toml").write_text("[profiles.mine.prefill]\nchunk = 6\n", encoding="utf-8")
    (tmp_path / "one.toml").write_text("extends = 'exact'\nprefill.chunk = 7\n", encoding="utf-8")

    more, one = (Machine(replace(machine.sources, config=tmp_path / f"{name}.toml")) for name in ("more", "one"))

    assert more.load("mine").prefill.chunk == 6
    assert one.load("one").prefill.chunk == 7  # a file that is one profile


def test_the_hash_follows_the_values_and_nothing_else(machine: Machine) -> None:
    machine.write("config.toml", "[profiles.mine]\nextends = 'exact'\nsample.temperature = 1\ndescription = 'x'")
    exact = machine.load("exact")

    assert machine.load("mine").hash == machine.load("exact", sets=["sample.temperature=1.0"]).hash != exact.hash
    assert exact.hash == exact.replace(name="other", description="other").hash
    changes = [
        {"spec": {"method": "copy"}},
        {"spec": {"method": "guess"}},
        {"exactness": "approx"},
        {"load": {"threads": 1}},
    ]
    hashes = [exact.replace(**change).hash for change in changes]  # type: ignore[arg-type]
    assert all(a != b for a, b in itertools.combinations([exact.hash, *hashes], 2))


def test_a_profile_can_be_changed_copied_and_pickled() -> None:
    profile = Profile.load("ngram", rules=Rules(REGISTRIES))

    changed = profile.replace(spec={"max": 4}, load={"device": "cpu"}, name="mine")

    assert (changed.name, changed.spec.max, changed.load.device, changed.kv) == ("mine", 4, "cpu", profile.kv)
    assert profile.spec.max == 6
    assert copy.deepcopy(changed) == changed == pickle.loads(pickle.dumps(changed))


def test_reading_a_profile_imports_no_tensors() -> None:
    program = (
        "import sys, kvcli; kvcli.Profile.load('exact')\n"
        "print(*{'torch', 'transformers', 'typer', 'rich'} & set(sys.modules))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_keys_that_a_higher_layer_overrides_are_checked_in_the_table_of_a_method_too(machine: Machine) -> None:
    machine.write("config.toml", "[profiles.mine.spec]\nmethod = 'copy'\nmax = 'x'\nleast = 1\n")

    with pytest.raises(BadConfig) as refused:
        machine.load("mine", sets=["spec.max=3"])

    assert refused.value.lines[0] == '~/conf/config.toml:3:7: profiles.mine.spec.max: "x" is text'


def test_problems_come_in_the_order_of_the_layers(machine: Machine) -> None:
    machine.write("config.toml", "[profiles.mine]\nspec.least = 'x'\nspec.method = 'copy'\n")

    with pytest.raises(BadConfig) as refused:
        machine.load("mine", sets=["kv.dtype=x"], environ={"KVCLI_SAMPLE__SEED": "-1"})

    assert refused.value.message == "3 problems in 1 file, env KVCLI_SAMPLE__SEED and --set"
