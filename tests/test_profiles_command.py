"""`kvcli profiles`: what each of its commands prints, writes and exits with."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcli.cli import run
from kvcli.environment import Environment, Paths
from kvcli.schemas.listings import ProfilesDocument
from kvcli.settings.config import builtin_files
from tests.fakes import Machine

SHIPPED = [file.profile for file in builtin_files()]


class Shell:
    """Runs command lines in a home of its own."""

    def __init__(self, root: Path) -> None:
        self.home, self.environ = root, {"HOME": str(root), "KVCLI_HOME": str(root / "kv")}
        self.config = root / "kv" / "config"
        self.config.mkdir(parents=True)
        self.out = self.err = ""

    def __call__(self, *args: str) -> int:
        out, err = io.StringIO(), io.StringIO()
        paths = Paths.of(self.environ)
        world = Environment(io.StringIO(), out, err, dict(self.environ), cwd=self.home, paths=paths)
        status = run(["profiles", *args], world)
        self.out, self.err = out.getvalue(), err.getvalue()
        return status


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_list_names_every_profile_and_marks_the_default(shell: Shell) -> None:
    mine = "[profiles.mine]\nextends = ['exact', 'fafo-paper']\n[profiles.bad]\nx = 1\n"
    (shell.config / "config.toml").write_text(mine + "[profiles.long]\npurpose = 'long texts'")

    assert shell("list") == 0

    rows = [line.split("  ")[0] for line in shell.out.splitlines()]
    assert sorted(rows) == sorted(["profile", *SHIPPED, "bad", "mine", "long"])
    assert rows[:3] == ["profile", "bad", "mine"]  # the user's own, then by purpose: none is handed down
    assert rows.index("exact") < rows.index("lean") < rows.index("long") < rows.index("snap")
    assert rows[-4:] == ["fafo-paper", "fastgen-paper", "lazy-paper", "specextend-paper"]
    assert "has problems: kvcli profiles check bad" in shell.out
    assert "exact, fafo-paper" in shell.out
    assert shell.err == ""


def test_list_in_json_and_plain(shell: Shell) -> None:
    assert shell("list", "--json") == 0
    document = json.loads(shell.out)
    assert (document["schema"], document["default"]) == ("kvcli.profiles/2", "ngram")
    listed = [(p["name"], p["extends"], p["problems"]) for p in document["profiles"]]
    assert sorted(name for name, _, _ in listed) == sorted(SHIPPED)
    assert listed[-1][0] == "specextend-paper"
    assert ("exact", [], []) in listed
    assert ("ngram", ["exact"], []) in listed

    assert shell("list", "--plain") == 0
    rows = [line.split("\t")[:5] for line in shell.out.splitlines()]
    assert ["exact", "same text", "exact", "", "-"] in rows
    assert ["ngram", "same text", "exact", "default", "exact"] in rows


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_list_fits_the_terminal_with_every_word_in_it(machine: Machine, width: int) -> None:
    machine.environ["COLUMNS"] = str(width)
    lines = machine("profiles", "list", tty=("stdout",)).out.splitlines()
    assert max(map(len, lines)) < width
    (at,) = (i for i, line in enumerate(lines) if line.startswith("lean"))
    assert ("extends" in lines[0], "for" in lines[0]) == (width >= 80, width >= 80)
    words = " ".join(lines[at : at + 6]).split()
    assert [
        word for word in "4-bit keys, 2-bit values: under a quarter of the memory".split() if word not in words
    ] == []


def test_show_with_origins(shell: Shell) -> None:
    shell.environ["KVCLI_SPEC__MAX"] = "6"

    assert shell("show", "ngram", "--origin", "--plain", "--set", "load.dtype=fp16") == 0

    rows = dict(line.split("\t", 1) for line in shell.out.splitlines())
    assert rows["spec.method"] == '"ngram"\tbuilt-in ngram'
    assert rows["spec.max"] == "6\tenv KVCLI_SPEC__MAX"
    assert rows["load.dtype"] == '"fp16"\t--set'
    assert rows["sample.temperature"] == "from the model\tdefault"


def test_what_show_prints_is_a_profile_again(shell: Shell) -> None:
    shell("show", "ngram", "--set", "spec.max=5", "--set", "sample.top_p=0.5")
    (shell.config / "profiles").mkdir()
    (shell.config / "profiles" / "kept.toml").write_text(shell.out)

    assert shell("diff", "kept", "ngram", "--plain") == 0

    assert shell.out.splitlines() == ["key\tkept\tngram", "spec.max\t5\t15", "sample.top_p\t0.5\tfrom the model"]


def test_show_without_a_name_is_what_chat_would_use(shell: Shell) -> None:
    assert shell("show", "--json") == 0
    assert json.loads(shell.out)["profiles"][0]["name"] == "ngram"
    shell.environ["KVCLI_PROFILE"] = "exact"
    assert shell("show", "--json") == 0
    profile = json.loads(shell.out)["profiles"][0]
    assert (profile["name"], profile["values"]["spec.method"], profile["origins"]["spec.method"]) == (
        "exact",
        "off",
        "built-in exact",
    )


def test_diff_leaves_the_environment_out(shell: Shell) -> None:
    shell.environ["KVCLI_SPEC__METHOD"] = "off"

    assert shell("diff", "exact", "ngram", "--json") == 0
    changes = {change["key"]: (change["a"], change["b"]) for change in json.loads(shell.out)["differences"]}
    assert changes["spec.method"] == ("off", "ngram")
    assert changes["spec.max"] == (None, 15)

    assert shell("diff", "exact", "exact") == 0
    assert shell.out == "exact and exact have the same settings\n"


def test_new_writes_a_sound_file_once(shell: Shell) -> None:
    path = shell.config / "profiles" / "mine.toml"

    assert shell("new", "mine", "--extends", "exact") == 0
    assert shell.out == "~/kv/config/profiles/mine.toml\n"
    written = path.read_text()
    assert shell("check", "mine") == 0
    assert shell("diff", "mine", "exact") == 0
    assert shell.out == "mine and exact have the same settings\n"

    assert shell("new", "mine") == 3
    assert "[bad_input]" in shell.err
    assert path.read_text() == written


def test_new_on_a_full_disk_leaves_nothing_and_works_when_there_is_room(shell: Shell, monkeypatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        assert shell("new", "mine") == 3
    assert "mine.toml: No space left" in shell.err
    assert [p for p in shell.config.rglob("*") if p.is_file()] == []
    assert shell("new", "mine") == 0
    assert shell("check", "mine") == 0


def test_what_a_killed_run_left_goes_with_the_next_command(shell: Shell) -> None:
    left = [folder / ".kvcli-abc.part" for folder in (shell.config, shell.home / "kv" / "data" / "chats")]
    for file in left:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("what somebody said")
    assert shell("list") == 0
    assert [file.exists() for file in left] == [False, False]


def test_every_line_that_new_comments_out_can_be_used(shell: Shell) -> None:
    assert shell("new", "mine", "-o", "-") == 0
    lines = [
        line.removeprefix("# ") if " = " in line and "..." not in line else line for line in shell.out.splitlines()
    ]
    target = shell.home / "mine.toml"
    target.write_text("\n".join(lines))

    assert shell("check", str(target)) == 0
    assert shell.out == "no problems in mine\n"
    assert shell("diff", "mine", "ngram", "--config", str(target)) == 0
    assert shell.out == "mine and ngram have the same settings\n"


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["new", "../mine"], 2, "is not a profile name"),
        (["new", "exact"], 3, 'there is a profile "exact" already'),
        (["new", "mine", "-o", "there.toml"], 3, "there.toml exists already"),
        (["new", "mine", "--extends", "exakt"], 9, 'did you mean "exact"?'),
        (["show", "exakt"], 9, 'did you mean "exact"?'),
        (["diff", "exact", "exakt"], 9, 'did you mean "exact"?'),
        (["check", "exakt"], 9, 'did you mean "exact"?'),
        (["check", "no.toml"], 9, "cannot be read"),
        (["show", "exact", "--set", "kv.dtyp=1"], 9, 'did you mean "kv.dtype"?'),
    ],
)
def test_what_is_refused(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, args: list[str], status: int, said: str
) -> None:
    monkeypatch.chdir(shell.home)
    (shell.home / "there.toml").write_text("kept")

    assert shell(*args) == status

    assert said in " ".join(shell.err.split())
    assert (shell.home / "there.toml").read_text() == "kept"
    assert not (shell.config / "profiles").exists()


def test_check_finds_all_problems_of_all_files(shell: Shell) -> None:
    (shell.config / "config.toml").write_text(
        "default_profile = 'no'\n[profiles.mine]\nkv.dtype = 'x'\nextends = 'b'\n"
    )
    (shell.config / "profiles").mkdir()
    (shell.config / "profiles" / "b.toml").write_text("[sample]\ntop_k = 'x'\n")
    (shell.config / "profiles" / "broken.toml").write_text("[")

    assert shell("check") == 9

    assert "4 problems in 3 files" in shell.err
    assert "~/kv/config/config.toml:3:12: profiles.mine.kv.dtype" in shell.err
    assert shell.out == ""


def test_check_in_json_lists_the_problems(shell: Shell) -> None:
    (shell.config / "config.toml").write_text("[profiles.mine]\nkv.dtype = 'x'\n")

    assert shell("check", "--json") == 9

    error = json.loads(shell.out)
    assert (error["schema"], error["code"], error["exit"]) == ("kvcli.error/1", "bad_config", 9)
    assert [(p["line"], p["column"], p["key"]) for p in error["detail"]["problems"]] == [
        (2, 12, "profiles.mine.kv.dtype")
    ]


def test_check_of_one_file_keeps_to_that_file(shell: Shell) -> None:
    (shell.config / "config.toml").write_text("[profiles.mine]\nkv.dtype = 'x'\n")
    other = shell.home / "other.toml"
    other.write_text("[profiles.other]\nextends = 'ngram'\n")

    assert shell("check", str(other)) == 0
    assert shell("check", "other.toml") == 0
    assert shell("check", str(shell.config / "config.toml")) == 9


def test_check_of_a_project_file_knows_its_limits(shell: Shell) -> None:
    project = shell.home / "cloned" / ".kvcli.toml"
    project.parent.mkdir()
    project.write_text("[profiles.mine.load]\ntrust_remote_code = true\n")

    assert shell("check", str(project)) == 9
    assert "a project file may not set this" in " ".join(shell.err.split())


@pytest.mark.parametrize(
    "args", [["list"], ["show", "ngram"], ["diff", "exact", "ngram"], ["check", "ngram"], ["new", "mine"]]
)
def test_json_fits_its_schema(args: list[str], tmp_path: Path) -> None:
    environ = {**os.environ, "KVCLI_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "kvcli", "profiles", *args, "--json"]
    done = subprocess.run(command, capture_output=True, env=environ, cwd=Path(__file__).parents[1], check=True)
    document = json.loads(done.stdout)
    assert document["schema"] == "kvcli.profiles/2"
    ProfilesDocument.model_validate(document)
