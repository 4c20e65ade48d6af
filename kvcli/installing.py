"""Commands to type for a package that a plain install leaves out, or that is too old."""

from __future__ import annotations

import shlex
import sys

EXTRAS = {  # as in pyproject.toml
    "docs": ("beautifulsoup4", "lxml", "markdownify"),
    "ocr": ("rapidocr", "onnxruntime"),
    "schema": ("llguidance",),
    "mcp": ("mcp",),
    "serve": ("starlette", "uvicorn", "prometheus-client"),
    "llama": ("llama-cpp-python",),
}


def pip(*words: str) -> str:
    """`pip install` for the Python that runs this, because another Python's pip would not help."""
    return shlex.join([sys.executable or "python", "-m", "pip", "install", *words])
