"""Sandbox for this process: it can still compute, and read and write its open files, and nothing else.

Resource limits are set first, the rest after all needed modules are imported. On Linux on x86-64 and aarch64 a filter
then allows the few system calls that computing needs and answers all others with EPERM. It is an allow-list, so calls
that a newer kernel adds are denied as well. A newer libc that needs another call gets an error, never access. Landlock
denies files, TCP and signals once more, on any Linux from 5.13.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

# name -> its number on x86-64 and on aarch64; None where there is none
CALLS: dict[str, tuple[int, int | None]] = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "lseek": (8, 62),
    "close": (3, 57), "fstat": (5, 80), "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216),
    "mprotect": (10, 226), "madvise": (28, 233), "brk": (12, 214), "futex": (202, 98), "sched_yield": (24, 124),
    "membarrier": (324, 283), "getrandom": (318, 278), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, None), "getrusage": (98, 165), "getpid": (39, 172), "gettid": (186, 178),
    "rt_sigreturn": (15, 139), "restart_syscall": (219, 128), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
# machine number in <linux/audit.h>, column in CALLS, and number of seccomp(2)
MACHINES = {"x86_64": (0xC000003E, 0, 317), "aarch64": (0xC00000B7, 1, 277)}
LANDLOCK = 444  # landlock_create_ruleset(2) on every machine; landlock_restrict_self(2) is two further
# number of rights that can be denied, by Landlock version: of files, of TCP, of signals and abstract sockets
RIGHTS: tuple[dict[int, int], ...] = ({1: 13, 2: 14, 3: 15, 5: 16}, {4: 2}, {6: 2})
PDEATHSIG, NO_NEW_PRIVS, SECCOMP_FILTER, TSYNC = 1, 38, 1, 1
ALLOW, DENY = 0x7FFF0000, 0x00050000 | 1  # EPERM


def main(parent: int, limits: dict[str, Any], file: None) -> int:
    """Print the means by which this system sandboxes a process."""
    set_limits(parent, limits)
    print(json.dumps(enter_sandbox()))
    return 0


def set_limits(parent: int, limits: dict[str, Any]) -> None:
    """Limit memory and time, disable core files and end with the parent. Called before any input is read."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before that call
        sys.exit(1)
    # the soft limit's signal tells the parent; a second later the hard limit ends a process that ignores the signal
    cpu = limits["cpu"]
    _limit(resource.RLIMIT_AS, limits["memory"], limits["memory"])
    _limit(resource.RLIMIT_CPU, cpu, cpu + 1)
    _limit(resource.RLIMIT_CORE, 0, 0)
    if limits["wall"]:
        # a living parent kills the process a little earlier
        signal.setitimer(signal.ITIMER_REAL, limits["wall"] + 1)


def preload(*packages: str) -> None:
    """Import every importable module of a package, because code may need any of them later."""
    for package in packages:
        for module in iter_modules(import_module(package).__path__, f"{package}."):
            try:
                import_module(module.name)
            except ImportError:  # a module for another system
                continue


def enter_sandbox() -> list[str]:
    """Enter the sandbox and return the means used: afterwards nothing can be imported or opened."""
    libc, is_linux = ctypes.CDLL(None), sys.platform == "linux"
    if is_linux:
        libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    means = ["landlock"] if is_linux and _landlock(libc) else []
    for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
        _limit(what, 0, 0)  # open files remain open
    return (["seccomp"] if is_linux and _seccomp(libc) else []) + means + ["limits"]


def serve(answered: Callable[[Any], dict[str, Any]]) -> int:
    """Enter the sandbox, then answer each line of JSON on standard input with a line; null tests if it is ready."""
    enter_sandbox()
    for line in sys.stdin.buffer:
        try:
            answer = answered(json.loads(line))
        except MemoryError:
            answer = {"heavy": "it takes too much memory"}
        except RecursionError:
            answer = {"broken": "it calls itself without end"}
        except BaseException as error:  # a panic of a library written in Rust is no Exception
            answer = {"broken": f"{type(error).__name__}: {error}"[:300]}
        sys.stdout.buffer.write(json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        sys.stdout.buffer.flush()
    return 0


def _landlock(libc: Any) -> bool:
    version = libc.syscall(LANDLOCK, None, ctypes.c_size_t(0), 1)
    rights = [max((bits for since, bits in known.items() if since <= version), default=0) for known in RIGHTS]
    asked = struct.pack("3Q", *((1 << bits) - 1 for bits in rights))
    rules = libc.syscall(LANDLOCK, asked, ctypes.c_size_t(len(asked)), 0) if version > 0 else -1
    return rules >= 0 and libc.syscall(LANDLOCK + 2, rules, 0) == 0


def _seccomp(libc: Any) -> bool:
    """Filter the system calls of all threads, including those that a library started."""
    if platform.machine() not in MACHINES or sys.maxsize < 1 << 32:
        return False
    arch, column, call = MACHINES[platform.machine()]
    numbers = [number for pair in CALLS.values() if (number := pair[column]) is not None]
    load, equal, answer = 0x20, 0x15, 0x06  # load a word; compare it; return the verdict
    steps = [(load, 0, 0, 4), (equal, 1, 0, arch), (answer, 0, 0, DENY), (load, 0, 0, 0)]
    # on a match, jump to the last step
    steps += [(equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    steps += [(answer, 0, 0, DENY), (answer, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = struct.pack("HP", len(steps), ctypes.addressof(code))
    return bool(libc.syscall(call, SECCOMP_FILTER, TSYNC, program) == 0)


def _limit(what: int, soft: int, hard: int) -> None:
    most = resource.getrlimit(what)[1]
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(what, (soft, hard))
