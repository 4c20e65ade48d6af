"""Every kind of mistake in settings: its place to the column, its words, its exit code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvcli.errors import BadConfig, ExitStatus, KvcliError
from kvcli.settings.config import CONFIG_KEYS, builtin_files
from kvcli.settings.profile import Conflict, Profile, Rules, Sources, load_profile
from kvcli.settings.renamed import FORMER
from kvcli.settings.resolve import method_class
from kvcli.settings.schema import ORDER, TABLES, Top, registries
from kvcli.settings.values import keys_of


@dataclass(frozen=True)
class Off:
    """Nothing."""


@dataclass(frozen=True)
class Copy:
    """Copy from the text."""

    max: int = 6  # rows
    least: int = 2  # tokens

    def __post_init__(self) -> None:
        if self.max < 1:
            raise ValueError(f"max = {self.max} must be at least 1")


SHIPPED = [file.profile for file in builtin_files()]
REGISTRIES = {
    "prune": {"none": "kvcli.methods.prune.no_pruning:NoPruning"},
    "reuse": {"none": "kvcli.methods.reuse.prefix_only:PrefixOnly"},
    "kv_format": {"kivi": "kvcli.kv.formats.kivi:Kivi"},
    "prefix_cache": {"none": "kvcli.prefix_cache.codec:Uncompressed"},
    "policy": {"none": "kvcli.methods.policies.keep_all:KeepAll"},
    "sparse": {"none": "kvcli.kv.sparse.settings:FullAttention"},
    "spec": {"off": f"{__name__}:Off", "copy": f"{__name__}:Copy", "ngram": f"{__name__}:Copy"},
    "reasoning_steps": {"none": "kvcli.methods.steps.no_steps:NoSteps"},
    "decode": {"none": "kvcli.methods.decode.no_forks:NoForks"},
}


def failing(folder: Path, config: str | bytes = b"", **given: Any) -> BadConfig:
    """The error of loading profile `mine` with this config file; the user's folder is `folder`."""
    (folder / "config.toml").write_bytes(config.encode() if isinstance(config, str) else config)
    sources = Sources(user=folder, home=folder, environ=given.pop("environ", {}))
    with pytest.raises(BadConfig) as caught:
        load_profile(given.pop("name", "mine"), sources=sources, rules=given.pop("rules", Rules(REGISTRIES)), **given)
    assert caught.value.exit == ExitStatus.BAD_CONFIG == 9
    assert caught.value.code == "bad_config"
    return caught.value


KV_KEYS = "keys of kv: dtype, k_bits, v_bits, group, residual, sinks, split_codes, rotate"
NAMES = (
    "tables: load, prefill, prune, reuse, kv, kv_format, memory, prefix_cache, policy, sparse, spec, "
    "reasoning_steps, decode, sample, thinking, context"
)

# Each: what stands in config.toml, and the three lines expected for it.
IN_FILE = {
    "unknown key": (
        "[profiles.mine.spec]\nmethod = 'copy'\nmx = 3",
        ["~/config.toml:3:1: profiles.mine.spec.mx: unknown key", "    3 | mx = 3", '      | ^ did you mean "max"?'],
    ),
    "unknown key, nothing near": (
        "[profiles.mine.kv]\nwheel = 3",
        [
            "~/config.toml:2:1: profiles.mine.kv.wheel: unknown key",
            "    2 | wheel = 3",
            f"      | ^ {KV_KEYS}",
        ],
    ),
    "unknown table": (
        "[profiles.mine.smaple]\ntop_k = 3",
        [
            "~/config.toml:1:16: profiles.mine.smaple: unknown key",
            "    1 | [profiles.mine.smaple]",
            '      |                ^ did you mean "sample"?',
        ],
    ),
    "unknown and empty table": (
        "[profiles.mine.kvv]",
        [
            "~/config.toml:1:16: profiles.mine.kvv: unknown key",
            "    1 | [profiles.mine.kvv]",
            '      |                ^ did you mean "kv"?',
        ],
    ),
    "unknown key at the top": (
        "defualt_profile = 'mine'\n[profiles.mine]",
        [
            "~/config.toml:1:1: defualt_profile: unknown key",
            "    1 | defualt_profile = 'mine'",
            '      | ^ did you mean "default_profile"?',
        ],
    ),
    "a profile's table at the top": (
        "[profiles.mine]\n[kv]\ndtype = 'fp16'",
        [
            "~/config.toml:2:2: kv: unknown key",
            "    2 | [kv]",
            "      |  ^ settings belong in a profile: [profiles.NAME.kv]",
        ],
    ),
    "wrong type": (
        "[profiles.mine]\nprefill = { chunk = 'big' }",
        [
            "~/config.toml:2:21: profiles.mine.prefill.chunk: \"big\" is text",
            "    2 | prefill = { chunk = 'big' }",
            "      |                     ^ use a whole number from 1",
        ],
    ),
    "true is no number": (
        "[profiles.mine.sample]\ntemperature = true",
        [
            "~/config.toml:2:15: profiles.mine.sample.temperature: true is a true/false value",
            "    2 | temperature = true",
            "      |               ^ use a number from 0",
        ],
    ),
    "nan": (
        "[profiles.mine.sample]\ntop_p = nan",
        [
            "~/config.toml:2:9: profiles.mine.sample.top_p: nan is not allowed",
            "    2 | top_p = nan",
            "      |         ^ use a number above 0 and at most 1",
        ],
    ),
    "out of range": (
        "[profiles.mine.load]\nthreads = -1",
        [
            "~/config.toml:2:11: profiles.mine.load.threads: -1 is not allowed",
            "    2 | threads = -1",
            "      |           ^ use a whole number from 0",
        ],
    ),
    "wrong word": (
        "[profiles.mine]\nkv.dtype = 'bf17'  # é",
        [
            '~/config.toml:2:12: profiles.mine.kv.dtype: "bf17" is not allowed',
            "    2 | kv.dtype = 'bf17'  # é",
            '      |            ^ use "auto", "bf16", "fp16" or "fp32"; did you mean "bf16"?',
        ],
    ),
    "wrong form": (
        "[profiles.mine.load]\ndevice = 'cuda:one'",
        [
            '~/config.toml:2:10: profiles.mine.load.device: "cuda:one" is not allowed',
            "    2 | device = 'cuda:one'",
            '      |          ^ use "auto", "cpu", "cuda", "cuda:N" or "mps"',
        ],
    ),
    "a table in place of a value": (
        "[profiles.mine.prefill.chunk]\nsize = 3",
        [
            "~/config.toml:1:24: profiles.mine.prefill.chunk: {size = 3} is a table",
            "    1 | [profiles.mine.prefill.chunk]",
            "      |                        ^ use a whole number from 1",
        ],
    ),
    "a value in place of a table": (
        "[profiles.mine]\nkv = 3",
        [
            "~/config.toml:2:6: profiles.mine.kv: 3 is a whole number",
            "    2 | kv = 3",
            "      |      ^ kv is a table: write kv.KEY",
        ],
    ),
    "unknown method": (
        "[profiles.mine.spec]\nmethod = 'cpoy'",
        [
            '~/config.toml:2:10: profiles.mine.spec.method: "cpoy" is not allowed',
            "    2 | method = 'cpoy'",
            '      |          ^ use "off", "copy" or "ngram"; did you mean "copy"?',
        ],
    ),
    "key of a method that is not chosen": (
        "[profiles.mine]\nextends = 'exact'\nspec.max = 3",
        [
            "~/config.toml:3:6: profiles.mine.spec.max: unknown key",
            "    3 | spec.max = 3",
            '      |      ^ a key of spec.method = "copy" or "ngram", but "off" is chosen',
        ],
    ),
    "key of a method that is left behind": (
        "[profiles.b.spec]\nmethod = 'copy'\nmx = 3\n[profiles.mine]\nextends = 'b'\nspec.method = 'off'",
        ["~/config.toml:3:1: profiles.b.spec.mx: unknown key", "    3 | mx = 3", '      | ^ did you mean "max"?'],
    ),
    "what the method itself refuses": (
        "[profiles.mine.spec]\nmethod = 'copy'\nleast = 1\nmax = 0",
        ["~/config.toml:4:7: profiles.mine.spec.max: max = 0 must be at least 1", "    4 | max = 0", "      |       ^"],
    ),
    "extends of a wrong type": (
        "[profiles.mine]\nextends = 3",
        [
            "~/config.toml:2:11: profiles.mine.extends: 3 is a whole number",
            "    2 | extends = 3",
            "      |           ^ use text or a list of text",
        ],
    ),
    "extends of an unknown profile": (
        "[profiles.mine]\nextends = ['exact', 'ngarm']",
        [
            '~/config.toml:2:11: profiles.mine.extends: no profile is called "ngarm"',
            "    2 | extends = ['exact', 'ngarm']",
            '      |           ^ did you mean "ngram"?',
        ],
    ),
    "cycle": (
        "[profiles.mine]\nextends = 'b'\n[profiles.b]\nextends = ['exact', 'mine']",
        [
            "~/config.toml:4:11: profiles.b.extends: profiles extend each other in a circle",
            "    4 | extends = ['exact', 'mine']",
            "      |           ^ mine -> b -> mine",
        ],
    ),
    "depth": (
        "profiles.mine.extends = 'p1'\n"
        + "".join(f"profiles.p{i}.extends = 'p{i + 1}'\n" for i in range(1, 9))
        + "[profiles.p9]",
        [
            "~/config.toml:9:23: profiles.p8.extends: goes more than 8 profiles deep",
            "    9 | profiles.p8.extends = 'p9'",
            "      |                       ^ mine -> p1 -> p2 -> p3 -> p4 -> p5 -> p6 -> p7 -> p8 -> p9",
        ],
    ),
    "a built-in profile redefined": (
        "[profiles.exact]\nkv.dtype = 'fp16'",
        [
            '~/config.toml:1:11: profiles.exact: "exact" is built in and cannot be redefined',
            "    1 | [profiles.exact]",
            '      |           ^ choose another name, and write extends = "exact"',
        ],
    ),
    "a name that could be a path": (
        "[profiles.'../mine']",
        [
            "~/config.toml:1:11: profiles.../mine: not a profile name",
            "    1 | [profiles.'../mine']",
            "      |           ^ use letters, digits, dots, - and _",
        ],
    ),
    "another version": (
        "schema = 2\n[profiles.mine]",
        ["~/config.toml:1:10: schema: 2 is not allowed", "    1 | schema = 2", "      |          ^ use 1"],
    ),
    "wrong key of a model": (
        "[models.big]\npth = 'x'\n[profiles.mine]",
        ["~/config.toml:2:1: models.big.pth: unknown key", "    2 | pth = 'x'", '      | ^ did you mean "path"?'],
    ),
    "profiles is no table": (
        "profiles = 3",
        [
            "~/config.toml:1:1: profiles: 3 is a whole number",
            "    1 | profiles = 3",
            "      | ^ write [profiles.NAME]",
        ],
    ),
    "syntax": (
        "[profiles.mine\nkv.dtype = 1",
        [
            "~/config.toml:1:15: not valid TOML: expected ']' at the end of a table declaration",
            "    1 | [profiles.mine",
            "      |               ^",
        ],
    ),
    "end of file": (
        'a = "',
        ["~/config.toml:1:6: not valid TOML: unterminated string", '    1 | a = "', "      |      ^"],
    ),
    "duplicate key": (
        "[profiles.mine.kv]\ndtype = 'fp16'\n\"dtype\" = 'bf16'",
        [
            "~/config.toml:3:1: profiles.mine.kv.dtype: given twice",
            "    3 | \"dtype\" = 'bf16'",
            "      | ^ first given on line 2",
        ],
    ),
    "duplicate table": (
        "[profiles.mine]\n[profiles.mine]",
        [
            "~/config.toml:2:11: profiles.mine: given twice",
            "    2 | [profiles.mine]",
            "      |           ^ first given on line 1",
        ],
    ),
    "not UTF-8": (
        b"[profiles.mine]\ndescription = '\xe9'",
        [
            "~/config.toml:2:16: byte 0xe9 is not UTF-8 text",
            "    2 | description = '\N{REPLACEMENT CHARACTER}'",
            "      |                ^ save the file as UTF-8",
        ],
    ),
    "wide characters before it": (
        "[profiles.mine]\nload = { \"日本\" = 1 }",
        [
            "~/config.toml:2:10: profiles.mine.load.日本: unknown key",
            '    2 | load = { "日本" = 1 }',
            "      |          ^ keys of load: quant, adapters, dtype, device, layers_on_gpu, experts_on_gpu,"
            " embeddings, head, threads, allow_pickle, trust_remote_code, verify, graphs",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", IN_FILE)
def test_a_problem_names_its_line_and_what_to_write(tmp_path: Path, kind: str) -> None:
    config, expected = IN_FILE[kind]

    error = failing(tmp_path, config)

    assert list(error.lines)[: len(expected)] == expected
    assert error.message == "1 problem in 1 file"
    problem = error.detail["problems"][0]  # type: ignore[index]
    where = expected[0].split(": ")[0]
    assert where == f"{problem['source']}:{problem['line']}:{problem['column']}"


TYPED = {
    "--set of an unknown key": (
        {"sets": ["kv.dtyp=fp16"]},
        "--set",
        ["--set: kv.dtyp: unknown key", "      | kv.dtyp=fp16", f'      | ^ did you mean "kv.dtype"? {KV_KEYS}'],
    ),
    "--set of a key without its table": (
        {"sets": ["chunk=5"]},
        "--set",
        [
            "--set: chunk: unknown key",
            "      | chunk=5",
            f"      | ^ did you mean prefill.chunk? {NAMES}",
        ],
    ),
    "--set of a wrong type": (
        {"sets": ["sample.temperature=0,7"]},
        "--set",
        [
            '--set: sample.temperature: "0,7" is text',
            "      | sample.temperature=0,7",
            "      |                    ^ use a number from 0",
        ],
    ),
    "--set without a value": (
        {"sets": ["kv.dtype"]},
        "--set",
        ["--set: not KEY=VALUE", "      | kv.dtype", "      | ^ write it like --set sample.temperature=0.7"],
    ),
    "--set of what is no setting": (
        {"sets": ["extends=ngram"]},
        "--set",
        [
            "--set: extends: unknown key",
            "      | extends=ngram",
            f'      | ^ did you mean "exactness"? {NAMES}',
        ],
    ),
    "environment of a wrong type": (
        {"environ": {"KVCLI_PREFILL__CHUNK": "many"}},
        "env KVCLI_PREFILL__CHUNK",
        [
            'env KVCLI_PREFILL__CHUNK: prefill.chunk: "many" is text',
            "      | KVCLI_PREFILL__CHUNK=many",
            "      |                      ^ use a whole number from 1",
        ],
    ),
    "environment of an unknown key": (
        {"environ": {"KVCLI_KV__DTYP": "fp16"}},
        "env KVCLI_KV__DTYP",
        [
            "env KVCLI_KV__DTYP: kv.dtyp: unknown key",
            "      | KVCLI_KV__DTYP=fp16",
            f'      | ^ did you mean "kv.dtype"? {KV_KEYS}',
        ],
    ),
    "flag": (
        {"flags": {"load.device": ("gpu", "--device")}},
        "--device",
        [
            '--device: load.device: "gpu" is not allowed',
            '      | --device "gpu"',
            '      |          ^ use "auto", "cpu", "cuda", "cuda:N" or "mps"',
        ],
    ),
}


@pytest.mark.parametrize("kind", TYPED)
def test_a_problem_of_something_typed_shows_it(tmp_path: Path, kind: str) -> None:
    given, source, expected = TYPED[kind]

    error = failing(tmp_path, name="exact", **given)

    assert list(error.lines) == expected
    assert error.message == f"1 problem in {source}"


def test_all_problems_come_at_once_in_the_order_of_their_lines(tmp_path: Path) -> None:
    config = "[profiles.mine]\nexactness = 'exat'\n[profiles.mine.sample]\ntop_p = 2\n[profiles.mine.kv]\nbits = 4\n"

    error = failing(tmp_path, config, sets=["load.threads=x"], environ={"KVCLI_LOAD__VERIFY": "maybe"})

    assert error.message == "5 problems in 1 file, env KVCLI_LOAD__VERIFY and --set"
    assert [line.split(":")[1] for line in error.lines if line.startswith("~")] == ["2", "4", "6"]


def test_overridden_values_are_checked_too(tmp_path: Path) -> None:
    error = failing(tmp_path, "[profiles.mine]\nkv.dtype = 'int1'\n", sets=["kv.dtype=fp16"])

    assert error.lines[0] == '~/config.toml:2:12: profiles.mine.kv.dtype: "int1" is not allowed'


@pytest.mark.parametrize(
    ("name", "environ", "config", "said"),
    [
        ("ngarm", {}, "", 'did you mean "ngram"?'),
        ("zzz", {}, "[profiles.mine]", f"profiles: {', '.join(sorted([*SHIPPED, 'mine']))}"),
        (None, {"KVCLI_PROFILE": "zzz"}, "", "from KVCLI_PROFILE in the environment"),
        (None, {}, "default_profile = 'ngarm'", '~/config.toml:1:19: default_profile: no profile is called "ngarm"'),
        (
            None,
            {},
            "[models.demo]\nprofile = 'zzz'",
            '~/config.toml:2:11: models.demo.profile: no profile is called "zzz"',
        ),
    ],
)
def test_an_unknown_profile_names_the_known_ones(
    tmp_path: Path, name: str | None, environ: dict[str, str], config: str, said: str
) -> None:
    error = failing(tmp_path, config, name=name, environ=environ)

    assert said in error.lines


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "profiles" / "mine.toml").mkdir(parents=True)

    assert failing(tmp_path).lines == ("~/profiles/mine.toml: is a folder, not a file",)


def test_a_config_file_asked_for_has_to_exist(tmp_path: Path) -> None:
    with pytest.raises(KvcliError) as caught:
        load_profile("exact", sources=Sources(config=tmp_path / "no.toml", home=tmp_path), rules=Rules(REGISTRIES))

    assert caught.value.lines == ("~/no.toml: cannot be read: No such file or directory",)


def _certain(profile: Profile) -> list[Conflict]:
    """A made-up rule: 16-bit storage changes the text."""
    if profile.exactness == "exact" and profile.kv.dtype == "fp16":
        return [Conflict("exactness", "kv.dtype", '"exact" is impossible', "which changes the output")]
    return []


CLASHES = {
    "both in one file": (
        "[profiles.mine]\nexactness = 'exact'\nkv.dtype = 'fp16'",
        [],
        [
            '~/config.toml:2:1: profiles.mine.exactness: "exact" is impossible',
            "    2 | exactness = 'exact'",
            "      | ^ but line 3 sets kv.dtype, which changes the output",
        ],
    ),
    "with --set": (
        "[profiles.mine]\nexactness = 'exact'",
        ["kv.dtype=fp16"],
        [
            '~/config.toml:2:1: profiles.mine.exactness: "exact" is impossible',
            "    2 | exactness = 'exact'",
            "      | ^ but --set sets kv.dtype, which changes the output",
        ],
    ),
    "with a promise nobody wrote": (
        "[profiles.mine]\nkv.dtype = 'fp16'",
        [],
        [
            '~/config.toml:2:4: profiles.mine.kv.dtype: exactness: "exact" is impossible',
            "    2 | kv.dtype = 'fp16'",
            "      |    ^ which changes the output",
        ],
    ),
}


@pytest.mark.parametrize("kind", CLASHES)
def test_a_clash_names_both_lines(tmp_path: Path, kind: str) -> None:
    config, sets, expected = CLASHES[kind]

    assert list(failing(tmp_path, config, sets=sets, rules=Rules(REGISTRIES, _certain)).lines) == expected


def test_a_copy_with_other_settings_is_checked_as_well() -> None:
    profile = load_profile("exact", rules=Rules(REGISTRIES, _certain))

    with pytest.raises(BadConfig) as caught:
        profile.replace(kv={"dtype": "fp16"})

    assert caught.value.lines[-1].endswith("but replace() sets kv.dtype, which changes the output")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("memory.ladder=[]", "memory.fallbacks"),
        ("recall.every=8", "sparse.selection_interval"),
        ("form.rope=after", "kv_format.rope"),
        ("keep.codec=none", "prefix_cache.codec"),
        ("steps={}", "reasoning_steps"),
    ],
)
def test_a_former_name_is_refused_with_the_present_one(old: str, new: str) -> None:
    with pytest.raises(BadConfig) as refused:
        load_profile("exact", sets=[old])
    assert f"its name is {new} now" in str(refused.value) + "".join(refused.value.lines)


def test_the_present_name_of_each_setting_is_a_setting() -> None:
    known = {*ORDER, *CONFIG_KEYS, *keys_of(Top)} | {
        f"{table}.{key}"
        for table in ORDER
        for schema in ([TABLES[table]] if table in TABLES else map(method_class, registries()[table].values()))
        for key in keys_of(schema)
    }
    settings = {old: new for old, new in FORMER.items() if old[0] not in "-/"}
    assert len(settings) > 20
    assert set(settings.values()) <= known
    assert not set(settings) & known
