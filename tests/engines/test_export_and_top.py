"""`kvcli profiles export` and `kvcli top`: translations of a profile, and of other engines' metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvcli.commands.top import screen
from kvcli.engines import export as exports
from kvcli.engines.metrics import figures, parsed
from kvcli.schemas.listings import ProfilesDocument, ServerLoad, TopDocument
from kvcli.settings.config import Sources, builtin_files
from kvcli.settings.profile import load_profile
from kvcli.settings.schema import METHOD_TABLES, SECTIONS, registries
from tests.engines.test_openai import Shell, engine, shell  # noqa: F401
from tests.fake_engine import FakeEngine

PROFILES = [file.profile for file in builtin_files()]


@pytest.mark.parametrize(
    ("engine_", "sets", "words"),
    [
        (
            "vllm",
            ["sample.temperature=0.2", "sample.top_p=0.9"],
            ['{"temperature": 0.2, "top_p": 0.9}', "--override-generation-config"],
        ),
        ("vllm", ["spec.max=4"], ['"num_speculative_tokens": 4,']),
        ("vllm", ["spec.method=model"], ['"model": "DRAFT"']),
        ("vllm", ["kv.k_bits=4", "exactness=approx"], ["--kv-cache-dtype int4_per_token_head"]),
        ("sglang", ["context.limit=8192"], ["--context-length 8192", "--speculative-algorithm NGRAM"]),
        ("llama-server", ["prefill.chunk=256", "sample.seed=7"], ["--batch-size 256 --ubatch-size 256", "--seed 7"]),
        ("hf", ["sample.temperature=0.0"], ['"do_sample": false', '"prompt_lookup_num_tokens": 15']),
    ],
)
def test_export_prints_the_nearest_settings(shell: Shell, engine_: str, sets: list[str], words: list[str]) -> None:  # noqa: F811
    more = [word for one in sets for word in ("--set", one)]
    assert shell("profiles", "export", "ngram", "--to", engine_, *more) == 0
    for word in words:
        assert word in shell.out
    assert "approximated: spec.method" in shell.err
    assert "lost" not in shell.err
    if engine_ == "hf":
        json.loads(shell.out)


def test_export_names_what_is_lost(shell: Shell) -> None:  # noqa: F811
    assert shell("profiles", "export", "snap", "--to", "vllm", "--json", "--set", 'load.adapters=["a\'b"]') == 0
    document = ProfilesDocument.model_validate_json(shell.out).document()["export"]
    assert set(document["lost"]) == {"policy.name", "policy.keep", "policy.alloc", "load.adapters"}
    assert set(document["approximated"]) == {"spec.method"}
    assert document["words"][:3] == ["vllm", "serve", "MODEL"]


@pytest.mark.parametrize("engine_", exports.ENGINES)
def test_every_set_key_of_every_profile_is_translated_or_lost(engine_: str) -> None:
    for name in PROFILES:
        profile = load_profile(name, sources=Sources())
        made = exports.export(profile, engine_)
        assert set(made.lost) | set(made.approximated) <= set(profile.written)
        assert not any("<" in word for word in made.words)


def test_the_table_has_only_keys_and_values_of_profiles() -> None:
    known = load_profile("ngram", sources=Sources()).values
    for engine_ in exports.ENGINES:
        for entry, words in exports.TABLE[engine_]["keys"].items():
            key, _, value = entry.partition("=")
            table, _, rest = key.partition(".")
            if table in METHOD_TABLES and rest == METHOD_TABLES[table].key:
                assert value in registries()[table], entry
            elif table not in METHOD_TABLES:
                assert key in known, entry
            for used in re.findall(r"<([\w.]+)>", " ".join(words)):
                assert used.partition(".")[0] in SECTIONS, entry
    assert set(exports.TABLE["all"]["lost"]) == set(SECTIONS)


VLLM = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="a b} c",engine="0"} 3.0
vllm:num_requests_running{model_name="a",engine="1"} 1.0
vllm:num_requests_waiting{model_name="a"} 2 1764409000000
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:generation_tokens_total 1e3
vllm:prompt_tokens_total 500
vllm:spec_decode_num_draft_tokens_total 100
vllm:spec_decode_num_accepted_tokens_total 60
vllm:time_to_first_token_seconds_sum 4.0
vllm:time_to_first_token_seconds_count 8
vllm:time_to_first_token_seconds_bucket{le="+Inf"} NaN
nonsense line {
"""


def test_figures_since_the_start_and_between_two_looks() -> None:
    first = parsed(VLLM)
    assert figures(first, {}, 0.0) == {
        "running": 4, "waiting": 2, "kv": 0.25, "tok_s": None, "read_tok_s": None, "acceptance": 0.6, "first_token": 0.5
    }  # fmt: skip
    later = parsed(VLLM.replace("1e3", "1100").replace("_tokens_total 100", "_tokens_total 120"))
    between = figures(later, first, 2.0)
    assert (between["tok_s"], between["acceptance"], between["first_token"]) == (50.0, 0.0, None)
    assert figures(parsed("vllm:generation_tokens_total 30"), later, 2.0)["tok_s"] == 15.0  # the server began again


@pytest.mark.parametrize(
    ("text", "column", "value"),
    [
        ("sglang:num_running_reqs 2", "running", 2),
        ("sglang:token_usage 0.28", "kv", 0.28),
        ("llamacpp:requests_deferred 1", "waiting", 1),
        ("sglang:time_to_first_token_seconds_sum 3\nsglang:time_to_first_token_seconds_count 2", "first_token", 1.5),
        ("other:thing 1", "running", None),
        ('vllm:num_requests_running{engine="0"} NaN', "running", None),
        ("vllm:kv_cache_usage_perc +Inf 12", "kv", None),
        ("", "tok_s", None),
    ],
)
def test_names_of_other_servers(text: str, column: str, value: float | None) -> None:
    found = figures(parsed(text), {}, 0.0)
    assert found.keys() == ServerLoad.model_fields.keys() - {"url", "error"}
    assert found[column] == value


def test_top_once_with_a_server_that_does_not_answer(shell: Shell, engine: FakeEngine, tmp_path: Path) -> None:  # noqa: F811
    engine.metrics = VLLM
    assert shell("top", "URL", "http://127.0.0.1:9/x", "--interval", "0.1", "--json") == 0
    up, down = TopDocument.model_validate_json(shell.out).servers
    assert (up.running, up.tok_s, up.error) == (4, 0.0, None)
    assert down.error == "engine_unreachable"
    assert shell("top", "URL", "--interval", "0.1") == 0
    assert "25%" in shell.out
    assert shell("top", "http://127.0.0.1:9", "--interval", "0.1") == 7
    assert shell("top", "URL", "--interval", "0") == 2
    (tmp_path / "key").write_text("sk-1")
    (tmp_path / "key").chmod(0o600)
    assert shell("top", "URL", "--interval", "0.1", "--key-file", "key") == 0
    assert engine.keys[-1] == "Bearer sk-1"


@pytest.mark.parametrize("width", [24, 39, 79, 199])
def test_each_server_has_one_line_at_every_width(width: int) -> None:
    rows = [
        ServerLoad(
            url="http://127.0.0.1:8000", running=3, waiting=2, kv=0.25, tok_s=1234.5, read_tok_s=4, first_token=1
        ),
        ServerLoad(url="https://inference-server-17.example.org:8080", error="engine_unreachable"),
    ]
    head, up, down = screen(rows, width)
    assert max(map(len, (head, up, down))) <= width
    assert head.split()[0] == "server"
    assert ("KV" in head) == ("running" in head) == (width >= 39)
    assert "1234.5" in up  # no figure is cut
    assert up.startswith("127.0.0." if width == 24 else "127.0.0.1:8000  ")
    assert (down.split()[-1] == "engine_unreachable") == (width >= 39)
