"""A conversation that outlives its window: what is shown, what is said of it, and that nothing is lost."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest

import kvcli
from kvcli.chat.conversation import Chat
from kvcli.chat.database import LEFT_OUT
from kvcli.chat.overflow import ASKED, HEAD, KEPT, ContextWindow
from kvcli.chat.saved_chats import SavedChats
from kvcli.documents import document_of
from kvcli.errors import ContextOverflow
from tests.fake_model import FakeModel, fake_info
from tests.summarize.scribe import paged

ANSWER = "It is 972 metres."
LIMIT = 500  # characters, which are the fake model's tokens


@pytest.fixture(params=["drop", "summarize", "compress"])
def chat(request, tmp_path):
    return chat_of(request.param, tmp_path)


def chat_of(how, folder):
    return Chat(
        FakeModel(answer=ANSWER, on_overflow=how, info=fake_info(limit=LIMIT)),
        "Be brief.",
        saved_chats=SavedChats(folder),
    )


def shown(chat):
    return "".join(map(chr, chat.text_session.prompts[-1]))


def ask(chat, n, start=0):
    for i in range(start, start + n):
        chat.send(f"Question {i:03}?")


def test_by_default_it_is_refused_and_the_way_out_is_named(tmp_path):
    chat = chat_of("error", tmp_path)
    with pytest.raises(ContextOverflow):
        ask(chat, 50)
    assert not chat.visible_messages.left


@pytest.mark.parametrize(("prompt", "models"), [(900, []), (20_000, ["qwen3-0.6b"]), (9_000_000, [])])
def test_models_whose_window_is_long_enough_are_named(prompt, models):
    with pytest.raises(ContextOverflow) as caught:
        ContextWindow(limit=500, most=1000, reserve=10).room(prompt, 10)
    assert [hint.split()[1] for hint in caught.value.try_ if hint.startswith("-m ")] == models


@pytest.mark.parametrize("long", [60, 110, 170, 600])
def test_pages_that_fit_are_named_where_a_document_is_too_long(tmp_path, long):
    chat, pages = chat_of("error", tmp_path), ["x" * long] * 9
    chat.attach(replace(paged(*pages), name="a report.pdf"))
    with pytest.raises(ContextOverflow) as caught:
        chat.send("What?")
    summarizes = f"kvcli summarize 'a report.pdf' -m {chat.text_session.info.id}, which reads it in parts"
    assert summarizes in caught.value.try_[:2]
    named = re.fullmatch(r"-f 'a report.pdf':1-(\d), pages that fit", caught.value.try_[0])
    assert (named is not None) == (long < 500)
    for n, fits in ((int(named[1]), True), (int(named[1]) + 2, False)) if named else ():
        chat.drop(0)
        chat.attach(paged(*pages[:n]))
        with nullcontext() if fits else pytest.raises(ContextOverflow):
            chat.send("What?")
            chat.undo()
            chat.attach(paged(*pages[:n]))


def test_a_text_without_pages_is_to_be_summarized(tmp_path):
    chat = chat_of("error", tmp_path)
    chat.attach(document_of(b"line\n" * 200, "notes.txt"))
    with pytest.raises(ContextOverflow) as caught:
        chat.send("What?")
    assert caught.value.try_[0].startswith("kvcli summarize notes.txt -m ")


def test_the_first_questions_are_left_out_and_nothing_is_forgotten(chat):
    ask(chat, 50)
    assert len(chat.messages) == 100
    prompt = shown(chat)
    assert len(prompt) <= LIMIT
    assert "Question 049?" in prompt
    assert "Question 000?" not in prompt
    assert prompt.startswith("<system>Be brief.\n<user>")


def test_each_time_a_quarter_of_the_window_is_made_free(tmp_path):
    chat = chat_of("drop", tmp_path)
    left = set[int]()
    for i in range(50):
        before = chat.visible_messages
        ask(chat, 1, i)
        if chat.visible_messages != before:
            assert len(shown(chat)) <= LIMIT * KEPT
        left.add(chat.visible_messages.left)
    assert 2 < len(left) < 25


def test_what_is_left_out_is_said_each_time(chat):
    ask(chat, 50)
    said = [note for note in chat.notes if "exceeds the context window" in note]
    assert len(said) > 1
    assert said[0].startswith("the chat exceeds the context window; questions 1–")


def test_where_nothing_of_it_is_at_hand_it_goes_and_the_line_says_why(tmp_path):
    chat = chat_of("compress", tmp_path)
    ask(chat, 50)
    assert chat.visible_messages.left
    assert "could not be compressed" in chat.notes[0]


def test_documents_stay_with_what_is_left(chat):
    chat.attach(document_of(b"The report, of 972 metres.", "r.md"))
    ask(chat, 50)
    assert shown(chat).count("The report, of 972 metres.") == 1
    assert chat.visible_messages.left


def test_notes_are_written_by_the_model_and_stand_before_the_first_question(tmp_path):
    chat = chat_of("summarize", tmp_path)
    ask(chat, 50)
    asked = ["".join(map(chr, ids)) for ids in chat.text_session.prompts]
    wrote = [prompt for prompt in asked if ASKED in prompt]
    assert wrote
    assert f"<user>{HEAD}\n{ANSWER}\n\nQuestion" in shown(chat)
    assert HEAD in wrote[-1], "the notes before are part of what the next are on"
    assert not any(HEAD in message.text or ASKED in message.text for message in chat.messages)


def test_a_question_that_does_not_fit_alone_is_refused_and_all_is_as_before(chat):
    ask(chat, 3)
    before = list(chat.messages), chat.visible_messages
    with pytest.raises(ContextOverflow):
        chat.send("long " * LIMIT)
    assert (chat.messages, chat.visible_messages) == before


@pytest.mark.parametrize("change", ["undo", "clear", "drop", "retry"])
def test_whatever_makes_it_shorter_brings_back_what_fits(tmp_path, change):
    chat = chat_of("drop", tmp_path)
    chat.attach(document_of(b"The report, of 972 metres." * 10, "r.md"))
    ask(chat, 9)
    assert chat.visible_messages.left
    if change == "undo":
        chat.undo(8)
    elif change == "clear":
        chat.clear()
    elif change == "drop":
        chat.drop(0)
    else:
        list(chat.retry())
        assert "Question 008?" in shown(chat)
        return
    ask(chat, 1, 9)
    assert chat.visible_messages.left == 0
    assert len(shown(chat)) <= LIMIT


def test_the_table_of_tokens_says_what_is_not_shown(chat):
    ask(chat, 50)
    rows = chat.tokens()
    assert rows[1] == (f"questions 1 to {chat.visible_messages.left // 2}, not sent", 0)
    assert rows[2][0] == f"question {chat.visible_messages.left // 2 + 1}"
    assert rows[-1][0] == "template"
    assert rows[-1][1] > 0


def test_ctrl_c_while_notes_are_written_ends_the_question(tmp_path):
    chat = chat_of("summarize", tmp_path)
    ask(chat, 12)
    n = len(chat.messages)
    while not chat.visible_messages.left:
        ask(chat, 1)
        n = len(chat.messages)
    turn = chat.send("And?", cancel=lambda: True)
    assert turn.finish == "interrupted"
    assert len(chat.messages) == n


@pytest.mark.parametrize("how", ["drop", "summarize", "compress"])
def test_a_model_goes_on_beyond_its_window(how):
    profile = kvcli.Profile.load("ngram").replace(
        context={"limit": 240, "reserve": 16, "on_overflow": how}, sample={"max_new_tokens": 24}, exactness="approx"
    )
    with kvcli.load("demo", profile) as model, model.open() as text:
        chat = kvcli.Chat(text, "Answer briefly.")
        for i in range(12):
            turn = chat.send(f"What is the depth of well number {i}?")
            assert turn.stats.prompt <= 240
        assert bool(chat.visible_messages.left) == (how != "compress")
        assert len(chat.messages) == 24


def again(chat, folder, limit=LIMIT):
    """The chat as another run opens it, under the default settings."""
    other = Chat(FakeModel(answer=ANSWER, info=fake_info(limit=limit)), saved_chats=SavedChats(folder))
    return other.load(chat.save())


def overflown(how, folder):
    """A chat that was shown less of for its last question."""
    chat = chat_of(how, folder)
    while not chat.visible_messages.left:
        ask(chat, 1, len(chat.messages) // 2)
    return chat


@pytest.mark.parametrize("how", ["drop", "summarize"])
def test_a_chat_that_is_opened_again_knows_what_was_left_out_and_says_so(how, tmp_path):
    chat = overflown(how, tmp_path)
    chat.attach(document_of(b"The report.", "r.md"))
    other = again(chat, tmp_path)
    assert other.visible_messages == chat.visible_messages
    assert bool(other.visible_messages.notes) == (how == "summarize")
    assert f"questions 1–{chat.visible_messages.left // 2} are not sent; it " in other.notes[0]
    assert (other.messages, [d.name for d in other.pending]) == (chat.messages, ["r.md"])
    for each in (chat, other):
        each.send("And?")
    assert shown(other) == shown(chat)
    (entry,) = other.saved_chats.entries()
    assert entry.documents == 1


def test_what_brings_back_the_beginning_does_so_in_what_is_kept(tmp_path):
    chat = overflown("summarize", tmp_path)
    again(chat, tmp_path)
    chat.undo()
    assert not again(chat, tmp_path).visible_messages.left


def test_under_a_wider_window_all_is_shown_again(tmp_path):
    chat = overflown("drop", tmp_path)
    other = again(chat, tmp_path, limit=10 * LIMIT)
    assert (other.visible_messages.left, other.notes) == (0, [])


@pytest.mark.parametrize("left", ["3", "0", "-2", "400", "1e3", "two"])
def test_what_a_damaged_database_says_was_left_out_is_not_believed(left, tmp_path):
    chat = overflown("summarize", tmp_path)
    name = chat.save()
    chat.saved_chats._run(lambda db: db.execute("UPDATE documents SET name = ? WHERE n = ?", [left, LEFT_OUT]), None)
    saved, _ = chat.saved_chats.read(name)
    assert saved.left_out is None
    assert len(saved.messages) == len(chat.messages)
