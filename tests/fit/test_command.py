"""`kvcli fit` as a user types it, on described machines, and the chat that looks before it loads."""

from __future__ import annotations

import json

import pytest
import torch
from pydantic import TypeAdapter

from kvcli.commands.common.run_setup import Setup
from kvcli.demo import weights_dir
from kvcli.fit import available_memory, memory, run_log
from kvcli.fit.memory import BASE
from kvcli.fit.run_log import machine_fingerprint, save_calibration
from kvcli.schemas.documents import DOCUMENTS
from kvcli.settings.config import Sources, load_config
from kvcli.settings.profile import Profile
from tests.fakes import Machine
from tests.fit.test_run_log import entry
from tests.test_calibrate import made
from tests.test_repl import Talk

# by what they are for; that of a model which drafts names none, and cannot be planned for
AWAY = ("draft", "specextend", *(() if torch.cuda.is_available() else ("gpu",)))  # of a list of all
SHIPPED = [name for name in load_config(Sources()).names() if not name.startswith(AWAY)]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    found = Machine(tmp_path)
    monkeypatch.setattr(Setup, "load", found.load)
    monkeypatch.setattr(memory, "here", lambda: BASE)  # a process of tests holds much more
    return found


def document(done):
    (line,) = done.out.splitlines()
    TypeAdapter(DOCUMENTS["fit"]).validate_json(line, strict=True)
    return json.loads(line)


def test_every_profile_in_one_table(machine):
    machine.environ["COLUMNS"] = "100"
    done = machine("fit", "demo", "--all", "--ram", "8GiB")
    assert (done.exit, done.err) == (0, "")
    names = [line.split()[0] for line in done.out.splitlines()[3 : 3 + len(SHIPPED)]]
    assert names == SHIPPED
    assert "--ram/--vram describe another machine" in done.out
    assert "kvcli bench --calibrate" in machine("fit", "demo").out
    assert max(map(len, done.out.splitlines())) < 100


def test_what_all_plans_share_is_said_once_where_the_table_is_too_wide(machine):
    machine.environ["COLUMNS"] = "80"
    lines = machine("fit", "demo", "--all", "--ctx", "4k", "--ram", "8GiB").out.splitlines()
    heads, rows = lines[2].split(), [line.split() for line in lines[3 : 3 + len(SHIPPED)]]
    assert [row[0] for row in rows] == SHIPPED
    assert {len(row) for row in rows} == {len(heads)}
    (shared,) = [line for line in lines if line.startswith("the same for all: ")]
    assert {"ctx 4,096", "fits yes"} <= set(shared.removeprefix("the same for all: ").split(" · "))
    assert not {"ctx", "fits"} & set(heads)


def test_without_room_for_any_table_each_plan_is_a_block(machine):
    machine.environ["COLUMNS"] = "40"
    lines = machine("fit", "demo", "--all", "--ctx", "4k", "--ram", "8GiB").out.splitlines()
    assert [line for line in lines if line in SHIPPED] == SHIPPED
    said = [line for line in lines if line.startswith("  ")]
    assert sum("peak " in line for line in said) == len(SHIPPED)
    assert any(line.startswith("the same for all: ctx 4,096") for line in lines)


@pytest.mark.parametrize("columns", ["40", "80", "200"])
@pytest.mark.parametrize(
    "args",
    [("--all",), ("--ctx", "1m"), ("--ram", "0.5GiB", "--ctx", "8k"), ("--explain",), ("-P", "budget", "--explain")],
)
def test_no_line_is_wider_than_the_terminal(machine, columns, args):
    machine.environ["COLUMNS"] = columns
    lines = machine("fit", "demo", *args).out.splitlines()
    assert lines
    assert max(map(len, lines)) < int(columns)


def test_json_is_the_schema_and_adds_up(machine):
    found = document(machine("fit", "demo", "--all", "--ctx", "512,4k", "--ram", "8GiB", "--json"))
    assert (found["model"], found["ctx"], found["free_bytes"]) == ("demo", 512, 8 << 30)
    assert [(p["profile"], p["ctx"]) for p in found["plans"]] == [(name, n) for name in SHIPPED for n in (512, 4096)]
    for plan in found["plans"]:
        running = sum(plan[part] for part in ("base", "weights", "kv", "draft", "working"))
        assert plan["total"] == max(running, plan["loading"])
        assert {**plan["kv_tiers"], "disk": 0} == {"cpu": plan["kv"], "disk": 0}
        assert ("disk" in plan["kv_tiers"]) == (plan["profile"] == "offload")
        assert plan["fits"] == (plan["missing"] == 0) == (plan["binding"] is None)


def test_what_does_not_fit_exits_5_and_says_what_would(machine):
    done = machine("fit", "demo", "--ctx", "8k", "--ram", "560MiB", "-P", "exact")
    assert done.exit == 5
    assert "more than available" in done.out
    assert "try: --set prefill.chunk=256" in done.out
    found = document(machine("fit", "demo", "--ctx", "8k", "--ram", "560MiB", "-P", "exact", "--json"))
    (plan,) = found["plans"]
    usable = found["free_bytes"] - found["kept_free"]
    assert plan["missing"] == plan["needed"] - usable > 0
    assert all(change["total"] <= usable for change in plan["changes"])


def test_a_budget_is_explained(machine, monkeypatch):
    monkeypatch.setattr("kvcli.heads.auto_headmap.FOLDER", machine.folder)  # no map ships
    args = ("fit", "demo", "-P", "budget", "--ctx", "8k", "--ram", "8GiB", "--explain")
    (plan,) = document(machine(*args, "--json"))["plans"]
    found, token = plan["budget"], plan["kv_per_token"]
    assert found["bytes"] == found["whole"] // 4
    assert found["whole"] == 8192 * (token + 6 * 4)
    assert [(level["bits"], round(level["room"] / 8192, 2)) for level in found["levels"]] == [
        (16, 0.25), (8, 0.47), (4, 0.85), (0, 0.0)
    ]  # fmt: skip
    each = sum(level["share"] * level["token"] for level in found["levels"])
    assert each == pytest.approx(found["bytes"] / 8192, rel=0.01)
    assert (found["passes"], found["is_mapped"], plan["parts"]) == (0, False, None)
    machine.environ["COLUMNS"] = "120"
    out = machine(*args, "--set", "policy.headmap=auto").out
    assert "at equal importance, of 8,192 tokens: 85% in 4 bits, 15% dropped" in out
    assert "a map of this model, measured at its first run: 60 short passes" in out
    heads = machine.folder / "home" / "data" / "heads"
    heads.mkdir(parents=True)
    (heads / "a.json").write_text('{"model": "demo"}')
    assert "the saved map of this model" in machine(*args, "--set", "policy.headmap=auto").out
    loses = machine(*args, "--set", "memory.budget=", "--set", "memory.max_loss=0.01").out
    assert "at most 1.0% of the total score is lost" in loses
    assert "at equal importance" not in loses
    less = machine(*args, "--set", "memory.budget=0.1%").out
    assert "always at full precision: 64 first and newest tokens, 194 KiB, which exceeds the budget by" in less


def test_a_budget_is_explained_with_no_more_elsewhere_than_has_room_there(machine):
    args = ("fit", "demo", "-P", "budget", "--ctx", "8k", "--ram", "8GiB", "--explain", "--set", "memory.budget=10%")
    found = {}
    for disk in ("1MiB", "1GiB"):
        sets = ("--set", f"memory.disk={disk}", "--set", "sparse.method=sketch")
        (plan,) = document(machine(*args, *sets, "--json"))["plans"]
        (found[disk],) = [level for level in plan["budget"]["levels"] if level["is_found"]]
        assert found[disk]["share"] * 8192 <= found[disk]["room"] + 1
    assert found["1MiB"]["room"] < 0.1 * found["1GiB"]["room"]
    assert found["1MiB"]["share"] < 0.1 < 0.9 < found["1GiB"]["share"]
    machine.environ["COLUMNS"] = "160"
    out = machine(*args, "--set", "memory.disk=1GiB").out
    assert "tokens beyond the budget are stored on the disk: all of them are read" in out
    assert "offloaded: up to " in out


def test_a_head_map_that_is_not_there_is_refused_and_no_budget_is_nothing(machine):
    lost = machine("fit", "demo", "-P", "budget", "--set", "policy.headmap=/nonexistent", "--explain")
    assert (lost.exit, lost.out) == (3, "")
    assert "/nonexistent" in lost.err
    for none in ("0%", "0.0%", "00 %", "0GiB", "0.0 MiB"):
        assert "is not allowed" in machine("fit", "demo", "--budget", none).err
    for little in ("0.5%", "5%", "0.1MiB", "10GiB"):
        assert "is not allowed" not in machine("fit", "demo", "--budget", little).err


def test_without_a_budget_each_part_names_what_makes_it_smaller(machine):
    (plan,) = document(machine("fit", "demo", "--ctx", "8k", "--ram", "8GiB", "--explain", "--json"))["plans"]
    ways = {part["name"]: [change["type"] for change in part["changes"]] for part in plan["parts"]}
    assert ways["weights"] == ["--quant int8", "--quant int4"]
    assert ways["KV cache"] == ["--budget 6MiB"]  # ngram promises the text, and with a budget another one stands
    assert ways["activations"] == ["--set prefill.chunk=256"]
    assert all(change["total"] < plan["total"] for part in plan["parts"] for change in part["changes"])
    assert document(machine("fit", "demo", "--json"))["plans"][0]["parts"] is None
    free = ("--ctx", "8k", "--ram", "8GiB", "--explain", "--json", "--set", "exactness=approx")
    (plan,) = document(machine("fit", "demo", *free))["plans"]
    (kv,) = (part for part in plan["parts"] if part["name"] == "KV cache")
    assert [change["type"] for change in kv["changes"]] == ["--budget 6MiB", "--set kv.k_bits=8 --set kv.v_bits=8"]


def test_a_context_typed_twice_is_planned_once(machine):
    assert [plan["ctx"] for plan in document(machine("fit", "demo", "--ctx", "512,0.5k", "--json"))["plans"]] == [512]


def test_one_that_fits_among_others_is_enough(machine):
    assert machine("fit", "demo", "--ctx", "512,1m", "--ram", "8GiB").exit == 0


def test_beyond_the_models_limit(machine):
    done = machine("fit", "demo", "--ctx", "1m", "--ram", "64GiB")
    assert done.exit == 5
    assert "the context limit is 8,192 tokens" in done.out


def test_what_lies_on_the_disk_is_no_memory_and_is_listed(machine):
    machine.environ["COLUMNS"] = "100"
    args = ("demo", "--ctx", "8k", "-P", "exact", "--ram", "8GiB", "--set", "memory.device=16MiB")
    (capped,) = document(machine("fit", *args, "--json"))["plans"]
    assert (capped["kv"], capped["fits"], capped["max_ctx"] < 8192) == (16 << 20, False, True)
    assert "memory.device" in capped["binding"]
    (spread,) = document(machine("fit", *args, "--set", "memory.disk=1GiB", "--json"))["plans"]
    assert (spread["fits"], spread["max_ctx"], spread["kv_tiers"]["cpu"]) == (True, 8192, 16 << 20)
    (plain,) = document(machine("fit", *args[:-2], "--json"))["plans"]
    assert sum(spread["kv_tiers"].values()) == plain["kv"]
    assert "on disk" in machine("fit", *args, "--set", "memory.disk=1GiB").out


def test_a_card_that_is_described(machine):
    found = document(machine("fit", "demo", "--vram", "12GiB", "--json"))
    assert (found["device"], found["free_bytes"]) == ("cuda:0", (12 << 30) - available_memory.CONTEXT)
    assert found["plans"][0]["base"] < 128 << 20, "workspaces of libraries, captured passes; the program is on the host"
    assert any("CUDA itself" in note for note in found["notes"])
    small = machine("fit", "demo", "--vram", "0.1GiB", "--ram", "8GiB")
    assert small.exit == 5
    assert "--device cpu" in small.out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--vram", "12"), "unit"),
        (("--ctx", "many"), "tokens"),
        (("--all", "--profiles", "exact"), "exclude"),
        (("--profiles", ","), "takes names"),
        (("--device", "cuda:7"), "memory is unknown"),
    ],
)
def test_wrong_options_are_usage_errors(machine, args, says):
    done = machine("fit", "demo", *args)
    assert (done.exit, done.out) == (2, "")
    assert says in done.err


def test_a_folder_with_its_config_alone_is_enough(machine):
    folder = machine.folder / "model"
    folder.mkdir()
    (folder / "config.json").write_text((weights_dir() / "config.json").read_text())
    found = document(machine("fit", str(folder), "--json", "--ram", "8GiB"))
    whole = document(machine("fit", "demo", "--json", "--ram", "8GiB"))
    assert found["plans"][0]["weights"] == pytest.approx(whole["plans"][0]["weights"], rel=0.02)
    assert any("sizes are estimated from config.json" in note for note in found["notes"])


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 256,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 512, "vocab_size": 1000,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


def configured(machine, *args, without=(), **changes):
    folder = machine.folder / "configured"
    folder.mkdir(exist_ok=True)
    config = {name: value for name, value in (CONFIG | changes).items() if name not in without}
    (folder / "config.json").write_text(json.dumps(config))
    return machine("fit", str(folder), "--ram", "8GiB", "--json", *args)


@pytest.mark.parametrize(
    ("packed", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4.15625),
        ({"quant_method": "awq", "bits": 4}, 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.127),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "fp8"}, 16),  # which loading unpacks
        ({"quant_method": "a new one"}, 16),
    ],
)
def test_a_config_that_says_how_weights_are_quantized_is_believed(machine, packed, bits):
    found = document(configured(machine, quantization_config=packed))
    linear = 4 * (2 * 256 * 256 + 2 * 64 * 256 + 3 * 512 * 256)
    rest = 2 * (2 * 1000 * 256 + 4 * 2 * 256)  # embeddings, head and norms stay as they are
    assert found["plans"][0]["weights"] == pytest.approx(rest + linear * bits / 8, rel=1e-3)
    assert any("quantization is unknown" in note for note in found["notes"]) == (packed["quant_method"] == "a new one")


def test_what_loading_would_refuse_is_not_planned(machine):
    packed = {"quant_method": "gptq", "bits": 4}
    assert "quantized already" in configured(machine, "--quant", "int8", quantization_config=packed).out
    assert "is for CUDA" in machine("fit", "demo", "--quant", "nf4").err
    assert machine("fit", "demo", "--quant", "nf4", "--vram", "12GiB").exit == 0


def test_a_profile_that_names_no_model_to_draft_is_left_out_of_all(machine):
    found = document(machine("fit", "demo", "--all", "--json"))
    assert any(note.startswith("profile draft is not shown: spec.method") for note in found["notes"])
    assert machine("fit", "demo", "--profiles", "draft").exit == 9
    drafted = document(machine("fit", "demo", "--profiles", "draft", "--set", "spec.model=demo", "--json"))
    assert 0 < drafted["plans"][0]["draft"] < drafted["plans"][0]["weights"]  # which it shares


@pytest.mark.parametrize(("more", "there"), [((), torch.cuda.is_available()), (("--vram", "12GiB"), True)])
def test_the_profile_for_gpus_is_listed_where_there_is_one(machine, more, there):
    found = document(machine("fit", "demo", "--all", "--json", *more))
    assert ("gpu" in [plan["profile"] for plan in found["plans"]]) == there
    assert any(note.startswith("profile gpu is not shown: this machine has no GPU") for note in found["notes"]) == (
        not there
    )


def test_a_profile_that_the_device_refuses_is_left_out_of_all(machine):
    config = machine.folder / "more.toml"
    config.write_text('[profiles.card]\nextends = "exact"\nexactness = "approx"\n[profiles.card.load]\nquant = "nf4"\n')
    found = document(machine("fit", "demo", "--all", "--json", "--config", str(config)))
    assert "card" not in [plan["profile"] for plan in found["plans"]]
    assert any(note.startswith("profile card is not shown: load.quant = nf4") for note in found["notes"])
    for args in (("-P", "card"), ("--all", "--quant", "nf4")):
        assert machine("fit", "demo", *args, "--config", str(config)).exit == 2


def test_the_familys_defaults_count_where_a_config_leaves_sizes_out(machine):
    assert document(configured(machine, without=["max_position_embeddings"]))["limit"] == 2048
    found = document(configured(machine, model_type="gemma2", sliding_window=1024))
    assert any(note.startswith("2 of 4 layers see only the last 1,024") for note in found["notes"])
    unknown = document(configured(machine, model_type="odd", without=["max_position_embeddings"]))
    assert "states no context limit" in unknown["notes"][0]


def test_dynamic_rope_ends_where_the_loaded_model_does(machine):
    rope = {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert document(configured(machine, rope_scaling=rope))["limit"] == 1024


@pytest.mark.parametrize("value", [0, -4, float("inf"), "four", 10**9, True])
def test_numbers_that_are_no_sizes_are_an_error(machine, value):
    done = configured(machine, num_hidden_layers=value)
    assert (done.exit, json.loads(done.out)["code"]) == (4, "model_sizes")


def test_weights_that_are_here_in_part_are_said(machine):
    folder = machine.folder / "configured"
    folder.mkdir()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert any("2 of 2 shards are missing" in note for note in document(configured(machine))["notes"])


def test_a_profile_that_cannot_have_the_settings_is_left_out_of_all_and_refused_by_name(machine):
    found = document(machine("fit", "demo", "--all", "--set", "policy.name=window", "--json"))
    lossy = [name for name in SHIPPED if Profile.load(name).exactness == "approx"]
    left = ("budget", "lazy-paper")  # whose tokens come back where a policy would have dropped what they look at
    assert [plan["profile"] for plan in found["plans"]] == [name for name in lossy if name not in left]
    assert any(note.startswith("profile exact is not shown") for note in found["notes"])
    assert any(
        note.startswith("profile budget is not shown") for note in found["notes"]
    )  # whose bytes a window does not spend
    assert machine("fit", "demo", "--profiles", "exact", "--set", "policy.name=window").exit == 9


def test_plain_is_bytes_and_tabs(machine):
    names, row = (line.split("\t") for line in machine("fit", "demo", "--plain").out.splitlines())
    assert dict(zip(names, row, strict=True))["weights"] == "10064000"


def test_times_come_with_a_calibration_and_its_age(machine):
    save_calibration(machine.world().paths.cache, made(machine_fingerprint("cpu")))
    done = machine("fit", "demo", "-P", "exact")
    assert "calibrated" in done.out
    assert "figures of this machine" in done.out
    found = document(machine("fit", "demo", "-P", "exact", "--json"))
    plan = found["plans"][0]
    read = plan["weights"] + plan["ctx"] * plan["kv_per_token"]
    assert plan["speed"]["tok_s"] == pytest.approx(1e9 / read)  # made() reads 1e9 bytes a second


MIB = 1 << 20


def test_what_runs_took_is_added_to_the_program_of_every_profile_and_to_nothing_else(machine):
    data = machine.world().paths.data
    asked = ("fit", "demo", "--all", "--ctx", "512")
    plain = {plan["profile"]: plan for plan in document(machine(*asked, "--json"))["plans"]}
    for more, profile in ((300, "exact"), (320, "ngram"), (2, "snap")):
        known = {"predicted": 500 * MIB, "measured": (500 + more) * MIB, "build": memory.build()}
        run_log.append(data, entry(profile=profile, **known))
    done = flat(machine(*asked))
    assert "Your last 3 runs of this model took 2.0 MiB more to 320 MiB more than estimated, so runtime" in done
    for plan in document(machine(*asked, "--json"))["plans"]:
        was = plain[plan["profile"]]
        assert plan["runs"] == {"runs": 3, "low": 2 * MIB, "high": 320 * MIB}
        assert plan["correction"] == 300 * MIB
        assert plan["base"] == was["base"] + 300 * MIB
        same = ("weights", "kv", "draft", "working", "loading")
        assert [plan[part] for part in same] == [was[part] for part in same]
        assert plan["total"] == plan["base"] + sum(plan[part] for part in same)


def flat(done):
    return " ".join(done.out.split())


def test_a_calibration_under_other_threads_is_found_by_the_profile_that_has_them(machine):
    save_calibration(machine.world().paths.cache, made(machine_fingerprint("cpu", 3)))
    assert "no speed estimate yet" in machine("fit", "demo", "--set", "load.threads=2").out
    assert "calibrated today" in machine("fit", "demo", "--set", "load.threads=3").out


# ---- the chat ----


def small(monkeypatch, mib):
    monkeypatch.setattr(available_memory, "container_room", lambda **_: mib << 20)


def test_a_chat_that_cannot_fit_is_refused_before_it_loads(machine, monkeypatch):
    small(monkeypatch, 300)
    monkeypatch.setattr(Setup, "load", None)
    done = machine("chat", "demo", "-p", "hi", "--json")
    found = json.loads(done.out)
    assert (done.exit, found["code"], found["exit"]) == (5, "does_not_fit", 5)
    assert found["detail"]["needed"] > found["detail"]["usable"]
    assert "kvcli fit demo --all" in found["try"]


def test_a_budget_too_small_for_any_text_is_named_with_one_that_is_not(machine, monkeypatch):
    monkeypatch.setattr(Setup, "load", None)
    asked = ("chat", "demo", "-p", "hi", "--json")
    for typed, said in (
        (("--budget", "1KiB"), "--budget "),
        (("-P", "budget", "--set", "memory.budget=1KiB"), "--set "),
    ):
        found = json.loads(machine(*asked, *typed).out)
        assert (found["code"], found["message"]) == (
            "does_not_fit", "memory.budget = 1KiB is smaller than the protected tokens"
        )  # fmt: skip
        assert found["try"][0] == f"{said}{'memory.budget=' * (said == '--set ')}1MiB"
        assert not any(item.startswith("--ctx") for item in found["try"])
    monkeypatch.undo()
    assert machine(*asked, "--budget", "1MiB").exit == 0


def test_a_window_beyond_the_model_is_refused_before_it_loads(machine, monkeypatch):
    monkeypatch.setattr(Setup, "load", None)
    done = machine("chat", "-p", "hi", "--ctx", "1m")
    assert done.exit == 9
    assert "the limit is 8,192" in done.err


def test_force_loads_all_the_same(machine, monkeypatch):
    small(monkeypatch, 300)
    assert machine("chat", "-p", "hi", "--force").exit == 0


def test_a_smaller_window_is_said_and_one_that_was_asked_for_is_refused(machine, monkeypatch):
    small(monkeypatch, 545)
    done = machine("chat", "-p", "hi", "-P", "exact")
    assert done.exit == 0
    assert "of 8,192 tokens: more does not fit" in done.err
    for asked in ("8192", "max"):
        assert machine("chat", "-p", "hi", "-P", "exact", "--ctx", asked).exit == 5


def test_where_only_layers_fit_prompts_are_read_so_and_that_is_said(machine, monkeypatch):
    small(monkeypatch, 560)
    done = machine("chat", "-p", "hi", "-P", "exact", "--ctx", "2048")
    assert "prompts are read layer by layer" in done.err
    assert machine.model.profile.prefill.order == "layers"
    small(monkeypatch, 600)
    done = machine("chat", "-p", "hi", "-P", "exact", "--ctx", "2048")
    assert "layer by layer" not in done.err
    assert machine.model.profile.prefill.order == "auto"
    (plan,) = document(machine("fit", "demo", "-P", "exact", "--ctx", "2048", "--ram", "560MiB", "--json"))["plans"]
    assert (plan["order"], plan["fits"]) == ("layers", True)
    told = machine("fit", "demo", "-P", "exact", "--ctx", "2048", "--ram", "560MiB").out
    assert "exact at 2,048: prefill runs layer by layer" in told


def test_a_turn_that_was_broken_off_does_not_note_the_one_before_again(tmp_path):
    talk, noted = Talk(tmp_path), []
    talk.repl.after_turn = noted.append
    talk.type("one")

    def broken(ids, **options):
        yield from ()
        raise KeyboardInterrupt

    talk.model.stream = broken
    talk.type("two")
    assert [turn and turn.text for turn in noted] == ["an answer", None]


def test_a_dry_run_says_what_it_would_take(machine):
    found = json.loads(machine("chat", "--dry-run", "--json").out)
    assert found["estimate_bytes"] > 400 << 20
    assert found["fits"] is True
    assert found["order"] == "chunks"
    assert "memory   up to " in machine("chat", "--dry-run").out
    assert "prefill  layer by layer" in machine("-P", "lazy", "chat", "--dry-run").out


def test_the_draft_model_is_in_the_plan(machine):
    """Once --draft was ignored, and the plan was that of the profile."""
    plain, drafting = (
        document(machine("fit", "demo", "--json", "--ram", "8GiB", *more)) for more in ([], ["--draft", "demo-small"])
    )
    sizes = [found["plans"][0]["draft"] for found in (plain, drafting)]
    assert sizes[0] < sizes[1]


def test_the_draft_model_of_a_pruning_method_is_counted_once_with_that_of_spec(machine):
    pruning = ("--set", "exactness=approx", "--set", "prune.method=spec_prefill", "--set", "prune.model=demo-small")
    asked = ("fit", "demo", "--profiles", "exact", "--ctx", "2048", "--json")
    found = [
        document(machine(*asked, *more))
        for more in ((), pruning, ("--draft", "demo-small"), (*pruning, "--draft", "demo-small"))
    ]
    plain, alone, drafts, both = (one["plans"][0]["draft"] for one in found)
    weights = 1 << 20  # of demo-small, at least
    assert plain < weights < alone
    assert max(alone, drafts) < both < alone + drafts - weights
