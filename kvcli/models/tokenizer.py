"""Tokenizer of a model, loaded from its folder."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvcli.errors import BadModel
from kvcli.models.control_words import admit
from kvcli.models.family import read_config
from kvcli.models.library_errors import blame_files
from kvcli.models.refusals import no_tokenizer
from kvcli.models.template import Chats
from kvcli.models.tokenizing import Tokenizing, check_load
from kvcli.settings.small_file import Unfit, open_regular

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvcli.models.source import Source

_LARGEST = 128 << 20  # bytes of one of its files; a vocabulary of 260,000 words takes a quarter
_READ = (".json", ".jinja", ".txt", ".model")
# files that add words to the vocabulary
_ADDS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def load_tokenizer(found: Source, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer from the model's folder, without a length limit. Raises BadModel."""
    refuse_wordless(found)
    files = sorted(f for f in found.path.iterdir() if f.suffix in _READ)
    for file in files:
        try:
            with open_regular(file) as stream:
                if stream.seek(0, 2) > _LARGEST:
                    raise Unfit(f"is larger than {_LARGEST >> 20} MiB")
        except Unfit as error:
            raise _unreadable(found, f"{file.name} {error}") from error
    _refuse_unread(found)
    from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

    if (its := found.path / "tokenizer.json") in files:
        with open_regular(its) as stream:
            check_load(stream, [f.read_text(errors="replace") for f in files if f.name in _ADDS])
    config = read_config(found, trust_remote_code)
    with blame_files(partial(_unreadable, found)):
        tokenizer = AutoTokenizer.from_pretrained(
            found.path, config=config, trust_remote_code=trust_remote_code, local_files_only=True
        )
        n_words = len(tokenizer.get_vocab())
    if not n_words:
        raise _unreadable(found, "its vocabulary is empty")
    tokenizer.model_max_length = 1 << 40  # kvcli checks the context window itself; this avoids a second warning
    # a tokenizer class with its own rendering code uses no template
    if type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:
        tokenizer.apply_chat_template = chats = Chats(tokenizer)
        if tokenizer.chat_template:
            chats.start()
    # a class with its own splitting code, or a Python tokenizer, does not run in a separate process
    if is_cut_by_library := getattr(type(tokenizer), "_encode_plus", None) is PreTrainedTokenizerFast._encode_plus:
        _guard(tokenizer)
    with blame_files(partial(_unreadable, found)):
        if tokenizer.is_fast and admit(tokenizer) and is_cut_by_library:
            _guard(tokenizer)  # again: a running worker process has the old vocabulary
    return tokenizer


def _guard(tokenizer: PreTrainedTokenizerBase) -> None:
    its = Tokenizing(tokenizer)
    tokenizer._encode_plus, tokenizer._decode = its.encode, its.decode
    tokenizer.read_guarded = its.read


def refuse_wordless(found: Source) -> None:
    """Raise BadModel for a model without a vocabulary, by the names of its files."""
    if not found.has_words:
        raise _unreadable(found, "its folder holds no vocabulary")


def _refuse_unread(found: Source) -> None:
    """Raise BadModel if the vocabulary needs a missing package; transformers names only the last one it tries."""
    from transformers.utils.import_utils import is_protobuf_available, is_sentencepiece_available, is_tiktoken_available

    held = [found.path / name for name in ("tokenizer.json", "vocab.json", "tekken.json", "tokenizer.model")]
    if not (file := next((f for f in held if f.is_file()), held[0])).match("*.model"):
        return
    with file.open("rb") as stream:
        is_pieces = stream.read(1) == b"\n"  # the first field of a sentencepiece file
    has = {"sentencepiece": is_sentencepiece_available(), "protobuf": is_protobuf_available()}
    has = has if is_pieces else {"tiktoken": is_tiktoken_available()}
    if missing := " ".join(name for name, is_there in has.items() if not is_there):
        said = f"its {file.name} needs packages that are not installed: {missing}"
        raise no_tokenizer(found.id, said, f"pip install {missing}")


def _unreadable(found: Source, said: str) -> BadModel:
    return no_tokenizer(found.id, said, "put tokenizer.json and tokenizer_config.json beside config.json")
