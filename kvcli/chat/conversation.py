"""A chat: questions and answers in turn, with documents, shown to the model as far as its context window allows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli.api import Cancel, End, Event, Events, Finish, Read, Text, Thought, ToolCall, Turn, turn_of
from kvcli.chat.overflow import ASKED, KEPT, NOTES, VisibleMessages, fitting, refuse_longer, shorter
from kvcli.chat.transcript import (
    Message,
    PromptTokens,
    contents_of,
    documents_of,
    export_chat,
    figures_of,
    first_words,
    messages_of,
    tokens_of_turn,
)
from kvcli.documents import Document
from kvcli.errors import BadInput, ContextOverflow, DoesNotFit, EngineUnreachable, writing
from kvcli.models.adapters import lasting
from kvcli.models.text import Messages, encode, render_text, resume_ids
from kvcli.schemas.turn import SCHEMA, Call, ChatDocument, Figures, LeftOut, SavedDocument, SavedMessage

if TYPE_CHECKING:
    from kvcli.chat.saved_chats import SavedChat, SavedChats
    from kvcli.chat.text_session import TextSession
    from kvcli.schemas.pack import PackDocument

PROBES = ("a", "7", "(", "\n")  # questions whose first letter merges, or does not, with the token before it


LABELS = {"user": "question", "tool": "results", "assistant": "answer"}  # of messages in a list, by role


@dataclass(frozen=True, slots=True)
class Rendered:
    """Messages rendered by the chat template, as text and as token ids."""

    contents: Messages
    text: str
    ids: list[int]
    has_template: bool


class Chat:
    """A chat: questions and answers in turn. The last message is always an answer."""

    def __init__(
        self,
        text_session: TextSession,
        system: str | None = None,
        *,
        title: str | None = None,
        saved_chats: SavedChats | None = None,
        is_locked: bool = False,
        called: str = "",
    ) -> None:
        """`saved_chats`: the saved chats that `save` adds to; None = those of the model's data folder; without one,
        saving is refused.
        `is_locked`: lock the saved chat against other processes until `close`. `called`: the name of the model that is
        saved with the chat, if not its id.
        """
        self.text_session = text_session
        self.system = system
        self.title = title
        self._saved_chats = saved_chats
        self.is_locked = is_locked
        self.called = called
        self.saved_chat: SavedChat | None = None  # the saved chat that it was saved as or loaded from
        self.messages: list[Message] = []
        self.tools: Sequence[Mapping[str, Any]] = ()  # function definitions, which each prompt has
        self.pending: list[Document] = []  # attached to the next question
        self.visible_messages = VisibleMessages()  # the messages that the model is shown
        self.notes: list[str] = []  # notes for the user on how the prompt was made, each once
        self.tell: Callable[[str], None] = lambda _: None  # called with each of these notes, during a question
        self._retries = 0
        self.prompt_tokens = PromptTokens()

    @property
    def saved_chats(self) -> SavedChats:
        """Saved chats of the user. Raises BadInput if the chat was made without them."""
        if self._saved_chats is None and self.text_session.model.data is not None:
            from kvcli.chat.saved_chats import SavedChats  # late: sqlite3 is not needed without chats

            self._saved_chats = SavedChats(self.text_session.model.data)
        if self._saved_chats is None:
            ways = ["Chat(..., saved_chats=...)"]
            raise BadInput("this chat has no folder for saved chats", code="no_place", try_=ways)
        return self._saved_chats

    # --- asking

    def send(self, text: str, **options: Any) -> Turn:
        """Ask, and return the whole answer. Options are those of `stream`."""
        return turn_of(self.stream(text, **options))

    def send_results(self, results: Sequence[str], **options: Any) -> Turn:
        """Give the results of the last answer's tool calls, in their order, and return the answer to them."""
        return turn_of(self.stream_results(results, **options))

    def stream_results(self, results: Sequence[str], **options: Any) -> Generator[Event]:
        """Give the results of tool calls, and yield the answer as `stream` does."""
        calls = self.messages[-1].calls if self.messages else ()
        if len(calls) != len(results):
            raise BadInput(
                f"the number of results ({len(results)}) is not that of the last answer's tool calls ({len(calls)})",
                code="tool_results",
                try_=["one text for each call, in their order"],
            )
        text = "\n".join(f"{call.name}: {result}" for call, result in zip(calls, results, strict=True))
        return self._ask(Message("tool", text, results=tuple(results)), **options)

    def stream(self, text: str, **options: Any) -> Generator[Event]:
        """Ask, and yield the answer as events, `End` last. Options are those of `TextSession.answer` but `messages`.
        `tools` apply to all later questions, too.

        A chat longer than the context window is refused or shown in part, see `context.on_overflow` (overflow.py). An
        answer that fails leaves the chat unchanged. An answer that is cut short (by `cancel`, Ctrl-C, lack of memory, a
        lost engine or closing the iterator) is added as "interrupted"; if it has no text yet, the chat is unchanged.
        """
        if not text.strip():
            raise BadInput("the question is empty", code="empty_prompt")
        yield from self._ask(Message("user", text, tuple(self.pending)), **options)

    def samples(self, text: str, n: int, **options: Any) -> Iterator[Events]:
        """Yield the events of n answers to a question, as `TextSession.samples` does. The chat does not keep them."""
        asked = self.rendered([*self.messages, Message("user", text, tuple(self.pending))])
        return self.text_session.samples(asked.ids, n, messages=asked.contents, **options)

    def _ask(
        self, question: Message, *, tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> Generator[Event]:
        self.tools = self.tools if tools is None else tools
        if self.text_session.on_overflow != "compress":
            session = self.text_session
            refuse_longer(question.content, session.tokenizer, session.limit, is_here=session.engine is None)
        asked = self.rendered([*self.messages, question])
        said: list[str] = []
        has_begun = ended = False
        try:
            events = self.text_session.stream(asked.ids, messages=asked.contents, **self._with_tools, **options)
            for event in events:
                has_begun = True
                if isinstance(event, Text):
                    said.append(event.text)
                elif isinstance(event, End):
                    ended = True
                    turn = event.turn
                    self._keep(question, turn.text, turn.finish, figures_of(turn.stats), turn.thinking, turn.tool_calls)
                    text_, ids = tokens_of_turn(self.text_session.tokenizer, asked.text, asked.ids, turn)
                    now = PromptTokens(text_, ids) if text_ else PromptTokens(asked.text, asked.ids)
                    self.prompt_tokens = now.after(self.prompt_tokens, asked.text, len(asked.ids))
                yield event
        except ContextOverflow as error:
            shown, n = self.visible_messages, len(self.messages)
            if has_begun or not (yield from self._leave_out(question, error.detail, options)):
                name, tokenizer = self.called or self.text_session.info.id, self.text_session.tokenizer
                where = f" --engine openai --base-url {engine.url}" if (engine := self.text_session.engine) else ""
                error.try_ = (*fitting(question.documents, error.detail, tokenizer, name, where), *error.try_)
                raise
            try:
                yield from self._ask(question, **options)
            finally:
                if len(self.messages) == n:  # no answer was added
                    self.visible_messages = shown
        except (KeyboardInterrupt, GeneratorExit, DoesNotFit, EngineUnreachable):
            if not ended:
                self._keep(question, "".join(said), "interrupted")
            raise

    def retry(self, **options: Any) -> Generator[Event]:
        """Replace the last answer by a new one. The seed changes, so that a sampled answer differs."""
        self._retries += 1
        seed = self.text_session.profile.sample.seed + self._retries
        return self.edit(self.last_question, **{"seed": seed, **options})

    def edit(self, text: str, **options: Any) -> Generator[Event]:
        """Ask `text` in place of the last question, with the same documents. A failure leaves the chat unchanged."""
        before, waiting = list(self.messages), self.pending
        self.visible_messages = VisibleMessages()
        *_, question, _ = self.messages[-2:] or self._nothing("edit")
        if question.results and text != question.text:
            self._nothing("edit: the answer before has the results of tools")
        del self.messages[-2:]
        self.pending = list(question.documents)
        kept = len(self.messages)
        try:
            yield from self._ask(question, **options) if question.results else self.stream(text, **options)
        finally:
            self.pending = waiting
            if len(self.messages) == kept:
                self.messages = before

    @property
    def last_question(self) -> str:
        return (self.messages[-2:] or self._nothing("retry"))[0].text

    # --- changing

    def attach(self, document: Document) -> None:
        """Attach a document to the next question."""
        self.pending.append(document)

    @property
    def documents(self) -> list[Document]:
        """All documents in the order of the prompt, those of the next question last."""
        return [d for m in self.messages for d in m.documents] + self.pending

    def n_questions(self, n: int | None = None) -> int:
        """Return the number of questions among all messages, or the first n. Results of tools are none."""
        return sum(message.role == "user" for message in self.messages[:n])

    def place(self, document: Document) -> int | None:
        """Return the index in `documents` of a document with the same text; None if there is none."""
        same = [i for i, d in enumerate(self.documents) if (d.sha256, d.text) == (document.sha256, document.text)]
        return same[0] if same else None

    def drop(self, i: int) -> Document:
        """Remove document `i`, an index of `documents`, from the chat. Tokens after it are prefilled again."""
        if not 0 <= i < len(self.documents):
            have = f"{len(self.documents)} attached" if self.documents else "none is attached"
            raise BadInput(f"document {i + 1} does not exist: {have}", code="no_such_document")
        self.visible_messages = VisibleMessages()
        dropped = self.documents[i]
        for at, message in enumerate(self.messages):
            if i < len(message.documents):
                rest = message.documents[:i] + message.documents[i + 1 :]
                self.messages[at] = replace(message, documents=rest)
                return dropped
            i -= len(message.documents)
        del self.pending[i]
        return dropped

    def undo(self, n: int = 1) -> int:
        """Remove the last `n` questions with all that followed them; returns how many were removed."""
        places = [i for i, message in enumerate(self.messages) if message.role == "user"]
        if gone := places[-n:] if n > 0 else []:
            del self.messages[gone[0] :]
            self.visible_messages = VisibleMessages()
        return len(gone)

    def clear(self) -> None:
        """Remove all messages and documents, but keep the system text."""
        self.messages.clear()
        self.pending.clear()
        self.visible_messages, self.title = VisibleMessages(), None
        self.close()

    # --- inspecting

    def begins(self) -> tuple[list[int], Messages]:
        """Return the ids that all prompts with the attached documents begin with, and messages of one prompt."""
        asked = [self.rendered([*self.messages, Message("user", text, tuple(self.pending))]) for text in PROBES]
        prompts = zip(*(one.ids for one in asked), strict=False)
        return [ids[0] for ids in takewhile(lambda each: len(set(each)) == 1, prompts)], asked[0].contents

    def tokens(self) -> list[tuple[str, int]]:
        """Return token counts by message and document, then of the chat template and of a condensed beginning."""
        tokenizer = self.text_session.tokenizer
        rows: list[tuple[str, int]] = []
        if self.system:
            rows.append(("system", len(encode(tokenizer, self.system))))
        if self.visible_messages.left:
            rows.append((f"questions 1 to {self.n_questions(self.visible_messages.left)}, not sent", 0))
        for i, message in enumerate(self.visible_messages.of(self.messages), self.visible_messages.left):
            rows += [(f"file {d.name}", d.tokens(tokenizer)) for d in message.documents]
            label = f"{LABELS[message.role]} {self.n_questions(i + 1)}"
            rows.append((label, len(encode(tokenizer, message.text))))
        rows += [(f"file {d.name}, next question", d.tokens(tokenizer)) for d in self.pending]
        if self.messages:
            pending = sum(d.tokens(tokenizer) for d in self.pending)
            asked = self.rendered(self.messages)
            whole = len(resume_ids(tokenizer, asked.text, ("", ()), special=not asked.has_template))
            rows.append(("template", whole - (sum(n for _, n in rows) - pending)))
            if self.prompt_tokens.begins.ids:
                rows.append(("compressed start of the chat", len(asked.ids) - whole))
        return rows

    # --- saving

    @property
    def is_saved(self) -> bool:
        """True if the chat is saved. A chat opened from a file is not, until it is saved."""
        return self.saved_chat is not None and self.saved_chat.version > 0

    @property
    def goes_on(self) -> str:
        """Return the option of `kvcli chat` that continues the chat once it is saved."""
        name = self.saved_chat.name if self.saved_chat is not None else ""
        return "-c" if self.saved_chats.find(None) == name else f"-r {name}"

    def save(self, title: str | None = None) -> str:
        """Save the chat, the first time as a new saved chat, and return its name. An unchanged chat is not written."""
        self.title = title or self.title or first_words(self.messages)
        made, saved_chat = self.document(), self.saved_chat
        if self.is_saved and saved_chat and made == saved_chat.saved.model_copy(update={"saved": made.saved}):
            return saved_chat.name
        saved_chat = saved_chat or self.saved_chats.begin(is_locked=self.is_locked)
        try:
            self.saved_chats.write(saved_chat, made)
            self.saved_chat = saved_chat
        finally:
            if self.saved_chat is None:
                saved_chat.close()
        return saved_chat.name

    def document(self) -> ChatDocument:
        """Return the chat as a document that can be continued later, with its attached documents."""
        left, notes = self.visible_messages.left, self.visible_messages.notes
        return ChatDocument(
            schema=SCHEMA,
            title=self.title,
            model=self.called or self.text_session.info.id,
            adapters=[*map(lasting, self.text_session.profile.load.adapters)],
            saved=datetime.now().astimezone().isoformat(timespec="seconds"),
            system=self.system,
            messages=[
                SavedMessage.from_attributes(
                    m,
                    documents=[SavedDocument.from_attributes(d) for d in m.documents],
                    calls=[Call.from_attributes(call) for call in m.calls],
                    results=[*m.results],
                )
                for m in self.messages
            ],
            pending=[SavedDocument.from_attributes(d) for d in self.pending],
            left_out=LeftOut(messages=left, notes=notes) if left else None,
        )

    def load(self, name: str | Path) -> Chat:
        """Become a saved chat, found by its name or words of its title, or the chat in a JSON file. The next question
        prefills the tokens that are not in the prefix cache."""
        return self.take(self.saved_chats.open(str(name), is_locked=self.is_locked))

    def take(self, opened: SavedChat) -> Chat:
        """Become the opened chat."""
        self.close()
        self.saved_chat, saved = opened, opened.saved
        self.system, self.title = saved.system, saved.title
        self.messages, self.pending = messages_of(saved), list(documents_of(saved.pending))
        self.visible_messages = self._shown_of(saved.left_out)
        return self

    def go_to(self, text_session: TextSession, called: str) -> None:
        """Continue in another text session, perhaps of another model, and close the present one."""
        before, self.text_session, self.called = self.text_session, text_session, called
        # the other model may have another tokenizer and another context window
        self.prompt_tokens, self.visible_messages = PromptTokens(), VisibleMessages()
        before.close()

    def close(self) -> None:
        """Release the saved chat for other processes. The next `save` makes a new saved chat."""
        if self.saved_chat is not None:
            self.saved_chat.close()
        self.saved_chat = None

    def export(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the chat to a .md, .json or .jsonl file."""
        return export_chat(self.document(), Path(path), overwrite=overwrite)

    def pack(self, folder: Path, on_read: Callable[[Read], None] = lambda _: None) -> PackDocument:
        """Prefill the attached documents, and save them with their KV cache in `folder`.

        `on_read` receives the progress of the prefill. The folder gets its name once it is complete. Raises BadInput
        for documents so short that a pack saves no time.
        """
        from kvcli.chat.document_pack import write_pack
        from kvcli.prefix_cache.prefix_cache import FEW, cache_key

        session = self.text_session
        (ids, contents), made_by = self.begins(), cache_key(session.model.lm)
        if len(ids) < FEW:
            raise BadInput(
                "these documents are too short for a pack",
                code="too_short",
                lines=[f"they have {len(ids):,} tokens"],
                try_=["kvcli chat -f FILE"],
            )
        on_read(Read(0, len(ids), 0, 0.0))
        # one token is generated, because that pass commits the last prompt token
        for event in session.stream(ids, messages=contents, max_new_tokens=1, ignore_eos=True):
            if isinstance(event, Read):
                on_read(event)
        assert session.session.ids[: session.session.committed] == ids, "something else was read"
        with writing(folder.name, try_=["-o NAME.kvs in another folder"]):
            return write_pack(folder, self.document(), session.session, session.profile, session.promise, made_by)

    # --- internals

    def _keep(
        self,
        question: Message,
        answer: str,
        finish: Finish,
        took: Figures | None = None,
        thinking: str = "",
        calls: tuple[ToolCall, ...] = (),
    ) -> None:
        if finish == "interrupted" and not answer:
            return
        said = Message("assistant", answer, finish=finish, figures=took, thinking=thinking, calls=calls)
        self.messages += [question, said]
        self.pending = [d for d in self.pending if not any(d is used for used in question.documents)]

    def _shown_of(self, saved: LeftOut | None) -> VisibleMessages:
        """Return the part of the chat that the model was shown; the whole chat if it now fits the context window."""
        if saved is None:
            return VisibleMessages()
        if self.messages and len(self.rendered(self.messages, VisibleMessages()).ids) <= KEPT * self.text_session.limit:
            return VisibleMessages()
        kept = "it has its notes on them" if saved.notes else "it does not know them"
        self._note_left(saved.messages, kept)
        return VisibleMessages(saved.messages, saved.notes)

    def _leave_out(
        self, question: Message, detail: dict[str, Any], options: dict[str, Any]
    ) -> Generator[Event, None, bool]:
        """Show the model less of the chat from here on; False if that cannot make the prompt fit.

        `detail`: of the ContextOverflow error, with the lengths. `options`: the options of the question.
        """
        session = self.text_session
        if (how := session.on_overflow) == "error":
            return False
        asked = [*self.messages, question]
        cancel: Cancel = options.get("cancel") or (lambda: False)
        if how == "compress":
            before, condense = self.prompt_tokens, partial(session.condense, cancel=cancel)
            now = before.condensed(self.rendered(asked).text, detail, session.can_condense, condense)
            if now is not None:
                n, fewer = now.begins.ids, len(before.ids) - len(now.ids)
                self.prompt_tokens = now
                self.note(
                    f"the chat exceeds the context window; {n + fewer:,} tokens shrink to {n:,}; facts may be lost"
                )
                return True
        of_notes = int(detail["limit"] * NOTES) if how == "summarize" else 0
        room = detail["limit"] - detail["reserve"] - of_notes
        shown = shorter(
            self.visible_messages, len(self.messages), lambda shown: len(self.rendered(asked, shown).ids), room
        )
        if shown is None:
            return False
        notes = (yield from self._write_notes(shown.left, of_notes, options)) if of_notes else ""
        self.visible_messages = replace(shown, notes=notes)
        kept = "it wrote notes on them" if notes else "it does not know them any more"
        if how == "compress":
            kept += ", because their KV cache could not be compressed"
        if not cancel():  # after a cancel nothing is answered or changed
            self._note_left(shown.left, kept)
        return True

    def _write_notes(self, left: int, n: int, options: dict[str, Any]) -> Generator[Event, None, str]:
        """Generate notes of at most n tokens on the first `left` messages. Their KV in the cache is reused."""
        asked = self.rendered([*self.messages[:left], Message("user", ASKED)])
        own = {"max_new_tokens": n, "cancel": options.get("cancel")}
        with suppress(ContextOverflow):  # the messages left out fill the window alone
            for event in self.text_session.stream(asked.ids, messages=asked.contents, **own):
                if isinstance(event, End):
                    return "" if event.turn.finish == "interrupted" else event.turn.text.strip()
                if not isinstance(event, Text | Thought):
                    yield event
        return ""

    def rendered(self, messages: Sequence[Message], shown: VisibleMessages | None = None) -> Rendered:
        """Render messages that end with a question. `shown`: the part to show, if not the present one."""
        contents: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        visible = (shown or self.visible_messages).of(messages)
        as_text = any(m.calls for m in visible) and self.text_session.model.call_syntax().as_text
        contents += contents_of(visible, as_text=as_text)
        tokenizer = self.text_session.tokenizer
        thinking, modes = self.text_session.template_variables, self.text_session.thinking_format().modes.values()
        text, has_template = render_text(tokenizer, contents, note=self.note, **thinking, **self._with_tools)
        other = next((mode for mode in modes if thinking and mode != thinking), None)
        if other is not None and render_text(tokenizer, contents, **other, **self._with_tools)[0] == text:
            self.note(
                "thinking.mode has no effect here: the model's chat template ignores it, perhaps for the system text"
            )
        known = self.prompt_tokens.of(text, self.text_session.is_compressed_prefix)
        ids = resume_ids(tokenizer, text, known, special=not has_template)
        return Rendered(contents, text, ids, has_template)

    @property
    def _with_tools(self) -> dict[str, Any]:
        return {"tools": self.tools} if self.tools else {}

    def _note_left(self, n: int, kept: str) -> None:
        questions = self.n_questions(n)
        self.note(f"the chat exceeds the context window; questions 1–{questions} are not sent; {kept}")

    def note(self, note: str) -> None:
        """Add a note for the user, once."""
        if note not in self.notes:
            self.notes.append(note)
            self.tell(note)

    def _nothing(self, what: str) -> list[Message]:
        raise BadInput(f"there is no question to {what}", code="no_question")
