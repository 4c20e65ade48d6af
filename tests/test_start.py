"""What a command does before anything large is imported, and what it leaves alone for good. Nothing is timed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import Machine

ROOT = Path(__file__).parents[1]

# A terminal that presses Ctrl-C at the first word, and says whether torch was there by then.
EAGER = """
import sys
from io import StringIO
from pathlib import Path
from kvcli import cli
from kvcli.environment import Paths, Environment

class Terminal(StringIO):
    def isatty(self):
        return True

    def write(self, text):
        if "{word}" in text:
            print("torch" in sys.modules, file=sys.__stdout__)
            raise KeyboardInterrupt
        return super().write(text)

err, environ = Terminal(), {{"KVCLI_HOME": "{home}", "TERM": "{term}"}}
world = Environment(StringIO(), StringIO(), err, environ, Path("{home}"), Paths.of(environ))
print(cli.run({args}, world))
print(err.getvalue().splitlines()[-1])
"""


@pytest.mark.parametrize("term", ["dumb", "xterm"])
@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["chat", "demo", "-p", "Hello"], "loading demo"),
        (["summarize", "demo:pdf", "--no-cache"], "reading demo:pdf"),
        (["chat", "demo", "-f", "demo:pdf", "-p", "Hello"], "reading demo:pdf"),
        (["fit", "demo"], "reading the headers of demo"),
    ],
)
def test_a_word_stands_there_before_torch_and_ctrl_c_ends_with_one_line(tmp_path, args, word, term):
    code = EAGER.format(word=word, home=tmp_path, args=args, term=term)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "130", "interrupted"]


def test_an_answer_imports_what_it_needs(tmp_path):
    run = [sys.executable, "-X", "importtime", "-m", "kvcli", "chat", "demo", "-p", "Hello", "-n", "1"]
    env = {"PATH": "", "KVCLI_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"torch", "transformers", "kvcli.engine.loading.open_lm"} <= loaded
    ours = {"kvcli.schemas.bench", "kvcli.schemas.summary", "kvcli.schemas.heads", "kvcli.bench", "kvcli.heads"}
    theirs = {"bitsandbytes", "pypdfium2", "lxml", "bs4", "docx", "prompt_toolkit", "scipy", "pandas", "sklearn"}
    assert not loaded & (ours | theirs)


def test_what_was_meant_is_asked(tmp_path, monkeypatch):
    (tmp_path / "hub" / "models--Qwen--Qwen3-8B").mkdir(parents=True)
    (tmp_path / "mistrl").mkdir()
    (tmp_path / "mistrl" / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    machine = Machine(tmp_path)
    for typed, meant in (("dmo", "demo"), ("Qwen/Qwen3-8b", "Qwen/Qwen3-8B"), ("mistral", "mistrl")):
        assert f"did you mean {meant}?" in machine("chat", typed, "-p", "hi", "--offline").err
