"""Peak memory as `kvcli fit` foretells it against what `kvcli chat` uses, under every shipped profile.

    python tests/bench/fit.py [--models demo] [--tokens 2048] [--profiles exact,ngram,streaming] [--resume FILE]
        [--out FILE]

The demo model at 2k and nearly 8k tokens, the random 152M Llama at 2k, 8k and 16k. Each figure is of a command of its
own with nothing known of this machine, which reads a report of so many tokens and answers in at most 16; its VmHWM is
the measured peak. What the program takes is measured first, as `kvcli fit` does. Every peak goes to `--resume` at
once, so a run that was cut off goes on where it was; several runs share one file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.bench.harness import Ints, Row, Rows, Words, measurement, once

NEW = 16
AROUND = 64  # tokens of the chat template, the question and the answer, at most
CONTEXTS = {"demo": (2048, 8000), "random 152M": (2048, 8192, 16384)}


def text_of(n: int) -> str:
    """The bundled report, again and again, to n tokens of the demo model, which both models read."""
    from transformers import AutoTokenizer

    from kvcli.demo import weights_dir
    from kvcli.documents import read_document

    tokenizer = AutoTokenizer.from_pretrained(weights_dir())
    text = read_document("demo:report").text
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = ids * (n // len(ids) + 1)
    return str(tokenizer.decode(ids[:n]))


def drafted(profile: str) -> dict[str, str]:
    """What a profile leaves open: which model drafts; the demo does, for itself and for the other model alike."""
    from kvcli.settings.profile import Profile

    return {"model": "demo"} if Profile.load(profile).spec.method == "model" else {}


def measured(model: str, profile: str, text: str) -> dict[str, int]:
    """Tokens in memory and peak bytes of a command of its own."""
    with tempfile.TemporaryDirectory() as home:
        file = Path(home, "report.md")
        file.write_text(text, encoding="utf-8")
        words = ["--json", "--offline", "chat", model, "-P", profile, "-f", str(file), "-p", "List its findings."]
        words += ["--device", "cpu", "--max-new-tokens", str(NEW)]
        words += [word for key, value in drafted(profile).items() for word in ("--set", f"spec.{key}={value}")]
        env = os.environ | {"PYTHONPATH": str(ROOT), "KVCLI_HOME": home}
        done = subprocess.run(
            [sys.executable, "-m", "kvcli", *words], cwd=home, env=env, capture_output=True, text=True, check=False
        )
    if done.returncode:
        sys.exit(f"{model} under {profile}: {done.stdout}{done.stderr}")
    turn = json.loads(done.stdout)
    return {"context": turn["tokens"]["context"], "peak": turn["memory"]["peak_bytes"]}


def compare(name: str, model: str, lengths: Iterable[int], profiles: list[str], base: int) -> Iterator[Row]:
    """A row for each profile and context."""
    from kvcli.fit.available_memory import AvailableMemory
    from kvcli.fit.plan import MeasuredFacts, plan, subject_of
    from kvcli.models import source
    from kvcli.settings.profile import Profile

    subject = subject_of(source.find(model))
    for n in lengths:
        text = text_of(n - AROUND)
        for profile in profiles:
            run = once(f"{name} {n} {profile}", lambda profile=profile, text=text: measured(model, profile, text))
            context, peak = run["context"], run["peak"]
            own = Profile.load(profile).replace(spec=drafted(profile))
            facts = MeasuredFacts(base, find=lambda name: subject_of(source.find(name)))
            found = plan(subject, own, AvailableMemory("cpu", 1 << 40), context, facts)
            row = {"model": name, "profile": profile, "context": context} | {
                f"{what}_mib": round(size / 2**20, 1)
                for what, size in (
                    ("weights", found.need.weights),
                    ("kv", found.need.kv),
                    ("working", found.need.working),
                    ("estimate", found.total),
                    ("measured", peak),
                )
            }
            row["measured_over_estimate"] = round(peak / found.total, 3)
            yield row


@measurement("Peak memory, estimated and measured")
def fit(
    models: Words = tuple(CONTEXTS),
    tokens: Annotated[Ints, "as above unless given"] = (),
    profiles: Annotated[Words, "every shipped one unless given"] = (),
) -> Rows:
    from kvcli.fit.memory import measured as program
    from tests.bench.random_model import write

    base = program()
    shipped = sorted(file.stem for file in (ROOT / "kvcli/profiles").glob("*.toml"))
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "152M"))
        for name in models:
            at = "demo" if name == "demo" else f"{folder}/152M"
            yield from compare(name, at, tokens or CONTEXTS[name], list(profiles or shipped), base)
    return {"bare_command_mib": round(base / 2**20)}


if __name__ == "__main__":
    fit.main()
