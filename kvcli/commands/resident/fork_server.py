"""A process that forks one process for each command of `resident_client`."""

from __future__ import annotations

import ctypes
import json
import os
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

    def __init__(self, connection: socket.socket) -> None:
        """`connection`: to the client."""
        self.connection = connection

    def become(self) -> None:
        """Become the client's command: its arguments, variables, folder, streams and signals.

        Ends the process if it cannot; its client then runs the command itself.
        """
        import fcntl  # not on Windows

        try:
            os.setpgid(0, 0)  # a group in the parent's session, so that the command can be stopped
            self._take(*self._request(self.connection))
            # if the client is killed, the kernel kills this group
            fcntl.fcntl(self.connection, fcntl.F_SETOWN, -os.getpid())
            fcntl.fcntl(self.connection, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(self.connection, fcntl.F_SETFL, os.O_ASYNC)
            self.connection.sendall(f"process {os.getpid()}\n".encode())
        except (OSError, ValueError):  # the client ended, or its folder cannot be entered
            os._exit(1)

    def tell_end(self, status: int) -> None:
        """Tell the client how the command ended; it ends after this process."""
        self.connection.sendall(f"ended {status}\n".encode())

    def _stop(self, *_: object) -> None:
        """Stop together with the client, which lets this process continue."""
        self.connection.sendall(b"stopped\n")
        os.kill(0, signal.SIGSTOP)

    def _request(self, connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
        """Receive the request, with standard streams and folder."""
        connection.settimeout(SECONDS)
        data, (_, handles, _, _) = bytearray(), socket.recv_fds(connection, 1, 4)
        while not data.endswith(b"\n"):
            if not (piece := connection.recv(1 << 16)):
                os._exit(1)
            data += piece
        if len(handles) != 4:
            os._exit(1)
        connection.settimeout(None)
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
        usual: dict[int, Any] = dict.fromkeys((*FORWARDED, signal.SIGCHLD), signal.SIG_DFL)
        usual |= {signal.SIGINT: signal.default_int_handler, signal.SIGTSTP: self._stop}
        for each, act in usual.items():
            signal.signal(each, signal.SIG_IGN if each in request["ignored"] else act)


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


def serve_commands(folder: Path, about: Mapping[str, Any]) -> None:
    """Fork a process for each client until SIGTERM, or until the parent of this process ends. Raises Forked in each.

    This process computes nothing and has one thread. Commands that run outlive it.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGTERM)
    if os.getppid() != about["server"]:  # it ended before the line above
        return
    signal.signal(signal.SIGCHLD, _reap)
    with suppress(SystemExit), listening(folder, about) as listener:
        while True:
            client, _ = listener.accept()
            with suppress(OSError):  # no memory, or too many processes: the client loads the model itself
                if peer(client)[1] == os.getuid() and not os.fork():
                    raise Forked(client)
            client.close()


def _reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
