"""Damaged documents by the thousand: each is read, or refused with an error for the user.

    python tests/bench/stress_documents.py [--count 4000] [--processes 100]

Files of each kind with stretches replaced at random: most go to the reader itself, some to the whole with the process
around it, as a user's do. Anything but a document or an error for the user is bad.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.documents import document_of
from kvcli.errors import KvcliError
from tests.bench.harness import Rows, is_unbroken, measurement
from tests.documents.test_fuzz import SEEDS, inside, mutated


def damaged(kind: str, rng: random.Random) -> bytes:
    """One of the files with up to eight stretches replaced, or cut short."""
    data = rng.choice(SEEDS[kind])
    splices = [
        (rng.randrange(1 << 20), rng.randrange(64), rng.randbytes(rng.randrange(24))) for _ in range(rng.randint(1, 8))
    ]
    data = mutated(data, splices)
    return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.2 else data


def whole(kind: str, data: bytes) -> None:
    """As a user's file is read."""
    try:
        document_of(data, f"f.{kind}")
    except KvcliError:
        return


@measurement("Damaged documents", is_right=is_unbroken)
def stress_documents(
    count: Annotated[int, "for the readers of html, epub and docx"] = 4000,
    processes: Annotated[int, "of each kind, pdf too, with the process around it"] = 100,
) -> Rows:
    bare = [kind for kind in SEEDS if kind != "pdf"]  # its parser is C, which may end the process it runs in
    plan = [(bare[i % len(bare)], inside) for i in range(count)]
    plan += [(kind, whole) for kind in SEEDS for _ in range(processes)]
    bad = 0
    for i, (kind, read) in enumerate(plan):
        data = damaged(kind, random.Random(i))
        try:
            read(kind, data)
        except Exception as error:
            bad += 1
            kept = Path(tempfile.gettempdir(), f"kvcli-storm-{i}.{kind}")
            kept.write_bytes(data)
            print(f"{kept}: {type(error).__name__}: {error}", flush=True)
    yield {"what": "damaged documents", "tried": len(plan), "bad": bad}


if __name__ == "__main__":
    stress_documents.main()
