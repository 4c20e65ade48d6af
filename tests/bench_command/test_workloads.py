"""Prompts of every workload: as long as asked for, in turns, and refused where a text ends too early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli

from kvcli.bench.texts import TEXTS
from kvcli.bench.workloads import NAMES, TABLE, WORKLOADS, prompt_of
from kvcli.commands.bench.options import _WORKLOAD
from kvcli.demo import weights_dir
from kvcli.documents import Document
from kvcli.errors import BadInput
from tests.fakes import Machine
from tests.families import build
from tests.small_tokenizers import KINDS

pytestmark = pytest.mark.skipif(
    not (weights_dir() / "tokenizer.json").exists(), reason="the demo model is not in this checkout"
)
VOCAB, NEW = 320, 31
FILE = Document("notes.txt", "A line of some words, and another.\n" * 40, "")


def prompt(name: str, kind: str, ctx: int) -> list[int]:
    return prompt_of(name, {FILE.name: FILE}, KINDS[kind](), VOCAB, ctx, NEW)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("kind", "ctx"), [("byte-level", 4096), *((kind, 512) for kind in KINDS)])
def test_a_prompt_fills_the_context(name: str, kind: str, ctx: int):
    ids = prompt(name, kind, ctx)
    assert ctx - NEW - 32 < len(ids) <= ctx - NEW


@pytest.mark.parametrize("name", WORKLOADS)
def test_messages_take_turns_around_the_text(name: str):
    text = "Depot {text} stands\nhere."
    messages = WORKLOADS[name].ask(text)
    assert [m["role"] for m in messages] == (["user", "assistant"] * len(messages))[: len(messages)]
    assert messages[-1]["role"] == "user"
    assert text in messages[0]["content"]
    assert messages[0]["content"] != text
    assert not any(text in m["content"] for m in messages[1:])


def test_the_prompt_holds_the_beginning_of_the_text_and_the_whole_question():
    tokenizer: Any = KINDS["byte-level"]()
    asked = WORKLOADS["manual"].ask("")[0]["content"]
    words = tokenizer.decode(prompt("manual", "byte-level", 512))
    assert words.index("# Write-Ahead Logging") < words.index("advantages and disadvantages") < words.index(asked)


@pytest.mark.parametrize("name", ["article", FILE.name])
def test_a_text_that_is_too_short_is_refused_and_the_advice_works(name: str):
    with pytest.raises(BadInput, match=f"{name} is too short") as caught:
        prompt(name, "byte-level", 200_000)
    flag, ctx = caught.value.try_[0].split()
    assert (caught.value.code, flag) == ("too_short", "--ctx")
    assert len(prompt(name, "byte-level", int(ctx))) == caught.value.detail["tokens"]


def test_a_report_grows_as_long_as_it_is_asked_for():
    assert len(prompt("summary", "byte-level", 20_000)) > 19_900


def test_every_text_is_used_and_every_name_is_in_the_help():
    assert {row["text"] for row in tomli.loads(TABLE.read_text(encoding="utf-8")).values()} == set(TEXTS)
    assert [name for name in NAMES if name not in _WORKLOAD] == []


def test_a_real_text_is_the_default_but_for_the_demo(tmp_path: Path):
    build("llama").save_pretrained(tmp_path / "other")
    machine = Machine(tmp_path)
    for model, name in (("demo", "summary"), (str(tmp_path / "other"), "article")):
        done = machine("bench", model, "--ctx", "32", "-n", "8", "--dry-run", "--json")
        assert done.exit == 0, done.err
        assert json.loads(done.out)["args"]["workloads"] == [name]
