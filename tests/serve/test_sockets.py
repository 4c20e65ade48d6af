"""The server over real sockets: official clients, hostile ones, a thousand connections, and hours in short.

Clients of other packages run in the Python that KVCLI_CLIENTS names, or in this one; a missing package skips its test.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.parrot import parrot
from tests.serve.test_protocols import HOW, SAYS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("KVCLI_CLIENTS", sys.executable)
GOOD = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
ENDLESS = {"ignore_eos": True, "stop_loops": 0, "temperature": 1, "max_tokens": 6000}


class Server:
    """`kvcli serve demo` in a process of its own."""

    def __init__(self, *options: str, model: str = "demo") -> None:
        run = [sys.executable, "-m", "kvcli", "serve", model, "--port", "0", "--json", *options]
        self.process = subprocess.Popen(run, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.about = json.loads(self.process.stdout.readline())
        self.base = self.about["url"].removesuffix("/v1")
        self.port = int(self.base.rpartition(":")[2])

    def raw(self, data: bytes, wait: float = 20.0) -> bytes:
        """Send bytes; return what comes back until the server closes, or until a whole head arrived."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait) as s:
            got = b""
            try:
                s.sendall(data)
                while (more := s.recv(1 << 16)) and b"\r\n\r\n" not in got:
                    got += more
                got += more
            except (ConnectionResetError, BrokenPipeError):
                pass
            return got

    def status(self, body: bytes, **head: str) -> int:
        """The status for a body posted to the chat."""
        lines = {"Host": f"127.0.0.1:{self.port}", "Content-Type": "application/json", "Connection": "close"}
        lines |= {"Content-Length": str(len(body))} | {k.replace("_", "-"): v for k, v in head.items()}
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("latin-1")
        found = self.raw(b"POST /v1/chat/completions HTTP/1.1\r\n" + text + b"\r\n" + body)
        return int(found.split()[1]) if found else 0

    def metric(self, name: str) -> float:
        text = urllib.request.urlopen(f"{self.base}/metrics").read().decode()
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    def memory(self) -> dict[str, int]:
        """Anonymous memory with its swapped part in MiB, threads, and open files."""
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines())
        kib = sum(int(lines[name].split()[0]) for name in ("RssAnon", "VmSwap"))
        files = len(os.listdir(f"/proc/{self.process.pid}/fd"))
        return {"MiB": kib >> 10, "threads": int(lines["Threads"]), "files": files}

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # a failed test leaves no process; `end` was called before
        self.process.wait()

    def end(self, signals: int = 1) -> int:
        for _ in range(signals):
            self.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--set", "sample.max_new_tokens=40") as made:
        yield made
        assert made.end() == 0
        assert made.process.stderr is not None
        assert "internal error" not in made.process.stderr.read()


def client_run(*run: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PYTHON, *run], capture_output=True, text=True, check=False, **more)


def needs(package: str) -> None:
    if client_run("-c", f"import {package}").returncode:
        pytest.skip(f"{package} is not installed in {PYTHON}")


def test_official_clients(server: Server) -> None:
    needs("openai, llm, langchain_openai")
    done = client_run(str(Path(__file__).with_name("clients.py")), server.about["url"])
    assert done.returncode == 0, done.stdout + done.stderr


def test_official_clients_of_responses_and_messages(tmp_path: Path) -> None:
    needs("openai, anthropic")
    parrot(tmp_path / "m", SAYS, **HOW)
    server = Server("--profile", "exact", model=str(tmp_path / "m"))
    done = client_run(str(Path(__file__).with_name("protocol_clients.py")), server.base)
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.end() == 0


def test_schemathesis_finds_no_fault_and_no_status_that_is_not_described(server: Server) -> None:
    needs("schemathesis")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    run = ["-m", "schemathesis.cli", "run", f"{server.base}/openapi.json", "--checks", checks, "--max-examples", "50"]
    done = client_run(*run, "--phases", "coverage,fuzzing", "--seed", "1")
    assert done.returncode == 0, done.stdout


Attack = Callable[[Server], object]
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
PIECE = b"%x\r\n" % (17 << 20) + b"a" * (17 << 20) + b"\r\n0\r\n\r\n"
RUNS = {"json_schema": {"schema": {"type": "string", "pattern": "(a{1,1000}){1,1000}b"}}, "type": "json_schema"}
WORDS = "start: " + "|".join(f'"w{i}"' for i in range(60_000))


def posts(body: bytes = b"", **more: Any) -> Attack:
    """The status of a request with these fields."""
    return lambda server: server.status(body or json.dumps({**GOOD, **more}).encode())


def sends(data: bytes, *, to: bytes = GET, ends: bytes = b"\r\n\r\n") -> Attack:
    """The status of what these bytes get, if they are a request."""
    return lambda server: server.raw(to + data + ends).split(b"\r\n")[0][9:12]


def shows(model: str, sign: bytes) -> Attack:
    """Does this sign come back from the name of a model?"""
    body = json.dumps({**GOOD, "model": model}).encode()
    head = b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
    return lambda server: sign in server.raw(CHAT + head + body)


ATTACKS: dict[str, tuple[Attack, object]] = {
    "plain": (posts(), 200),
    "no Host": (sends(b"GET /health HTTP/1.0", to=b""), b"403"),
    "two hosts": (sends(b"Host: evil.example"), b"400"),
    "no HTTP": (sends(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", to=b""), b"400"),
    "a large head": (sends(b"X: " + b"a" * 70_000), b"431"),
    "a terabyte announced": (lambda server: server.status(b"{}", Content_Length=str(1 << 40)), 413),
    "a length below zero": (lambda server: server.status(b"{}", Content_Length="-1"), 400),
    "17 MiB in pieces": (sends(b"Transfer-Encoding: chunked\r\n\r\n" + PIECE, to=CHAT, ends=b""), b"413"),
    "a line end in a name": (shows("a\r\nX-Evil: 1\r\n", b"\r\nX-Evil"), False),
    "escape codes in a name": (shows("a\x1b[31mred", b"\x1b"), False),
    "a grammar of many words": (posts(grammar=WORDS), 400),
    "a schema of long runs": (posts(response_format=RUNS), 200),
    "control tokens": (posts(messages=[{"role": "user", "content": "<|end|><|system|>"}]), 200),
    "half a body": (sends(b"Content-Length: 500\r\n\r\n{", to=CHAT, ends=b""), b"408"),
    "half a head": (sends(b"GET /heal", to=b"", ends=b""), b""),
    "an upgrade": (sends(b"Connection: Upgrade\r\nUpgrade: websocket"), b"200"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_gets_what_it_deserves_and_others_are_served(server: Server, name: str) -> None:
    attack, expected = ATTACKS[name]
    assert attack(server) == expected
    assert server.status(json.dumps(GOOD).encode()) == 200


def test_a_client_that_does_not_read_is_cut() -> None:
    """Its buffer does not grow without end, and its answer ends."""
    body = json.dumps({**GOOD, **ENDLESS, "stream": True, "n": 8, "logprobs": True, "top_logprobs": 20}).encode()
    with Server("--set", "sample.max_new_tokens=16") as served, socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", served.port))
        s.sendall(CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        began = time.monotonic()
        while (now := served.metric("kvcli_cancelled_total")) == 0 and time.monotonic() - began < 240:
            time.sleep(2)
        assert now > 0


def test_a_thousand_connections_delay_nobody(server: Server) -> None:
    held = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(1000)]
    began = time.monotonic()
    assert server.status(json.dumps(GOOD).encode()) == 200
    assert time.monotonic() - began < 30
    for each in held:
        each.close()


def test_an_idle_server_uses_no_cpu_time(server: Server) -> None:
    def ticks() -> int:
        fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    server.status(json.dumps({**GOOD, "top_p": 7}).encode())
    server.status(json.dumps(GOOD).encode())
    time.sleep(1)
    before = ticks()
    time.sleep(5)
    assert ticks() - before < 0.05 * 5 * os.sysconf("SC_CLK_TCK")


def test_ctrl_c_finishes_answers_and_a_second_one_ends_them() -> None:
    for signals, whole in ((1, True), (2, False)):
        body = json.dumps({**GOOD, **ENDLESS, "max_tokens": 400 if whole else 6000}).encode()
        with Server() as served, socket.create_connection(("127.0.0.1", served.port), timeout=60) as s:
            s.sendall(CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            time.sleep(1)
            assert served.end(signals) == (0 if whole else 130)
            assert (b'"finish_reason"' in s.recv(1 << 16)) == whole


def test_memory_threads_and_files_stay_flat() -> None:
    """Requests of three profiles, with scores and without; each seventh is cut. KVCLI_SOAK: seconds."""
    seconds = float(os.environ.get("KVCLI_SOAK", "20"))
    r, codes = random.Random(1), Counter[object]()

    async def one(client: Any, base: str, k: int) -> None:
        prompt = [r.randrange(300, 1800) for _ in range(r.randrange(20, 200))]
        body = {"model": r.choice(["demo", "demo:exact", "demo:fafo"]), "prompt": prompt, "seed": k, "temperature": 1}
        body |= {"max_tokens": r.randrange(1, 16), "ignore_eos": True, "logprobs": 2 if k % 4 == 0 else None}
        url = f"{base}/v1/completions"
        if k % 7 == 0:
            async with client.stream("POST", url, json={**body, "max_tokens": 500, "stream": True}) as answer:
                async for _ in answer.aiter_lines():
                    break
            codes["cut"] += 1
        else:
            codes[(await client.post(url, json={**body, "stream": bool(k % 3)})).status_code] += 1

    async def load(base: str, seconds: float, k: int) -> int:
        end = time.monotonic() + seconds
        async with httpx2.AsyncClient(timeout=None) as client:
            while time.monotonic() < end:
                await asyncio.gather(*(one(client, base, k + i) for i in range(8)))
                k += 8
        await asyncio.sleep(1)  # the server notices the end of the connections
        return k

    with Server("--idle-kv", "4MiB", "--no-server") as served:  # one process, so that its memory is the server's
        n = asyncio.run(load(served.base, 30, 0))
        found = [served.memory()]
        for _ in range(4):
            n = asyncio.run(load(served.base, seconds / 4, n))
            found.append(served.memory())
        print(n, "requests", codes, *found)
        assert found[0]["threads"] > 1, "the memory of another process was measured"
        assert {*codes} == {"cut", 200}
        assert max(one["threads"] for one in found) <= found[0]["threads"] + 1
        assert found[-1]["files"] <= found[0]["files"] + 2
        assert found[-1]["MiB"] - found[0]["MiB"] < 8 + n // 1000
