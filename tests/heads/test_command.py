"""`kvcli profile-heads` as a user types it, on the demo model."""

from __future__ import annotations

import json
import re
import stat
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest
from pydantic import TypeAdapter

from kvcli.commands.common import exits
from kvcli.heads.report import Strip
from kvcli.render.heads.html import _cards, html
from kvcli.render.heads.text import facts, heads_lines
from kvcli.render.terminal.terminal import codes, text_width
from kvcli.schemas.documents import DOCUMENTS
from kvcli.schemas.heads import HeadsDocument
from kvcli.settings.profile import Profile
from tests.fakes import Machine

SHORT = ("--context", "300")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One run of everything: where it went, and what it printed."""
    folder = tmp_path_factory.mktemp("heads")
    machine = Machine(folder)
    emit = "html,json,npz,tsv,md,toml"
    done = machine("profile-heads", "demo", "--probe", "all", *SHORT, "--texts", "1", "--emit", emit, "--out", "it")
    assert (done.exit, done.err.count("wrote ")) == (0, 1), done.err
    return folder / "it", done


def document(folder):
    text = (folder / "profile.json").read_text()
    TypeAdapter(DOCUMENTS["heads"]).validate_json(text, strict=True)
    return HeadsDocument.model_validate_json(text)


def test_all_probes_and_all_files(made):
    folder, done = made
    names = {p.name for p in folder.iterdir()}
    assert names == {
        "heads.html", "profile.json", "profile.npz", "full_attention_heads.tsv", "config.json",
        "retrieval_heads.json", "heads.md", "profile.toml",
    }  # fmt: skip
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in folder.iterdir())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert done.out.splitlines()[-1].endswith("-P fastgen --set policy.headmap=it/profile.json")
    held = document(folder)
    assert {tuple(head) for head in held.suggest.full} == {(2, 0), (2, 1)}
    assert "text" not in held.prompt.model_dump()
    assert "L02H0" in (folder / "heads.md").read_text()


def test_the_map_works_in_a_profile(made, machine):
    folder, _ = made
    headmap = f"policy.headmap={folder / 'profile.json'}"
    ask = ("chat", "demo", "-f", "demo:report", "-p", "What is the depth of well Volras?", "--stats", "off")
    done = machine(*ask, "-P", "fastgen", "--set", headmap)
    assert (done.exit, done.out) == (0, "The depth of well Volras is 256 metres.\n")
    checked = machine("profiles", "check", str(folder / "profile.toml"))
    assert (checked.exit, checked.err) == (0, "")


def test_json_is_the_document_and_nothing_is_written(machine, tmp_path):
    done = machine("profile-heads", "demo", *SHORT, "--json", "--emit", "none")
    (line,) = done.out.splitlines()
    TypeAdapter(DOCUMENTS["heads"]).validate_json(line, strict=True)
    found = json.loads(line)
    assert (found["ranked_by"], found["probes"], found["check"]) == ("prompt", ["prompt"], None)
    assert (done.err, list(tmp_path.glob("heads-*"))) == ("", [])


@pytest.mark.parametrize("columns", ["40", "80", "200"])
@pytest.mark.parametrize("show", ["policy", "far"])
def test_no_line_is_wider_than_the_terminal(machine, columns, show):
    machine.environ["COLUMNS"] = columns
    done = machine("profile-heads", "demo", *SHORT, "--show", show, "--emit", "none")
    assert (done.exit, done.err) == (0, "")
    assert max(map(text_width, done.out.splitlines())) < int(columns)
    assert len(re.findall(r"^ L\d ", done.out, re.MULTILINE)) == 6
    assert " ".join(done.out.split()).endswith("--probe ablate")


def wide(made, heads=32, layers=40):
    """The same document as if the model were larger."""
    folder, _ = made
    held = document(folder).model_dump()
    held |= {"layers": layers, "kv_heads": heads, "probed": list(range(layers)), "windows": [None] * layers}

    def grown(table):
        return [[table[layer % 6][head % 2] for head in range(heads)] for layer in range(layers)]

    held["heads"] = grown(held["heads"])
    held["scalars"] = {name: grown(table) for name, table in held["scalars"].items()}
    held["offsets"] = grown(held["offsets"])
    policy = held["policy"]
    policy["chosen"], policy["cost"] = grown(policy["chosen"]), [grown(table) for table in policy["cost"]]
    policy["mass"] = {name: [grown(table) for table in tables] for name, tables in policy["mass"].items()}
    return HeadsDocument.model_validate(held)


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("look", ["truecolor", "shade", "digit"])
def test_more_heads_than_columns_go_on_below(made, width, look):
    for show in ("policy", "retrieval"):
        lines = ["".join(text for text, _ in spans) for spans in heads_lines(wide(made), show, 5, width, look, "it")]
        assert max(map(text_width, lines)) < width
        blocks = [line for line in lines if line.startswith("heads ")]
        assert bool(blocks) == (width < 110)
        seen = [int(n) for line in lines if re.fullmatch(r"\s+\d[\d ]*", line) for n in line.split()]
        assert seen == list(range(32))


def test_plain_is_a_table_of_letters_or_digits(machine):
    done = machine("profile-heads", "demo", *SHORT, "--plain", "--emit", "none")
    rows = [line.split("\t") for line in done.out.splitlines()]
    assert rows[0] == ["layer", "h0", "h1", "kept"]
    assert [row[0] for row in rows[1:]] == list("012345")
    assert all(re.fullmatch(r"[SPNLHhBbF]", cell) for row in rows[1:] for cell in row[1:3])
    digits = machine("profile-heads", "demo", *SHORT, "--plain", "--show", "sink", "--emit", "none", "--layers", "3")
    assert re.fullmatch(r"3\t\d\t\d\t[\d.]+", digits.out.splitlines()[1])


def test_colour_is_true_where_the_terminal_says_so(machine):
    machine.environ |= {"COLORTERM": "truecolor", "TERM": "xterm"}
    args = ("profile-heads", "demo", *SHORT, "--emit", "none", "--show", "far")
    assert "\x1b[48;2;" in machine(*args, tty=("stdout",)).out
    assert "\x1b" not in machine(*args).out
    assert "\x1b" not in machine(*args, "--no-color", tty=("stdout",)).out
    assert codes("#ffffff on #010203") == "38;2;255;255;255;48;2;1;2;3"


def test_what_is_replaced_is_named(machine):
    first = machine("profile-heads", "demo", *SHORT, "--emit", "json")
    again = machine("profile-heads", "demo", *SHORT, "--emit", "json,md")
    assert first.err == "wrote profile.json in heads-demo/\n"
    assert again.err == "wrote heads.md; replaced profile.json in heads-demo/\n"
    assert machine("profile-heads", "demo", *SHORT, "--emit", "json", "-q").err == ""


def test_compare_with_an_earlier_run_and_with_another_tools_table(made, machine):
    folder, _ = made
    for run in (folder, folder / "profile.json", folder / "full_attention_heads.tsv"):
        args = ("--probe", "ablate", *SHORT, "--texts", "1", "--compare", str(run), "--emit", "html", "--json")
        found = json.loads(machine("profile-heads", "demo", *args).out)["compare"]
        assert found["spearman"] > 0.99
        assert max(abs(value) for row in found["difference"] for value in row) < 1e-5
    assert "Against" in (machine.folder / "heads-demo" / "heads.html").read_text()


def test_several_files_are_read_and_hide_the_facts(machine, tmp_path):
    for name in ("a.txt", "b.md"):
        (tmp_path / name).write_text(" ".join(f"The crew {name} went to place {i} in the evening." for i in range(60)))
    args = (
        "--prompt",
        "a.txt",
        "--prompt",
        "b.md",
        "--probe",
        "prompt,needle",
        "--texts",
        "1",
        "--json",
        "--emit",
        "html",
    )
    found = json.loads(machine("profile-heads", "demo", *SHORT, *args).out)
    assert found["prompt"]["name"] == "a.txt, b.md"
    assert found["prompt"]["tokens"] <= 300
    assert "The crew" not in json.dumps({k: v for k, v in found.items() if k != "top"})


@pytest.mark.parametrize(
    ("args", "exit", "said"),
    [
        (("--probe", "prompts"), 2, "--probe ablate"),
        (("--probe", ""), 2, "--probe names no probe"),
        (("--recovery", "0.9", "--keep", "0.5"), 2, "exclude each other"),
        (("--recovery", "1.5"), 2, "--recovery 0.5"),
        (("--keep", "0"), 2, "a share above 0"),
        (("--criterion", "max"), 2, "cvar10"),
        (("--show", "needle"), 2, "needs --probe needle"),
        (("--show", "colour"), 2, "--show policy"),
        (("--layers", "4-2"), 2, "--layers 0-11"),
        (("--layers", "6"), 2, "the model has 6"),
        (("--emit", "pdf"), 2, "--emit none"),
        (("--emit", "toml"), 2, "--emit json,toml"),
        (("--context", "9k"), 6, "--context 8192"),
        (("--context", "32"), 2, "the minimum"),
        (("--stability", "8", "--probe", "ablate"), 2, "--probe prompt"),
        (("--texts", "3"), 2, "--probe ablate"),
        (("--top", "-1"), 2, "--top 0"),
        (("--prompt", "missing.txt"), 3, "missing.txt"),
        (("--compare", "nothing"), 3, "nothing"),
        (("--out", "file"), 3, "it is a file"),
    ],
)
def test_what_cannot_be_is_refused_in_words(machine, tmp_path, args, exit, said):
    (tmp_path / "file").write_text("mine")
    done = machine("profile-heads", "demo", *args)
    assert (done.exit, done.out) == (exit, "")
    assert said in " ".join(done.err.split())
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "heads-demo").exists()


def test_ctrl_c_leaves_nothing_half_written(machine, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(exits.Interrupt, "__call__", lambda self: calls.append(0) or len(calls) > 3)
    done = machine("profile-heads", "demo", "--probe", "all", *SHORT)
    assert (done.exit, done.out) == (130, "")
    assert not (tmp_path / "heads-demo").exists()


class Page(HTMLParser):
    """What a page holds."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self._in = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self._in = True
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag):
        self._in = self._in and tag != "script"

    def handle_data(self, data):
        if self._in:
            attrs, text = self.scripts[-1]
            self.scripts[-1] = (attrs, text + data)


def test_the_page_fetches_nothing_and_runs_only_its_own_script(made):
    folder, _ = made
    page = Page((folder / "heads.html").read_text())
    assert not [attrs for _, attrs in page.tags if {"src", "href", "action", "srcset"} & attrs.keys()]
    assert not [attrs for _, attrs in page.tags for name in attrs if name.startswith("on")]
    (policy,) = [a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    data, script = page.scripts
    assert data[0]["type"] == "application/json"
    digest = b64encode(sha256(script[1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert re.findall(r"https?://[^\"']+", script[1]) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    held = json.loads(data[1])
    assert held["strip"]["tokens"] == len(held["strip"]["texts"])
    assert "".join(held["strip"]["texts"]).count("Field report") == 1


def test_no_token_and_no_name_breaks_out_of_the_page(made):
    folder, _ = made
    held = document(folder)
    held.model, held.notes = "<b>x</b>", ["</script><script>alert(1)</script>"]
    texts = ["</script>", "<!--", "\u202e", "&amp;", "a\nb"]
    strip = Strip(texts, [0] * 5, [2], 1, 5, {layer: [bytes(5)] * 2 for layer in range(6)})
    text = html(held, strip)
    page = Page(text)
    assert len(page.scripts) == 2
    assert json.loads(page.scripts[0][1])["strip"]["texts"][:2] == ["</script>", "<!--"]
    assert "\u202e" not in text
    assert ("b", {}) not in page.tags


def test_the_page_says_its_words_and_what_to_type(made):
    folder, _ = made
    page = Page((folder / "heads.html").read_text())
    text = (folder / "heads.html").read_text()
    words = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    assert {"special", "punct", "frequent", "local", "full", "mass recovered", "cvar10", "sink", "far", "n90"} <= {
        *words
    }
    assert all(len(meaning.split()) >= 5 for meaning in words.values())
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles[-2:] == ["The words", "What to type next"]
    typed = re.findall(r"<code>(.*?)</code>", text)
    assert re.fullmatch(r"kvcli chat demo -P fastgen --set policy.headmap=\S*it/profile.json", typed[-1])
    assert [t for t, _ in page.tags if t == "dl"] == ["dl"]


def test_what_the_page_shows_large_is_not_said_again(made):
    folder, _ = made
    found = document(folder)
    large = [small for _, _, small in _cards(found)]
    assert f"{100 * found.policy.kept:.1f} % of the tokens are kept" in large[0]
    assert set(facts(found, beside=True)) < set(facts(found))
    assert not any("policies keep" in text for text in facts(found, beside=True))


def test_no_two_policies_have_one_colour():
    from kvcli.render.heads.cells import _LETTER, PALETTE, ink

    assert len(set(PALETTE.values())) == len(PALETTE)
    for letter in {*_LETTER.values()}:
        assert PALETTE[letter] != PALETTE.get(letter.lower(), "")
    doubled = [letter for letter in set(_LETTER.values()) if list(_LETTER.values()).count(letter) > 1]
    assert sorted(doubled) == ["B", "H"]
    assert all(letter.lower() in PALETTE for letter in doubled)  # the second of two that share one
    assert {ink(colour) for colour in PALETTE.values()} == {"#000000", "#ffffff"}


def test_profiles_own_settings_count(machine):
    """A profile whose policy is FastGen brings its candidates and its budget."""
    done = machine("profile-heads", "demo", "-P", "fastgen", *SHORT, "--json", "--emit", "none")
    found = json.loads(done.out)["policy"]
    settings = Profile.load("fastgen").policy.settings
    assert found["keep"] == settings.keep
    assert found["kept"] <= settings.keep + 0.1
    other = machine("profile-heads", "demo", "-P", "fastgen", *SHORT, "--recovery", "0.9", "--json", "--emit", "none")
    assert json.loads(other.out)["policy"]["recovery"] == 0.9


def test_heads_that_the_profiles_map_names_are_full(made, machine):
    folder, _ = made
    headmap = ("--set", f"policy.headmap={folder / 'full_attention_heads.tsv'}")
    done = machine("profile-heads", "demo", "-P", "fastgen", *headmap, *SHORT, "--json", "--emit", "none")
    found = json.loads(done.out)["policy"]
    assert found["forced"] == [[2, 0], [2, 1]]
    assert [found["candidates"][c] for c in found["chosen"][2]] == ["full", "full"]
    (machine.folder / "other.tsv").write_text("1 0\n")
    done = machine("profile-heads", "demo", "-P", "fastgen", "--set", "policy.headmap=other.tsv", *SHORT)
    assert done.exit == 3


def test_the_name_that_others_use_is_understood(machine):
    assert "kvcli profile-heads" in machine("heads").err
