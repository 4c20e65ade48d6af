"""Methods of other packages are chosen, checked and refused as ours are, and break nothing that does not name them."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from operator import attrgetter, methodcaller, neg
from pathlib import Path

import pytest
import tomli

from kvcli.commands.common.exits import report_bug
from kvcli.errors import BadConfig
from kvcli.settings import schema
from kvcli.settings.profile import Profile
from kvcli.settings.schema import METHOD_TABLES
from tests.fakes import Machine

ROOT = Path(__file__).parents[1]
MINE = """
from dataclasses import dataclass
from typing import Annotated
from kvcli.policies.scoring.topk import TopK
from kvcli.settings.schema import Range

@dataclass(frozen=True)
class Mine(TopK):
    '''Keep the newest half.'''

    by = 'its age'
    weight: Annotated[int, Range(1, 9)] = 3  # of nothing

    def score(self, s, at):
        return s.pos.float()
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """Put a package of one module beside those that are installed."""

    def put(module: str, points: str) -> Path:
        (tmp_path / "my_package.py").write_text(module)
        about = tmp_path / "my_package-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[kvcli.methods]\n{points}\n")
        monkeypatch.syspath_prepend(tmp_path)
        forget()
        return tmp_path

    def forget() -> None:
        for found in (schema.registries, schema.foreign, schema._ours, schema._others):
            found.cache_clear()

    yield put
    sys.modules.pop("my_package", None)
    monkeypatch.undo()
    forget()


def test_the_usual_method_of_a_table_is_its_first() -> None:
    for table, (_, usual) in METHOD_TABLES.items():
        assert next(iter(schema.registries()[table])) == usual


NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?%?")
OURS = {(table, name): t for table, all in schema.registries().items() for name, t in all.items() if t[:6] == "kvcli."}


@pytest.mark.parametrize(("table", "name"), OURS)
def test_a_method_names_its_paper_and_a_figure_of_ours_that_its_source_has(table: str, name: str) -> None:
    module, _, cls = OURS[table, name].partition(":")
    first, *others = inspect.cleandoc(vars(getattr(import_module(module), cls))["__doc__"]).split("\n\n")
    named = first.partition(": ")[0]
    paper = re.search(r"\b20(\d\d), arXiv (\d\d)\d\d\.\d{5}", named)
    assert paper or "kvcli's own" in named
    assert not paper or paper[1] == paper[2]
    if "Not measured here" in first:
        return
    sentence, page = re.fullmatch(r"(.+) \((measurements/[\w-]+\.md)\)\.", others[0]).groups()
    figures = set(NUMBER.findall(sentence))
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    assert figures
    assert any(figures <= set(NUMBER.findall(line)) for line in lines), figures


def test_a_checkout_and_what_is_installed_have_the_same_methods() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    try:
        points = metadata.distribution("kvcli").entry_points.select(group=schema.GROUP)
    except metadata.PackageNotFoundError:
        pytest.skip("a bare checkout: nothing is installed to compare with")
    assert {point.name: point.value for point in points} == project["entry-points"][schema.GROUP]


def test_a_method_of_another_package_is_a_table_of_a_profile(install: Callable[[str, str], Path]) -> None:
    install(MINE, "policy.mine = my_package:Mine")
    exact = Profile.load("exact")
    assert "my_package" not in sys.modules
    profile = exact.replace(exactness="approx", policy={"name": "mine", "weight": 4})
    assert (profile.policy.weight, profile.policy.method) == (4, "mine")
    assert (profile.foreign, exact.foreign) == (['policy.name = "mine" is code of my-package 1.0'], [])
    with pytest.raises(BadConfig) as refused:
        exact.replace(exactness="approx", policy={"name": "mine", "weight": 10})
    assert "a whole number from 1 to 9" in "\n".join(refused.value.lines)
    with pytest.raises(BadConfig) as refused:
        exact.replace(exactness="approx", policy={"name": "mien"})
    assert 'did you mean "mine"?' in "\n".join(refused.value.lines)


@pytest.mark.parametrize(
    ("module", "says"),
    [("1 / 0", "division by zero"), ("", "no attribute 'Mine'"), ("Mine = 3", "my_package:Mine is no dataclass")],
)
def test_one_that_cannot_be_loaded_breaks_only_profiles_that_name_it(
    install: Callable[[str, str], Path], module: str, says: str
) -> None:
    install(module, "policy.mine = my_package:Mine")
    exact = Profile.load("exact").replace(exactness="approx")
    with pytest.raises(BadConfig) as refused:
        exact.replace(policy={"name": "window", "weight": 1})  # a key that no method of ours has
    assert "my_package" not in sys.modules
    with pytest.raises(BadConfig) as refused:
        exact.replace(policy={"name": "mine"})
    told = "\n".join(refused.value.lines)
    assert '"mine" of my-package 1.0 cannot be loaded' in told
    assert says in told


@pytest.mark.parametrize(
    ("use", "package"),
    [
        (attrgetter("by"), "my-package 1.0"),  # kvcli asks for what the class lacks
        (methodcaller("score", None, None), "my-package 1.0"),  # code of the package
        (methodcaller("room_new", ""), "my-package 1.0"),  # inherited code of kvcli
        (neg, None),
    ],
)
def test_an_internal_error_names_the_package_whose_code_was_used(
    install: Callable[[str, str], Path], tmp_path: Path, use: Callable[[object], object], package: str | None
) -> None:
    install(MINE.replace("by = 'its age'", ""), "policy.mine = my_package:Mine")
    policy = {"name": "mine", "keep_new": 128, "grow_new": 256}
    mine = Profile.load("exact").replace(exactness="approx", policy=policy).policy.settings
    world = Machine(tmp_path).world()
    with pytest.raises((AttributeError, TypeError)) as raised:
        use(mine)
    raised.value.__traceback__ = raised.tb.tb_next  # without the frame of this test, which has the policy
    assert report_bug(world, ["--json"], raised.value) == 1
    told = json.loads(world.stdout.stream.text)
    assert (told["code"], told["detail"]["package"]) == ("internal", package)
    assert f"report it to {package}" in told["try"] or not package


def test_none_takes_the_place_of_ours_and_none_has_a_table_of_its_own(install: Callable[[str, str], Path]) -> None:
    install(MINE, "policy.snap = my_package:Mine\nweather.mine = my_package:Mine\nmine = my_package:Mine")
    assert schema.registries()["policy"]["snap"].startswith("kvcli.")
    assert Profile.load("exact").hash


def test_another_name_for_one_of_ours_makes_ours_no_code_of_others(install: Callable[[str, str], Path]) -> None:
    install(MINE, "policy.mine = kvcli.methods.policies.snapkv:Snap")
    exact = Profile.load("exact").replace(exactness="approx")
    assert exact.replace(policy={"name": "snap"}).foreign == []


def test_the_command_names_it_and_lists_it(install: Callable[[str, str], Path]) -> None:
    folder = install(MINE, "policy.mine = my_package:Mine\npolicy.broken = nowhere:Mine")
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); from kvcli.__main__ import main; main()"

    def run(*told: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code, *told], capture_output=True, text=True, check=False)

    assert run("--help").returncode == 0
    answer = run("chat", "demo", "-p", "hello", "-n", "4", "--set", "exactness=approx", "--set", "policy.name=mine")
    assert answer.returncode == 0, answer.stderr
    assert 'policy.name = "mine" is code of my-package 1.0' in answer.stderr
    shown = run("profiles", "show", "exact", "--set", "exactness=approx", "--set", "policy.name=mine", "--json")
    assert '"policy.weight": 3' in shown.stdout, shown.stderr
    broken = run("profiles", "show", "exact", "--set", "exactness=approx", "--set", "policy.name=broken")
    assert broken.returncode == 9
    assert "of my-package 1.0 cannot be loaded: No module named 'nowhere'" in " ".join(broken.stderr.split())
    assert "Traceback" not in broken.stderr
