"""Names of models on the hub as people type them, and the file of a repository that a name selects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcli.errors import BadModel, ExitStatus
from kvcli.models import source
from kvcli.models.hub_names import ID, hub_id, select, shards
from tests.small_hub import Hub, serving

ROOT = Path(__file__).parents[1]

ONE = ["README.md", "X-Q8_0.gguf", "X-Q4_K_M.gguf", "X-UD-Q4_K_M.gguf", "X-Q4_K_S.gguf", "mmproj-X-Q4_K_M.gguf"]
SPLIT = ["BF16/X-BF16-00001-of-00002.gguf", "BF16/X-BF16-00002-of-00002.gguf", "X-IQ4_XS.gguf", "mtp-X-Q8_0.gguf"]
SIZES = ["X-2B-Q4_K_M.gguf", "X-4B-Q4_K_M.gguf", "X-2B-Q8_0.gguf"]

TREE = {"format_version": 1, "files": {name: {"size": 9, "blob_id": "0" * 40} for name in (".gitattributes", *ONE)}}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("hf.co/o/n:q4_k_m", "o/n:q4_k_m"),
        ("https://huggingface.co/o/n", "o/n"),
        ("hf://o/n:sub/x.gguf", "o/n:sub/x.gguf"),
        ("HF.CO/o/n", "o/n"),
        ("o/n:Q8_0", "o/n:Q8_0"),
        ("hf.co/", "hf.co/"),
        ("hf.co/o/../n", "hf.co/o/../n"),
        ("./hf.co/o", "./hf.co/o"),
    ],
)
def test_prefixes_of_other_programs_mean_the_hub_id(typed: str, meant: str):
    assert hub_id(typed) == meant


@pytest.mark.parametrize(
    "name",
    ["o/n:../x.gguf", "o/n:a/../../x.gguf", "o/n:/etc/x.gguf", "o/n:Q4/K", "o/n:", "o/n:a b", "hf.co/o", "HF.co/o"],
)
def test_what_leaves_the_repository_is_no_hub_id(name: str):
    assert not ID.fullmatch(name)


@pytest.mark.parametrize(
    ("files", "wanted", "first"),
    [
        (ONE, "", "X-Q4_K_M.gguf"),
        (ONE, "q8_0", "X-Q8_0.gguf"),
        (ONE, "Q4_K_M", "X-Q4_K_M.gguf"),  # a name that adds no word goes first
        (ONE, "ud-q4_k_m", "X-UD-Q4_K_M.gguf"),
        (ONE, "mmproj-X-Q4_K_M.gguf", "mmproj-X-Q4_K_M.gguf"),
        ([f for f in ONE if f != "X-Q4_K_M.gguf"], "Q4_K_M", "X-UD-Q4_K_M.gguf"),
        (["X-Q8_0.gguf", "X-Q2_K.gguf"], "", "X-Q8_0.gguf"),
        (["anything.gguf"], "", "anything.gguf"),
        (SPLIT, "bf16", "BF16/X-BF16-00001-of-00002.gguf"),
        (SPLIT, "BF16/X-BF16-00002-of-00002.gguf", "BF16/X-BF16-00001-of-00002.gguf"),
        (SPLIT[1:], "BF16", "BF16/X-BF16-00001-of-00002.gguf"),  # the missing file is named when it is read
    ],
)
def test_a_name_selects_one_model(files: list[str], wanted: str, first: str):
    assert select(files, wanted, "o/n") == first


@pytest.mark.parametrize(
    ("files", "wanted", "code", "lines"),
    [
        (ONE, "Q4_K", "model_not_found", 4),  # part of a word is no quantization
        (ONE, "Q6_K", "model_not_found", 4),
        (ONE, "absent.gguf", "model_not_found", 4),
        (SIZES, "Q4_K_M", "gguf_several", 2),
        (SIZES, "", "gguf_several", 2),
        (SPLIT, "", "gguf_several", 2),
        ([f"X-{i}.gguf" for i in range(50)], "Q6_K", "model_not_found", 13),
        (["a.txt"], "", "gguf_several", 0),
    ],
)
def test_otherwise_what_is_there_is_listed(files: list[str], wanted: str, code: str, lines: int):
    with pytest.raises(BadModel) as raised:
        select(files, wanted, f"o/n:{wanted}")
    assert (raised.value.code, len(raised.value.lines)) == (code, lines)
    for said in raised.value.try_:
        assert select(files, said.partition(":")[2], "o/n")


def test_all_files_of_a_split_model_are_named():
    assert shards("a/X-00002-of-00003.gguf") == [f"a/X-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert shards("X-00000-of-00000.gguf") == ["X-00000-of-00000.gguf"]
    assert shards("X.gguf") == ["X.gguf"]


def test_a_file_in_the_cache_is_found_beside_others_that_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The hub's library notes all files of a repository, and misses those that were not asked for."""
    gguf_files = pytest.importorskip("tests.gguf_files", reason="it writes with gguf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--o--n"
    for name, text in (("refs/main", "abc"), ("trees/abc.json", json.dumps(TREE))):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    gguf_files.write(folder / "snapshots" / "abc" / "X-Q8_0.gguf")
    for name in ("o/n", "o/n:q8_0", "hf.co/o/n:Q8_0", "o/n:X-Q8_0.gguf"):
        assert source.find(name).path.name == "X-Q8_0.gguf"
    with pytest.raises(BadModel) as raised:
        source.find("o/n:Q4_K_M")
    assert "kvcli models get o/n:Q4_K_M" in raised.value.try_
    gguf_files.write(folder / "snapshots" / "abc" / "X-Q4_K_M.gguf")
    assert source.find("o/n").path.name == "X-Q4_K_M.gguf"  # the default of several
    assert source.find("o/n:q8_0").path.name == "X-Q8_0.gguf"


@pytest.mark.slow
def test_the_name_works_wherever_a_model_is_named(tmp_path: Path):
    """On a hub of this machine: fetched by quantization in all its files, and found again without the network."""
    gguf_files = pytest.importorskip("tests.gguf_files", reason="it writes with gguf")
    repo = tmp_path / "repo"
    gguf_files.write(repo / "tiny-Q8_0.gguf", keys={"tokenizer.chat_template": gguf_files.CHAT})
    gguf_files.write(repo / "tiny-Q4_K_M.gguf", keys={"tokenizer.chat_template": gguf_files.CHAT}, split=20)
    (repo / "mmproj-tiny-Q4_K_M.gguf").write_bytes(b"GGUF")
    names = sorted(path.name for path in repo.glob("tiny-Q4*"))
    assert len(names) == 2
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}

    def run(*words: str) -> tuple[int, dict]:
        done = subprocess.run(
            [sys.executable, "-m", "kvcli", *words, "--json"], cwd=tmp_path, env=environ, capture_output=True, text=True
        )
        return done.returncode, json.loads(done.stdout)

    with serving(Hub(repo, cut=names[1])) as hub:
        environ |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf"), "KVCLI_HOME": str(tmp_path / "home")}
        environ["PYTHONPATH"] = str(ROOT)
        code, said = run("models", "get", "hf.co/someone/tiny:q6_k")
        assert (code, said["code"]) == (ExitStatus.BAD_MODEL, "model_not_found")
        assert said["lines"] == [names[0], "tiny-Q8_0.gguf"]
        code, said = run("models", "get", "hf.co/someone/tiny")  # the default; a download that breaks off goes on
        assert (code, hub.cut) == (0, ""), said
    fetched = {path.name for path in (tmp_path / "hf").rglob("*.gguf")}
    assert fetched == set(names)
    config = tmp_path / "home" / "config" / "config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text('[models.mine]\npath = "hf://someone/tiny:Q4_K_M"\n')
    for name in ("someone/tiny", "someone/tiny:q4_k_m", "mine"):
        code, said = run("fit", name, "--ctx", "64")
        assert code == 0, said
    code, said = run("fit", "hf.co/someone/tiny:Q8_0")
    assert (code, said["code"]) == (ExitStatus.BAD_MODEL, "model_not_found")
