"""Tensors of a KV cache in files: unchanged, or losslessly encoded in fewer bytes.

An encoded tensor is bytes; its contents do not decide how much memory is allocated. Readers accept both forms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from kvcli.kv.snapshot import SnapshotMismatch, State, leaves, tree_of
from kvcli.prefix_cache import exponent_coding
from kvcli.prefix_cache.codec import Codec

FEW = 1 << 12  # minimum bytes of a tensor that is encoded
SIZES = 8  # maximum dimensions of a tensor
DTYPES = tuple(exponent_coding.UNSIGNED)  # dtypes of a cache, by their number in the file
CODED, TYPE = "coded", "type"  # keys that replace a tensor: its bytes, its dtype, and its sizes "0", "1", ..


def coded_state(state: State, codec: Codec) -> State:
    """Return a snapshot as it is saved: large tensors are encoded."""
    found = dict(leaves(state))
    for path, t in list(found.items()):
        if isinstance(t, Tensor) and t.dtype in DTYPES and t.nbytes >= FEW and (data := codec.encode(t)) is not None:
            del found[path]
            made = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            found |= {f"{path}/{CODED}": made, f"{path}/{TYPE}": DTYPES.index(t.dtype)}
            found |= {f"{path}/{i}": n for i, n in enumerate(t.shape)}
    return tree_of(found)


def decoded_state(state: State) -> State:
    """Decode a snapshot, in at most twice the memory of the encoded one. Raises SnapshotMismatch if it is invalid."""
    return {name: _decoded(of) if isinstance(of, Mapping) else of for name, of in state.items()}


def _decoded(part: State) -> State | Tensor:
    t, kind = part.get(CODED), part.get(TYPE)
    if not isinstance(t, Tensor):
        return decoded_state(part)
    if t.dtype != torch.uint8 or t.dim() != 1:
        raise SnapshotMismatch("it is encoded, but not as bytes")
    sizes = [n for i in range(len(part) - 2) if type(n := part.get(str(i))) is int and n > 0]
    if not len(part) - 2 == len(sizes) <= SIZES or type(kind) is not int or not 0 <= kind < len(DTYPES):
        raise SnapshotMismatch("it is encoded without its sizes")
    if max(sizes, default=1) > 2 * t.nbytes or math.prod(sizes) * DTYPES[kind].itemsize > 2 * t.nbytes:
        raise SnapshotMismatch("it has too few bytes for its sizes")
    try:
        return exponent_coding.decode(t.numpy().tobytes(), sizes, DTYPES[kind])
    except ValueError as error:
        raise SnapshotMismatch(str(error)) from None
