"""The door by which files are written: whole or not at all, private, without leftovers, and the only one."""

from __future__ import annotations

import ast
import errno
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvcli import files
from kvcli.files import BEGINS, ENDS, replacing_folder, sweep

ROOT = Path(__file__).parents[1]
WRITER = "import sys; from pathlib import Path; from kvcli.files import *\n"  # how the code of another process begins
HALF = f"{WRITER}with replacing(Path(sys.argv[1])) as s: s.write(b'half'); s.flush(); print(flush=True); input()"
LINES = (
    WRITER
    + r"""
path, name, most = sys.argv[1:]
for i in range(200):
    append(Path(path), f"{name} {i} {'x' * 50}\n", int(most))
"""
)

# Whatever can write a file and is not the door, with its reason. A new line here is a decision.
OUTSIDE = {
    ("kvcli/chat/database.py", "connect"): "SQLite writes its files itself, and never half",
    ("kvcli/commands/common/exits.py", "FileHandler"): "--log-file: a stream of records that logging keeps open",
    ("kvcli/commands/chat/repl.py", "TemporaryDirectory"): "what $EDITOR is handed; the text is back when it ends",
    ("kvcli/commands/chat/repl.py", "write_text"): "the same",
    ("kvcli/models/tokenizer.py", "TemporaryFile"): "a copy without a name for the process that cuts text",
    ("kvcli/kv/tiers/disk.py", "TemporaryFile"): "the disk tier: no name, gone with the process",
    ("kvcli/kv/tiers/disk.py", "ftruncate"): "the same",
    ("kvcli/documents/read.py", "SpooledTemporaryFile"): "a copy without a name for the parser",
    ("kvcli/safe_output.py", "open"): "the null device, where a stream ends that takes nothing more",
    ("kvcli/environment.py", "FileIO"): "the null device, where a stream is closed",
    ("kvcli/models/gguf/convert.py", "write_text"): "into a folder of the door",
    ("kvcli/models/gguf/convert.py", "open"): "the same",
    ("kvcli/models/gguf/convert.py", "save_pretrained"): "the same",
    ("kvcli/heads/headmap.py", "savez_compressed"): "into memory",
    ("kvcli/engine/hf/meta_check.py", "TemporaryDirectory"): "a config, which transformers takes from a folder alone",
    ("kvcli/engine/hf/meta_check.py", "write_text"): "the same",
    ("kernels/native/build.py", "TemporaryDirectory"): "what the compiler makes, when kvcli is built",
    ("kernels/native/build.py", "copy"): "the same",
}
WRITES = {
    *("write_text", "write_bytes", "touch", "mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryFile", "mktemp"),
    *("TemporaryDirectory", "SpooledTemporaryFile", "copyfile", "copytree", "symlink_to", "hardlink_to", "ftruncate"),
    *("FileHandler", "RotatingFileHandler", "FileIO", "save_file", "save_pretrained", "savez", "savez_compressed"),
    *("GGUFWriter", "tofile"),
}
OF_MODULES = {
    "copy",
    "copy2",
    "move",
    "replace",
    "rename",
    "link",
    "symlink",
    "truncate",
    "save",
    "connect",
}  # common words


def writes_of(path: Path) -> set[str]:
    """Names of the calls in a file that can write one."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    bases = {ast.unparse(b).rpartition(".")[2] for node in nodes if isinstance(node, ast.ClassDef) for b in node.bases}
    return (bases & WRITES) | {call for node in nodes if (call := _write(node))}


def _write(node: ast.AST) -> str:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
        return ""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
    owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    if name in ("open", "fdopen"):
        said = [a.value for a in [*node.args, *(k.value for k in node.keywords)] if isinstance(a, ast.Constant)]
        modes = [w for w in said if isinstance(w, str) and re.fullmatch("[rwxabt+]+", w) and set(w) & set("wxa+")]
        return name if modes or re.search("O_(WRONLY|RDWR|APPEND|CREAT)", ast.unparse(node)) else ""
    if name in OF_MODULES:  # a path's own replace and rename take one argument, those of text two
        of_path = name in ("replace", "rename") and owner and len(node.args) == 1 and not node.keywords
        return name if of_path or owner in ("os", "shutil", "torch", "np", "sqlite3") else ""
    return name if name in WRITES else ""


def test_a_folder_gets_its_name_when_it_is_full_and_not_before(tmp_path: Path):
    with replacing_folder(tmp_path / "mine") as made:
        (made / "a").write_text("whole")
        assert not (tmp_path / "mine").exists()
        sweep(tmp_path)  # another run that starts: this one is at work
        assert made.exists()
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    assert (tmp_path / "mine" / "a").read_text() == "whole"
    with replacing_folder(tmp_path / "mine") as made:  # who comes second leaves what is there
        (made / "a").write_text("other")
    assert (tmp_path / "mine" / "a").read_text() == "whole"
    with pytest.raises(RuntimeError), replacing_folder(tmp_path / "yours") as made:
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_folder_that_a_killed_run_left_is_swept(tmp_path: Path):
    left = tmp_path / f"{BEGINS}abc{ENDS}"
    left.mkdir()
    (left / "half").write_text("x")
    (tmp_path / "mine").mkdir()
    sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_nothing_else_writes_files():
    """But for what makes the demo model, which runs in a checkout."""
    sources = [*ROOT.glob("kvcli/**/*.py"), *ROOT.glob("kernels/**/*.py")]
    named = {p.relative_to(ROOT).as_posix(): p for p in sources}
    named = {n: p for n, p in named.items() if n != "kvcli/files.py" and not n.startswith("kvcli/demo/")}
    found = {(name, call) for name, path in named.items() for call in writes_of(path)}
    assert found == set(OUTSIDE)


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("open(p, 'w')", "open"),
        ("p.open(mode='xb')", "open"),
        ("p.open('r+')", "open"),
        ("os.open(p, os.O_RDONLY)", ""),
        ("os.open(p, os.O_WRONLY | os.O_CREAT)", "open"),
        ("open(p)", ""),
        ("open(p, 'rb')", ""),
        ("p.replace(q)", "replace"),
        ("text.replace('a', 'b')", ""),
        ("replace(turn, text='')", ""),
        ("os.rename(p, q)", "rename"),
        ("p.write_text('')", "write_text"),
        ("torch.save(x, p)", "save"),
    ],
)
def test_what_counts_as_writing(code: str, call: str):
    assert _write(ast.parse(code, mode="eval").body) == call


def test_a_file_is_private_and_leaves_nothing_beside_it(tmp_path: Path):
    folder = files.private_folder(tmp_path / "a" / "b")
    files.write_private(folder / "one", "first")
    files.write_private(folder / "one", b"second")
    assert [p.name for p in folder.iterdir()] == ["one"]
    assert (folder / "one").read_text() == "second"
    assert [stat.S_IMODE(p.stat().st_mode) for p in (folder / "one", folder, folder.parent)] == [0o600, 0o700, 0o700]


def test_a_temporary_folder_goes_with_its_owner_and_not_before(tmp_path: Path):
    with files.temporary_folder(tmp_path) as folder:
        (folder / "part").write_text("x")
        files.sweep(tmp_path)
        assert (folder / "part").exists()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(tmp_path.iterdir()) == []
    (tmp_path / f"{files.BEGINS}x{files.ENDS}" / "of a run that was killed").mkdir(parents=True)
    files.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_new_file_never_replaces_one(tmp_path: Path):
    files.write_private(tmp_path / "one", "first", is_new=True)
    with pytest.raises(FileExistsError):
        files.write_private(tmp_path / "one", "second", is_new=True)
    assert (tmp_path / "one").read_text() == "first"
    assert len(list(tmp_path.iterdir())) == 1


def test_without_links_a_new_file_never_replaces_one_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "link", _failing(errno.EPERM))
    test_a_new_file_never_replaces_one(tmp_path)


@pytest.mark.parametrize("call", ["fsync", "fchmod", "replace"])
def test_a_write_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str):
    files.write_private(tmp_path / "one", "first")
    monkeypatch.setattr(os, call, _failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        files.write_private(tmp_path / "one", "second")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("one", "first")]


def test_file_and_folder_are_synced_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The content before the name, the name before the return."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def seen(handle: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", seen)
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("name"), replace(*names)))
    files.write_private(tmp_path / "one", "text")
    assert done == ["file", "name", "folder"]
    done.clear()
    files.append(tmp_path / "lines", "text\n")
    assert done == ["file"]


def test_a_folder_and_all_in_it_are_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def seen(handle: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", seen)
    monkeypatch.setattr(Path, "rename", lambda self, to: (done.append("name"), rename(self, to))[1])
    with replacing_folder(tmp_path / "one") as made:
        for name in "ab":
            (made / name).write_text(name)
    assert sorted(done[:2]) == ["a", "b"]
    assert done[2:] == [made.name, "name", tmp_path.name]


def test_what_a_killed_run_left_goes_and_what_a_running_one_writes_stays(tmp_path: Path):
    running, killed = (_python(HALF, str(tmp_path / name)) for name in ("running", "killed"))
    for process in (running, killed):
        assert process.stdout.readline() == "\n"
    killed.kill()
    killed.wait()
    assert len(list(tmp_path.iterdir())) == 2
    files.sweep(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    running.communicate("\n")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("running", "half")]


def test_sweeping_takes_only_its_own(tmp_path: Path):
    for name in (".kvcli-notes", ".part", "x.part", ".kvcli.toml"):
        (tmp_path / name).write_text("mine")
    os.mkfifo(tmp_path / ".kvcli-x.part")
    for name, to in ((".kvcli-y.part", "x.part"), (".kvcli-z.part", "folder")):
        (tmp_path / name).symlink_to(to)
    (tmp_path / "folder").mkdir()
    files.sweep(tmp_path)
    assert (tmp_path / ".kvcli-y.part").is_symlink(), "a link is none of ours, and what it leads to is not locked"
    assert (tmp_path / "folder").is_dir()
    files.sweep(tmp_path / "nowhere")
    assert {".kvcli-notes", ".part", "x.part", ".kvcli.toml"} <= {p.name for p in tmp_path.iterdir()}


def test_a_temporary_file_swept_before_it_was_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lock, swept = files.lock, []

    def late(handle: int) -> None:
        if not swept:
            swept.append(len(list(tmp_path.iterdir())))
            files.sweep(tmp_path)
        lock(handle)

    monkeypatch.setattr(files, "lock", late)
    files.write_private(tmp_path / "one", "text")
    assert swept == [1]
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("one", "text")]


def test_an_output_keeps_what_its_owner_made_of_it(tmp_path: Path):
    """A link stays a link, a mode stays; what is no file is written to."""
    target, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    target.chmod(0o644)
    link.symlink_to(target)
    files.write_output(link, "new")
    assert link.is_symlink()
    assert (target.read_text(), stat.S_IMODE(target.stat().st_mode)) == ("new", 0o644)
    os.mkfifo(pipe)
    reader = _python("import sys; print(open(sys.argv[1]).read())", str(pipe))
    files.write_output(pipe, "through")
    assert reader.communicate()[0] == "through\n"
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize(
    ("call", "number"),
    [("replace", errno.EBUSY), ("replace", errno.EPERM), ("mkstemp", errno.EACCES), ("mkstemp", errno.EROFS)],
)
def test_an_output_that_cannot_be_replaced_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
):
    """A file that is mounted by itself, as `docker -v` does, or one in a folder that is closed to us."""
    (tmp_path / "one").write_text("old and longer")
    monkeypatch.setattr(os if call == "replace" else files.tempfile, call, lambda *_, **__: _failing(number)())
    if call == "mkstemp":
        monkeypatch.setattr(files.tempfile, "TemporaryFile", lambda *_, **__: _failing(number)())
    files.try_output(tmp_path / "one")
    files.write_output(tmp_path / "one", "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("one", "new")]
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        files.write_output(tmp_path / "two", "new")


def test_a_log_that_is_a_link_stays_one(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for i in range(20):
        files.append(tmp_path / "link", f"{i:40}\n", most=200)
    assert (tmp_path / "link").is_symlink()
    assert 0 < (tmp_path / "real").stat().st_size <= 200


def test_lines_of_many_processes_are_all_there_while_the_older_half_goes(tmp_path: Path):
    log = tmp_path / "log"
    for most in (0, 4096):
        log.unlink(missing_ok=True)
        for process in [_python(LINES, str(log), name, str(most)) for name in "abc"]:
            assert process.wait() == 0
        lines = log.read_text().splitlines()
        assert all(re.fullmatch(r"[abc] \d+ x{50}", line) for line in lines)
        assert len(set(lines)) == len(lines) == 600 or (most and log.stat().st_size <= most)
        for name in "abc":  # the newest of each are in order
            numbers = [int(line.split()[1]) for line in lines if line.startswith(name)]
            assert numbers == list(range(200))[200 - len(numbers) :]


def test_a_line_that_a_killed_run_left_half_spoils_no_other(tmp_path: Path):
    (tmp_path / "log").write_text("whole\nha")
    files.append(tmp_path / "log", "next\n")
    assert (tmp_path / "log").read_text() == "whole\nha\nnext\n"


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files.append(tmp_path / "log", "whole\n")
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:3]))
    with pytest.raises(OSError, match="No space"):
        files.append(tmp_path / "log", "too long\n")
    assert (tmp_path / "log").read_text() == "whole\n"


def test_a_signal_in_the_middle_leaves_the_old_text(tmp_path: Path):
    """Ctrl-C, that is: what is swept after SIGKILL goes at once."""
    (tmp_path / "one").write_text("old")
    process = _python(HALF, str(tmp_path / "one"))
    assert process.stdout.readline() == "\n"
    process.send_signal(signal.SIGINT)
    process.wait(60)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("one", "old")]


def _failing(number: int):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def _python(code: str, *args: str) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-c", code, *args], cwd=ROOT, text=True, **pipes)
