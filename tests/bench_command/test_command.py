"""`kvcli bench` as it is typed: what is refused before anything is loaded, and one run on the demo model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter

import kvcli
from kvcli.bench.profile_side import ProfileSide, plain
from kvcli.bench.side_factory import drawing
from kvcli.bench.text_agreement import tie_at
from kvcli.demo import weights_dir
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.errors import ExitStatus
from kvcli.kernels import native
from kvcli.schemas.documents import DOCUMENTS
from kvcli.settings.profile import Profile
from tests.fakes import Machine

pytestmark = pytest.mark.skipif(
    not (weights_dir() / "model.safetensors").exists(), reason="the demo model is not in this checkout"
)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("args", "code", "status"),
    [
        (["--ctx", "16k"], "context_overflow", ExitStatus.CONTEXT_OVERFLOW),
        (["--ctx", "100"], "usage", ExitStatus.USAGE),
        (["--ctx", "many"], "usage", ExitStatus.USAGE),
        (["--reps", "0"], "usage", ExitStatus.USAGE),
        (["--workload", "sumary"], "usage", ExitStatus.USAGE),
        (["--workload", "none.txt"], "file_missing", ExitStatus.BAD_INPUT),
        (["--baseline", "hff"], "usage", ExitStatus.USAGE),
        (["--baseline", "none.json"], "file_unreadable", ExitStatus.BAD_INPUT),
        (["--baseline", "hf", "--batch", "2"], "usage", ExitStatus.USAGE),
        (["--batch", "0"], "usage", ExitStatus.USAGE),
        (["--baseline", "hf", "--baseline", "old.json"], "usage", ExitStatus.USAGE),
        (["--profiles", "nope"], "bad_config", ExitStatus.BAD_CONFIG),
        (["--profiles", ","], "usage", ExitStatus.USAGE),
        (["--vary", "spec.mx=1"], "usage", ExitStatus.USAGE),
        (["--vary", "spec.max=x"], "bad_config", ExitStatus.BAD_CONFIG),
        (["--vary", "sample.temperature=0,0.8"], "usage", ExitStatus.USAGE),
        (["--set", "sample.top_p=0.9"], "usage", ExitStatus.USAGE),
        (["--set", "sample.temperature=-1"], "bad_config", ExitStatus.BAD_CONFIG),
        (["--fail-if", "tok<1"], "usage", ExitStatus.USAGE),
        (["--quality", "nonsense"], "unknown_task", ExitStatus.USAGE),
        (["--quality-n", "2"], "usage", ExitStatus.USAGE),
        (["--quality", "all", "--quality-n", "-1"], "usage", ExitStatus.USAGE),
        (["--quality", "nonsense", "--dry-run"], "unknown_task", ExitStatus.USAGE),
        (["--quality-n", "2", "--dry-run"], "usage", ExitStatus.USAGE),
        (["--history", "--profiles", "exact"], "usage", ExitStatus.USAGE),
        (["--history", "-o", "x.json"], "usage", ExitStatus.USAGE),
        (["--calibrate", "--dry-run"], "usage", ExitStatus.USAGE),
        (["--calibrate", "--reps", "5"], "usage", ExitStatus.USAGE),
        (["--baseline", "hf:SnapKV"], "usage", ExitStatus.USAGE),
        (["--baseline", "kvpress"], "usage", ExitStatus.USAGE),
        (["-o", "none/x.json"], "file_unwritable", ExitStatus.BAD_INPUT),
        (["-o", "x.what"], "usage", ExitStatus.USAGE),
    ],
)
def test_refused_with_a_code(machine: Machine, args: list[str], code: str, status: ExitStatus):
    result = machine("bench", "demo", "--json", *args)
    assert result.exit == status
    assert json.loads(result.out)["code"] == code


def test_a_dry_run_names_every_side(machine: Machine):
    result = machine("bench", "--dry-run", "--json", "--baseline", "hf", "--vary", "spec.max=2,4", "--ctx", "1k,2k")
    assert result.exit == 0, result.err
    plan = TypeAdapter(DOCUMENTS["bench_plan"]).validate_json(result.out)
    assert [side.name for side in plan.sides] == ["hf", "exact", "ngram max=2", "ngram max=4"]
    assert plan.baseline == "hf"
    assert plan.runs == 4 * 2 * (5 + 1)
    assert "demo" in machine("bench", "--dry-run").out


def test_what_was_typed_can_be_typed_again(machine: Machine):
    typed = "--profiles ngram,ngram --vary spec.max=2 --dtype fp32 --quality vt --quality-n 2"
    args = json.loads(machine("bench", "--dry-run", "--json", *typed.split()).out)["args"]
    assert args["profiles"] == ["ngram max=2", "ngram max=2 #2"]
    assert (args["named"], args["dtype"], args["quality_n"]) == (["ngram", "ngram"], "fp32", 2)


def test_nothing_is_left_where_nothing_was_measured(machine: Machine):
    assert machine("bench", "--dry-run", "-o", "new.json").exit == 0
    (machine.folder / "old.json").write_text("{}")
    assert machine("bench", "--dry-run", "-o", "old.json").exit == 0
    assert not (machine.folder / "new.json").exists()
    assert (machine.folder / "old.json").read_text() == "{}"


def test_a_folder_that_cannot_keep_results_is_said_before_measuring(machine: Machine):
    data = machine.folder / "home" / "data"
    data.mkdir(parents=True)
    (data / "bench").write_text("in the way")
    result = machine("bench", "--save", "--dry-run", "--json")
    assert (result.exit, json.loads(result.out)["code"]) == (ExitStatus.BAD_INPUT, "file_unwritable")


def test_vary_leaves_alone_what_lacks_the_key_and_says_so(machine: Machine):
    result = machine("bench", "--dry-run", "--json", "--profiles", "exact,ngram", "--vary", "spec.max=2,4")
    plan = json.loads(result.out)
    assert [side["name"] for side in plan["sides"]] == ["exact", "ngram max=2", "ngram max=4"]
    assert plan["notes"] == ["profile exact has no key spec.max, so it is not varied"]


def test_a_history_of_nothing_says_how_to_begin(machine: Machine):
    result = machine("bench", "--history")
    assert (result.exit, result.out) == (0, "")
    assert "--save" in result.err


def test_at_a_temperature_profiles_write_one_text_and_others_are_not_asked(machine: Machine):
    args = ["--ctx", "256", "-n", "24", "--reps", "2", "--dtype", "fp32", "--no-memory", "--json"]
    sides = ["--profiles", "exact,ngram", "--baseline", "exact", "--baseline", "hf", "--baseline", "hf-lookup"]
    warm = machine("bench", "demo", *args, *sides, "--set", "sample.temperature=2", "-o", "warm.json")
    assert warm.exit == 0, warm.err
    document = TypeAdapter(DOCUMENTS["bench"]).validate_json(warm.out)
    assert document.args.temperature == 2
    rows = {row.profile: row for row in document.rows}
    assert {name: row.same and row.same.share for name, row in rows.items()} == {
        "exact": None, "ngram": 1.0, "hf": None, "hf-lookup": None
    }  # fmt: skip
    assert all(row.steady for row in document.rows)
    assert rows["ngram"].ids == rows["exact"].ids
    assert [note for note in document.notes if note.startswith("hf, hf-lookup: random numbers differ")]
    later = ["--profiles", "ngram", "--baseline", "warm.json"]
    again = json.loads(machine("bench", "demo", *args, *later, "--set", "sample.temperature=2").out)
    assert again["rows"][0]["same"]["share"] == 1.0
    cold = json.loads(machine("bench", "demo", *args, *later).out)
    assert cold["rows"][0]["same"] is None
    assert cold["rows"][0]["ids"] != rows["ngram"].ids
    assert [note for note in cold["notes"] if "temperature 2, not 0" in note]


def test_texts_side_by_side_are_timed_together_and_written_as_alone(machine: Machine):
    args = [
        "--ctx",
        "64",
        "-n",
        "6",
        "--reps",
        "1",
        "--warmup",
        "0",
        "--no-memory",
        "--json",
        "--profiles",
        "exact,ngram",
    ]
    alone, beside = (json.loads(machine("bench", "demo", *args, "--batch", str(n)).out) for n in (1, 3))
    assert [row["ids"] for row in beside["rows"]] == [row["ids"] for row in alone["rows"]]
    for document, n in ((alone, 1), (beside, 3)):
        for row in document["rows"]:
            assert row["text_tok_s"] == pytest.approx(row["median"]["tok_s"] / n)
    assert beside["rows"][0]["kv_bytes"] == 3 * alone["rows"][0]["kv_bytes"]
    assert beside["args"]["batch"] == 3


def test_a_batch_has_as_many_texts_and_all_of_their_tokens():
    with kvcli.load("demo", plain(Profile.load("exact"))) as model:
        prompt = model.tokenizer.encode("The depot has a well, and the well has water.")
        ticks = iter(range(10_000))
        side = ProfileSide("exact", model, 1, clock=lambda: float(next(ticks)), batch=3)
        sample = side.run(prompt, 5)
    assert (len(sample.ids), sample.prompt, sample.batch) == (5, 3 * len(prompt), 3)
    assert [sample.at.count(moment) for moment in dict.fromkeys(sample.at)] == [3] * 5  # a pass for all
    assert sample.tok_s == pytest.approx(3.0)


def test_a_drawn_token_has_the_highest_sum_of_logit_and_noise():
    profile = plain(drawing(Profile.load("exact").replace(load={"dtype": "fp32"}), 0.8, seed=3))
    with kvcli.load("demo", profile) as model:
        text = model.tokenizer.encode("The depot")
        session = model.new_session()
        run_to_end(session.read(text))
        ids = [i for step in iterate_events(session.stream(12)) for i in step.new]
        margins = [tie_at(model, [*text, *ids[:n]], i, i).margin for n, i in enumerate(ids)]
        greedy = model.with_profile(plain(drawing(model.profile)))
        assert max(margins) < 1e-4
        assert max(tie_at(greedy, [*text, *ids[:n]], i, i).margin for n, i in enumerate(ids)) > 0.1


def test_lossless_profiles_write_one_text_in_fp32(machine: Machine):
    """The real thing, small: two profiles and transformers' generate, saved, then compared with itself."""
    args = ["--ctx", "512", "-n", "24", "--reps", "2", "--dtype", "fp32", "--no-memory", "-w", "summary,random"]
    first = machine("bench", "demo", *args, "--baseline", "hf", "--json", "-o", "first.json", "--save")
    assert first.exit == 0, first.err
    document = TypeAdapter(DOCUMENTS["bench"]).validate_json(first.out)
    assert [row.profile for row in document.rows] == ["hf", "exact", "ngram"] * 2
    assert [row.same.share for row in document.rows if row.same] == [1.0] * 4
    assert all(row.prompt + row.new == row.ctx or row.prompt + row.new > row.ctx - 16 for row in document.rows)
    ngram = document.rows[2].accept
    assert ngram is not None
    assert ngram.accepted_tokens == sum(i * n for i, n in enumerate(ngram.histogram))
    assert ngram.tokens_per_pass * ngram.passes == pytest.approx(2 * 24)
    again = machine("bench", "demo", *args, "--profiles", "ngram", "--baseline", "first.json", "--fail-if", "same<100%")
    assert again.exit == 0, again.err
    beyond = machine("bench", "demo", *args, "--profiles", "ngram", "--baseline", "first.json", "--fail-if", "kv>1KiB")
    assert beyond.exit == ExitStatus.REGRESSION
    assert "kv>1KiB" in beyond.err
    past = machine("bench", "demo", "--history", "--json")
    assert len(json.loads(past.out)["entries"]) == 6


@pytest.mark.parametrize("args", [["--ctx", "512"], ["--calibrate"]])
def test_a_checkout_without_its_kernels_times_nothing(
    machine: Machine, args: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(native, "is_unbuilt", lambda: True)
    result = machine("bench", "demo", "--json", *args)
    assert result.exit == ExitStatus.USAGE
    assert json.loads(result.out)["code"] == "not_built"
