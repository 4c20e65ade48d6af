"""For every test: memory that nobody wrote holds NaN, so that reading it shows; one thread, so that timing does not.

And Ctrl-C is heard by the processes that tests start, also where a shell runs the tests behind `&` and ignores it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest

# Triton kernels run in its interpreter here: it asks for this when it is imported, which transformers does
os.environ["TRITON_INTERPRET"] = "1"
# what whoever runs the tests has in a config file, or keeps, is none of theirs
_HOME = tempfile.TemporaryDirectory(prefix="kvcli-tests-")
os.environ["KVCLI_HOME"] = _HOME.name


def pytest_configure() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # an ignored signal stays ignored in every child


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--models", metavar="FOLDER", help="where the GGUF files of tests marked `models` lie")


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
    """What breaks in a drafter's own passes costs guesses and no text: no test would notice by itself."""
    heard = list[logging.LogRecord]()
    handler, log = logging.Handler(logging.WARNING), logging.getLogger("kvcli.drafts")
    handler.emit = heard.append  # type: ignore[method-assign]
    log.addHandler(handler)
    yield
    log.removeHandler(handler)
    assert not heard or request.node.get_closest_marker("breaks"), heard[0].getMessage()
