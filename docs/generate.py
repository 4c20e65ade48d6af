"""Write the generated parts of README.md and docs/: `python docs/generate.py`, or `--check` to fail on a difference.

A part stands between `<!-- generated: KIND ARGUMENT -->` and `<!-- end -->`; all other text is left alone.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a bare checkout documents itself

PART = re.compile(r"(<!-- generated: (\w+) ?(.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(args: list[str]) -> int:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    stale = 0
    for page in pages:
        old = page.read_text(encoding="utf-8")
        new = PART.sub(lambda part: part[1] + KINDS[part[2]](part[3]).rstrip() + "\n" + part[4], old)
        if "--check" not in args:
            page.write_text(new, encoding="utf-8")
        elif _steady(old) != _steady(new):
            stale += 1
            name = page.relative_to(ROOT).as_posix()
            sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, "generated"))
    if stale:
        print(f"{stale} page(s) are stale: run python docs/generate.py")
    return int(stale > 0)


def _steady(page: str) -> str:
    """The page without what differs from run to run: times and sizes in sample outputs, and the gaps beside them."""

    def blur(part: re.Match[str]) -> str:
        return re.sub(r"[ ━╺▁▂▃▄▅▆▇█]+", " ", re.sub(r"[0-9][0-9.,]*", "0", part[0])) if part[2] == "run" else part[0]

    return PART.sub(blur, page)


# ---- kinds of parts ----


def run(command: str) -> str:
    """The output of a command line that starts with `kvcli`; with `2>&1` at its end, what goes to stderr as well."""
    words = shlex.split(command.removesuffix("2>&1"))
    assert words[0] == "kvcli", command
    with tempfile.TemporaryDirectory() as home:
        env = os.environ | {"KVCLI_HOME": home, "HF_HUB_OFFLINE": "1", "COLUMNS": "88", "NO_COLOR": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "kvcli", *words[1:]],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if command.endswith("2>&1") else subprocess.PIPE,
            text=True,
            encoding="utf-8",
            check=False,
        )
    if done.returncode and not command.endswith("2>&1"):
        raise SystemExit(f"{command}: exit {done.returncode}\n{done.stderr}")
    lines = (line.rstrip() for line in done.stdout.replace(home, "~").splitlines())
    return "```console\n$ " + command.removesuffix("2>&1").strip() + "\n" + "\n".join(lines).strip("\n") + "\n```"


def exits(_: str) -> str:
    """The table of exit codes, from the enum."""
    from kvcli.errors import ExitStatus

    rows = [f"| {status.value} | `{status.name.lower()}` |" for status in ExitStatus]
    return "\n".join(["| code | name |", "|---|---|", *rows])


def codes(_: str) -> str:
    """The table of error codes, from every `code="..."` in the source."""
    from kvcli import errors

    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    found: dict[str, set[str]] = {}
    for kind, code, file in _raised():
        status = getattr(kinds.get(kind), "exit", None)
        found.setdefault(f"| `{code}` | {status.value if status is not None else ''} |", set()).add(f"`{file}`")
    rows = [f"{row} {', '.join(sorted(files))} |" for row, files in sorted(found.items())]
    return "\n".join(["| code | exit | raised in |", "|---|---|---|", *rows])


def _raised() -> Iterator[tuple[str, str, str]]:
    """(class, code, file) of each error the source can raise."""
    for path in sorted((ROOT / "kvcli").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                for word in node.keywords:
                    if word.arg == "code" and isinstance(word.value, ast.Constant):
                        yield node.func.id, str(word.value.value), path.relative_to(ROOT / "kvcli").as_posix()


def bench(folder: str) -> str:
    """The table of each result kept under docs/benchmarks, with the machine it was measured on."""
    blocks = []
    for path in sorted((ROOT / folder).glob("*.json")):
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rows = result["rows"]
        names = list(rows[0])
        lines = [f"**{result['title']}** ({result['machine']}; `{result['command']}`)", ""]
        lines += ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
        lines += ["| " + " | ".join(_cell(row.get(name)) for name in names) + " |" for row in rows]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:,.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)


def source(where: str) -> str:
    """A file of the repository, as it is."""
    path = ROOT / where
    return f"```{path.suffix.lstrip('.')}\n{path.read_text(encoding='utf-8').rstrip()}\n```"


KINDS: dict[str, Callable[[str], str]] = {
    "run": run,
    "exits": exits,
    "codes": codes,
    "bench": bench,
    "source": source,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
