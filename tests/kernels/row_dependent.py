"""Fused kernels that look at the rows of a pass, each a line away from one of ours: what a bit test has to catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory


@dataclass(frozen=True)
class Change:
    """Of one line of `kernels/<of>/fused.py`."""

    of: str
    line: str
    other: str


# a scale for all rows of a program in place of one for each
SHARED = Change("attend_invariant", "tl.maximum(top, tl.max(score, 1))", "tl.maximum(top, tl.max(tl.max(score, 1), 0))")
ROUNDED = "{0}.to(tl.bfloat16).to(tl.float32)"  # what is added up, of several rows

CHANGES = {
    # a position by the place among the accepted rows, as if these were the first ones of the pass
    "append_kv": Change("append_kv", "tl.load(p_row_pos + row,", "tl.load(p_row_pos + i,"),
    # noise by the place in the pass
    "argmax": Change("argmax", "_splitmix(tl.load(p_seed + row)) ^ tl.load(p_pos + row)", "_splitmix(row)"),
    # as far as the furthest of a program
    "attend": Change(
        "attend_invariant",
        "tl.load(p_upto + n, mask=mine, other=0) - 1",
        "tl.max(tl.load(p_upto + n, mask=mine, other=0), 0) - 1",
    ),
    "attend_captured": SHARED,
    # keys rounded where there are several rows
    "gated_delta": Change(
        "gated_delta",
        "b_v -= tl.sum(b_s * b_k[:, None], 0)",
        f"b_v -= tl.sum(b_s * tl.where(n > 1, {ROUNDED.format('b_k')}, b_k)[:, None], 0)",
    ),
    "attend_quantized": Change(
        "attend_quantized", "tl.maximum(base, tl.max(score, 1) - ABOVE)", "tl.maximum(base, tl.max(score) - ABOVE)"
    ),
    "attend_invariant": SHARED,
    # fewer products where there are several rows
    "quantized_key_scores": Change(
        "quantized_key_scores",
        "left = x.to(tl.float32) - most.to(tl.float32)",
        "left = tl.where(n_rows > 1, 0.0, x.to(tl.float32) - most.to(tl.float32))",
    ),
    "attention_mass": Change(
        "attention_mass",
        "tl.sum(tl.exp2(score - safe[:, None]), 1)",
        f"tl.where(w > 1, tl.sum({ROUNDED.format('tl.exp2(score - safe[:, None])')}, 1),"
        " tl.sum(tl.exp2(score - safe[:, None]), 1))",
    ),
    "linear_skinny": Change(
        "linear_skinny",
        "b_sum = tl.dot(b_w, b_x, b_sum)",
        f"b_sum = tl.dot(b_w, b_x, tl.where(M > 1, {ROUNDED.format('b_sum')}, b_sum))",
    ),
    # norms of heads by sums of what is rounded, of several rows
    "linear_epilogue": Change(
        "linear_epilogue",
        "_summed(b_x * b_x) / D",
        f"tl.where(M > 1, _summed({ROUNDED.format('(b_x * b_x)')}), _summed(b_x * b_x)) / D",
    ),
    # rounded sums where an expert has several rows
    "moe_linear": Change(
        "moe_linear",
        "b_y = tl.dot(b_x, b_w, b_y)",
        f"b_y = tl.dot(b_x, b_w, tl.where(last - first > 1, {ROUNDED.format('b_y')}, b_y))",
    ),
    # weights of parts relative to something else
    "merge_attention": Change(
        "merge_attention", "tl.maximum(top, tl.max(lse, 0))", "tl.maximum(top, tl.max(lse, 0)) + (n_rows > 1)"
    ),
    # numbers by the largest of a program
    "quantize_kv": Change(
        "quantize_kv",
        "most = x.to(tl.bfloat16)\n        y = tl.dot(most, sign, y)",
        "most = x.to(tl.bfloat16)\n"
        "        top = tl.max(tl.max(tl.abs(x.to(tl.float32)), 1), 0)\n"
        "        y = tl.dot((x.to(tl.float32) / top).to(tl.bfloat16), sign, y / top) * top",
    ),
    # a sum in two pieces
    "page_bounds": Change(
        "page_bounds",
        "tl.sum(tl.maximum(q * low, q * high), 1)",
        "tl.where(n_rows > 1, _in_two(tl.maximum(q * low, q * high)), tl.sum(tl.maximum(q * low, q * high), 1))",
    ),
    "rms_norm": Change(
        "rms_norm",
        "tl.sum(b_x * b_x, 0)",
        "tl.where(tl.num_programs(0) > 1, tl.sum(_in_two((b_x * b_x)[None, :]), 0), tl.sum(b_x * b_x, 0))",
    ),
    # angles as if positions followed upon one another
    "rope": Change("rope", "tl.load(p_pos + row, mask", "i_slot + tl.load(p_pos + row - i_slot, mask"),
}
IN_TWO = '''

@triton.jit
def _in_two(x):
    """[N, X] -> [N]: every other number, and the rest."""
    return tl.sum(tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 1), 1)
'''


@contextmanager
def looking_at_rows(op: str) -> Iterator[None]:
    """Have the kernels of an op be those that it must not have; after `tests.kernels.interpreted`, where that runs."""
    change = CHANGES[op]
    fused = import_module(f"kvcli.kernels.{change.of}.fused")
    assert fused.__file__ is not None
    text = Path(fused.__file__).read_text(encoding="utf-8")
    assert text.count(change.line) == 1, f"kernels/{change.of}/fused.py has changed: what would a wrong one be now?"
    ours = {name: kernel for name, kernel in vars(fused).items() if name.endswith("_kernel")}
    with TemporaryDirectory() as folder:  # Triton reads the source of what it runs
        file = Path(folder) / f"{op}.py"
        file.write_text(text.replace(change.line, change.other) + IN_TWO, encoding="utf-8")
        spec = spec_from_file_location(f"row_dependent_{op}", file)
        assert spec is not None
        assert spec.loader is not None
        theirs = module_from_spec(spec)
        spec.loader.exec_module(theirs)
        try:
            for name in ours:
                setattr(fused, name, getattr(theirs, name))
            yield
        finally:
            for name, kernel in ours.items():
                setattr(fused, name, kernel)
