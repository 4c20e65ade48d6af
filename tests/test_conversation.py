"""A conversation keeps what was said, forgets what failed, and reads only what is new."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvcli.api import End, Read, Text, Turn
from kvcli.chat.conversation import Chat
from kvcli.chat.saved_chats import SavedChats
from kvcli.chat.transcript import tokens_of_turn
from kvcli.documents import Document, document_of
from kvcli.engine.stats import Stats
from kvcli.errors import BadInput, ContextOverflow, UsageError
from kvcli.models.text import decode, encode, render_text
from tests.fake_model import FakeModel, fake_info
from tests.small_tokenizers import demo

ANSWER = "It is 972 metres."


@pytest.fixture
def model():
    return FakeModel(answer=ANSWER)


@pytest.fixture
def chat(model, tmp_path):
    return Chat(model, "Be brief.", saved_chats=SavedChats(tmp_path))


def prompts(model):
    return ["".join(map(chr, ids)) for ids in model.prompts]


def texts(chat):
    return [m.text for m in chat.messages]


def report(name="r.md", text="The report."):
    return document_of(text.encode(), name)


def test_each_question_carries_the_whole_conversation(chat, model):
    chat.send("How deep?")
    turn = chat.send("Really?")
    assert turn.text == ANSWER
    assert texts(chat) == ["How deep?", ANSWER, "Really?", ANSWER]
    assert [m.finish for m in chat.messages] == [None, "stop", None, "stop"]
    assert prompts(model)[1] == f"<system>Be brief.\n<user>How deep?\n<assistant>{ANSWER}\n<user>Really?\n<assistant>"


def test_a_stream_is_events_with_the_end_last(chat):
    events = list(chat.stream("How deep?"))
    assert any(isinstance(e, Read) for e in events)
    assert "".join(e.text for e in events if isinstance(e, Text)) == ANSWER
    assert isinstance(events[-1], End)


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_question_is_refused(chat, text):
    with pytest.raises(BadInput) as caught:
        chat.send(text)
    assert caught.value.code == "empty_prompt"
    assert chat.messages == []


def test_overflow_leaves_the_conversation_as_it_was(chat, model):
    chat.send("How deep?")
    chat.attach(report(text="x" * 3000))
    before = (list(chat.messages), list(chat.pending))
    with pytest.raises(ContextOverflow):
        chat.send("And now?")
    assert (chat.messages, chat.pending) == before


def test_cancel_keeps_what_was_said_and_marks_it(chat):
    said = []
    for event in chat.stream("How deep?", cancel=lambda: len(said) >= 2):
        if isinstance(event, Text):
            said.append(event.text)
    assert chat.messages[1].text == "".join(said)
    assert [m.finish for m in chat.messages] == [None, "interrupted"]
    assert ANSWER.startswith(chat.messages[1].text)


@pytest.mark.parametrize("way", ["close", "throw"])
def test_an_abandoned_stream_keeps_what_was_said(chat, way):
    events = chat.stream("How deep?")
    for event in events:
        if isinstance(event, Text):
            break
    if way == "close":
        events.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            events.throw(KeyboardInterrupt)
    assert texts(chat) == ["How deep?", event.text]
    assert chat.messages[1].finish == "interrupted"


def test_stopped_before_the_first_word_is_as_if_never_asked(chat):
    chat.attach(report())
    turn = chat.send("How deep?", cancel=lambda: True)
    assert (turn.finish, turn.text) == ("interrupted", "")
    assert chat.messages == []
    assert [d.name for d in chat.pending] == ["r.md"]


def test_closing_after_the_end_changes_nothing(chat):
    events = chat.stream("How deep?")
    for event in events:
        if isinstance(event, End):
            break
    events.close()
    assert [m.finish for m in chat.messages] == [None, "stop"]


# --- documents


def test_documents_belong_to_the_question_they_came_with(chat, model):
    chat.attach(report())
    chat.send("How deep?")
    chat.send("Really?")
    assert chat.pending == []
    assert [d.name for d in chat.documents] == ["r.md"]
    assert prompts(model)[0].endswith("<user>The report.\n\nHow deep?\n<assistant>")
    assert prompts(model)[1].count("The report.") == 1


def test_dropping_counts_through_messages_and_what_waits(chat):
    first, second, third = (report(f"{n}.md", f"text {n}") for n in "abc")
    chat.attach(first)
    chat.attach(second)
    chat.send("One?")
    chat.attach(third)
    assert chat.drop(1) is second
    assert chat.documents == [first, third]
    assert chat.drop(1) is third
    assert chat.pending == []
    with pytest.raises(BadInput, match="document 2 does not exist"):
        chat.drop(1)
    chat.drop(0)
    with pytest.raises(BadInput, match="none is attached"):
        chat.drop(0)


# --- changing


def test_undo_takes_back_whole_turns(chat):
    for question in ("One?", "Two?", "Three?"):
        chat.send(question)
    assert chat.undo() == 1
    assert texts(chat)[-2] == "Two?"
    assert chat.undo(9) == 2
    assert chat.undo() == 0
    assert chat.messages == []


def test_retry_and_edit_replace_the_last_turn_with_its_documents(chat, model):
    chat.attach(report())
    chat.send("How deep?")
    list(chat.retry())
    assert texts(chat) == ["How deep?", ANSWER]
    list(chat.edit("How high?"))
    assert texts(chat) == ["How high?", ANSWER]
    assert prompts(model)[0] == prompts(model)[1]
    assert "The report.\n\nHow high?" in prompts(model)[2]
    assert chat.pending == []


def test_an_edit_that_fails_changes_nothing(chat):
    chat.attach(report())
    chat.send("How deep?")
    waiting = report("later.md")
    chat.attach(waiting)
    before = list(chat.messages)
    with pytest.raises(ContextOverflow):
        list(chat.edit("x" * 3000))
    assert (chat.messages, chat.pending) == (before, [waiting])


def test_what_waits_for_the_next_question_is_not_part_of_a_retry(chat, model):
    chat.attach(report())
    chat.send("How deep?")
    chat.attach(report("later.md", "Later."))
    list(chat.retry())
    assert "Later." not in prompts(model)[-1]
    assert [d.name for d in chat.pending] == ["later.md"]


def test_each_retry_draws_anew(chat, model):
    chat.send("How deep?")
    for _ in range(2):
        list(chat.retry())
    assert model.seeds == [None, 6, 7]


def test_nothing_to_retry(chat):
    for change in (chat.retry, lambda: list(chat.edit("x"))):
        with pytest.raises(BadInput, match="no question"):
            change()


def test_clear_keeps_the_system_text(chat):
    chat.attach(report())
    chat.send("How deep?")
    chat.clear()
    assert (chat.messages, chat.documents, chat.system) == ([], [], "Be brief.")


def test_tokens_add_up_to_the_prompt(chat):
    chat.attach(report())
    chat.send("How deep?")
    chat.attach(report("next.md", "Later."))
    rows = dict(chat.tokens())
    assert rows["system"] == len("Be brief.")
    assert rows["file r.md"] == len("The report.")
    assert rows["question 1"] == len("How deep?")
    assert rows["answer 1"] == len(ANSWER)
    now = "".join(f"<{r}>{t}\n" for r, t in [("system", "Be brief."), ("user", "The report.\n\nHow deep?")])
    now += f"<assistant>{ANSWER}\n<assistant>"
    assert sum(rows.values()) - rows["file next.md, next question"] == len(now)


# --- keeping


def _texts(documents):
    return [Document(d.name, d.text, d.sha256) for d in documents]


def _kept(message):
    return replace(message, documents=tuple(_texts(message.documents)))


def test_saved_conversations_come_back_whole(chat, model, tmp_path):
    chat.attach(report())
    chat.send("How deep?")
    chat.attach(report("next.md", "Later."))
    name = chat.save()
    again = Chat(model, saved_chats=chat.saved_chats).load(name)
    assert [m.content for m in again.messages] == [m.content for m in chat.messages]
    # What the model read of a file is kept. Its sections are for summaries, which do not start from a chat.
    assert (again.messages, again.pending) == ([_kept(m) for m in chat.messages], _texts(chat.pending))
    assert again.system == "Be brief."
    assert again.title == "How deep?"
    assert again.save("Wells") == name
    assert [(entry.id, entry.title) for entry in chat.saved_chats.entries()] == [(name, "Wells")]
    assert [p.name for p in tmp_path.iterdir()] == ["kvcli.db"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "kvcli.chat/2"}', "\0"])
def test_what_is_not_a_conversation_is_refused_and_changes_nothing(chat, tmp_path, text):
    chat.send("How deep?")
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(BadInput) as caught:
        chat.load(tmp_path / "x.json")
    assert caught.value.code == "not_a_chat"
    assert texts(chat) == ["How deep?", ANSWER]
    with pytest.raises(BadInput, match="no such chat file"):
        chat.load(tmp_path / "y.json")


def test_exports_in_three_forms(chat, tmp_path):
    chat.attach(report())
    chat.send("How deep?")
    markdown = chat.export(tmp_path / "c.md").read_text()
    assert markdown.startswith("# How deep?\n\n## System\n\nBe brief.\n\n## You\n\n*r.md, 1 line*\n\nHow deep?")
    assert markdown.endswith(f"## demo\n\n{ANSWER}\n")
    rows = [json.loads(line) for line in chat.export(tmp_path / "c.jsonl").read_text().splitlines()]
    assert rows[1] == {"role": "user", "content": "The report.\n\nHow deep?"}
    assert json.loads(chat.export(tmp_path / "c.json").read_text())["schema"] == "kvcli.chat/1"
    assert (tmp_path / "c.md").stat().st_mode & 0o777 == 0o600


def test_exports_do_not_overwrite_unless_told(chat, tmp_path):
    path = tmp_path / "c.md"
    path.write_text("mine")
    with pytest.raises(BadInput, match="exists already"):
        chat.export(path)
    assert path.read_text() == "mine"
    assert chat.export(path, overwrite=True).read_text() != "mine"
    with pytest.raises(UsageError, match="cannot tell the format"):
        chat.export(tmp_path / "c.pdf")
    with pytest.raises(BadInput, match="no such folder"):
        chat.export(tmp_path / "no" / "c.md")


def test_an_interrupted_answer_is_marked_in_markdown(tmp_path):
    chat = Chat(FakeModel(answer=ANSWER, info=fake_info(id="demo")))
    for event in (events := chat.stream("How deep?")):
        if isinstance(event, Text):
            break
    events.close()
    assert "*[stopped]*" in chat.export(tmp_path / "c.md").read_text()


def test_the_same_text_twice_is_two_documents(chat):
    twin = Document("a", "same", "0")
    chat.attach(twin)
    chat.send("One?")
    chat.attach(Document("a", "same", "0"))
    assert len(chat.documents) == 2


class Spelling(FakeModel):
    """Answers letter by letter, as its tokenizer never would, and stops with the stop token."""

    def stream(self, prompt, **options):
        self.prompts.append(list(prompt))
        letters = [i for c in self.answer for i in encode(demo(), c)]
        yield End(Turn(self.answer, (*letters, demo().eos_token_id), "stop", Stats()))


def test_what_the_model_has_recorded_is_asked_in_the_same_tokens():
    model = Spelling(answer=ANSWER, tokenizer=demo())
    chat = Chat(model, "Be brief.")
    turn = chat.send("How deep?")
    chat.send("Really?")
    first, second = model.prompts
    assert encode(demo(), ANSWER) != list(turn.ids[:-1])
    assert second[: len(first) + len(turn.ids)] == [*first, *turn.ids]
    assert decode(demo(), second) == render_text(demo(), [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "How deep?"},
        {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "Really?"},
    ])[0]  # fmt: skip


def test_a_text_cut_by_a_stop_string_is_read_anew():
    turn = Turn("It is", tuple(encode(demo(), ANSWER)), "stop", Stats())
    assert tokens_of_turn(demo(), "prompt", [1, 2], turn) == ("", [])
