"""A stranger's tokenizer can neither hang nor fill a machine, and what is plain is cut as it always was."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import kvcli
from kvcli.commands.common.exits import Interrupt
from kvcli.errors import BadModel, ContextOverflow, UsageError
from kvcli.models import source
from kvcli.models import tokenizer as tokenizing
from kvcli.models.text import decode, encode, encode_with_places
from kvcli.models.tokenizer import Tokenizing, is_plain, load_tokenizer
from tests.families import build
from tests.small_tokenizers import KINDS, byte_fallback

Json = dict[str, Any]
QUESTION = "a " + "banana" * 10 + "x" * 40


def literal(pattern: str, content: str) -> Json:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def regex(pattern: str, content: str) -> Json:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def row(name: str, *steps: Json) -> Json:
    return {"type": "Sequence", name: list(steps)}


# ---- what is plain ----

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{{0}}"
KNOWN = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama 3": rf"{WORDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{END}",
    "qwen": rf"{WORDS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{END}",
    "gpt-4o": CASES.replace("{0}", WORDS + "?") + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{END}",
    "tekken": CASES.replace("{0}", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{END}",
    "deepseek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+" + f"|{END}",
    "falcon": "[0-9][0-9][0-9]",
}
GO_BACK = r"""(x+x+)+y  x*x*y  (a*)*b  (?:a|a)*b  .*x  (?=a*b)a  \s*[\r\n]+  [a-z]+@  a+(?!\S)  a*b+|a+c*d  (a+)\1
a{2,}b  a+?b  [[a]  (?x)a  [^q]*(?=q)r""".split()
GO_BACK += ["a?" * 20 + "a" * 20, "(?:a|b)" * 9, "a" * 2000]


@pytest.mark.parametrize("pattern", KNOWN.values(), ids=KNOWN)
def test_the_patterns_of_the_field_are_plain(pattern: str):
    assert is_plain(row("pretokenizers", split(pattern), {"type": "ByteLevel"}))


@pytest.mark.parametrize("pattern", GO_BACK)
def test_a_pattern_that_may_go_back_and_forth_is_not(pattern: str):
    assert not is_plain(split(pattern))


def test_steps_that_let_a_text_grow_are_not_plain():
    prepend = {"type": "Prepend", "prepend": "▁"}
    assert is_plain(None, row("normalizers", prepend, literal(" ", "▁")), literal("▁", " "), literal("``", '"'))
    assert not is_plain(row("normalizers", *[literal("a", "aa")] * 4))
    assert not is_plain(row("normalizers", row("normalizers", literal("a", "aa")), *[literal("b", "bbb")] * 2))
    assert not is_plain(regex(" +", " "))
    assert not is_plain(literal("", "a"))
    assert not is_plain(prepend | {"prepend": "a" * 99})
    assert not is_plain({"type": "Precompiled", "precompiled_charsmap": ""})


def test_the_bundled_model_is_plain(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizing, "WorkerProcess", lambda *_: pytest.fail("a process was started"))
    tokenizer = load_tokenizer(source.find("demo", offline=True), False)
    assert decode(tokenizer, encode(tokenizer, QUESTION)) == QUESTION


# ---- here and elsewhere alike ----

TEXTS = ["Hello world, wörld <|end|> 水\U0001f600\n\n  x", "", "<s>Hello</s>", "▁�\x00"]


def guarded(kind: str) -> tuple[Any, Any]:
    """A tokenizer, and the same whose texts all go elsewhere."""
    mine, other = KINDS[kind](), copy.deepcopy(KINDS[kind]())
    standing = Tokenizing(other)
    vars(standing).update(_cuts_here=False, _joins_here=False)
    other._encode_plus, other._decode = standing.encode, standing.decode
    return mine, other


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_cut_in_another_process_is_cut_the_same(kind: str):
    mine, other = guarded(kind)
    for text in TEXTS:
        for special in (False, True):
            assert encode(other, text, special) == encode(mine, text, special)
        assert encode(other, f"\ufdd0{text}\ufdd1x") == encode(mine, f"\ufdd0{text}\ufdd1x")
        assert encode_with_places(other, text) == encode_with_places(mine, text)
        ids = encode(mine, text)
        assert decode(other, ids) == decode(mine, ids)
        assert other.decode(ids, skip_special_tokens=True) == mine.decode(ids, skip_special_tokens=True)
    with pytest.raises(UsageError):
        other(["a", "b"])


def test_a_long_text_goes_elsewhere_and_a_text_that_is_none_is_the_tokenizers_fault(monkeypatch: pytest.MonkeyPatch):
    tokenizer = load_tokenizer(source.find("demo", offline=True), False)
    ids, long = encode(tokenizer, QUESTION), encode(tokenizer, QUESTION * 9)
    monkeypatch.setattr(tokenizing, "PIECE", 200)
    standby = tokenizer._encode_plus.__self__._standby
    assert encode(tokenizer, QUESTION) == ids
    assert standby._process is None
    assert encode(tokenizer, QUESTION * 9) == long
    process = standby._process._process
    with pytest.raises(BadModel) as caught:
        encode(tokenizer, "\ud800" * 300)
    assert caught.value.code == "bad_tokenizer"
    del standby, tokenizer, caught
    assert process.poll() is not None  # it goes with its tokenizer


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_a_copy_cuts_in_a_process_of_its_own(copied: Any):
    tokenizer = load_tokenizer(source.find("demo", offline=True), False)
    other = copied(tokenizer)
    assert other._encode_plus.__self__._whose() is other
    assert encode(other, QUESTION) == encode(tokenizer, QUESTION)


# ---- bombs ----


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bombs") / "whole"
    build("llama", vocab_size=400, hidden_size=32, intermediate_size=40, num_hidden_layers=2).save_pretrained(path)
    byte_fallback(None).save_pretrained(path)
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "SECONDS", 4.0)
    monkeypatch.setattr(tokenizing, "START", 5.0)


def made(whole: Path, folder: Path, **changes: Any) -> Path:
    """The model with other steps in its tokenizer; what its tokenizer.json is joins the folder in links."""
    folder.mkdir()
    for file in whole.iterdir():
        (folder / file.name).symlink_to(file)
    its = json.loads((whole / "tokenizer.json").read_text())
    its["added_tokens"] += changes.pop("added", [])
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(its | changes))
    return folder


ADDED = {"id": 382, "content": "banana", "special": False, "normalized": True}
ADDED |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
HEAVY = "tokenizer_too_heavy"
BOMBS: dict[str, tuple[str, Json]] = {
    "a normalizer that doubles": (HEAVY, {"normalizer": row("normalizers", *[literal("a", "aa")] * 28)}),
    "by a pattern": (HEAVY, {"normalizer": row("normalizers", *[regex("[a-z]", "aa")] * 28)}),
    "of nothing": (HEAVY, {"normalizer": row("normalizers", *[regex("(?=a)", "a")] * 28)}),
    "at once": (HEAVY, {"normalizer": literal("a", "a" * 20_000_000)}),
    "when it is loaded": (HEAVY, {"normalizer": row("normalizers", *[literal("a", "aa")] * 40), "added": [ADDED]}),
    "a decoder that doubles": (HEAVY, {"decoder": row("decoders", *[regex("[^q]", "aa")] * 28)}),
    "a pattern that goes back": ("bad_tokenizer", {"pre_tokenizer": split("(x+x+)+y")}),
    "a normalizer that goes back": ("bad_tokenizer", {"normalizer": regex("(x+x+)+y", "z")}),
    "a map that is none": ("bad_tokenizer", {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}),
    "levels": ("bad_tokenizer", {"normalizer": json.loads('{"type": "Sequence", "normalizers": [' * 99 + "]}" * 99)}),
    "words for steps": ("bad_tokenizer", {"normalizer": "NFC"}),
    "lists for words": ("bad_tokenizer", {"normalizer": {"type": ["Replace"], "pattern": 5}}),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_tokenizer_is_bounded_in_time_and_memory(whole: Path, tmp_path: Path, quick: None, bomb: str, capfd: Any):
    code, changes = BOMBS[bomb]
    with pytest.raises(BadModel) as caught, kvcli.load(str(made(whole, tmp_path / "m", **changes)), "exact") as model:
        model.generate(QUESTION, max_new_tokens=4)
    assert caught.value.code == code
    assert caught.value.try_
    assert "panicked" not in capfd.readouterr().err


def test_a_key_that_hides_does_not_hide_it(whole: Path, tmp_path: Path, quick: None):
    folder = made(whole, tmp_path / "m", added=[ADDED], normalizer=None)
    text = (folder / "tokenizer.json").read_text()
    bomb = json.dumps(row("normalizers", *[literal("a", "aa")] * 40))
    for key in ('"normalizer"', '"normaliz\\u0065r"'):  # the last one counts
        (folder / "tokenizer.json").write_text(f"{text[:-1]}, {key}: {bomb}}}")
        with pytest.raises(BadModel, match="cannot be used"):
            load_tokenizer(source.find(str(folder)), False)


def test_ctrl_c_is_heard_while_it_is_busy(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizing, "SECONDS", 100.0)
    slow = split("[^q]*(?=q)r")  # each letter looks through all that follow it: for longer than anybody waits
    tokenizer = load_tokenizer(source.find(str(made(whole, tmp_path / "m", pre_tokenizer=slow))), False)
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt), Interrupt() as cancel:
        encode(tokenizer, "x" * 200_000 + "qr")
    assert not cancel()
    assert encode(tokenizer, "Hello") == encode(byte_fallback(None), "Hello")


def test_what_no_window_holds_is_refused_before_it_is_cut(monkeypatch: pytest.MonkeyPatch):
    with kvcli.load("demo", "exact") as model:
        monkeypatch.setattr(type(model.tokenizer), "_encode_plus", lambda *_, **__: pytest.fail("it was cut"))
        chat, text = model.chat(), "a" * (model.limit * 200)
        for ask in (lambda: model.generate(text), lambda: chat.send(text)):
            with pytest.raises(ContextOverflow) as caught:
                ask()
            assert "characters, at least" in caught.value.lines[0]
            assert caught.value.try_
        assert not chat.messages
