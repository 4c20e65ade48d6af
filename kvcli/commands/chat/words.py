"""Words of `kvcli chat` without an option: the model, a question as with -p, and documents as with -f.

The shell makes many words of `-f notes/*` without quotes: one file with -f, and the others without.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcli.commands.common.inputs import tell
from kvcli.documents import BUNDLED, is_address, split_pages
from kvcli.documents.decode import looks_readable, named_kind
from kvcli.environment import Environment
from kvcli.errors import BadInput, reading

SHOWN = 3  # documents that a note lists


def sort_words(world: Environment, model: str | None, more: Sequence[str]) -> tuple[str | None, str | None, list[str]]:
    """Return the model, the question and the documents. `model` is the first word, and may be any of them."""
    files, questions = list[str](), list[str]()
    if model is not None and _is_text(world, model):
        files, model = [model], None
    elif model is not None and " " in model.strip() and not (world.path(model)).exists():
        questions, model = [model], None
    for word in more:
        (files if _is_document(world, word) else questions).append(word)
    if len(questions) == 1 and " " not in questions[0] and ("/" in questions[0] or named_kind(questions[0])):
        hint = f"-p '{questions[0]}', if it is the question"
        raise BadInput(f"no such file: {questions[0]}", code="file_missing", try_=[hint])
    if files:
        more_files = f" and {len(files) - SHOWN:,} more" if len(files) > SHOWN else ""
        tell(world, f"documents: {', '.join(files[:SHOWN])}{more_files}")
    return model, " ".join(questions) or None, files


def _is_document(world: Environment, word: str) -> bool:
    bare = split_pages(word)[0]
    if not word:
        return False  # an empty variable of the shell, not the folder of the user
    return is_address(word) or bare in BUNDLED or any((world.path(one)).exists() for one in (word, bare))


def _is_text(world: Environment, word: str) -> bool:
    """True for a document where a model could be named: not for a folder, a file of weights, or a word alone."""
    if not ("." in word or "/" in word) or is_address(word):
        return is_address(word)
    path = world.path(word)
    with reading(word):
        return path.is_file() and looks_readable(path)
