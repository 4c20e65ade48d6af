"""The harness of measurements, and the list of results in docs/benchmarks."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest

from docs.benchmarks import changes
from kvcli.kernels import native
from tests.bench import harness
from tests.bench.harness import ROOT, Floats, Ints, Rows, Words, in_turns, measurement, once

RUN = runpy.run_path(str(ROOT / "docs" / "benchmarks" / "run.py"))


@measurement("{n} rows", note="of {kinds}", columns=["at", "squared"])
def counted(
    n: Annotated[int, "rows"] = 2,
    kinds: Words = ("a", "b"),
    factors: Floats = (1.0,),
    sizes: Ints = (),
    is_odd: bool = False,
    is_even: bool = True,
    name: str | None = None,
) -> Rows:
    for at in range(n):
        yield {"at": at, "squared": once(f"square {at}", lambda at=at: at * at), "kinds": list(kinds), "sizes": sizes}
    return {"more": [is_odd, is_even, name, list(factors)]}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "refuse_unbuilt", lambda: None)


def ran(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        counted.main(words)
    return int(caught.value.code or 0)


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_options_are_parameters_and_the_json_stands_on_the_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out.json"
    words = "--n 3 --kinds x,y --factors 0.5,2.0 --sizes 1,2 --is-odd --no-is-even --name me".split()
    assert ran(*words, "--out", str(out)) == 0
    found = last_line(capsys)
    assert found == json.loads(out.read_text())
    assert [row["squared"] for row in found["rows"]] == [0, 1, 4]
    assert (found["title"], found["note"]) == ("3 rows", "of x, y")
    assert found["more"] == [True, False, "me", [0.5, 2.0]]
    assert found["command"].split(" ", 2)[2] == " ".join(words)
    assert (found["rows"][0]["kinds"], found["rows"][0]["sizes"]) == (["x", "y"], [1, 2])
    assert {"cpu", "cores", "backend", "torch", "commit"} <= found["environment"].keys()


def test_the_command_names_what_is_not_the_default(capsys: pytest.CaptureFixture[str]):
    ran("--sizes", "", "--n", "2")
    assert last_line(capsys)["command"] == "python tests/bench/test_harness.py"


def test_an_interrupted_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    kept, made = tmp_path / "kept.jsonl", []
    known = harness.Known.of

    def of(self: Any, key: str, make: Any) -> Any:
        def interrupted() -> Any:
            if len(made) == 2:
                raise KeyboardInterrupt
            made.append(key)
            return make()

        return known(self, key, interrupted)

    monkeypatch.setattr(harness.Known, "of", of)
    with pytest.raises(KeyboardInterrupt):
        counted.main(["--n", "3", "--resume", str(kept)])
    kept.write_text(kept.read_text() + '["square 2", 4', encoding="utf-8")  # as a process that is killed leaves it
    monkeypatch.setattr(harness.Known, "of", known)
    capsys.readouterr()
    ran("--n", "3", "--resume", str(kept))
    assert [row["squared"] for row in last_line(capsys)["rows"]] == [0, 1, 4]
    assert made == ["square 0", "square 1"]


def test_another_side_begins_each_time_and_warm_ups_are_dropped():
    order: list[str] = []
    found = in_turns({name: lambda name=name: order.append(name) or len(order) for name in "abc"}, 2, 1)
    assert "".join(order) == "abcbcacab"
    assert found == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}


def test_a_checkout_without_built_kernels_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch):
    from kvcli.bench.run import refuse_unbuilt

    monkeypatch.setattr(harness, "refuse_unbuilt", refuse_unbuilt)
    monkeypatch.setattr(native, "is_unbuilt", lambda: True)
    monkeypatch.setattr(native, "remedy", lambda: "build them")
    with pytest.raises(SystemExit, match="try: build them"):
        counted.main([])


def test_a_wrong_result_ends_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    wrong = harness.Measurement(counted.function, "", "", (), "", False, lambda rows: False)
    with pytest.raises(SystemExit) as caught:
        wrong.main(["--n", "1"])
    assert caught.value.code == 1


def test_a_name_that_is_not_known_ends_the_program():
    with pytest.raises(SystemExit, match="'c'; there are a, b"):
        harness.picked(["a", "c"], ["a", "b"])


# ---- results ----


def test_every_result_has_a_command():
    assert {path.stem for path in (ROOT / "docs" / "benchmarks").glob("*.json")} == RUN["RESULTS"].keys()


@pytest.mark.parametrize("name", [n for n, words in RUN["RESULTS"].items() if "tests/bench/" in words])
def test_every_command_is_understood(name: str):
    """Options of a script, as the command has them, stand in its source or its help."""
    words = RUN["RESULTS"][name].split()
    text = (ROOT / words[1]).read_text(encoding="utf-8")
    flags = {word.partition("=")[0].removeprefix("--") for word in words[2:] if word.startswith("--")}
    assert [f for f in flags if not re.search(rf'\b{f.replace("-", "_")}: |"--{f}"', text)] == []


def test_stale_results_are_found_by_their_commits():
    text = '{"environment": {"commit": "0123abc"}, "note": "Commit 1111111, 2222222.", "machine": "commit 3333333+"}'
    assert RUN["commits_in"](text) == {"0123abc", "1111111", "2222222", "3333333"}
    assert not RUN["is_in_history"]("0123456789")


def shapes(text: str, is_python: bool = True) -> list[tuple[str, ...]]:
    return sorted((changes._python if is_python else changes._c)(text))


def test_names_and_comments_are_no_change_of_code_and_numbers_are():
    before = 'def double(it):\n    """It, twice."""\n    return it * 2  # two\n\n\nx = 1\n'
    assert shapes(before) == shapes("def twice(value):\n    return value * 2\n")
    assert shapes(before) != shapes(before.replace("* 2", "* 3"))
    c = "/* twice */\nint f(int a) {\n    return a * 2;\n}\n"
    assert shapes(c, False) == shapes("int g(int it) {\n    return it * 2; // 2\n}\n", False)
    assert shapes(c, False) != shapes(c.replace("2;", "3;"), False)


def test_nothing_has_changed_since_this_commit():
    assert changes.share_changed("HEAD", ("docs",)) > 0.9  # which no package had
    assert changes.share_changed("HEAD", ("kernels",)) == 0


def test_every_measurement_says_what_it_takes():
    """The programs that use the harness print their help; one process for all, as each imports torch."""
    names = [p.stem for p in (ROOT / "tests" / "bench").glob("*.py") if "\n@measurement(" in p.read_text()]
    assert len(names) > 40
    code = """
import sys
from importlib import import_module
from tests.bench.harness import Measurement
for name in sys.argv[1:]:
    for one in vars(import_module(f"tests.bench.{name}")).values():
        if isinstance(one, Measurement):
            assert "--resume FILE" in one.parser().format_help(), name
            one.title.format(**vars(one.parser().parse_args([])))
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    names.remove("test_harness")
    done = subprocess.run([sys.executable, "-c", code, *names], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
