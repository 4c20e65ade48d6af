"""A document that nobody named a model for is not answered by the toy: refused, or asked about on a terminal."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvcli.commands.common.run_setup import Setup
from kvcli.demo import weights_dir
from kvcli.fit import available_memory
from kvcli.models import source
from kvcli.models.catalog import BY_NAME, CATALOG, choices
from tests.fakes import Machine

ROOT = Path(__file__).parents[1]
TTY = ("stdin", "stdout", "stderr")


def offered(gib):
    """The models that this memory has room for."""
    return [known for known, _ in choices(available_memory.AvailableMemory("cpu", gib << 30).usable)]


@pytest.fixture
def new(tmp_path, monkeypatch):
    """A new user with a document and 24 GiB; `loaded` says which model was asked for, and how."""
    machine, machine.loaded = Machine(tmp_path), []
    machine.fetched = []
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "a.md").write_text("The pump stands in the yard.\n")

    def load(self, profile, tell=None):
        machine.loaded.append((self.name, profile.load.quant))
        return machine.load(profile)

    monkeypatch.setattr(Setup, "load", load)
    monkeypatch.setattr(Setup, "look", lambda *_: None)  # the models that are offered are nowhere here
    monkeypatch.setattr(Setup, "fetch", lambda *_: source.find("demo"))
    monkeypatch.setattr("kvcli.commands.models.model_names.cached_ids", list)
    # last: a module that is imported meanwhile would keep the stand-in
    monkeypatch.setattr("kvcli.commands.models.fetch.ensure_model", lambda _, name: machine.fetched.append(name))
    monkeypatch.setattr(available_memory, "look", lambda: available_memory.AvailableMemory("cpu", 24 << 30))
    return machine


@pytest.mark.parametrize(
    "args",
    [
        ["chat", "-f", "a.md", "-p", "Where?"],
        ["chat", "-f", "demo:report", "-f", "a.md", "-p", "Where?"],
        ["summarize", "a.md"],
        ["summarize", "-"],
        ["summarize", "a.md", "--dry-run"],
        ["chat", "--dry-run", "-f", "a.md"],
    ],
)
def test_a_document_is_not_answered_by_a_model_that_nobody_named(new, args):
    done = new(*args, stdin=b"" if "-" not in args else b"Text.")
    assert (done.exit, done.out, new.loaded) == (2, "", [])
    said = " ".join(done.err.split())
    assert "the bundled demo model knows only its own reports [no_model]" in said
    _, medium, large = offered(24)
    assert f"kvcli models get {large.name} " in said
    assert f"try: kvcli models get {medium.name}, then -m {medium.name}" in said
    assert "-m demo, to use the demo model anyway" in said


def test_standard_input_beside_a_question_is_a_document_too(new):
    done = new("chat", "-p", "Where?", stdin=b"The pump stands in the yard.\n")
    assert (done.exit, new.loaded) == (2, [])
    assert "no model is named for standard input" in done.err


def test_a_chat_with_the_unnamed_demo_goes_on_without_a_document_it_cannot_know(new):
    assert new("chat", "-p", "Hello").exit == 0
    done = new("chat", "-c", "-f", "a.md", "-p", "Where?")
    assert (done.exit, done.out) == (2, "")
    assert "[no_model]" in done.err
    assert new("chat", "-c", "-m", "demo", "-f", "a.md", "-p", "Where?").exit == 0


def test_the_refusal_is_an_error_object_with_the_models(new):
    error = json.loads(new("chat", "-f", "a.md", "-p", "Where?", "--json", tty=TTY).out)
    assert (error["schema"], error["code"], error["exit"]) == ("kvcli.error/1", "no_model", 2)
    assert error["detail"]["models"][-1].startswith(f"-m {offered(24)[-1].name}")


@pytest.mark.parametrize("args", [["-m", "demo"], ["demo"]])
def test_who_names_the_demo_is_told_what_it_is(new, args):
    done = new("chat", *args, "-f", "a.md", "-p", "Where?")
    assert (done.exit, new.loaded) == (0, [("demo", "none")])
    assert "note: the demo model knows only its own reports; it invents answers about a.md" in done.err


def test_a_default_model_is_a_name(new, tmp_path):
    config = tmp_path / "home" / "config" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(f'default_model = "mine"\n[models.mine]\npath = "{weights_dir()}"\n')
    done = new("chat", "-f", "a.md", "-p", "Where?")
    assert (done.exit, new.loaded) == (0, [("mine", "none")])
    assert "demo knows" not in done.err


def test_its_own_reports_need_no_name_and_other_questions_a_word(new):
    done = new("chat", "-f", "demo:report", "--dry-run")
    assert (done.exit, done.err) == (0, "")
    assert "it knows only its own reports" in " ".join(new("chat", "-p", "Where?").err.split())
    assert new("chat", "-m", "demo", "-p", "Where?").err.count("own reports") == 0
    assert new("summarize", "--extract-only", "a.md").out == "The pump stands in the yard.\n"


def test_names_of_the_config_come_first_if_their_model_is_there_and_fits(new, tmp_path):
    config = tmp_path / "home" / "config" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(f'[models.mine]\npath = "{weights_dir()}"\n[models.gone]\npath = "/nowhere"\n')
    error = json.loads(new("summarize", "a.md", "--json").out)
    assert error["detail"]["models"][0] == "-m mine"
    assert "-m gone" not in error["detail"]["models"]


@pytest.mark.parametrize(
    ("said", "loaded"),
    [
        (b"2\n", [(offered(24)[1].name, "none")]),
        (b"d\n", [("demo", "none")]),
        (b"\n", []),
        (b"", []),
        (b"9\n", []),
        (b"yes\n", []),
    ],
)
def test_on_a_terminal_it_is_asked(new, said, loaded):
    done = new("chat", "-f", "a.md", "-p", "Where?", stdin=said, tty=TTY)
    assert (done.exit, new.loaded) == (0 if loaded else 2, loaded)
    assert new.fetched == [name for name, _ in loaded if name != "demo"]
    assert "1 to 3, d, or Enter to quit" in done.err


def test_the_choice_brings_its_quantized_weights(new, monkeypatch):
    """Those of a model without a file in 4 bits."""
    some = [known for known in CATALOG if known is BY_NAME["qwen3-4b"] or known.parameters < 1e9]
    monkeypatch.setattr("kvcli.models.catalog.CATALOG", some)
    monkeypatch.setattr(available_memory, "look", lambda: available_memory.AvailableMemory("cpu", 9 << 30))
    done = new("chat", "-f", "a.md", "-p", "Where?", stdin=b"2\n", tty=TTY)
    assert "kvcli models get qwen3-4b 7.5 GiB, needs 6.5 GiB, Apache-2.0, --quant int8" in " ".join(done.err.split())
    assert new.loaded == [("qwen3-4b", "int8")]


def test_nobody_is_asked_who_said_so(new):
    done = new("chat", "-f", "a.md", "-p", "Where?", "--no-input", stdin=b"1\n", tty=TTY)
    assert (done.exit, new.loaded) == (2, [])


def test_a_file_attached_in_a_chat_is_refused_and_the_chat_goes_on(new):
    new.environ["TERM"] = "dumb"
    done = new("chat", stdin=b"/file a.md\n/files\n", tty=TTY)
    assert done.exit == 0
    assert "[no_model]" in done.err
    assert "no document is attached" in done.err
    assert "note: the demo model knows only" in new("chat", "-m", "demo", stdin=b"/file a.md\n", tty=TTY).err


def test_it_is_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "a.md").write_text("The pump stands in the yard.\n")
    run = [sys.executable, "-X", "importtime", "-m", "kvcli", "summarize", str(tmp_path / "a.md")]
    environ = {"KVCLI_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "PATH": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, "[no_model]" in done.stderr) == (2, True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "psutil" in loaded
    assert not loaded & {"torch", "transformers", "pypdfium2"}
