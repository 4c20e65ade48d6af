"""Every call that writes fails in turn, in every command that keeps something: `python tests/bench/stress_faults.py`.

The calls are the program's real ones (tests/faults.c stands before libc); what fails is the k-th write, fsync, rename,
open, mkdir, link, claim or map under one folder, for k from 1 until a run makes fewer. Each command runs in a folder
that holds what a user had before. Bad is: an exit code that is not documented for it, a traceback, another answer than
usual though nothing was said, something lost or half written, a rerun that differs from an undisturbed run.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

ROOT = Path(__file__).parents[2]
SHIM = ROOT / "tests" / "faults.c"
sys.path.insert(0, str(ROOT))

from tests.bench.harness import Rows, Words, is_unbroken, measurement, picked

# name -> errno, whether all that needs room fails from then on, whether the first write that fails writes a half
FAULTS = {
    "full": (errno.ENOSPC, True, False),
    "full in the middle": (errno.ENOSPC, True, True),
    "full for a moment": (errno.ENOSPC, False, False),
    "broken": (errno.EIO, False, False),
    "interrupted": (errno.EINTR, False, False),
}


@dataclass
class Tally:
    """What was tried and what went wrong."""

    tried: int = 0
    bad: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Ended:
    """A run that is over."""

    code: int
    out: str
    err: str
    files: dict[str, bytes]  # below the folder, by their names there


@dataclass(frozen=True)
class Case:
    """One command, and how it may end when it cannot write."""

    run: Callable[[Path], tuple[int, str, str]]
    codes: tuple[int, ...] = (0,)  # beside that of the undisturbed run
    usual: int = 0
    same: tuple[str, ...] = ()  # files that are the same in each run, not only whole
    had: Callable[[Path], object] = lambda _: None  # writes what else a user had before


# --- the cases


def _machine(folder: Path, kind: str) -> Any:
    from tests.fakes import Loaded, Machine

    made = Machine(folder, environ={"TERM": "dumb"}, has_config=True)
    made.model = Loaded(answer="It is 972 metres.")
    return made


def _patched(folder: Path, *args: str, **more: Any) -> tuple[int, str, str]:
    """A command with a model that is told what to say."""
    from kvcli.commands.common.run_setup import Setup

    machine = _machine(folder, args[0])

    def load(self: Setup, profile: Any, tell: Any = None) -> Any:
        machine.model.cautions = ()
        return machine.model

    with mock.patch.object(Setup, "load", load), mock.patch("kvcli.fit.memory.build", return_value="a build"):
        done = machine(*args, **more)
    return done.exit, done.out, done.err


def _chat(folder: Path) -> tuple[int, str, str]:
    return _patched(folder, "chat", "-f", "b.txt", "-p", "How deep?", "--log-file", str(folder / "kept.log"))


def _talk(folder: Path) -> tuple[int, str, str]:
    typed = b"one\ntwo\n/save mine.json\n/export mine.md\n/undo\n/save mine.json\nthree\n"
    return _patched(folder, "chat", stdin=typed, tty=("stdin", "stdout", "stderr"))


def _summarize(folder: Path, *more: str) -> tuple[int, str, str]:
    from kvcli.commands.common.run_setup import Setup
    from tests.test_cli_summarize import Clerk, Office, first_sentences

    office = Office(folder, has_config=True)
    office.clerk = Clerk(first_sentences, limit=1400)

    def load(self: Setup, profile: Any, tell: Any = None) -> Any:
        office.clerk.profile = profile
        return office.clerk

    with (
        mock.patch.object(Setup, "load", load),
        mock.patch.object(Setup, "pass_times", return_value=[]),
        mock.patch("kvcli.fit.memory.build", return_value="a build"),
        mock.patch("kvcli.commands.summarize.run.SummaryRun.refuse_early", return_value=None),
    ):
        done = office("a.txt", *more)
    return done.exit, done.out, done.err


def _calibrate(folder: Path) -> tuple[int, str, str]:
    from kvcli.fit.run_log import folder_of, save_calibration
    from tests.test_calibrate import made

    found = made(date="2026-01-01T00:00:00+00:00")

    def run(world: Any, *_: Any) -> Any:
        folder_of(world.paths.cache)
        save_calibration(world.paths.cache, found)
        return found

    with mock.patch("kvcli.fit.calibrate.run_calibration", run):
        return _patched(folder, "bench", "--calibrate")


def _bug(folder: Path) -> tuple[int, str, str]:
    """A fault of ours, whose traceback goes to the log."""

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug")

    with mock.patch("kvcli.commands.doctor.examine", broken):
        return _patched(folder, "doctor")


def _disk(folder: Path) -> tuple[int, str, str]:
    """The tier on disk: what comes down is there, or the step says that there is no room and can be made again."""
    import torch

    from kvcli.kv.out_of_memory import CacheFull
    from kvcli.kv.slots import alike
    from kvcli.kv.tiers.disk import DiskTier

    said = []
    size = 4 << 20
    try:
        tier = DiskTier(alike(2, 2, 16), torch.float32, size, 8 * size, folder)
    except OSError as error:
        return 1, "", f"error: {error}"
    stored = {0: 0, 1: 0}

    def take(layer: int, n: int) -> None:
        k = torch.arange(stored[layer], stored[layer] + n, dtype=torch.float32)[None, :, None].expand(2, n, 16)
        try:
            tier.append(layer, k.contiguous(), -k, stored[layer])
        except CacheFull as error:
            said.append(str(error))
            return
        stored[layer] += n

    for layer, n in ((0, 100), (1, 300), (0, 400)):
        take(layer, n)
    ctypes.CDLL(None).faults_arm(str(folder).encode(), 0, 0, 0, 0)
    for layer in stored:  # the rest of the room is there, all of it
        while stored[layer] < 4096:
            before = stored[layer]
            take(layer, min(1024, 4096 - before))
            if stored[layer] == before:
                return 1, "", f"room for {before} slots of layer {layer} only: {said}"
    for layer, n in stored.items():
        found = tier.slots(layer)
        right = torch.equal(found.k[0, :, 0], torch.arange(n, dtype=torch.float32)) and torch.equal(found.v, -found.k)
        if not right:
            return 1, "", f"layer {layer} holds something else"
    return 0, "", ""


def _saved_chat(folder: Path) -> None:
    from kvcli.chat.saved_chats import SavedChats
    from kvcli.schemas.turn import SCHEMA, ChatDocument

    said = {"user": "one", "assistant": "two"}
    messages = [{"role": role, "text": text, "documents": [], "finish": None} for role, text in said.items()]
    about = {"schema": SCHEMA, "title": "Older", "model": "demo", "system": None, "pending": []}
    chats = SavedChats(folder / "home/data")
    older = chats.begin("20260101-000000-abcdef", is_locked=False)
    chats.write(older, ChatDocument.model_validate(about | {"messages": messages}))


DATABASE, OF_SQLITE = "home/data/kvcli.db", ("-wal", "-shm", "-journal")
CASES = {
    "chat -p": Case(_chat, (3,)),
    "chat": Case(_talk),
    "chat -c": Case(lambda folder: _patched(folder, "chat", "-c", "-p", "And now?"), (3,), had=_saved_chat),
    "summarize": Case(_summarize),
    "summarize -o": Case(lambda folder: _summarize(folder, "-o", "out.md"), (1, 3), same=("out.md",)),
    "profiles new": Case(
        lambda folder: _patched(folder, "profiles", "new", "fresh"), (1, 3), same=("home/config/profiles/fresh.toml",)
    ),
    "profiles new -o": Case(
        lambda folder: _patched(folder, "profiles", "new", "fresh", "-o", "new.toml"), (1, 3), same=("new.toml",)
    ),
    "bench --calibrate": Case(_calibrate, (1,)),
    "an internal error": Case(_bug, usual=1),
    "disk tier": Case(_disk, (1,)),
}


# --- the storm


def furnish(folder: Path) -> None:
    """What the user had before."""
    from kvcli.demo import weights_dir

    pages = ["The river rose by 12 metres in March. Nobody was hurt.", "The old bridge failed at noon. It was rebuilt."]
    held = {
        "a.txt": "\f".join(f"{page} " + " ".join(f"word{i}" for i in range(400)) for page in pages),
        "b.txt": "The well is 972 metres deep.",
        "out.md": "an older summary\n",
        "mine.md": "an older chat\n",
        "kept.log": "an older line\n",
        "home/config/config.toml": f'default_model = "{weights_dir()}"\n[profiles.mine]\nextends = "exact"\n',
        "home/cache/calibration/program-a build": f"{500 << 20}\n",
        "home/config/profiles/old.toml": 'extends = "exact"\n',
        "home/data/runs.jsonl": "{}\n",
        "home/state/kvcli.log": "an older traceback\n",
    }
    for name, text in held.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def ended(case: Case, folder: Path) -> Ended:
    """Run it here, whatever it does."""
    code, out, err = case.run(folder)
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    return Ended(code, out, err, files)


def wrong(case: Case, before: dict[str, bytes], usual: Ended, got: Ended, *, is_rerun: bool) -> Iterator[str]:
    """What is bad about a run; `before` is what was there when it began."""
    if got.code != usual.code and (is_rerun or got.code not in case.codes):
        yield f"exit {got.code}: {got.err[-400:]}"
    if "Traceback" in got.out + got.err or ("internal" in got.err and "internal" not in usual.err):
        yield f"a traceback: {got.err[-600:]}"
    if got.code and "error: " not in got.err and not got.err.startswith(("error", "room", "layer")):
        yield f"exit {got.code} without a word: {got.err[-300:]}"
    if got.code == usual.code and got.out != usual.out:
        yield f"another answer: {got.out[-200:]!r}"
    for name, data in before.items():
        now = got.files.get(name)
        if now is None and not name.endswith(OF_SQLITE):
            yield f"{name} is gone"
        elif now is not None and not (now == data or now.startswith(data) or whole(name, now, usual, got.files)):
            yield f"{name} is damaged: {now[:80]!r}"
    if DATABASE in before and (lost := (_turns(before) or set()) - (_turns(got.files) or set())):
        yield f"{DATABASE} has lost {lost}"
    for name, data in got.files.items():
        if name not in before and ".part" not in name and not whole(name, data, usual, got.files):
            yield f"{name} is not whole: {data[:80]!r}"
        if ".part" in name and is_rerun:
            yield f"{name} is left over"
    for name in case.same if got.code == usual.code else ():
        if got.files.get(name) != usual.files[name]:
            yield f"{name} is not what it should be: {(got.files.get(name) or b'')[:80]!r}"


def whole(name: str, data: bytes, usual: Ended, files: dict[str, bytes]) -> bool:
    """Whether a file has all of its content: as in the undisturbed run, or, where times stand in it, its last line."""
    if name.startswith(DATABASE):
        return name.endswith(OF_SQLITE) or _turns(files) is not None
    if name.endswith(".json"):
        try:
            json.loads(data)
        except ValueError:
            return False
        return True
    if name.endswith((".jsonl", ".log")) or "history" in name:
        return not data or data.endswith(b"\n")
    return data == usual.files.get(name) or (name.endswith(".md") and data.endswith(b"\n"))


def _turns(files: dict[str, bytes]) -> set[tuple[str, str]] | None:
    """Questions and answers as SQLite finds them when it opens these files; None if its own check fails."""
    with tempfile.TemporaryDirectory() as folder, suppress(sqlite3.DatabaseError):
        for side in ("", "-wal", "-journal"):  # a journal left by a write that failed is rolled back
            if f"{DATABASE}{side}" in files or not side:
                (Path(folder) / f"a.db{side}").write_bytes(files.get(f"{DATABASE}{side}", b""))
        with closing(sqlite3.connect(Path(folder) / "a.db")) as db:
            if list(db.execute("PRAGMA integrity_check")) == [("ok",)]:
                return set(db.execute("SELECT question, answer FROM turns"))
    return None


def storm(names: list[str], step: int) -> Tally:
    """All faults in these cases: of the calls beyond the eighth every `step`-th."""
    tally = Tally()
    for name in names:
        case = CASES[name]
        before = had_before(case)
        usual, again, _ = in_a_folder(case, (0, 0, False, False))
        assert usual.code == case.usual, usual
        for what, (number, lasting, half) in FAULTS.items():
            k = 0
            while True:
                k += 1 if k < 8 else step
                got, rerun, seen = in_a_folder(case, (k, number, lasting, half))
                if seen < k:
                    break
                tally.tried += 1
                found = [*wrong(case, before, usual, got, is_rerun=False)]
                expected = again if got.code == usual.code else usual
                kept = {name: data for name, data in got.files.items() if ".part" not in name}
                found += [f"rerun: {text}" for text in wrong(case, kept, expected, rerun, is_rerun=True)]
                tally.bad += [f"{name}, {what}, call {k}: {text}" for text in found]
        print(f"{name}: {tally.tried:,} tried, {len(tally.bad)} bad", file=sys.stderr, flush=True)
    return tally


def had_before(case: Case) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as made:
        furnish(Path(made))
        case.had(Path(made))
        return {p.relative_to(made).as_posix(): p.read_bytes() for p in Path(made).rglob("*") if p.is_file()}


def in_a_folder(case: Case, fault: tuple[int, int, bool, bool]) -> tuple[Ended, Ended, int]:
    """The run with the fault and the one after it, in a furnished folder; and how many calls the first made."""
    libc = ctypes.CDLL(None)
    folder = Path(tempfile.mkdtemp(prefix="kvcli-faults-"))
    here = Path.cwd()
    try:
        furnish(folder)
        case.had(folder)
        os.chdir(folder)
        libc.faults_arm(str(folder).encode(), *fault)
        got = ended(case, folder)
        seen = int(libc.faults_seen())
        libc.faults_arm(b"", 0, 0, 0, 0)
        return got, ended(case, folder), seen
    finally:
        libc.faults_arm(b"", 0, 0, 0, 0)
        os.chdir(here)
        shutil.rmtree(folder)


def built(folder: Path) -> Path | None:
    """The shim, compiled; None without a compiler, or where there is no such loader."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    made = folder / "faults.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", made, SHIM, "-ldl"], check=True)
    return made


@measurement("A call that writes fails", is_right=is_unbroken)
def stress_faults(
    cases: Words = tuple(CASES), step: Annotated[int, "of the calls beyond the eighth, every so-manieth"] = 1
) -> Rows:
    tally = storm(picked(cases, CASES), step)
    print("\n".join(tally.bad))
    yield {"what": "a call that writes fails: ENOSPC, EIO, EINTR", "tried": tally.tried, "bad": len(tally.bad)}


def main() -> int:
    """Run this again in a process with the shim."""
    with tempfile.TemporaryDirectory() as folder:
        if (shim := built(Path(folder))) is None:
            sys.exit("no C compiler here")
        env = os.environ | {"LD_PRELOAD": str(shim), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TERM": "dumb"}
        return subprocess.run([sys.executable, *sys.argv], env=env, check=False).returncode


if __name__ == "__main__":
    if "faults.so" not in os.environ.get("LD_PRELOAD", ""):
        sys.exit(main())
    stress_faults.main()
