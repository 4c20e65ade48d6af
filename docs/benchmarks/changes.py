"""How much of the code that a result speaks of has changed since its commit, whatever was renamed or moved meanwhile.

Functions are compared by shape: syntax and numbers, without names, texts, comments and types of C. A function counts as
changed if no function of that shape stood anywhere in the package at the earlier commit; a larger one counts for more.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ("kvcli", "kernels")
SOURCES = (".py", ".c", ".cpp", ".h", ".hpp", ".inc")
LINK = "120000"  # mode of a symbolic link
C_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[A-Za-z_]\w*|\d[\w.]*|[^\s\w]')

Shapes = Counter[tuple[int, int]]  # of functions: hash of the shape, and its size
_known = dict[str, Shapes]()  # by blob


def share_changed(commit: str, folders: Sequence[str]) -> float:
    """The share of the code in these folders whose shape the package did not have at this commit."""
    before, now = shapes(commit, PACKAGE), shapes("HEAD", folders)
    return sum(size * n for (_, size), n in (now - before).items()) / sum(size * n for (_, size), n in now.items())


@cache
def shapes(commit: str, folders: Sequence[str]) -> Shapes:
    """Shapes of all functions in these folders at a commit."""
    lines = [line.partition("\t") for line in git("ls-tree", "-r", commit, "--", *folders).splitlines()]
    blobs = [(about.split()[2], path) for about, _, path in lines if path.endswith(SOURCES) and about[:6] != LINK]
    texts = read([blob for blob, _ in blobs if blob not in _known])
    for blob, path in blobs:
        if blob in texts:
            _known[blob] = Counter((hash(x), len(x)) for x in (_python if path.endswith(".py") else _c)(texts[blob]))
    return sum((_known[blob] for blob, _ in blobs), Shapes())


def read(blobs: Sequence[str]) -> dict[str, str]:
    """Texts of files, by the names of their blobs."""
    batch = ["git", "cat-file", "--batch"]
    given, texts, at = "\n".join(blobs).encode(), dict[str, str](), 0
    found = subprocess.run(batch, cwd=ROOT, input=given, capture_output=True, check=True).stdout
    while at < len(found):
        end = found.index(b"\n", at)
        blob, _, size = found[at:end].split()
        at = end + int(size) + 2
        texts[blob.decode()] = found[end + 1 : at - 1].decode()
    return texts


def _python(text: str) -> Iterator[tuple[str, ...]]:
    """Kinds of syntax and numbers of each function, without its docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[ast.get_docstring(node) is not None :]
            parts = [part for each in (node.args, *body) for part in ast.walk(each)]
            numbers = (x.value if isinstance(x, ast.Constant) and not isinstance(x.value, str) else "" for x in parts)
            yield tuple(f"{type(x).__name__}{n}" for x, n in zip(parts, numbers, strict=True))


def _c(text: str) -> Iterator[tuple[str, ...]]:
    """Signs and numbers of each stretch of code that ends with a brace at the beginning of a line."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    for function in re.split(r"(?<=^})", text, flags=re.MULTILINE):
        if words := C_TOKEN.findall(function):
            yield tuple("" if word[0].isalpha() or word[0] in '_"' else word for word in words)


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
