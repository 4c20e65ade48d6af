"""Peak memory as `kvcli fit` foretells it against what fresh processes use.

    python tests/bench/fit.py [--profiles exact,ngram,streaming] [--base] [--out FILE]

The demo model at 512, 2k and 6k tokens, the random 152M Llama at 512, 4k and 16k. Each process loads the model, reads
so many random tokens and decodes 16; its VmHWM is the measured peak. Estimates use the shipped figure for a bare
process, or with --base one measured first. Prints a table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

NEW = 16
CONTEXTS = {"demo": (512, 2048, 6000), "random 152M": (512, 4096, 16384)}

_RUN = """
import sys, torch
from kvcli.local import load
from kvcli.memory import peak_bytes
folder, profile, n, new = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model = load(folder, profile, set={"load.device": "cpu"})
ids = torch.randint(8, model.lm.vocab, (n - new,), generator=torch.Generator().manual_seed(1)).tolist()
model.session.feed(ids)
for step in model.session.stream(new):
    pass
print(peak_bytes(torch.device("cpu")))
"""


def measured(folder: str, profile: str, n: int) -> int:
    """Peak bytes of a process of its own."""
    words = [sys.executable, "-c", _RUN, folder, profile, str(n), str(NEW)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def compare(name: str, folder: str, profiles: list[str], base: int) -> list[dict[str, Any]]:
    """A row for each profile and context."""
    from kvcli import source
    from kvcli.fit.plan import Facts, plan, subject_of
    from kvcli.fit.room import Room
    from kvcli.profile import Profile

    subject = subject_of(source.find(folder))
    rows = []
    for profile in profiles:
        for n in CONTEXTS[name]:
            found = plan(subject, Profile.load(profile), Room("cpu", 1 << 40), n, Facts(base))
            peak = measured(folder, profile, n)
            row = {"model": name, "profile": profile, "context": n} | {
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
            rows.append(row)
            print(
                f"{name:<12} {profile:<10} {n:>6,}  {found.total / 2**20:>8,.1f}  {peak / 2**20:>8,.1f}"
                f"  {row['measured_over_estimate']:.3f}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", default="exact,ngram,streaming")
    parser.add_argument("--base", action="store_true", help="measure a bare process first")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    from kvcli.calibrate.machine import bare_process
    from kvcli.fit.plan import BASE
    from tests.bench.decode import machine
    from tests.bench.random_model import write

    base = bare_process() if args.base else BASE
    print(f"{'model':<12} {'profile':<10} {'tokens':>6}  {'estimate':>8}  {'measured':>8}  ratio     (MiB)")
    profiles = args.profiles.split(",")
    rows = compare("demo", "demo", profiles, base)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        rows += compare("random 152M", folder, profiles, base)
    about = machine()
    result = {
        "title": "Peak memory, estimated and measured",
        "command": "python tests/bench/fit.py" + (" --base" if args.base else ""),
        "machine": f"{about['cpu']}, {about['threads']} thread(s), torch {about['torch']}, "
        f"transformers {about['transformers']}, commit {about['commit']}, bare process {base / 2**20:.0f} MiB",
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
