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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvcli.files import private_folder, write_private
from kvcli.resident_client import FORWARDED, peer, short_path

SECONDS = 10.0  # for the rest of a request
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl


class Forked(BaseException):
    """Raised in a forked process, which then leaves the code of its parent and runs a command instead."""

    def __init__(self, connection: socket.socket, parent: int) -> None:
        """`connection`: to the client. `parent`: the process that forked this one."""
        self.connection, self.parent = connection, parent

    def become(self) -> None:
        """Become the client's command: its arguments, variables, folder, streams and signals.

        Ends the process if it cannot; its client then runs the command itself.
        """
        try:
            os.setpgid(0, 0)  # a group in the parent's session, so that the command can be stopped
            end_with_parent(signal.SIGKILL)
            with self.connection:
                request, handles = self._request(self.connection)
                self._take(request, handles)
                self.connection.sendall(f"process {os.getpid()}\n".encode())
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
        signal.set_wakeup_fd(-1)
        for each in (*FORWARDED, signal.SIGCHLD):
            usual = signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL
            signal.signal(each, signal.SIG_IGN if each in request["ignored"] else usual)


def end_with_parent(number: int) -> None:
    """Let the kernel send this process a signal when its parent ends."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, number)


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
    """The loop of a process that computes nothing and has one thread. It ends after its parent, or at SIGTERM."""

    def __init__(self) -> None:
        self.running: dict[int, socket.socket | None] = {}  # process of a command -> its client; None = killed
        self.is_ending = False

    def run(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Serve clients until SIGTERM; then wait for the commands that run. Raises Forked in each forked process."""
        wakes, waker = socket.socketpair()
        wakes.setblocking(False)
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        with listening(folder, about) as listener:
            while not self.is_ending:
                self._serve(wakes, listener)
        while self.running:
            self._serve(wakes)

    def _end(self, _number: int, _frame: object) -> None:
        self.is_ending = True

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
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process, signal.SIGKILL)
        if listener is not None and listener.fileno() in ready:
            client, _ = listener.accept()
            if peer(client)[1] == os.getuid():
                self._fork(client)
            else:
                client.close()
        self._reap()

    def _fork(self, client: socket.socket) -> None:
        server, held = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            if not (process := os.fork()):
                for other in filter(None, self.running.values()):
                    other.close()
                raise Forked(client, server)
            client.setblocking(False)
            self.running[process] = client
        except OSError:  # no memory, or too many processes: the client loads the model itself
            client.close()
        finally:
            if os.getpid() == server:
                signal.pthread_sigmask(signal.SIG_SETMASK, held)

    def _reap(self) -> None:
        """Tell the clients about processes that ended or stopped."""
        while self.running:
            process, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if not process:
                return
            is_stopped = os.WIFSTOPPED(status)
            said = "stopped" if is_stopped else f"ended {os.waitstatus_to_exitcode(status)}"
            client = self.running.get(process) if is_stopped else self.running.pop(process, None)
            if client is not None:
                with suppress(OSError):  # it was killed meanwhile
                    client.send(f"{said}\n".encode())
                if not is_stopped:
                    client.close()
