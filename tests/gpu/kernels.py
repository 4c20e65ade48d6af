"""Every op of kvcli.kernels on the device against its reference in float64 on the CPU, in three types of numbers.

Inputs are rounded to the type first, so that an error is that of the op alone. Memory that nobody wrote holds NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Generator, Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.attend.reference import attend as attend_reference
from kvcli.kernels.attend_new_tokens import attend_new_tokens
from kvcli.kernels.attend_new_tokens.reference import attend_new_tokens as fresh_reference
from kvcli.kernels.attend_quantized import PackedHead, attend_quantized
from kvcli.kernels.attention_mass import attention_mass
from kvcli.kernels.gated_delta import reference as delta_reference
from kvcli.kernels.gumbel_noise import gumbel
from kvcli.kernels.linear_quantized import QuantizedWeight, linear_quantized, pack
from kvcli.kernels.linear_quantized.formats import group_format
from kvcli.kernels.linear_skinny import Weight
from kvcli.kernels.merge_attention import PartialAttention, merge_attention
from kvcli.kernels.page_bounds import page_bounds
from kvcli.kernels.quantize_kv import Rounded, hadamard, pack_keys, pack_values, unpack_keys, unpack_values
from kvcli.kernels.quantized_key_scores import code_scores, pack2, unpack2
from kvcli.kernels.rope import Rotary, rotate, unrotate
from tests.gpu import fused
from tests.gpu.stage import On, Row, interpret_on_a_cpu, why

NUMBERS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WITHIN = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}  # of the largest number that should come out
SCALE, GROUP, WINDOW = 0.1, 64, 33
HALVES = ("bf16", "fp16")  # what fused kernels serve
CPU_ONLY = (
    "attend_captured",
    "decoder_layer",
    "gated_mlp",
    "linear",
    "linear_blocked",
    "native",
    "page_scores",
)

Inputs = dict[str, Any]  # tensors, and what else a call takes


@dataclass(frozen=True)
class Size:
    kv: int = 8  # KV heads
    g: int = 4
    n: int = 9  # rows
    s: int = 4099  # slots
    d: int = 128


@dataclass(frozen=True)
class Case:
    """One way to call an op: `of` makes inputs in float64, `op` and `reference` take them."""

    name: str
    of: Callable[[Size, Generator], Inputs]
    op: Callable[[Inputs], Sequence[Tensor]]
    reference: Callable[[Inputs], Sequence[Tensor]]
    step: float = 0.0  # allowed besides: codes that a tie rounds the other way
    before: Callable[[Inputs], Inputs] = dict  # done in the type itself, on the CPU, for both sides
    dtypes: Sequence[str] = tuple(NUMBERS)


def _normal(noise: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=noise, dtype=torch.float64)


def _attention(size: Size, noise: Generator) -> Inputs:
    q = _normal(noise, size.kv * size.g, size.n, size.d)
    k, v = (_normal(noise, size.kv, size.s, size.d) for _ in "kv")
    mask = torch.rand(size.kv, size.n, size.s, generator=noise) < 0.6
    mask[:, 0] = False  # a row that sees nothing
    return {"q": q, "k": k, "v": v, "mask": mask, "length": [size.s - 7 * head for head in range(size.kv)]}


def _attend(
    x: Inputs, *, is_reference: bool, softcap: float = 0.0, masked: bool = False, ragged: bool = False
) -> Sequence[Tensor]:
    mask, length = x["mask"] if masked else None, x["length"] if ragged else x["k"].shape[1]
    if is_reference:
        return attend_reference(x["q"], x["k"], x["v"], SCALE, softcap, mask, length)
    part = attend(x["q"], x["k"], x["v"], SCALE, softcap=softcap, mask=mask, length=None if masked else length)
    return part.out, part.lse


def _tree(size: Size, noise: Generator) -> Inputs:
    x = _attention(replace(size, s=size.n), noise)
    sees = (torch.rand(size.n, size.n, generator=noise) < 0.4).tril() | torch.eye(size.n, dtype=torch.bool)
    return {**x, "sees": sees}


def _fresh(x: Inputs, *, is_reference: bool, tree: bool) -> Sequence[Tensor]:
    sees = x["sees"] if tree else None
    if is_reference:
        return fresh_reference(x["q"], x["k"], x["v"], SCALE, sees, 0.0)
    part = attend_new_tokens(x["q"], x["k"], x["v"], SCALE, sees)
    return part.out, part.lse


def _packed(x: Inputs, bits: tuple[int, int]) -> Inputs:
    """Codes, made where they are right, so that both sides read the same."""
    heads = []
    for k, v in zip(x["k"], x["v"], strict=True):
        full = len(k) // GROUP * GROUP
        heads.append(PackedHead(pack_keys(k[:full], bits[0], GROUP), k[full:], pack_values(v, bits[1], GROUP), len(k)))
    return {"q": x["q"], "heads": heads}


def _attend_quantized(x: Inputs) -> Sequence[Tensor]:
    part = attend_quantized(x["q"], x["heads"], SCALE, x["q"].dtype)
    return part.out, part.lse


def _unpacked(x: Inputs) -> Sequence[Tensor]:
    """Attention over what the codes say."""
    like = torch.empty(0, dtype=torch.float64)
    keys = [torch.cat([unpack_keys(head.keys, like), head.rest.double()]) for head in x["heads"]]
    values = [unpack_values(head.values, like, head.length) for head in x["heads"]]
    return attend_reference(x["q"], torch.stack(keys), torch.stack(values), SCALE, 0.0, None, keys[0].shape[0])


def _codes(x: Inputs, bits: int) -> Sequence[Tensor]:
    k, v = x["k"][0], x["v"][0]
    k, like = k[: len(k) // GROUP * GROUP], k[:0]
    keys, values = pack_keys(k, bits, GROUP), pack_values(v, bits, GROUP)
    return unpack_keys(keys, like), unpack_values(values, like, len(v)), hadamard(v.shape[1], v)


def _scores(size: Size, noise: Generator) -> Inputs:
    q = _normal(noise, size.kv, size.n, size.d)
    codes = torch.randint(0, 4, (size.kv, size.s, size.d), generator=noise).mul_(2).sub_(3).to(torch.int8)
    return {"q": q, "codes": codes, "scale": torch.rand(size.kv, size.s, generator=noise, dtype=torch.float64)}


def _mass(size: Size, noise: Generator) -> Inputs:
    pos = torch.stack([torch.randperm(2 * size.s, generator=noise)[: size.s] for _ in range(size.kv)])
    pos[-1, size.s // 2 :] = -1
    q_pos = torch.arange(size.s, size.s + size.n)
    return {**_attention(size, noise), "pos": pos, "q_pos": q_pos}


def _pages(size: Size, noise: Generator) -> Inputs:
    low = _normal(noise, size.kv, size.s // 16, size.d)
    return {"q": _normal(noise, size.kv, size.n, size.d), "low": low, "high": low + low.abs()}


def _keys(size: Size, noise: Generator) -> Inputs:
    inv_freq = 10000.0 ** (-torch.arange(0, size.d, 2) / size.d)
    return {"k": _normal(noise, size.kv, size.s, size.d), "pos": torch.arange(size.s), "inv_freq": inv_freq.float()}


def _turn(x: Inputs, interleaved: bool) -> Sequence[Tensor]:
    rotary = Rotary(x["inv_freq"].float(), 1.3, interleaved)
    return rotate(x["k"], x["pos"], rotary), unrotate(x["k"], x["pos"], rotary)


def _linear(size: Size, noise: Generator) -> Inputs:
    return {"x": _normal(noise, size.n, 32 * size.d), "w": _normal(noise, 16 * size.d, 32 * size.d)}


def _packed_weight(x: Inputs, bits: Any) -> Inputs:
    made = pack(x["w"], bits, native=False)
    return {"x": x["x"], "data": made.data, "scale": made.scale, "shape": made.shape, "bits": bits, "group": made.group}


def _product(x: Inputs) -> Sequence[Tensor]:
    form = group_format(x["bits"], x["group"])
    return [linear_quantized(x["x"], QuantizedWeight(form, x["shape"], x["data"], x["scale"], False))]


def _recurrence(size: Size, noise: Generator) -> Inputs:
    heads = size.kv * size.g
    q, k = (_normal(noise, size.n, size.kv, size.d) for _ in "qk")
    decay, beta = (torch.rand(size.n, heads, generator=noise, dtype=torch.float64) for _ in "gb")
    v, state = _normal(noise, size.n, heads, size.d), _normal(noise, heads, size.d, size.d)
    conv = {"x": v.flatten(1).T, "w": _normal(noise, heads * size.d, 4)}
    return {"rows": [q, k, v, -decay, beta], "state": state, **conv}


def _recurrent(x: Inputs, *, is_reference: bool) -> Sequence[Tensor]:
    of = delta_reference if is_reference else import_module("kvcli.kernels.gated_delta.fused")
    n = len(x["rows"][0])
    return *of.gated_delta(*x["rows"], x["state"]), of.causal_conv(x["x"], x["w"], None, n, True)


def _merged(x: Inputs) -> Sequence[Tensor]:
    cut = x["k"].shape[1] // 3
    spans = [(0, cut), (cut, 2 * cut), (2 * cut, x["k"].shape[1])]
    parts = [
        PartialAttention(*attend_reference(x["q"], x["k"][:, a:b], x["v"][:, a:b], SCALE, 0.0, None, b - a))
        for a, b in spans
    ]
    return merge_attention(parts), merge_attention(parts[:2])


def _cases() -> dict[str, list[Case]]:
    def both(name: str, of: Any, run: Any, **more: Any) -> Case:
        ways = [partial(run, is_reference=is_reference, **more) for is_reference in (False, True)]
        return Case(name, of, *ways)

    def same(name: str, of: Any, run: Any, **more: Any) -> Case:
        return Case(name, of, run, run, **more)

    def chosen(over: Any, **more: Any) -> Callable[[Inputs], Sequence[Tensor]]:
        return lambda x: [attention_mass(x["q"], x["q_pos"], x["k"], x["pos"], SCALE, over=over, **more)]

    ours = {
        op: [Case(name, of, run, wanted, before=before, dtypes=HALVES) for name, of, run, wanted, before in given]
        for op, given in fused.cases().items()
    }
    return ours | {
        "attend": [
            both("whole", _attention, _attend),
            both("ragged", _attention, _attend, ragged=True),
            both("masked", _attention, _attend, masked=True),
            both("softcap", _attention, _attend, softcap=5.0),
        ],
        "attend_new_tokens": [both("chunk", _tree, _fresh, tree=False), both("tree", _tree, _fresh, tree=True)],
        "attend_quantized": [
            Case(f"{k}-{v} bits", _attention, _attend_quantized, _unpacked, before=partial(_packed, bits=(k, v)))
            for k, v in ((8, 8), (4, 4), (4, 2), (2, 2))
        ],
        "quantized_key_scores": [
            same("int8", _scores, lambda x: [code_scores(x["q"], x["codes"], x["scale"])]),
            same("2 bits", _scores, lambda x: [unpack2(pack2(x["codes"]), x["codes"].shape[-1])]),
        ],
        "attention_mass": [
            same("mean", _mass, chosen("mean")),
            same("none, windowed", _mass, chosen("none", window=WINDOW)),
            same("max, softcap", _mass, chosen("max", softcap=5.0)),
        ],
        "gumbel_noise": [same("noise", _scores, lambda x: [gumbel(7, torch.arange(9, device=x["q"].device), _ids(x))])],
        "linear_quantized": [
            same(f"{bits} bits", _linear, _product, before=partial(_packed_weight, bits=bits)) for bits in (8, 4)
        ],
        "gated_delta": [replace(both("rule and convolution", _recurrence, _recurrent), dtypes=HALVES)],
        "merge_attention": [same("three and two parts", _attention, _merged)],
        "quantize_kv": [
            same(f"{bits} bits", _attention, partial(_codes, bits=bits), step=2 / (2**bits - 1)) for bits in (8, 4, 2)
        ],
        "page_bounds": [same("bounds", _pages, lambda x: [page_bounds(x["q"], x["low"], x["high"])])],
        "rope": [
            same("halves", _keys, partial(_turn, interleaved=False)),
            same("neighbours", _keys, partial(_turn, interleaved=True)),
        ],
    }


def _ids(x: Inputs) -> Tensor:
    return torch.arange(0, 200_000, 37, device=x["q"].device)


def moved(value: Any, dtype: torch.dtype | None, device: str) -> Any:
    """Whatever is in there, its floating numbers in `dtype`; but for what has a type of its own."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if dtype is not None and value.is_floating_point() else value.dtype)
    if isinstance(value, PackedHead):
        keys, values = (moved(side, None, device) for side in (value.keys, value.values))
        return PackedHead(keys, moved(value.rest, None, device), values, value.length)
    if isinstance(value, Rounded):
        tensors = [None if t is None else t.to(device) for t in (value.codes, value.scale, value.zero)]
        return Rounded(value.bits, *tensors)
    if isinstance(value, Weight):
        return value.of(moved(t, dtype if dtype is torch.float64 else None, device) for t in value.tensors)
    if isinstance(value, dict):
        return {key: moved(each, dtype, device) for key, each in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], PackedHead | Tensor):
        return [moved(each, dtype, device) for each in value]
    return value


def error_of(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest difference, of the largest number; NaN where one side has a number and the other none."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        a, b = a.cpu().double(), b.cpu().double()
        off = torch.where(a == b, 0.0, (a - b).abs())  # equal infinities are equal
        largest = b[b.isfinite()].abs().max().clamp_min(1e-30)
        worst = max(worst, float((off / largest).max().nan_to_num(torch.inf)))
    return worst


def tried(op: str, case: Case, size: Size, made: Inputs, dtype: str, device: str) -> Row:
    given = case.before(moved(made, NUMBERS[dtype], "cpu"))
    within = max(WITHIN[dtype], case.step)
    row = {"op": op, "case": case.name, "dtype": dtype, "rows": size.n, "slots": size.s, "within": within}
    try:
        want = case.reference(moved(given, torch.float64, "cpu"))
        error = error_of(case.op(moved(given, None, device)), want)
    except ImportError as fault:
        return {**row, "not_here": why(fault), "ok": None}
    except Exception as fault:
        return {**row, "fault": why(fault), "ok": False}
    return {**row, "error": error, "ok": error <= within}


def run(on: On) -> Iterator[Row]:
    interpret_on_a_cpu(on)
    sizes = (
        [Size(2, 2, 5, 131, 64)]
        if on.is_tiny
        else [
            *(Size(), Size(n=1, s=16_384), Size(g=1, n=33, s=1_031)),
            Size(kv=2, n=129, s=1_031),  # more rows than have bits of their own: what prompts are read with
        ]
    )
    torch.use_deterministic_algorithms(True, warn_only=True)  # this is what makes torch.empty fill with NaN
    tries = good = 0
    worst: dict[str, float] = {}
    for size in sizes:
        made: dict[Any, Inputs] = {}  # by what makes it
        for op, case in ((op, case) for op, cases in _cases().items() for case in cases):
            if case.of not in made:
                made[case.of] = case.of(size, torch.Generator().manual_seed(1))
            for dtype in case.dtypes:
                if on.left < 0:
                    yield {"says": f"{good} of {tries} within bounds; out of time at {op}"}
                    return
                yield (row := tried(op, case, size, made[case.of], dtype, on.device))
                if row["ok"] is None:
                    continue
                tries, good = tries + 1, good + row["ok"]
                worst[dtype] = max(worst.get(dtype, 0.0), row.get("error", 0.0) if not case.step else 0.0)
    said = ", ".join(f"{dtype} {error:.1e}" for dtype, error in worst.items())
    yield {"skipped": CPU_ONLY, "says": f"{good} of {tries} within bounds; worst {said}"}
