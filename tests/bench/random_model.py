"""Write the random 152M Llama of the benchmarks to a folder, with a tokenizer, so that every command can load it.

    python tests/bench/random_model.py FOLDER

Its text means nothing and its speed is that of any Llama of its size: what is timed is arithmetic, not words.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.decode import build


def write(folder: Path) -> None:
    """The weights as safetensors, beside the demo model's tokenizer; ids beyond its words have no text."""
    from kvcli.demo import weights_dir

    build().save_pretrained(folder)
    for file in weights_dir().glob("*token*"):
        shutil.copy(file, folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
