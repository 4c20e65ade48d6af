"""Compiles Triton kernels for GPUs that are not here, and reads off the machine code what it takes.

    python -m tests.kernels.compiled FOLDER < JOBS

A job is a line of JSON, `{"variant": Variant, "arch": 86 | "gfx1201"}`; for each a line comes back in their order.
FOLDER keeps what was found by the source, the form and the compiler. That runs in a process of its own, since whether a
kernel is interpreted is decided where it is defined. `python -m tests.kernels.compiled --table` prints all of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.kernels.variants import Variant

ROOT = Path(__file__).resolve().parents[2]
KIB = 1024
# by compute capability: KiB of shared memory of a program and of a processor, threads and programs of a processor
CARDS = {
    75: (64, 64, 1024, 16),
    80: (163, 164, 2048, 32),
    86: (99, 100, 1536, 16),
    89: (99, 100, 1536, 24),
    90: (227, 228, 2048, 32),
    120: (99, 100, 1536, 24),
}


@dataclass(frozen=True)
class Compiled:
    """What one form takes on one architecture; of AMD's only `arch`, `registers`, `stack` and `shared`."""

    arch: int | str
    fault: str = ""  # of the compiler
    registers: int = 0
    stack: int = 0  # bytes; of AMD's, registers that were spilled
    spills: int = 0  # instructions that load or store local memory
    shared: int = 0  # bytes
    programs: int = 0  # of a processor at once
    limit: str = ""  # what bounds them
    layouts: list[str] = field(default_factory=list)  # of matrix products: version, warps, instruction
    matrix: dict[str, int] = field(default_factory=dict)  # matrix instructions of all of it
    step: float = 0.0  # instructions of a warp in a step of the innermost loop; not of Hopper's own products
    loads: dict[str, int] = field(default_factory=dict)  # from memory, in that loop, unrolled as it is
    counts: dict[str, float] = field(default_factory=dict)  # instructions of a step by their names
    sums: list[str] = field(default_factory=list)  # where the numbers of each sum or maximum lie along its axis


def variants() -> dict[str, list[Variant]]:
    """What is listed, by op."""
    files = sorted((ROOT / "tests" / "kernels" / "variants").glob("[!_]*.py"))
    return {file.stem: import_module(f"tests.kernels.variants.{file.stem}").VARIANTS for file in files}


def compiled(jobs: Sequence[tuple[Variant, int | str]], folder: Path) -> list[Compiled]:
    """Each of them, in a process that knows nothing of an interpreter."""
    lines = [json.dumps({"variant": asdict(variant), "arch": arch}) for variant, arch in jobs]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    env["PYTHONPATH"] = f"{ROOT}:{env.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled", str(folder)],
        input="\n".join(lines),
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    # a kernel that does not compile is printed between
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"arch')]


# ---- compiling; here Triton may be imported ----


def _one(job: tuple[str, Path]) -> str:
    """A line for a line; from the folder if nothing has changed."""
    given = json.loads(job[0])
    variant, arch = Variant(**given["variant"]), given["arch"]
    import triton

    module, _, name = variant.kernel.partition(":")
    kernel = getattr(import_module(module), name)
    parts = (kernel.cache_key, job[0], triton.__version__, Path(__file__).read_text(encoding="utf-8"))
    kept = job[1] / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.json"
    if not kept.exists():
        try:
            found = _amd(kernel, variant, arch) if isinstance(arch, str) else _nvidia(kernel, variant, arch)
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            found = Compiled(arch, fault=f"{type(error).__name__}: {lines[-1][:300] if lines else ''}")
        kept.write_text(json.dumps(asdict(found)))
    return kept.read_text()


def _built(kernel: Any, variant: Variant, backend: str, arch: int | str) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as build

    signature = {name: "constexpr" if name in variant.consts else variant.types[name] for name in kernel.arg_names}
    # as at a launch, where nothing is known of what is not to be looked at
    known = [
        p.num
        for p in kernel.params
        if not p.do_not_specialize and (signature[p.name][0] == "*" or p.name in variant.aligned)
    ]
    loose = [
        p.name
        for p in kernel.params
        if p.num not in known and not p.do_not_specialize and signature[p.name] in ("i32", "i64")
    ]
    if loose:
        raise ValueError(f"is compiled anew where {', '.join(loose)} is 1, or a multiple of 16: see do_not_specialize")
    source = ASTSource(kernel, signature, dict(variant.consts), {(i,): [["tt.divisibility", 16]] for i in known})
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": False}
    if backend == "cuda":
        options["maxnreg"] = variant.registers
    return build(source, target=GPUTarget(backend, arch, 32), options=options)


def _amd(kernel: Any, variant: Variant, arch: str) -> Compiled:
    # PTX is NVIDIA's; LLVM ends the process over it
    plain = {name: False if name == "PTX" else value for name, value in variant.consts.items()}
    built = _built(kernel, replace(variant, consts=plain), "hip", arch)
    take = {key: int(n) for key, n in re.findall(r"\.(\w+(?:_count|_size)):\s+(\d+)", built.asm["amdgcn"])}
    spilled = take["vgpr_spill_count"] + take["sgpr_spill_count"]
    return Compiled(arch, registers=take["vgpr_count"], stack=spilled, shared=built.metadata.shared)


def _nvidia(kernel: Any, variant: Variant, arch: int) -> Compiled:
    built = _built(kernel, variant, "cuda", arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        take = dict(re.findall(r"(REG|STACK):(\d+)", _dump("--dump-resource-usage", file.name)))
        code = _instructions(_dump("-sass", file.name))
    names = Counter(_name(words) for _, words in code)
    registers, shared = int(take["REG"]), built.metadata.shared
    fits = _fits(registers, shared, variant.warps, arch)
    body, share = _step(code, built.asm["ttgir"])
    inside = Counter(_name(words) for words in body)
    return Compiled(
        arch,
        registers=registers,
        stack=int(take["STACK"]),
        spills=sum(n for name, n in names.items() if name.startswith(("LDL", "STL"))),
        shared=shared,
        programs=min(fits.values()),
        limit=min(fits, key=lambda what: fits[what]),
        layouts=_layouts(built.asm["ttgir"]),
        matrix={name: n for name, n in names.items() if _is_matrix(name)},
        step=len(body) * share,
        loads={name: n for name, n in inside.items() if _is_load(name)},
        counts={name: round(n * share, 2) for name, n in sorted(inside.items())},
        sums=_sums(built.asm["ttgir"]),
    )


def _dump(what: str, cubin: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, what, cubin], capture_output=True, text=True, check=True).stdout


def _instructions(sass: str) -> list[tuple[int, str]]:
    """Addresses and instructions; without the padding behind the last."""
    code = [(int(at, 16), words.strip()) for at, words in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", sass)]
    return [(at, words) for at, words in code if words != "NOP"]


def _name(words: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", words).split()[0]


def _is_matrix(name: str) -> bool:
    return name.startswith(("HMMA", "HGMMA", "IMMA", "QGMMA", "UTC"))


def _is_load(name: str) -> bool:
    return name.startswith(("LDG.", "LDGSTS."))


def _fits(registers: int, shared: int, warps: int, arch: int) -> dict[str, int]:
    """Programs of a processor by what bounds them: 64 Ki registers, by 8 a thread; 1 KiB of each is not ours."""
    _, most, threads, programs = CARDS[arch]
    return {
        "registers": 65536 // (-(-registers // 8) * 8 * 32 * warps),
        "shared memory": most * KIB // (shared + KIB),
        "threads": threads // (32 * warps),
        "programs": programs,
    }


def _layouts(ttgir: str) -> list[str]:
    """Of matrix products: what decides which numbers an instruction adds up, and in which warp."""
    found = set()
    for words in re.findall(r"#ttg\.nvidia_mma<\{(.*?)\}>", ttgir):
        take = dict(re.findall(r"(\w+) = (\d+|\[[^\]]*\])", words))
        found.add(f"mma {take['versionMajor']}, warps {take['warpsPerCTA']}, instruction {take['instrShape']}")
    return sorted(found)


def _sums(ttgir: str) -> list[str]:
    """Of each reduction over more than two numbers: how its axis is spread over registers, threads and warps."""
    alias = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    found = []
    pattern = r'"tt\.reduce".*?axis = (\d+) : i32.*?\}\) : \(tensor<((?:\d+x)+)\w+, ([^()]*?)>[,)]'
    for axis, shape, layout in re.findall(pattern, ttgir, re.DOTALL):
        i = int(axis)
        if int(shape.split("x")[i]) <= 2:  # the same in any order
            continue
        text = re.sub(r"#\w+\b(?!\.)", lambda name: alias.get(name[0], name[0]), layout)
        lists = re.findall(r"(sizePerThread|threadsPerWarp|warpsPerCTA) = \[([\d, ]+)\]", text)
        is_plain = text.startswith("#ttg.blocked")
        found.append(", ".join(f"{name} {of.split(', ')[i]}" for name, of in lists) if is_plain else f"{i} of {text}")
    return found


def _step(code: list[tuple[int, str]], ttgir: str) -> tuple[list[str], float]:
    """The innermost loop that works most, and what share of it a step is: ptxas unrolls loops.

    Without a loop that holds a product, or where there are none a load, it is all of the kernel.
    """
    place = {at: i for i, (at, _) in enumerate(code)}
    loops = []
    for i, (at, words) in enumerate(code):
        to = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", words)
        if to and (start := place.get(int(to[1], 16), i + 1)) <= i and int(to[1], 16) < at:
            loops.append((start, i + 1))
    inner = [(a, b) for a, b in loops if not any((a, b) != (c, d) and a <= c and d <= b for c, d in loops)]
    bodies = [[words for _, words in code[a:b]] for a, b in inner] or [[words for _, words in code]]
    products = [sum(_is_matrix(_name(words)) for words in body) for body in bodies]
    if not any(products):
        loads = [sum(_is_load(_name(words)) for words in body) for body in bodies]
        at = loads.index(max(loads))
        return (bodies[at] if loads[at] else [words for _, words in code]), 1.0
    # a loop over whole tiles and one over those with edges have the same products: the one with less beside them
    body, n = max(zip(bodies, products, strict=True), key=lambda each: each[1] / len(each[0]))
    return body, _products_of_a_step(ttgir) / n


def _products_of_a_step(ttgir: str) -> float:
    """Matrix instructions (m16n8k16) of a warp in one turn of the loop that has most of them, as Triton wrote it."""
    warps = int(re.findall(r'"ttg\.num-warps" = (\d+)', ttgir)[0])
    turns: Counter[int] = Counter()  # by the loop: the indentation and number of the last one that began
    open_loops: list[tuple[int, int]] = []
    for at, line in enumerate(ttgir.splitlines()):
        depth = len(line) - len(line.lstrip())
        while open_loops and depth <= open_loops[-1][0]:
            open_loops.pop()
        if "scf.for" in line or "scf.while" in line:
            open_loops.append((depth, at))
        dot = re.search(r"tt\.dot\b.*tensor<(?:(\d+)x)?(\d+)x(\d+)x\w+,.*\* tensor<(?:\d+x)?\d+x(\d+)x", line)
        if dot:
            batch, m, k, n = (int(size or 1) for size in dot.groups())
            turns[open_loops[-1][1] if open_loops else -1] += batch * max(1, m // 16) * max(1, n // 8) * (k // 16)
    return max(turns.values(), default=warps) / warps


def _all(folder: Path, lines: list[str]) -> list[str]:
    import fcntl  # there is none on Windows, where nothing is compiled but modules are imported

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock, tempfile.TemporaryDirectory() as own:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several test runners one compiles, the others find it done
        os.environ["TRITON_CACHE_DIR"] = own
        with ProcessPoolExecutor(min(2, len(lines) or 1), mp_context=get_context("fork")) as pool:
            return list(pool.map(_one, [(line, folder) for line in lines]))


def _table(folder: Path) -> None:
    from tests.kernels.bounds import faults

    jobs = [(op, variant, arch) for op, of in variants().items() for variant in of for arch in variant.archs]
    for (op, variant, arch), found in zip(jobs, compiled([job[1:] for job in jobs], folder), strict=True):
        said = "; ".join(faults(variant, found)) or "ok"
        print(
            f"{op:15} {variant.name:28} sm{arch:<4} {found.registers:3} registers {found.shared:6,} B shared "
            f"{found.programs} ({found.limit}) {found.step:6.0f} a step  {said}"
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        _table(ROOT / ".pytest_cache" / "d" / "compiled")
    else:
        print("\n".join(_all(Path(sys.argv[1]), sys.stdin.read().splitlines())))
