"""A second question about a document, from another command: how much sooner its first token comes.

    python tests/bench/kept.py [--model smollm2-135m] [--document FILE] [--reps 5] [--tokens 8000] [--out FILE]

Each round is two commands with a cache folder of their own, and two with nothing kept, by turns. Then, in one process
and with a random model of 152M parameters: reading so many tokens against taking them from disk, first token to first
token, and whether the logits are the same to the bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.bench.harness import ROOT, Rows, measurement, spread
from tests.bench.resume import resumed

QUESTIONS = ("What is this document about?", "Which commands does it name?")


def asked(model: str, document: Path, question: str, home: Path, keep: str) -> dict[str, Any]:
    """The figures of one command."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "KVCLI_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    (home / "config").mkdir(parents=True, exist_ok=True)
    (home / "config" / "config.toml").write_text(f'schema = 1\nprefix_cache_size = "{keep}"\n')
    command = [sys.executable, "-m", "kvcli", "chat", model, "-f", str(document), "-p", question]
    command += ["--json", "-P", "exact", "--max-new-tokens", "16"]
    began = time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, check=True, text=True)
    said = json.loads(done.stdout)
    times = {"first_token": said["time"]["first_token"], "wall_s": time.perf_counter() - began}
    return {"prompt": said["tokens"]["prompt"], "cached": said["tokens"]["cached"], **times}


def commands(model: str, document: Path, reps: int) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {"first question": [], "second": [], "second, nothing kept": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(reps + 1):
            home, bare = Path(folder, f"kept{i}"), Path(folder, f"bare{i}")
            for each in (home, bare):
                data = each / "data"
                data.mkdir(parents=True)
                if (mine := Path(os.environ.get("KVCLI_HOME", ""), "data", "models")).is_dir():
                    (data / "models").symlink_to(mine)
                if (mine := Path(os.environ.get("KVCLI_HOME", ""), "cache", "gguf")).is_dir():
                    (each / "cache").mkdir()
                    (each / "cache" / "gguf").symlink_to(mine)
            round_ = {
                "first question": asked(model, document, QUESTIONS[0], home, "8GiB"),
                "second": asked(model, document, QUESTIONS[1], home, "8GiB"),
                "second, nothing kept": asked(model, document, QUESTIONS[1], bare, "0GiB"),
            }
            for side, figures in round_.items():
                if i:
                    found[side].append(figures)
    return [
        {
            "side": side,
            "prompt": all_of[0]["prompt"],
            "cached": all_of[0]["cached"],
            "first token, s": spread((each["first_token"] for each in all_of), 3),
            "command, s": spread((each["wall_s"] for each in all_of), 3),
        }
        for side, all_of in found.items()
    ]


@measurement("Read once")
def kept(
    model: str = "smollm2-135m",
    document: Path = ROOT / "docs" / "design" / "drafting.md",
    reps: int = 5,
    tokens: int = 8000,
) -> Rows:
    yield from commands(model, document.resolve(), reps)
    taken = resumed(tokens, max(1, reps // 2), "exact")
    said = (
        f"{taken['tokens']:,} tokens of random-152M: read {taken['read_s']:.2f} s, kept in {taken['keeping_s']:.2f} s, "
        f"taken from disk {taken['kept_s']:.3f} s, {taken['gain']:.0f} times sooner, the same tokens."
    )
    note = f"In brackets: least and most of {reps} rounds. In one process, {said}"
    return {"document": document.name, "note": note, "resumed": taken}


if __name__ == "__main__":
    kept.main()
