"""The bundled demo model: where its weights and its example document lie."""

from importlib.resources import files
from pathlib import Path


def weights_dir() -> Path:
    """Folder with the weights, tokenizer and model card, as transformers loads it."""
    return Path(str(files(__name__))) / "weights"


def report_path() -> Path:
    """The example document: a generated field report of about twenty pages."""
    return Path(str(files(__name__))) / "report.md"


def sample_path() -> Path:
    """The sample PDF: a generated field report of twenty pages with findings planted in it."""
    return Path(str(files(__name__))) / "sample.pdf"
