"""The command tree: help without torch, options on both sides, and every way a command can end."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvcli
from kvcli.chat.conversation import Chat
from kvcli.chat.saved_chats import SavedChats
from kvcli.cli import COMMANDS
from kvcli.commands.common.run_setup import Setup
from kvcli.errors import BadModel, ExitStatus
from tests.fake_model import FakeModel
from tests.fakes import ClosedPipe, Machine, Stream

KVCLI = [sys.executable, "-m", "kvcli"]
ROOT = Path(__file__).parents[1]
GROUPS = {"profiles", "models", "config", "spec", "cache", "chats"}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """`kvcli` in an empty home with a model that says what it is told to."""
    made = Machine(tmp_path)
    monkeypatch.setattr(Setup, "load", made.load)
    return made


def environment(home):
    return os.environ | {"KVCLI_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


# --- help and version


@pytest.mark.parametrize("args", [["--help"], ["chat", "--help"], ["--version"], ["config", "schema"], []])
def test_quick_commands_import_nothing_heavy(args, tmp_path):
    code = f"import sys; sys.argv = ['kvcli', *{args!r}]\ntry:\n from kvcli.cli import main; main()\n"
    code += "finally: print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules], file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stderr == "[]\n"


def test_help_is_quick(tmp_path):
    """It imports few modules: seconds, even of the processor, are those of the machine."""
    command = [KVCLI[0], "-X", "importtime", *KVCLI[1:], "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, check=True)
    assert 200 < done.stderr.count("import time:") < 480


def test_version(machine):
    assert machine("--version").out == machine("-V").out == f"kvcli {kvcli.__version__}\n"


def test_kvcli_alone_shows_examples_and_that_documents_want_a_model(machine):
    done = machine()
    assert done.exit == 0
    examples = [line.split() for line in done.out.splitlines() if line.startswith("  kvcli ")]
    assert [words[1] for words in examples] == ["chat", "chat", "summarize", "models"]
    assert "MODEL is a name that kvcli models suggest lists" in done.out


def test_help_lists_what_exists_and_nothing_else(machine):
    listed = machine("--help").out.partition("Commands")[2]
    assert [name for name in ("chat", "summarize", "profiles", "models", "chats", "doctor") if name not in listed] == []
    assert [name for name in ("run", "push", "embed") if f" {name} " in listed] == []


@pytest.mark.parametrize("command", [*(c for c in COMMANDS if c not in GROUPS), "models show", "spec tune"])
def test_help_shows_what_is_used_most_and_help_all_everything(machine, command):
    """Which is which stands at each option; what is typed is understood either way."""
    short, long = (set(re.findall(r"--[a-z][a-z-]+", machine(*command.split(), flag).out))
                   for flag in ("--help", "--help-all"))  # fmt: skip
    assert {"--profile", "--set", "--json", "--help-all"} <= short < long
    assert {"--plain", "--config", "--no-input", "--log-file"} <= long - short
    assert len(short) <= 24
    short_again = machine(*command.split(), "--help").out
    assert "--log-file" not in short_again


# --- the model

NAMING = ["chat --dry-run", "fit", "bench --dry-run", "spec doctor", "profile-heads", "models show", "models path"]


@pytest.mark.parametrize("command", NAMING)
@pytest.mark.parametrize("args", [["gone/model"], ["-m", "gone/model"], ["gone/model", "--model", "gone/model"]])
def test_every_command_takes_the_model_by_its_place_or_by_name(machine, monkeypatch, command, args):
    def refuse(setup, profile, tell=None):
        raise BadModel(setup.name)

    monkeypatch.setattr(Setup, "load", refuse)
    done = machine(*command.split(), *args, "--offline")
    assert done.exit == ExitStatus.BAD_MODEL, done.err
    assert "gone/model" in done.err


@pytest.mark.parametrize("command", ["chat --dry-run", "fit", "bench --dry-run"])
def test_what_only_looks_refuses_a_damaged_model_too(machine, tmp_path, command):
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    done = machine(*command.split(), str(tmp_path))
    assert done.exit == ExitStatus.BAD_MODEL, done.err
    assert "is not JSON" in " ".join(done.err.split())  # folded by the length of a temporary path


@pytest.mark.parametrize("command", NAMING)
def test_two_models_are_one_too_many(machine, command):
    done = machine(*command.split(), "demo", "-m", "other")
    assert (done.exit, "two models are named: demo and --model other" in done.err) == (ExitStatus.USAGE, True)


# --- common options


@pytest.mark.parametrize("args", [["--json", "-P", "exact"], []])
def test_common_options_on_either_side(machine, args):
    rest = [a for a in ["--json", "-P", "exact"] if a not in args]
    done = machine(*args, "chat", "--dry-run", *rest)
    assert json.loads(done.out)["profile"] == "exact"


def test_lists_and_counts_add_up_and_the_later_value_wins(machine):
    args = ("-v", "--set", "sample.seed=1", "-P", "exact", "chat", "-v", "--set", "spec.max=2", "-P", "ngram")
    done = machine(*args, "-p", "Hi")
    options = done.world.options
    assert (options.set, options.verbose, options.profile) == (["sample.seed=1", "spec.max=2"], 2, "ngram")


def test_every_command_takes_the_common_options(machine):
    for command in (["models", "list"], ["config", "path"], ["profiles", "list"]):
        assert machine(*command, "--json", "--no-color", "--offline").exit == 0


def test_offline_is_told_to_the_hub_before_it_is_imported(machine):
    assert machine("chat", "-p", "Hi", "--offline").world.environ["HF_HUB_OFFLINE"] == "1"


def test_quiet_leaves_stderr_empty(machine):
    done = machine("chat", "-q", "-p", "Hi")
    assert (done.out, done.err) == ("It is 972 metres.\n", "")


def test_verbose_says_which_profile_and_where_keys_come_from(machine):
    assert "kvcli.setup: profile ngram" in machine("-v", "chat", "-p", "Hi").err
    assert "spec.method = 'ngram' (built-in ngram)" in machine("-vv", "chat", "-p", "Hi").err


def test_log_file_gets_the_details_but_no_prompt(machine, tmp_path):
    done = machine("chat", "-p", "a secret question", "--log-file", str(tmp_path / "log"))
    assert "profile ngram" in (tmp_path / "log").read_text()
    assert "secret" not in (tmp_path / "log").read_text()
    assert "profile ngram," not in done.err


def test_config_file_on_top(machine, tmp_path):
    (tmp_path / "c.toml").write_text('default_profile = "exact"\n')
    assert json.loads(machine("--config", "c.toml", "--json", "chat", "--dry-run").out)["profile"] == "exact"


# --- ends


def test_errors_name_message_code_and_what_to_try(machine):
    done = machine("chat", "-p", "Hi", "-f", "nowhere.md")
    assert done.exit == 3
    assert done.out == ""
    assert done.err.startswith("error: no such file: nowhere.md")
    assert "[file_missing]" in done.err


def test_errors_as_json_go_to_stdout(machine):
    done = machine("chat", "-p", "Hi", "-f", "nowhere.md", "--json")
    document = json.loads(done.out)
    assert (document["schema"], document["code"], document["exit"]) == ("kvcli.error/1", "file_missing", 3)
    assert done.err == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["chta"], "kvcli chat"),
        (["run", "demo"], "kvcli chat"),
        (["list"], "kvcli models list"),
        (["chat", "--profle", "x"], "did you mean --profile?"),
        (["chat", "--modle", "x"], "did you mean --model?"),
        (["summarize", "--modle", "x"], "did you mean --model?"),
        (["chat", "--tempe", "1"], "did you mean --temperature?"),
        (["chat", "--max-tokens", "9"], "did you mean --max-new-tokens?"),
        (["chat", "--zzz"], "try: kvcli chat --help-all"),
        (["models", "lst"], "list"),
        (["chat", "--stats", "loud"], "'--stats': 'loud' is not one of 'live'"),
        (["chat", "--temperature", "hot"], "--temperature takes a number, not 'hot'"),
        (["serve", "--port", "4k"], "--port takes a whole number, not '4k'"),
        (["chat", "-p"], "requires an argument"),
        (["chat", "-f", "-", "-p", "Hi"], "leave out -f -"),
        (["chat", "--stream", "-p", "Hi"], "--stream needs --json"),
        (["chat", "--greedy", "-t", "0.7", "-p", "Hi"], "exclude each other"),
        (["chat", "--draft", "demo-small", "--spec", "ngram", "-p", "Hi"], "exclude each other"),
        (["chat", "-n", "many", "-p", "Hi"], "--max-new-tokens takes a number of tokens"),
        (["chat", "--ctx", "1.0001k", "-p", "Hi"], "--ctx takes a number of tokens"),
        (["chat", "-s", "a", "--system-file", "b", "-p", "Hi"], "exclude each other"),
        (["config", "schema", "trun"], "kvcli config schema turn"),
    ],
)
def test_usage_errors_exit_2_and_say_what_is_meant(machine, args, words):
    done = machine(*args)
    assert done.exit == 2, done.err
    assert words in done.err
    assert "[usage]" in done.err


def test_usage_errors_as_json(machine):
    document = json.loads(machine("chat", "--profle", "x", "--json").out)
    assert (document["code"], document["exit"]) == ("usage", 2)


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["-P", "nothere"], 9, "nothere"),
        (["--set", "kv.nothere=1"], 9, "unknown key"),
        (["--set", "sample.temperature=-1"], 9, "--set"),
        (["--device", "toaster"], 9, "--device"),
        (["--exact", "--quant", "int8"], 9, "load.quant = int8 (--quant) can change the text"),
        (
            ["--exact", "-P", "ngram", "--set", "spec.require_batch_invariance=false"],
            9,
            "spec.require_batch_invariance = false (--set) can change the text",
        ),
    ],
)
def test_settings_that_are_wrong_exit_9_with_their_place(machine, args, status, words):
    done = machine("chat", "-p", "Hi", *args)
    assert done.exit == status
    assert words in done.err


def test_a_bug_is_one_line_and_a_traceback_in_the_log(machine, monkeypatch):
    def bug(*_, **__):
        raise ZeroDivisionError("division by\nzero")

    monkeypatch.setattr(Setup, "load", bug)
    done = machine("chat", "-p", "Hi")
    log = done.world.paths.state / "kvcli.log"
    assert done.exit == 1
    assert "error: internal: ZeroDivisionError: division by" in done.err
    assert "[internal]" in done.err
    assert str(log) in done.err.replace("\n  ", "")
    assert "Traceback" not in done.err
    assert "Traceback" in log.read_text()
    assert log.stat().st_mode & 0o077 == 0
    assert "Traceback" in machine("-vv", "chat", "-p", "Hi").err


def test_interrupt_while_loading_exits_130(machine, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Setup, "load", interrupted)
    assert machine("chat", "-p", "Hi").exit == 130


@pytest.mark.parametrize("writes", [0, 1])
def test_a_closed_pipe_is_silent_141(machine, writes):
    done = machine("chat", "-p", "Hi", stdout=ClosedPipe(writes))
    assert done.exit == 141
    assert "error" not in done.err
    assert machine("models", "list", stdout=ClosedPipe()).exit == 141
    assert machine("chat", "-p", "Hi", "--json", "--stream", stdout=ClosedPipe(writes)).exit == 141


def test_a_full_disk_is_said(machine):
    class Full(Stream):
        def write(self, text):
            raise OSError(28, "No space left on device")

    done = machine("chat", "-p", "Hi", stdout=Full())
    assert done.exit == 1
    assert done.err.startswith("error: cannot write the output: No space left on device")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] can't allocate memory: 9 bytes"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
)
def test_out_of_memory_is_not_a_bug(machine, monkeypatch, error):
    def hungry(*_, **__):
        raise error

    monkeypatch.setattr(Setup, "load", hungry)
    done = machine("chat", "-p", "Hi")
    assert done.exit == 5
    assert "[out_of_memory]" in done.err
    assert "try:" in done.err


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EAGAIN])
def test_a_system_that_gives_no_more_is_not_a_bug(machine, monkeypatch, number):
    def crowded(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Setup, "load", crowded)
    done = machine("chat", "-p", "Hi")
    assert (done.exit, "[too_few_handles]" in done.err, "ulimit -n" in done.err) == (5, True, True)


@pytest.mark.parametrize("limit", [7, 8])
def test_so_it_is_where_few_files_may_be_open(tmp_path, limit):
    code = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))"
    code += "; import sys; from kvcli.cli import main; sys.argv = ['kvcli', 'chat', 'demo', '-p', 'Hi']; main()"
    environ = os.environ | {"KVCLI_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 5
    assert "[too_few_handles]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_too_long_for_a_file_is_said(machine, monkeypatch, tmp_path):
    long = "x" * 300
    done = machine("profile-heads", "demo", "--out", long)
    assert (done.exit, "[name_too_long]" in done.err, "try:" in done.err) == (3, True, True)
    there = Machine(tmp_path, environ={"KVCLI_HOME": str(tmp_path / long)})
    for command in (("chat", "-p", "Hi"), ("profiles", "list"), ("models", "list"), ("chats",)):
        done = there(*command)
        assert "internal" not in done.err
        assert "Traceback" not in done.err


@pytest.mark.parametrize("group", ["models", "config", "profiles"])
def test_a_group_alone_shows_its_help(machine, group):
    done = machine(group)
    assert (done.exit, done.err) == (2, "")
    assert "Commands" in done.out


def test_what_is_set_in_the_chat_wins_over_the_flags_it_began_with(machine):
    world = machine.world()
    world.options.set = ["sample.seed=3"]
    setup = Setup(world, "demo", {"sample.temperature": (0.7, "--temperature"), "sample.top_p": (0.5, "--top-p")})
    assert setup.profile.sample.temperature == 0.7
    profile = setup.resolve("exact", ["sample.seed=3", "sample.temperature=0.2"])
    assert (profile.name, profile.sample.temperature, profile.sample.top_p) == ("exact", 0.2, 0.5)


def test_models_of_the_cache_are_listed_with_what_is_wrong_with_them(tmp_path):
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    refs = tmp_path / "hub" / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123abc")
    env = environment(tmp_path) | {"HF_HOME": str(tmp_path)}
    listed = [*KVCLI, "models", "list", "--json"]
    done = subprocess.run(listed, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    models = {m["name"]: m for m in json.loads(done.stdout)["models"]}
    assert models["demo"]["supported"]
    assert models["some/model"]["kind"] == "cache"
    assert "no weights" in models["some/model"]["reason"]


# --- the real thing


def test_the_pipe_to_head_ends_by_signal(tmp_path):
    """As for any program in a shell: `kvcli ... | head -1` leaves 141 and no message."""
    script = f"{' '.join(KVCLI)} config schema turn | head -1; echo ${{PIPESTATUS[0]}} >&2"
    long = script.replace("config schema turn", "config schema doctor")
    for line in (script, long):
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, check=True
        )
        assert done.stdout == "{\n"
        assert done.stderr in ("0\n", "141\n")  # 0 when all of it fitted into the pipe before head left


def test_a_pipe_closed_before_the_answer(tmp_path):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.Popen(
        [*KVCLI, "config", "path"], cwd=ROOT, env=environment(tmp_path), stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    _, err = done.communicate(timeout=60)
    assert (done.returncode, err) == (-signal.SIGPIPE, b"")


def test_no_stdout_at_all(tmp_path):
    line = f"{' '.join(KVCLI)} config path >&-"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environment(tmp_path), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (ExitStatus.CLOSED_PIPE, b"")  # an answer that nobody got is no success


def test_a_folder_that_is_gone(tmp_path):
    (tmp_path / "gone").mkdir()
    line = f"cd {tmp_path}/gone; rmdir ../gone; PYTHONPATH={ROOT} {' '.join(KVCLI)} config path --json"
    done = subprocess.run(["bash", "-c", line], env=environment(tmp_path), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_completion_scripts_are_printed(tmp_path):
    env = environment(tmp_path) | {"_KVCLI_COMPLETE": "source_bash"}
    done = subprocess.run(KVCLI, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert "_KVCLI_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("kvcli ch", ["chat", "chats"]),
        ("kvcli chat --dry", ["--dry-run"]),
        ("kvcli models l", ["list"]),
        ("kvcli chat -P fa", ["fafo", "fastgen", "fafo-paper", "fastgen-paper"]),
        ("kvcli -P mi", ["mine"]),
        ("kvcli fit --profiles exact,mi", ["exact,mine"]),
        ("kvcli profiles diff exact stre", ["streaming"]),
        ("kvcli chat de", ["demo", "demo-small"]),
        ("kvcli chat --draft bi", ["big"]),
        ("kvcli models get smollm3", ["smollm3-3b"]),
        ("kvcli chat --quant int", ["int8", "int4"]),
        ("kvcli chat --device c", ["cpu", "cuda"]),
        ("kvcli chat --ctx ", ["auto", "max"]),
        ("kvcli chat --set sample.top", ["sample.top_k=", "sample.top_p="]),
        ("kvcli chat --set kv.k_bits=", ["kv.k_bits=16", "kv.k_bits=8", "kv.k_bits=4", "kv.k_bits=2"]),
        ("kvcli bench --vary spec.method=n", ["spec.method=ngram"]),
        ("kvcli cache prune cal", ["calibration"]),
        ("kvcli chat -r 2", ["CHAT"]),
        ("kvcli chats rm 2", ["CHAT"]),
        ("kvcli chat -f ", []),  # the shell knows files
        ("kvcli chat --set nonsense=", []),
        ("kvcli chat --set policy.budget=", []),
        ("kvcli chat --set load.device=c", ["load.device=cpu", "load.device=cuda"]),
    ],
)
def test_completion_completes(tmp_path, line, words):
    at = str(line.count(" "))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.toml").write_text("[models.big]\npath = 'x'\n[profiles.mine]\nextends = 'exact'\n")
    chat = Chat(FakeModel(), saved_chats=SavedChats(tmp_path / "data"))
    chat.send("a question")
    words = [chat.save() if word == "CHAT" else word for word in words]
    env = environment(tmp_path) | {"_KVCLI_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": at}
    done = subprocess.run(KVCLI, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == words


@pytest.mark.parametrize(("option", "status"), [("--version", 0), ("--nonsense", 2)])
def test_the_process_ends_after_all_exit_functions_and_with_its_status(tmp_path, option, status):
    code = "import atexit\nfrom kvcli.__main__ import main\ntry: main()\nfinally: atexit.register(print, 'cleaned up')"
    command = [sys.executable, "-c", code, option]
    done = subprocess.run(command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split("\n")[-2]) == (status, "cleaned up")


def test_what_is_wrong_with_the_config_does_not_disturb_the_tab_key(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.toml").write_text("[profiles.mine")
    more = {"_KVCLI_COMPLETE": "complete_bash", "COMP_WORDS": "kvcli chat -P ", "COMP_CWORD": "3"}
    done = subprocess.run(KVCLI, cwd=ROOT, env=environment(tmp_path) | more, capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("", "")


# --- habits of other programs


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("pull", "kvcli models get 'a b'"),
        ("rm", "kvcli models remove 'a b'"),
        ("show", "kvcli models show 'a b'"),
        ("list", "kvcli models list"),
        ("ls", "kvcli models list"),
        ("logs", "kvcli chats list"),
        ("run", "kvcli chat 'a b'"),
        ("create", "kvcli profiles new 'a b'"),
        ("templates", "kvcli profiles list"),
        ("load", "kvcli serve 'a b'"),
        ("status", "kvcli ps"),
        ("models pull", "kvcli models get 'a b'"),
        ("models rm", "kvcli models remove 'a b'"),
        ("models run", "kvcli chat 'a b'"),
        ("chats delete", "kvcli chats rm 'a b'"),
        ("cache ls", "kvcli cache --help"),  # not models list
    ],
)
def test_a_verb_of_another_program_is_answered_by_ours(machine, typed, advice):
    done = machine("--json", *typed.split(), "a b")
    assert json.loads(done.out)["try"] == [advice]


@pytest.mark.parametrize("typed", ["push", "cp", "embed", "search"])
def test_what_others_do_and_we_do_not_is_said(machine, typed):
    found = json.loads(machine(*typed.split(), "--json").out)
    assert found["exit"] == ExitStatus.USAGE
    assert len(found["lines"]) == 1
    assert f"kvcli chat {typed}" not in found["try"]


# --- files of the home folder


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("chat --tools=~/it -p a", "~/it is not JSON"),
        ("chat --schema=~/it -p a", "~/it is not JSON"),
        ("spec tune --output=~/it", "it exists already"),
        ("profiles new mine --output=~/it", "it exists already"),
        ("config path --config=~/it", "{home}/it\n"),
        ("config path --log-file=~/it", ""),
    ],
)
def test_a_tilde_in_a_path_is_the_home_folder(machine, tmp_path, monkeypatch, args, words):
    (tmp_path / "of_user").mkdir()
    (tmp_path / "of_user" / "it").write_text("not what any option takes")
    monkeypatch.setenv("HOME", str(tmp_path / "of_user"))
    done = machine(*args.split())
    assert words.format(home=tmp_path / "of_user") in done.out + done.err
    assert not (tmp_path / "~").exists()


# --- help on a narrow terminal


@pytest.mark.parametrize("columns", [1, 30, 40, 59])
@pytest.mark.parametrize("args", [("--help",), ("chat", "--help-all"), ("models", "--help"), ("chats", "prune", "-h")])
def test_no_word_is_cut_in_narrow_help(machine, args, columns):
    machine.environ["COLUMNS"] = str(columns)
    os.environ.pop("COLUMNS", None)
    done = machine(*args)
    assert done.exit == 0
    assert not set("…│╭") & set(done.out)
    if columns >= 30:
        assert all(len(line) < columns for line in done.out.splitlines() if line.startswith("   "))
    names = {word.rstrip(",") for line in done.out.splitlines() if line.startswith("  -") for word in line.split()}
    assert {"--help", "--profile"} <= names or columns < 30
    assert args[0] != "chat" or columns < 30 or {"--repetition-penalty", "--max-new-tokens"} <= names


def test_from_60_columns_on_help_has_its_boxes(machine):
    machine.environ["COLUMNS"] = "60"
    assert "╭" in machine("chat", "--help").out


@pytest.mark.parametrize("limit", [["--grace", "nan"], ["--grace", "-1"], ["--queue", "0"]])
def test_limits_of_the_server_are_numbers(machine, limit):
    done = machine("serve", "demo", "--port", "99999", "--json", *limit)
    assert (done.exit, json.loads(done.out)["code"]) == (2, "usage")


@pytest.mark.parametrize(
    ("args", "new"),
    [
        (["summarize", "a.txt", "--fresh"], "--no-cache"),
        (["summarize", "a.txt", "--mode", "map"], "--mode parts"),
        (["sessions", "list"], "kvcli chats list --json"),
    ],
)
def test_a_former_name_is_refused_with_the_new_one(machine, args, new):
    done = machine(*args, "--json")
    error = json.loads(done.out)
    assert (done.exit, error["code"], error["try"][0]) == (2, "usage", new)
