"""What is kept in fewer bytes: bytes and milliseconds of a block of 256 tokens, what rounding would cost, resuming.

    python tests/bench/codec.py [--models demo,smollm2-135m] [--only blocks,loss,resume] [--tokens 8000] [--out FILE]

blocks: written and read again as files, sides by turns, medians; "exponents by" is what coders of the standard library
make of the plane with the exponents, in their own time. loss, which nothing of kvcli does: next-token distributions
behind 1,024 tokens that were rounded, against those behind the same ones as they are. "cachegen": anchors of ten
tokens in 8 bits, differences in steps of so many deviations by thirds of the layers, Huffman's code (arXiv 2310.07240);
"mean": the same from the mean of a channel; "bits": groups of 64 as `[kv]` rounds them, keys by channel, values by
token, 4 bytes a group. resume: the random model of 152M parameters, reading against taking from disk, first token to
first token.
"""

from __future__ import annotations

import lzma
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from torch import Tensor

import kvcli
from kvcli.chat.model import Model
from kvcli.documents import read_document
from kvcli.engine.engine import run
from kvcli.engine.forward_request import ForwardRequest
from kvcli.engine.forward_request import Rows as PassRows
from kvcli.environment import Paths
from kvcli.models.catalog import stands_for
from kvcli.models.text import encode
from kvcli.prefix_cache import block_tree
from kvcli.prefix_cache.block_tree import LENGTH, Block
from kvcli.prefix_cache.codec import Codec, Lossless, Uncompressed
from kvcli.prefix_cache.prefix_cache import _held
from tests.bench.harness import Rows, Words, measurement
from tests.bench.resume import resumed

CODECS: Mapping[str, Codec] = {"as is": Uncompressed(), "lossless": Lossless()}
STEPS = {
    "1/8 1/4 3/8": (1 / 8, 1 / 4, 3 / 8),
    "1/4": (1 / 4,) * 3,
    "1/4 1/2 3/4": (1 / 4, 1 / 2, 3 / 4),
    "1/2 1 3/2": (0.5, 1, 1.5),
}
PAST, NEXT = 4 * LENGTH, 192  # tokens

KV = Mapping[int, tuple[Tensor, Tensor]]


def texts(model: Model, name: str, n: int) -> Iterator[list[int]]:
    """Ids of pieces of a document."""
    file = "demo:report" if name == "demo" else ROOT / "docs" / "design" / "drafting.md"
    ids = encode(model.tokenizer, read_document(file).text)
    for start in list(range(0, len(ids) - PAST - NEXT, PAST + NEXT))[:n]:
        yield ids[start : start + PAST + NEXT]


def past_of(model: Model, ids: list[int]) -> KV:
    with model.open() as text:
        text.generate(ids[: PAST + 1], max_new_tokens=1, ignore_eos=True)
        return {i: (k[:, :PAST].clone(), v[:, :PAST].clone()) for i, (_, k, v) in _held(text.session).items()}


def cut(kv: KV, at: int) -> KV:
    return {i: (k[:, at : at + LENGTH], v[:, at : at + LENGTH]) for i, (k, v) in kv.items()}


# --- blocks


def huffman(plane: bytes) -> bytes:
    coder = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(plane) + coder.flush()


def blocks(model: Model, name: str, reps: int) -> list[dict[str, Any]]:
    lm, ids = model.lm, next(texts(model, name, 1))
    kv = past_of(model, ids)
    took: dict[str, dict[str, list[float]]] = {side: {"write": [], "read": []} for side in CODECS}
    sizes = dict.fromkeys(CODECS, 0)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(reps * PAST // LENGTH):
            one = Block(ids[:LENGTH], cut(kv, i * LENGTH % PAST))
            for side, codec in CODECS.items():
                path, began = Path(folder, side), time.perf_counter()
                sizes[side] = one.write(path, codec)
                wrote = time.perf_counter()
                block_tree.read(path, lm.shapes, lm.dtype)
                took[side]["write"].append(wrote - began)
                took[side]["read"].append(time.perf_counter() - wrote)
    rows = [
        {"model": name, "side": side, "bytes": sizes[side]}
        | {f"{what}_ms": round(1e3 * statistics.median(times), 2) for what, times in found.items()}
        for side, found in took.items()
    ]
    return rows + [_planes(name, kv, side, *of) for side, of in {
        "exponents by huffman (zlib)": (huffman, zlib.decompress),
        "exponents by zlib 6": (lambda plane: zlib.compress(plane, 6), zlib.decompress),
        "exponents by lzma": (lambda plane: lzma.compress(plane, preset=0), lzma.decompress),
    }.items()]  # fmt: skip


def _planes(
    name: str, kv: KV, side: str, pack: Callable[[bytes], bytes], unpack: Callable[[bytes], bytes]
) -> dict[str, Any]:
    """Of a block: the rest of the bytes as they are; the time of the coder alone."""
    size, wrote, read = 0, 0.0, 0.0
    for t in (t for both in cut(kv, 0).values() for t in both):
        raw = t.contiguous().view(-1).view(torch.uint8).numpy()
        numbers = raw.view({2: np.uint16, 4: np.uint32}[t.element_size()])
        plane = (numbers << 1 >> (8 * (t.element_size() - 1))).astype(np.uint8).tobytes()
        began = time.perf_counter()
        made = pack(plane)
        packed = time.perf_counter()
        unpack(made)
        read += time.perf_counter() - packed
        wrote += packed - began
        size += t.nbytes - len(plane) + len(made)
    return {
        "model": name,
        "side": side,
        "bytes": size,
        "write_ms": round(1e3 * wrote, 2),
        "read_ms": round(1e3 * read, 2),
    }


# --- loss


Work = Callable[[Tensor, float, bool], tuple[Tensor, float]]  # of k or v, how deep, which: as it comes back, bytes


def by_steps(steps: tuple[float, ...], group: int) -> Work:
    """Differences to the first of `group` tokens, or to the mean where there is no group."""

    def work(t: Tensor, deep: float, is_k: bool) -> tuple[Tensor, float]:
        x, size = t.float(), 0.0
        if group:
            anchors = x[:, ::group]
            scale = anchors.abs().amax(2, keepdim=True).clamp(min=1e-9) / 127
            near = (anchors / scale).round()
            base = (near * scale).repeat_interleave(group, 1)[:, : x.shape[1]]
            size += len(huffman(near.to(torch.int8).numpy().tobytes())) + 4 * scale.numel()
            moves = torch.arange(x.shape[1]) % group > 0
        else:
            base, moves = x.mean(1, keepdim=True).expand_as(x), torch.ones(x.shape[1], dtype=torch.bool)
            size += 4 * base[:, 0].numel()
        away = (x - base)[:, moves]
        step = steps[int(3 * deep)] * away.square().mean(1, keepdim=True).sqrt().clamp(min=1e-9)
        codes = (away / step).round().clamp(-127, 127)
        size += len(huffman(codes.to(torch.int8).numpy().tobytes())) + 4 * step.numel()
        back = base.clone()
        back[:, moves] += codes * step
        return back.to(t.dtype), size

    return work


def by_bits(bits: int) -> Work:
    def work(t: Tensor, deep: float, is_k: bool) -> tuple[Tensor, float]:
        k, n, d = t.shape
        x = t.float().view(k, n // 64, 64, d) if is_k else t.float().view(k, n, d // min(64, d), min(64, d))
        dim = 2 if is_k else 3
        low, high = x.amin(dim, True), x.amax(dim, True)
        step = (high - low).clamp(min=1e-9) / (2**bits - 1)
        back = ((x - low) / step).round() * step + low
        return back.view(k, n, d).to(t.dtype), t.numel() * bits / 8 + 4 * low.numel()

    return work


def loss(model: Model, name: str, n: int) -> list[dict[str, Any]]:
    lm = model.lm
    sides: dict[str, Work] = {"as is": lambda t, deep, is_k: (t, t.nbytes)}
    sides |= {f"{bits} bits": by_bits(bits) for bits in (8, 4)}
    sides |= {f"cachegen {side}": by_steps(steps, 10) for side, steps in STEPS.items()}
    sides |= {f"mean {side}": by_steps(steps, 0) for side, steps in STEPS.items()}
    found: dict[str, list[tuple[float, float, float]]] = {side: [] for side in sides}
    for ids in texts(model, name, n):
        kv, right = past_of(model, ids), None
        for side, work in sides.items():
            size, made = 0.0, dict[int, tuple[Tensor, Tensor]]()
            for layer in kv:
                both = []
                for i, t in enumerate(kv[layer]):
                    pieces = [work(piece, layer / lm.n_layers, not i) for piece in t.split(LENGTH, 1)]
                    size += sum(nbytes for _, nbytes in pieces)
                    both.append(torch.cat([piece for piece, _ in pieces], 1))
                made[layer] = both[0], both[1]
            with model.open() as text:
                s = text.session
                s.adopt(ids[: PAST + 1], PAST, ((i, k, v, 0) for i, (k, v) in made.items()))
                rows = PassRows.chain(ids[PAST : PAST + NEXT - 1], PAST)
                (said,) = run([ForwardRequest(lm, rows, s.cache, want=list(range(NEXT - 1)))])
            logits = said.logits.float().log_softmax(-1)
            right = logits if right is None else right
            kl = float((right.exp() * (right - logits)).sum(-1).mean())
            top = float((right.argmax(-1) == logits.argmax(-1)).float().mean())
            found[side].append((size / (PAST / LENGTH), kl, top))
    return [
        {"model": name, "side": side, "bytes": int(np.mean([s for s, _, _ in of])), "texts": len(of)}
        | {"kl": float(np.mean([kl for _, kl, _ in of])), "same_top": float(np.mean([top for _, _, top in of]))}
        for side, of in found.items()
    ]


# --- resume


@measurement("A block of 256 tokens in fewer bytes, what rounding would cost, and resuming")
def codec(
    models: Words = ("demo", "smollm2-135m"),
    only: Words = ("blocks", "loss", "resume"),
    tokens: int = 8000,
    texts: int = 3,
    reps: int = 3,
) -> Rows:
    for name in models if {"blocks", "loss"} & {*only} else ():
        with kvcli.load(stands_for(name, Paths.of(os.environ).data), "exact") as model:
            yield from blocks(model, name, reps) if "blocks" in only else ()
            yield from loss(model, name, texts) if "loss" in only else ()
    if "resume" in only:
        for side, settings in (("as is", None), ("lossless", {"prefix_cache.codec": "lossless"})):
            yield {"side": side, **resumed(tokens, reps, "exact", settings)}


if __name__ == "__main__":
    codec.main()
