"""Client of a resident model: the process of `kvcli serve` runs this command, with this process's terminal.

Standard library only, because it runs before anything is imported. The resident process forks one process for each
command, which gets the arguments, variables, folder and open streams of this one and runs the same code. This process
passes on signals, and ends as the command ended.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvcli.version import __version__

COMMANDS = {"chat", "summarize"}
SECONDS = 10.0  # for the resident process to start a command
UNREACHABLE = 7  # ExitStatus.ENGINE_UNREACHABLE
# Variables that Python, kvcli's libraries and the C library read once, at their start. A command whose variables differ
# from those of the resident process loads the model itself.
READ_ONCE = (
    *("PYTHON", "LANG", "LC_", "TZ", "HOME", "XDG_CACHE_HOME", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_"),
    *("RAYON_", "TORCH", "PYTORCH_", "ATEN_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "NPY_"),
    *("CUDA_", "NVIDIA_", "TRITON_", "LD_", "MALLOC_", "GLIBC_", "SSL_", "TMPDIR", "BNB_"),
)
NAMES = "SIGINT SIGTERM SIGHUP SIGQUIT SIGWINCH SIGTSTP SIGUSR1 SIGUSR2".split()
FORWARDED = [number for number in signal.Signals if number.name in NAMES]


def folder_of(environ: Mapping[str, str]) -> Path:
    """Return the folder of the sockets of resident processes. Raises OSError without a home folder."""
    if home := environ.get("KVCLI_HOME"):
        return Path(os.path.expanduser(home)).absolute() / "state" / "resident"
    state = Path(environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path(os.path.expanduser("~/.local/state"))) / "kvcli" / "resident"


def facts(argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return what must be the same in the resident process and in a command, as a digest of each."""
    import resource
    from hashlib import blake2b

    packages = [path for path in sys.path if path.endswith("-packages") and os.path.isdir(path)]
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU)
    found: dict[str, Any] = {
        "Python": [sys.executable, sys.version],
        "kvcli": [__version__, __file__],
        "installed packages": [[path, os.stat(path).st_mtime_ns] for path in packages],
        "limits of the shell": [resource.getrlimit(limit) for limit in limits],
        "processors and priority": [sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)],
        "container": [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "net", "pid", "user")],
        "HF_HUB_OFFLINE": "1" if "--offline" in argv else environ.get("HF_HUB_OFFLINE"),
    }
    found = {name: environ[name] for name in environ if name.startswith(READ_ONCE)} | found
    return {name: blake2b(json.dumps(value).encode(), digest_size=8).hexdigest() for name, value in found.items()}


def residents(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the descriptions of the resident processes in a folder, the newest first. Raises OSError."""
    about = os.stat(folder)
    if about.st_uid != os.getuid() or about.st_mode & 0o077:  # another user could take the terminal
        raise PermissionError(f"{folder} is not a private folder of this user")
    for file in sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns, reverse=True):
        with suppress(OSError, ValueError, KeyError):  # it ended meanwhile, or is of another version
            found = json.loads(file.read_text())
            if found["version"] == __version__:
                yield {**found, "pid": int(file.stem), "socket": str(file.with_suffix(".sock"))}


def connect(resident: Mapping[str, Any]) -> socket.socket | None:
    """Return a connection to a resident process of this user; None if it ended. Files of a killed one are removed."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = Path(resident["socket"])
    try:
        with short_path(path) as short:
            connection.connect(short)
        if peer(connection) == (resident["pid"], os.getuid()):
            return connection
    except (FileNotFoundError, ConnectionRefusedError):
        for file in (path, path.with_suffix(".json")):
            file.unlink(missing_ok=True)
    connection.close()
    return None


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield a short path to a socket, which the system limits to 108 bytes."""
    folder = os.open(path.parent, os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(found[:4], sys.byteorder), int.from_bytes(found[4:8], sys.byteorder)


def run_in_resident(argv: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """Run the command line in a resident process and return its exit code; None = run it in this process."""
    is_ours = COMMANDS & {*(argv if argv[:1] and argv[0].startswith("-") else argv[:1])} and "--no-server" not in argv
    if not is_ours or not hasattr(socket, "SO_PEERCRED") or None in (sys.stdin, sys.stdout, sys.stderr):
        return None
    connection = None
    try:
        if not (found := list(residents(folder_of(environ)))):
            return None
        resident = next((each for each in found if {each["model"], each["path"]} & {*argv}), found[0])
        if not (why := _misfit(argv, environ, resident)):
            if (connection := connect(resident)) is None:
                return None
            with connection:
                if (status := _Command(connection, resident, argv).run(environ)) is not None:
                    return status
            why = f"the server of {resident['model']} does not answer"
    except FileNotFoundError:
        return None
    except OSError as error:
        why = str(error)
    if connection is not None or {"-v", "-vv", "--verbose"} & {*argv}:
        sys.stderr.write(f"kvcli.server: this command loads the model itself: {why}\n")
    return None


def _misfit(argv: Sequence[str], environ: Mapping[str, str], resident: Mapping[str, Any]) -> str:
    """Return why the command cannot run in the resident process; "" if it can."""
    if in_background():
        return "it runs in the background of a terminal"
    mine, its = facts(argv, environ), resident["facts"]
    other = sorted(name for name in {*mine, *its} if mine.get(name) != its.get(name))
    return f"{', '.join(other)} differ from those of the server of {resident['model']}" if other else ""


def in_background() -> bool:
    """True if standard input is the terminal of this process, and another program is in its foreground."""
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # no terminal, or not that of this process
        return False


class _Command:
    """A command that runs in a process of the resident one."""

    def __init__(self, connection: socket.socket, resident: Mapping[str, Any], argv: Sequence[str]) -> None:
        self.connection, self.resident, self.argv = connection, resident, argv
        self.process = self.last = 0  # its process, and the last signal that was passed on
        self.restore: Callable[[], None] = lambda: None

    def run(self, environ: Mapping[str, str]) -> int | None:
        ignored = [number for number in FORWARDED if signal.getsignal(number) is signal.SIG_IGN]
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until the process is known that they are meant for
        umask = os.umask(0o077)
        os.umask(umask)
        streams = [(stream.encoding, stream.errors) for stream in (sys.stdin, sys.stdout, sys.stderr)]
        request = {"argv": [*self.argv], "environ": {**environ}, "umask": umask, "ignored": ignored, "streams": streams}
        here = os.open(".", os.O_PATH)
        try:
            socket.send_fds(self.connection, [b"\n"], [0, 1, 2, here])
            self.connection.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            pass  # it ended: nothing is answered
        finally:
            os.close(here)
        self.restore, status = _terminal(), None
        for line in self._lines():
            what, _, number = line.strip().partition(" ")
            if what == "process":
                self.connection.settimeout(None)
                self.process = int(number)
                for each in {*FORWARDED} - {*ignored}:
                    signal.signal(each, self.forward)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            elif what == "stopped":
                self.stop()
            else:
                status = int(number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        return self.lost() if self.process and status is None else status

    def _lines(self) -> Iterator[str]:
        self.connection.settimeout(SECONDS)
        with suppress(OSError):
            yield from self.connection.makefile("r")

    def forward(self, number: int, _frame: object) -> None:
        self.last = number
        with suppress(ProcessLookupError):
            os.killpg(self.process, number)

    def stop(self) -> None:
        """Stop with the command, and let it continue when this process is in the foreground again."""
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(0, signal.SIGTSTP)
        while in_background():  # the command must not read what is typed for another program
            os.kill(0, signal.SIGTTIN)
            time.sleep(0.1)
        signal.signal(signal.SIGTSTP, self.forward)
        self.forward(signal.SIGCONT, None)

    def lost(self) -> int:
        """End by the signal that ended the command, or report that the command was killed."""
        self.restore()
        if self.last not in (0, signal.SIGINT):
            signal.signal(self.last, signal.SIG_DFL)
            os.kill(os.getpid(), self.last)
        said = f"process {self.process} of this command, which the server of {self.resident['model']} began, was killed"
        print_error(self.argv, "server_lost", UNREACHABLE, said, "the same command with --no-server")
        return UNREACHABLE


def print_error(argv: Sequence[str], code: str, status: int, said: str, *try_: str) -> None:
    """Print an error as commands/common/exits.py does, which is not imported here."""
    if "--json" in argv:
        error = {"schema": "kvcli.error/1", "code": code, "exit": status, "message": said, "lines": [], "detail": {}}
        error |= {"try": [*try_]}
        print(json.dumps({"event": "error", "error": error} if "--stream" in argv else error))
    else:
        sys.stderr.write("".join((f"error: {said}\n", *(f"  try: {each}\n" for each in try_))))


def _terminal() -> Callable[[], None]:
    """Return a function that gives the terminal its present settings back; a killed line editor leaves its own."""
    for handle in (0, 1, 2):
        if os.isatty(handle):
            import termios

            settings = termios.tcgetattr(handle)
            return lambda: termios.tcsetattr(handle, termios.TCSADRAIN, settings)
    return lambda: None
