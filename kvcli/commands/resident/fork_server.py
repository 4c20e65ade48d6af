"""A process that forks one process for each command of `resident_client`, and tells the client how that ended."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from kvcli.files import private_folder, write_private
from kvcli.resident_client import FORWARDED, at, peer

SECONDS = 10.0  # for a client to send its request
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl
ENDS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class Forked(BaseException):
    """Raised in a forked process, which then leaves the code of its parent and runs a command instead."""

    def __init__(self, connection: socket.socket, parent: int) -> None:
        self.connection, self.parent = connection, parent

    def become(self) -> None:
        """Become the client's command: its arguments, variables, folder, streams and signals."""
        os.setpgid(0, 0)  # a group in the parent's session, so that the command can be stopped
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        request, (*streams, here) = self._request()
        os.fchdir(here)
        for number, handle in enumerate(streams):
            os.dup2(handle, number)
        for handle in (*streams, here):
            os.close(handle)
        os.umask(request["umask"])
        os.environ.clear()
        os.environ.update(request["environ"])
        time.tzset()
        sys.argv[1:] = request["argv"]
        for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
            encoding, errors = request["streams"][number]
            lines = 1 if name == "stderr" else -1
            stream = open(number, mode, lines, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        signal.set_wakeup_fd(-1)
        for each in (*filter(None, FORWARDED), signal.SIGCHLD):
            signal.signal(each, signal.SIG_IGN if each in request["ignored"] else signal.SIG_DFL)
        if signal.SIGINT not in request["ignored"]:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.connection.sendall(f"process {os.getpid()}\n".encode())
        self.connection.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _request(self) -> tuple[dict[str, Any], list[int]]:
        """Receive the request. Ends the process if its client ended, or if its parent did before the line above."""
        self.connection.settimeout(SECONDS)
        data = bytearray()
        try:
            _, handles, _, _ = socket.recv_fds(self.connection, 1, 4)
            while not data.endswith(b"\n"):
                if not (piece := self.connection.recv(1 << 16)):
                    os._exit(1)
                data += piece
        except OSError:
            os._exit(1)
        if os.getppid() != self.parent or len(handles) != 4:
            os._exit(1)
        return json.loads(data), handles


@contextmanager
def listening(folder: Path, about: Mapping[str, Any]) -> Iterator[socket.socket]:
    """Yield a socket in the folder, beside its description; both are removed at the end."""
    owner, file = os.getpid(), private_folder(folder) / f"{os.getpid()}.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        file.unlink(missing_ok=True)
        before = os.umask(0o177)
        with at(file) as short:
            listener.bind(short)
        os.umask(before)
        listener.listen(64)
        write_private(file.with_suffix(".json"), json.dumps(dict(about)))
        yield listener
    finally:
        listener.close()
        if os.getpid() == owner:
            for each in (file, file.with_suffix(".json")):
                each.unlink(missing_ok=True)


class ForkServer:
    """The loop of the resident process. It computes nothing and has one thread."""

    def __init__(self, tell: Callable[[str], None], keep: float | None) -> None:
        """`keep`: seconds without a command after which it ends; None = never."""
        self.tell, self.keep = tell, keep
        self.running: dict[int, socket.socket] = {}  # by the process of the command
        self.ends = 0  # signals to end so far

    def run(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Serve until a signal, or until it was idle for long enough; then wait for the commands that run.

        Raises Forked in each forked process.
        """
        self._leave_terminal()
        wakes, waker = socket.socketpair()
        waker.setblocking(False)
        wakes.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in ENDS:
            signal.signal(number, self._hear)
        with wakes, waker:
            with listening(folder, about) as listener:
                self._loop(wakes, listener)
            self._loop(wakes, None)
            signal.set_wakeup_fd(-1)

    def _hear(self, _number: int, _frame: object) -> None:
        self.ends += 1
        if self.ends == 1 and self.running:
            self.tell(f"ends after {len(self.running)} running commands; once more, to end them too")
        for process in self.running if self.ends > 1 else ():
            _kill(process, signal.SIGTERM)

    def _loop(self, wakes: socket.socket, listener: socket.socket | None) -> None:
        poll = select.poll()
        poll.register(wakes, select.POLLIN)
        if listener is not None:
            poll.register(listener, select.POLLIN)
        for connection in self.running.values():
            poll.register(connection, select.POLLRDHUP)
        used = time.monotonic()
        while self.running or (listener is not None and not self.ends):
            left = None if self.keep is None or self.running else used + self.keep - time.monotonic()
            if listener is None and not self.running:
                return
            if left is not None and left <= 0:
                self.tell("ends: no command used it")
                return
            if self.ends and listener is not None:
                return
            for handle, _ in poll.poll(None if left is None else left * 1000):
                if listener is not None and handle == listener.fileno():
                    if (connection := self._fork(listener)) is not None:
                        poll.register(connection, select.POLLRDHUP)
                elif handle == wakes.fileno():
                    with suppress(BlockingIOError):
                        wakes.recv(4096)
                else:  # the client was killed
                    poll.unregister(handle)
                    for process in [p for p, c in self.running.items() if c.fileno() == handle]:
                        _kill(process, signal.SIGKILL)
            for connection in self._ended():
                with suppress(KeyError):
                    poll.unregister(connection)
                connection.close()
                used = time.monotonic()

    def _fork(self, listener: socket.socket) -> socket.socket | None:
        connection, _ = listener.accept()
        if peer(connection)[1] != os.getuid():
            connection.close()
            return None
        own = os.getpid()
        held = signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDS, signal.SIGCHLD))
        try:
            process = os.fork()
        except OSError as error:  # no memory, or too many processes: the client loads the model itself
            self.tell(f"a command was not started: {error.strerror}")
            connection.close()
            return None
        finally:
            if os.getpid() == own:
                signal.pthread_sigmask(signal.SIG_SETMASK, held)
        if not process:
            raise Forked(connection, own)
        connection.setblocking(False)
        self.running[process] = connection
        return connection

    def _ended(self) -> Iterator[socket.socket]:
        """Tell the clients about processes that ended or stopped; yield the connections of those that ended."""
        while self.running:
            process, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if not process:
                return
            if process not in self.running:
                continue
            is_stopped, connection = os.WIFSTOPPED(status), self.running[process]
            said = "stopped" if is_stopped else f"ended {os.waitstatus_to_exitcode(status)}"
            with suppress(OSError):  # the client is gone
                connection.send(f"{said}\n".encode())
            if not is_stopped:
                del self.running[process]
                yield connection

    @staticmethod
    def _leave_terminal() -> None:
        """Give up the controlling terminal: a command in it would be stopped when it reads from there."""
        import fcntl
        import termios

        if os.getsid(0) != os.getpid():
            with suppress(OSError), open("/dev/tty", "rb", buffering=0) as terminal:
                fcntl.ioctl(terminal, termios.TIOCNOTTY)


def _kill(process: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, number)
        os.killpg(process, signal.SIGCONT)
