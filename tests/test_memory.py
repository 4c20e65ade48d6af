"""The peak is that of this process, whoever started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ASK = "import torch; from kvcli.memory import peak_bytes; print(peak_bytes(torch.device('cpu')))"
LARGE = f"import subprocess, sys; x = b'x' * (1 << 30); subprocess.run([sys.executable, '-c', {ASK!r}], check=True)"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="elsewhere the system is believed")
def test_the_peak_of_a_large_parent_is_not_ours() -> None:
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", LARGE], cwd=root, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    assert 1 << 24 < int(done.stdout) < 1 << 30
