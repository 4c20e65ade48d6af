"""`kvcli chat -f`, `/file` and a pipe take documents of every kind; what was decided in reading them is said."""

from __future__ import annotations

from random import Random

import pytest

from kvcli.commands.common.run_setup import Setup
from tests.documents import made
from tests.documents.test_formats import PAGE
from tests.fakes import Machine


@pytest.fixture
def machine(tmp_path, monkeypatch):
    machine = Machine(tmp_path)
    monkeypatch.setattr(Setup, "load", machine.load)
    (tmp_path / "paper.pdf").write_bytes(made.partly_scanned(Random(1)).data)
    return machine


def asked(machine):
    return "".join(map(chr, machine.model.prompts[-1]))


def test_pages_of_a_pdf_stand_under_their_marks(machine):
    pages = made.partly_scanned(Random(1)).pages
    done = machine("chat", "-p", "What?", "-f", "paper.pdf:3-4", "--ocr", "off")
    assert done.exit == 0
    prompt = asked(machine)
    assert "[p. 3]\n" in prompt
    assert pages[2] in " ".join(prompt.split())
    assert pages[0] not in " ".join(prompt.split())
    assert "paper.pdf: no text on page 4, perhaps scanned" in done.err
    assert "text recognition (OCR) reads such pages" in done.err


def test_a_piped_pdf_and_a_page_under_another_name(machine, tmp_path):
    (tmp_path / "page\x1b.txt").write_text(PAGE)
    done = machine("chat", "-p", "What?", "-f", "page\x1b.txt", stdin=made.hyphenated(Random(1)).data)
    assert done.exit == 0
    assert "=== Document 2: standard input ===\n[p. 1]\n" in asked(machine)
    assert "page␛.txt is named .txt but its content is HTML" in done.err
    assert "\x1b" not in done.err


@pytest.mark.parametrize(
    ("file", "code", "words"),
    [
        ("paper.pdf:9", "no_such_page", "it has 6 pages"),
        ("scan.pdf", "no_text", "seem to be scanned"),
        ("locked.pdf", "encrypted", "--password-file"),
        ("cut.pdf", "damaged_file", "its end is missing"),
        ("folder", "file_count", "folder"),
        ("papr.pdf:3", "file_missing", "did you mean paper.pdf?"),
    ],
)
def test_what_cannot_be_read_exits_3_before_a_model_loads(machine, tmp_path, monkeypatch, file, code, words):
    (tmp_path / "scan.pdf").write_bytes(made.scanned(Random(1)))
    (tmp_path / "locked.pdf").write_bytes(made.encrypted("river", "board", "RC4-128")(Random(1)).data)
    (tmp_path / "cut.pdf").write_bytes(made.plain(Random(1)).data[:2000])
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(Setup, "load", None)
    done = machine("chat", "-p", "What?", "-f", file, "--ocr", "off")
    assert (done.exit, done.out) == (3, "")
    assert f"[{code}]" in done.err
    assert words in done.err


def test_the_plan_reads_pages_too(machine):
    done = machine("chat", "-f", "paper.pdf:1", "--dry-run")
    assert "file     paper.pdf, " in done.out


@pytest.mark.parametrize(("beginning", "read"), [(b"%PDF-1.7\n", 1200), (b"words", 1001)])
def test_a_pdf_from_a_pipe_may_be_larger_than_a_text(machine, monkeypatch, beginning, read):
    """Both are refused here: what shows is how far each was read."""
    from kvcli.commands.common import inputs
    from kvcli.environment import Environment

    counts = []
    real = Environment.read_stdin

    def counted(world, most):
        counts.append(len(data := real(world, most)))
        return data

    monkeypatch.setattr(Environment, "read_stdin", counted)
    monkeypatch.setattr(inputs, "MAX_BYTES", 1000)
    monkeypatch.setattr("kvcli.documents.read.MAX_BYTES", 1000)
    done = machine("chat", "-p", "What?", stdin=beginning.ljust(1200, b"x"))
    assert (done.exit, sum(counts)) == (3, read)
