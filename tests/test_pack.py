"""Documents that were read once: asked from their folder as if just read, and nothing in it is believed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcli
from kvcli.chat.conversation import Chat
from kvcli.chat.document_pack import CHAT, MANIFEST, PAST, Pack, open_pack
from kvcli.chat.model import Model
from kvcli.documents import read_document
from kvcli.errors import BadInput
from kvcli.prefix_cache import snapshot_file
from kvcli.prefix_cache.prefix_cache import PrefixCache
from kvcli.settings.profile import Profile
from tests.demo_model.example import SAMPLES
from tests.fakes import Machine

ROOT = Path(__file__).parents[1]
QUESTION = SAMPLES[0].question
OPTIONS: dict[str, Any] = {"max_new_tokens": 24}
SETS: dict[str, dict[str, Any]] = {
    "exact": {},
    "lean": {},
    "snap": {},
    "kvzip": {},
    "fastgen": {},
    "h2o": {"exactness": "approx", "policy.name": "h2o"},
    "sparse": {"exactness": "approx", "sparse.method": "sketch", "sparse.floor": 64},
    "lossless": {"prefix_cache.codec": "lossless"},
    "disk": {"memory.device": "4MiB", "memory.disk": "64MiB", "prefill.chunk": 128},
}


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with kvcli.load("demo", "exact") as loaded:
        yield loaded


def talk(model: Model, name: str, system: str | None = None) -> Chat:
    text = model.open(name if not SETS[name] else "exact", set=SETS[name])
    chat = Chat(text, system, called="demo")
    chat.attach(read_document("demo:report", name="report.md"))
    return chat


@pytest.fixture(scope="module")
def packs(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("packs")

    def pack(name: str) -> Path:
        path = folder / f"{name}.kvs"
        if not path.exists():
            talk(model, name).pack(path)
        return path

    return pack


def asking(model: Model, name: str, path: Path) -> Chat:
    """A chat about a pack, as `kvcli chat --pack` opens it."""
    pack, chat = open_pack(path), talk(model, name)
    refuse(pack, chat)
    chat.text_session.pack, chat.system, chat.pending = pack, pack.chat.system, pack.documents
    return chat


def test_the_answer_is_that_of_the_document_itself(model: Model, packs: Callable[[str], Path]) -> None:
    turn, plain = asking(model, "exact", packs("exact")).send(QUESTION), talk(model, "exact").send(QUESTION)
    assert (turn.text, turn.ids) == (plain.text, plain.ids)
    assert turn.text == SAMPLES[0].answer
    assert plain.stats.prompt - 20 < turn.stats.cached == open_pack(packs("exact")).about.tokens
    assert plain.stats.cached == 0


@pytest.mark.parametrize("name", [name for name in SETS if name != "exact"])
def test_a_compressed_pack_goes_on_as_the_text_that_made_it(model: Model, tmp_path: Path, name: str) -> None:
    live = talk(model, name)
    about = live.pack(tmp_path / "one.kvs")
    asked = asking(model, name, tmp_path / "one.kvs")
    for question in (QUESTION, "And then?"):
        turn, want = asked.send(question, **OPTIONS), live.send(question, **OPTIONS)
        assert turn.ids == want.ids
        assert turn.stats.cached == want.stats.cached >= about.tokens
    assert about.settings


def test_a_pack_in_fewer_bytes_serves_where_the_other_does(model: Model, packs: Callable[[str], Path]) -> None:
    sizes = {name: (packs(name) / PAST).stat().st_size for name in ("exact", "lossless")}
    assert sizes["lossless"] < 0.77 * sizes["exact"]
    turn = asking(model, "exact", packs("lossless")).send(QUESTION)
    assert (turn.text, turn.stats.cached) == (SAMPLES[0].answer, open_pack(packs("exact")).about.tokens)


def test_a_question_that_begins_oddly_is_answered_too(model: Model, packs: Callable[[str], Path]) -> None:
    for question in ("\n\nWhy?", " why", "(1)", "\u7684?", "5"):
        turn = asking(model, "exact", packs("exact")).send(question, **OPTIONS)
        assert turn.ids == talk(model, "exact").send(question, **OPTIONS).ids
        assert turn.stats.cached > 1000


def test_a_pack_has_its_system_text(model: Model, tmp_path: Path) -> None:
    talk(model, "exact", "Answer in one word.").pack(tmp_path / "one.kvs")
    chat = asking(model, "exact", tmp_path / "one.kvs")
    assert chat.system == "Answer in one word."
    assert chat.send(QUESTION, **OPTIONS).stats.cached == open_pack(tmp_path / "one.kvs").about.tokens


def test_it_is_its_owners_alone(packs: Callable[[str], Path]) -> None:
    path = packs("exact")
    assert path.stat().st_mode & 0o777 == 0o700
    assert {(file.name, file.stat().st_mode & 0o777) for file in path.iterdir()} == {
        (name, 0o600) for name in (MANIFEST, CHAT, PAST)
    }


@pytest.mark.parametrize("reads", [0, 1, 2])
def test_one_that_is_stopped_leaves_nothing(model: Model, tmp_path: Path, reads: int) -> None:
    heard = iter(range(10))

    def stop(_: object) -> None:
        if next(heard) == reads:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk(model, "exact").pack(tmp_path / "one.kvs", stop)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvcli.chat.document_pack.snapshot_file.write", full)
    with pytest.raises(BadInput, match="No space left"):
        talk(model, "exact").pack(tmp_path / "one.kvs")
    assert not list(tmp_path.iterdir())


def refuse(pack: Pack, chat: Chat) -> None:
    pack.refuse_other(chat.text_session.session, chat.text_session.profile)


def test_each_field_in_which_it_differs_is_named_with_what_to_type(model: Model, packs: Callable[[str], Path]) -> None:
    pack = open_pack(packs("snap"))
    right = dict(pack.about.fingerprint)
    for field in right:
        pack.about.fingerprint = right | {field: "another"}
        with pytest.raises(BadInput) as caught:
            refuse(pack, talk(model, "snap"))
        assert caught.value.code == "other_pack"
        assert caught.value.lines == (f"{field} was another, is {right[field]}",)
        assert caught.value.try_
    pack.about.fingerprint = right
    with pytest.raises(BadInput) as caught:
        refuse(pack, talk(model, "kvzip"))
    assert "policy.name was snap, is kvzip" in caught.value.lines
    assert caught.value.try_[0].startswith("leave out -P and --set")


def test_it_says_under_which_settings_its_kv_cache_was_made(packs: Callable[[str], Path]) -> None:
    pack = open_pack(packs("sparse"))
    assert pack.about.settings["sparse.floor"] == "64"
    assert "sample.seed" not in pack.about.settings
    changes = {"exactness": "approx", "sparse": {"method": "sketch", "floor": 64}}
    pack.refuse_under(Profile.load("exact").replace(**changes))
    with pytest.raises(BadInput) as caught:
        pack.refuse_under(Profile.load("exact").replace(**changes | {"sparse": {"method": "sketch", "floor": 65}}))
    assert caught.value.lines == ("sparse.floor was 64, is 65",)


# --- hostile


def changed(**of: object) -> Callable[[Path], object]:
    return lambda path: (path / MANIFEST).write_text(json.dumps(json.loads((path / MANIFEST).read_text()) | of))


def files(**of: object) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        about = json.loads((path / MANIFEST).read_text())
        about["files"] = {name: of.get(name[:4], said) for name, said in about["files"].items()}
        about["files"] |= {name: said for name, said in of.items() if name not in ("chat", "past")}
        (path / MANIFEST).write_text(json.dumps(about))

    return change


def linked(name: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        (path / name).rename(path.parent / name)
        (path / name).symlink_to(path.parent / name)

    return change


def other_chat(text: str) -> Callable[[Path], object]:
    """With a digest that is right."""

    def change(path: Path) -> None:
        (path / CHAT).write_text(text)
        about = json.loads((path / MANIFEST).read_text())
        about["files"][CHAT] = {"bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        (path / MANIFEST).write_text(json.dumps(about))

    return change


FILE = {"bytes": 9, "sha256": "0" * 64}
HOSTILE: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda path: (path / MANIFEST).unlink(),
    "no JSON": lambda path: (path / MANIFEST).write_bytes(b"\xff{"),
    "deep": lambda path: (path / MANIFEST).write_text("[" * 100_000),
    "large": lambda path: (path / MANIFEST).write_text(" " * (2 << 20)),
    "a pipe": lambda path: ((path / MANIFEST).unlink(), os.mkfifo(path / MANIFEST)),
    "a link": linked(MANIFEST),
    "linked text": linked(CHAT),
    "another format": changed(schema="kvcli.pack/2"),
    "negative": changed(tokens=-1),
    "text for a number": changed(tokens="9"),
    "no fields": changed(fingerprint=[]),
    "an absolute name": files(**{"/etc/passwd": FILE}),
    "a name above": files(**{"../past.kv": FILE}),
    "endless": files(chat={"bytes": 1 << 60, "sha256": "0" * 64}),
    "shorter": files(chat={"bytes": 1, "sha256": "0" * 64}),
    "no digest": files(chat={"bytes": 1, "sha256": "x"}),
    "other text": lambda path: (path / CHAT).write_text((path / CHAT).read_text().replace("well", "wall")),
    "no chat": other_chat("{}"),
    "settings of another table": changed(settings={"sample.seed": "1"}),
    "trust": changed(settings={"load.trust_remote_code": "true"}),
    "two settings in one": changed(settings={"kv.k_bits=8 load.allow_pickle": "true"}),
    "a chat that was held": other_chat(
        '{"schema": "kvcli.chat/1", "title": null, "model": "demo", "system": null, "messages": [], "pending": []}'
    ),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_pack_is_refused_before_anything_is_read(
    packs: Callable[[str], Path], tmp_path: Path, how: str
) -> None:
    path = tmp_path / "one.kvs"
    shutil.copytree(packs("exact"), path)
    HOSTILE[how](path)
    with pytest.raises(BadInput) as caught:
        open_pack(path)
    assert caught.value.code == "bad_pack"
    assert caught.value.try_


@pytest.mark.parametrize("how", ["cut", "flipped", "linked", "gone", "other"])
def test_a_hostile_kv_cache_is_refused_when_it_is_asked(
    model: Model, packs: Callable[[str], Path], tmp_path: Path, how: str
) -> None:
    path = tmp_path / "one.kvs"
    shutil.copytree(packs("exact"), path)
    data = bytearray((path / PAST).read_bytes())
    match how:
        case "cut":
            (path / PAST).write_bytes(data[:-9])
        case "flipped":
            data[-1] ^= 1
            (path / PAST).write_bytes(data)
        case "linked":
            linked(PAST)(path)
        case "gone":
            (path / PAST).unlink()
        case "other":  # well made, of another text
            state = dict(snapshot_file.read(path / PAST))
            state["ids"] = state["ids"].clone() + torch.tensor([1] + [0] * (len(state["ids"]) - 1), dtype=torch.int32)
            snapshot_file.write(path / PAST, state)
            about, data = json.loads((path / MANIFEST).read_text()), (path / PAST).read_bytes()
            about["files"][PAST] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            (path / MANIFEST).write_text(json.dumps(about))
    chat = asking(model, "exact", path)
    with pytest.raises(BadInput) as caught:
        chat.send(QUESTION)
    assert caught.value.code == "bad_pack"
    chat.text_session.pack = None
    assert chat.send(QUESTION).text == SAMPLES[0].answer  # what could not be used is read


# --- as it is typed


def test_two_commands_read_a_document_once(tmp_path: Path) -> None:
    env = {**os.environ, "KVCLI_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def typed(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvcli", *args]
        return subprocess.run(
            command, cwd=tmp_path, env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip

    made = typed("pack", "demo:report", "-o", "one.kvs", "-P", "snap")
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("one.kvs: 1 document, ")
    turn = json.loads(typed("chat", "--pack", "one.kvs", "-p", QUESTION, "--json").stdout)
    assert turn["tokens"]["cached"] == json.loads((tmp_path / "one.kvs" / MANIFEST).read_text())["tokens"]
    other = typed("chat", "--pack", "one.kvs", "-p", QUESTION, "-P", "exact")
    assert other.returncode == 3
    assert "policy.name was snap, is none" in other.stderr
    again = typed("pack", "demo:report", "-o", "one.kvs")
    assert (again.returncode, "file_exists" in again.stderr) == (3, True)
    nowhere = typed("pack", "demo:report", "-o", "none/one.kvs")
    assert (nowhere.returncode, "its folder does not exist" in nowhere.stderr) == (3, True)
    both = typed("chat", "--pack", "one.kvs", "-f", "demo:report", "-p", QUESTION)
    assert (both.returncode, "--pack excludes" in both.stderr) == (2, True)


def test_a_pack_brings_the_settings_that_it_was_read_under(tmp_path: Path, packs: Callable[[str], Path]) -> None:
    shutil.copytree(packs("h2o"), tmp_path / "one.kvs")
    machine, ask = Machine(tmp_path), ("chat", "--pack", "one.kvs", "-p", QUESTION, "--no-save")
    done = machine(*ask)
    assert done.exit == 0, done.err
    assert "settings from one.kvs: exactness=approx, policy.name=h2o" in done.err
    for typed, said in {
        "policy.queries=128": "queries was 64, is 128",
        "kv.k_bits=8": "kv.k_bits was 16, is 8",
    }.items():
        refused = machine(*ask, "--set", typed)
        assert (refused.exit, said in refused.err) == (3, True), refused.err
        assert "leave out -P and --set of these" in refused.err


def test_why_nothing_is_kept_is_said_once_until_it_can_be(model: Model, tmp_path: Path) -> None:
    chat = talk(model, "snap")
    chat.text_session.model.prefix_cache = shelf = PrefixCache(tmp_path / "kv", 1 << 30, model.lm, min_work=0)
    (tmp_path / "kv").write_text("in the way")
    said = []
    for question in (QUESTION, "And then?", "And then?"):
        chat.send(question, **OPTIONS)
        said.append(chat.text_session.keep().why_not)
    assert said[0].startswith("the KV cache of the prompt is not saved: ")
    assert said[1:] == ["", ""]
    (tmp_path / "kv").unlink()
    assert chat.text_session.keep().prefix_cache is shelf
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "kv").write_text("in the way")
    assert chat.text_session.keep().why_not


@pytest.mark.parametrize("name", ["exact", "lean", "snap", "fastgen"])
def test_a_chat_that_is_opened_again_goes_on_as_if_it_had_not_ended(model: Model, tmp_path: Path, name: str) -> None:
    live, again = talk(model, name), talk(model, name)
    for chat in (live, again):
        chat.text_session.model.prefix_cache = PrefixCache(tmp_path / "kv", 1 << 30, model.lm, min_work=0)
    live.send(QUESTION)
    assert not live.text_session.keep().why_not
    again.messages, again.pending = list(live.messages), []
    turn, want = again.send("And then?", **OPTIONS), live.send("And then?", **OPTIONS)
    assert turn.ids == want.ids
    assert turn.stats.cached == want.stats.cached > 4000
