"""Bundled demo models: locations of their weights and of the example documents."""

from importlib.resources import files
from pathlib import Path

# by name; the small model drafts for the other
BUNDLED = {"demo": "weights", "demo-small": "weights-small"}


def weights_dir(name: str = "demo") -> Path:
    """Folder with the weights, tokenizer and model card, as transformers loads it."""
    return Path(str(files(__name__))) / BUNDLED[name]


def report_path() -> Path:
    """The example document: a generated field report of about twenty pages."""
    return Path(str(files(__name__))) / "report.md"


def sample_path() -> Path:
    """The sample PDF: a generated field report of twenty pages with findings planted in it."""
    return Path(str(files(__name__))) / "sample.pdf"
