"""Each seeded fault can be put in: its line stands once in its file, and the tests that own it are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.faults.__main__ import table_of_faults
from tests.recipes.faults.fault import Fault

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fault", [pytest.param(fault, id=name) for name, fault in table_of_faults().items()])
def test_a_fault_has_its_line_and_its_tests(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    assert fault.old != fault.new
    for test in fault.tests.split():
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8")
