"""On-disk prefix cache. A session saves its KV cache here and, before prefill, loads the longest saved prefix.

It has one folder for each pair of cache key (`cache_key`: the loaded model) and cache conditions (`CacheConditions`:
the settings that made the KV cache). Caches that hold all KV unchanged are saved as a tree of blocks (block_tree.py),
so sequences share the blocks of a common prefix. A cache that settings changed can only continue the exact sequence it
was made from, so it is saved as one snapshot (snapshot_file.py). Corrupt, foreign or unwritable files cost only time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.files import SPARE, private_folder, write_private
from kvcli.kernels.attend_invariant import BLOCK
from kvcli.kernels.native import native
from kvcli.kv.out_of_memory import catch_cache_full
from kvcli.kv.slots import windows_of
from kvcli.kv.snapshot import SnapshotMismatch
from kvcli.models.catalog import model_files, releases
from kvcli.prefix_cache import snapshot_file
from kvcli.prefix_cache.block_tree import Block, BlockMatch, BlockTree, read, read_tokens
from kvcli.prefix_cache.codec import Codec, Uncompressed
from kvcli.prefix_cache.snapshot_file import CorruptFile
from kvcli.prefix_cache.span_lookup import BlockIndexEntry, evict_lru, find_spans, mark_used
from kvcli.prefix_cache.tensor_codec import coded_state, decoded_state
from kvcli.settings.small_file import Unfit, open_regular, parse_object, read_small

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.prefix_cache.matching_spans import Found

# Cache key: the fields besides the token ids on which KV depends. All fields must match to use saved KV.
FORMAT = "kvcli.block/4"
NAMES = ("transformers_version", "_name_or_path", "_attn_implementation")  # in a config, without effect on the numbers


def cache_key(lm: LM) -> dict[str, str]:
    """Return the cache key; {} for weights that are in no files.

    Bits of a model differ between kinds of processors and between library releases, so all of these are fields. Files
    count as they were when the model was loaded. Raises BadModel if they were replaced since and never hashed.
    """
    files = lm.files or (model_files(Path(lm.info.path)) if lm.info.path else {})
    if not files.get("weights"):
        return {}
    text = {k: v for k, v in lm.model.config.get_text_config().to_dict().items() if k not in NAMES}
    return {
        "format": FORMAT,
        **releases(),
        **{part: lm.hashes.of(its) for part, its in files.items()},
        "config": blake2b(json.dumps(text, sort_keys=True, default=str).encode(), digest_size=16).hexdigest(),
        "load.quant": lm.info.quant,
        "load.dtype": lm.info.dtype,
        "device": _device(lm.device),
        "layers": lm.info.backend,
    }


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    served = native() if device.type == "cpu" else None
    return f"{device.type} {served.level}" if served is not None else device.type


FEW = 32  # tokens: a prefill of so few is as fast as loading them
MIN_WORK = 1 << 35  # model parameters times tokens: a shorter prefill takes a moment, and saving it is not worthwhile
HEAD = 1 << 14  # approximate bytes of a block besides its KV
FIELDS, MODEL = "identity.json", "model"  # the file, and its key for the model name
UNKEPT = "the KV cache of the prompt is not saved"
STOPPED = f"{UNKEPT}: stopped"


@dataclass(frozen=True, slots=True)
class SaveResult:
    """Result of saving a sequence."""

    nbytes: int = 0  # newly written
    why_not: str = ""
    prefix_cache: PrefixCache | None = None  # the prefix cache, if its folder was created by this save


@dataclass(frozen=True, slots=True)
class CacheConditions:
    """Cache conditions: the settings that made a KV cache, besides the model."""

    is_intact: bool = True  # True if the cache holds all KV as computed
    # settings by key; for an intact cache only those that show that it is intact
    settings: Mapping[str, str] = field(default_factory=dict)
    codec: Codec = field(default_factory=Uncompressed)  # encoding of tensors in files


INTACT = CacheConditions()


@dataclass(frozen=True, slots=True)
class PendingWrite:
    """Write of one file, not yet done."""

    path: Path
    nbytes: int  # approximate
    write: Callable[[], int]
    drop: Callable[[], None]  # removes the files that this one replaces


class PrefixCache:
    """Prefix cache of one model: a folder of at most `most` bytes."""

    def __init__(self, folder: Path, most: int, lm: LM, *, min_work: int = MIN_WORK) -> None:
        """`min_work`: model parameters times tokens from which a sequence is saved."""
        self.folder, self.most, self._lm, self._min_work = folder, most, lm, min_work
        self._fields = cache_key(lm)
        self._seen: dict[str, BlockIndexEntry] = {}  # by block name

    def load_prefix(self, session: GenerationSession, ids: Sequence[int], shaping: CacheConditions = INTACT) -> int:
        """Load the saved KV of the longest prefix of `ids` into a session; return the tokens that need no prefill."""
        for _ in self.load_by_layer(session, ids, shaping):
            pass
        return session.committed

    def load_by_layer(
        self, session: GenerationSession, ids: Sequence[int], shaping: CacheConditions = INTACT
    ) -> Iterator[None]:
        """Do what `load_prefix` does, and yield after each layer of a block; a snapshot is loaded at once."""
        if not self._is_in_blocks(shaping):
            return self._go_on(session, ids, shaping)
        have, tree = session.committed, BlockTree(self._folder(session, shaping))
        while self._fields and len(ids) - 1 - have >= FEW:
            found = list(tree.match_prefix(ids[:-1]))
            n = next((one.end for one in reversed(found) if self._begins(found, have, one.end)), 0)
            if n - have < FEW:
                if not have or not any(one.end - have >= FEW and self._begins(found, 0, one.end) for one in found):
                    break
                # start over, because the saved blocks do not reach the start of a sliding window
                have = session.rewind(0)
                continue
            try:
                yield from session.adopt_by_layer(ids, n, self._past(session, found, have, n, ids))
            except CorruptFile:
                continue  # the corrupt file was deleted: try the blocks before it
            except OSError:  # the file remains and would be found again
                break
            mark_used([one.path for one in found])
            break

    def read_ahead(self, session: GenerationSession, ids: Sequence[int], shaping: CacheConditions = INTACT) -> None:
        """Read the files that `load_prefix` will read, which the system then has in memory. For any thread."""
        folder, n = self._folder(session, shaping), session.shared(ids)
        if self._is_in_blocks(shaping):
            paths = [one.path for one in BlockTree(folder).match_prefix(ids[:-1]) if one.end > n]
        else:
            paths = [path for m, path in snapshot_file.match_prefix(folder, ids[:-1]) if m > n][:1]
        for path in paths:
            with suppress(OSError, Unfit), open_regular(path) as file:
                while file.read(1 << 20):
                    pass

    def find_spans(
        self, session: GenerationSession, ids: Sequence[int], shaping: CacheConditions, min_span: int
    ) -> Iterator[Found]:
        """Yield spans of `ids` after the session's tokens that match other saved sequences, with their KV."""
        if self._fields:
            here, dtype, start = self._folder(session, shaping), session.cache.dtype, session.committed
            yield from find_spans(here, self._lm, dtype, ids[:-1], start, min_span, self._seen)

    def save(
        self, session: GenerationSession, cancel: Callable[[], bool] = lambda: False, shaping: CacheConditions = INTACT
    ) -> SaveResult:
        """Save the part of a session's cache that is not saved yet, until `cancel()` is True between two files."""
        session.rewind(session.committed + 1)  # a running prefill does not count
        n = session.committed
        if not self._fields or n < FEW or n * self._lm.info.parameters < self._min_work:
            return SaveResult()
        kept = SaveResult()
        with catch_cache_full() as lacks:
            kept = self._keep(session, cancel, shaping)
        return SaveResult(why_not=f"{UNKEPT}: {lacks[0].message}") if lacks else kept

    def mismatch(self, session: GenerationSession, shaping: CacheConditions = INTACT) -> list[str]:
        """Return why saved files of this model cannot be used: the fields in which the most similar folder differs."""
        mine, found = self._of(session, shaping), list[list[str]]()
        for other in self.folder.glob(f"*/{FIELDS}") if self._fields else ():
            with suppress(Unfit):
                its = parse_object(read_small(other, 1 << 20))
                if its.get(MODEL) == self._lm.info.id:
                    both = [key for key in mine if key in its and its[key] != mine[key]]
                    found.append([f"{key} was {its[key]}, is {mine[key]}" for key in both])
        return min(found, key=len, default=[])

    def _keep(self, session: GenerationSession, cancel: Callable[[], bool], shaping: CacheConditions) -> SaveResult:
        folder, written, is_first = self._folder(session, shaping), 0, not self.folder.exists()
        try:
            if self._is_in_blocks(shaping):
                size, here, new = self._blocks(session, BlockTree(folder), shaping.codec)
            else:
                size, here, new = self._past_of(session, folder, shaping.codec)
            private_folder(folder)
            fresh = sum(one.nbytes for one in new)
            if size > self.most or fresh > shutil.disk_usage(folder).free - SPARE:
                return SaveResult(0, f"{size >> 20:,} MiB of KV cache do not fit in {self.folder}")
            mark_used(here)
            evict_lru(self.folder, self.most, fresh)
            if not (folder / FIELDS).exists():
                about = {MODEL: self._lm.info.id, **self._of(session, shaping)}
                write_private(folder / FIELDS, json.dumps(about, indent=1) + "\n")
            for one in new:
                if cancel():
                    return SaveResult(written, STOPPED)
                written += one.write()
                one.drop()
            mark_used(here)
            evict_lru(self.folder, self.most)
        except OSError as error:
            return SaveResult(written, f"{UNKEPT}: {error.strerror or error}")
        return SaveResult(written, prefix_cache=self if is_first else None)

    def _is_in_blocks(self, shaping: CacheConditions) -> bool:
        """True if only KV is saved. A recurrent state belongs to a whole sequence and is saved in a snapshot."""
        return shaping.is_intact and not self._lm.recurrent_layers

    def _blocks(
        self, session: GenerationSession, tree: BlockTree, codec: Codec
    ) -> tuple[int, list[Path], list[PendingWrite]]:
        """Return the bytes of a whole cache, the paths of its blocks, and the writes of missing blocks."""
        n = session.committed
        places = list(tree.places(session.ids[:n]))
        held = _held(session)
        new = [(path, mine) for path, mine in places if _has_less(path, held, mine)]
        size = sum(t[:, :n].nbytes for _, k, v in held.values() for t in (k, v))

        def writing(path: Path, mine: slice) -> PendingWrite:
            ids = session.ids[mine]
            return PendingWrite(
                path,
                size * len(ids) // n + HEAD,
                lambda: Block(ids, dict(_cut(held, mine))).write(path, codec),
                lambda: tree.drop_shorter(path, ids),
            )

        return size, [path for path, _ in places], [writing(path, mine) for path, mine in new]

    def _past_of(
        self, session: GenerationSession, folder: Path, codec: Codec
    ) -> tuple[int, list[Path], list[PendingWrite]]:
        """Return the bytes, the paths and the missing writes of a cache that is saved as one snapshot."""
        ids = session.ids[: session.committed]
        if (path := snapshot_file.path_of(folder, ids)).exists():
            return 0, [path], []
        state = session.state()

        def drop() -> None:
            for _, shorter in snapshot_file.match_prefix(folder, ids[:-1]):
                shorter.unlink(missing_ok=True)

        size, of = snapshot_file.nbytes(state), folder.name
        return (
            size,
            [path],
            [PendingWrite(path, size, lambda: snapshot_file.write(path, coded_state(state, codec), of), drop)],
        )

    def _go_on(self, session: GenerationSession, ids: Sequence[int], shaping: CacheConditions) -> None:
        """Restore the longest useful snapshot of a prefix of `ids` into the session."""
        for n, path in snapshot_file.match_prefix(self._folder(session, shaping), ids[:-1]) if self._fields else ():
            if n - session.committed < FEW:
                return
            try:
                session.restore(decoded_state(snapshot_file.read(path, path.parent.name)), ids[n])
                if session.ids[:n] != list(ids[:n]):
                    session.rewind(0)
                    raise SnapshotMismatch("it belongs to other tokens")
                session.resume(ids)  # as each question starts
                return mark_used([path])
            except (CorruptFile, SnapshotMismatch):
                path.unlink(missing_ok=True)
            except OSError:  # the file remains
                return

    def _of(self, session: GenerationSession, shaping: CacheConditions) -> dict[str, str]:
        return fields_of(self._fields, session, shaping)

    def _folder(self, session: GenerationSession, shaping: CacheConditions) -> Path:
        name = blake2b(json.dumps(self._of(session, shaping)).encode(), digest_size=16).hexdigest()
        return self.folder / name

    def _begins(self, found: Sequence[BlockMatch], have: int, n: int) -> dict[int, int]:
        """Return, by layer, the first position to load so that rows from n on can run; {} if a window has a gap.

        From `have` tokens on there must be no gap, even outside of windows, because a sum over slots in another layout
        is rounded to other bits.
        """
        windows, begins = windows_of(self._lm.shapes, self._lm.attention_params), dict[int, int]()
        for layer, shape in enumerate(self._lm.shapes):
            if shape.shared_from is not None:
                continue
            low = seen = have
            if not have and layer in windows:
                low, seen = windows[layer].window_start(n), max(0, n - windows[layer].size + 1)
            at = n
            for one in reversed(found):
                if at <= low or at > one.end:  # enough slots, or a gap
                    break
                at = min(at, one.firsts.get(layer, at))
            if at > seen:
                return {}
            begins[layer] = max(at, low)
        return begins

    def _past(
        self, session: GenerationSession, found: Sequence[BlockMatch], have: int, n: int, ids: Sequence[int]
    ) -> Iterator[tuple[int, Tensor, Tensor, int]]:
        """Yield layer, keys, values and first position of tokens from `have` to n, one block at a time because all at
        once would need the memory of the cache twice. Raises CorruptFile, OSError."""
        begins = self._begins(found, have, n)
        for one in found:
            last = min(one.end, n)
            firsts = {layer: max(first, one.start) for layer, first in begins.items() if first < last}
            if one.start >= n or not firsts:
                continue
            try:
                block = read(one.path, self._lm.shapes, session.cache.dtype)
                if list(block.ids[: one.n]) != list(ids[one.start : one.end]):
                    raise CorruptFile("it was replaced since it was found")
                parts = [
                    (layer, *block.part(layer, slice(first - one.start, last - one.start)), first)
                    for layer, first in firsts.items()
                ]
            except CorruptFile:
                one.path.unlink(missing_ok=True)
                raise
            yield from parts


def fields_of(made_by: Mapping[str, str], session: GenerationSession, shaping: CacheConditions) -> dict[str, str]:
    """Return all fields besides the token ids on which a cache depends; `made_by`: the cache key of the model."""
    return {**made_by, **shaping.settings, "kv.dtype": str(session.cache.dtype).removeprefix("torch.")}


Held = Mapping[int, tuple[int, Tensor, Tensor]]  # by layer: first position, k [K, S, D], v [K, S, E]


def _held(session: GenerationSession) -> Held:
    """Return the KV of the cache, which must be a range of positions."""
    found = {}
    for layer, shape in enumerate(session.lm.shapes):
        if shape.shared_from is None:
            slots = session.cache.slots(layer)
            first = int(slots.pos[0, 0])
            assert int(slots.pos[0, -1]) - first + 1 == slots.n_slots, "slots were evicted"
            found[layer] = first, slots.k, slots.v
    return found


def _cut(held: Held, mine: slice) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield, by layer, the KV of the tokens `mine` that the layer still holds: the last of them."""
    for layer, (first, k, v) in held.items():
        if (start := _first(first, mine)) < mine.stop:
            at = slice(start - first, mine.stop - first)
            cut = k[:, at]
            yield layer, (cut, cut if v is k else v[:, at])


def _first(first: int, mine: slice) -> int:
    """Return the first of the tokens `mine` to write, if a layer begins at `first`: a whole block begins there."""
    return int(max(mine.start, -(-first // BLOCK) * BLOCK))


def _has_less(path: Path, held: Held, mine: slice) -> bool:
    """True if the file at `path` has fewer of the tokens `mine` than `held` in some layer, and more in none."""
    try:
        its = read_tokens(path)[1]
    except (CorruptFile, OSError):
        return True
    firsts = [(its.get(layer, mine.stop) + mine.start, _first(first, mine)) for layer, (first, _, _) in held.items()]
    both = [(min(there, mine.stop), min(here, mine.stop)) for there, here in firsts]
    return any(there > here for there, here in both) and all(there >= here for there, here in both)
