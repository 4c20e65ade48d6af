"""Triton kernels compiled for GPUs that are not here: what they take there, and that all forms of an op add up alike.

What only machine code shows: spilled registers, narrow loads, shared memory that a card lacks, another matrix
instruction for more rows. It does not show that a kernel is right, which is the interpreter's to tell, nor how fast.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench import gpu_model
from tests.kernels.bounds import faults, other_sums, parted
from tests.kernels.compiled import ROOT, Compiled, compiled, variants
from tests.kernels.variants import Variant

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")

AMD = "gfx1201"
TOLD = "enable_fp_fusion"
OPS = variants()
Found = dict[tuple[str, str], Compiled]  # by architecture and name of the form


def _made(request: pytest.FixtureRequest, jobs: list[tuple[Variant, int | str]]) -> Found:
    made = compiled(jobs, Path(request.config.cache.mkdir("compiled")))
    return {(str(arch), one.name): found for (one, arch), found in zip(jobs, made, strict=True)}


def _often(of: list[Variant]) -> list[tuple[Variant, int | str]]:
    """What each run compiles, as far as a minute goes. On 86, for which budgets are: one form of each code, and the
    first two that have products, for 16 and 32 rows. On 90 and 120: the first that has products. `slow` compiles the
    other sizes, and what 80 and 89 have more or less of."""
    codes = list({_code(one): one for one in reversed(of)}.values())  # the first of each
    products = [one for one in of if one.products]
    jobs: list[tuple[Variant, int | str]] = [(one, 86) for one in of if one in codes or one in products[:2]]
    jobs += [(one, arch) for one in products[:1] for arch in (90, 120)]
    return [(one, arch) for one, arch in jobs if arch in one.archs]


def _code(one: Variant) -> str:
    """What decides which lines of a kernel are compiled: switches and types, and no size."""
    switches = {name: value for name, value in one.consts.items() if not isinstance(value, int) or value <= 2}
    return f"{one.kernel} {one.types} {switches}"


@pytest.fixture(scope="module")
def often(request: pytest.FixtureRequest) -> dict[str, Found]:
    """By op; all compiled at once."""
    jobs = [(op, *job) for op, of in OPS.items() for job in _often(of)]
    made = compiled([job[1:] for job in jobs], Path(request.config.cache.mkdir("compiled")))
    found: dict[str, Found] = {op: {} for op in OPS}
    for (op, one, arch), each in zip(jobs, made, strict=True):
        found[op][str(arch), one.name] = each
    return found


def _held(op: str, found: Found) -> None:
    by_name = {one.name: one for one in OPS[op]}
    said = [f"{name} on sm{arch} {why}" for (arch, name), one in found.items() for why in faults(by_name[name], one)]
    assert not said, "\n".join([op, *said])
    for arch in {arch for arch, _ in found}:
        exact = [one for (at, name), one in found.items() if at == arch and by_name[name].products]
        assert parted(exact) == [], f"forms of {op} on sm{arch} add up in different orders"
        assert other_sums([(by_name[name], one) for (at, name), one in found.items() if at == arch]) == []


@pytest.mark.parametrize("op", OPS)
def test_an_op_keeps_its_bounds(op: str, often: dict[str, Found]) -> None:
    _held(op, often[op])


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_an_op_keeps_its_bounds_on_all_cards(op: str, request: pytest.FixtureRequest) -> None:
    _held(op, _made(request, [(one, arch) for one in OPS[op] for arch in one.archs]))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_what_amd_compiles_is_known(op: str, request: pytest.FixtureRequest) -> None:
    """The kernels are not used there; what would have to be mended first is told as the reason of a skip."""
    found = _made(request, [(one, AMD) for one in OPS[op]])
    if said := [f"{name} {why}" for (_, name), one in found.items() for why in faults(OPS[op][0], one)]:
        pytest.skip(f"{op} for {AMD}: {'; '.join(said)}")


# ---- nothing is left out ----


def _launches(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Each launch of a Triton kernel in a file, by the kernel's name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    jitted = {
        f.name
        for f in ast.walk(tree)
        if isinstance(f, ast.FunctionDef) and "jit" in str(list(map(ast.unparse, f.decorator_list)))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            name = ast.unparse(node.func.value)
            if name in jitted:
                yield name, node


FUSED = sorted((ROOT / "kernels").glob("*/fused.py"))


@pytest.mark.parametrize("path", FUSED, ids=lambda path: path.parent.name)
def test_every_kernel_is_compiled(path: Path) -> None:
    listed = {one.kernel for one in OPS.get(path.parent.name, [])}
    assert {f"kvcli.kernels.{path.parent.name}.fused:{name}" for name, _ in _launches(path)} - listed == set()


def test_the_model_of_time_asks_for_forms_that_are_listed() -> None:
    assert {one.products for _, one in gpu_model.wanted()} == {True}


@pytest.mark.parametrize("path", FUSED, ids=lambda path: path.parent.name)
def test_no_launch_leaves_the_contraction_of_sums_to_the_compiler(path: Path) -> None:
    """Releases of Triton differ in what they contract when not told, and so would texts."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = [
        ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign) and TOLD in ast.unparse(node)
    ]
    telling = [TOLD, *(f"**{name}" for name in named)]
    loose = [
        f"{name}, line {call.lineno}"
        for name, call in _launches(path)
        if not any(t in ast.unparse(call) for t in telling)
    ]
    assert loose == []


# ---- that the bounds catch what they are for ----


@pytest.fixture(scope="module")
def spoiled(request: pytest.FixtureRequest) -> Found:
    pytest.importorskip("triton")
    from tests.kernels import spoiled as of

    forms = (of.SOUND, of.NARROW, of.SPILLING, of.GREEDY, of.TALL, of.TALLER, of.LOOKING, *of.SUMS)
    return _made(request, [(one, arch) for one in forms for arch in one.archs])


def test_a_sound_form_passes(spoiled: Found) -> None:
    from tests.kernels.spoiled import SOUND

    for arch in ("86", "90"):
        assert faults(SOUND, spoiled[arch, "sound"]) == []
    assert spoiled["86", "sound"].layouts == ["mma 2, warps [1, 4], instruction [16, 8]"]


def test_spills_narrow_loads_and_too_much_shared_memory_are_caught(spoiled: Found) -> None:
    from tests.kernels.spoiled import GREEDY, NARROW, SOUND, SPILLING

    assert "spills" in faults(SPILLING, spoiled["86", SPILLING.name])[0]
    found = spoiled["86", "sound"]
    assert faults(SOUND, replace(found, stack=8)) == []  # one value, outside the loop
    assert "spills" in faults(SOUND, replace(found, stack=16))[0]
    assert "spills" in faults(SOUND, replace(found, stack=8, counts={**found.counts, "LDL": 0.5}))[0]
    assert any("pieces of 1 and 2 bytes" in said for said in faults(NARROW, spoiled["86", "narrow"]))
    assert any("shared memory, a program has" in said for said in faults(GREEDY, spoiled["86", GREEDY.name]))


def test_a_kernel_that_takes_another_form_by_a_number_is_caught(spoiled: Found) -> None:
    """One row would run what nobody compiled, and might add up in another order."""
    from tests.kernels.spoiled import LOOKING

    assert "compiled anew where n is 1" in faults(LOOKING, spoiled["86", LOOKING.name])[0]


def test_a_step_over_its_budget_is_caught(spoiled: Found) -> None:
    from tests.kernels.spoiled import SOUND

    found = spoiled["86", "sound"]
    assert faults(replace(SOUND, budget=int(found.step)), found) == []
    assert "its budget is" in faults(replace(SOUND, budget=int(found.step / 1.2)), found)[0]


def test_another_instruction_for_more_rows_is_caught(spoiled: Found) -> None:
    from tests.kernels.spoiled import TALL, TALLER

    sound, tall, taller = (spoiled["90", name] for name in ("sound", TALL.name, TALLER.name))
    assert parted([sound, tall]) == []
    assert any("mma 3" in layout for layout in parted([sound, taller]))


def test_operands_through_shared_memory_are_caught(spoiled: Found) -> None:
    from tests.kernels.spoiled import SOUND

    assert "through shared memory" in faults(replace(SOUND, straight=True), spoiled["86", "sound"])[0]


def test_a_sum_whose_order_follows_the_number_of_rows_is_caught(spoiled: Found) -> None:
    """The compiler gives an axis fewer threads where the other one is longer."""
    from tests.kernels.spoiled import SUMS

    few, many, *pairs = [(one, spoiled["86", one.name]) for one in SUMS]
    assert "threadsPerWarp" in other_sums([few, many])[0]
    assert other_sums(pairs) == []
    assert len(few[1].sums) == 1


def test_turing_gets_no_matrix_instruction(request: pytest.FixtureRequest) -> None:
    """Why cards below compute capability 8.0 are refused. When this fails they may be looked at again."""
    from tests.kernels.spoiled import SOUND

    small = replace(SOUND, consts=dict(SOUND.consts) | {"BI": 32, "BO": 32})
    (found,) = _made(request, [(small, 75)]).values()
    assert not found.fault
    assert found.matrix == {}
