"""Packaging: what an installation holds, and what it may bring along."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
RUNTIME = [Requirement(line) for line in PROJECT["project"]["dependencies"]]


def _python(*args: str, **env: str) -> str:
    """stdout of a fresh interpreter in the root of the checkout."""
    done = subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_folder_at_the_root_is_a_package_but_kvcli():
    """A top-level package called `kernels` would be taken for the one transformers looks for."""
    assert [p.parent.name for p in ROOT.glob("*/__init__.py")] == ["kvcli"]


@pytest.mark.parametrize("name", ["kernels", "profiles"])
def test_links_are_relative(name: str):
    link = ROOT / "kvcli" / name
    if not link.is_symlink() and not link.is_file():
        pytest.skip("a copy of the tree without links, as an unpacked sdist is")
    text = os.readlink(link) if link.is_symlink() else link.read_text(encoding="utf-8")  # text: a clone without links
    assert text == f"../{name}"


def test_a_package_named_kernels_changes_nothing(tmp_path: Path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    code = "import kernels, kvcli.kernels.dispatch as d; print(kernels.__file__); print(d.__name__)"
    theirs, ours = _python("-c", code, PYTHONPATH=str(tmp_path)).splitlines()
    assert Path(theirs) == tmp_path / "kernels" / "__init__.py"
    assert ours == "kvcli.kernels.dispatch"


def test_without_one_transformers_sees_none():
    code = "from transformers.utils import is_kernels_available as a; import kvcli.kernels.dispatch; print(a())"
    assert _python("-c", code) == "False\n"


def test_wheel_and_sdist_hold_the_tree(tmp_path: Path):
    pytest.importorskip("hatchling", reason="the build backend; comes with the dev extra")
    _python("-m", "hatchling", "build", "-d", str(tmp_path), KVCLI_WHEEL="any")  # test_hook.py has the others
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    listed = _tracked()
    want = {f"kvcli/{n}" if n.startswith(("kernels/", "profiles/")) else n for n in listed}
    with zipfile.ZipFile(wheel) as z:
        got = {n for n in z.namelist() if ".dist-info/" not in n}
    noted = {"kvcli/kernels/native/why_not.txt"}  # instead of a library
    assert got == noted | {n for n in want if n.startswith("kvcli/") and not n.endswith((".c", ".h"))}
    with tarfile.open(sdist) as t:
        got = {m.name.partition("/")[2] for m in t.getmembers() if m.isfile()}
    assert got - {"PKG-INFO"} == listed | {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"}


def _tracked() -> set[str]:
    """Files of the tree, real ones only, that a package is made of."""
    tops = ["kvcli", "kernels", "profiles", "tests", "docs", ".ci"]
    files = [p for top in tops for p in (ROOT / top).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    links = [ROOT / "kvcli" / name for name in ("kernels", "profiles")]
    made = ("libkvcli.so", "libkvcli.dylib", "kvcli.dll", "why_not.txt")
    files = [p for p in files if p.name not in made and not any(p.is_relative_to(link) for link in links)]
    return {p.relative_to(ROOT).as_posix() for p in files}


def test_every_path_named_in_the_docs_exists():
    """In messages of the program too. The lab log is history and may name what is gone."""
    pages = [
        p for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if p.name not in ("lab-log.md", "changelog.md")
    ]
    named = {
        (_name(p), path)
        for p in pages
        for path in re.findall(r"`((?:kvcli|engine|drafts|kv|tests|docs|kernels)/[\w/.-]+)`", p.read_text())
    }
    named |= {(_name(p), path) for p in pages for path in re.findall(r"\]\((?!http)([\w/.-]+)[#)]", p.read_text())}
    for p in ROOT.glob("kvcli/**/*.py"):
        named |= {(_name(p), path) for path in re.findall(r"\bdocs/[\w/-]+\.md", p.read_text(encoding="utf-8"))}
    assert {(name, path) for name, path in named if not _exists(name, path)} == set()


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = [p.relative_to(ROOT / "docs").as_posix() for p in ROOT.glob("docs/**/*.md")]
    assert [page for page in pages if f"({page})" not in index and page != "index.md"] == []


def test_published_methods_are_counted_as_their_table_says():
    page = (ROOT / "docs" / "design" / "methods.md").read_text(encoding="utf-8")
    n = [len(re.findall(rf"^\| [^|]+ \| {state} \|", page, re.MULTILINE)) for state in ("built", "differs", "declined")]
    assert f"{n[0]} built, {n[1]} differ, {n[2]} declined" in page
    assert sum(n) == 72


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _exists(page: str, path: str) -> bool:
    """A path from the page's folder (a link), or from one of the folders that code is named from."""
    return any((ROOT / of / path).exists() for of in (Path(page).parent, "", "kvcli"))


def test_every_test_named_in_the_docs_exists():
    """Of those that a page says hold something."""
    named = {name for p in ROOT.glob("docs/**/*.md") for name in re.findall(r"`(test_\w+)`", p.read_text("utf-8"))}
    assert named
    there = "".join(p.read_text("utf-8") for p in ROOT.glob("tests/**/*.py"))
    assert {name for name in named if f"def {name}(" not in there} == set()


def test_every_code_of_an_error_stands_in_a_test():
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    codes = re.findall(r"^\| `(\w+)` \|", page.partition("generated: codes")[2], re.MULTILINE)
    tests = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py"))
    assert len(codes) > 100
    assert set(codes) - set(re.findall(r"""["'[](\w+)["'\]]""", tests)) == set()


def test_the_readmes_sample_is_one_of_the_demos():
    from tests.demo_model.example import SAMPLES

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    question, answer = re.findall(r'^\$ kvcli chat demo -f demo:report -p "(.*?)".*\n(.*)$', readme, re.MULTILINE)[0]
    assert (question, answer) in [(sample.question, sample.answer) for sample in SAMPLES]
    assert readme.count(f'"{question}"') >= 4  # the first command, the sample with its marker, the Python example


def test_the_readmes_profile_is_a_profile(tmp_path: Path):
    (toml,) = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.toml").write_text(toml, encoding="utf-8")
    shown = _python("-m", "kvcli", "profiles", "show", "--origin", KVCLI_HOME=str(tmp_path), HOME=str(tmp_path))
    assert "0.95" in shown
    assert "config.toml:" in shown


def test_every_import_is_a_declared_dependency():
    """At run time, that is: what trains the demo model leans on packages that transformers brings."""
    declared = {canonicalize_name(r.name) for r in RUNTIME} | {"pydantic-core"}  # pydantic's own half, pinned by it
    extras = PROJECT["project"]["optional-dependencies"]
    declared |= {
        canonicalize_name(Requirement(r).name) for extra in ("llama", "docs", "schema", "gpu") for r in extras[extra]
    }
    owners = packages_distributions()
    missing = set()
    for path in [*ROOT.glob("kvcli/**/*.py"), *ROOT.glob("kernels/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for top in {n.partition(".")[0] for n in names} - {"kvcli", "__future__"} - sys.stdlib_module_names:
                packages = {canonicalize_name(p) for p in owners.get(top, [top])}
                if not packages & declared and "demo" not in path.parts:
                    missing.add((path.relative_to(ROOT).as_posix(), top))
    assert missing == set()


def test_no_dependency_has_an_upper_pin():
    """A user's CUDA build of torch must never be replaced because of us."""
    assert [str(r) for r in RUNTIME for s in r.specifier if s.operator != ">="] == []


def test_runtime_tree_is_free_of_gpl():
    tree, todo = {}, list(RUNTIME)
    while todo:
        need = todo.pop()
        applies = need.marker is None or need.marker.evaluate({"extra": ""})
        if applies and canonicalize_name(need.name) not in tree:
            found = tree[canonicalize_name(need.name)] = distribution(need.name)
            todo += [Requirement(line) for line in found.requires or []]
    assert "jinja2" in tree  # chat templates need it
    for name, found in tree.items():
        fields = [found.metadata.get(key) or "" for key in ("License-Expression", "License")]
        fields += [c for c in found.metadata.get_all("Classifier") or [] if c.startswith("License")]
        assert not re.search(r"\bA?GPL|Affero|(?<!Lesser )General Public License", " ".join(fields)[:1000]), name
