"""`kvcli bench` against a server: what is asked at the same time, and what a row says of it."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from kvcli.commands.bench import server as bench
from kvcli.errors import BadInput
from kvcli.schemas.bench import ServerBenchDocument
from kvcli.schemas.listings import ServerEntry
from tests.engines.test_openai import Shell, engine, shell

__all__ = ["engine", "shell"]  # fixtures
RUN = ("-n", "8", "--ctx", "600", "-r", "2", "--warmup", "1")
ENGINE = ("bench", "--engine", "openai", "--base-url", "URL")


def test_a_row_for_each_number_of_clients_with_what_the_server_counts(shell: Shell) -> None:
    assert shell(*ENGINE, *RUN, "--clients", "1,3", "--json", "--seed", "7") == 0

    document = ServerBenchDocument.model_validate_json(shell.out)
    assert (document.model, document.server) == ("tiny", "vLLM")
    assert [(row.clients, row.answers, len(row.tok_s)) for row in document.rows] == [(1, 2, 2), (3, 6, 2)]
    for row in document.rows:
        assert (row.prompt, row.cached, row.new, row.acceptance_rate, row.kv_bytes) == (31, 16, 7, None, None)
    bodies = shell.engine.bodies
    assert len(bodies) == 3 * (1 + 3)
    assert {(body["max_tokens"], body["temperature"], body["seed"]) for body in bodies} == {(8, 0.0, 7)}
    begins = {body["messages"][0]["content"][:40] for body in bodies}
    assert len(begins) == len(bodies), "a prefix cache would answer for the second of two equal prompts"


def test_clients_ask_at_the_same_time(shell: Shell) -> None:
    shell.engine.behaviours = ["together"]  # an answer begins when three are asked for
    assert shell(*ENGINE, *RUN, "--clients", "3") == 0
    assert shell.out.splitlines()[0].split()[:2] == ["clients", "answers"]


def test_what_kvcli_serve_tells_beyond_openai_s_fields(shell: Shell) -> None:
    shell.engine.behaviours = ["counts"]
    assert shell(*ENGINE, *RUN, "--json") == 0
    (row,) = json.loads(shell.out)["rows"]
    assert (row["acceptance_rate"], row["kv_bytes"]) == (0.75, 4096)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--clients", "2"], "--clients needs a server"),
        ([*ENGINE[1:], "--clients", "0"], "--clients takes numbers from 1"),
        ([*ENGINE[1:], "--batch", "2"], "excludes --batch"),
        ([*ENGINE[1:], "--workload", "random"], "one --workload of words"),
        ([*ENGINE[1:], "--serve"], "--serve and --engine exclude each other"),
        (["--engine", "openai"], "belong together"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(shell: Shell, args: list[str], said: str) -> None:
    assert shell("bench", *args) == 2
    assert said in shell.err


def test_a_request_that_fails_ends_the_benchmark(shell: Shell) -> None:
    shell.engine.behaviours = ["400"]
    assert shell(*ENGINE, *RUN) != 0
    assert "maximum context length" in shell.err


def test_serve_finds_the_server_of_this_user(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shell("bench", "--serve", "--json") == 3
    assert json.loads(shell.out)["code"] == "no_server"

    about = {"path": "p", "pid": 1, "load": [], "seconds": 1.0, "running": 0, "bytes": 1}
    found = [
        ServerEntry(model=name, url=url, **about) for name, url in (("other", "http://x"), ("tiny", shell.engine.url))
    ]
    monkeypatch.setattr(bench, "servers", lambda world: found)
    assert shell("bench", "tiny", "--serve", *RUN) == 0
    assert len(shell.engine.bodies) == 3


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="article is too short"):
        next(bench.prompts("article", {}, 1 << 20, 0))
    first, second = islice(bench.prompts("summary", {}, 300, 0), 2)
    assert len(first[0]["content"]) - len(second[0]["content"]) == 0
