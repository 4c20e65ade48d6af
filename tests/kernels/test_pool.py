"""What the native kernels ask of the system: memory, which may be refused, and threads, which a fork leaves behind."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcli.engine.engine import run, run_to_end
from kvcli.engine.forward_request import Draft, ForwardRequest, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import install_kernels, wrap_lm
from kvcli.engine.resources import use_threads
from kvcli.engine.sequence.sampler import Sampler
from kvcli.kernels import native as built
from kvcli.kernels.linear import linear, pack
from kvcli.kernels.native import build
from tests import make
from tests.families import build as family

pytestmark = pytest.mark.skipif(not built.levels(), reason=built.why_not() or "unknown")


TASKS = "/proc/self/task"  # a process's threads, on Linux


@pytest.fixture(scope="module")
def scarce(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A library whose allocator refuses as it is told."""
    pytest.importorskip("ziglang", reason="the compiler; comes with the dev extra")
    (machine, system), best = build.here(), built.levels()[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(build.LEVELS, machine, {best: build.LEVELS[machine][best]})
        flags = ["-include", str(Path(__file__).with_name("scarce.h"))]
        made = build.build(tmp_path_factory.mktemp("scarce"), machine, system, build.compiler(), flags)
    return ctypes.CDLL(str(made))


@pytest.fixture
def one_thread_after() -> Iterator[None]:
    yield
    use_threads(1)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("dtype", "quant"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")])
def test_memory_that_is_refused_is_an_error_and_nothing_is_lost(
    dtype: str, quant: str, threads: int, scarce: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
):
    functions = built.Native(scarce, built.levels()[-1])
    functions.use_threads(threads)
    monkeypatch.setattr(built, "native", lambda level=None: functions)
    lm = wrap_lm(family("qwen3", getattr(torch, dtype)), quant=quant)
    install_kernels(lm)
    kv = make.dense(lm)
    (made,) = run(
        [ForwardRequest(lm, Rows.chain(list(range(20)), 0), kv, want=[0])]
    )  # more than many kernels do at once
    for layer, fresh in made.fresh.items():
        kv.append(layer, fresh.k, fresh.v, 0)
    counts = {name: ctypes.c_int.in_dll(scarce, name) for name in ("requests", "refused")}

    def logits() -> Tensor:
        functions.release()  # what is kept between calls asks for nothing
        counts["requests"].value = 0
        rows = Rows.build(3, 20, Draft([5, 7, 7, 9, *range(20)], [-1, 0, -1, 2, *range(-1, 19)]))
        (made,) = run([ForwardRequest(lm, rows, kv, want=range(25))])
        return made.logits

    wanted = logits()
    n = counts["requests"].value
    assert n > 10
    for at in range(1, n + 1):
        counts["refused"].value = at
        with pytest.raises(MemoryError, match="native kernel"):
            logits()
        assert counts["requests"].value == at  # nothing goes on behind it
    counts["refused"].value = 0
    assert torch.equal(logits(), wanted)


def test_threads_that_compute_at_once_share_nothing_they_work_in():
    """And one gives back what is kept all the while."""
    functions = built.native()
    assert functions is not None
    lms = [wrap_lm(family("qwen3", torch.bfloat16), quant=quant) for quant in ("none", "int8")]
    over = Event()

    def logits(lm: LM, at: int) -> Tensor:
        kv = make.dense(lm)
        (made,) = run([ForwardRequest(lm, Rows.chain([(at + i) % lm.vocab for i in range(600)], 0), kv, want=[599])])
        return made.logits

    def give_back() -> None:
        while not over.is_set():
            functions.release()

    for lm in lms:
        install_kernels(lm)
    jobs = [(lm, at) for lm in lms for at in range(4)]
    wanted = [logits(*job) for job in jobs]
    busy = Thread(target=give_back)
    busy.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(3):
                assert all(map(torch.equal, pool.map(lambda job: logits(*job), jobs), wanted))
    finally:
        over.set()
        busy.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_computes_and_so_does_its_parent(one_thread_after: None):
    functions = built.native()
    assert functions is not None
    x, packed, over = torch.randn(40, 64), pack(torch.randn(640, 64)), Event()
    wanted = linear(x, packed, None, 640)
    use_threads(3)

    def computes(threads: int) -> bool:
        functions.use_threads(threads)
        return torch.equal(linear(x, packed, None, 640), wanted)

    def child() -> int:
        """Born, most often, while another thread has the pool."""
        if pid := os.fork():
            return pid
        signal.alarm(30)  # what waits for a thread that is not there waits for ever
        is_right = torch.equal(linear(x, packed, None, 640), wanted) and computes(1) and computes(3)
        os._exit(not (is_right and len(os.listdir(TASKS)) == 3 if os.path.isdir(TASKS) else is_right))

    def work() -> None:
        while not over.is_set():
            linear(x, packed, None, 640)

    busy = Thread(target=work)
    busy.start()
    try:
        for _ in range(9):
            assert os.waitpid(child(), 0)[1] == 0
        assert computes(2)
    finally:
        over.set()
        busy.join()


@pytest.mark.parametrize("is_prompt", [False, True])
def test_torch_computes_alone_beside_the_pool_but_for_prompts(is_prompt: bool, monkeypatch: pytest.MonkeyPatch):
    """Its threads spin behind what they shared, on the cores that the pool's next job needs."""
    lm = wrap_lm(family("llama", torch.bfloat16))
    install_kernels(lm)
    seen: list[int] = []
    draw, straight = Sampler.__call__, lm.direct_forward
    assert straight is not None

    def passed(*args: Any) -> Tensor:
        seen.append(torch.get_num_threads())
        return straight(*args)

    def drawn(self: Sampler, *args: Any) -> Tensor:
        seen.append(torch.get_num_threads())
        return draw(self, *args)

    monkeypatch.setattr(lm, "direct_forward", passed)
    monkeypatch.setattr(Sampler, "__call__", drawn)
    torch.set_num_threads(3)
    try:
        text = make.session(lm)
        run_to_end(text.read([1, 2, 3]))
        if not is_prompt:
            seen.clear()
            run_to_end(text.stream(2))
        assert set(seen) == ({3} if is_prompt else {1})
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


def test_without_native_kernels_torch_keeps_its_threads():
    lm = wrap_lm(family("llama", torch.float64))
    install_kernels(lm)
    assert not lm.has_pool
