"""The HTML report of a benchmark: whole, safe, self-contained, and drawn to scale."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from statistics import median
from typing import Any

import pytest

from kvcli.render.bench.charts import Point, Span, scatter
from kvcli.render.bench.html import command_of, html
from kvcli.render.bench.text import blocks
from kvcli.render.html import VOID, Markup, number, tag, ticks
from kvcli.render.report import markdown
from kvcli.schemas.bench import BenchDocument

HOSTILE = "</style></title><script>alert(1)</script>\" onload=x '\x1b[31m\u202e& http"


def row(
    profile: str, speeds: Sequence[float], ratio: tuple[float, float, float, str] | None, **more: Any
) -> dict[str, Any]:
    """One side, read at ten× plain decoding it writes."""
    first = [100 / speed for speed in speeds]

    def figures(pick: Callable[[list[float]], float]) -> dict[str, float | None]:
        speed = pick(list(speeds)) if speeds else None
        return {"tok_s": speed, "read_tok_s": speed and 10 * speed, "first_token": pick(first) if first else None}

    of = None
    if ratio is not None:
        of = dict(zip(("median", "low", "high", "verdict"), ratio, strict=True), samples=[ratio[1], ratio[2]])
    return {
        "profile": profile,
        "ctx": 512,
        "workload": "summary",
        "prompt": 480,
        "prompt_hash": "0",
        "new": 32,
        "samples": {"tok_s": list(speeds), "read_tok_s": list(speeds), "first_token": first},
        "median": figures(median),
        "low": figures(min),
        "high": figures(max),
        "mean": figures(median),
        "sd": dict.fromkeys(("tok_s", "read_tok_s", "first_token")),
        "ratio": {"tok_s": of, "read_tok_s": None},
        "accept": None,
        "kv_bytes": 2 * 2**20,
        "peak_bytes": None,
        "same": None,
        "steady": True,
        "exactness": None,
        "setup": {"engine": profile},
        "ids": [],
        "ends": None,
        "error": None,
        **more,
    }


def same(share: float, near_tie: bool | None = None) -> dict[str, Any]:
    first = None if share == 1 else int(32 * share)
    margin = None if near_tie is None else 0.5
    return {"tokens": int(32 * share), "of": 32, "share": share, "first_difference": first, "near_tie": near_tie,
            "margin": margin, "bound": margin}  # fmt: skip


ROWS = [
    row("hf", [20.0, 21.0, 19.0], None),
    row("ngram", [40.0, 42.0, 44.0], (2.1, 2.0, 2.2, "faster"), same=same(1.0)),
    row("slow", [8.0, 10.0, 9.0], (0.45, 0.4, 0.5, "slower"), same=same(0.5, True), kv_bytes=2**20),
    row("even", [20.0, 22.0, 18.0], (1.0, 0.9, 1.1, "≈"), same=same(0.25, False)),
    row("llama.cpp", [], None, error="llama.cpp could not load the weights", kv_bytes=None),
]


def document(rows: Sequence[dict[str, Any]] = tuple(ROWS), **more: Any) -> BenchDocument:
    names = list(dict.fromkeys(r["profile"] for r in rows))
    args = {"model": "demo", "profiles": names, "vary": [], "baselines": ["hf"], "ctx": [512], "new": 32, "reps": 3,
            "warmup": 1, "workloads": ["summary"], "interleave": True, "memory": True, "quality": "off", "seed": 0,
            "set": [], "fail_if": []}  # fmt: skip
    env = {"date": "2026-01-02T03:04:05+00:00", "system": "Linux", "cpu": "A CPU", "gpus": [], "device": "cpu",
           "cores": 2, "threads": 1, "memory_total": 2**33, "versions": {"torch": "2.13"}, "commit": "abc1234",
           "load_before": [0.1, 0.1, 0.1], "load_after": [1.0, 0.5, 0.2], "quiet": True}  # fmt: skip
    model = {"id": "demo", "path": "/m", "revision": None, "family": "llama", "parameters": 5_000_000,
             "dtype": "bfloat16", "quant": "none", "limit": 8192}  # fmt: skip
    whole = {"schema": "kvcli.bench/1", "kvcli": "0.1.0", "model": model, "env": env, "args": args, "complete": True,
             "baseline": "hf", "rows": list(rows), "checks": [], "quality": None, "notes": []}  # fmt: skip
    for key, value in more.items():
        whole[key] = {**whole[key], **value} if isinstance(whole[key], dict) and isinstance(value, dict) else value
    return BenchDocument.model_validate(whole)


class Reader(HTMLParser):
    """Elements in the order they open; fails on one that is closed where another is open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)

    def all(self, tag: str, kind: str = "") -> list[dict[str, str | None]]:
        return [a for name, a in self.elements if name == tag and kind in [*(a.get("class") or "").split(), ""]]


def quality(low: float, high: float) -> dict[str, Any]:
    """One profile against the full cache, on two tasks; the second is its worst."""

    def task(name: str, mean: float, difference: dict[str, float] | None) -> dict[str, Any]:
        return {"task": name, "mean": mean, "contexts": 4, "questions": 8, "difference": difference,
                "by_length": {"512": mean}, "details": {}}  # fmt: skip

    def line(name: str, role: str, tasks: list[dict[str, Any]], difference: dict[str, float] | None) -> dict[str, Any]:
        worst = {"task": "needle_uuid", "score": tasks[1]["mean"], "difference": difference and difference["mean"]}
        return {"profile": name, "role": role, "hash": None, "kept": 0.25, "mean": 0.7, "worst": worst,
                "difference": difference, "mcnemar": None, "by_length": {"512": 0.7}, "tasks": tasks,
                "passkey": [], "turns": []}  # fmt: skip

    full = [task("copy", 0.9, None), task("needle_uuid", 0.9, None)]
    zero, lost = {"mean": 0.0, "low": -0.1, "high": 0.1}, {"mean": (low + high) / 2, "low": low, "high": high}
    args = {"lengths": [512], "n": 4, "tasks": ["copy", "needle_uuid"], "seed": 0, "query_visible": False,
            "haystack": False, "budget": "a quarter"}  # fmt: skip
    rows = [
        line("hf", "full", full, None),
        line("slow", "profile", [task("copy", 0.9, zero), task("needle_uuid", 0.4, lost)], lost),
    ]
    return {"schema": "kvcli.quality/1", "args": args, "complete": True, "contexts": 8, "rows": rows, "agreement": None}


# ---- whole and safe ----


@pytest.mark.parametrize(
    "made",
    [
        document(),
        document([]),
        document([row("hf", [], None, kv_bytes=None)]),
        document([*ROWS, *[r | {"ctx": 2048} for r in ROWS], *[r | {"workload": "code"} for r in ROWS]]),
        document(quality=quality(-0.6, -0.4)),
    ],
    ids=["plain", "empty", "nothing measured", "several blocks", "quality"],
)
def test_elements_close_in_order_and_nothing_is_fetched(made: BenchDocument):
    page = html(made)
    read = Reader(page)
    assert page.startswith("<!doctype html>")
    assert not re.search(r"https?:", page)
    assert not re.search(r"\b(src|href|srcset|data|action)\s*=", page)
    assert "url(" not in page
    assert "@import" not in page
    assert not {"script", "link", "img", "iframe", "object", "use"} & {name for name, _ in read.elements}
    policy = [a["content"] for a in read.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_hostile_names_stay_words():
    hostile = [r | {"profile": HOSTILE, "setup": {HOSTILE: HOSTILE}, "error": HOSTILE} for r in ROWS]
    made = document(
        [r | {"workload": HOSTILE} for r in [*hostile, row("other", [1.0], (1.0, 0.5, 2.0, "≈"))]],
        model={"id": HOSTILE, "family": HOSTILE},
        env={"cpu": HOSTILE, "versions": {HOSTILE: HOSTILE}},
        args={"model": HOSTILE, "set": [HOSTILE]},
        baseline=HOSTILE,
        notes=[HOSTILE],
    )
    page = html(made)
    read = Reader(page)
    clean = {name for name, _ in Reader(html(document())).elements}
    assert {name for name, _ in read.elements} <= clean
    assert not [a for _, a in read.elements if any(key.startswith("on") for key in a)]
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "<script>alert(1)</script>" in read.text


def test_only_markup_goes_through_as_it_is():
    assert tag("p", "<b>", Markup("<i></i>"), title='"<') == '<p title="&quot;&lt;">&lt;b&gt;<i></i></p>'


# ---- true ----


def test_every_row_is_there_the_losing_and_the_failed_ones_too():
    read = Reader(html(document()))
    heads = [a for a in read.all("th") if a.get("scope") == "row"]
    assert len(heads) == 2 * len(ROWS)  # headline, and the block's own table
    assert "▼ 0.45 × (0.40–0.50)" in read.text
    assert "▲ 2.10 × (2.00–2.20)" in read.text
    assert "≈ (0.90–1.10)" in read.text
    assert "llama.cpp could not load the weights" in read.text
    assert "not drawn, because the memory is not known: llama.cpp" in read.text


def test_bars_begin_at_zero_and_are_as_long_as_their_speeds():
    read = Reader(html(document()))
    drawn = read.all("rect", "fill")
    widths = [float((a["width"] or "").rstrip("%")) for a in drawn]
    assert {a["x"] for a in drawn} == {"0.00%"}
    assert [w / widths[0] for w in widths] == pytest.approx([1, 42 / 20, 9 / 20, 1], abs=1e-3)
    assert [a["class"] for a in drawn] == ["fill base", "fill faster", "fill slower", "fill alike"]
    assert len(read.all("circle", "dot")) == sum(len(r["samples"]["tok_s"]) for r in ROWS)


def test_ranges_reach_from_the_lowest_to_the_highest():
    read = Reader(html(document()))
    rect, whole = read.all("rect", "faster")[0], [a for a in read.all("line", "range") if a["x1"] != a["x2"]]
    scale = float((rect["width"] or "").rstrip("%")) / 42.0
    low, high = (float((whole[1][end] or "").rstrip("%")) / scale for end in ("x1", "x2"))
    assert (low, high) == (pytest.approx(40.0, abs=0.05), pytest.approx(44.0, abs=0.05))


def test_marks_say_what_the_text_is_worth_in_colour_shape_and_words():
    read = Reader(html(document()))
    paths = read.all("path", "fill")
    drawn = {a["class"]: a["d"] for a in paths}
    assert set(drawn) == {"fill base", "fill same", "fill tie", "fill differs"}
    assert len(set(drawn.values())) == 4
    assert "different text" in read.text
    assert "KV cache 1.0 MiB, difference explained by rounding" in read.text


def test_a_side_that_loses_answers_is_marked_by_quality():
    lost, kept = (Reader(html(document(quality=quality(*ends)))) for ends in ((-0.6, -0.4), (-0.6, 0.2)))
    assert {a["class"] for a in lost.all("path", "fill")} == {"fill base", "fill lost", "fill unasked"}
    assert {a["class"] for a in kept.all("path", "fill")} == {"fill base", "fill kept", "fill unasked"}
    assert "worst task" in lost.text
    assert "slow: mean 0.70, worst at needle_uuid (0.40, -0.50)" in lost.text
    assert "hf: mean 0.70, lowest at needle_uuid (0.90)" in lost.text
    assert "slow: mean 0.70, no task below the full cache" in Reader(html(document(quality=quality(0, 0)))).text
    assert "score 0.40, -0.50 (-0.60 to -0.40) against the full cache" in " ".join(
        str(a.get("aria-label")) for a in lost.all("svg")
    )


def test_markdown_has_the_quality_suite_too():
    text = markdown(blocks(document(quality=quality(-0.7, -0.3))))
    assert "| profile | kept | mean | vs full | 95 % | p | worst task | score |" in text
    assert "| slow | 25% | 0.70 | -0.50 | -0.70 … -0.30 |" in text
    assert "- controls keep a quarter" in text


def test_lines_come_with_a_second_length():
    one, two = document(), document([*ROWS, *[r | {"ctx": 2048} for r in ROWS]])
    assert "Over context lengths" not in Reader(html(one)).text
    read = Reader(html(two))
    assert "Over context lengths" in read.text
    assert len(read.all("line", "line")) == 2 * 4  # two drawings, four sides that have speeds


def test_warnings_come_first():
    read = Reader(html(document(complete=False, notes=["the machine was busy"])))
    assert read.text.index("stopped before the end") < read.text.index("Decoding")
    assert read.text.index("the machine was busy") < read.text.index("Decoding")


def test_the_command_can_be_typed():
    made = document(args={"vary": ["kv.page=1,2"], "set": ["a='b c'"], "fail_if": ["tok_s<-10%"], "interleave": False})
    words = shlex.split(command_of(made))
    assert words[:3] == ["kvcli", "bench", "demo"]
    assert words[words.index("--set") + 1] == "a='b c'"
    assert words[words.index("--fail-if") + 1] == "tok_s<-10%"
    assert "--no-interleave" in words
    assert "--profiles" not in words  # rows of --vary have names that no profile has
    assert f"$ {command_of(made)}" in Reader(html(made)).text


def test_the_command_says_all_that_was_typed():
    more = {"named": ["exact", "exact", "ngram"], "profiles": ["exact", "exact #2", "ngram max=2"],
            "vary": ["spec.max=2"], "device": "cpu", "dtype": "fp32", "quant": "int8", "allow_pickle": True,
            "budget": "25%", "quality": "passkey", "query_visible": True, "quality_n": 3,
            "quality_lengths": "1k"}  # fmt: skip
    words = " ".join(shlex.split(command_of(document(args=more))))
    for said in (
        "--profiles exact,exact,ngram --vary spec.max=2", "--device cpu", "--dtype fp32", "--quant int8",
        "--budget 25%", "--allow-pickle", "--quality passkey", "--query-visible --quality-n 3 --quality-lengths 1k",
    ):  # fmt: skip
        assert said in words
    plain = shlex.split(command_of(document()))
    assert "hf,ngram,slow,even,llama.cpp" in plain
    assert not {"--dtype", "--quality-n", "--query-visible", "--allow-pickle"} & set(plain)


def test_a_narrow_page_a_dark_one_and_paper_are_provided_for():
    page = html(document())
    for wanted in ("prefers-color-scheme: dark", "@media print", "@media (max-width", 'name="viewport"'):
        assert wanted in page


# ---- small ----


@pytest.mark.parametrize(("top", "last"), [(0.0, 1.0), (1.0, 1.0), (7.3, 8.0), (2310.2, 2500.0), (0.013, 0.015)])
def test_ticks_are_round_and_reach_the_top(top: float, last: float):
    marks = ticks(top)
    assert marks[0] == 0
    assert marks[-1] == pytest.approx(last)
    assert 2 <= len(marks) <= 7


def test_numbers_are_short():
    assert [number(x) for x in (0, 0.01234, 1.5, 12.34, 123.4, 12345.6)] == [
        "0",
        "0.012",
        "1.5",
        "12.3",
        "123",
        "12,346",
    ]


def test_labels_of_marks_on_one_spot_do_not_lie_on_each_other():
    points = [Point(f"p{i}", 1.0, Span(1.0, 1.0, 1.0), "same", "circle", "t") for i in range(6)]
    labels = [a for a in Reader(scatter(points, "x", "y")).all("text") if a.get("dy") and a.get("class") != "tick"]
    places = [(a["text-anchor"], a["dy"]) for a in labels]
    assert len(places) == 6
    assert len(set(places)) == 6
