"""The process that parses and the one that asks: what is told, and what is not believed."""

from __future__ import annotations

import io
from random import Random

import pytest

from kvcli.documents import Limits, document_of
from kvcli.documents.document import ParseJob
from kvcli.documents.parse_in_process import _Answer, parse_outside
from kvcli.errors import BadInput
from kvcli.worker_process import BOOT
from tests.documents import books, made

WHOLE = made.plain(Random(1)).data
END = (
    b'{"end": {"kind": "pdf", "unit": "page", "title": null, "n_pages": 2, "without_text": [], "blank": 0,'
    b' "notes": []}}'
)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{}",
        b'{"section": [1]}',
        b'{"section": ["x", "y", "z"]}',
        b'{"end": {}}',
        b'{"end": {"unit": "mile"}}',
        b'{"error": {"message": "m"}}',
        b'{"error": []}',
        b"\xff",
        b'{"section": [Infinity, "a", "b"]}',
        b"[" * 200_000,
        b'{"error": ' + b"[" * 200_000,
        b'{"section": [1, "x]\\n[p. 2]", "text"]}',
        b'{"section": [1, "x\\u001b", "text"]}',
        b'{"section": [1, "", "text"]}',
        b'{"section": [1, "a", " "]}',
        b'{"section": [0, "a", "text"]}',
        b'{"section": [1, "a", "\\ud800"]}',
        b'{"section": [1, "\\udfff", "text"]}',
        END.replace(b"null", b'"\\ud800"'),
        END.replace(b"2", b"1e999"),
        END.replace(b"0", b"1e999"),
    ],
)
def test_a_parser_that_was_taken_over_cannot_confuse_the_parent(line):
    with pytest.raises(BadInput):
        _Answer(ParseJob("a.pdf", "pdf")).take(line)


def test_no_text_of_a_section_passes_for_another():
    answer = _Answer(ParseJob("a.pdf", "pdf"))
    answer.take(b'{"section": [1, "1", "[p. 9]\\nfalse"]}')
    answer.take(END)
    assert answer.parsed is not None
    assert [s.text for s in answer.parsed.sections] == ["(p. 9)\nfalse"]


@pytest.mark.parametrize("second", [b'{"section": [1, "1", "again"]}', b'{"section": [2, "7", "another\'s"]}'])
def test_pages_keep_their_order_and_their_numbers(second):
    answer = _Answer(ParseJob("a.pdf", "pdf"))
    answer.take(b'{"section": [1, "1", "text"]}')
    with pytest.raises(BadInput, match="cannot be read"):
        [answer.take(line) for line in (second, END)]


def test_an_error_that_is_no_text_is_not_passed_on():
    with pytest.raises(BadInput) as caught:
        _Answer(ParseJob("a.pdf", "pdf")).take(
            b'{"error": {"message": "\\ud800", "code": "x", "lines": [], "detail": {}, "try_": []}}'
        )
    assert "nonsense" in caught.value.lines[0]


def test_a_parser_that_ends_itself_by_any_signal(monkeypatch):
    monkeypatch.setattr("kvcli.worker_process.BOOT", "import os; os.kill(os.getpid(), 40)")
    with pytest.raises(BadInput) as caught:
        document_of(WHOLE, "a.pdf")
    assert (caught.value.code, "its parser was stopped" in caught.value.lines[0]) == ("damaged_file", True)


@pytest.mark.parametrize(("name", "pages"), [("a.pdf", True), ("a.html", False), ("a.epub", False), ("a.docx", False)])
def test_only_where_there_are_pages_they_are_advised(name, pages):
    data = {"a.pdf": WHOLE, "a.html": b"<html><p>x", "a.epub": books.epub(), "a.docx": books.word(books.paragraph("x"))}
    with pytest.raises(BadInput) as caught:
        document_of(data[name], name, limits=Limits(wall=0.001))
    assert caught.value.code == "document_too_heavy"
    assert ("--pages" in str(caught.value.try_)) is pages


def test_what_is_nested_too_deeply_is_called_by_its_kind(monkeypatch):
    """An archive is looked into by the process that parses, so all it knows may be that it is one."""
    from kvcli.documents import worker

    told: list[BadInput] = []

    def deep(*_):
        raise RecursionError

    job = b'{"name": "a", "kind": "zip", "spans": [], "password": null, "typed": false, "known": {}}\n'
    monkeypatch.setattr(worker, "parse", deep)
    monkeypatch.setattr(worker, "set_limits", lambda *_: None)
    monkeypatch.setattr(worker, "enter_sandbox", lambda: None)
    monkeypatch.setattr(worker, "tell_error", told.append)
    monkeypatch.setattr(worker.sys, "stdin", type("In", (), {"buffer": io.BytesIO(job)}))
    monkeypatch.setattr(worker.os, "fdopen", lambda *_: io.BytesIO())
    assert worker.main(0, {}, 0) == 0
    assert [error.message for error in told] == ["a cannot be read as an archive (EPUB, DOCX)"]


def test_the_parsers_see_neither_torch_nor_the_folder_they_start_in(tmp_path, monkeypatch):
    (tmp_path / "pypdfium2.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert document_of(WHOLE, "a.pdf").n_pages == 3
    assert "site" not in BOOT


def test_the_password_is_in_no_list_of_processes(tmp_path, monkeypatch):
    from kvcli import worker_process

    seen = []
    real = worker_process.subprocess.Popen

    def watch(command, **options):
        seen.append(command)
        return real(command, **options)

    monkeypatch.setattr(worker_process.subprocess, "Popen", watch)
    data = made.encrypted("river", "board", "RC4-128")(Random(1)).data
    with io.BytesIO() as _, (tmp_path / "f").open("w+b") as file:
        file.write(data)
        assert parse_outside(file, ParseJob("a.pdf", "pdf", password="river")).sections
    assert seen
    assert "river" not in str(seen)
