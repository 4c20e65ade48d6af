"""The peak is that of this process, whoever started it; mapped weights leave memory when they are given back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from kvcli.engine.resources import drop_pages

ASK = "import torch; from kvcli.engine.resources import peak_bytes; print(peak_bytes(torch.device('cpu')))"
LARGE = f"import subprocess, sys; x = b'x' * (1 << 30); subprocess.run([sys.executable, '-c', {ASK!r}], check=True)"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="elsewhere the system is believed")
def test_the_peak_of_a_large_parent_is_not_ours() -> None:
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", LARGE], cwd=root, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    assert 1 << 24 < int(done.stdout) < 1 << 30


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can")
def test_a_mapped_tensor_leaves_memory_and_any_other_keeps_its_numbers(tmp_path: Path) -> None:
    n = 16 << 20
    (tmp_path / "weights").write_bytes(b"\1" * n)
    mapped = torch.from_file(str(tmp_path / "weights"), shared=False, size=n, dtype=torch.uint8)
    own = torch.ones(n, dtype=torch.uint8)
    assert int(mapped.sum()) == int(own.sum()) == n
    before = psutil.Process().memory_info().rss
    drop_pages(mapped)
    assert before - psutil.Process().memory_info().rss > n // 2
    drop_pages(own)
    assert int(own.sum()) == n
