"""`kvcli chats`: list, search, show, export and remove saved chats."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from kvcli.chat.saved_chats import SavedChats
from kvcli.commands.chat.save_chat import facts, saved_chats_of
from kvcli.commands.common.inputs import agrees, tell
from kvcli.commands.common.options import command, option
from kvcli.commands.common.output import print_json, print_table
from kvcli.environment import Environment
from kvcli.errors import UsageError
from kvcli.render.terminal.tables import GAP, clip, columns, fitting, widest
from kvcli.render.terminal.terminal import Terminal, plural
from kvcli.safe_output import neutralise
from kvcli.schemas.chats import ChatEntry, ChatsDocument

app = typer.Typer(add_completion=False, help="Saved chats: list, search, show, export, remove.")

CHAT = "Start of its name, number in the list, or words of its title or files. Default: the latest."
LONG = 24  # columns of a document's name
ENOUGH = 15  # columns of a text; narrower terminals drop other columns of the list
Chat = Annotated[str | None, typer.Argument(metavar="CHAT", help=CHAT)]
Chats = Annotated[list[str], typer.Argument(metavar="CHAT", help="Chats, named as for show.")]
Words = Annotated[
    list[str],
    typer.Argument(metavar="WORD", help="Starts of words that occur in one turn, or in the title and document names."),
]
Most = Annotated[int, option("--number", "-n", metavar="N", help="Number of chats shown. Default 20.")]
Out = Annotated[str, option("--output", "-o", metavar="FILE", help="Output file: .md, .json or .jsonl.")]
LONGEST = 100_000  # days
Days = Annotated[int, option("--older-than", metavar="DAYS", help="Only chats not used for DAYS days. Default 30.")]
Dry = Annotated[bool, option("--dry-run", help="List the chats, and remove none.")]
Yes = Annotated[bool, option("--yes", "-y", help="Do not ask for confirmation.")]


@command(app, "list")
def list_sessions(world: Environment, number: Most = 20) -> None:
    """List saved chats, the latest first."""
    _print(world, saved_chats_of(world).entries(), number, numbered=True)


@command(app)
def search(world: Environment, words: Words, number: Most = 20) -> None:
    """List saved chats that contain these words, the best match first."""
    found = saved_chats_of(world).search(" ".join(words))
    if not found and not world.options.json:
        tell(world, f"no saved chat contains {' '.join(words)}")
    else:
        _print(world, found, number)


@command(app)
def show(world: Environment, chat: Chat = None) -> None:
    """Print a saved chat as Markdown, with document names; --json adds their text and the figures of each answer."""
    from kvcli.chat.transcript import markdown

    saved_chats = saved_chats_of(world)
    saved, _ = saved_chats.read(saved_chats.find(chat))
    if world.options.json:
        print_json(world, saved)
    else:
        world.stdout.write(markdown(saved))


@command(app)
def export(world: Environment, output: Out, chat: Chat = None) -> None:
    """Write a saved chat to a file, for readers or for kvcli chat --resume FILE on another machine."""

    from kvcli.chat.transcript import export_chat

    saved_chats = saved_chats_of(world)
    name = saved_chats.find(chat)
    world.stdout.write(f"{export_chat(saved_chats.read(name)[0], world.path(output))}\n")


@command(app)
def rm(world: Environment, chats: Chats, yes: Yes = False) -> None:
    """Delete saved chats, and the files that /save wrote of them."""
    saved_chats = saved_chats_of(world)
    names = dict.fromkeys(saved_chats.find(chat) for chat in chats)
    entries = [entry for entry in saved_chats.entries() if entry.id in names]
    _remove(world, saved_chats, entries, yes, shlex.join(["rm", *chats]))


@command(app)
def prune(world: Environment, older_than: Days = 30, dry_run: Dry = False, yes: Yes = False) -> None:
    """Delete saved chats that were not used for 30 days."""
    if not 0 <= older_than <= LONGEST:
        raise UsageError(f"--older-than {older_than}: days, from 0 to {LONGEST:,}")
    saved_chats, before = saved_chats_of(world), datetime.now(UTC) - timedelta(days=older_than)
    old = [entry for entry in saved_chats.entries() if _is_before(entry, before)]
    if dry_run:
        _print(world, old, len(old))
    else:
        _remove(world, saved_chats, old, yes, f"prune --older-than {older_than}")


def _is_before(entry: ChatEntry, when: datetime) -> bool:
    """True if a chat was saved before `when`. A chat without a date, as in a repaired database, is not old."""
    try:
        return datetime.fromisoformat(entry.saved).astimezone(UTC) <= when
    except (ValueError, OverflowError):
        return False


def _remove(world: Environment, saved_chats: SavedChats, entries: Sequence[ChatEntry], yes: bool, typed: str) -> None:
    what = plural(len(entries), "saved chat")
    if len(entries) == 1:
        what = f"{entries[0].id}, {facts(entries[0].title, entries[0].questions, entries[0].documents)}"
    if entries and not yes and not agrees(world, f"delete {what}?"):
        raise UsageError(f"{what}: not deleted", try_=[f"kvcli chats {typed} --yes"])
    saved_chats.remove([entry.id for entry in entries])
    if world.options.json:
        _print(world, entries, len(entries), removed=True)
    else:
        tell(world, f"deleted {what}")


def _with_texts(world: Environment, rows: Sequence[Sequence[str]], texts: Sequence[str]) -> list[list[str]]:
    """Append a text to each row of a table; on a terminal, cut it to one line."""
    out = Terminal.of(world, "stdout")
    if out.is_tty and not world.options.plain:
        rows = fitting(rows, out.width - ENOUGH, ["saved", "model", "files", "questions", ""])
        room = out.width - 1 - GAP - widest(columns(rows))
        texts = [clip(neutralise(text, one_line=True), room) for text in texts]
    return [[*row, text] for row, text in zip(rows, texts, strict=True)]


def _print(
    world: Environment, entries: Sequence[ChatEntry], number: int, *, removed: bool = False, numbered: bool = False
) -> None:
    shown = entries[: max(0, number)]
    if world.options.json:
        print_json(world, ChatsDocument(total=len(entries), removed=removed, chats=list(shown)))
        return
    if not entries:
        tell(world, "there are no saved chats")
        return
    rows = [["", "name", "questions", "files", "model", "saved"]]
    for i, e in enumerate(shown, 1):
        files = clip(e.files[0], LONG) + f" +{len(e.files) - 1}" * (len(e.files) > 1) if e.files else "–"
        rows.append([str(i), e.id, str(e.questions), files, e.model, e.saved[:16].replace("T", " ")])
    texts = ["title", *(" ".join((e.found or e.title or "").split()) for e in shown)]
    print_table(world, _with_texts(world, rows if numbered else [row[1:] for row in rows], texts))
    if len(entries) > len(shown):
        tell(world, f"{len(entries) - len(shown):,} more: -n {len(entries)}")
