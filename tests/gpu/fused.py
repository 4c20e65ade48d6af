"""Cases of ops that have no plain form for all devices: the fused kernel itself, called as a pass calls it.

On a CPU Triton's interpreter runs it. Its inputs are of 16 bits, as it serves no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor

if TYPE_CHECKING:
    from tests.gpu.kernels import Inputs, Size

SCALE = 0.1
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5, 5, 6]
BENT: dict[str, Any] = {"window": 70, "softcap": 5.0}


def tree(size: Size, noise: Generator) -> Inputs:
    """A tree over stored slots, of heads that differ in length."""
    n, heads = len(PARENTS), size.kv * size.g
    shapes = {
        "q": (heads, n),
        "k": (size.kv * size.s,),
        "v": (size.kv * size.s,),
        "fk": (size.kv, n),
        "fv": (size.kv, n),
    }
    x: Inputs = {
        name: torch.randn(*shape, size.d, generator=noise, dtype=torch.float64) for name, shape in shapes.items()
    }
    x["sink"] = torch.randn(heads, generator=noise, dtype=torch.float64)
    lengths = [size.s - 7 * head for head in range(size.kv)]
    depth = [len(_line(row)) - 1 for row in range(n)]
    return {
        **x,
        "lengths": lengths,
        "starts": [size.s * head for head in range(size.kv)],
        "pos": [size.s + d for d in depth],
    }


def _line(row: int) -> list[int]:
    return [*(_line(PARENTS[row]) if PARENTS[row] >= 0 else []), row]


def rows(x: Inputs, *, bent: bool, is_prompt: bool = False) -> Sequence[Tensor]:
    """[N, H, E] and [N, H]; `is_prompt`: in the form for many."""
    from kvcli.kernels.attend_invariant import fused
    from kvcli.kernels.attend_invariant.tables import Table, Tree

    device, each = x["q"].device, x["k"].shape[0] // len(x["starts"])
    start, length = (torch.tensor(x[name], dtype=torch.int32, device=device) for name in ("starts", "lengths"))
    pos = torch.arange(each, dtype=torch.int32, device=device).repeat(len(start))
    more: dict[str, Any] = {"is_prompt": is_prompt} | (BENT | {"sink": x["sink"].float()} if bent else {})
    table = Table(x["k"], x["v"], pos, start, length)
    made = Tree.of_rows(PARENTS, x["pos"], device)
    return fused.attend_invariant(x["q"], table, x["fk"], x["fv"], made, SCALE, capacity=each, **more)


def rows_reference(x: Inputs, *, bent: bool) -> Sequence[Tensor]:
    from kvcli.kernels.attend_invariant import StoredKV
    from kvcli.kernels.attend_invariant.reference import attend_invariant

    n, each = len(PARENTS), x["k"].shape[0] // len(x["starts"])
    pos = torch.arange(each, dtype=torch.int32).repeat(len(x["starts"]))
    sees = torch.zeros(n, n, dtype=torch.bool)
    for row in range(n):
        sees[row, _line(row)] = True
    run = StoredKV(x["k"], x["v"], pos, x["starts"], x["lengths"], x["starts"])
    more = BENT | {"sink": x["sink"]} if bent else {}
    part = attend_invariant(x["q"], run, (x["fk"], x["fv"]), x["pos"], SCALE, sees=sees, **more)
    return part.out.transpose(0, 1), part.lse.T


def linear(size: Size, noise: Generator) -> Inputs:
    """As many inputs as there are slots, in whole groups."""
    k, n = size.s // 128 * 128, 8 * size.d
    x, w = (torch.randn(rows, k, generator=noise, dtype=torch.float64) for rows in (size.n, n))
    return {"x": x, "w": w}


def product(x: Inputs) -> Sequence[Tensor]:
    from kvcli.kernels.linear_skinny import fused

    return [fused.linear(x["x"], x["weight"], None)]


def product_reference(x: Inputs) -> Sequence[Tensor]:
    from kvcli.kernels.linear_skinny import reference

    return [x["x"] @ reference.weight(x["weight"]).double().T]


def coded(x: Inputs, kind: str) -> Inputs:
    """Two experts, each with half of the outputs."""
    from kvcli.kernels.linear_quantized import Codes

    w = x["w"].view(2, -1, x["w"].shape[1]) / x["w"].shape[1] ** 0.5
    made = Codes.of(w, 8 if kind == "int8" else 4, native=False).tensors()
    assert made is not None
    return {"x": x["x"], "data": made.data, "scale": made.scale, "kind": kind, "group": made.group}


def sent(x: Inputs) -> Sequence[Tensor]:
    """A third of the rows to the first expert, the rest to the other."""
    from kvcli.kernels.moe_linear import ExpertTensors, fused

    (_, n, _), (m, k) = x["data"].shape, x["x"].shape
    w = ExpertTensors(x["kind"], n, k, x["data"], x["scale"], x["group"])
    ids = (torch.arange(m, device=x["x"].device) >= m // 3).long()
    return [fused.products(x["x"], w, *fused.lists(ids, 2), 1, fused.TILES[m > fused.FEW])]


def sent_reference(x: Inputs) -> Sequence[Tensor]:
    from kvcli.kernels.linear_quantized import reference

    bits, m = (8 if x["kind"] == "int8" else 4), len(x["x"]) // 3
    codes = [data if bits == 8 else reference.unpack4(data) for data in x["data"]]
    first, other = (reference.weight(bits, x["group"], *each) for each in zip(codes, x["scale"], strict=True))
    return [torch.cat([x["x"][:m] @ first.T, x["x"][m:] @ other.T])]


def weight_of(x: Inputs, kind: str) -> Inputs:
    """Packed where it is right, so that both sides read the same codes."""
    from kvcli.kernels.linear_quantized import reference as rounding
    from kvcli.kernels.linear_skinny import Weight, pack4, pack8, pack_nf4, plain

    w = x["w"] / x["w"].shape[1] ** 0.5
    shape = (w.shape[0], w.shape[1])
    codes = (w.float() * 40).round().clamp(-8, 7).add(8).to(torch.uint8)
    packed: dict[str, Callable[[], Weight]] = {
        "plain": lambda: plain(w),
        "int8": lambda: pack8(*rounding.round8(w)),
        "int4": lambda: pack4(*rounding.round4(w, 128), 128),
        "nf4": lambda: pack_nf4(codes, w.float().view(shape[0], -1, 64).abs().amax(2)),
    }
    return {"x": x["x"], "weight": packed[kind]()}


def norm(x: Inputs, form: str) -> Sequence[Tensor]:
    from kvcli.kernels.rms_norm import RMS, fused

    return [fused.rms_norm(x["x"], RMS(x["w"][0], 1e-6, form))]


def norm_reference(x: Inputs, form: str) -> Sequence[Tensor]:
    """In float64 nothing is rounded, wherever a form would."""
    normed = x["x"] * torch.rsqrt(x["x"].square().mean(-1, keepdim=True) + 1e-6)
    return [normed * (x["w"][0] + (form == "one more"))]


def likeliest(x: Inputs) -> Sequence[Tensor]:
    from kvcli.kernels.argmax import fused

    return [fused.argmax(x["x"])]


def stored(x: Inputs, *, is_reference: bool) -> Sequence[Tensor]:
    """What three accepted rows leave behind two slots of each head: keys, values, positions, lengths."""
    from kvcli.kernels.append_kv import addresses, fused, reference
    from kvcli.kernels.attend_invariant.tables import Table

    k, v = x["fk"], x["fv"]
    kv, room, d = len(k), 8, k.shape[2]
    path, count, pos = (torch.tensor(n, dtype=torch.int32, device=k.device) for n in ([0, 2, 5, -1], [3], x["pos"]))
    start = torch.arange(kv, dtype=torch.int32, device=k.device) * room
    lying = (
        k.new_zeros(kv * room, d),
        k.new_zeros(kv * room, d),
        torch.zeros(kv * room, dtype=torch.int32, device=k.device),
    )
    table = Table(*lying, start, torch.full_like(start, 2))
    if is_reference:
        reference.append_kv([table], [(k, v)], path, count, pos)
    else:
        fused.append_kv(addresses([table], [(k, v)], k.device), path, count, pos, heads=kv, d=d, e=d, like=k)
    return [*lying, table.length]


def cases() -> dict[str, list[tuple[Any, ...]]]:
    """By op: name, inputs, the op, its reference, what comes before both."""
    return {
        "attend_invariant": [
            (kind + name, tree, partial(rows, bent=bent, is_prompt=many), partial(rows_reference, bent=bent), dict)
            for name, bent in (("tree", False), ("tree, window, softcap, sink", True))
            for kind, many in (("", False), ("prompt, ", True))
        ],
        "linear_skinny": [
            (kind, linear, product, product_reference, partial(weight_of, kind=kind))
            for kind in ("plain", "int8", "int4", "nf4")
        ],
        "moe_linear": [(kind, linear, sent, sent_reference, partial(coded, kind=kind)) for kind in ("int8", "int4")],
        "rms_norm": [
            (form, linear, partial(norm, form=form), partial(norm_reference, form=form), dict)
            for form in ("round first", "one more", "round last")
        ],
        "argmax": [("likeliest", linear, likeliest, lambda x: [x["x"].argmax(-1)], dict)],
        "append_kv": [("a path", tree, partial(stored, is_reference=False), partial(stored, is_reference=True), dict)],
    }
