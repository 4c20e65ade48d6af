"""`kvcli summarize`: what goes to which stream, in which form, what is refused, and what survives Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import pytest
from pydantic import TypeAdapter

from kvcli.api import Text
from kvcli.commands.common.exits import Interrupt
from kvcli.commands.common.run_setup import Setup
from kvcli.documents import read
from kvcli.documents.document import Parsed, Section
from kvcli.schemas.documents import DOCUMENTS
from tests.demo_model.sample import write_sample
from tests.documents import made
from tests.fakes import Machine, Stream
from tests.summarize.scribe import Scribe, first_sentences

ROOT = Path(__file__).parents[1]
PAGES = [
    "The river rose by 12 metres in March. Nobody was hurt.",
    "The old bridge failed at noon. It was rebuilt in a year.",
    "Fishermen caught 300 eels in May. Prices fell at once.",
]
MILL = ["The mill burned down on Sunday.", "It had 7 floors.", "Nobody rebuilt it."]
POINTS = [
    "- The river rose by 12 metres in March [p. 1].",
    "- The old bridge failed at noon [p. 2].",
    "- Fishermen caught 300 eels in May [p. 3].",
]
FILLER = " ".join(f"word{i}" for i in range(150))


class Clerk(Scribe):
    """A scribe as `Setup.load` would return it."""

    cautions: tuple[str, ...] = ()
    promise: str = "exact"
    engine: None = None

    def __enter__(self) -> Clerk:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass
class Office(Machine):
    """A machine whose model is a clerk. `said` holds the answer it gives."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.clerk = Clerk(first_sentences)

    def __call__(self, *args, **more):
        return super().__call__("summarize", *args, **more)


@pytest.fixture
def office(tmp_path, monkeypatch):
    made = Office(tmp_path)

    def load(self, profile, tell=None):
        made.clerk.profile = profile
        return made.clerk

    monkeypatch.setattr(Setup, "load", load)
    monkeypatch.setattr(Setup, "pass_times", lambda self, model: [])
    # the demo's own wording refuses most options; the clerk follows the general one
    monkeypatch.setattr("kvcli.commands.summarize.run.SummaryRun.refuse_early", lambda job: None)
    (tmp_path / "a.txt").write_text("\f".join(PAGES))
    return made


def long_file(office, n=5):
    """Pages of which one fits the clerk's window at a time, three at most."""
    pages = [f"{PAGES[i % 3].replace('March', f'March {i}')} {FILLER}" for i in range(n)]
    (office.folder / "long.txt").write_text("\f".join(pages))
    return ["long.txt", "--chunk", "200", "--length", "short"]


# --- streams


def test_the_summary_alone_on_stdout(office):
    done = office("a.txt")
    assert (done.exit, done.out) == (0, "\n".join(POINTS) + "\n")
    file, plan, *_ = done.err.split("\n")
    assert re.fullmatch(r"a\.txt · 3 pages · \d+ tokens", file)
    assert plan.startswith("plan: one part, ")
    assert "\x1b" not in done.err


def test_points_come_one_by_one(office):
    written = []

    class Watched(Stream):
        def write(self, text):
            written.append(text)
            return super().write(text)

    assert office("a.txt", stdout=Watched()).exit == 0
    assert "".join(written).splitlines() == POINTS
    assert [text.strip() for text in written if text.strip()] == POINTS, "a complete point in each write"


def test_a_summary_with_a_loop_in_it_is_no_success(office):
    office.clerk.stop_loops = 60
    office.clerk.answer = lambda _: f"{POINTS[0]}\n- It" + " goes on" * 60
    done = office("a.txt")
    assert (done.exit, done.out) == (8, f"{POINTS[0]}\n")
    assert "note: the answer repeated itself" in done.err
    office.clerk.answer = lambda _: " goes on" * 60
    done = office("a.txt", "--no-cache")
    assert (done.exit, done.out.count("“")) == (8, 3)
    (office.folder / "bare.txt").write_text("Agenda")  # no sentence to quote
    done = office("bare.txt")
    assert (done.exit, done.out) == (8, "")
    assert "its answer repeated itself" in done.err


def test_quiet_says_nothing(office):
    done = office("a.txt", "-q")
    assert (done.exit, done.err) == (0, "")
    assert done.out


def test_no_color_and_terminal_both_hold_the_points(office):
    for environ in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        office.environ = environ
        done = office("a.txt", tty=("stdout", "stderr"))
        assert "\x1b" not in done.out + done.err
        assert all(point in done.out for point in POINTS)


def test_stdin_is_a_document(office):
    done = office("-", stdin="\f".join(PAGES).encode())
    assert (done.exit, done.out.splitlines()) == (0, POINTS)
    assert "standard input · 3 pages" in done.err


# --- citations


def test_a_false_citation_is_marked(office):
    office.clerk.answer = lambda prompt: "- The river rose by 99 metres in April [p. 2]."
    done = office("a.txt", "--json")
    document = json.loads(done.out)
    assert "[p. 2?]" in document["text"]
    assert document["points"][0]["cites"][0]["confirmed"] is False
    assert document["unconfirmed"] == 1
    plain = office("a.txt")
    assert "[p. 2?]" in plain.out
    assert '1 of 1 citation could not be confirmed, marked "?"' in plain.err


def test_a_citation_of_another_page_is_moved_and_said(office):
    office.clerk.answer = lambda prompt: "- The river rose by 12 metres in March [p. 3]."
    done = office("a.txt")
    assert done.out == POINTS[0] + "\n"
    assert "1 of 1 citation named a wrong place and was moved" in done.err


def test_unchecked_and_uncited(office):
    office.clerk.answer = lambda prompt: "- The river rose by 99 metres [p. 2]."
    assert "[p. 2]." in office("a.txt", "--no-check").out
    office.clerk.answer = lambda prompt: "- The river rose."
    done = office("a.txt", "--cite", "none")
    assert "named no pages" not in done.err
    assert "[p. 1]" not in office.clerk.asked[-1]


def test_quotes_stand_under_their_points(office):
    assert "  > The river rose by 12 metres in March." in office("a.txt", "--quotes").out


# --- forms


def test_json_is_what_the_schema_says(office):
    for args in (["--json"], ["--format", "json"]):
        document = json.loads(office("a.txt", "--quotes", *args).out)
        TypeAdapter(DOCUMENTS["summary"]).validate_python(document, strict=False)
        assert document["schema"] == "kvcli.summary/2"
        assert document["source"]["path"] == "a.txt"
        assert [point["cites"][0]["page"] for point in document["points"]] == [1, 2, 3]
        assert document["turns"][0]["turn"]["model"]["id"] == "demo"


def test_txt_has_no_markup(office):
    office.clerk.answer = lambda prompt: f"## Flood\n- The river rose by 12 metres in March [p. 1]. {FILLER}"
    text = office("a.txt", "--format", "txt", "--style", "outline").out
    assert text.startswith("Flood\n- The river rose")
    assert max(map(len, text.splitlines())) <= 80
    assert all(line.startswith(("- ", "  ")) for line in text.splitlines()[1:])


class Tags(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.seen = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))


def test_html_is_one_page_that_runs_nothing(office):
    evil = "<script>alert(1)</script> & <img src=x onerror=y>"
    office.clerk.answer = lambda prompt: f"- The river rose {evil} [p. 1].\n- The old bridge failed at noon [p. 2]."
    done = office("a.txt", "-o", "out.html")
    page = (office.folder / "out.html").read_text()
    assert (done.exit, done.out) == (0, "")
    assert "wrote" in done.err
    tags = Tags(page).seen
    assert not {"script", "img", "link", "iframe"} & {tag for tag, _ in tags}
    assert not [1 for _, attrs in tags if {"src", "href", "onerror"} & set(attrs)]
    assert "&lt;script&gt;" in page
    assert [attrs["class"] for tag, attrs in tags if tag == "span"] == ["cite doubtful", "cite confirmed"]


def test_html_keeps_paragraphs_and_the_places_of_citations(office):
    office.clerk.answer = lambda prompt: (
        "The river rose by 12 metres in March [p. 1], the mill burned down [p. 2] and fishermen caught 300 eels "
        "in May [p. 3]. Nobody was hurt [p. 1].\n\nThe old bridge failed at noon [p. 2]. Prices fell at once [p. 3]."
    )
    office("a.txt", "--style", "abstract", "-o", "out.html", "--quotes")
    quoted = (office.folder / "out.html").read_text()
    assert quoted.count("<p>The ") == 2
    office("a.txt", "--style", "abstract", "-o", "out.html")
    page = (office.folder / "out.html").read_text()
    body = page.partition("</h1>")[2].partition("<footer>")[0]
    paragraphs = [re.sub(r"<[^>]*>", "", text) for text in re.findall(r"<p>(.*?)</p>", body)]
    assert paragraphs == [
        "The river rose by 12 metres in March p. 1, the mill burned down p. 2? and fishermen caught 300 eels in May "
        "p. 3. Nobody was hurt p. 1.",
        "The old bridge failed at noon p. 2. Prices fell at once p. 3.",
    ]
    document = json.loads(office("a.txt", "--style", "abstract", "--json").out)
    assert [point["opens"] for point in document["points"]] == [True, False, True, False]


def test_only_short_citations_of_html_stay_in_one_line(office):
    title = "A very long heading about rivers " * 4
    (office.folder / "b.html").write_text(f"<h1>{title}</h1><p>{PAGES[0]}</p><h1>B</h1><p>{PAGES[1]}</p>")

    def classes(*args):
        assert office(*args, "-o", "out.html").exit == 0
        tags = Tags((office.folder / "out.html").read_text()).seen
        return {attrs["class"] for tag, attrs in tags if tag == "span"}

    assert classes("a.txt") == {"cite confirmed"}
    office.clerk.answer = lambda prompt: f"- The river rose by 12 metres in March [\N{SECTION SIGN} {title.strip()}]."
    assert classes("b.html") == {"cite confirmed long"}


# --- files


def test_standard_output_has_a_name_too(office):
    done = office("a.txt", "-o", "-")
    assert (done.exit, done.out.splitlines()) == (0, POINTS)
    assert not (office.folder / "-").exists()


def test_files_of_one_name_are_told_apart(office):
    for folder, pages in (("x", PAGES), ("y", MILL)):
        (office.folder / folder).mkdir()
        (office.folder / folder / "r.txt").write_text("\f".join([*pages, " "]))
    done = office("x/r.txt", "y/r.txt")
    assert [line.partition(" \u00b7 ")[0] for line in done.err.splitlines()[:2]] == ["r.txt", "r.txt (2)"]
    assert "note: r.txt (2): no text on page 4" in done.err
    assert "r.txt (2) \u00b7 4 pages" in office("x/r.txt", "y/r.txt", "--dry-run").out
    each = office("x/r.txt", "y/r.txt", "--each")
    assert [line for line in each.out.splitlines() if line.startswith("#")] == ["# x/r.txt", "# y/r.txt"]
    assert "y/r.txt \u00b7 4 pages" in each.err
    for more, names in (([], ["r.txt", "r.txt (2)"]), (["--each"], ["x/r.txt", "y/r.txt"])):
        office("x/r.txt", "y/r.txt", "-o", "out.html", *more)
        page = (office.folder / "out.html").read_text()
        assert f"<title>Summary of {', '.join(names)}</title>" in page


@pytest.mark.parametrize("again", ["./r.txt", "link.txt", "sub/../r.txt"])
def test_a_file_is_read_once_however_it_is_spelt(office, again):
    (office.folder / "sub").mkdir()
    (office.folder / "r.txt").write_text("\f".join(PAGES))
    (office.folder / "link.txt").symlink_to("r.txt")
    done = office("r.txt", again)
    assert (done.exit, done.out) == (2, "")
    assert f"{again} is named twice (the first time as r.txt" in " ".join(done.err.split())
    assert office("r.txt:1", f"{again}:1").exit == 2
    assert office("r.txt:1", f"{again}:2-3").exit == 0, "other pages of it"


def test_a_file_is_replaced_at_the_end_and_kept_when_that_fails(office):
    target = office.folder / "out.md"
    target.write_text("before")
    target.chmod(0o640)
    office.clerk.answer = lambda prompt: ""
    (office.folder / "bare.txt").write_text("Agenda")  # no sentence to quote
    assert office("bare.txt", "-o", "out.md").exit == 8
    assert target.read_text() == "before"
    office.clerk.answer = first_sentences
    assert office("a.txt", "-o", "out.md", "--no-cache").exit == 0
    assert target.read_text().splitlines() == POINTS
    assert target.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in office.folder.iterdir() if "out.md" in p.name] == ["out.md"]


def test_a_new_file_is_its_owners_and_a_link_stays_one(office):
    (office.folder / "real.md").write_text("")
    (office.folder / "link.md").symlink_to("real.md")
    assert office("a.txt", "-o", "new.md").exit == 0
    assert (office.folder / "new.md").stat().st_mode & 0o777 == 0o600
    assert office("a.txt", "-o", "link.md").exit == 0
    assert (office.folder / "link.md").is_symlink()
    assert (office.folder / "real.md").read_text().splitlines() == POINTS


def test_several_files_are_one_summary_that_names_them(office):
    (office.folder / "b.txt").write_text("\f".join(MILL))
    done = office("a.txt", "b.txt")
    assert "- The mill burned down on Sunday [b.txt p. 1]." in done.out
    assert done.out.count("\n") == 6


def test_sources_have_the_names_of_citations(office):
    (office.folder / "old").mkdir()
    (office.folder / "old" / "a.txt").write_text("\f".join(MILL))
    document = json.loads(office("a.txt", "old/a.txt", "--json").out)
    assert [(s["path"], s["name"]) for s in document["sources"]] == [("a.txt", "a.txt"), ("old/a.txt", "a.txt (2)")]
    plan = json.loads(office("a.txt", "old/a.txt", "--json", "--dry-run").out)
    assert [s["name"] for s in plan["sources"]] == ["a.txt", "a.txt (2)"]
    assert json.loads(office("a.txt", "--json").out)["source"]["name"] == "a.txt"


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode there")
def test_a_name_that_is_not_utf8_makes_valid_json(office):
    name = os.fsdecode(b"caf\xe9.txt")
    (office.folder / name).write_text("\f".join(MILL))
    for args in (["--json"], ["--extract-only", "--json"], ["--each", "--json"]):
        data = office(name, "a.txt", *args, "-o", "x.json")
        assert data.exit == 0, data.err
        first, *_ = (office.folder / "x.json").read_bytes().decode("utf-8").splitlines()
        assert "caf\N{REPLACEMENT CHARACTER}.txt" in first
        assert "\\ud" not in office(name, "a.txt", *args).out
    assert office(name, "a.txt", "-o", "x.md").exit == 0
    assert "[caf\N{REPLACEMENT CHARACTER}.txt p. 1]" in (office.folder / "x.md").read_text(encoding="utf-8")


def test_pages_without_text_are_said_in_the_same_words(office):
    (office.folder / "gap.pdf").write_bytes(made.partly_scanned(Random(1)).data)
    said = "gap.pdf: no text on pages 2, 4, perhaps scanned"
    off = ("--ocr", "off")
    assert f"{said}; they are not in the summary" in " ".join(office("gap.pdf", *off).err.split())
    assert said in office("gap.pdf", "--extract-only", *off).err
    office("gap.pdf", "-o", "gap.html", *off)
    assert said in (office.folder / "gap.html").read_text()


def test_recognized_pages_are_marked_in_citations(office, monkeypatch):
    sections = [Section(i, str(i), text, is_ocr=i == 2) for i, text in enumerate(PAGES, 1)]
    monkeypatch.setattr(read, "parse_outside", lambda *_: Parsed("pdf", "page", sections, n_pages=3))
    (office.folder / "scan.pdf").write_bytes(b"%PDF-1.7\n")
    for more in ((), ("--no-check",)):
        assert office("scan.pdf", *more).out == "\n".join(POINTS).replace("[p. 2]", "[p. 2, OCR]") + "\n"
    found = json.loads(office("scan.pdf", "--json").out)
    assert (found["points"][1]["cites"][0]["is_ocr"], found["source"]["recognized"]) == (True, [2])
    office("scan.pdf", "-o", "scan.html")
    assert "p. 2, OCR" in (office.folder / "scan.html").read_text()


def test_an_empty_page_of_a_text_was_not_scanned(office):
    (office.folder / "gap.txt").write_text("\f".join([PAGES[0], " ", PAGES[1]]))
    office("gap.txt", "-o", "gap.html")
    shown = [
        " ".join(office("gap.txt").err.split()),
        office("gap.txt", "--extract-only").err,
        (office.folder / "gap.html").read_text(),
    ]
    assert all("gap.txt: no text on page 2" in text for text in shown)
    assert not any("scanned" in text or "ocrmypdf" in text for text in shown)
    assert "no text on page 2; it is not in the summary" in shown[0]


def test_a_missing_file_among_several(office):
    assert office("a.txt", "~nobody-here/x.pdf", "-o", "x.md").exit == 3
    assert (office.folder / "x.md").read_text().splitlines() == POINTS
    done = office("a.txt", "gone.pdf")
    assert (done.exit, done.out.splitlines()) == (3, POINTS)
    assert "no such file: gone.pdf" in done.err
    document = json.loads(office("a.txt", "gone.pdf", "--json").out)
    assert document["notes"] == ["gone.pdf is not in the summary: no such file: gone.pdf"]


def test_each_file_by_itself(office):
    (office.folder / "b.txt").write_text("\f".join(MILL))
    (office.folder / "cut.pdf").write_bytes(b"%PDF-1.7\n1 0 obj")
    done = office("a.txt", "cut.pdf", "b.txt", "--each")
    assert done.exit == 3
    assert done.out.startswith("# a.txt\n\n- The river rose")
    assert "\n\n# b.txt\n\n- The mill burned down on Sunday [p. 1]." in done.out
    assert "cut.pdf cannot be read" in done.err
    lines = [json.loads(line) for line in office("a.txt", "cut.pdf", "b.txt", "--each", "--json").out.splitlines()]
    assert [line["schema"] for line in lines] == ["kvcli.error/1", "kvcli.summary/2", "kvcli.summary/2"]


def test_of_each_what_fails_is_named_and_has_no_heading(office):
    (office.folder / "huge.txt").write_text(" ".join(PAGES * 200))
    args = ["huge.txt", "a.txt", "--each", "--mode", "whole"]
    done = office(*args)
    assert (done.exit, done.out) == (6, "# a.txt\n\n" + "\n".join(POINTS) + "\n")
    assert "error: huge.txt: the document is longer than the context window" in done.err
    error, summary = (json.loads(line) for line in office(*args, "--json").out.splitlines())
    assert error["message"] == "huge.txt: the document is longer than the context window"
    assert summary["schema"] == "kvcli.summary/2"
    assert "huge.txt: the document" not in office("huge.txt", "--mode", "whole").err, "there is only one"


def test_of_each_a_plan_that_fails_leaves_the_others(tmp_path):
    machine = Machine(tmp_path)
    (tmp_path / "huge.txt").write_text(" ".join(PAGES * 2000))
    (tmp_path / "a.txt").write_text("\f".join(PAGES))
    args = ["summarize", "huge.txt", "a.txt", "--each", "--mode", "whole", "--dry-run"]
    done = machine(*args)
    assert done.exit == 6
    assert "error: huge.txt: the document is longer than the context window" in done.err
    assert "--ctx" not in done.err, "the model takes no more than it has"
    assert done.out.startswith("a.txt \u00b7 3 pages")
    lines = [json.loads(line)["schema"] for line in machine(*args, "--json").out.splitlines()]
    assert lines == ["kvcli.error/1", "kvcli.summary_plan/2"]


@pytest.mark.parametrize("more", [[], ["--each"], ["--extract-only"], ["--dry-run"]])
def test_no_file_can_be_read_is_one_error_as_json(office, more):
    done = office("gone.pdf", "lost.pdf", "--json", *more)
    error = json.loads(done.out)
    assert (done.exit, error["schema"], error["code"]) == (3, "kvcli.error/1", "file_missing")
    assert "no such file: lost.pdf" in error["lines"]


def test_errors_of_each_stand_where_the_json_goes(office):
    (office.folder / "cut.pdf").write_bytes(b"%PDF-1.7\n1 0 obj")
    schemas = ["kvcli.error/1", "kvcli.summary/2"]
    done = office("cut.pdf", "a.txt", "--each", "--format", "json")
    assert [json.loads(line)["schema"] for line in done.out.splitlines()] == schemas
    done = office("cut.pdf", "a.txt", "--each", "--json", "-o", "x.json")
    assert (done.exit, done.out) == (3, "")
    assert "cut.pdf cannot be read" in done.err
    written = (office.folder / "x.json").read_text()
    assert [json.loads(line)["schema"] for line in written.splitlines()] == schemas
    office.clerk.answer = lambda prompt: ""
    (office.folder / "bare.txt").write_text("Agenda")  # no sentence to quote
    done = office("cut.pdf", "bare.txt", "--each", "--json", "-o", "x.json", "--no-cache")
    assert (done.out, (office.folder / "x.json").read_text()) == ("", written), "errors alone replace nothing"
    assert "wrote no summary" in done.err


def test_extract_only_asks_no_model(office, monkeypatch):
    monkeypatch.setattr(Setup, "load", None)
    done = office("a.txt:2-3", "--extract-only")
    assert (done.exit, done.out) == (0, f"[p. 2]\n{PAGES[1]}\n\n[p. 3]\n{PAGES[2]}\n")
    document = json.loads(office("a.txt", "--pages", "3", "--extract-only", "--json").out)
    assert document["documents"][0]["sections"] == [{"number": 3, "label": "3", "is_ocr": False, "text": PAGES[2]}]


def test_a_terminal_gets_no_escapes_of_a_file(office):
    (office.folder / "evil.txt").write_text("The river rose.\x1b]0;owned\x07\n")
    assert "\x1b" in office("evil.txt", "--extract-only").out, "a pipe gets the text as it is"
    shown = office("evil.txt", "--extract-only", tty=("stdout", "stderr")).out
    assert "The river rose." in shown
    assert not {"\x1b", "\x07"} & set(shown)


def test_dry_run_loads_no_weights(machine_plan):
    done, document = machine_plan
    assert done.exit == 0
    assert "plan: one part, prompt 4,599 tokens" in done.out
    assert (document["schema"], document["mode"], document["limit"]) == ("kvcli.summary_plan/2", "whole", 8192)
    assert document["seconds"] is None, "nobody timed anything in this home"


@pytest.fixture
def machine_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(Setup, "load", None)
    machine = Machine(tmp_path)
    words = machine("summarize", "demo:pdf", "--dry-run")
    return words, json.loads(machine("summarize", "demo:pdf", "--dry-run", "--json").out)


# --- parts


def test_parts_are_told_and_kept(office):
    args = long_file(office)
    first = office(*args)
    assert first.exit == 0
    assert re.search(r"plan: 5 parts, prompts up to \d+ tokens", first.err)
    assert len(re.findall(r"part \d of 5 · page \d · 1 point · prompt", first.err)) == 5
    asked = len(office.clerk.asked)
    again = office(*args)
    assert again.out == first.out
    assert len(office.clerk.asked) == asked
    assert "--no-cache asks again" in again.err
    office(*args, "--no-cache")
    assert len(office.clerk.asked) == 2 * asked


@pytest.fixture
def in_third(office, monkeypatch):
    """Ctrl-C while the third part is written about."""
    hear, stream = [], office.clerk.stream
    monkeypatch.setattr(Interrupt, "__enter__", lambda self: hear.append(self.hear) or self)

    def interrupted(*more, **kwargs):
        for event in stream(*more, **kwargs):
            if len(office.clerk.asked) == 3 and isinstance(event, Text):
                hear[-1]()
            yield event

    monkeypatch.setattr(office.clerk, "stream", interrupted, raising=False)
    return stream


def test_ctrl_c_says_when_nothing_is_kept(office, in_third):
    (office.folder / "home").mkdir(exist_ok=True)
    (office.folder / "home" / "cache").write_text("no folder")
    done = office(*long_file(office))
    assert done.exit == 130
    said = " ".join(done.err.split())
    assert said.count("note: results of parts cannot be saved in") == 1
    assert said.index("cannot be saved") < said.index("part 1 of 5")
    assert "stopped: parts 1 and 2 of 5 are done but could not be saved; the same command starts again" in said


def test_ctrl_c_with_json_is_one_error_and_not_nothing(office, in_third):
    done = office(*long_file(office), "--json")
    assert (done.exit, done.err, json.loads(done.out)["code"]) == (130, "", "interrupted")


def test_ctrl_c_after_fresh_says_how_to_go_on(office, in_third):
    done = office(*long_file(office), "--no-cache")
    said = "stopped: parts 1 and 2 of 5 are saved; the same command without --no-cache continues"
    assert said in " ".join(done.err.split())


def test_what_cannot_be_kept_is_said_once(office):
    (office.folder / "home").mkdir(exist_ok=True)
    (office.folder / "home" / "cache").write_text("no folder")
    done = office(*long_file(office))
    assert (done.exit, done.err.count("cannot be saved")) == (0, 1)
    assert "cannot be saved" in json.loads(office(*long_file(office), "--json").out)["notes"][0]


def test_ctrl_c_in_the_third_part_keeps_two(office, monkeypatch, in_third):
    args, stream = long_file(office), in_third
    done = office(*args, "-o", "out.md")
    assert (done.exit, done.out) == (130, "")
    assert "stopped: parts 1 and 2 of 5 are saved; the same command continues" in done.err
    assert not (office.folder / "out.md").exists()
    monkeypatch.setattr(office.clerk, "stream", stream)
    asked = len(office.clerk.asked)
    again = office(*args, "-o", "out.md")
    assert again.exit == 0
    assert again.err.count("saved by an earlier run") == 2, "two parts"
    assert len(office.clerk.asked) - asked in (3, 4), "three parts, and the merge if there is one"


def test_a_run_that_does_not_end_leaves_the_old_file(office, monkeypatch):
    (office.folder / "b.txt").write_text("\f".join(MILL))
    target = office.folder / "out.md"
    target.write_text("before")

    def broken(prompt):
        if "mill" in prompt:
            raise RuntimeError("no more")
        return first_sentences(prompt)

    office.clerk.answer = broken
    assert office("a.txt", "b.txt", "--each", "-o", "out.md").exit == 1
    assert target.read_text() == "before"
    office.clerk.answer = first_sentences
    with monkeypatch.context() as patch:
        patch.setattr(Interrupt, "__call__", lambda self: len(office.clerk.asked) > 1)
        assert office("a.txt", "b.txt", "--each", "-o", "out.md").exit == 130
    assert target.read_text() == "before"
    office.clerk.answer = lambda prompt: "" if "Agenda" in prompt else first_sentences(prompt)
    (office.folder / "b.txt").write_text("Agenda")  # no sentence to quote
    assert office("b.txt", "a.txt", "--each", "-o", "out.md", "--no-cache").exit == 8
    assert target.read_text() == "# a.txt\n\n" + "\n".join(POINTS) + "\n", "no heading without its summary"


# --- what is refused


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ([], "usage", "no file is named"),
        (["gone.pdf"], "file_missing", "no such file"),
        (["~nobody-here/x.pdf", "-o", "x.md"], "file_missing", "no such file: ~nobody-here/x.pdf"),
        (["a.txt", "-o", "~nobody-here/x.md"], "file_unwritable", "its folder does not exist"),
        (["a.txt", "--password-file", "~nobody-here/pw"], "file_unreadable", "No such file"),
        (["home"], "file_count", "home: no documents in it"),
        (["empty.pdf"], "empty_file", "is empty"),
        (["a.txt", "a.txt"], "usage", "named twice"),
        (["a.txt", "--extract-only", "--quotes"], "usage", "--extract-only excludes --quotes"),
        (["a.txt", "--extract-only", "--format", "html"], "usage", "only summaries"),
        (["a.txt", "--dry-run", "-o", "x.md"], "usage", "writes no file"),
        (["a.txt", "-o", "."], "file_unwritable", "it is a folder"),
        (["a.txt", "-o", ""], "usage", "-o needs a file name"),
        (["a.txt", "-o", "loop1.md"], "file_unwritable", "symbolic links"),
        (["a.txt", "-o", f"{'x' * 300}.md"], "file_unwritable", "name too long"),
        (["a.txt", "--focus", "caf\udce9"], "usage", "--focus is not UTF-8"),
        (["a.txt", "--lang", "\udcff"], "usage", "--lang is not UTF-8"),
        (["a.txt", "--quotes", "--no-check"], "usage", "only one of them"),
        (["a.txt", "--overlap", "-1"], "usage", "at least 0"),
        (["a.txt", "-o", "no/x.md"], "file_unwritable", "does not exist"),
        (["a.txt", "-o", "a.txt"], "usage", "would overwrite an input file"),
        (["a.txt:1-2", "--extract-only", "-o", "a.txt"], "usage", "would overwrite an input file"),
        (["a.txt", "--password-file", "pw.txt", "-o", "pw.txt"], "usage", "would overwrite an input file"),
        (["a.txt", "--length", "huge"], "usage", "short, medium, long"),
        (["a.txt", "--mode", "whole", "--chunk", "99"], "usage", "have no effect"),
        (["a.txt", "--pages", "9"], "no_such_page", "has no page 9"),
        (["a.txt", "--pages", "x"], "bad_pages", "is not a range"),
        (["a.txt", "--type", "doc"], "unknown_type", "no type"),
        (["a.txt", "--password-file", "gone"], "file_unreadable", "cannot read the password"),
    ],
)  # fmt: skip
def test_what_is_refused(office, args, code, words):
    (office.folder / "empty.pdf").write_bytes(b"")
    (office.folder / "pw.txt").write_text("secret\n")
    for one, other in (("loop1.md", "loop2.md"), ("loop2.md", "loop1.md")):
        (office.folder / one).symlink_to(other)
    done = office(*args)
    assert code in done.err
    assert words in " ".join(done.err.split())
    assert done.exit in (2, 3)
    assert done.out == ""
    assert not office.clerk.asked
    error = json.loads(office(*args, "--json").out)
    assert error["schema"] == "kvcli.error/1"


def test_a_form_is_named_once(office):
    assert "unknown file name extension" in office("a.txt", "-o", "x.pdf").err
    for args in (["--format", "md"], ["-o", "x.md"]):
        done = office("a.txt", "--json", *args)
        assert (done.exit, "exclude each other" in done.out) == (2, True)
    assert office("a.txt", "-o", "x.pdf", "--format", "md").exit == 0


def test_names_other_tools_use(office):
    done = Machine.__call__(office, "summarise", "a.txt")
    assert done.exit == 2
    assert "kvcli summarize" in done.err


# --- the bundled model and its PDF


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    return Machine(tmp_path_factory.mktemp("bundled"))("summarize", "demo:pdf")


def test_all_planted_findings_with_their_pages(bundled):
    expected = [f"- {finding.sentence}" for finding in write_sample().findings]
    assert len(expected) == 9
    assert bundled.exit == 0
    assert bundled.out.splitlines() == expected


def test_help_leaves_torch_alone():
    run = [sys.executable, "-X", "importtime", "-m", "kvcli", "summarize", "--help-all"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "--extract-only" in done.stdout
    assert not loaded & {"torch", "transformers", "pypdfium2", "lxml"}


def test_counting_is_said_and_ctrl_c_ends_it_at_once(office, monkeypatch):
    seen = []

    def counting(*_: object) -> None:
        seen.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        raise KeyboardInterrupt

    monkeypatch.setattr("kvcli.commands.summarize.run.make_plan", counting)
    office.environ["TERM"] = "dumb"
    done = office("a.txt", tty=("stderr",))
    assert (done.exit, seen) == (130, [True])
    assert done.err.splitlines()[-2:] == ["counting tokens …", "interrupted"]
