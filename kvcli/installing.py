"""What to type for a package that a plain install leaves out, or that is too old."""

from __future__ import annotations

import shlex
import sys

EXTRAS = {  # as pyproject.toml has them
    "docs": ("beautifulsoup4", "lxml", "markdownify"),
    "schema": ("llguidance",),
    "llama": ("llama-cpp-python",),
}


def pip(*words: str) -> str:
    """`pip install` of the Python that runs this: another's would help nothing."""
    return shlex.join([sys.executable or "python", "-m", "pip", "install", *words])
