"""`--engine openai`: what is asked of a server, and what is said when it fails."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcli.api import End, Text, Turn, turn_of
from kvcli.chat.conversation import Chat
from kvcli.cli import run
from kvcli.engines import http
from kvcli.engines.http import Server
from kvcli.engines.openai import Endpoint, RemoteSession
from kvcli.environment import Environment, Paths
from kvcli.errors import EngineUnreachable
from kvcli.settings.config import Sources
from kvcli.settings.profile import load_profile
from tests.fake_engine import FakeEngine, fake_engine

WELL = "The well is 40 m deep."


class Shell:
    """Runs command lines against a server, in a home of its own."""

    def __init__(self, home: Path, engine: FakeEngine) -> None:
        self.home, self.engine = home, engine
        self.environ = {"HOME": str(home), "KVCLI_HOME": str(home / "kv"), "COLUMNS": "200"}
        self.out = self.err = ""

    def __call__(self, *args: str) -> int:
        out, err = io.StringIO(), io.StringIO()
        paths = Paths.of(self.environ)
        world = Environment(io.StringIO(), out, err, dict(self.environ), cwd=self.home, paths=paths)
        status = run([arg.replace("URL", self.engine.url) for arg in args], world)
        self.out, self.err = out.getvalue(), err.getvalue()
        return status

    def chat(self, *args: str) -> int:
        return self("chat", "--engine", "openai", "--base-url", "URL", "-p", "Hi", "--no-save", *args)

    def summarize(self, *args: str) -> int:
        return self("summarize", "--engine", "openai", "--base-url", "URL", *args)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with fake_engine() as running:
        yield running


@pytest.fixture
def shell(tmp_path: Path, engine: FakeEngine) -> Shell:
    return Shell(tmp_path, engine)


def session(engine: FakeEngine, sets: tuple[str, ...] = (), **times: float) -> RemoteSession:
    profile = load_profile("exact", sources=Sources(), sets=sets)
    return RemoteSession(Endpoint.of(Server(engine.url, **times), None), profile)


def ask(session: RemoteSession, **options: Any) -> Turn:
    return turn_of(session.stream((), messages=[{"role": "user", "content": "Hi"}], **options))


def test_an_answer_with_the_server_s_counts_and_what_was_sent(shell: Shell) -> None:
    assert shell.chat("--json", "--temperature", "0.3", "--top-k", "5", "-P", "fafo") == 0

    turn = json.loads(shell.out)
    assert turn["text"] == WELL
    assert [turn["tokens"][key] for key in ("prompt", "cached", "new", "limit")] == [31, 16, 7, 4096]
    assert turn["engine"]["without_effect"] == ["spec.method", "spec.view"]
    sent = {"temperature": 0.3, "top_k": 5, "seed": 0, "max_tokens": 1024}
    assert turn["engine"]["fields"] == sent
    assert sent.items() <= shell.engine.bodies[0].items()
    assert turn["profile"] == "fafo"
    assert turn["spec"]["method"] == "off"


def test_a_chat_of_a_server_cannot_continue_here_without_a_model(shell: Shell) -> None:
    assert shell("chat", "--engine", "openai", "--base-url", "URL", "-p", "Hi") == 0
    assert shell("chat", "-c", "-p", "And?") == 4
    assert "-m MODEL, for another model" in shell.err
    assert "--engine openai --base-url URL" in shell.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--quant", "int8"], "excludes --quant"),
        (["--draft", "auto"], "excludes --draft"),
        (["--json-object"], "excludes --json-object"),
        (["--dry-run"], "excludes --dry-run"),
        (["--offline"], "excludes --offline"),
        (["--engine-timeout", "0"], "--engine-timeout takes"),
        (["--set", "prefill.chunk=256"], "no field for prefill.chunk (--set)"),
        (["--set", "spec.max=4", "--set", "spec.method=ngram"], "no field for spec.method (--set), spec.max (--set)"),
        (["--set", "sample.typical_p=0.9"], "no field for sample.typical_p (--set)"),
        (["-m", "nope"], "has no model nope"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(shell: Shell, args: list[str], said: str) -> None:
    assert shell.chat(*args) in (2, 4)
    assert said in shell.err
    assert shell.engine.bodies == []


def test_fields_follow_the_server(shell: Shell) -> None:
    shell.engine.models[0] |= {"owned_by": "llamacpp", "meta": {"n_ctx": 512}}
    assert shell.chat("--json", "--repetition-penalty", "1.1", "--think", "off", "--set", "sample.typical_p=0.9") == 0
    body = shell.engine.bodies[0]
    assert (body["repeat_penalty"], body["typical_p"]) == (1.1, 0.9)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert json.loads(shell.out)["tokens"]["limit"] == 512

    shell.engine.models[0] |= {"owned_by": "kvcli"}  # which refuses what the model cannot do, as chat does
    assert shell.chat("--think", "on") == 0
    assert shell.engine.bodies[1]["reasoning_effort"] == "on"

    shell.engine.models[0] |= {"owned_by": "library"}  # Ollama ignores fields that it does not know
    assert shell.chat("--think", "off") == 2
    assert "no field for thinking.mode" in shell.err
    assert shell.chat("--greedy") == 0  # penalties that are off need no field


def test_a_profile_of_the_server_is_chosen_and_its_promise_told(shell: Shell) -> None:
    shell.engine.models = [
        {"id": name, "owned_by": "kvcli", "exactness": "exact"} for name in ("m", "m:exact", "m:snap")
    ]
    assert shell.chat("--json", "-P", "snap") == 0
    assert shell.engine.bodies[0]["model"] == "m:snap"
    turn = json.loads(shell.out)
    assert (turn["exactness"], turn["engine"]["without_effect"]) == ("exact", [])


@pytest.mark.parametrize(
    ("behaviours", "status", "code", "said"),
    [
        (["401"], 7, "engine_key", "--key-file FILE"),
        (["404"], 4, "model_not_found", "has no model tiny"),
        (["400"], 6, "context_overflow", "kvcli summarize FILE"),
        (["400 after llama-server"], 6, "context_overflow", "request (10433 tokens) exceeds"),
        (["401 after llama-server"], 7, "engine_key", "  Invalid API Key\n"),
        (["401 after vLLM"], 7, "engine_key", "  Unauthorized\n"),
        (["429 after 900"], 7, "engine_busy", "is busy (429)"),
        (["garbage"], 7, "engine_garbage", "it works"),
        (["deep"], 7, "engine_garbage", "a line cannot be read"),
        (["not zipped"], 7, "engine_unreachable", "while decompressing"),
        (["fails"], 7, "engine_failed", "out of memory"),
        (["dropped"], 7, "engine_lost", "after 17 characters"),
        (["torn"], 7, "engine_lost", "was lost during its answer"),
        (["stalls"], 7, "engine_silent", "sent nothing for 0.5 s"),
        (["silent"], 7, "engine_silent", "sent nothing for 2 s"),
    ],
)
def test_each_failure_has_its_error(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, behaviours: list[str], status: int, code: str, said: str
) -> None:
    waits = {"silence": 0.5} if behaviours == ["stalls"] else {"first_byte": 2.0} if behaviours == ["silent"] else {}
    init = Server.__init__
    monkeypatch.setattr(Server, "__init__", lambda self, *args, **more: init(self, *args, **more | waits))
    shell.engine.behaviours = behaviours
    assert shell.chat() == status
    assert f"[{code}]" in shell.err
    assert said in shell.err
    assert len(shell.engine.bodies) == 1  # none of these is tried again
    assert '"message"' not in shell.err  # the server's words, not its JSON
    assert ("The well is 40 m" in shell.out) == (behaviours[0] in ("fails", "dropped", "torn", "stalls"))


@pytest.mark.parametrize(("words", "way"), [(2_100, "a.txt -m tiny --engine openai --base-url URL"), (30_000, "FILE")])
def test_what_helps_against_a_long_document_names_the_server(shell: Shell, words: int, way: str) -> None:
    (shell.home / "a.txt").write_text("depth " * words)
    shell.engine.behaviours = ["400 after llama-server"]
    assert shell.chat("-f", "a.txt") == 6
    said = " ".join(shell.err.split())
    assert f"kvcli summarize {way.replace('URL', shell.engine.url)}, which reads it in parts" in said
    assert "longer context window" not in said  # of a model that the server does not have


def test_a_failure_keeps_the_words_so_far(engine: FakeEngine) -> None:
    engine.behaviours = ["dropped"]
    chat = Chat(session(engine))  # type: ignore[arg-type]
    with pytest.raises(EngineUnreachable) as caught:
        chat.send("How deep?")
    assert caught.value.detail["text"] == "The well is 40 m "
    assert [(m.text, m.finish) for m in chat.messages] == [("How deep?", None), ("The well is 40 m ", "interrupted")]


def test_only_a_request_without_an_answer_is_repeated(engine: FakeEngine) -> None:
    engine.behaviours = ["503 after 0", "reset", "well"]
    assert ask(session(engine)).text == WELL
    assert len(engine.bodies) == 3
    engine.behaviours = ["503 after 0"]
    with pytest.raises(EngineUnreachable, match="not ready"):
        ask(session(engine, tries=2))
    assert len(engine.bodies) == 5


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(EngineUnreachable) as caught:
        next(Server("http://127.0.0.1:9/v1", tries=1).lines("/models"))
    assert caught.value.code == "engine_unreachable"


def test_comments_keep_a_slow_prefill_alive(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.behaviours = ["comments"]
    asked = session(engine, first_byte=0.5, silence=0.5)
    monkeypatch.setattr(http, "time", engine.clock)
    assert ask(asked).text == WELL


@pytest.mark.parametrize("behaviour", ["endless", "silent"])
def test_cancel_hangs_up_at_once(engine: FakeEngine, behaviour: str) -> None:
    engine.behaviours = [behaviour]
    words: list[str] = []

    def cancel() -> bool:
        return len(engine.bodies) > 0 and (behaviour == "silent" or len(words) > 2)

    for event in session(engine).stream((), messages=[{"role": "user", "content": "Hi"}], cancel=cancel):
        words += [event.text] if isinstance(event, Text) else []
    assert isinstance(event, End)
    assert event.turn.finish == "interrupted"
    assert event.turn.text == "".join(words) == "word " * len(words)
    assert engine.left.wait(5)


def test_only_a_line_feed_ends_a_line_and_no_line_is_endless(engine: FakeEngine) -> None:
    engine.behaviours = ["separators", "long"]
    assert ask(session(engine)).text == f"a\u2028b\x85c {WELL}"
    with pytest.raises(EngineUnreachable, match="a line has more than"):
        ask(session(engine, tries=1))


def test_a_character_in_two_pieces_is_put_together(engine: FakeEngine) -> None:
    engine.behaviours = ["halves"]
    assert ask(session(engine)).text == f"\N{REPLACEMENT CHARACTER}\N{GRINNING FACE} {WELL}"


def test_thoughts_are_apart(engine: FakeEngine) -> None:
    engine.behaviours = ["thinks"]
    turn = ask(session(engine))
    assert (turn.thinking, turn.text) == ("hmm, wells", WELL)


def test_the_key_is_private_and_in_no_message(shell: Shell) -> None:
    key = shell.home / "key"
    key.write_text("s3cret\n")
    key.chmod(0o644)
    assert shell.chat("--key-file", "key") == 3
    assert "[key_not_private]" in shell.err
    assert "chmod 600 key" in shell.err
    key.chmod(0o600)
    key.write_text("two\twords\n")
    assert shell.chat("--key-file", "key") == 3
    assert "[bad_key]" in shell.err
    key.write_text("s3cret\n")
    shell.engine.behaviours = ["403"]
    assert shell.chat("--key-file", "key", "-vv") == 7
    assert shell.engine.keys == ["Bearer s3cret"]
    assert "no; key Bearer KEY" in shell.err
    assert "s3cret" not in shell.err + shell.out
    assert "s3cret" not in repr(Server(shell.engine.url, "s3cret"))


@pytest.mark.parametrize(
    "url",
    ["ftp://h", "http://", "http://u:p@h/v1", "http://h/v1?k=1", "http://h:0", "http://a b", "http://\u2603.net", "h"],
)
def test_addresses_are_checked(shell: Shell, url: str) -> None:
    assert shell("chat", "--engine", "openai", "--base-url", url, "-p", "Hi") == 2
    assert "is not http:// or https:// with a host" in " ".join(shell.err.split())


def test_a_summary_needs_a_known_window(shell: Shell) -> None:
    (shell.home / "a.txt").write_text("The well is 40 m deep.")
    del shell.engine.models[0]["max_model_len"]
    assert shell.summarize("a.txt") == 2
    assert "[unknown_window]" in shell.err
    assert "--ctx N" in shell.err
    assert shell.summarize("a.txt", "--ctx", "2048", "--json") == 0
    assert json.loads(shell.out)["points"][0]["text"] == WELL


def test_documents_side_by_side_come_in_order_and_each_has_its_own_error(shell: Shell) -> None:
    names = [f"d{i}.txt" for i in range(6)]
    for i, name in enumerate(names):
        (shell.home / name).write_text(f"Text {i} of a well." if i != 2 else "")
    assert shell.summarize(*names, "--each", "--parallel", "3", "-o", "out/") == 3
    assert "d2.txt" in shell.err
    assert "is empty" in shell.err
    files = sorted(path.name for path in (shell.home / "out").iterdir())
    assert files == [f"{name}.md" for name in names if name != "d2.txt"]
    assert len(shell.engine.bodies) == 5
    shell.engine.behaviours = ["dropped", "well"]
    assert shell.summarize(*names, "--each", "--parallel", "3", "--json", "--no-cache") == 3
    found = [json.loads(line) for line in shell.out.splitlines()]
    assert sorted(one.get("code", "") for one in found) == 4 * [""] + ["empty_file", "engine_lost"]
    assert len(shell.engine.bodies) == 5 + 5


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--on", "ray"], "[no_ray]"),
        (["--each", "--parallel", "0"], "at least 1"),
        (["--on", "slurm", "--dry-run"], "--on slurm: ray or ray://"),
        (["--on", "ray", "--engine", "openai", "--base-url", "http://127.0.0.1:1/v1"], "excludes --on"),
        (["--on", "ray", "--extract-only"], "excludes --on"),
    ],
)
def test_workers_are_refused_where_nothing_can_use_them(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, args: list[str], said: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (shell.home / "a.txt").write_text("The well is 40 m deep.")
    assert shell("summarize", "a.txt", "-m", "demo", *args) in (2, 3)
    assert said in shell.err


def test_parts_of_one_document_are_answered_side_by_side(shell: Shell) -> None:
    (shell.home / "a.txt").write_text("\n\n".join(f"The well of farm {i} is 40 m deep." for i in range(99)))
    shell.engine.behaviours = 3 * ["together"] + ["well"]
    assert shell.summarize("a.txt", "--mode", "parts", "--chunk", "400", "--parallel", "3", "--json") == 0
    assert len(shell.engine.bodies) == json.loads(shell.out)["parts"] > 3
