"""The core has all functions but the dearest, few cases of dear ones, and all that is marked; parts share the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.core import Weigher, is_in_part, leave_out, part_of


@dataclass
class Case:
    nodeid: str
    marks: set[str] = field(default_factory=set)

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def add_marker(self, mark: Any) -> None:
        self.marks.add(mark.name)


def core_of(cases: list[Any], seconds: dict[str, float], part: tuple[int, int] | None = None) -> list[str]:
    leave_out(cases, seconds, part)
    return [case.nodeid for case in cases if "slow" not in case.marks]


def test_cheap_functions_are_in_it_whole() -> None:
    cases = [Case(f"a.py::cheap[{n}]") for n in range(50)]
    assert core_of(cases, {"a.py::dear": 1.0}) == [case.nodeid for case in cases]


@pytest.mark.parametrize(("seconds", "left"), [(0.05, 9), (0.125, 4), (0.25, 2), (0.5, 1), (2.0, 1), (2.5, 0)])
def test_dear_functions_have_half_a_second_each_or_one_case(seconds: float, left: int) -> None:
    cases = [Case(f"a.py::{name}[{a}-{b}]") for name in ("one", "two") for a in "xyz" for b in "rst"]
    core = core_of(cases, {"a.py::one": seconds, "a.py::two": seconds})
    assert [sum(name in case for case in core) for name in ("one", "two")] == [left, left]
    words = [nodeid.partition("[")[2].rstrip("]").split("-") for nodeid in core if "one" in nodeid]
    assert all(len({word[at] for word in words}) == min(left, 3) for at in (0, 1))


def test_pinned_cases_stay_whatever_they_take() -> None:
    cases = [Case("a.py::dear[x]", {"core"}), Case("a.py::dear[y]"), Case("a.py::long[x]", {"slow"})]
    assert core_of(cases, {"a.py::dear": 60.0, "a.py::long": 0.1}) == ["a.py::dear[x]"]


def test_each_test_is_in_one_part() -> None:
    cases = [f"a.py::some[{n}]" for n in range(3000)]
    parts = [{case for case in cases if is_in_part(case, (n, 30))} for n in range(30)]
    assert sorted(case for part in parts for case in part) == sorted(cases)
    assert all(60 < len(part) < 140 for part in parts)


def test_all_parts_run_all_that_the_core_leaves_out() -> None:
    names = [f"a.py::dear[{n}]" for n in range(60)]
    of = [{*core_of([Case(name) for name in names], {"a.py::dear": 0.25}, (part, 10))} for part in range(10)]
    assert len(set.intersection(*of)) == 2
    assert len(set.union(*of)) == 60


def test_what_was_weighed_is_kept_beside_what_was_not(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "seconds.json"
    file.write_text('{"a.py::old": 3.0, "a.py::now_cheap": 2.0}')
    monkeypatch.setattr("tests.core.SECONDS", file)
    weigher = Weigher()
    for nodeid, seconds in (
        ("a.py::new[1]", 0.2),
        ("a.py::new[2]", 9.0),
        ("a.py::new[3]", 0.4),
        ("a.py::now_cheap", 0.01),
    ):
        report: Any = pytest.TestReport(
            nodeid, ("a.py", 1, ""), {}, "passed", None, "teardown", user_properties=[("cpu", seconds)]
        )
        weigher.pytest_runtest_logreport(report)
    weigher.pytest_sessionfinish()
    assert file.read_text().split() == ["{", '"a.py::new":', "0.4,", '"a.py::old":', "3.0", "}"]


@pytest.mark.parametrize("text", ["3", "3/3", "-1/3", "a/b", "1/2/3", ""])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    assert part_of("2/3") == (2, 3)
    with pytest.raises(ValueError, match="no part"):
        part_of(text)
