"""For every test: memory that nobody wrote holds NaN, so that reading it shows; one thread, so that timing does not.

And Ctrl-C is heard by the processes that tests start, also where a shell runs the tests behind `&` and ignores it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests import core, covering

# Triton kernels run in its interpreter here: it asks for this when it is imported, which transformers does
os.environ["TRITON_INTERPRET"] = "1"
# what whoever runs the tests has in a config file, or keeps, is none of theirs
_HOME = tempfile.TemporaryDirectory(prefix="kvcli-tests-")
os.environ["KVCLI_HOME"] = _HOME.name


CPU_SECONDS = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--models", metavar="FOLDER", help="where the GGUF files of tests marked `models` lie")
    parser.addoption("--method", metavar="PACKAGE", help="run the table of exactness for methods of this package")
    parser.addoption("--whole", action="store_true", help="run what tests/core.py leaves to `-m slow` too")
    parser.addoption("--weigh", action="store_true", help="write what each test took to tests/seconds.json")
    parser.addoption("--part", type=core.part_of, metavar="K/N", help="run part K of N, from 0, of the rest too")


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # an ignored signal stays ignored in every child
    covering.WITH_SLOW = "not slow" not in config.option.markexpr
    if config.getoption("--weigh") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(core.Weigher())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the rows of another package's methods where no package is named."""
    return True if collection_path.name == "test_methods_of_a_package.py" and not config.option.method else None


@pytest.hookimpl(tryfirst=True)  # before those that `-m` does not name are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--whole"):
        core.leave_out(items, json.loads(core.SECONDS.read_text(encoding="utf-8")), config.getoption("--part"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[CPU_SECONDS] = core.cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown":
        report.user_properties.append(("cpu", core.cpu_seconds() - item.stash[CPU_SECONDS]))
    return report


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    torch = sys.modules.get("torch")  # tests without torch stay without it
    if torch is None:
        yield
        return
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # this is what makes torch.empty fill with NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _broken_drafts_are_heard(request: pytest.FixtureRequest) -> Iterator[None]:
    """What breaks in a drafter's own passes costs drafts and no text: no test would notice by itself."""
    heard = list[logging.LogRecord]()
    handler, log = logging.Handler(logging.WARNING), logging.getLogger("kvcli.drafts")
    handler.emit = heard.append  # type: ignore[method-assign]
    log.addHandler(handler)
    yield
    log.removeHandler(handler)
    assert not heard or request.node.get_closest_marker("breaks"), heard[0].getMessage()
