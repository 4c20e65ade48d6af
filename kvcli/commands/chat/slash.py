"""Slash commands of the chat: one function each, with its usage and its help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcli.commands.chat.save_chat import FEW, about, choices, reopen
from kvcli.commands.chat.slash_table import SlashTable
from kvcli.commands.common.flags import profile_flags
from kvcli.errors import BadConfig, BadInput, UsageError
from kvcli.render.summarize.notes import size
from kvcli.render.terminal import tables
from kvcli.render.terminal import terminal as f
from kvcli.render.turn.turn_view import show_summary

if TYPE_CHECKING:
    from kvcli.commands.chat.repl import Repl
    from kvcli.documents import Document
    from kvcli.schemas.chats import ChatEntry

SLASH = SlashTable()

# --- leaving and help


@SLASH.add("help", "[COMMAND]", "this list, or one command", also=("?",), completes="command")
def _help(repl: Repl, argument: str) -> None:
    if argument:
        command = SLASH.find(argument.lstrip("/"))
        repl.say(f"{command.call}: {command.help}")
        return
    repl.listing(SLASH.rows())
    repl.say("")
    repl.say('For several lines put """ before and after, or end a line with Alt-Enter.')
    repl.say("//text sends a text that begins with a slash. Ctrl-C stops an answer.")


@SLASH.add("exit", "", "end the chat, as Ctrl-D does", also=("quit", "bye"))
def _exit(repl: Repl, _: str) -> None:
    repl.is_over = True


# --- questions and answers


@SLASH.add("clear", "", "start a new chat with the same system text")
def _clear(repl: Repl, _: str) -> None:
    n, documents = repl.chat.n_questions(), repl.chat.documents
    again = "; the chat is saved, and /resume opens it again" if repl.chat.is_saved else ""
    repl.chat.clear()
    repl.last = None
    repl.say(f"removed {f.plural(n, 'question')}{again}{_gone(repl, documents)}")


@SLASH.add("retry", "", "ask the last question again")
def _retry(repl: Repl, _: str) -> None:
    repl.turn(repl.chat.retry)


@SLASH.add("undo", "[N]", "remove the last question, or the last N")
def _undo(repl: Repl, argument: str) -> None:
    documents = repl.chat.documents
    n = repl.chat.undo(_number(argument or "1", "/undo 2"))
    if not n:
        repl.say("there is no question to remove")
        return
    repl.say(f"removed {f.plural(n, 'question')}, {repl.chat.n_questions()} left{_gone(repl, documents)}")


def _gone(repl: Repl, before: Sequence[Document]) -> str:
    """Return which of these documents are not attached any more."""
    gone = [d.name for d in before if not any(d is kept for kept in repl.chat.documents)]
    return f"; also removed: {', '.join(gone)}" if gone else ""


@SLASH.add("edit", "", "change the last question in $EDITOR, and ask it")
def _edit(repl: Repl, _: str) -> None:
    before = repl.chat.last_question if repl.chat.messages else ""
    after = repl.edit_text(before).strip()
    if not after or after == before.strip():
        repl.say("the question was not changed, so it is not asked again")
    elif repl.chat.messages:
        repl.turn(lambda **options: repl.chat.edit(after, **options))
    else:
        repl.ask(after)


# --- documents and settings


@SLASH.add(
    "file",
    "PATH",
    "attach a file, folder, *.txt or https://... to the next question; paper.pdf:3-9 for pages",
    completes="path",
)
def _file(repl: Repl, argument: str) -> None:
    path = argument.strip("\"'")
    if not path:
        raise UsageError("which file?", try_=["/file report.md", "/file paper.pdf:3-9", "/file demo:report"])
    for document in repl.read(path):
        _attach(repl, document)


def _attach(repl: Repl, document: Document) -> None:
    name = document.name
    if (place := repl.chat.place(document)) is not None:
        repl.say(f"{name} is attached already, as {place + 1} of /files")
        return
    repl.chat.attach(document)
    tokens = document.tokens(repl.chat.text_session.tokenizer)
    repl.say(f"attached {name} · {size(document)} · {f.plural(tokens, 'token')}")
    if repl.limit and tokens > repl.limit:
        repl.warn(f"{name} alone is longer than the context window of {f.count(repl.limit)} tokens")


@SLASH.add("files", "", "list the attached documents")
def _files(repl: Repl, _: str) -> None:
    documents, pending = repl.chat.documents, len(repl.chat.pending)
    if not documents:
        repl.say("no document is attached; /file PATH attaches one")
        return
    rows = []
    for i, document in enumerate(documents, 1):
        tokens = f.plural(document.tokens(repl.chat.text_session.tokenizer), "token")
        when = "with the next question" if i > len(documents) - pending else ""
        rows.append([f"{i}  {document.name}", size(document), tokens, when])
    repl.screen.err.lines(tables.columns(rows))


@SLASH.add("drop", "N", "remove document N from the chat", completes="document")
def _drop(repl: Repl, argument: str) -> None:
    pending = len(repl.chat.pending)
    document = repl.chat.drop(_number(argument, "/drop 1") - 1)
    after = "the text after it is read again" if len(repl.chat.pending) == pending else "it was not read yet"
    repl.say(f"removed {document.name}; {after}")


@SLASH.add("system", "[TEXT]", "set the system text, or show it; - removes it")
def _system(repl: Repl, argument: str) -> None:
    if not argument:
        for line in (repl.chat.system or "there is no system text").split("\n"):
            repl.say(line)
        return
    repl.chat.system = None if argument == "-" else argument
    word = "removed" if argument == "-" else "set"
    repl.say(f"system text {word}; the chat is read again with the next question")


@SLASH.add(
    "set",
    "KEY VALUE",
    "change a setting from the next question on; the last part of a key is enough if it is unique",
    completes="key",
)
def _set(repl: Repl, argument: str) -> None:
    key, _, value = argument.replace("=", " ", 1).partition(" ")
    if not key or not value.strip():
        raise UsageError("/set needs a key and a value", try_=["/set sample.temperature 0.2"])
    every = repl.profiles.keys()
    ends = [one for one in every if one.endswith(f".{key}")]
    key = ends[0] if len(ends) == 1 else key
    said = [item for item in repl.said if item.partition("=")[0] != key]
    repl.reconfigure(repl.profile_name, [*said, f"{key}={value.strip()}"])


@SLASH.add("profile", "[NAME]", "use another profile from the next question on, or show this one", completes="profile")
def _profile(repl: Repl, argument: str) -> None:
    if not argument:
        repl.say(repl.settings)
        return
    try:
        repl.reconfigure(argument, repl.said)
    except BadConfig as error:
        if not repl.said:
            raise
        left = ", ".join(repl.said)
        repl.reconfigure(argument, [])
        repl.warn(f"{left} is not set: {error.message}")


@SLASH.add("model", "[NAME]", "use another model from the next question on, or show this one", completes="model")
def _model(repl: Repl, name: str) -> None:
    if not name or repl.change_model is None:
        repl.say(f"{repl.chat.text_session.info.id}; to change it: /model NAME, one of kvcli models list")
        return
    repl.change_model(repl, name)
    again = "; it reads the chat again" if repl.chat.messages else ""
    repl.say(f"{repl.chat.text_session.info.id} answers from the next question on{again}")


@SLASH.add("think", "on|off|low|high|N|show|hide", "thinking before answers, or whether to print it", completes="think")
def _think(repl: Repl, argument: str) -> None:
    if argument in ("show", "hide"):
        shows = repl.screen.shows_thinking = argument == "show"
        for line in repl.last.thinking.splitlines() if repl.last is not None and shows else ():
            repl.screen.err.lines(f.folded(line, repl.screen.err.width), "dim")
        repl.say("thoughts are printed from now on" if shows else "thoughts are folded to one row")
        return
    if not argument:
        wants, has = repl.chat.text_session.profile.thinking, repl.chat.text_session.thinking_format().modes
        most = f", at most {f.plural(wants.max_tokens, 'token')}" if wants.max_tokens else ""
        repl.say(f"thinking {wants.mode}{most}; this model has {', '.join(['auto', *has])}")
        return
    changed = {"thinking.max_tokens": (0, "")} | profile_flags({"think": argument})
    said = [item for item in repl.said if not item.startswith("thinking.")]
    repl.reconfigure(repl.profile_name, [*said, *(f"{key}={value}" for key, (value, _) in changed.items())])


# --- figures


@SLASH.add("stats", "live|turn|off|last", "when to show figures, or show the last ones", completes="stats")
def _stats(repl: Repl, argument: str) -> None:
    match argument:
        case "last":
            show_summary(repl.last_turn("figures"), repl.screen, always=True)
        case "live" | "turn" | "off":
            repl.screen.stats = argument
            repl.say(f"stats {argument} from the next question on")
        case "":
            repl.say(f"stats {repl.screen.stats}")
        case _:
            raise UsageError(
                f"/stats does not take {argument!r}", try_=["/stats live", "/stats turn", "/stats off", "/stats last"]
            )


@SLASH.add("plain", "", "show answers as written, or render their Markdown again")
def _plain(repl: Repl, _: str) -> None:
    repl.screen.markdown = not repl.screen.markdown
    repl.say("Markdown is rendered" if repl.screen.markdown else "answers are shown as written")


@SLASH.add("spec", "", "drafting in the last answer: acceptance by source and position")
def _spec(repl: Repl, _: str) -> None:
    repl.screen.err.lines(tables.spec_table(repl.last_turn("drafting").stats, repl.screen.err.width))


@SLASH.add("kv", "", "contents of the KV cache, by layer and tier")
def _kv(repl: Repl, _: str) -> None:
    rows = repl.chat.text_session.kv_table()
    repl.screen.err.lines(tables.columns(tables.kv_table(rows)) if rows else ["the KV cache is empty"])


@SLASH.add("tokens", "", "tokens by message, and tokens left in the context window")
def _tokens(repl: Repl, _: str) -> None:
    repl.screen.err.lines(tables.token_table(repl.chat.tokens(), repl.limit, repl.screen.err.width))


# --- saving


@SLASH.add("save", "[TITLE]", "save the chat, with a title if given, and write it to a file")
def _save(repl: Repl, argument: str) -> None:
    name = repl.chat.save(argument or None)
    repl.say(f"saved as {name}" + ("" if repl.saves else "; from now on after each answer"))
    repl.saves = True
    repl.say(f"wrote {repl.chat.saved_chats.save(name)}")


@SLASH.add(
    "resume",
    "[CHAT]",
    "continue a saved chat: its number, name, title or file; or list them",
    also=("load",),
    completes="chat",
)
def _resume(repl: Repl, argument: str) -> None:
    saved_chats, wanted = repl.chat.saved_chats, argument.strip("\"'")
    if not wanted:
        _list(repl, saved_chats.entries())
        return
    if repl.chat.saved_chat is not None and saved_chats.name_of(wanted, repl.world.cwd) == repl.chat.saved_chat.name:
        repl.say("this chat is open already")
        return
    opened, waiting = reopen(saved_chats, repl.world, wanted, is_locked=repl.saves), repl.chat.pending
    repl.chat.take(opened)
    repl.last = None
    was = opened.saved.model
    under = f"; its model was {was}" if was != repl.chat.called else ""
    repl.say(f"continues {about(repl.chat)}{under}; it is read with the next question{_gone(repl, waiting)}")


@SLASH.add("chats", "[WORDS]", "list saved chats, or those that contain these words")
def _chats(repl: Repl, argument: str) -> None:
    saved_chats = repl.chat.saved_chats
    if not argument:
        _list(repl, saved_chats.entries())
    elif found := saved_chats.search(argument)[:FEW]:
        repl.listing([(entry.id, " ".join((entry.found or entry.title or "").split())) for entry in found])
    else:
        repl.say(f"no saved chat contains {argument}")


@SLASH.add("fork", "[TITLE]", "continue in a copy; the saved chat does not change")
def _fork(repl: Repl, argument: str) -> None:
    before = repl.chat.saved_chat
    if before is None or not repl.chat.messages:
        repl.say("this chat is not saved yet, so it cannot be copied")
        return
    repl.chat.save()
    repl.chat.close()
    repl.say(f"continues as {repl.chat.save(argument or None)}; {before.name} does not change")


def _list(repl: Repl, entries: Sequence[ChatEntry]) -> None:
    if entries:
        repl.listing(choices(entries))
    else:
        repl.say("there are no saved chats yet")


@SLASH.add("export", "FILE", "write the chat to a file: .md, .json or .jsonl", completes="path")
def _export(repl: Repl, argument: str) -> None:
    path = argument.strip("\"'")
    if not path:
        raise UsageError("which file?", try_=["/export chat.md"])
    repl.say(f"wrote {repl.chat.export(repl.world.path(path))}")


def _number(text: str, example: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise BadInput(f"expected a number from 1, not {text[:20] or 'nothing'}", code="not_a_number", try_=[example])
    return int(text)
