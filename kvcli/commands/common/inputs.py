"""Inputs of a command: the question, from a flag or standard input, and what it asks and tells on the terminal."""

from __future__ import annotations

import os
import select
import shlex
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from kvcli.documents import MAX_BYTES, Document, decode, document_of, notes_of, too_large
from kvcli.documents.decode import HEAD
from kvcli.documents.read import most_bytes
from kvcli.environment import Environment
from kvcli.errors import BadInput, UsageError

STDIN = "standard input"
PATIENCE = 1.0  # seconds of waiting for standard input before a message


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its documents. `text` is None if the user types it on the terminal."""

    text: str | None
    documents: tuple[Document, ...]
    system: str | None


def split_command(typed: str, flag: str) -> list[str]:
    """Return the words of a command, as a shell splits them."""
    try:
        if words := shlex.split(typed):
            return words
        why = "is empty"
    except ValueError as error:  # an open quote
        why = f"cannot be split into words: {error}"
    raise UsageError(f"the command of {flag} {why}", try_=[f"{flag} 'COMMAND ARGS'"])


def read_question(
    world: Environment, prompt: str | None, documents: Sequence[Document], system: str | None
) -> Question:
    """Return the question about documents that are read already, from the flag or from standard input."""
    documents = [*documents]
    if prompt is not None and prompt != "-":
        if has_piped_input(world) and (data := read_stdin(world)).strip():
            documents.append(document_of(data, STDIN, cache=world.paths.cache))
            tell(world, f"{STDIN} is attached as a document: {len(data):,} bytes")
            tell_notes(world, documents[-1])
        text: str | None = well_formed(prompt, "the prompt")
    elif prompt == "-" or not world.is_tty("stdin"):
        text = decode(read_stdin(world), STDIN).rstrip("\n")
    else:
        text = None
    if text is None and (world.options.json or world.options.no_input or not world.is_tty("stdout")):
        raise empty_prompt()
    if text is not None and not text.strip():
        raise empty_prompt()
    return Question(text, tuple(documents), system)


def tell_notes(world: Environment, document: Document) -> None:
    for note in notes_of(document):
        tell_of_file(world, note)


def tell_of_file(world: Environment, text: str) -> None:
    """Tell a note on the files read. With --json it is kept for the document, which has the notes."""
    if world.options.json:
        world.file_notes.append(text)
    tell(world, text)


def well_formed(text: str, what: str) -> str:
    """Return the text; refuses arguments that were not UTF-8, which contain surrogates that no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(
            f"{what} is not valid UTF-8", code="bad_encoding", lines=[f"at character {error.start + 1:,}"]
        ) from None
    return text


def has_piped_input(world: Environment) -> bool:
    """True if standard input was redirected on purpose: a pipe or a file, not a terminal and not /dev/null.

    A program that starts kvcli often leaves its own standard input open, and reading that would wait for ever.
    """
    try:
        mode = os.fstat(world.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # a replaced stream without a file descriptor
        return not world.is_tty("stdin")
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def read_stdin(world: Environment) -> bytes:
    """Read all of standard input. If nothing arrives for a while, tell the user what is missing."""
    if not world.is_tty("stdin") and _is_silent(world):
        tell(world, "waiting for standard input; use </dev/null if there is none")
    data = world.read_stdin(MAX_BYTES + 1)
    most = most_bytes(data[:HEAD], STDIN)
    if MAX_BYTES < len(data) <= most:  # a PDF may be larger than a text
        data += world.read_stdin(most + 1 - len(data))
    if len(data) > most:
        raise too_large(STDIN, len(data), most)
    return data


def tell(world: Environment, text: str) -> None:
    if not world.options.quiet and not world.options.json:
        from kvcli.render.terminal.errors import print_note
        from kvcli.render.terminal.terminal import Terminal

        print_note(Terminal.of(world, "stderr"), text)


def _is_silent(world: Environment) -> bool:
    try:
        return not select.select([world.stdin.fileno()], [], [], PATIENCE)[0]
    except (OSError, ValueError, AttributeError):
        return False


def empty_prompt() -> BadInput:
    return BadInput(
        "the prompt is empty",
        code="empty_prompt",
        lines=["neither -p nor standard input has a question"],
        try_=['kvcli chat -p "..."', "echo ... | kvcli chat"],
    )


def agrees(world: Environment, question: str) -> bool:
    """Ask a yes-or-no question on the terminal; False if no user can be asked."""
    if not (world.may_ask and world.is_tty("stderr")) or world.options.json:
        return False
    return answer_to(world, f"{question} [y/N] ") in ("y", "yes")


def answer_to(world: Environment, question: str, *, as_typed: bool = False) -> str:
    """Ask on the terminal, and return the answer, in lower case unless `as_typed`."""
    from kvcli.render.terminal.screen import forget_typed

    forget_typed(world.stdin)
    world.stderr.write(question)
    world.stderr.flush()
    answer = world.stdin.readline().strip()
    return answer if as_typed else answer.lower()
