"""The fused ops over inputs of a size, as calls by rows; what libraries have in their place; one that breaks the law.

On a CPU they run in Triton's interpreter: import `tests.kernels.interpreted` before anything that imports a `fused`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional

Rows = Sequence[int]
MOST = 64  # rows with inputs of their own


@dataclass(frozen=True)
class Size:
    """Of one layer: an 8B Llama's."""

    inputs: int = 4096
    outputs: int = 14_336
    heads: int = 32
    kv: int = 8
    d: int = 128
    slots: int = 32_768


TINY = Size(inputs=256, outputs=64, heads=2, kv=1, d=64, slots=300)  # that the interpreter gets through


@dataclass(frozen=True)
class Op:
    """`of` has the inputs of some rows lie ready, and gives the call for one pass over them: their outputs [rows, ..],
    with the bits that they have in any other."""

    of: Callable[[Rows], Callable[[], Tensor]]
    nbytes: int  # of weights, or of stored keys and values, that a pass has to read however many rows it has

    def call(self, rows: Rows) -> Tensor:
        return self.of(rows)()


Make = Callable[[Size, Generator], Op]


def by_rows(run: Callable[[Tensor], Tensor], x: Tensor, nbytes: int = 0) -> Op:
    """An op whose rows are those of one tensor."""

    def of(rows: Rows) -> Callable[[], Tensor]:
        return partial(run, x[list(rows)])

    return Op(of, nbytes)


def noise(g: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, device=g.device, dtype=torch.bfloat16)


# ---- ours ----


def _product(kind: str, size: Size, g: Generator) -> Op:
    from kvcli.kernels.linear_quantized import reference as rounding
    from kvcli.kernels.linear_skinny import fused, pack4, pack8, pack_nf4, plain

    x, shape = noise(g, MOST, size.inputs), (size.outputs, size.inputs)
    codes = torch.randint(0, 16, shape, generator=g, device=g.device, dtype=torch.uint8)
    if kind == "int8":
        w = pack8(*rounding.round8(noise(g, *shape)))
    elif kind == "int4":
        w = pack4(codes, noise(g, size.inputs // 128, size.outputs, 2), 128)
    elif kind == "nf4":
        w = pack_nf4(codes, noise(g, size.outputs, size.inputs // 64).abs().float())
    else:
        w = plain(noise(g, *shape))
    nbytes = w.data.nbytes + (0 if w.scale is None else w.scale.nbytes)
    return by_rows(lambda some: fused.linear(some, w, None), x, nbytes)


def merged(kind: str, n: int, size: Size, g: Generator) -> Any:
    """Several layers as one, by outputs."""
    from kvcli.kernels.linear_epilogue import MergedLinear
    from kvcli.kernels.linear_skinny import pack4, plain

    codes = torch.randint(0, 16, (n, size.inputs), generator=g, device=g.device, dtype=torch.uint8)
    if kind == "plain":
        return MergedLinear(plain(noise(g, n, size.inputs)), None)
    return MergedLinear(pack4(codes, noise(g, size.inputs // 128, n, 2), 128), None)


def _gated(kind: str, size: Size, g: Generator) -> Op:
    from kvcli.kernels.linear_epilogue import fused

    weights = merged(kind, 2 * size.outputs, size, g)
    x = noise(g, MOST, size.inputs) / size.inputs**0.5
    nbytes = sum(t.nbytes for t in weights.weight.tensors)
    return by_rows(lambda some: fused.gated(some, weights, "silu"), x, nbytes)


def _heads(kind: str, size: Size, g: Generator) -> Op:
    """Normed and turned; each row at a position of its own."""
    from kvcli.kernels.linear_epilogue import Heads, fused
    from kvcli.kernels.rms_norm import RMS

    weights = merged(kind, (size.heads + 2 * size.kv) * size.d, size, g)
    x, cos, sin = noise(g, MOST, size.inputs), noise(g, MOST, size.d), noise(g, MOST, size.d)
    of = Heads(size.heads, size.d, *(RMS(noise(g, size.d), 1e-6, "round last") for _ in "qk"))

    def of_rows(rows: Rows) -> Callable[[], Tensor]:
        given = [t[list(rows)] for t in (x, cos, sin)]
        return lambda: torch.cat(fused.heads(given[0], weights, of, *given[1:]), 1)

    return Op(of_rows, sum(t.nbytes for t in weights.weight.tensors))


def layer(size: Size, g: Generator, room: int = 0) -> tuple[Tensor, Any, Tensor, Tensor]:
    """Queries [H, MOST, D]; a table of stored slots, with so much room behind those of each head; fresh k and v."""
    from kvcli.kernels.attend_invariant.tables import Table

    each = size.slots + room
    k, v = (noise(g, size.kv * each, size.d) for _ in "kv")
    start = torch.arange(size.kv, device=g.device, dtype=torch.int32) * each
    pos = torch.arange(each, device=g.device, dtype=torch.int32).repeat(size.kv)
    table = Table(k, v, pos, start, torch.full_like(start, size.slots))
    fresh_k, fresh_v = (noise(g, size.kv, MOST, size.d) for _ in "kv")
    return noise(g, size.heads, MOST, size.d), table, fresh_k, fresh_v


def _attention(size: Size, g: Generator) -> Op:
    """Each row reads what is stored, and itself."""
    from kvcli.kernels.attend_invariant import fused
    from kvcli.kernels.attend_invariant.tables import Tree

    q, table, k, v = layer(size, g)

    def of(rows: Rows) -> Callable[[], Tensor]:
        n = len(rows)
        tree = Tree.of_rows([-1] * n, [size.slots] * n, g.device)
        x, fresh_k, fresh_v = (t[:, list(rows)].contiguous() for t in (q, k, v))
        given = x, table, fresh_k, fresh_v, tree, size.d**-0.5
        return lambda: fused.attend_invariant(*given, capacity=size.slots)[0]

    return Op(of, table.k.nbytes + table.v.nbytes)


def _packed_attention(bits: int, size: Size, g: Generator) -> Op:
    from kvcli.kernels.attend_quantized import PackedHead, fused, table_of
    from kvcli.kernels.quantize_kv import pack_keys, pack_values

    q, heads = noise(g, size.heads, MOST, size.d), []
    full = size.slots if bits == 8 else size.slots // 64 * 64  # keys in fewer bits wait until a group is full
    for _ in range(size.kv):
        k, v = (noise(g, size.slots, size.d) for _ in "kv")
        heads.append(PackedHead(pack_keys(k[:full], bits, 64), k[full:], pack_values(v, bits, 64), size.slots))

    table = table_of(heads, [None] * size.kv, has_holes=False)

    def of(rows: Rows) -> Callable[[], Tensor]:
        x = q[:, list(rows)].contiguous()
        return lambda: fused.attend(x, table, size.d**-0.5, 0.0)[0].transpose(0, 1)

    held = [t for head in heads for side in (head.keys, head.values) for t in (side.codes, side.scale, side.zero)]
    return Op(of, sum(t.nbytes for t in held if t is not None))


def _limited(size: Size, g: Generator) -> Op:
    """Slots alone, of which each row sees a number of its own."""
    from kvcli.kernels.attend import fused

    q, k, v = noise(g, size.heads, MOST, size.d), *(noise(g, size.kv, size.slots, size.d) for _ in "kv")
    upto = torch.linspace(1, size.slots, MOST, device=g.device).int()

    def of(rows: Rows) -> Callable[[], Tensor]:
        x, limit = q[:, list(rows)].contiguous(), upto[list(rows)]
        given = x, k, v, size.d**-0.5, 0.0, None, size.slots, limit
        return lambda: fused.attend(*given)[0].transpose(0, 1)

    return Op(of, k.nbytes + v.nbytes)


def _stored(size: Size, g: Generator) -> Op:
    """Rows of a pass become slots: their keys, values and positions there."""
    from kvcli.kernels.append_kv import addresses, fused

    _, table, k, v = layer(replace(size, slots=0), g, room=MOST)
    assert table.pos is not None
    layers, pos = addresses([table], [(k, v)], k.device), torch.arange(MOST, device=g.device, dtype=torch.int32) * 3
    lying = [t.view(size.kv, MOST, -1) for t in (table.k, table.v, table.pos)]

    def of(rows: Rows) -> Callable[[], Tensor]:
        n = len(rows)
        path, count = (torch.tensor(each, device=g.device, dtype=torch.int32) for each in (list(rows), [n]))

        def run() -> Tensor:
            table.length.zero_()
            fused.append_kv(layers, path, count, pos, heads=size.kv, d=k.shape[2], e=v.shape[2], like=k)
            return torch.cat([t[:, :n].transpose(0, 1).flatten(1).float() for t in lying], 1)

        return run

    return Op(of, 0)


def _norm(size: Size, g: Generator, *, in_full: bool) -> Op:
    """`in_full`: in float32, where another order of a sum shows; of 16 bits most are the same."""
    from kvcli.kernels.rms_norm import RMS, fused

    norm, x = RMS(noise(g, size.inputs), 1e-6, "round first"), noise(g, MOST, size.inputs)
    return by_rows(lambda some: fused.rms_norm(some, norm), x.float() if in_full else x)


def _drawn(size: Size, g: Generator) -> Op:
    from kvcli.kernels.argmax import Noise, fused

    logits, pos = noise(g, MOST, 8 * size.inputs), torch.arange(MOST, device=g.device)
    seed, heat = torch.full_like(pos, 7), torch.full((MOST,), 0.8, device=g.device)

    def of(rows: Rows) -> Callable[[], Tensor]:
        mine = list(rows)
        return partial(fused.argmax, logits[mine], Noise(seed[mine], pos[mine], heat[mine]))

    return Op(of, 0)


def _merged(size: Size, g: Generator) -> Op:
    """Parts of three tiers, one of which some rows see nothing of."""
    from kvcli.kernels.merge_attention import fused

    outs, lses = (
        [torch.randn(MOST, size.heads, *more, generator=g, device=g.device) for _ in "abc"] for more in ((size.d,), ())
    )
    lses[1][::2] = -torch.inf

    def of(rows: Rows) -> Callable[[], Tensor]:
        parts = [[t[list(rows)].transpose(0, 1) for t in ts] for ts in (outs, lses)]
        return lambda: fused.merge_attention(*parts)[0].transpose(0, 1)

    return Op(of, 0)


def _recurrent(size: Size, g: Generator) -> Op:
    """The rule on a row at a time, each behind the same state: what follows a row in its pass is no part of it."""
    from kvcli.kernels.gated_delta import fused

    q, k, v = (noise(g, MOST, size.heads, size.d) for _ in "qkv")
    decay, beta = (noise(g, MOST, size.heads).float().sigmoid() for _ in "gb")
    state = torch.randn(size.heads, size.d, size.d, generator=g, device=g.device)

    def of(rows: Rows) -> Callable[[], Tensor]:
        def run() -> Tensor:
            """Each row first in a chain of all, as long as the pass."""
            chains = [[row, *[other for other in rows if other != row]] for row in rows]
            made = [fused.gated_delta(*(t[chain] for t in (q, k, v, -decay, beta)), state)[0][0] for chain in chains]
            return torch.stack(made)

        return run

    return Op(of, state.nbytes)


def _turned(size: Size, g: Generator) -> Op:
    from kvcli.kernels.quantize_kv import fused

    return by_rows(fused.turned, noise(g, MOST, size.heads, size.d))


def _rotated(size: Size, g: Generator) -> Op:
    from kvcli.kernels.rope import fused

    k, freq = noise(g, size.kv, MOST, size.d), 1e4 ** (-torch.arange(0, size.d, 2, device=g.device) / size.d)
    at = torch.randint(0, 131_072, (MOST,), generator=g, device=g.device)

    def of(rows: Rows) -> Callable[[], Tensor]:
        given = k[:, list(rows)], at[list(rows)], freq, 1.0, False
        return lambda: fused.turned(*given, back=False).transpose(0, 1)

    return Op(of, 0)


def _masses(size: Size, g: Generator) -> Op:
    """What each row gives to each slot."""
    from kvcli.kernels.attention_mass import fused

    q, k = noise(g, size.heads, MOST, size.d), noise(g, size.kv, size.slots, size.d)
    pos, at = (
        torch.arange(size.slots, device=g.device).expand(size.kv, -1),
        size.slots - torch.arange(MOST).to(g.device),
    )

    def of(rows: Rows) -> Callable[[], Tensor]:
        given = q[:, list(rows)], at[list(rows)], k, pos, size.d**-0.5, 0.0, None, "none"
        return lambda: fused.attention_mass(*given).permute(2, 0, 1, 3)

    return Op(of, k.nbytes)


def _scored(size: Size, g: Generator, *, by_codes: bool) -> Op:
    """Pages by their bounds, or slots by their codes, as sparse attention has them in a pass."""
    from kvcli.kernels.page_bounds import fused as bounds
    from kvcli.kernels.quantized_key_scores import fused as scores

    shape = size.kv, size.slots if by_codes else size.slots // 16, size.d
    low, high, codes = noise(g, *shape), noise(g, *shape).abs() + 3, noise(g, *shape).to(torch.int8)
    scale = noise(g, *shape[:2]).abs()

    def run(some: Tensor) -> Tensor:
        x = some.transpose(0, 1)
        found = scores.code_scores(x, codes, scale) if by_codes else bounds.page_bounds(x, low, high)
        return found.transpose(0, 1)

    x = torch.randn(MOST, size.kv, size.d, generator=g, device=g.device)
    return by_rows(run, x, codes.nbytes if by_codes else low.nbytes + high.nbytes)


def _experts(kind: str, size: Size, g: Generator) -> Op:
    """Each row by two of eight experts."""
    from kvcli.kernels.linear_quantized import Codes
    from kvcli.kernels.moe_linear import ExpertTensors, fused

    inner, e = max(32, size.outputs // 16), 8
    shapes, made = ((2 * inner, size.inputs), (size.inputs, inner)), []
    for n, k in shapes:
        w = noise(g, e, n, k)
        is_plain = kind == "plain"
        made.append(ExpertTensors("plain", n, k, w, None) if is_plain else Codes.of(w, 4, native=False).tensors())
    x, weights = noise(g, MOST, size.inputs), torch.rand(MOST, 2, generator=g, device=g.device)
    row = torch.arange(MOST, device=g.device)
    ids = torch.stack([row % e, (3 * row + 1) % e], 1)  # neighbours share experts

    def of(rows: Rows) -> Callable[[], Tensor]:
        mine = list(rows)
        given = x[mine], ids[mine], weights[mine], *made
        return lambda: fused.experts(*given, lambda h: functional.silu(h[:, :inner]) * h[:, inner:])

    return Op(of, 0)


OURS: dict[str, Make] = {f"linear_skinny, {kind}": partial(_product, kind) for kind in ("plain", "int8", "int4", "nf4")}
OURS |= {f"linear_epilogue, heads, {kind}": partial(_heads, kind) for kind in ("plain", "int4")}
OURS |= {f"linear_epilogue, gated, {kind}": partial(_gated, kind) for kind in ("plain", "int4")}
OURS |= {"attend_invariant": _attention, "attend, limits": _limited, "append_kv": _stored, "argmax, drawn": _drawn}
OURS |= {"rms_norm, in float32": partial(_norm, in_full=True), "rms_norm": partial(_norm, in_full=False)}
OURS |= {f"attend_quantized, {bits} bits": partial(_packed_attention, bits) for bits in (8, 4, 2)}
OURS |= {"merge_attention": _merged, "quantize_kv, turned": _turned, "rope": _rotated, "attention_mass": _masses}
OURS |= {"gated_delta": _recurrent}
OURS |= {f"moe_linear, {kind}": partial(_experts, kind) for kind in ("plain", "int4")}
OURS |= {"page_bounds": partial(_scored, by_codes=False), "quantized_key_scores": partial(_scored, by_codes=True)}


def of_op(op: str) -> Make:
    """The first of an op."""
    return next(make for name, make in OURS.items() if name.partition(",")[0] == op)


# ---- what libraries have ----


def _torch_product(size: Size, g: Generator) -> Op:
    w = noise(g, size.outputs, size.inputs)
    return by_rows(lambda some: functional.linear(some, w), noise(g, MOST, size.inputs), w.nbytes)


def _torch_norm(size: Size, g: Generator) -> Op:
    """As models write it."""
    return by_rows(lambda some: some.pow(2).mean(-1), noise(g, MOST, size.inputs).float())


def _torch_attention(size: Size, g: Generator) -> Op:
    q, k, v = noise(g, size.heads, MOST, size.d), *(noise(g, size.kv, size.slots, size.d)[None] for _ in "kv")

    def run(some: Tensor) -> Tensor:
        found = functional.scaled_dot_product_attention(some.transpose(0, 1)[None], k, v, enable_gqa=True)
        return found[0].transpose(0, 1).contiguous()

    return by_rows(run, q.transpose(0, 1), k.nbytes + v.nbytes)


def _bitsandbytes(size: Size, g: Generator) -> Op:
    import bitsandbytes
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(noise(g, size.outputs, size.inputs), quant_type="nf4")
    return by_rows(
        lambda some: bitsandbytes.matmul_4bit(some, codes.t(), state), noise(g, MOST, size.inputs), codes.nbytes
    )


def _torch_int4(size: Size, g: Generator) -> Op:
    """Of codes and scales like ours."""
    from kvcli.kernels.linear_skinny import tinygemm

    if not tinygemm.serves(torch.device(g.device), torch.bfloat16):
        raise ImportError("torch multiplies int4 in bfloat16 on NVIDIA cards alone")
    plain = torch.nn.Linear(size.inputs, size.outputs, bias=False, device="meta")
    plain.weight = torch.nn.Parameter(noise(g, size.outputs, size.inputs), requires_grad=False)
    layer = tinygemm.TorchInt4(plain, torch.device(g.device))
    return by_rows(layer, noise(g, MOST, size.inputs), layer.data.nbytes + layer.scale.nbytes)


THEIRS: dict[str, Make] = {
    "torch's product": _torch_product,
    "torch's mean of squares": _torch_norm,
    "torch's attention": _torch_attention,
    "bitsandbytes, nf4": _bitsandbytes,
    "torch's int4": _torch_int4,
}


def _cut(size: Size, g: Generator) -> Op:
    """A sum in one stretch for one row and in two for several: what a library does that looks at the shape."""
    w = noise(g, 64, size.inputs).float()

    def run(some: Tensor) -> Tensor:
        cut = size.inputs if len(some) == 1 else size.inputs // 2
        found = [(row * w).view(64, -1, cut).sum(-1) for row in some]  # [64, stretches]
        return torch.stack([parts[:, 0] if cut == size.inputs else parts[:, 0] + parts[:, 1] for parts in found])

    return by_rows(run, noise(g, MOST, size.inputs).float(), w.nbytes)


SEEDED: dict[str, Make] = {"a sum cut by the number of rows": _cut}
