"""An OpenAI-compatible server for tests, which breaks in chosen ways."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = ["The well ", "is 40 m ", "deep."]
# `error` of an answer that is no answer, as these servers write it
REFUSALS: dict[str, object] = {
    "400": {"message": "This model's maximum context length is 4096 tokens"},
    "400 after llama-server": {
        "code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 10433, "n_ctx": 4096,
        "message": "request (10433 tokens) exceeds the available context size (4096 tokens), try increasing it",
    },
    "401 after llama-server": {"message": "Invalid API Key", "type": "authentication_error", "code": 401},
    "401 after vLLM": "Unauthorized",
}  # fmt: skip
USAGE = {"prompt_tokens": 31, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 16}}


class Clock:
    """A clock for the client of an engine, which goes on when the engine says so, and then waits for two looks at it:
    one at the begin of a wait, and one that finds out if the wait is over."""

    def __init__(self) -> None:
        self._seconds, self._looks, self._seen = 0.0, 0, threading.Condition()

    def monotonic(self) -> float:
        with self._seen:
            self._looks += 1
            self._seen.notify_all()
            return self._seconds

    def advance(self, seconds: float) -> None:
        with self._seen:
            self._seconds, until = self._seconds + seconds, self._looks + 2
            self._seen.wait_for(lambda: self._looks >= until, timeout=10)


class FakeEngine(ThreadingHTTPServer):
    """Answers as `behaviours` says, one for each chat request, the last one for all later requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.behaviours = ["well"]
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.clock = Clock()
        self.left = threading.Event()  # a client hung up
        self.three = threading.Barrier(3, timeout=10)  # of answers at the same time
        self.models: list[dict[str, Any]] = [{"id": "tiny", "owned_by": "vllm", "max_model_len": 4096}]
        self.metrics = ""


class _Handler(BaseHTTPRequestHandler):
    server: FakeEngine

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, body: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.server.keys.append(self.headers["Authorization"])
            self._answer(200, self.server.metrics)
        elif self.path == "/v1/models":
            self._answer(200, json.dumps({"object": "list", "data": self.server.models}))
        else:
            self._answer(404, "not found")

    def do_POST(self) -> None:
        server = self.server
        server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        server.keys.append(self.headers["Authorization"])
        how = server.behaviours.pop(0) if len(server.behaviours) > 1 else server.behaviours[0]
        status, _, after = how.partition(" after ")
        if status.isdecimal():
            said = REFUSALS.get(how, {"message": f"no; key {self.headers['Authorization']}"})
            headers = {"Retry_After": after} if after.isdecimal() else {}
            self._answer(int(status), json.dumps({"error": said}), **headers)
            return
        if how == "reset":
            self.connection.close()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        if how == "torn":
            self.send_header("Content-Length", "100000")
        if how == "not zipped":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        try:
            self._stream(how)
        except OSError:
            server.left.set()
        self.close_connection = True

    def _stream(self, how: str) -> None:
        if how == "garbage":
            return self._line("data: <html>it works</html>")
        if how == "deep":
            return self._line("data: " + "[" * 100_000)
        if how == "silent":
            self.rfile.read(1)  # until the client hangs up
            self.server.left.set()
            return None
        if how == "together":
            self.server.three.wait()
        if how == "comments":
            for i in range(8):
                self.server.clock.advance(0.15)
                self._line(f": read {i} of 8")
        if how == "endless":
            while True:
                self._data({"content": "word "})
                time.sleep(0.02)
        if how == "long":
            while True:
                self.wfile.write(b"x" * (1 << 20))
        if how == "separators":
            self._line('data: {"choices": [{"delta": {"content": "a\u2028b\x85c "}}]}')
        if how == "halves":
            self._line(r'data: {"choices": [{"delta": {"content": "\udc00\ud83d"}}]}')
            self._line(r'data: {"choices": [{"delta": {"content": "\ude00 "}}]}')
        if how == "thinks":
            self._data({"reasoning_content": "hmm, "})
            self._data({"reasoning_content": "wells"})
        for i, word in enumerate(WORDS):
            self._data({"content": word})
            if how in ("dropped", "torn") and i == 1:
                return None
            if how == "stalls" and i == 1:
                self.server.left.wait(5)
            if how == "fails" and i == 1:
                return self._line('data: {"error": {"message": "out of memory", "code": 500}}')
        self._line(
            "data: " + json.dumps({"choices": [{"delta": {}, "finish_reason": "length" if how == "cut" else "stop"}]})
        )
        details = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}
        told = {"completion_tokens_details": details} if how == "counts" else {}
        times = {"timings": {"kv_bytes": 4096}} if how == "counts" else {}
        self._line("data: " + json.dumps({"choices": [], "usage": USAGE | told, **times}))
        return self._line("data: [DONE]")

    def _data(self, delta: dict[str, str]) -> None:
        self._line("data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}))

    def _line(self, text: str) -> None:
        self.wfile.write(f"{text}\n\n".encode())
        self.wfile.flush()


@contextmanager
def fake_engine() -> Iterator[FakeEngine]:
    """Run the server in a thread."""
    server = FakeEngine()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    with fake_engine() as running:
        print(running.url, flush=True)
        while True:
            running.behaviours = [input()]
