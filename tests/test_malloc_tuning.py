"""What is freed while a prompt is read goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

HELD = """
import contextlib, sys, torch
from kvcli.environment import LargeBlocks

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

torch.ones(7 << 20)  # 28 MiB: from here on glibc has smaller blocks in one heap
blocks_of = LargeBlocks()
reading = blocks_of.returned()
if sys.argv[1] == "two reading":
    reading.__enter__()
    with blocks_of.returned():
        pass  # another ends first
with blocks_of.returned() if sys.argv[1] == "reading" else contextlib.nullcontext():
    blocks = [torch.ones(2 << 20) for _ in range(8)]
    later = [torch.ones(1000) for _ in range(100)]  # behind them
    before = resident()
    del blocks
    print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another library makes the blocks")
def test_freed_blocks_leave_no_holes_while_a_prompt_is_read():
    def given_back(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", HELD, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert given_back("reading") > 60 << 20
    assert given_back("two reading") > 60 << 20
    assert given_back("usual") < 30 << 20
