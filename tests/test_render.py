"""Rows, bars, summaries, errors and tables, as text."""

from __future__ import annotations

import io
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcli.api import End, Live, Read, Text, Turn
from kvcli.engine.sequence.state import Repetition
from kvcli.engine.stats import Stats
from kvcli.errors import ContextOverflow, DoesNotFit
from kvcli.render.terminal import terminal as f
from kvcli.render.terminal.errors import print_error, print_note
from kvcli.render.terminal.screen import Screen
from kvcli.render.terminal.tables import clip, columns, kv_table, spec_table, token_table
from kvcli.render.terminal.terminal import TAB, Terminal, Wrapper, fold, text_width
from kvcli.render.turn.answer_markdown import MarkdownWrapper
from kvcli.render.turn.status_row import ProcessMemory, RowOptions, reading_bar, status_row
from kvcli.render.turn.turn_summary import HeaderFacts, header, one_line_summary, summary
from kvcli.render.turn.turn_view import TurnView, loop_notes, show_turn
from tests.fake_model import FakeModel, fake_info

LOOK = RowOptions("fafo")
RAM = ProcessMemory("RAM", 431 << 20)


def some_stats(**changes):
    facts = {
        "prompt": 1912, "cached": 431, "new": 64, "read": 0.84, "first_token": 0.88, "decode": 2.92, "passes": 26,
        "drafted_passes": 19, "draft_tokens": 61, "accepted_tokens": 38, "histogram": [4, 3, 4, 5, 3],
        "recent": [1, 3, 5, 8, 7, 4, 6], "kv": {"dense": 4_613_734}, "kv_fp16": 18_210_816, "peak": 418 << 20,
        "context": 1976, "limit": 2048, "plain": [0.082],
    }  # fmt: skip
    return Stats(**(facts | changes))


def row(width, stats=None, look=LOOK, memory=RAM):
    return "".join(text for text, _ in status_row(stats or some_stats(), look, memory, width))


def style_of(text, spans):
    return next(style for said, style in spans if text in said)


# --- the live row


FULL = " fafo  64 tok  21.9 tok/s  2.46 tok/pass  KV 17.1 MiB  context 96%  RAM 431 MiB"


def test_the_row_is_that_of_the_design():
    stats = some_stats(kv={"dense": 17_930_000}, kv_fp16=0)
    assert row(81, stats) == FULL
    assert row(80, stats) == FULL.replace(" fafo  ", " ")
    assert row(200, stats) == FULL


def test_fields_go_in_the_order_stated_as_the_terminal_narrows():
    stats = some_stats(kv={"dense": 17_930_000}, kv_fp16=0)
    shown = [(width, row(width, stats)) for width in range(90, 39, -1)]
    gone = []
    for _, text in shown:
        for name, mark in (("profile", "fafo"), ("ctx", "context"), ("memory", "RAM"), ("kv", "KV")):
            if mark not in text and name not in gone:
                gone.append(name)
        assert "21.9 tok/s" in text
        assert "2.46 tok/pass" in text
    assert gone == ["profile", "ctx", "memory", "kv"]
    assert all(text_width(text) <= width - 2 for width, text in shown)
    assert row(39, stats) == ""


def test_a_lossy_profile_shows_how_much_smaller_the_cache_is():
    assert "KV 4.4 MiB (3.9× smaller)" in row(100)


def test_several_tiers_are_told_apart():
    assert "KV 4.4 MiB quantized + 12.0 MiB host " in row(
        120, some_stats(kv={"packed": 4_613_734, "cpu": 12 << 20}, kv_fp16=0)
    )
    assert f.tiers({"dense": 5 << 20, "cpu": 0}) == "5.0 MiB"
    assert f.tiers({"cuda": 5 << 20, "cpu": 1 << 20}) == "5.0 MiB GPU + 1.0 MiB host"
    assert f.tiers({}) == "0 KiB"


def test_an_unknown_speed_is_a_dash_and_no_field_is_shown_without_drafts_or_kv():
    assert row(100, Stats(limit=2048)) == " fafo  0 tok  – tok/s  context 0%  RAM 431 MiB"


@pytest.mark.parametrize(
    ("changes", "text", "style"),
    [
        ({"context": 1740}, "85%", ""),
        ({"context": 1760}, "86%", "yellow"),
        ({"context": 2048}, "100%", "red"),
        ({"plain": [0.04]}, "2.46", "yellow"),
        ({"plain": []}, "2.46", ""),
    ],
)
def test_thresholds_colour_the_figure(changes, text, style):
    assert style_of(text, status_row(some_stats(**changes), LOOK, RAM, 120)) == style


def test_memory_near_its_limit_is_yellow():
    spans = status_row(some_stats(), LOOK, ProcessMemory("GPU", 91, 100), 120)
    assert spans[-2:] == [("GPU ", "dim"), ("0 KiB", "yellow")]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 KiB"),
        (312 << 10, "312 KiB"),
        (4_613_734, "4.4 MiB"),
        (431 << 20, "431 MiB"),
        (1023 << 20, "1.0 GiB"),
        (15_300 << 20, "14.9 GiB"),
    ],
)
def test_sizes(size, text):
    assert f.long_size(size) == text


@pytest.mark.parametrize(
    ("time", "text"), [(0.884, "0.88 s"), (0.999, "1.0 s"), (2.92, "2.9 s"), (99.99, "1 min 40 s"), (125, "2 min 05 s")]
)
def test_times(time, text):
    assert f.seconds(time) == text


# --- the reading bar


def bar(width, read):
    return "".join(text for text, _ in reading_bar(read, width))


def test_the_bar_is_that_of_the_design():
    text = bar(80, Read(1480, 1912, 0, 0.841))
    assert text.startswith("⠋ reading 1,480 of 1,912 tokens ━━━━")
    assert text.endswith("  77 %  1,760 tok/s  0:00")


@pytest.mark.parametrize("width", range(1, 201))
def test_the_bar_fits(width):
    for read in (Read(1480, 1912, 431, 0.8), Read(0, 131_902, 0, 0.0), Read(131_902, 131_902, 131_902, 9e4)):
        assert text_width(bar(width, read)) < max(width, 1) or bar(width, read) == ""


def test_the_bar_tells_what_was_cached():
    assert "(431 cached)" in bar(100, Read(1480, 1912, 431, 0.8))


# --- summary and header


def test_the_summary_is_that_of_the_design():
    assert summary(Turn("", (), "stop", some_stats()), 80) == [
        "  64 tokens in 2.9 s · 21.9 tok/s (1.8× plain) · first token 0.88 s",
        "  prompt 1,912 tokens (431 from prefix cache) read in 0.84 s",
        "  drafting: 73% of 26 passes, acceptance length 3.00, 2.46 tokens per pass",
        "  KV 4.4 MiB (17.4 MiB at 16 bits) · peak 418 MiB · context 1,976 of 2,048",
    ]


def test_what_was_taken_over_is_told_beside_what_was_cached():
    turn = Turn("", (), "stop", some_stats(reused=1200, approx="approx"))
    assert "(431 from prefix cache, 1,200 reused from other text)" in summary(turn, 120)[1]
    assert "approx · " in (line := one_line_summary(turn, 200)[0])
    assert "prompt 1,912 tokens, 431 from prefix cache, 1,200 reused from other text" in line


def test_figures_that_are_missing_are_left_out():
    lines = summary(Turn("", (), "length", Stats(new=1, decode=0.5, passes=1)), 80)
    assert lines == ["  1 token in 0.50 s", "  the answer reached its length limit (-n allows a longer one)"]


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (40, "  64 tokens · 21.9 tok/s (1.8× plain)"),
        (80, "  64 tokens · 21.9 tok/s (1.8× plain) · first token 0.88 s · 2.46 tok/pass"),
        (
            104,
            "  64 tokens · 21.9 tok/s (1.8× plain) · first token 0.88 s · prompt 1,912 tokens, 431 from prefix cache",
        ),
    ],
)
def test_one_line_is_what_fits(width, line):
    assert one_line_summary(Turn("", (), "stop", some_stats()), width) == [line]


def test_an_answer_that_was_cut_is_said_whatever_fits():
    assert one_line_summary(Turn("", (), "length", some_stats()), 80)[1:] == [
        "  the answer reached its length limit (-n allows a longer one)"
    ]


DRAWN = {"temperature": 0.0}


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({}, "sampling: temperature 0"),
        ({"repetition_penalty": 1.1}, "sampling: temperature 0, repetition_penalty 1.1"),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, "sampling: temperature 0.6, top_k 20, top_p 0.95"),
    ],
)
def test_all_figures_say_how_tokens_were_drawn(chosen, said):
    turn = Turn("", (), "stop", some_stats(sampling=DRAWN | chosen))
    assert f"  {said}" in summary(turn, 120)
    assert "sampling" not in "".join(one_line_summary(turn, 200))


@pytest.mark.parametrize(("had", "more"), [({}, "0.1"), (DRAWN, "0.1"), ({"frequency_penalty": 0.1}, "0.2")])
def test_what_helps_against_a_loop_is_a_higher_penalty_first(had, more):
    (note,) = loop_notes(Turn("", (), "loop", some_stats(sampling=had), Repetition(4, 320)))
    assert f"tokens; --set sample.frequency_penalty={more} (in a chat /set frequency_penalty {more})" in note
    assert note.index("penalty") < note.index("another model")


@pytest.mark.parametrize(("new", "shown"), [(31, False), (32, True)])
def test_no_rate_over_a_few_tokens(new, shown):
    stats = some_stats()
    stats.new = new
    turn = Turn("", (), "stop", stats)
    for text in (*one_line_summary(turn, 200), summary(turn, 200)[0], row(100, stats)):
        speed = text.replace("– tok/s", "").partition("KV")[0]
        assert ("tok/s" in speed, "×" in speed) == (shown, shown and "plain" in text)
    assert ("tok/s" in bar(100, Read(new, 2000, 0, 0.8))) == shown


@pytest.mark.parametrize("width", [40, 57, 80])
def test_the_summary_wraps_between_its_parts(width):
    lines = summary(Turn("", (), "stop", some_stats()), width)
    assert all(text_width(line) < width and line.startswith("  ") for line in lines)


def test_the_header():
    opening = HeaderFacts("0.1.0", "fafo", "exact", 2048, 425 << 20, 2)
    assert header(fake_info(), opening, 80) == [
        "kvcli 0.1.0 · demo (bundled, toy answers) · fafo (exact) · cpu, 2 threads",
        "context 2,048 (model limit 2,048) · estimated memory 425 MiB · /help",
    ]


# --- wrapping


@given(st.text("ab 漢é\t\n", max_size=120), st.integers(3, 40), st.data())
def test_lines_do_not_depend_on_how_the_text_arrives(text, width, data):
    whole, piecewise = Wrapper(), Wrapper()
    lines = whole.feed(text, width)
    at, pieces = 0, []
    while at < len(text):
        size = data.draw(st.integers(1, 7))
        pieces += piecewise.feed(text[at : at + size], width)
        at += size
    assert [*lines, whole.rest()] == [*pieces, piecewise.rest()]


@given(st.text("ab 漢é\n", max_size=120), st.integers(3, 40))
def test_no_letter_is_lost_and_no_line_too_long(text, width):
    wrapper = Wrapper()
    lines = [*wrapper.feed(text, width), *wrapper.rows(width)]
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(text_width(line) <= width for line in lines)


def test_words_stay_whole_where_they_fit():
    assert fold("one two three", 9) == ["one two", "three"]
    assert fold("xxxxxxxxxxxx yy", 5) == ["xxxxx", "xxxxx", "xx yy"]
    assert fold("    indented_and_long", 10) == ["    indent", "ed_and_lon", "g"]


def test_tabs_count_as_columns():
    wrapper = Wrapper()
    assert wrapper.feed("漢\tx\n", 40) == ["漢" + " " * (TAB - 2) + "x"]


# --- Markdown of answers

MARKDOWN = """\
# Title

Some **bold** text with `code`, List<int>, \\(x\\), 2 * 3 * 4, &amp; and [a link](https://x.y/z), long enough to wrap.
Second line.

9. Ninth
10. **Tenth**, which is longer than a narrow terminal
    - nested

      ```
      deep  code
      ```

```python
def f(a,   b):
    return "**a line of code that is longer than the terminal, whatever its width, and no line of it is broken**"
```

| a | b |
|---|---|
| 1 | two |

end \x1b]0;title\x07 <think>
"""
SHOWN = """\
Title

Some bold text with code, List<int>, \\(x\\), 2 * 3 * 4, &amp;
and a link (https://x.y/z), long enough to wrap.
Second line.

9. Ninth
10. Tenth, which is longer than a narrow terminal
    • nested

      ```
      deep  code
      ```

```python
def f(a,   b):
    return "**a line of code that is longer than the terminal, whatever its width, and no line of it is broken**"
```

 a  b
 ──────
 1  two

end ␛]0;title␇ <think>"""


CODE = next(line for line in MARKDOWN.split("\n") if line.startswith("    return"))


def rendered(text: str, width: int, size: int) -> list[str]:
    wrapper = MarkdownWrapper()
    lines = [line for at in range(0, len(text), size) for line in wrapper.feed(text[at : at + size], width)]
    return [*lines, *wrapper.flush(width)]


@pytest.mark.parametrize("size", [1, 13, 999])
def test_markdown_is_rendered_however_it_arrives_and_code_is_unchanged(size):
    assert re.sub(r"\x1b\[[\d;]*m", "", "\n".join(rendered(MARKDOWN, 62, size))) == SHOWN


@pytest.mark.parametrize("width", [39, 79, 199])
def test_rendered_lines_fit_and_only_colours_control_the_terminal(width):
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in rendered(MARKDOWN, width, 5)]
    assert "\x1b" not in "".join(lines)
    assert [line for line in lines if text_width(line) > width] == [CODE] * (len(CODE) > width)


@given(st.text("ab# *_-`>1.|\\n<&[](:", max_size=60), st.integers(20, 40))
def test_markdown_loses_no_letter(text, width):
    shown = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(rendered(text, width, 3)))
    assert Counter(re.findall("[ab<&:]", text)) <= Counter(re.findall("[ab<&:]", shown))


@pytest.mark.parametrize("marks", [">" * 25, "> " * 60, "> - " * 20])
def test_text_of_a_deep_quote_is_shown(marks):
    wrapper = MarkdownWrapper()
    shown = wrapper.feed(f"{marks}deep\n> more\n\nend\n", 40) + wrapper.flush(40)
    assert all(word in "".join(shown) for word in ("deep", "more", "end"))


def test_lines_of_one_list_are_parsed_only_where_a_block_may_begin(monkeypatch):
    wrapper, parsed = MarkdownWrapper(), []
    blocks = wrapper._blocks
    monkeypatch.setattr(wrapper, "_blocks", lambda lines: parsed.append(len(lines)) or blocks(lines))
    for depth in range(100):
        wrapper.feed(f"{'  ' * depth}- item\n", 80)
    assert max(parsed) == 1


def test_an_empty_list_item_has_its_mark_and_a_deep_list_ends():
    assert rendered("7.\n\n-\n", 39, 99) == ["7.", "", "•"]
    assert "".join(rendered("- " * 999 + "end", 39, 99)).endswith("end")


def test_a_line_that_fills_its_row_is_one_space_longer():
    """A terminal that clears the rest of a full row clears its last character."""
    assert rendered("```\nabcdefgh\nabc\n```\n", 7, 99) == ["```", "abcdefgh ", "abc", "```"]


# --- errors


def err(width=80, unicode=True):
    stream = io.StringIO()
    return Terminal(stream, lambda: width, unicode=unicode), stream


def test_an_error_is_that_of_the_design():
    terminal, stream = err()
    error = ContextOverflow(
        "the chat is longer than the context window",
        lines=["prompt 38,912 tokens + answer 1,024 tokens > 26,112 (fitted for fafo on 11.6 GiB)"],
        try_=["-P lean --ctx 40960", "a smaller -n", "/drop 1"],
    )
    print_error(terminal, error)
    assert stream.getvalue().split("\n") == [
        "error: the chat is longer than the context window            [context_overflow]",
        "  prompt 38,912 tokens + answer 1,024 tokens > 26,112 (fitted for fafo on 11.6",
        "  GiB)",
        "  try: -P lean --ctx 40960   ·   a smaller -n   ·   /drop 1",
        "",
    ]


def test_on_a_narrow_terminal_each_way_out_has_its_line():
    terminal, stream = err(40)
    ways = ["kvcli fit x --all", "kvcli engine plan x"]
    print_error(terminal, DoesNotFit("not enough memory to load Qwen/Qwen3-32B", try_=ways))
    assert stream.getvalue().split("\n") == [
        "error: not enough memory to load",
        "       Qwen/Qwen3-32B    [does_not_fit]",
        "  try: kvcli fit x --all",
        "       kvcli engine plan x",
        "",
    ]


def test_names_in_errors_cannot_steer_the_terminal():
    terminal, stream = err()
    print_error(terminal, ContextOverflow("no \x1b[2J", lines=["\x1b]0;x\x07"], try_=["a\nb\x1b"]))
    print_note(terminal, "\x9b1m")
    assert not set(stream.getvalue()) & {"\x1b", "\x07", "\x9b"}


def test_ascii_where_the_stream_has_nothing_else():
    terminal, stream = err(unicode=False)
    terminal.line((f"{FULL} 3.9× ·", "dim"))
    assert stream.getvalue() == f"{FULL} 3.9x *\n"


# --- tables


MIXED = {"sources": {"prompt-lookup": 36, "lookahead": 2, "stand": 0}, "lookahead_rows": 150, "free_rows": 8}


def test_spec_is_that_of_the_design():
    assert spec_table(some_stats(**MIXED), 110) == [
        "drafting: 73% of passes, acceptance length 3.00 → 2.46 tokens per pass     (26 passes, 7 without a draft)",
        "accepted  0  ████ 4     position       1     2     3     4",
        "          1  ███ 3      accepted     79%   63%   42%   16%",
        "          2  ████ 4",
        "          3  █████ 5    drafts      38 of 61 (62%) accepted",
        "          4  ███ 3      sources     prompt-lookup 36 · lookahead 2",
        "                        rows        9.1 per pass, 150 lookahead rows in all; up to 8 take at most 10% longer",
        "                        paused      0 passes",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 81])
@pytest.mark.parametrize("why", ["they cost too much", "a pass of nine rows takes longer than it gained, measured"])
def test_spec_breaks_between_words(width, why):
    stats = some_stats(**MIXED, lookahead_why=why, paused_passes=4, paused_why=why)
    lines = spec_table(stats, width)
    assert max(map(text_width, lines)) < width
    words = {word for line in lines for word in line.split()}
    said = "150 lookahead rows in all; up to 8 take at most 10% longer"
    assert {*said.split(), *why.split()} <= words


def test_spec_says_why_lookahead_rows_rest():
    lines = spec_table(some_stats(lookahead_why="they cost too much"), 80)
    assert any(line.endswith("lookahead   paused: they cost too much") for line in lines)


@pytest.mark.parametrize("width", [40, 60, 76, 80, 120, 200])
@pytest.mark.parametrize("depth", [1, 5, 33])
def test_spec_fits(width, depth):
    stats = some_stats(histogram=[1000 - i for i in range(depth)])
    assert max(map(text_width, spec_table(stats, width))) < width


def test_spec_without_drafts_says_so():
    assert spec_table(Stats(passes=20, paused_passes=5), 80) == [
        "no pass carried a draft (20 passes; drafting was paused for 5)"
    ]


def test_kv_by_layer_and_tier():
    rows = [{"layer": i, "tier": "dense", "slots": 1976, "nbytes": 9 << 20} for i in range(2)]
    assert columns(kv_table(rows)) == [
        "layer   tier  slots     bytes",
        "0-1    dense  1,976  18.0 MiB",
        "total                18.0 MiB",
    ]


def test_kv_has_a_row_for_layers_that_differ():
    slides, sees_all = (
        {"tier": "cpu", "slots": 512, "nbytes": 1 << 20},
        {"tier": "cpu", "slots": 1976, "nbytes": 4 << 20},
    )
    rows = [{"layer": i, **(sees_all if i % 3 == 2 else slides)} for i in range(6)]
    rows.append({"layer": 5, "tier": "host", "slots": 1976, "nbytes": 4 << 20})
    assert columns(kv_table(rows)) == [
        "layer     tier  slots     bytes",
        "0-1, 3-4   cpu    512   4.0 MiB",
        "2, 5       cpu  1,976   8.0 MiB",
        "5         host  1,976   4.0 MiB",
        "total                  16.0 MiB",
    ]


def test_tokens_by_message():
    lines = token_table([("question 1", 14), ("file a\x1bb.md", 1024)], 2048, 80)
    assert lines == [
        "question 1           14     1 %",
        "file a\x1bb.md       1,024    50 %",
        "total             1,038    51 %",
        "1,010 of 2,048 left",
    ]


def test_a_long_name_is_cut_and_the_cut_is_marked():
    assert clip("漢字かな", 5) == "漢字…"


def test_the_guide_shows_what_is_shown():
    page = Path(__file__).parents[1].joinpath("docs", "chat.md").read_text(encoding="utf-8")
    assert f"\n{FULL}\n" in page
    assert "\n".join(spec_table(some_stats(**MIXED), 110)) in page


# --- a turn, without a terminal and without a clock


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self):
        return self.now


@dataclass
class Fake:
    """A screen that is one terminal of `width` columns."""

    width: int = 60
    clock: Clock = field(default_factory=Clock)
    stream: io.StringIO = field(default_factory=io.StringIO)

    def screen(self, stats="live", quiet=False):
        terminal = Terminal(self.stream, lambda: self.width, True, True, True)
        return Screen(terminal, terminal, stats, quiet, self.clock, None, shared=True)


def test_the_bar_comes_after_a_moment_and_the_row_with_the_first_word():
    fake, stats = Fake(), Stats()
    view = TurnView(fake.screen(), RowOptions("fafo", lambda: None))
    view.on(Live(stats))
    view.on(Read(50, 100, 0, 0.1))
    view.tick()
    assert "reading" not in fake.stream.getvalue()
    fake.clock.now = 0.5
    view.tick()
    assert "50 of 100" in fake.stream.getvalue()
    stats.new = 2
    view.on(Text("hello", (1, 2)))
    view.tick()
    assert fake.stream.getvalue().rsplit("\r", 2)[1].startswith("\x1b[?7lhello█\x1b[K\n")


def test_nothing_is_written_when_nothing_changed():
    fake = Fake()
    view = TurnView(fake.screen(), RowOptions("fafo", lambda: None))
    view.on(Text("hello", (1,)))
    view.tick()
    written = fake.stream.getvalue()
    view.tick()
    assert fake.stream.getvalue() == written


def test_a_turn_that_fails_leaves_what_was_said():
    fake = Fake()

    def events():
        yield Text("half an ans", (1,))
        raise DoesNotFit("out of memory")

    with pytest.raises(DoesNotFit):
        show_turn(events(), fake.screen(), LOOK)
    assert "half an ans" in fake.stream.getvalue()
    assert fake.stream.getvalue().endswith("\x1b[?25h")


def test_closing_the_stream_is_left_to_nobody_else():
    closed = []

    def events():
        try:
            yield Text("a", (1,))
            yield Text("b", (1, 2))
        finally:
            closed.append(True)

    class Broken(Terminal):
        def write(self, text):
            raise BrokenPipeError

    broken = Broken(io.StringIO(), lambda: 80)
    with pytest.raises(BrokenPipeError):
        show_turn(events(), Screen(broken, broken))
    assert closed == [True]


def test_the_answer_alone_goes_to_a_pipe_and_figures_to_the_other_stream():
    out, figures = io.StringIO(), io.StringIO()
    screen = Screen(Terminal(out, lambda: 80), Terminal(figures, lambda: 80))
    turn = show_turn(FakeModel(answer="a\x1bb  \n").stream("x"), screen, LOOK)
    assert out.getvalue() == turn.text == "a\x1bb  \n"
    assert figures.getvalue().startswith("  1 token in")


def test_a_turn_that_was_stopped_before_its_first_word_has_no_summary():
    fake = Fake()
    turn = Turn("", (), "interrupted", Stats(prompt=5))
    assert show_turn(iter([End(turn)]), fake.screen(), LOOK) is turn
    assert "tokens" not in fake.stream.getvalue()


def test_a_note_while_the_rows_are_shown_lands_above_them():
    fake = Fake()
    screen = fake.screen()
    view = TurnView(screen, RowOptions("fafo", lambda: None))
    view.on(Text("hello", (1,)))
    view.tick()
    print_note(screen.err, "by the way")
    last = fake.stream.getvalue().rsplit("\r", 2)[1]
    assert last.index("by the way") < last.index("hello")


def test_a_timer_that_comes_late_does_not_leave_the_row_behind(monkeypatch):
    @contextmanager
    def late(tick):
        yield
        tick()

    monkeypatch.setattr("kvcli.render.turn.turn_view.ticking", late)
    fake, stats = Fake(), Stats(new=2, passes=1)
    view = TurnView(fake.screen(), RowOptions("fafo", lambda: None))
    with view.running():
        view.on(Live(stats))
        view.on(Text("hello", (1, 2)))
    assert not view.region.is_open
    assert fake.stream.getvalue().endswith("\x1b[?25h")
