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
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvcli.files import private_folder, write_private
from kvcli.render.terminal.terminal import plural
from kvcli.resident_client import ENDS, FORWARDED, peer, short_path

SECONDS = 10.0  # for the rest of a request
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl


class Forked(BaseException):
    """Raised in a forked process, which then leaves the code of its parent and runs a command instead."""

    def __init__(self, connection: socket.socket | None, parent: int) -> None:
        """`connection`: to the client; None = the command is that of the parent."""
        self.connection, self.parent = connection, parent

    def become(self) -> None:
        """Become the client's command: its arguments, variables, folder, streams and signals.

        Ends the process if it cannot; its client then runs the command itself.
        """
        try:
            os.setpgid(0, 0)  # a group in the parent's session, so that the command can be stopped
            ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
            if self.connection is not None:
                with self.connection:
                    request, handles = self._request(self.connection)
                    self._take(request, handles)
                    self.connection.sendall(f"process {os.getpid()}\n".encode())
            else:
                self._take_signals([each for each in ENDS if signal.getsignal(each) is signal.SIG_IGN])
        except (OSError, ValueError):  # the client ended, or its folder cannot be entered
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _request(self, connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
        """Receive the request, with standard streams and folder."""
        connection.settimeout(SECONDS)
        data, (_, handles, _, _) = bytearray(), socket.recv_fds(connection, 1, 4)
        while not data.endswith(b"\n"):
            if not (piece := connection.recv(1 << 16)):
                os._exit(1)
            data += piece
        if os.getppid() != self.parent or len(handles) != 4:  # it may have ended before the line above
            os._exit(1)
        return json.loads(data), handles

    def _take(self, request: dict[str, Any], handles: list[int]) -> None:
        *streams, here = handles
        os.fchdir(here)
        for number, handle in enumerate(streams):
            os.dup2(handle, number)
        for handle in handles:
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
        self._take_signals(request["ignored"])

    def _take_signals(self, ignored: Collection[int]) -> None:
        signal.set_wakeup_fd(-1)
        for each in (*FORWARDED, signal.SIGCHLD):
            usual = signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL
            signal.signal(each, signal.SIG_IGN if each in ignored else usual)


@contextmanager
def listening(folder: Path, about: Mapping[str, Any]) -> Iterator[socket.socket]:
    """Yield a socket in the folder, beside its description; both are removed at the end."""
    owner, file = os.getpid(), private_folder(folder) / f"{os.getpid()}.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        file.unlink(missing_ok=True)
        before = os.umask(0o177)
        with short_path(file) as short:
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
    """The loop of the resident process, which computes nothing and has one thread."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.own = 0  # process of the command of this process; 0 = it ended
        self.status = 0  # exit code of that command
        self.running: dict[int, socket.socket | None] = {}  # process of a command -> its client, if it has one

    def run(self, folder: Path, about: Mapping[str, Any]) -> int:
        """Run the own command in a fork and serve clients until it ends; then wait for the commands that still run.

        Returns the exit code of the own command. Raises Forked in each forked process.
        """
        self._leave_terminal()
        wakes, waker = socket.socketpair()
        wakes.setblocking(False)
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in ENDS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as after nohup
                signal.signal(number, self._hear)
        with listening(folder, about) as listener:
            self.own = self._fork(None)
            while self.own:
                self._serve(wakes, listener)
        if self.running:
            self.tell(f"{plural(len(self.running), 'command')} running: ends after them; Ctrl-C ends them too")
        while self.running:
            self._serve(wakes)
        signal.set_wakeup_fd(-1)
        return self.status

    def _hear(self, _number: int, _frame: object) -> None:
        """End the own command; if that has ended, the others."""
        for process in [self.own] if self.own else self.running:
            _kill(process, signal.SIGINT if self.own else signal.SIGTERM)

    def _serve(self, wakes: socket.socket, listener: socket.socket | None = None) -> None:
        """Wait for a client, a signal or the end of a client, and handle it."""
        clients = {client.fileno(): process for process, client in self.running.items() if client is not None}
        poll = select.poll()
        for handle in clients:
            poll.register(handle, select.POLLRDHUP)
        for each in filter(None, (wakes, listener)):
            poll.register(each, select.POLLIN)
        ready = {handle for handle, _ in poll.poll()}
        with suppress(BlockingIOError):
            wakes.recv(1 << 12)
        for process in (clients[handle] for handle in ready & clients.keys()):  # the client was killed
            self.running[process] = None
            _kill(process, signal.SIGKILL)
        if listener is not None and listener.fileno() in ready:
            client, _ = listener.accept()
            if peer(client)[1] == os.getuid():
                self._fork(client)
            else:
                client.close()
        self._reap()

    def _fork(self, client: socket.socket | None) -> int:
        """Fork a process for the client; None = for the own command."""
        process, own, held = 0, os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDS, signal.SIGCHLD))
        try:
            if not (process := os.fork()):
                for other in filter(None, self.running.values()):
                    other.close()
                raise Forked(client, own)
            if client is not None:
                client.setblocking(False)
            self.running[process] = client
        except OSError as error:  # no memory, or too many processes: the client loads the model itself
            if client is None:
                raise
            client.close()
            self.tell(f"a command was not started: {error.strerror}")
        finally:
            if os.getpid() == own:
                signal.pthread_sigmask(signal.SIG_SETMASK, held)
        return process

    def _reap(self) -> None:
        """Tell the clients about processes that ended or stopped."""
        while self.running:
            process, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if not process:
                return
            is_stopped = os.WIFSTOPPED(status)
            said = "stopped" if is_stopped else f"ended {os.waitstatus_to_exitcode(status)}"
            client = self.running.get(process) if is_stopped else self.running.pop(process, None)
            if process == self.own and not is_stopped:
                self.own, self.status = 0, os.waitstatus_to_exitcode(status)
            if client is not None:
                with suppress(OSError):  # it was killed meanwhile
                    client.send(f"{said}\n".encode())
                if not is_stopped:
                    client.close()

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
