"""The document, its formats and the history."""

from __future__ import annotations

import csv
import io
import json
import stat
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from kvcli.bench.compare import verdict
from kvcli.bench.history import history, read, save
from kvcli.commands.bench.output import BenchOutput
from kvcli.errors import BadInput, ExitStatus
from kvcli.render.bench.text import bars, blocks, differences, json_lines, range_words, separated, share_words, trend
from kvcli.render.report import markdown, terminal_lines
from kvcli.render.terminal.terminal import text_width
from kvcli.schemas.bench import BenchDocument, Ratio
from kvcli.schemas.documents import DOCUMENTS, json_schema
from tests.bench_command.sides import Paced, document, measured
from tests.fakes import Machine


def table(document: BenchDocument, width: int) -> list[str]:
    return terminal_lines(blocks(document, width), width)


@pytest.fixture(scope="module")
def found():
    sides = [
        Paced("exact", [20, 20, 21, 22]),
        Paced("ngram", [41, 40, 42, 45], drafts=True),
        Paced("a profile with a long name", [20, 22, 20, 21]),
        Paced("slowed", [9, 10, 9.5, 10], text=[8, 9, 8, *range(8, 40)]),
    ]
    return document(sides, ctx=[64, 2048], workloads=["summary", "code"])


def test_the_document_reads_back_as_itself(found):
    text = json.dumps(found.document())
    assert TypeAdapter(DOCUMENTS["bench"]).validate_json(text) == found
    assert set(found.document()) == set(json_schema("bench")["properties"])


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_table_fits(found, width: int):
    lines = table(found, width)
    assert max(map(text_width, lines)) <= width
    assert sum(line.startswith("profile") for line in lines) == 4
    # losing rows are printed like winning ones
    assert sum(line.startswith("slowed  ") and " 0.4" in line for line in lines) == 4


def test_where_ranges_overlap_no_factor_is_printed(found):
    rows = [line for line in table(found, 200) if line.startswith("a profile with a long name")]
    assert all("≈" in row for row in rows)


@pytest.mark.parametrize(
    ("low", "high", "said"), [(0.681, 0.9991, "0.681–0.999"), (0.9, 1.1, "0.90–1.10"), (1.2, 1.3, "1.20–1.30")]
)
def test_a_range_that_misses_one_is_not_rounded_onto_it(low: float, high: float, said: str):
    ratio = Ratio(samples=[low, high], median=low, low=low, high=high, verdict=verdict(low, high, 2))
    assert range_words(ratio) == said


def test_the_legend_does_not_speak_of_a_range_that_is_none():
    sides = [Paced("exact", [10]), Paced("ngram", [99])]
    assert "one repetition has no range" in " ".join(table(document(sides, reps=1), 200))
    assert "no significant difference" in " ".join(table(document(sides, reps=2), 200))


def test_a_result_of_before_the_command_was_kept_whole_can_be_read(found, tmp_path: Path):
    old = found.document()
    for key in ("named", "current", "device", "dtype", "quant", "allow_pickle", "query_visible", "quality_n"):
        del old["args"][key]
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert read(tmp_path / "old.json").rows == found.rows


def test_a_share_is_never_rounded_up_to_all():
    assert share_words(1.0) == "100 %"
    assert share_words(0.9999) == "99.9 %"


def test_csv_has_a_line_for_each_row(found):
    rows = list(csv.DictReader(io.StringIO(separated(found))))
    assert [row["profile"] for row in rows] == [row.profile for row in found.rows]
    assert [float(row["tok_s"]) for row in rows] == pytest.approx([row.median.tok_s for row in found.rows])
    assert {row["verdict"] for row in rows} == {"", "faster", "≈", "slower"}


def test_lines_of_json_stand_alone(found):
    lines = json_lines(found).splitlines()
    assert len(lines) == len(found.rows)
    for line, row in zip(lines, found.rows, strict=True):
        alone = TypeAdapter(DOCUMENTS["bench_row"]).validate_json(line)
        assert (alone.profile, alone.model, alone.samples) == (row.profile, "demo", row.samples)


def test_markdown_tables_are_square(found):
    lines = [line for line in markdown(blocks(found)).splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {10}


def test_saved_results_come_back_in_order_and_private(found, tmp_path: Path):
    folder, notes = tmp_path / "bench", list[str]()
    paths = [save(folder, found), save(folder, found)]
    assert len(set(paths)) == 2
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in paths)
    assert read(paths[0]) == found
    (folder / "broken.json").write_text("{")
    past = history(folder, "demo", [2048], ["code"], notes.append)
    assert [e.profile for e in past.entries] == [r.profile for r in found.rows[:4]] * 2
    assert {(e.ctx, e.workload) for e in past.entries} == {(2048, "code")}
    assert len(notes) == 1
    assert "broken.json" in notes[0]
    assert history(folder, "other", [], [], notes.append).entries == []
    assert len(trend(past)) == 4


def test_a_file_that_is_no_result_is_refused(tmp_path: Path):
    with pytest.raises(BadInput, match="cannot read"):
        read(tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"schema": "kvcli.turn/2"}')
    with pytest.raises(BadInput) as found:
        read(tmp_path / "other.json")
    assert found.value.code == "bad_result"


def test_bars_start_at_nothing_so_that_a_small_change_looks_small():
    assert bars([100, 99, 101]) == "███"
    assert bars([100, 50]) == "█▅"
    assert bars([]) == ""


@pytest.mark.parametrize(
    ("promise", "setup", "said"),
    [
        ("exact", {}, "not explained by rounding"),
        (None, {}, "not explained by rounding"),  # another program, which drops nothing
        ("approx", {}, "expected, because base is approx, not exact"),
        (None, {"exactness": "approx"}, "expected, because base is approx, not exact"),  # a press
    ],
)
def test_an_exact_profile_is_not_blamed_for_a_lossy_baseline(promise: str | None, setup: dict[str, str], said: str):
    made = document([Paced("base", [20]), Paced("mine", [20], text=[8, 9, 7, *range(8, 40)])])
    base, mine = made.rows
    tie = {"near_tie": False, "margin": 1.0, "bound": 0.1}
    assert mine.same is not None
    rows = [
        base.model_copy(update={"exactness": promise, "setup": setup}),
        mine.model_copy(update={"same": mine.same.model_copy(update=tie)}),
    ]
    (line,) = differences(made.model_copy(update={"rows": rows}))
    assert said in line
    (line,) = differences(made.model_copy(update={"rows": [base, rows[1].model_copy(update={"exactness": "approx"})]}))
    assert "approx: text may differ" in line
    near = {"near_tie": True, "margin": 0.05, "bound": 0.1}
    for promise, says in (
        ("exact", "explained by rounding"),
        ("approx", "approx: text may"),
        ("certified", "certified: text may"),
    ):
        mine = rows[1].model_copy(update={"exactness": promise, "same": rows[1].same.model_copy(update=near)})
        (line,) = differences(made.model_copy(update={"rows": [base, mine]}))
        assert says in line
        assert ("explained by rounding" in line) == (promise == "exact")


def test_what_each_side_runs_is_said_where_it_differs():
    def sides(theirs: str) -> list[Paced]:
        packed, other = {"weights": "torch packed int4"}, {"weights": theirs}
        return [Paced("exact", [20], setup=packed), Paced("ngram", [20], setup=packed), Paced("hf", [20], setup=other)]

    said = "weights: exact, ngram: torch packed int4; hf: bfloat16"
    differs = document(sides("bfloat16"), workloads=["article", "code"])
    assert table(differs, 200).count(said) == 1
    assert f"- {said}\n" in markdown(blocks(differs))
    assert not any("weights" in line for line in table(document(sides("torch packed int4")), 200))


def test_a_full_disk_does_not_cost_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    world = Machine(tmp_path).world()
    monkeypatch.setattr("kvcli.bench.history.save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    out = BenchOutput(world, "table", tmp_path / "full.json", "json", save=True)
    with pytest.raises(BadInput, match=r"full\.json: No space left"):
        out.finish(measured([Paced("exact", [20]), Paced("ngram", [40])]), ExitStatus.OK)
    assert "ngram" in world.stdout.stream.text  # type: ignore[attr-defined]
