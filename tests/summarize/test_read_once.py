"""A summary takes what was read of its documents: by a chat, for another summary, for a pack. The same to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcli
from kvcli.chat.conversation import Chat
from kvcli.chat.document_pack import MANIFEST, Pack, open_pack
from kvcli.chat.model import Model
from kvcli.chat.text_session import TextSession
from kvcli.commands.summarize.documents import of_pack
from kvcli.documents import Document, document_of, read_document, with_documents
from kvcli.errors import ContextOverflow, UsageError
from kvcli.prefix_cache.prefix_cache import PrefixCache
from kvcli.summarize.parts import AsRead
from kvcli.summarize.plan import PlanWindow, make_plan
from kvcli.summarize.request import Request
from kvcli.summarize.result import Summary
from kvcli.summarize.wording import Wording, wording_of
from tests.summarize.scribe import Scribe, paged, summary_of

ROOT = Path(__file__).parents[2]
BRIEF = {"sample.max_new_tokens": 24}
NOTES = document_of(b"# Wells\nThe well is deep.\n\n# Roads\nThe road is shut.\n", "notes.md")
OTHER = paged("The mill burnt in May.", "The dam held.", name="b.pdf")


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with kvcli.load("demo", "exact") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def report() -> Document:
    return read_document("demo:pdf", name="report.pdf")


def summed(text: TextSession, document: Document, wording: Wording | None = None, **asked: Any) -> Summary:
    request = Request(**asked)
    plan = make_plan([document], request, PlanWindow.of(text), wording) if wording is not None else None
    return summary_of(text, [document], request, plan=plan)


def cached(summary: Summary) -> int:
    (answered,) = summary.turns
    return answered.turn.stats.cached


def on(prefix_cache: PrefixCache | None, model: Model) -> TextSession:
    text = model.open()
    text.model.prefix_cache = prefix_cache
    return text


def test_after_a_chat_about_the_document_and_the_second_time(model: Model, report: Document, tmp_path: Path) -> None:
    shelf = PrefixCache(tmp_path / "kv", 1 << 30, model.lm, min_work=0)
    plain, read = summed(on(None, model), report), report.tokens(model.tokenizer)
    chat = Chat(on(shelf, model))
    chat.attach(report)
    chat.send("What is the depth of well Bethden?", max_new_tokens=4)
    chat.text_session.keep()
    for _ in range(2):
        text = on(shelf, model)
        again = summed(text, report)
        text.keep()
        assert read - 8 < cached(again) < read + 16
        assert [p.marked for p in again.points] == [p.marked for p in plain.points]
        assert [a.turn.ids for a in again.turns] == [a.turn.ids for a in plain.turns]
    model.prefix_cache = None


def test_of_another_style_or_length_the_question_alone_is_read(model: Model, report: Document) -> None:
    text = model.open(set=BRIEF)
    asked: list[dict[str, Any]] = [{}, {"style": "prose", "focus": "wells"}, {"length": "short", "lang": "French"}]
    found = [cached(summed(text, report, Wording(merges=False), **each)) for each in asked]
    assert found[0] == 0
    assert min(found[1:]) > report.tokens(model.tokenizer) - 8


@pytest.mark.parametrize("document", [OTHER, document_of(b"[p. 1]\n One.\n\n[p. 2]\nTwo. \n", "a.txt")])
def test_pages_stand_in_its_prompt_as_in_a_chats(document: Document) -> None:
    scribe = Scribe(lambda _: "- All is well.")
    summary_of(scribe, [document])
    assert f"<user>{with_documents('', [document])}\n\n---\n" in scribe.asked[0]


# --- packs


@pytest.mark.parametrize("profile", ["exact", "snap"])
def test_a_pack_is_summarised_as_its_document_is(model: Model, report: Document, tmp_path: Path, profile: str) -> None:
    text = model.open(profile)
    talk = Chat(text, called="demo")
    talk.attach(report)
    about = talk.pack(tmp_path / "one.kvs")
    pack = open_pack(tmp_path / "one.kvs")
    (given,) = of_pack(pack).documents
    assert (given.unit, given.text, len(given.sections)) == ("page", report.text, len(report.sections))
    asked = model.open(profile)
    asked.pack = pack
    plan = make_plan([given], Request(), PlanWindow.of(asked), wording_of(asked.info), as_read(pack))
    summary = summary_of(asked, [given], Request(), plan=plan)
    assert cached(summary) == about.tokens
    want = summary_of(text, [report], Request(), plan=plan) if profile == "snap" else summed(on(None, model), report)
    assert [p.marked for p in summary.points] == [p.marked for p in want.points]
    assert summary.points


def as_read(pack: Pack) -> AsRead:
    return AsRead(with_documents("", pack.documents), pack.chat.system)


@pytest.mark.parametrize("documents", [[NOTES], [NOTES, OTHER]])
def test_where_the_text_that_was_read_has_no_marks_places_are_looked_for(documents: list[Document]) -> None:
    scribe = Scribe(lambda _: "- The road is shut.\n- The well is of gold and silver.")
    read = AsRead(with_documents("", documents), "Be brief.")
    plan = make_plan(documents, Request(), PlanWindow.of(scribe), read=read)
    summary = summary_of(scribe, documents, plan=plan)
    name = "notes.md " if len(documents) > 1 else ""
    assert summary.points[0].marked == f"The road is shut. [{name}§ Roads]"
    assert scribe.asked[0].startswith(f"<system>Be brief.\n<user>{read.text}\n\n---\n")
    assert "mark of the" not in scribe.asked[0]


def test_a_pack_that_cannot_be_asked_whole_is_refused() -> None:
    read = AsRead(with_documents("", [NOTES]))
    with pytest.raises(UsageError, match="short passages"):
        make_plan([NOTES], Request(), PlanWindow.of(Scribe(str)), Wording(part=(2, 3), sentence=96), read)
    with pytest.raises(ContextOverflow) as caught:
        make_plan([NOTES], Request(), PlanWindow.of(Scribe(str, limit=100)), read=read)
    assert "kvcli summarize FILE, which reads it in parts" in caught.value.try_
    assert "--mode parts" not in caught.value.try_


def test_a_pack_is_summarised_from_the_command_line(tmp_path: Path) -> None:
    env = {**os.environ, "KVCLI_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def typed(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvcli", *args]
        return subprocess.run(
            command, cwd=tmp_path, env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip

    made = typed("pack", "demo:pdf", "-o", "one.kvs", "-m", "demo", "--set", "kv.v_bits=8", "-P", "balanced")
    assert made.returncode == 0, made.stderr
    packed = typed("summarize", "--pack", "one.kvs", "--json")
    assert packed.returncode == 0, packed.stderr
    found = json.loads(packed.stdout)
    about = json.loads((tmp_path / "one.kvs" / MANIFEST).read_text())
    assert (about["settings"]["kv.v_bits"], about["profile"]) == ("8", "balanced")
    assert found["turns"][0]["turn"]["tokens"]["cached"] == about["tokens"]
    both = typed("summarize", "--pack", "one.kvs", "demo:pdf")
    assert (both.returncode, "--pack excludes files" in both.stderr) == (2, True)
