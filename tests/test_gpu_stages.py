"""The command for a GPU machine, tried on a CPU: every stage in its tiny form, and what breaks one breaks no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcli.engine.cuda_graphs.captured_passes import CapturedPasses
from kvcli.engine.engine import run_to_end
from kvcli.kv.capacity import CacheFootprint
from kvcli.kv.slots import AttentionParams, alike
from kvcli.settings.profile import Profile
from tests.bench.waits import opened
from tests.fake_graphs import FakeGraphs
from tests.gpu import __main__ as command
from tests.gpu import clock, environment, sanitizer, tables
from tests.gpu.__main__ import SHARES, STAGES, main, turns
from tests.gpu.stage import On, Row, stage_of

if sys.platform == "linux":  # before a test imports triton: what is interpreted is decided there
    import tests.kernels.interpreted  # noqa: F401

ROOT = Path(__file__).parents[1]
HELPERS = {
    "tables",
    "__main__",
    "call",
    "ceilings_kernels",
    "compiled_before",
    "clock",
    "fused",
    "models",
    "ops",
    "stage",
    "static_loop",
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def found(name: str) -> list[Row]:
    rows = list(stage_of(name).run(On("cpu", 120)))
    assert rows[-1]["says"]
    assert [row for row in rows if "fault" in row or row.get("faults")] == []
    assert json.loads(json.dumps(rows, default=str))
    return rows


def test_every_stage_has_a_file_and_a_share() -> None:
    files = {path.stem for path in (ROOT / "tests" / "gpu").glob("*.py")}
    assert files - HELPERS == set(STAGES) == set(SHARES)
    assert sum(SHARES.values()) == 520


def test_what_is_timed_shares_a_process_and_what_counts_runs_side_by_side() -> None:
    names = ["environment", "bits", "ceilings", "exact", "memory", "steps"]
    assert turns(names, False) == [[["environment"]], [["bits"]], [["ceilings", "steps"]], [["exact"]], [["memory"]]]
    assert turns(names, True) == [[["environment"]], [["bits"], ["exact"]], [["ceilings", "steps"]], [["memory"]]]


def test_environment_says_what_can_be_imported() -> None:
    rows = found("environment")
    packages = {row["name"]: row["found"]["version"] for row in rows if row["what"] == "package"}
    assert packages["torch"] == torch.__version__
    (doctor,) = (row for row in rows if row["what"] == "doctor")
    assert doctor["status"] == 0
    assert doctor["out"].startswith('{"schema": "kvcli.doctor')


def test_every_op_is_held_against_its_reference() -> None:
    rows = found("kernels")
    assert [row for row in rows[:-1] if row["ok"] is False] == []
    ops = {path.parent.name for path in (ROOT / "kernels").glob("*/__init__.py")}
    assert {row["op"] for row in rows[:-1]} | set(rows[-1]["skipped"]) >= ops
    assert {row["dtype"] for row in rows[:-1]} == {"fp32", "bf16", "fp16"}


def test_an_op_that_is_wrong_is_out_of_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.gpu import kernels

    right = kernels.page_bounds
    monkeypatch.setattr(
        kernels,
        "page_bounds",
        lambda q, low, high: right(q, high, low) if q.dtype.itemsize < 8 else right(q, low, high),
    )
    wrong = {row["op"] for row in kernels.run(On("cpu", 120)) if row.get("ok") is False}
    assert wrong == {"page_bounds"}


def test_rows_have_the_same_bits_in_company_and_one_op_has_not() -> None:
    """In the interpreter; what libraries do is counted and no more."""
    *rows, last = found("bits")
    assert last["differ"] == 0 < last["tried"]
    assert {row["kind"] for row in rows} == {"ours", "libraries", "seeded", "stored"}
    assert {row["op"].partition(",")[0] for row in rows if row["kind"] == "ours"} >= {
        "attend_invariant",
        "linear_skinny",
    }
    seeded = [row for row in rows if row["kind"] == "seeded"]
    assert len(seeded) == 2
    assert all(row["differ"] for row in seeded)


def test_memory_is_timed_per_op() -> None:
    assert all(row["us"] > 0 for row in found("bandwidth")[:-1] if "not_here" not in row)


def test_drafted_texts_of_a_larger_shape_are_plain_ones() -> None:
    *rows, last = found("whole")
    assert last["same"] == last["tried"] == 12
    assert rows[-1]["what"] == "logits"
    assert rows[-1]["relative_error"] < 0.1


def test_the_table_is_equal_in_fp32_and_counted_in_bf16() -> None:
    counts = found("exact")[-1]["counts"]
    for kind in ("alone", "side by side"):
        equal, tried, _ = counts[kind]
        assert equal == tried > 0
    assert counts["bf16"][1] > 0


def test_waits_are_counted() -> None:
    assert {row["waits"] for row in found("waits")[:-1]} == {1.0}


def test_the_bundled_model_answers() -> None:
    rows = found("chat")[:-1]
    assert all(row["same"] and row["text"] and row["new"] for row in rows)


def test_quantized_weights_are_near_the_whole_ones_and_smaller() -> None:
    whole, *rows = found("quantized")[:-1]
    assert {row["weights"] for row in rows} == {f"load.quant = int{n}" for n in (8, 4)} | {
        f"kvcli's {n} bits" for n in (8, 4)
    }
    for row in rows:
        assert 0 < row["relative_error"] < 1
        assert row["bytes"] < whole["bytes"]
    by = {row["weights"]: row["relative_error"] for row in rows}
    assert by["kvcli's 8 bits"] == pytest.approx(by["load.quant = int8"], rel=0.2)  # the same codes, another product
    assert by["kvcli's 4 bits"] == pytest.approx(by["load.quant = int4"], rel=0.2)


def test_tiers_are_used_and_change_no_text() -> None:
    every = found("offload")[:-1]
    rows = [row for row in every if "store" in row]
    assert {row["way"] for row in every if "way" in row} == {"by query", "by kernel", "by stream"}
    assert all(row["same"] and row["drafting_changes_nothing"] for row in rows)
    used = {row["store"]: {tier for tier, n in row["slots"].items() if n} for row in rows}
    assert used["host and disk"] == {"cpu", "host", "disk"}
    assert "packed" in used["packed, host"]
    assert "index" in used["sketch of all, host"]


def test_the_bundled_model_is_given_room_for_a_part_of_the_report() -> None:
    """By the plan for a GPU, as none is here; 4,400 tokens of 6 layers, 2 heads of 64."""
    from tests.gpu.offload import BEHIND, CHUNK

    chosen = Profile.load("exact").replace(memory=BEHIND)
    shapes, attention_params = alike(6, 2, 64), [AttentionParams(1.0)] * 6
    tables = chosen.kv, chosen.kv_format.settings, chosen.memory, chosen.sparse.settings
    room = CacheFootprint(*tables, shapes, attention_params, 4, "cuda").capacity(CHUNK, 1 << 36, 1 << 36)
    assert 0 < room.on_device < 2_000
    assert room.in_host > 4_400


def test_a_peak_is_held_against_its_estimate() -> None:
    (row,) = found("memory")[:-1]
    assert row["measured"] > row["kv"] > 0
    assert row["estimate"] >= row["weights"] + row["kv"]


def test_first_calls_are_timed() -> None:
    assert {row["op"]: row["first"] >= 0 <= row["again"] for row in found("compiling")[:-1]} == {
        "rms_norm": True,
        "append_kv": True,
    }


SANITIZERS = {
    "clean": ("========= ERROR SUMMARY: 0 errors", {"errors": 0, "where": []}),
    "racing": (
        "========= Error: Race reported\n=========     at merge_kernel+0x10\n"
        "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)",
        {"errors": 2, "where": ["at merge_kernel+0x10"]},
    ),
    "silent": ("no device", {"fault": "its process ended with 0: no device"}),
}


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a script")
@pytest.mark.parametrize("kind", SANITIZERS)
def test_what_a_sanitizer_says_is_counted(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, want = SANITIZERS[kind]
    (tmp_path / "compute-sanitizer").write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
    (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    path = sanitizer.binary()
    assert path == str(tmp_path / "compute-sanitizer")
    row = sanitizer.checked("memcheck", path, "append_kv", On("cpu", 60), 60)
    assert row == {"op": "append_kv", "tool": "memcheck", **want}


def test_without_a_sanitizer_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "binary", lambda: None)
    assert "not run: no compute-sanitizer on PATH" in found("sanitizer")[-1]["says"]


def test_what_the_host_does_is_told_from_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a wait of the device moves by 1000, and a look at it by 1."""
    now = 0.0

    def tick(by: float = 1.0) -> float:
        nonlocal now
        now += by
        return now

    fetch = FakeGraphs.fetch

    def slow(*args: Any) -> Callable[[], None]:
        wait = fetch(*args)
        return lambda: (wait(), tick(1000))[0]

    monkeypatch.setattr(FakeGraphs, "fetch", slow)
    session = opened("dense", 2)
    session.lm.remembers[CapturedPasses] = CapturedPasses(watched := clock.Watched(FakeGraphs()))
    monkeypatch.setattr(clock.time, "perf_counter", tick)
    took = clock.host_seconds(lambda: run_to_end(session.step()), watched.waited, 3)
    assert len(watched.waited) == 3
    assert all(1000 < each < 1010 for each in watched.waited)
    assert all(0 < each < 100 for each in took)


def test_passes_are_timed_beside_generate() -> None:
    rows = found("steps")[:-1]
    assert [(row["graphs"], row["rows"]) for row in rows if row["what"] == "step"] == [
        (graphs, n) for graphs in ("auto", "off") for n in (1, 8)
    ]
    (beside,) = (row for row in rows if row["what"] == "side by side")
    assert beside["kvcli"]["tokens_s"] > 0 < beside["transformers"]["tokens_s"]


# ---- the command ----

BROKEN = {
    "lacks": "import a_package_that_nobody_has\n",
    "raises": "def run(on):\n    yield {'n': 1}\n    raise ValueError('so it is')\n",
    "dies": "import os\ndef run(on):\n    yield {'n': 1}\n    os._exit(7)\n",
    "hangs": "import time\ndef run(on):\n    yield {'n': 1}\n    time.sleep(600)\n",
    "ends": "def run(on):\n    yield {'n': 1, 'says': f'ran on {on.device}'}\n",
}


@pytest.mark.parametrize("in_one", [True, False])
def test_a_stage_that_breaks_breaks_no_other(
    in_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "TIMED", frozenset(BROKEN if in_one else ()))
    (tmp_path / "tests" / "gpu").mkdir(parents=True)  # beside ours: neither folder is a package of its own
    for name, code in BROKEN.items():
        (tmp_path / "tests" / "gpu" / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(command, "STAGES", tuple(BROKEN))
    monkeypatch.setattr(command, "SHARES", dict.fromkeys(BROKEN, 4) | {"hangs": 1})
    assert main(["--out", str(tmp_path / "out.json"), "--device", "cpu", "--budget", "20"]) == 1
    stages: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())["stages"]
    assert {name: stage["status"] for name, stage in stages.items()} == {
        "lacks": "missing",
        "raises": "failed",
        "dies": "died",
        "hangs": "late",
        "ends": "done",
    }
    assert {name: len(stage["rows"]) for name, stage in stages.items()} == dict.fromkeys(BROKEN, 1) | {"lacks": 0}
    assert "a_package_that_nobody_has" in stages["lacks"]["why"]
    assert "so it is" in stages["raises"]["why"]
    assert "Traceback" in stages["raises"]["said"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(BROKEN)
    assert lines[-1].endswith("ran on cpu")
    kept = "".join(path.read_text() for path in (tmp_path / "out.json.rows").glob("*.jsonl"))
    assert kept.count('"row"') == 4  # as they were found


def test_what_was_found_is_written_after_each_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def stages(names: list[str], *others: Any) -> None:
        file = tmp_path / "out.json"
        for name in names:
            seen.append(list(json.loads(file.read_text())["stages"]) if file.exists() else [])
            others[-1](name, {"status": "done", "why": "", "seconds": 0.0, "rows": []})

    monkeypatch.setattr(command, "run_stages", stages)
    assert main(["--out", str(tmp_path / "out.json"), "--device", "cpu", "--only", "steps,exact,waits"]) == 0
    assert seen == [[], ["steps"], ["steps", "waits"]]
    assert {path.name for path in tmp_path.iterdir()} == {"out.json", "out.json.rows"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stages(names: list[str], device: str, *others: Any) -> None:
        assert names == ["environment"]
        rows = [{"what": "gpu", **environment.gpu(On(device, 60))}]
        others[-1]("environment", {"status": "done", "why": "", "seconds": 0.0, "rows": rows})

    monkeypatch.setattr(command, "run_stages", stages)
    assert main(["--out", str(tmp_path / "out.json"), "--only", "steps"]) == 1
    assert "no GPU here: torch" in capsys.readouterr().out
    assert "sees no CUDA device" in json.loads((tmp_path / "out.json").read_text())["no_gpu"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_of_it_on_a_gpu(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path / "out.json")]) == 0


def test_tables_take_each_stage_from_the_run_in_which_it_got_furthest() -> None:
    rows = [{"op": "bits", "tried": 3, "says": "0 of 3 rows differ"}]
    early, late = ({"stages": {"bits": {"status": "late", "rows": rows[:n]}}} for n in (0, 1))
    stages = tables.stages_of([early, late])
    assert [*tables.checks(stages)] == [{"stage": "bits", "ended": "ran out of time", "found": "0 of 3 rows differ"}]


def test_ceilings_are_read_off() -> None:
    rows = found("ceilings")[:-1]
    assert [row["what"] for row in rows] == ["copy", "plain read", "launch"]
    assert all(row.get("gb_s", 1) > 0 and min(row.get("us", [1])) > 0 for row in rows)


def test_others_are_timed_on_the_same_weights() -> None:
    rows = found("peers")[:-1]
    assert {row["side"] for row in rows} == {
        "transformers bf16",
        "kvcli bf16",
        "kvcli int4",
        "compiled loop int4",
        "compiled loop bf16",
    }


@torch.inference_mode()
def test_the_loop_beside_us_writes_what_transformers_writes() -> None:
    from tests import families
    from tests.bench.decode import theirs
    from tests.gpu.static_loop import Int4, StaticLoop

    model = families.build("llama", torch.float32)
    ids = families.prompt(12, vocab=model.config.vocab_size)
    loop, token, written = StaticLoop(model, 24, is_packed=False), None, []
    for at in range(20):
        token = torch.tensor([[ids[at]]]) if at < len(ids) else token
        token = loop(token, torch.tensor([at]))
        written.append(int(token))
    assert written[11:19] == theirs(model, ids, 9)[2][:8]
    w = torch.randn(64, 256, dtype=torch.bfloat16)
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    assert float((Int4(w)(x) - x @ w.T).norm() / (x @ w.T).norm()) < 0.15


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="there is no compiler for kernels")
def test_kernels_are_compiled_for_a_card_that_is_not_here(tmp_path: Path) -> None:
    code = "import sys, tests.gpu.__main__ as c; from pathlib import Path; c.CACHE = Path(sys.argv.pop(1))\n"
    code += "from tests.gpu.compiled_before import main; main('90', '132', 'rms_norm', 'append_kv')"
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert "0 ops not called" in done.stdout
    assert len(list(tmp_path.rglob("*.cubin"))) >= 2
