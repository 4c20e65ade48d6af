"""`kvcli pack`: prefill documents once and save them with their KV cache, for many questions."""

from __future__ import annotations

import errno
from contextlib import closing
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.commands.common import flags as o
from kvcli.commands.common.options import Options, choice, command
from kvcli.environment import Environment
from kvcli.errors import BadInput, ExitStatus, writing
from kvcli.files import try_output

if TYPE_CHECKING:
    from kvcli.chat.conversation import Chat
    from kvcli.render.terminal.screen import Screen
    from kvcli.schemas.pack import PackDocument

app = typer.Typer(add_completion=False)

ENDS = ".kvs"


class PackOptions(Options):
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Documents or folders; paper.pdf:3-9: pages.")]
    ocr: o.OcrMode = "auto"
    output: str = choice("-o", default=MISSING, metavar="NAME.kvs", help="Output folder; its name ends in .kvs.")
    model: o.ModelOption = None
    system: o.System = None
    system_file: o.SystemFile = None
    ctx: o.Ctx = None
    weights: o.Weights
    force: o.Force = False
    allow_pickle: o.Pickle = False


@command(app)
def pack(world: Environment, options: PackOptions) -> int:
    """Prefill documents once and save their KV cache in a folder.

    Later questions (kvcli chat --pack NAME.kvs) start without prefill. The
    profile sets the compression. The folder contains the text, so keep it private.
    """
    from kvcli.commands.common.document_files import ReadOptions, find_files, read_files, read_system
    from kvcli.commands.common.load_model import MemoryWishes, load_model
    from kvcli.commands.common.run_setup import Setup
    from kvcli.commands.models.suggest_model import find_model
    from kvcli.render.terminal.screen import Screen

    folder = output_folder(world, options.output)
    setup = Setup(world, options.model, o.profile_flags(options.values()), is_typed=options.model is not None)
    files = find_files(world, options.files)
    setup = find_model(setup, [file.name for file in files])
    profile = setup.profile
    setup.look(profile)
    documents = read_files(world, files, ReadOptions(ocr=options.ocr))
    screen = Screen.of(world)
    run, text_session = load_model(setup, profile, MemoryWishes(options.force, options.ctx == "max"), screen)
    from kvcli.chat.conversation import Chat

    system = read_system(world, options.system, options.system_file)
    with text_session, closing(Chat(text_session, system, called=setup.lasting_name)) as talk:
        talk.pending = documents
        for note in run.notes:
            screen.note(note)
        about = packed(talk, folder, screen)
    show(world, folder, about)
    return ExitStatus.OK


def output_folder(world: Environment, typed: str) -> Path:
    """Return the path of the new folder. Raises BadInput if the folder exists or cannot be made."""
    folder = world.path(typed)
    if folder.suffix != ENDS:
        raise BadInput(f"-o {typed}: a pack is named NAME{ENDS}", code="unknown_format", try_=[f"-o {typed}{ENDS}"])
    if folder.exists() or folder.is_symlink():
        raise BadInput(f"{typed} exists already", code="file_exists", try_=["another name, or remove it first"])
    with writing(typed, try_=["-o NAME.kvs in another folder"]):
        if not folder.parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "its folder does not exist")
        try_output(folder)
    return folder


def packed(talk: Chat, folder: Path, screen: Screen) -> PackDocument:
    """Make the pack, with a progress bar during the prefill."""
    from kvcli.api import Read
    from kvcli.render.turn.status_row import reading_bar
    from kvcli.render.turn.turn_view import busy_word

    at = Read(0, 0, 0, 0.0)

    def on_read(event: Read) -> None:
        nonlocal at
        at = event

    with busy_word(screen, f"prefilling {folder.name}", lambda since, width: reading_bar(at, width, since)):
        return talk.pack(folder, on_read)


def show(world: Environment, folder: Path, about: PackDocument) -> None:
    """Print the pack, its size, and the command to use it."""
    from kvcli.commands.common.inputs import tell
    from kvcli.commands.common.output import print_json
    from kvcli.render.terminal.terminal import long_size, plural

    if world.options.json:
        print_json(world, about.model_copy(update={"notes": world.file_notes}))
        return
    size = sum(file.bytes for file in about.files.values())
    what = f"{plural(len(about.documents), 'document')}, {about.tokens:,} tokens, {long_size(size)}, {about.promise}"
    world.stdout.write(f"{folder.name}: {what}\n")
    tell(world, f'kvcli chat --pack {folder.name} -p "..."')
