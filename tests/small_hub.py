"""A hub of one model on this machine, over HTTP: what huggingface_hub asks, answered from a folder."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40


class Hub(ThreadingHTTPServer):
    """`cut`: the file whose first answer breaks off; `wrong`: one whose last byte is another."""

    def __init__(self, folder: Path, cut: str = "", wrong: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.cut, self.wrong = cut, wrong

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name, files = self.path.partition("?")[0].rpartition("/")[2], self.server.files
        if "/tree/" in self.path:
            self.send(json.dumps([_entry(name, content) for name, content in files.items()]).encode())
        elif self.path.startswith("/api/models/"):
            self.send(json.dumps({"id": "x/y", "sha": COMMIT, "siblings": [{"rfilename": n} for n in files]}).encode())
        elif name in files:
            self.send_file(name, files[name])
        else:
            self.send(b"", 404)

    def send_file(self, name: str, content: bytes) -> None:
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if name == self.server.wrong:
            content = content[:-1] + bytes([content[-1] ^ 1])
        is_cut = name == self.server.cut and self.command == "GET"
        self.server.cut = "" if is_cut else self.server.cut
        self.send(content, most=len(content) // 2 if is_cut else len(content), **headers)

    def send(self, body: bytes, status: int = 200, most: int = 1 << 30, **headers: str) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:most])


def _entry(name: str, content: bytes) -> dict[str, object]:
    lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 1}
    return {"type": "file", "path": name, "size": len(content), "oid": "0" * 40, "lfs": lfs}


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
