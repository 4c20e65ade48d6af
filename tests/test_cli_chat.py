"""`kvcli chat` with one question: where it comes from, what goes to which stream, what is refused, and the JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from kvcli.api import End, Turn
from kvcli.commands.common import document_files
from kvcli.commands.common.run_setup import Setup
from kvcli.demo import weights_dir
from kvcli.engine.sequence.state import Repetition
from kvcli.engine.stats import Stats
from kvcli.schemas.documents import DOCUMENTS, json_schema
from kvcli.schemas.turn import Run, TurnDocument
from kvcli.settings import config
from kvcli.settings.conflicts import cautions
from kvcli.settings.schema import NO_PENALTY
from tests.demo_model.example import SAMPLES
from tests.fake_model import fake_info
from tests.fakes import Loaded, Machine

ROOT = Path(__file__).parents[1]
ANSWER = "It is 972 metres."
LONG = "Repeat this: " + "one two three four. " * 60


@pytest.fixture
def machine(tmp_path, monkeypatch):
    made = Machine(tmp_path)

    def load(self, profile, tell=None):
        made.model.cautions = cautions(profile, "cpu")
        return made.load(profile)

    monkeypatch.setattr(Setup, "load", load)
    return made


def asked(machine):
    return "".join(map(chr, machine.model.prompts[-1]))


# --- where the question comes from


def test_the_answer_alone_on_stdout_and_figures_on_stderr(machine):
    done = machine("chat", "-p", "How deep?")
    assert (done.exit, done.out) == (0, f"{ANSWER}\n")
    assert "tokens in" in done.err


def test_what_a_profile_does_not_do_on_this_device_is_said(machine):
    done = machine("chat", "-p", "How deep?", "-P", "max-context")
    assert "memory.host = auto has no effect" in " ".join(done.err.split())


def test_no_escape_codes_outside_a_terminal(machine):
    machine.model.answer = "red \x1b[31m text"
    done = machine("chat", "-p", "Hi")
    assert done.out == "red \x1b[31m text\n"  # in a pipe the bytes are the model's
    assert "\x1b" not in done.err


def test_a_terminal_is_not_steered_by_the_answer(machine):
    machine.model.answer = "red \x1b[31m text"
    machine.environ["TERM"] = "dumb"
    assert "red ␛[31m text" in machine("chat", "-p", "Hi", tty=("stdout", "stderr")).out


@pytest.mark.parametrize("args", [[], ["-p", "-"]])
def test_stdin_is_the_question(machine, args):
    assert machine("chat", *args, stdin=b"How deep?\n").exit == 0
    assert "<user>How deep?\n<assistant>" in asked(machine)


def test_with_both_stdin_is_a_document_after_the_files(machine, tmp_path):
    (tmp_path / "a.md").write_text("Text A.\n")
    done = machine("chat", "-p", "How deep?", "-f", "a.md", stdin=b"Piped text.\n")
    assert "standard input is attached as a document: 12 bytes" in done.err
    assert "=== Document 1: a.md ===\nText A.\n\n=== Document 2: standard input ===\nPiped text.\n\nHow deep?" in asked(
        machine
    )


def test_empty_stdin_beside_a_question_is_nothing(machine):
    assert machine("chat", "-p", "How deep?", stdin=b"").exit == 0
    assert "<user>How deep?\n<assistant>" in asked(machine)


def test_system_text_from_flag_or_file(machine, tmp_path):
    (tmp_path / "s.txt").write_text("Be brief.\n")
    for args in (["-s", "Be brief."], ["--system-file", "s.txt"]):
        machine("chat", "-p", "Hi", *args)
        assert asked(machine).startswith("<system>Be brief.\n<user>Hi")


def test_an_empty_system_text_removes_that_of_a_saved_chat(machine):
    machine("chat", "-s", "Be brief.", "-p", "Hi")
    for more, has in ((), True), (("-s", ""), False), ((), False):
        machine("chat", "-c", *more, "-p", "And?")
        assert ("Be brief." in asked(machine)) is has


def test_flags_are_profile_keys_with_their_own_origin(machine):
    flags = ["--device", "cpu", "--dtype", "fp32", "--spec", "off", "-n", "4k", "-t", "0.5", "--top-p", "0.9"]
    flags += ["--top-k", "40", "--min-p", "0.1", "--seed", "7", "--repetition-penalty", "1.1", "--ctx", "1.5k"]
    plan = json.loads(machine("chat", "--dry-run", "--json", *flags, "--allow-pickle").out)
    settings, origins = plan["settings"], plan["origins"]
    assert settings["sample.max_new_tokens"] == 4096
    assert settings["context.limit"] == plan["context"] == 1536
    assert (settings["sample.temperature"], origins["sample.temperature"]) == (0.5, "--temperature")
    assert (settings["load.allow_pickle"], origins["load.allow_pickle"]) == (True, "--allow-pickle")
    assert sorted(origin for origin in origins.values() if origin.startswith("--")) == sorted(
        ["--device", "--dtype", "--spec", "--max-new-tokens", "--temperature", "--top-p", "--top-k", "--min-p",
         "--seed", "--repetition-penalty", "--ctx", "--allow-pickle"]
    )  # fmt: skip


def test_who_names_a_model_that_drafts_names_the_method(machine):
    plan = json.loads(machine("chat", "--dry-run", "--json", "--draft", "demo", "-P", "fafo").out)
    assert {key: plan["settings"][key] for key in ("spec.method", "spec.model")} == {
        "spec.method": "model", "spec.model": "demo"
    }  # fmt: skip
    assert {plan["origins"][key] for key in ("spec.method", "spec.model")} == {"--draft"}
    assert "exclude each other" in machine("chat", "--dry-run", "--draft", "demo", "--spec", "off").err


def test_a_model_that_drafts_and_a_method_that_was_typed_exclude_each_other(machine):
    asked = ("chat", "--dry-run", "--draft", "demo", "--set")
    for method in ("off", "ngram", "self"):
        run = machine(*asked, f"spec.method={method}")
        assert f"--draft and spec.method={method} (--set) exclude each other" in run.err
        assert run.exit == 2
    assert machine(*asked, "spec.method=model").exit == 0
    machine.environ["KVCLI_SPEC__METHOD"] = "off"
    assert "spec.method=off (env KVCLI_SPEC__METHOD) exclude each other" in machine(*asked, "spec.depth=3").err


def test_a_budget_that_is_typed_brings_the_policy_that_spends_it(machine):
    asked = ("chat", "--dry-run", "--json", "--budget", "25%")
    for profile in ("exact", "ngram", "budget"):
        plan = json.loads(machine(*asked, "-P", profile).out)
        assert {key: plan["settings"][key] for key in ("policy.name", "memory.budget", "exactness")} == {
            "policy.name": "budget", "memory.budget": "25%", "exactness": "approx"
        }  # fmt: skip
        assert {plan["origins"][key] for key in ("policy.name", "memory.budget", "exactness")} == {"--budget"}


def test_a_budget_is_refused_where_something_else_forgets_or_nothing_may(machine):
    asked = ("chat", "--dry-run", "--budget", "25%")
    run = machine(*asked, "-P", "snap")
    assert "--budget and profile snap exclude each other: its policy is snap" in run.err
    assert "-P exact --budget 25%" in run.err
    for typed in ("policy.name=snap", "exactness=exact"):
        assert f"--budget and {typed} (--set) exclude each other" in machine(*asked, "--set", typed).err
    run = machine(*asked, "--set", "memory.budget=30%")
    assert "--budget and memory.budget=30% (--set) exclude each other" in run.err
    assert machine(*asked, "--set", "memory.budget=25%").exit == 0
    run = machine(*asked, "--exact")
    assert "[not_exact]" in run.err
    assert "try: leave --budget out\n" in run.err  # and nothing that cannot be typed beside it
    assert '"much" is not allowed' in machine("chat", "--dry-run", "--budget", "much").err
    for profile in ("balanced", "cpu", "lean", "max-context"):
        run = machine(*asked, "-P", profile)
        assert "sets kv.k_bits, which quantizes by age" in run.err
        assert "try: --set kv.k_bits=16 --set kv.v_bits=16" in run.err
        assert machine(*asked, "-P", profile, *"--set kv.k_bits=16 --set kv.v_bits=16".split()).exit == 0


def test_a_budget_of_a_comparison_leaves_the_baseline_as_it_is(machine):
    asked = ("bench", "demo", "--dry-run", "--json")
    plain, spent = (json.loads(machine(*asked, *more).out)["sides"] for more in ((), ("--budget", "25%")))
    assert [side["name"] for side in spent] == ["exact", "ngram"]
    assert [a["profile_hash"] == b["profile_hash"] for a, b in zip(plain, spent, strict=True)] == [True, False]


def test_profiles_that_are_named_under_a_budget_are_compared_with_a_baseline_that_has_none(machine):
    asked = ("bench", "demo", "--dry-run", "--json", "--profiles", "exact,ngram")
    plain, spent = (json.loads(machine(*asked, *more).out)["sides"] for more in ((), ("--budget", "25%")))
    assert [side["name"] for side in plain] == ["exact", "ngram"]
    assert [side["name"] for side in spent] == ["exact", "exact #2", "ngram"]
    assert spent[0]["profile_hash"] == plain[0]["profile_hash"]
    assert not {side["profile_hash"] for side in spent[1:]} & {side["profile_hash"] for side in plain}


def test_a_model_that_drafts_where_the_profile_drafts_nothing_is_said(machine):
    def said(profile):
        return " ".join(machine("chat", "-p", "How deep?", "-P", profile, "--draft", "demo").err.split())

    assert "exact does not draft; --draft adds draft model demo (same text)" in said("exact")
    assert "does not draft" not in said("ngram") + said("draft")


def test_a_method_that_is_set_in_a_chat_takes_the_place_of_the_model_that_drafts(tmp_path):
    flags = {"spec.method": ("model", "--draft"), "spec.model": ("x", "--draft")}
    setup = Setup(Machine(tmp_path).world(), "demo", flags)
    assert setup.profile.spec.model == "x"
    assert setup.resolve("ngram", ["spec.model=y"]).spec.model == "y"
    assert setup.resolve("ngram", ["spec.method=off"]).spec.method == "off"


def test_greedy_is_temperature_zero_and_no_penalty(machine):
    plan = json.loads(machine("chat", "--dry-run", "--json", "--greedy", "--stop", "a b", "--stop", "c").out)
    for key, value in {"temperature": 0.0, **NO_PENALTY}.items():
        assert (plan["settings"][f"sample.{key}"], plan["origins"][f"sample.{key}"]) == (value, "--greedy")
    assert (plan["settings"]["sample.stop"], plan["origins"]["sample.stop"]) == (["a b", "c"], "--stop")
    plan = json.loads(machine("chat", "--dry-run", "--json", "--greedy", "--repetition-penalty", "1.2").out)
    assert plan["settings"]["sample.repetition_penalty"] == 1.2


def test_no_save_reads_what_is_kept_and_keeps_nothing(machine, monkeypatch):
    reads, keeps, load = [], [], Setup.load
    monkeypatch.setattr(Setup, "load", lambda self, *more: reads.append(self.reuses) or load(self, *more))
    monkeypatch.setattr("kvcli.commands.chat.save_chat.save_kv_cache", lambda _: keeps.append(True) or "")
    for more in ((), ("--no-save",)):
        assert machine("chat", "-p", "Hi", "-n", "2", *more).exit == 0
    assert (reads, keeps) == ([True, True], [True])


@pytest.mark.parametrize("more", [(), ("--exact",), ("--draft", "demo-small"), ("-P", "lean")])
def test_a_run_reads_its_config_files_once(machine, monkeypatch, more):
    reads, read = [], config.read_files
    monkeypatch.setattr(config, "read_files", lambda sources: reads.append(sources) or read(sources))
    assert machine("chat", "-p", "Hi", *more).exit == 0
    assert len(reads) == 1


def test_what_exact_sets_is_said_to_come_from_it(machine):
    plan = json.loads(machine("chat", "--dry-run", "--json", "--exact").out)
    assert {key for key, origin in plan["origins"].items() if origin == "--exact"} == {
        "load.quant",
        "spec.require_batch_invariance",
    }


def test_dry_run_loads_nothing(machine, monkeypatch):
    monkeypatch.setattr(Setup, "load", None)
    done = machine("chat", "--dry-run", "-f", "demo:report")
    assert done.exit == 0
    assert "8,192 tokens" in done.out
    assert "demo:report" in done.out


def test_dry_run_counts_keys_and_values_as_the_profile_holds_them(machine):
    plans = [json.loads(machine("-P", name, "--json", "chat", "--dry-run").out) for name in ("exact", "lean")]
    exact, lean = (plan["kv_bytes"] for plan in plans)
    assert 0 < lean < exact / 2


@pytest.mark.parametrize(("mode", "shown"), [("off", False), ("turn", True), ("live", True)])
def test_stats_modes(machine, mode, shown):
    assert ("tokens in" in machine("chat", "-p", "Hi", "--stats", mode).err) == shown


# --- what is refused


@pytest.mark.parametrize(
    ("args", "stdin", "code", "words"),
    [
        ([], b"", "empty_prompt", "the prompt is empty"),
        ([], b" \n", "empty_prompt", "the prompt is empty"),
        (["-p", ""], b"", "empty_prompt", "the prompt is empty"),
        (["-p", "-"], b"", "empty_prompt", "the prompt is empty"),
        (["-p", "Hi", "-f", "missing.md"], b"", "file_missing", "no such file: missing.md"),
        (["-p", "Hi", "-f", "no/*.md"], b"", "file_count", "no/*.md: no documents"),
        (["-p", "Hi", "-f", "zero"], b"", "not_text", "zero byte at offset 2"),
        (["-p", "Hi", "-f", "latin"], b"", "bad_encoding", "byte 1, line 1"),
        (["-p", "Hi", "-f", "empty"], b"", "empty_file", "empty is empty"),
        (["-p", "Hi", "--system-file", "missing.md"], b"", "file_missing", "no such file"),
        (["-p", "Hi"], b"ok\n\xff", "bad_encoding", "standard input is not valid UTF-8: byte 3, line 2"),
        (["-p", "\udcff"], b"", "bad_encoding", "the prompt is not valid UTF-8"),
        (["-p", "Hi", "--log-file", "no/such/folder"], b"", "file_unwritable", "cannot write the log"),
    ],
)
def test_bad_input_exits_3_and_says_what_and_where(machine, tmp_path, args, stdin, code, words):
    (tmp_path / "zero").write_bytes(b"ab\0")
    (tmp_path / "latin").write_bytes(b"B\xe4ume")
    (tmp_path / "empty").write_bytes(b"")
    done = machine("chat", *args, stdin=stdin)
    assert (done.exit, done.out) == (3, "")
    assert f"[{code}]" in done.err
    assert words in " ".join(done.err.split())


def test_overflow_exits_6_with_the_numbers(machine):
    done = machine("chat", "-p", "x" * 3000)
    assert done.exit == 6
    assert "[context_overflow]" in done.err
    document = json.loads(machine("chat", "-p", "x" * 3000, "--json").out)
    assert (document["code"], document["exit"]) == ("context_overflow", 6)


def test_a_window_beyond_the_model_is_refused_and_not_shrunk(machine):
    done = machine("chat", "--dry-run", "--ctx", "100k")
    assert done.exit == 9
    assert "the limit is 8,192 tokens; --ctx sets 102,400" in " ".join(done.err.split())


@pytest.mark.parametrize("args", [["--no-input"], ["--json"]])
def test_a_terminal_without_a_question_where_nothing_may_be_asked(machine, args):
    done = machine("chat", *args, tty=("stdin", "stdout", "stderr"))
    assert done.exit == 3


def test_a_model_that_is_not_there_exits_4(tmp_path):
    done = Machine(tmp_path)("chat", "./nowhere", "-p", "Hi")
    assert done.exit == 4
    assert "./nowhere does not exist" in done.err


# --- JSON


def validate(name, document):
    TypeAdapter(DOCUMENTS[name]).validate_json(json.dumps(document), strict=True)
    schema = json_schema(name)
    assert schema["$schema"].startswith("https://json-schema.org")
    if "properties" in schema:
        assert set(document) == set(schema["properties"]) == set(schema["required"]) | {"schema"}


def test_a_turn_is_one_object(machine):
    done = machine("chat", "-p", "How deep?", "--json")
    (line,) = done.out.splitlines()
    document = json.loads(line)
    validate("turn", document)
    assert done.err == ""
    assert (document["schema"], document["text"], document["finish"]) == ("kvcli.turn/2", ANSWER, "stop")
    assert (document["profile"], document["exactness"]) == ("ngram", "exact")
    assert document["memory"]["estimate_bytes"] is None


THOUGHT = "Wells are deep.\nBut this one?"


def test_a_thought_is_shown_and_kept_beside_the_answer(machine):
    machine.model.thought = THOUGHT
    done = machine("chat", "-p", "How deep?")
    assert done.out == f"{ANSWER}\n"
    assert done.err.splitlines()[0].startswith("thought for 0")
    assert "Wells" not in done.err
    assert machine("chat", "-p", "How deep?", "--show-thinking").err.splitlines()[:2] == THOUGHT.splitlines()
    assert machine("chat", "-q", "-p", "How deep?").err == ""
    machine("chat", "-c", "-p", "Why?")
    assert "Wells" not in asked(machine)
    kept = json.loads(machine("chats", "show", "--json").out)
    assert [message["thinking"] for message in kept["messages"]][-4:] == ["", THOUGHT, "", THOUGHT]
    assert [message["text"] for message in kept["messages"]][1::2] == [ANSWER, ANSWER]
    assert json.loads(machine("chats", "list", "--json").out)["chats"][0]["documents"] == 0
    assert f"*Wells are deep. But this one?*\n\n{ANSWER}" in machine("chats", "show").out


def test_a_thought_has_a_field_and_an_event_of_its_own(machine):
    machine.model.thought = THOUGHT
    document = json.loads(machine("chat", "-p", "How deep?", "--json").out)
    assert (document["text"], document["thinking"]) == (ANSWER, THOUGHT)
    lines = machine("chat", "-p", "How deep?", "--json", "--stream").out.splitlines()
    events = [json.loads(line) for line in lines]
    TypeAdapter(DOCUMENTS["event"]).validate_json(lines[-2], strict=True)
    assert [e["text"] for e in events if e["event"] == "thinking"] == [THOUGHT]
    assert "".join(e["text"] for e in events if e["event"] == "text") == ANSWER


def test_an_answer_that_is_all_thought_says_so(machine):
    machine.model = Loaded(answer="", thought=THOUGHT)
    real = machine.model.stream

    def stream(*args, **options):
        for event in real(*args, **options):
            yield End(replace(event.turn, finish="length")) if isinstance(event, End) else event

    machine.model.stream = stream
    assert "were used for thinking" in machine("chat", "-p", "How deep?").err


@pytest.mark.parametrize("drafts", [True, False])
def test_figures_of_a_turn_agree_with_each_other(machine, drafts):
    machine.model = Loaded(answer=ANSWER * 9, drafts=drafts)
    document = json.loads(machine("chat", "-p", "How deep?", "--json").out)
    validate("turn", document)
    spec, tokens = document["spec"], document["tokens"]
    assert spec["accepted_tokens"] == sum(i * n for i, n in enumerate(spec["histogram"]))
    assert spec["drafted_passes"] == sum(spec["histogram"])
    assert spec["tokens_per_pass"] * spec["passes"] == pytest.approx(tokens["new"])
    if drafts:
        assert spec["mean_acceptance_length"] == 1 + spec["accepted_tokens"] / spec["drafted_passes"]
    else:
        assert spec["mean_acceptance_length"] is spec["acceptance_rate"] is None


def test_what_never_happened_is_null_and_not_zero():
    turn = Turn("", (), "interrupted", Stats(prompt=7, limit=100))
    document = TurnDocument.of(turn, fake_info(load_seconds=0.0), Run("exact")).document()
    validate("turn", document)
    assert document["time"]["first_token"] is document["time"]["load"] is None
    assert set(document["speed"].values()) == {None}
    assert document["spec"]["tokens_per_pass"] is document["spec"]["mean_acceptance_length"] is None
    assert document["memory"]["peak_bytes"] is None


def test_notes_are_in_the_json_too(machine):
    machine.model.tokenizer.chat_template = None
    document = json.loads(machine("chat", "-p", "How deep?", "--json").out)
    assert "no chat template" in document["events"][0]["text"]
    done = machine("chat", "-p", "How deep?")
    assert "note: this model has no chat template" in done.err
    assert (done.out, machine("chat", "-q", "-p", "How deep?").err) == (f"{ANSWER}\n", "")


def test_streamed_json_is_one_event_a_line(machine):
    done = machine("chat", "-p", "How deep?", "--json", "--stream")
    events = [json.loads(line) for line in done.out.splitlines()]
    for event in events:
        TypeAdapter(DOCUMENTS["event"]).validate_json(json.dumps(event), strict=True)
    kinds = [event["event"] for event in events]
    assert (kinds[0], kinds[1], kinds[-1]) == ("start", "read", "end")
    assert "".join(e["text"] for e in events if e["event"] == "text") == ANSWER == events[-1]["turn"]["text"]


def test_an_answer_that_went_round_in_a_loop_is_said_and_is_no_success(machine):
    machine.model.loop = Repetition(2, 320)
    done = machine("chat", "-p", "How deep?")
    assert (done.exit, done.out) == (8, f"{ANSWER}\n")
    assert "note: stopped: the answer repeated a loop of 2 tokens" in done.err
    done = machine("chat", "-p", "How deep?", "--json")
    document = json.loads(done.out)
    validate("turn", document)
    assert (done.exit, document["finish"]) == (8, "loop")
    assert document["events"] == [{"kind": "loop", "text": "the answer repeated a loop of 2 tokens"}]


def test_what_may_be_lost_is_said_on_the_screen_and_in_the_json(machine):
    note = machine.model.approx = "approx: lean holds keys in 4 and values in 2 bits: facts may be lost"
    said = machine("chat", "-p", "Hi").err
    assert f"note: {note}" in " ".join(said.split())
    assert any(line.startswith("  ") and "approx" in line and "tokens in" in line for line in said.splitlines())
    assert "approx" not in machine("chat", "-p", "Hi", "--quiet").err
    done = machine("chat", "-p", "Hi", "--json")
    document = json.loads(done.out)
    assert (document["approx"], document["events"]) == (True, [{"kind": "approx", "text": note}])
    assert done.err == ""
    validate("turn", document)


def test_in_a_chat_the_note_comes_once_and_the_figure_each_time(machine):
    machine.model.approx = "approx: lean holds keys in 4 and values in 2 bits"
    machine.environ["TERM"] = "dumb"
    said = machine("chat", "--stats", "turn", stdin=b"One?\nTwo?\n", tty=("stdin", "stdout", "stderr")).err
    assert said.count("note: approx: lean") == 1
    assert sum("tokens in" in line and "approx" in line for line in said.splitlines()) == 2


def test_streamed_json_tells_the_figures_now_and_then(machine):
    machine.model = Loaded(answer="one two three four", delay=0.3)
    kinds = [json.loads(x)["event"] for x in machine("chat", "-p", "Hi", "--json", "--stream").out.splitlines()]
    assert 1 <= kinds.count("stats") < kinds.count("text")


def test_a_streamed_error_is_an_event(machine):
    (line,) = machine("chat", "-p", "", "--json", "--stream").out.splitlines()
    event = json.loads(line)
    assert (event["event"], event["error"]["code"]) == ("error", "empty_prompt")
    TypeAdapter(DOCUMENTS["event"]).validate_json(line, strict=True)


def test_schemas_are_printed(machine):
    assert machine("config", "schema").out.split() == list(DOCUMENTS)
    for name in DOCUMENTS:
        assert json.loads(machine("config", "schema", name).out) == json_schema(name)


def test_models_doctor_and_plan_follow_their_schemas(machine):
    validate("models", json.loads(machine("models", "list", "--json").out))
    validate("models", json.loads(machine("models", "show", "demo", "--json").out))
    validate("paths", json.loads(machine("config", "path", "--json").out))
    validate("plan", json.loads(machine("chat", "--dry-run", "--json").out))
    machine.environ |= {"HF_TOKEN": "hf_abcdefghijklmnop", "KVCLI_X": f"{machine.folder}/hf_abcdefghijklmnop"}
    done = machine("doctor", "--json")
    validate("doctor", json.loads(done.out))
    assert "hf_abc" not in done.out + machine("doctor").out
    assert str(machine.folder) not in done.out


# --- with the bundled model, as a user would


@pytest.fixture(scope="module")
def kvcli(tmp_path_factory):
    env = os.environ | {
        "KVCLI_HOME": str(tmp_path_factory.mktemp("home")), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"
    }  # fmt: skip

    def start(*args, **options):
        options["env"] = env | options.get("env", {})
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        return subprocess.Popen([sys.executable, "-m", "kvcli", *args], cwd=ROOT, **pipes)

    return start


def test_the_demo_finds_a_fact_in_its_report(kvcli):
    sample = SAMPLES[0]
    out, err = kvcli("chat", "-f", "demo:report", "-p", sample.question, "--json").communicate(timeout=300)
    assert err == b""
    document = json.loads(out)
    validate("turn", document)
    assert document["text"] == sample.answer
    spec = document["spec"]
    assert spec["accepted_tokens"] == sum(i * n for i, n in enumerate(spec["histogram"]))
    assert spec["tokens_per_pass"] * spec["passes"] == pytest.approx(document["tokens"]["new"])


def test_several_answers_come_one_after_the_other(tmp_path):
    machine = Machine(tmp_path)  # with the demo model itself
    asked = ["chat", "demo", "-p", "Hello", "-n", "5", "-t", "1.5", "--seed", "4", "--samples", "2", "--no-save"]
    documents = [json.loads(line) for line in machine(*asked, "--json", "--logprobs", "1").out.splitlines()]
    assert len(documents) == 2
    for number, document in enumerate(documents, 1):
        validate("turn", document)
        assert (document["turn"], document["sampling"]["seed"]) == (number, 3 + number)
        assert "".join(score["text"] for score in document["scores"]) == document["text"]
        assert all(len(score["top"]) == 1 for score in document["scores"])
    assert machine(*asked).out == "".join(("\n" if i else "") + f"{d['text']}\n" for i, d in enumerate(documents))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--logprobs", "3"], "--logprobs needs --json"),
        (["--logprobs", "21", "--json"], "from 0 to 20"),
        (["--samples", "0"], "--samples needs"),
        (["--samples", "2", "--tools", "t.json"], "--samples needs"),
    ],
)
def test_scores_and_samples_are_refused_before_loading(machine, tmp_path, args, said):
    (tmp_path / "t.json").write_text('[{"type": "function", "function": {"name": "f"}}]')
    done = machine("chat", "-p", "Hi", *args)
    assert done.exit == 2
    assert said in " ".join((done.out + done.err).split())
    assert machine.model.prompts == []


def test_an_answer_is_held_to_a_schema_or_said_to_be_cut(kvcli, tmp_path):
    schema = {"type": "object", "properties": {"boxes": {"type": "integer", "maximum": 999}}, "required": ["boxes"]}
    (tmp_path / "stock.json").write_text(json.dumps(schema | {"additionalProperties": False}))
    (tmp_path / "stock.gbnf").write_text('root ::= "The stock of depot " [A-Z] [a-z]+ " is " [0-9]{1,4} " boxes."\n')
    for form, check in (("--schema=stock.json", json.loads), ("--grammar=stock.gbnf", lambda s: s.index(" boxes.\n"))):
        option, _, name = form.partition("=")
        asked = ["chat", "demo", "-p", "What is the stock of depot Gimness?", "--no-save", option, str(tmp_path / name)]
        whole = kvcli(*asked)
        out, err = whole.communicate(timeout=300)
        assert whole.returncode == 0, err
        check(out.decode())
        cut = kvcli(*asked, "-n", "4")
        out, err = cut.communicate(timeout=300)
        assert cut.returncode == 8, err
        said = "".join(err.decode().split())  # a long path is wrapped anywhere
        assert "reacheditslengthlimitbeforeitwascomplete" + "".join(str(tmp_path / name).split()) in said


@pytest.mark.parametrize(
    ("args", "text", "code", "said"),
    [
        (["--schema", "f"], '{"a": 1,\n "b": }', "bad_schema", "f is not JSON: Expecting value: line 2 column 7"),
        (["--schema", "f"], "[]", "bad_schema", "f holds no JSON object"),
        (["--schema", "f"], '{"type": "objekt"}', "bad_schema", "f cannot be used: Invalid type: objekt"),
        (["--schema", "none"], "", "bad_schema", "none cannot be read: No such file"),
        (["--grammar", "."], "", "bad_grammar", ". is a folder"),
        (["--grammar", "f"], "", "bad_grammar", "f cannot be used: it is empty"),
        (["--grammar", "f"], 'start: "a" foo', "bad_grammar", "f cannot be used: line 1, column 8: unknown name"),
        (["--grammar", "f"], b"start: \xff", "bad_grammar", "f is not UTF-8: at byte 7"),
        (["--grammar", "f", "--json-object"], "", "usage", "--grammar and --json-object exclude each other"),
        (["--grammar", "f", "--schema", "f"], "", "usage", "--schema and --grammar exclude each other"),
    ],
)
def test_what_no_answer_can_be_held_to_is_refused_first(machine, tmp_path, args, text, code, said):
    (tmp_path / "f").write_bytes(text if isinstance(text, bytes) else text.encode())
    done = machine("chat", "-p", "Hi", "--json", *args)
    error = json.loads(done.out)
    assert (error["code"], done.exit) == (code, 2 if code == "usage" else 3)
    assert said in error["message"]
    assert machine.model.prompts == []


def test_a_revision_that_the_config_pins_is_the_one_that_is_loaded(kvcli, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in weights_dir().iterdir():
        (snapshot / file.name).symlink_to(file)
    config = tmp_path / "c.toml"
    config.write_text(f'[models.mine]\npath = "some/model"\nrevision = "{commit}"\n')
    args = ["chat", "mine", "-p", "Hello", "--json", "-n", "2", "--config", str(config)]
    out, err = kvcli(*args, env={"HF_HOME": str(tmp_path)}).communicate(timeout=300)
    document = json.loads(out)
    assert document.get("model") == {"id": "mine", "revision": commit, "dtype": "bfloat16", "quant": "none"}, err
    assert document["finish"] == "length"


def test_ctrl_c_keeps_what_was_said_and_exits_130(kvcli):
    started = kvcli(
        "chat", "-p", "Repeat this: " + "one two three four. " * 60, "--greedy", "-n", "4k", "--spec", "off"
    )
    first = started.stdout.read(1)
    started.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, err = started.communicate(timeout=60)
    assert first
    assert started.returncode == 130, err
    assert time.monotonic() - began < 20
    assert out.endswith(b"\n")


def test_a_reader_that_leaves_ends_the_answer(kvcli):
    started = kvcli("chat", "demo", "-p", LONG, "--greedy", "--spec", "off")
    started.stdout.read(1)
    started.stdout.close()
    assert started.stderr.read() == b""
    assert started.wait(timeout=120) == -signal.SIGPIPE


@pytest.mark.parametrize("typed", ["notes", "./notes/", "notes/*.txt", "n*/*"])
def test_a_folder_and_a_pattern_attach_what_is_in_them(machine, typed):
    (machine.folder / "notes").mkdir()
    for i in (2, 1):
        (machine.folder / "notes" / f"{i}.txt").write_text(f"note {i}")
    done = machine("chat", "-p", "Hi", "-f", typed)
    assert done.exit == 0, done.err
    assert asked(machine).index("note 1") < asked(machine).index("note 2")


def test_words_without_an_option_are_documents_or_the_question(machine):
    """The shell makes the words `-f a.md b.md ...` of `-f *.md`."""
    names = ("a.md", "b.md", "c 9.md", "c 10.md")
    for name in names:
        (machine.folder / name).write_text(f"words of {name}")
    done = machine("chat", "-f", *names, "What", "is it?")
    assert done.exit == 0, done.err
    assert "documents: b.md, c 9.md, c 10.md" in done.err
    assert re.findall(r"words of (.*)|(What is it\?)", asked(machine)) == [
        *((n, "") for n in names),
        ("", "What is it?"),
    ]
    (machine.folder / "sub").mkdir()
    done = machine("chat", "-f", "a.md", "b.md", "sub", "What?", "-m", "demo")
    assert "not read: sub (a folder)" in done.err
    assert "words of b.md" in asked(machine)
    assert machine("chat", "demo", "Hello you", "").exit == 0  # not the files of the folder
    assert "Hello you" in asked(machine)


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["demo", "Hello", "-p", "you"], "usage"),
        (["here", "-m", "demo", "-p", "Hi"], "usage"),
        (["demo", "notes/no.md"], "file_missing"),
        (["demo", "no.pdf"], "file_missing"),
    ],
)
def test_words_without_an_option_that_are_neither(machine, args, code):
    assert json.loads(machine("chat", *args, "--json").out)["code"] == code


def test_unreadable_files_of_a_folder_are_left_out_by_name(machine):
    (machine.folder / "notes").mkdir()
    for name, data in (("10.txt", b"ten"), ("9.txt", b"nine"), ("bad.txt", b"\xe9 is Latin-1"), (".swp", b"x")):
        (machine.folder / "notes" / name).write_bytes(data)
    done = machine("chat", "-p", "Hi", "-f", "notes")
    assert done.exit == 0
    assert "notes: not read: .swp (hidden)" in done.err
    assert "not attached: notes/bad.txt is not valid UTF-8" in done.err
    assert asked(machine).index("nine") < asked(machine).index("ten")
    assert machine("chat", "-p", "Hi", "-f", "notes/bad.txt").exit == 3
    for words in (["-p", "Hi"], ["--dry-run"]):
        done = machine("chat", *words, "-f", "notes", "--json")
        said = json.loads(done.out)
        notes = said["notes"] if "notes" in said else [event["text"] for event in said["events"]]
        assert notes[0] == "notes: not read: .swp (hidden)", words
        assert notes[1].startswith("not attached: notes/bad.txt is not valid UTF-8")


@pytest.mark.parametrize(
    ("limit", "most", "words"), [("MOST", 1, "2 documents (0 MiB)"), ("MOST_BYTES", 4, "at most 200 (0 MiB)")]
)
def test_a_folder_has_bounds(machine, monkeypatch, limit, most, words):
    monkeypatch.setattr(document_files, limit, most)
    (machine.folder / "notes").mkdir()
    for name in ("a.txt", "b.txt"):
        (machine.folder / "notes" / name).write_text("note")
    done = machine("chat", "-p", "Hi", "-f", "notes")
    assert "[file_count]" in done.err
    assert words in done.err


def test_the_password_of_an_address_is_not_repeated(machine):
    done = machine("chat", "demo", "-f", "https://user:hidden@example.org/a.pdf", "-p", "Why?")
    assert (done.exit, "hidden" in done.err + done.out) == (3, False)
    assert "[not_fetched]" in done.err
