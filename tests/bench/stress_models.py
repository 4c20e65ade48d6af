"""Broken model folders by the thousand: each must answer a token or end in an error of the model.

    python tests/bench/stress_models.py --count 50000

A child process loads them one after the other, with little more memory than a whole model takes and with seconds for
each; a child that dies or hangs is a bad outcome of the folder it had in hand.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Annotated, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.harness import Rows, is_unbroken, measurement

SECONDS = 20  # for one folder
SLICE = 1000  # folders for one process
ROOM = 1 << 30  # bytes of address space beyond what whole models took: about twice the estimate
# what a model may end in: errors of exit code 4, and what a template or a window says of the conversation
ALLOWED = {"chat_template", "context_overflow", "empty_prompt", "beyond_model"}


@dataclass
class Tally:
    """What became of the folders."""

    tried: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)  # one line each, with the number of the folder


def storm(count: int, first: int = 0, jobs: int = 1, tell: bool = True) -> Tally:
    """Folders number `first` and on; the same number is always the same folder."""
    tally, starts = Tally(), range(first, first + count, SLICE)
    shm = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=shm) as room, ThreadPoolExecutor(jobs) as pool:
        for part in pool.map(lambda at: _slice(at, min(at + SLICE, first + count), f"{room}/{at}", tell), starts):
            tally.tried += part.tried
            tally.ends += part.ends
            tally.bad += part.bad
            if tell:
                print(f"{tally.tried:,} tried, {len(tally.bad)} bad", file=sys.stderr, flush=True)
    return tally


def _slice(at: int, end: int, room: str, tell: bool) -> Tally:
    tally = Tally()
    os.mkdir(room)
    while at < end:
        at = _one_child(at, end, room, tally, tell)
    shutil.rmtree(room)
    return tally


def _one_child(at: int, end: int, room: str, tally: Tally, tell: bool) -> int:
    """Run a child until it is through or dies; returns the number to go on with."""
    command = [sys.executable, __file__, "--child", room, str(at), str(end - at)]
    quiet = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8", "errors": "replace"}
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = Path(room, "said")
    with log.open("wb") as noise, subprocess.Popen(command, env=environ, **{**quiet, "stderr": noise}) as child:
        for line in child.stdout or ():
            number, _, how = line.rstrip("\n").partition(" ")
            at = int(number) + 1
            tally.tried += 1
            tally.ends[how.partition(" ")[0]] += 1
            if how.startswith("BAD"):
                tally.bad.append(line.strip())
            if tell and how.startswith("BAD"):
                print(line.strip()[:400], file=sys.stderr, flush=True)
        status = child.wait()
    if status == 0:
        return end
    word = f"{at} BAD a process ended by {signal.Signals(-status).name if status < 0 else f'status {status}'}"
    said = log.read_text(errors="replace").strip().splitlines()[-1:]
    tally.tried += 1
    tally.bad.append(" ".join([word, *said]))
    if tell:
        print(tally.bad[-1][:400], file=sys.stderr, flush=True)
    return at + 1


# ---- the child ----


def child(room: Path, first: int, count: int) -> None:
    import resource
    import warnings

    import torch

    from tests.model_mutations import mutated, seeds, write

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    whole, folder = seeds(room / "seed"), room / "model"
    for files in whole:  # nothing is learned from a storm on models that do not load
        write(files, folder)
        assert answer(folder) == "answered", answer(folder)
    (held,) = (int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line)
    resource.setrlimit(resource.RLIMIT_AS, (held * 1024 + ROOM,) * 2)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)  # what libraries print is noise
    for number in range(first, first + count):
        chance = Random(number)
        files, name, form = mutated(chance.choice(whole), chance)
        write(files, folder, name, form)
        # nobody handles these signals, they end the process; on a busy machine seconds of its own are what counts
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.alarm(6 * SECONDS)
        how = answer(folder)
        out.write(f"{number} {how}\n")
        out.flush()


def answer(folder: Path) -> str:
    """How a question to the model in `folder` ends, in a line; BAD if it may not end so."""
    import kvcli
    from kvcli.commands.models.command import context_of
    from kvcli.errors import BadModel, KvcliError
    from kvcli.fit.plan import subject_of
    from kvcli.models import source

    try:
        found = source.find(str(folder), offline=True)
        context_of(found)  # `models list` and `fit` ask this much
        subject_of(found)
        with kvcli.load(str(folder), _profile(), offline=True) as model:
            model.chat("Be brief.").send("Hello world", max_new_tokens=2)
    except KvcliError as error:
        is_fine = isinstance(error, BadModel) or error.code in ALLOWED
        return f"{'' if is_fine else 'BAD '}{error.code} {error.message} {' '.join(error.lines)}".replace("\n", " ")
    except BaseException as error:
        return f"BAD {type(error).__name__} {_where(error)}: {str(error)[:200]}".replace("\n", " ")
    return "answered"


@cache
def _profile() -> Any:
    from kvcli.settings.profile import Profile

    return Profile.load("ngram").replace(load={"device": "cpu"})


def _where(error: BaseException) -> str:
    at = error.__traceback__
    places = []
    while at is not None:
        places.append(f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}")
        at = at.tb_next
    return " < ".join(places[:-6:-1])


@measurement("Broken model folders", is_right=is_unbroken)
def stress_models(
    count: int = 2000,
    first: Annotated[int, "number of the first folder"] = 0,
    jobs: Annotated[int, "processes at a time"] = 1,
) -> Rows:
    tally = storm(count, first, jobs)
    for how, n in tally.ends.most_common():
        print(f"{n:>8,}  {how}")
    print("\n".join(line[:400] for line in tally.bad))
    what = "model folders mutated (config, tokenizer, headers, index, weights, forms of files)"
    yield {"what": what, "tried": tally.tried, "bad": len(tally.bad)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:  # its folder, the number of the first model, and how many there are
        child(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        stress_models.main()
