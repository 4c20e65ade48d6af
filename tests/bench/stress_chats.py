"""What is written survives: kills at any moment, and two processes at one chat.

    python tests/bench/stress_chats.py [--kills 400] [--pairs 20] [--turns 200]

A kill: a process writes a chat turn by turn, parts of summaries, profiles and lines of a log, and says what it
has written; SIGKILL comes at a random moment. Then every file must be whole, hold all that was said, and open at once;
what the killed process left must be gone after the next start.

A pair: two processes go on with one chat at the same time, as the terminal does; each turn of both must be on the disk,
in that chat or in the one that it went on in. Half of the pairs open it as the command line does, where the second one
must be refused.
"""

from __future__ import annotations

import io
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.api import Turn
from kvcli.chat.conversation import Chat
from kvcli.chat.saved_chats import SavedChats
from kvcli.cli import run
from kvcli.commands.chat.save_chat import try_save
from kvcli.commands.profiles import write_new
from kvcli.documents import Document
from kvcli.engine.stats import Stats
from kvcli.environment import Environment, Paths
from kvcli.errors import BadInput
from kvcli.files import BEGINS, append
from kvcli.summarize.cache import Cache
from tests.bench.harness import Rows, is_unbroken, measurement
from tests.fake_model import FakeModel, fake_info

TEXT = "A document that takes a while to write. " * 20_000
PROFILE = "# a line that takes its time\n" * 20_000
Say = Callable[[str], None]


def storm(kills: int, pairs: int, turns: int, seed: int = 0) -> dict[str, int]:
    """How many trials there were, and what was bad in them."""
    rng, found = random.Random(seed), Counter[str]()
    for _ in range(kills):
        with tempfile.TemporaryDirectory() as home:
            found.update(_killed(_world(Path(home)), rng))
    for i in range(pairs):
        with tempfile.TemporaryDirectory() as home:
            found.update(_paired(Path(home), turns, is_locked=i % 2 == 1))
    bad = sum(n for what, n in found.items() if what.startswith("bad "))
    return {"tried": kills + pairs, "bad": bad, **dict(sorted(found.items()))}


# --- kills


def _killed(world: Environment, rng: random.Random) -> Iterator[str]:
    """What one kill shows."""
    child, heard = _start(lambda say: _write(world, say))
    said = [_line(heard)]
    until = time.monotonic() + rng.uniform(0, 0.3)
    while (left := until - time.monotonic()) > 0 and select.select([heard], [], [], left)[0]:
        said.append(_line(heard))
    os.kill(child, signal.SIGKILL)
    if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
        yield "bad writer"
    said += iter(lambda: _line(heard), "")
    os.close(heard)
    last = {what: int(n) for what, n in (line.split() for line in said if line)}
    yield from ["left over"] * len(_leftovers(world))
    yield from (f"bad {what}" for what in _damage(world, last))
    run(["config", "path"], world)
    if _leftovers(world):
        yield "bad leftovers"


def _write(world: Environment, say: Say) -> None:
    """Writes without end, and says what it has written."""
    chat = Chat(_model(), saved_chats=SavedChats(world.paths.data), is_locked=True)
    cache = Cache(world.paths.cache / "summaries", "model", "profile")
    for i in range(10_000):
        chat.pending = []  # as if it had been dropped: what is read would take longer than what is written
        chat.send(f"question {i}")
        chat.attach(Document("long.md", TEXT, "00"))
        chat.save()
        say(f"chat {i}")
        cache.put([{"role": "user", "content": str(i)}], 9, Turn(TEXT, (1, 2), "stop", Stats()))
        say(f"part {i}")
        write_new(world.paths.config / "profiles" / f"p{i}.toml", PROFILE, "it")
        say(f"profile {i}")
        append(world.paths.data / "runs.jsonl", f"run {i}\n")
        say(f"run {i}")


def _damage(world: Environment, last: dict[str, int]) -> Iterator[str]:
    """What is not whole, or not there though it was said to be. What was under way may be there or not."""
    said: list[str] = []
    sessions = SavedChats(world.paths.data, said.append)
    try:
        for entry in sessions.entries():
            opened = sessions.open(entry.id, is_locked=True)
            opened.close()
            if len(opened.saved.messages) // 2 not in (last.get("chat", -1) + 1, last.get("chat", -1) + 2):
                yield "chat: lost a turn"
            if [d.text for d in opened.saved.pending] != [TEXT]:
                yield "chat: lost a document"
            if [e.id for e in sessions.search(f"question {last.get('chat', 0)}")] != [entry.id]:
                yield "chat: not found by its words"
        if "chat" in last and len(sessions.entries()) != 1:
            yield "chat: gone"
    except BadInput as error:
        yield f"chat: {error.code}"
    yield from (f"chat: {text}" for text in said)
    cache = Cache(world.paths.cache / "summaries", "model", "profile")
    for i in range(last.get("part", -1) + 1):
        if cache.get([{"role": "user", "content": str(i)}], 9) is None:
            yield "part"
    profiles = {p.name: p.read_text() for p in (world.paths.config / "profiles").glob("*.toml")}
    if set(profiles.values()) - {PROFILE}:
        yield "profile: not whole"
    if {f"p{i}.toml" for i in range(last.get("profile", -1) + 1)} - set(profiles):
        yield "profile: lost"
    if "run" in last and f"run {last['run']}\n" not in (world.paths.data / "runs.jsonl").read_text():
        yield "run"


# --- pairs


def _paired(home: Path, turns: int, *, is_locked: bool) -> Iterator[str]:
    """What two processes make of one chat."""
    sessions = SavedChats(home)
    chat = Chat(_model(), saved_chats=sessions)
    chat.send("first")
    chat.save()
    both = [_start(lambda say, name=name: _go_on(home, name, turns, is_locked, say)) for name in "ab"]
    said = [list(iter(lambda heard=heard: _line(heard), "")) for _, heard in both]
    for child, heard in both:
        if os.waitpid(child, 0)[1]:
            yield "bad writer"
        os.close(heard)
    kept = [m.text for entry in sessions.entries() for m in sessions.read(entry.id)[0].messages]
    for name, lines in zip("ab", said, strict=True):
        if lines == ["chat_in_use"]:
            yield "refused"
            continue
        yield from ["bad turns lost"] * sum(f"{name} {i}" not in kept for i in range(turns))
    if is_locked and ["chat_in_use"] not in said:
        yield "bad both had it"
    if any(p.name.startswith(BEGINS) for p in home.iterdir()):
        yield "bad leftovers"


def _go_on(home: Path, name: str, turns: int, is_locked: bool, say: Say) -> None:
    chat = Chat(_model(), saved_chats=SavedChats(home), is_locked=is_locked)
    try:
        chat.load("1")
    except BadInput as error:
        say(error.code)
        return
    for i in range(turns):
        chat.send(f"{name} {i}")
        try_save(chat)
    if is_locked:  # until the other has tried
        time.sleep(0.3)
    chat.close()
    say("done")


# --- processes


def _start(work: Callable[[Say], None]) -> tuple[int, int]:
    """A child that does the work, and the pipe on which it speaks."""
    heard, mouth = os.pipe()
    child = os.fork()
    if child:
        os.close(mouth)
        return child, heard
    spoken = os.fdopen(mouth, "w")
    try:
        work(lambda line: print(line, file=spoken, flush=True))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _line(heard: int) -> str:
    """A line without its end; nothing at the end of all."""
    found = b""
    while (byte := os.read(heard, 1)) not in (b"", b"\n"):
        found += byte
    return found.decode()


def _leftovers(world: Environment) -> list[Path]:
    return [p for p in world.paths.data.parent.rglob("*") if p.name.startswith(BEGINS)]


def _model() -> FakeModel:
    return FakeModel(answer="an answer", info=fake_info(limit=1 << 30))


def _world(home: Path) -> Environment:
    environ = {"KVCLI_HOME": str(home), "HOME": str(home)}
    return Environment(io.StringIO(), io.StringIO(), io.StringIO(), environ, cwd=home, paths=Paths.of(environ))


@measurement("Kills while files are written, and two processes at one chat", is_right=is_unbroken)
def stress_chats(kills: int = 400, pairs: int = 20, turns: int = 200, seed: int = 0) -> Rows:
    what = "kills while files are written, and two processes at one chat"
    yield {"what": what, **storm(kills, pairs, turns, seed)}


if __name__ == "__main__":
    stress_chats.main()
