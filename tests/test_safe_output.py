"""Nothing that others wrote steers the terminal: every command on a real one, with escapes in all that it may print."""

from __future__ import annotations

import ast
import errno
import json
import os
import pty
import shutil
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import TextIO

import pytest

from kvcli.chat.saved_chats import SavedChats
from kvcli.cli import run
from kvcli.environment import Environment, Paths
from kvcli.models.source import find
from kvcli.render.terminal.terminal import text_width
from kvcli.safe_output import LibraryStream, SafeStream, Styled, escaped, neutralise
from kvcli.schemas.turn import ChatDocument
from tests.fakes import Stream

ROOT = Path(__file__).parents[1]
STEERING = {
    "title": "\x1b]0;pwned\x07",
    "clipboard": "\x1b]52;c;AAAA\x07",
    "colour": "\x1b[5;35m",
    "clear": "\x1b[3J",
    "device": "\x1bP$qm\x1b\\",
    "c1": "\x9b5;35m",
    "bidi": "\u202egnp.",
    "isolate": "\u2066",
    "mark": "\ufeff",
    "backspace": "\b\b\b",
    "overprint": "\rall is well",
    "delete": "\x7f",
    "separator": "\u2028",
    "tag": "\U000e0041",
}
SCOTLAND = "\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f"
EVIL = "evil" + "".join(STEERING.values())
NEVER = {chr(c) for c in [*range(127, 160), *range(0x2028, 0x202F), *range(0x2066, 0x2070), *range(0xE0000, 0xE0080)]}
NEVER |= {"\ufeff"}


# --- the outlet


def test_nothing_steers_a_terminal():
    every = "".join(map(chr, range(0x110000 if sys.maxunicode > 0xFFFF else 0x10000)))
    shown = set(neutralise(every))
    assert shown & (NEVER | set(map(chr, range(32)))) == {"\n", "\t"}
    assert neutralise("\x1b]52;c;AAAA\x07red\x1b[31m") == "␛]52;c;AAAA␇red␛[31m"
    assert neutralise("a\nb\tc.md", one_line=True) == "a␤b c.md"
    for said in ("naïve 😀 עברית\n", "קו\u200f 5%", "\u200eA \u061c\u0627", "\u0646\u200c\u0647 👩\u200d👧", SCOTLAND):
        assert neutralise(said) == said
    assert text_width("קו\u200f\u200e\u061c") == 2
    assert not NEVER & set(neutralise(f"{SCOTLAND[1:]} \U0001f3f4\U000e0041 {SCOTLAND[:4] * 3}"))
    shown.update(neutralise("\ud800"))
    "".join(shown).encode()  # halves of characters could not be written


def test_json_keeps_what_it_escapes():
    text = json.dumps({"a": EVIL + "\ud800"}, ensure_ascii=False)
    assert not NEVER & set(escaped(text))
    assert json.loads(escaped(text)) == {"a": EVIL + "\ud800"}


@pytest.mark.parametrize("is_tty", [True, False])
def test_only_a_terminal_gets_harmless_text(is_tty: bool):
    stream = Stream(is_tty=is_tty)
    outlet = SafeStream(stream, is_vital=True)
    outlet.write("a\r\n" + EVIL)
    assert stream.text == ("a\n" + neutralise(EVIL) if is_tty else "a\r\n" + EVIL)
    outlet.write(Styled("\x1b[1m"))
    assert stream.text.endswith("\x1b[1m")
    outlet.write(Styled("\x1b[1m") + EVIL)  # what is joined to text of others is no longer ours
    assert stream.text.endswith(("␛[1m" if is_tty else "\x1b[1m") + (neutralise(EVIL) if is_tty else EVIL))


def test_libraries_draw_bars_and_nothing_else():
    stream = Stream(is_tty=True)
    LibraryStream(SafeStream(stream, is_vital=False)).write("\r\x1b[1m50 %\x1b[0m\x1b[A" + STEERING["title"])
    assert stream.text == "\r\x1b[1m50 %\x1b[0m\x1b[A␛]0;pwned␇"


def test_only_the_outlet_touches_the_streams():
    """Whoever writes to a world's stream writes through it; these files are processes of their own."""
    alone = {
        "__main__.py",
        "safe_output.py",
        "environment.py",
        "cli.py",
        "documents/worker.py",
        "bench/peak.py",
        "sandbox.py",
        "models/template_worker.py",
        "models/tokenizer_worker.py",
    }
    styled = {
        "safe_output.py",
        "render/terminal/terminal.py",
        "render/terminal/screen.py",
        "render/turn/turn_view.py",
    }
    for path in sorted((ROOT / "kvcli").rglob("*.py")):
        name = path.relative_to(ROOT / "kvcli").as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            said = ast.unparse(node) if isinstance(node, ast.Call | ast.Attribute) else ""
            if name not in alone and not name.startswith("demo/"):
                assert not said.startswith(("print(", "sys.std", "sys.__std")) or "file=world." in said, (name, said)
            if name not in styled:
                assert not said.startswith("Styled("), (name, said)


# --- full and closed


class Full(Stream):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def command(
    folder: Path, *args: str, stdout: TextIO | None = None, stderr: TextIO | None = None
) -> tuple[int, Environment]:
    environ = {"KVCLI_HOME": str(folder / "home"), "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    world = Environment(Stream(), stdout or Stream(), stderr or Stream(), environ, folder, Paths.of(environ))
    return run(args, world), world


@pytest.mark.parametrize(
    "args", [["--version"], ["--help"], ["models", "list"], ["models", "list", "--json"], ["profiles", "show"], []]
)
def test_a_full_standard_output_is_an_error_in_words(tmp_path: Path, args: list[str]):
    stderr = Stream()
    assert command(tmp_path, *args, stdout=Full(), stderr=stderr)[0] == 1
    assert "cannot write the output: No space left on device" in stderr.text
    assert "Traceback" not in stderr.text


@pytest.mark.parametrize("json_", [[], ["--json"]])
def test_a_full_output_changes_no_other_errors_code(tmp_path: Path, json_: list[str]):
    (tmp_path / "empty").mkdir()
    args = ["chat", str(tmp_path / "empty"), "-p", "hi", *json_]
    code = command(tmp_path, *args)[0]
    assert code == 4
    assert command(tmp_path, *args, stderr=Full())[0] == 4
    stderr = Stream()
    assert command(tmp_path, *args, stdout=Full(), stderr=stderr)[0] == 4
    assert "[model_incomplete]" in stderr.text


def test_messages_may_be_lost_and_a_reader_who_went_ends_the_work():
    class Gone(Stream):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    SafeStream(Full(), is_vital=False).write("words")
    with pytest.raises(OSError, match="No space left"):
        SafeStream(Full(), is_vital=True).write("words")
    for is_vital in (True, False):
        with pytest.raises(BrokenPipeError):
            SafeStream(Gone(), is_vital=is_vital).write("words")


def test_the_reader_of_the_help_may_go(tmp_path: Path):
    for args in (["--help"], ["chat", "--help"], ["--version"]):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as gone:
            assert command(tmp_path, *args, stdout=gone)[0] == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_log_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    stderr = Stream()
    assert command(tmp_path, "models", "list", "--log-file", "/dev/full", "-vv", stderr=stderr)[0] == 0
    assert stderr.text.count("cannot write the log") == 1
    assert "Logging error" not in stderr.text + "".join(capfd.readouterr())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("args", [["--version"], ["config", "schema"], ["models", "list", "--json"]])
def test_nothing_is_left_over_for_the_end_of_the_program(tmp_path: Path, args: list[str]):
    """Python writes out its buffers once more when it ends, and says what it thinks of a full disk."""
    with open("/dev/full", "w") as full:
        env = os.environ | {"KVCLI_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-m", "kvcli", *args], cwd=ROOT, env=env, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr


# --- every command on a real terminal


class Pty:
    """A terminal that keeps all bytes, and says no to who asks. Commands run in this process, on its other end."""

    def __init__(self) -> None:
        self.master, slave = pty.openpty()
        self.streams = [os.fdopen(os.dup(slave), mode, encoding="utf-8") for mode in ("r", "w", "w")]
        os.close(slave)
        self.bytes = bytearray()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self.master, 1 << 16):
                self.bytes += data
                if data.endswith(b"[y/N] "):
                    os.write(self.master, b"n\n")
        except OSError:  # the other end is closed
            pass

    def close(self) -> str:
        for stream in self.streams:
            stream.close()
        self.reader.join()
        os.close(self.master)
        return self.bytes.decode()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What somebody cloned: settings, documents and models, with escapes wherever a string may stand."""
    folder = tmp_path_factory.mktemp("clone") / EVIL
    folder.mkdir()
    quoted = json.dumps(EVIL)
    settings = [
        f"default_model = {quoted}",
        "[profiles.lurid]",
        'extends = "exact"',
        f"description = {quoted}",
    ]
    (folder / ".kvcli.toml").write_text("\n".join(settings))
    (folder / "wrong").mkdir()
    (folder / "wrong" / ".kvcli.toml").write_text(f"{quoted} = 1\n[profiles.bad]\n{quoted} = {quoted}\n")
    (folder / f"{EVIL}.md").write_text(f"# {EVIL}\n\nThe depth of the well is 972 metres. {EVIL}\n")
    (folder / f"{EVIL}.html").write_text(f"<title>{EVIL}</title><h1>{EVIL}</h1><p>Words. {EVIL}", encoding="utf-8")
    (folder / f"{EVIL}.bin").write_bytes(b"\0\1\2")
    demo = find("demo").path
    code = {"model_type": "unheard-of", "auto_map": {"AutoModelForCausalLM": EVIL}}
    for name, change in (("kind", {"model_type": EVIL}), ("arch", {"architectures": [EVIL]}), ("code", code)):
        shutil.copytree(demo, folder / f"{name} {EVIL}")
        config = json.loads((demo / "config.json").read_text())
        (folder / f"{name} {EVIL}" / "config.json").write_text(json.dumps(config | change))
    shutil.copytree(demo, folder / "template")
    for held in (folder / "template").glob("*.jinja"):
        held.unlink()
    said = json.loads((folder / "template" / "tokenizer_config.json").read_text())
    template = "{{ raise_exception(" + repr(EVIL) + ") }}"
    (folder / "template" / "tokenizer_config.json").write_text(json.dumps(said | {"chat_template": template}))
    (folder / "empty").mkdir()
    return folder


KIND, ARCH, CODE, MD = f"./kind {EVIL}", f"./arch {EVIL}", f"./code {EVIL}", f"{EVIL}.md"
COMMANDS = {
    "loading the default model": ["chat", "-p", "hi"],
    "json error": ["chat", "-p", "hi", "--json"],
    "stream error": ["chat", "-p", "hi", "--json", "--stream"],
    "a typed model": ["chat", f"./{EVIL}", "-p", "hi"],
    "model type": ["chat", KIND, "-p", "hi"],
    "architecture": ["chat", ARCH, "-p", "hi"],
    "remote code": ["chat", CODE, "-p", "hi"],
    "template": ["chat", "./template", "-p", "hi"],
    "a document": ["chat", "demo", "-f", MD, "-p", "How deep is it?", "--max-new-tokens", "2"],
    "a document, verbose": ["chat", "demo", "-f", MD, "-p", "How deep?", "--max-new-tokens", "2", "-vv"],
    "a missing document": ["chat", "demo", "-f", f"no{MD}", "-p", "hi"],
    "a binary": ["chat", "demo", "-f", f"{EVIL}.bin", "-p", "hi"],
    "a profile": ["chat", "demo", "-P", EVIL, "-p", "hi"],
    "a setting": ["chat", "demo", "--set", f"{EVIL}=1", "-p", "hi"],
    "an option": ["chat", f"--{EVIL}"],
    "a command": [EVIL],
    "dry run": ["chat", "demo", "-f", MD, "--dry-run"],
    "extract": ["summarize", MD, f"{EVIL}.html", "--extract-only"],
    "extract json": ["summarize", f"{EVIL}.html", "--extract-only", "--json"],
    "summary plan": ["summarize", MD, "-m", "demo", "--dry-run"],
    "summary": ["summarize", MD, "-m", "demo", "--length", "10"],
    "summary file": ["summarize", MD, "-m", "demo", "--length", "10", "-o", f"out{EVIL}.md"],
    "summary model": ["summarize", MD, "-m", KIND],
    "fit": ["fit", ARCH],
    "fit a model": ["fit", "./template"],
    "fit json": ["fit", "./template", "--json"],
    "bench": ["bench", "--reps", "1", "--no-memory"],
    "bench plan": ["bench", "./template", "--dry-run"],
    "calibrate": ["bench", "--calibrate"],
    "spec": ["spec", "doctor"],
    "heads": ["profile-heads", f"./{EVIL}"],
    "heads default": ["profile-heads"],
    "profiles": ["profiles", "list"],
    "profiles plain": ["profiles", "list", "--plain"],
    "profiles json": ["profiles", "list", "--json"],
    "profile shown": ["profiles", "show", "lurid"],
    "profile's places": ["profiles", "show", "lurid", "--origin"],
    "profile missing": ["profiles", "show", EVIL],
    "profiles compared": ["profiles", "diff", "lurid", EVIL],
    "profiles checked": ["profiles", "check", "wrong/.kvcli.toml"],
    "profiles checked, json": ["profiles", "check", "wrong/.kvcli.toml", "--json"],
    "profile made": ["profiles", "new", "made", "-o", f"made{EVIL}.toml"],
    "profile named": ["profiles", "new", EVIL],
    "models": ["models", "list"],
    "model shown": ["models", "show", KIND],
    "model shown json": ["models", "show", KIND, "--json"],
    "model path": ["models", "path", "./template"],
    "chats": ["chats", "list"],
    "sessions json": ["chats", "list", "--json"],
    "sessions plain": ["chats", "list", "--plain"],
    "sessions searched": ["chats", "search", "evil"],
    "session": ["chats", "show"],
    "session json": ["chats", "show", "--json"],
    "session missing": ["chats", "show", EVIL],
    "session kept": ["chats", "rm", "1"],
    "session forgotten": ["chats", "rm", "1", "--yes"],
    "session exported": ["chats", "export", "-o", f"out{EVIL}.md"],
    "places": ["config", "path"],
    "schema": ["config", "schema", EVIL],
    "doctor": ["doctor"],
    "log": ["models", "list", "--log-file", f"no{EVIL}/x.log"],
}


@pytest.mark.skipif(os.name != "posix", reason="terminals of this kind are POSIX's")
@pytest.mark.parametrize("live", ["xterm-256color", "dumb"])
@pytest.mark.parametrize("what", COMMANDS)
def test_no_command_lets_others_steer_the_terminal(what: str, live: str, repository: Path, tmp_path: Path):
    terminal = Pty()
    environ = {
        "KVCLI_HOME": str(tmp_path),
        "HOME": str(tmp_path),
        "TERM": live,
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
    }
    asked = {"role": "user", "text": f"evil {EVIL}", "documents": [{"name": EVIL, "sha256": EVIL, "text": EVIL}]}
    said = {"role": "assistant", "text": EVIL, "documents": []}
    chat = {"schema": "kvcli.chat/1", "title": EVIL, "model": EVIL, "saved": EVIL, "system": EVIL, "pending": []}
    chat["messages"] = [{**message, "finish": None} for message in (asked, said)]
    chats = SavedChats(Paths.of(environ).data)
    with closing(chats.begin(is_locked=False)) as saved_chat:
        chats.write(saved_chat, ChatDocument.model_validate(chat))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(repository)
        run([*COMMANDS[what], "--offline"], Environment(*terminal.streams, environ, repository, Paths.of(environ)))
    got = terminal.close()
    assert got.strip()
    for name, sequence in STEERING.items():
        assert sequence not in got, (name, got)
    assert not NEVER & set(got), got
    if live == "dumb":
        assert not set(got) & set(map(chr, range(32))) - set("\r\n\t"), got
    quiet = ("doctor", "bench", "heads default", "calibrate", "spec")  # the model is told elsewhere, or not at all
    if live == "dumb" and what not in quiet:
        assert "evil" in got, got  # else nothing was tried
