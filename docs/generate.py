"""Write the generated parts of README.md and docs/: `python docs/generate.py`, or `--check` to fail on a difference.

With names of parts (`python docs/generate.py keys exists source`) only the parts with these names are written, in
seconds instead of minutes. A part stands between `<!-- generated: NAME ARGUMENT -->` and `<!-- end -->`; other text is
not changed.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a bare checkout documents itself

PIPES: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "encoding": "utf-8", "check": True}
PART = re.compile(r"(<!-- generated: (\w+)(.*) -->\n)(?s:.*?)(<!-- end -->)")


def main(args: list[str]) -> int:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    stale, names = 0, set(args) - {"--check"} or set(PARTS)
    if unknown := names - set(PARTS):
        print(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
        return 2
    for page in pages:
        old = page.read_text(encoding="utf-8")
        new = PART.sub(lambda part: _part(part) if part[2] in names else part[0], old)
        if "--check" not in args:
            page.write_text(new, encoding="utf-8")
        elif _steady(old) != _steady(new):
            stale += 1
            name = page.relative_to(ROOT).as_posix()
            sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, "generated"))
    if stale:
        print(f"{stale} page(s) are stale: run python docs/generate.py")
    return int(stale > 0)


def _part(part: re.Match[str]) -> str:
    return f"{part[1]}{PARTS[part[2]](part[3].strip())}\n{part[4]}"


def _steady(page: str) -> str:
    """The page without text that differs from run to run: in samples, lines of figures (indented) and numbers."""

    def blur(part: re.Match[str]) -> str:
        if part[2] not in ("run", "example"):
            return part[0]
        return re.sub(r" +", " ", re.sub(r"[0-9][0-9.,]*", "0", re.sub(r"(?m)^  .*[0-9].*\n", "", part[0])))

    return PART.sub(blur, page)


# ---- parts by name ----


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
            stderr=subprocess.STDOUT if command.endswith("2>&1") else None,
            **PIPES,
        )
    lines = (line.rstrip() for line in done.stdout.replace(home, "~").splitlines())
    return "```console\n$ " + command.removesuffix("2>&1").strip() + "\n" + "\n".join(lines).strip("\n") + "\n```"


def commands(_: str) -> str:
    """Every command with its arguments and options, and at the end the options that every command has."""
    import typer
    from typer.main import get_command

    from kvcli.cli import COMMANDS, HOMES
    from kvcli.commands.common.common_options import show_rare, take_common, take_model

    @typer.Typer().command()
    def none() -> None: ...

    def full(command: Any) -> Any:
        take_model(command)
        show_rare(command)
        for below in getattr(command, "commands", {}).values():
            full(below)
        return command

    blocks = []
    for name in COMMANDS:
        app = import_module(f"kvcli.commands.{HOMES.get(name, name)}").app
        blocks += _command(f"kvcli {name}", full(get_command(app)))
    bare = typer.Typer(add_completion=False)
    bare.command()(none)
    blocks += [
        "## Options of every command",
        "They may stand before or after the command.",
        _options(take_common(get_command(bare), rare=True)),
    ]
    return "\n\n".join(blocks)


def _command(title: str, command: Any) -> list[str]:
    below = getattr(command, "commands", {})
    usage = " ".join([title, *command.collect_usage_pieces(command.context_class(command))])
    blocks = [f"{'##' if title.count(' ') == 1 else '###'} {title}", f"```\n{usage}\n```", _prose(command.help or "")]
    if not below:
        blocks.append(_options(command))
    for name, inner in below.items():
        blocks += _command(f"{title} {name}", inner)
    return [block for block in blocks if block]


def _options(command: Any) -> str:
    context = command.context_class(command)
    records = [param.get_help_record(context) for param in command.params if param.name != "help"]
    rows = [f"| `{_cell_text(names)}` | {_cell_text(text)} |" for names, text in filter(None, records)]
    return "\n".join(["| | |", "|---|---|", *rows]) if rows else ""


def _prose(text: str) -> str:
    return "\n\n".join(" ".join(block.split()) for block in text.replace("\b", "").split("\n\n"))


def _cell_text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def slash(_: str) -> str:
    """The commands of a chat."""
    from kvcli.commands.chat.slash import SLASH

    rows = [f"| `{_cell_text(call)}` | {help} |" for call, help in SLASH.rows()]
    return "\n".join(["| command | what it does |", "|---|---|", *rows])


def keys(_: str) -> str:
    """Every key of a profile, from the dataclasses that check it."""
    from kvcli.settings.schema import METHOD_TABLES, ORDER, TABLES, registries

    blocks = []
    for table in ORDER:
        if table in TABLES:
            blocks += [f"### `[{table}]`", _keys_of(TABLES[table])]
            continue
        key, usual = METHOD_TABLES[table]
        names = ", ".join(f'`"{name}"`' for name in registries()[table])
        blocks += [
            f"### `[{table}]`",
            f'`{key}` is one of {names}; without it, `"{usual}"`. The other keys are the method\'s own.',
        ]
        for name, where in registries()[table].items():
            module, _, cls = where.partition(":")
            method = getattr(import_module(module), cls)
            blocks += [f'**`{key} = "{name}"`**: {_prose(method.__doc__ or "").splitlines()[0]}', _keys_of(method)]
    return "\n\n".join(block for block in blocks if block)


def profiles(_: str) -> str:
    """The shipped profiles, grouped by purpose."""
    from kvcli.settings.config import Sources, load_config
    from kvcli.settings.profile import Profile

    rows = []
    for p in map(Profile.load, load_config(Sources()).names()):
        extends = " ".join(f"`{name}`" for name in p.extends)
        rows.append(f"| `{p.name}` | {p.purpose} | {p.exactness} | {extends} | {p.description} |")
    return "\n".join(["| profile | for | text | extends | |", "|---|---|---|---|---|", *rows])


def workloads(_: str) -> str:
    """The prompts of a benchmark."""
    from kvcli.bench.workloads import WORKLOADS

    rows = [f"| `{name}` | {made.about} |" for name, made in WORKLOADS.items()]
    rows += ["| `random` | token ids without meaning |", "| a text file | the beginning of it, to be summarised |"]
    return "\n".join(["| workload | prompt |", "|---|---|", *rows])


def exists(_: str) -> str:
    """The methods that profiles can name and their cost, the kinds of KV storage, and the operations with more than a
    reference."""
    from kvcli.settings.schema import registries

    rows = []
    for table, methods in registries().items():
        for name, where in methods.items():
            module, _, cls = where.partition(":")
            said, _, more = _prose(getattr(import_module(module), cls).__doc__ or "").partition("\n\n")
            cost = re.sub(r"\((measurements/([\w-]+)\.md)\)", r"([\2](../\1))", more.partition("\n\n")[0])
            rows.append(f"| `[{table}]` | `{name}` | {_cell_text(said)} | {_cell_text(cost)} |")
    for path in sorted((ROOT / "kvcli" / "kv").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        verbs = [{f.name: f.args.args for f in node.body if isinstance(f, ast.FunctionDef)} for node in classes]
        tiers = [any(ast.unparse(base).endswith("Tier") for base in node.bases) for node in classes]
        stores = (
            is_tier or _has_layers(v.get("take"))
            for v, is_tier in zip(verbs, tiers, strict=True)
            if _has_layers(v.get("attend"))
        )
        if path.stem not in ("slots", "page_source") and any(stores):
            doc = (ast.get_docstring(tree) or "").splitlines()[0]
            rows.append(f"| store | `{path.relative_to(ROOT / 'kvcli')}` | {doc} | |")
    for folder in sorted((ROOT / "kernels").glob("*/")):
        more = sorted({file.stem for file in folder.glob("*.py")} - {"__init__", "build", "module", "probe"})
        if more:
            rows.append(f"| kernel | `{folder.name}` | {', '.join(more)} | |")
    return "\n".join(["| | | | by our own measurement |", "|---|---|---|---|", *rows])


def _has_layers(arguments: list[ast.arg] | None) -> bool:
    return arguments is not None and "layer" in [argument.arg for argument in arguments]


def _keys_of(table: type) -> str:
    import dataclasses

    from kvcli.settings.small_file import toml_value
    from kvcli.settings.values import comments_of, expected, keys_of

    comments, rows = comments_of(table), []
    for key in keys_of(table).values():
        unset = "" if key.default is dataclasses.MISSING else "model's own"
        default = unset if key.default in (None, dataclasses.MISSING) else f"`{toml_value(key.default)}`"
        rows.append(f"| `{key.name}` | {default} | {_cell_text(expected(key.hint))} | {comments.get(key.name, '')} |")
    return "\n".join(["| key | default | takes | |", "|---|---|---|---|", *rows]) if rows else ""


def source(path: str) -> str:
    """A whole source file of kvcli."""
    return f"```python\n# {path}\n{(ROOT / path).read_text(encoding='utf-8')}```"


def exits(_: str) -> str:
    """The table of exit codes, from the enum."""
    import inspect

    from kvcli.errors import ExitStatus

    when = dict(re.findall(r"^    ([A-Z_]+) = \d+  # (.+)$", inspect.getsource(ExitStatus), re.MULTILINE))
    rows = [f"| {status.value} | `{status.name.lower()}` | {when[status.name]} |" for status in ExitStatus]
    return "\n".join(["| code | name | when |", "|---|---|---|", *rows])


def codes(_: str) -> str:
    """The table of error codes: what the source can raise, and the beginning of each message."""
    found: dict[tuple[str, int], set[str]] = {}
    for kind, call in _raised():
        given = [word.value for word in call.keywords if word.arg == "code"]
        code = _words(given[0]) if given else kind.code
        if code:  # else it comes from another process, and is listed where that raises it
            words = filter(None, [_words(arg) for arg in call.args[:1]])
            found.setdefault((code, kind.exit.value), set()).update(words)
    rows = [f"| `{code}` | {status} | {'<br>'.join(sorted(says))} |" for (code, status), says in sorted(found.items())]
    return "\n".join(["| code | exit | says |", "|---|---|---|", *rows])


def _raised() -> Iterator[tuple[Any, ast.Call]]:
    """Each call in the source that creates a kvcli error, with the error's class."""
    from kvcli import errors

    kinds = {name: kind for name, kind in vars(errors).items() if hasattr(kind, "exit")}
    for path in sorted((ROOT / "kvcli").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
                yield kinds[node.func.id], node


def _words(node: ast.expr) -> str:
    """The text of a string in the source, with "…" where it has a gap."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(piece) or "…" for piece in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else ""


BENCHES = {  # schema -> what was measured, and the columns worth a reader's time
    "kvcli.bench.attend_packed/1": (
        "Attention of one layer over quantized slots, in multiples of the speed over bf16",
        ["size", "slots", "query_heads", "rows", "bf16_ms", "k8v8", "k4v4", "k4v2", "k2v2"],
    ),
    "kvcli.bench.extract/1": (
        "Seconds to extract the text of 200 PDF pages, and peak MiB for 2,000 pages",
        ["side", "seconds", "best", "cpu", "parent_mib", "worker_mib"],
    ),
    "kvcli.bench.recall_tiers/1": (
        "Facts of a report of 4,400 tokens found by the demo model, and bytes for each token",
        ["store", "recall", "right", "same", "bytes", "cpu", "packed", "disk", "index"],
    ),
    "kvcli.bench.wordings/1": (
        "SmolLM2-135M over eight real documents, with the prompt of larger models, and with its own",
        ["wording", "points", "words", "confirmed", "doubtful", "uncited", "silent", "told", "copied", "loops"],
    ),
    "kvcli.bench.reliability/1": ("Stress tests", ["what", "tried", "bad", "command", "commit", "date"]),
    "kvcli.bench.drafters/1": (
        "Each drafter at each task; tokens/s and times are medians, accepted shares are of draft tokens",
        [
            "task",
            "temperature",
            "side",
            "speedup",
            "tokens_s",
            "accepted",
            "accepted_first",
            "accepted_length",
            "tokens_a_pass",
            "draft_ms_a_token",
            "verify_ms_a_pass",
            "kib",
            "same",
        ],
    ),
}


def bench(where: str) -> str:
    """The tables of a result in docs/benchmarks, with the command and the machine of the measurement."""
    result: dict[str, Any] = json.loads((ROOT / where).read_text(encoding="utf-8"))
    if result.get("schema") == "kvcli.bench/1":
        return _sides(result)
    if result.get("schema") == "kvcli.bench.drafters/1":
        result = {**result, "command": f"python docs/benchmarks/run.py {Path(where).stem}"}
    rows = result["rows"]
    usual = result.get("title"), result.get("columns") or list(rows[0])
    title, names = BENCHES.get(result.get("schema", ""), usual)
    names = [name for name in names if any(name in row for row in rows)]  # older results lack some
    machine = result.get("machine") or ", ".join(f"{k} {v}" for k, v in result["environment"].items())
    command = result.get("command") or f"python tests/bench/{result['schema'].split('.')[2].partition('/')[0]}.py"
    lines = [
        f"**{title}** (`{command}`; {machine})",
        "",
        "| " + " | ".join(n.replace("_", " ") for n in names) + " |",
    ]
    lines += ["|" + "---|" * len(names)]
    lines += ["| " + " | ".join(_cell(row.get(name)) for name in names) + " |" for row in rows]
    note = "Ranges are the lowest and highest repetition."
    has_ranges = any(isinstance(row.get(name), list) for row in rows for name in names)
    if note := result.get("note", note if has_ranges else ""):
        lines += ["", note]
    return "\n".join(lines)


def _sides(result: dict[str, Any]) -> str:
    """A result of `kvcli bench`: its command, its tables, and each row in which kvcli is not the fastest."""
    from kvcli.render.bench.html import command_of
    from kvcli.render.bench.text import blocks
    from kvcli.render.report import markdown
    from kvcli.schemas.bench import BenchDocument

    document = BenchDocument.model_validate(result)
    lost = [line for case in _cases(document) for line in _lost(case, set(document.args.profiles))]
    said = "Where kvcli is slower: " + "; ".join(lost) + "." if lost else "No side is faster than kvcli's."
    return f"```sh\n{command_of(document)}\n```\n\n{markdown(blocks(document))}\n{said}"


def glance(where: str) -> str:
    """A line for each workload of a `kvcli bench`: sides in multiples of the baseline, tokens per pass in brackets."""
    from kvcli.render.bench.html import command_of
    from kvcli.schemas.bench import BenchDocument

    document = BenchDocument.model_validate_json((ROOT / where).read_text(encoding="utf-8"))
    sides = list(dict.fromkeys(row.profile for row in document.rows))
    first = next(side for side in sides if side == document.baseline)
    others = [side for side in sides if side != first]
    lines = [f"| workload | {first}, tok/s | " + " | ".join(others) + " |", "|---|" + "---:|" * len(sides)]
    for rows in _cases(document):
        by = {row.profile: row for row in rows}
        cells = [_times(by.get(side)) for side in others]
        lines.append(f"| {rows[0].workload} | {by[first].median.tok_s:.1f} | " + " | ".join(cells) + " |")
    env = document.env
    machine = f"{env.cpu} · {env.threads} threads · commit {env.commit} · load {env.load_before[0]:.2f} before"
    return "\n".join([f"```sh\n{command_of(document)}\n```", "", machine, "", *lines])


def _times(row: Any) -> str:
    if row is None or row.ratio.tok_s.median is None:
        return "–"
    drafted = f" ({row.accept.tokens_per_pass:.2f})" if row.accept else ""
    return f"{row.ratio.tok_s.median:.2f}{drafted}"


def _cases(document: Any) -> Iterator[list[Any]]:
    for at in dict.fromkeys((row.ctx, row.workload) for row in document.rows):
        yield [row for row in document.rows if (row.ctx, row.workload) == at and row.median.tok_s]


def _lost(rows: list[Any], ours: set[str]) -> Iterator[str]:
    """Each row of kvcli that another program beats in decoding or in prefill, in words."""
    for figure, verb in (("tok_s", "decodes"), ("read_tok_s", "reads")):
        for row in (row for row in rows if row.profile in ours):
            for other in (other for other in rows if other.profile not in ours):
                mine, theirs = getattr(row.median, figure), getattr(other.median, figure)
                if mine and theirs and mine < theirs:
                    where = f"{row.workload} at {row.ctx:,}"
                    yield f"{row.profile} {verb} {mine / theirs:.2f} times as fast as {other.profile} ({where})"


def _cell(value: object) -> str:
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "**no**"
        case [low, middle, high]:  # a spread
            return f"{_cell(middle)} ({_cell(low)}–{_cell(high)})"
        case dict():
            return " / ".join(map(_cell, value.values()))
        case float():
            return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def families(_: str) -> str:
    """The model designs that the tests build."""
    tests = runpy.run_path(str(ROOT / "tests" / "families.py"))
    names = sorted({family.model_type or name for name, family in tests["FAMILIES"].items()})
    return f"{len(names)} designs: {', '.join(f'`{name}`' for name in names)}."


def census(where: str) -> str:
    """The result of each class of transformers that continues text (`python -m tests.all_families`)."""
    result: dict[str, Any] = json.loads((ROOT / where).read_text(encoding="utf-8"))
    by: dict[str, list[Any]] = {}
    for one in result["verdicts"]:
        by.setdefault(one["outcome"], []).append(one)
    counts = ", ".join(f"{len(by.get(outcome, []))} {outcome}" for outcome in result["counts"])
    lines = [f"transformers {result['transformers']}, {len(result['verdicts'])} classes: {counts}.", ""]
    lines += [f"**Equal**: {_kinds(by.get('equal', []))}.", ""]
    for outcome in ("wrong", "crashed"):
        lines += [f"**{outcome}**: `{one['kind']}`, {_cell_text(one['why'])}" for one in by.get(outcome, [])]
    reasons: dict[str, list[Any]] = {}
    for one in by.get("refused", []):
        reasons.setdefault(_reason(one["why"]), []).append(one)
    lines += ["| refused, since | classes |", "|---|---|"]
    lines += [f"| {why} | {_kinds(those)} |" for why, those in sorted(reasons.items(), key=lambda item: -len(item[1]))]
    lines += ["", "| not built tiny, or its own `generate` fails | since |", "|---|---|"]
    lines += [f"| `{one['kind']}` | {_cell_text(one['why'])} |" for one in by.get("unbuilt", [])]
    return "\n".join(lines)


def _kinds(verdicts: list[Any]) -> str:
    return ", ".join(f"`{one['kind']}`" for one in verdicts) or "none"


def _reason(why: str) -> str:
    """The part of a refusal that others share: no name, no numbers, no layer."""
    said = re.sub(r"^\w+: ", "", why.partition(";")[0])
    for found, put in (
        (r"^\S+ \(\S+\) (is not supported: )?", ""),
        (r"\blayer \d+\b", "a layer"),
        (r"^\w+ does not generate text", "it does not generate text"),
        (r"^the config of \S+ cannot", "its config cannot"),
        (r"^the weights of \S+ are", "its weights are"),
        (r"^\S+ is an? ", "it is an "),
        (r"^only \d+ of its \d+", "only some of its"),
    ):
        said = re.sub(found, put, said)
    return _cell_text(said)


def bounds(_: str) -> str:
    """The limits of document parsing, from the code."""
    from kvcli.documents import archives, document, read
    from kvcli.worker_process import Limits

    limits, mib = Limits(), 2**20
    rows = [
        ("a PDF file", f"{read.MAX_PDF / mib:,.0f} MiB"),
        ("any other file", f"{read.MAX_BYTES / mib:,.0f} MiB"),
        ("memory of the parser process (address space)", f"{limits.memory / mib:,.0f} MiB"),
        ("its processor time", f"{limits.cpu} s"),
        ("its time by the clock", f"{limits.wall:g} s"),
        ("its output", f"{limits.output / mib:,.0f} MiB"),
        ("text of a document", f"{document.MAX_CHARACTERS:,} characters"),
        ("sections of a document", f"{document.MAX_SECTIONS:,}"),
        ("files in an archive", f"{archives.MAX_MEMBERS:,}"),
        ("an archive, unpacked", f"{archives.MAX_TOTAL / mib:,.0f} MiB"),
        ("one file of it that is read", f"{archives.MAX_MEMBER / mib:,.0f} MiB"),
        (f"its unpacked to its packed size, above {archives.SMALL / mib:,.0f} MiB", f"{archives.MAX_RATIO}"),
    ]
    return "\n".join(["| what | at most |", "|---|---|", *(f"| {what} | {most} |" for what, most in rows)])


def example(where: str) -> str:
    """A Python file without its docstring, and what it prints."""
    code = (ROOT / where).read_text(encoding="utf-8").partition('"""\n\n')[2].strip()
    done = subprocess.run([sys.executable, ROOT / where], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, **PIPES)
    return f"```python\n{code}\n```\n\nprints\n\n```\n{done.stdout.strip()}\n```"


def losses(_: str) -> str:
    """Each shipped profile that may lose facts: which tokens stay, in how many bits, and what an answer reads."""
    from kvcli.chat.turn import describe_losses
    from kvcli.settings.config import builtin_files
    from kvcli.settings.profile import Profile

    rows = []
    for file in builtin_files():
        profile = Profile.load(file.profile)
        if profile.exactness == "approx":
            found = describe_losses(profile)
            tokens = found.get("forgotten", "every token").removeprefix("keeps ")
            bits = found.get("rounded", "as the model made them").removeprefix("holds ")
            read = found.get("unread", "all that is kept").removeprefix("reads ")
            rows.append(f"| `{profile.name}` | {tokens} | {bits} | {read} |")
    return "\n".join(["| profile | keeps | keys and values | an answer reads |", "|---|---|---|---|", *rows])


def catalog(_: str) -> str:
    """The list of real models."""
    from kvcli.models.catalog import CATALOG
    from kvcli.render.terminal.terminal import count, long_size

    rows = [
        f"| `{k.name}` | {k.parameters / 1e9:.2f} | {long_size(k.download)} | {long_size(k.needs())} "
        f"| {'–' if k.quantized and k.file else long_size(k.needs('int8'))} | {count(k.shape.limit)} | {k.about} "
        f"| {k.licence} | {_whence(k)} |"
        for k in CATALOG
        if k.is_offered
    ]
    head = "| name | billion parameters | download | takes | with `--quant int8` | window | good for | licence | from |"
    unread = [f"`{k.name}` ({k.gguf.arch})" for k in CATALOG if not k.is_offered and k.gguf]
    later = ["", f"Listed, but of an architecture that kvcli does not read yet: {', '.join(unread)}."] if unread else []
    return "\n".join([head, "|---" * 9 + "|", *rows, *later])


def _whence(known: Any) -> str:
    packages = [wheel.package for wheel in known.package.wheels] if known.package else [known.source]
    return f"`{packages[0]}`" + (f" and {len(packages) - 1} more" if packages[1:] else "")


def fused(_: str) -> str:
    """The Triton kernels by operation, and how many variants of each the tests compile."""
    from tests.kernels.compiled import variants

    listed = variants()
    rows = []
    for path in sorted((ROOT / "kernels").glob("*/fused.py")):
        op, says = path.parent.name, ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = _cell_text(says.split("\n\n")[0])
        rows.append(f"| `{op}` | {first} | {len(listed.get(op, []))} |")
    return "\n".join(["| op | in Triton | variants compiled |", "|---|---|---|", *rows])


def forms(where: str) -> str:
    """Kernels of the model of time: resources by architecture, and the instructions that a card has to spare."""
    result: dict[str, Any] = json.loads((ROOT / where).read_text(encoding="utf-8"))
    first = result["kernels"][0]
    archs, cards = list(first["on"]), list(first["headroom"])
    lines = ["| kernel, variant | " + " | ".join(archs) + " | " + " | ".join(cards) + " |"]
    lines += ["|---|" + "---|" * (len(archs) + len(cards))]
    for one in result["kernels"]:
        takes = [
            f"{on['registers']} / {on['shared'] // 1024} / {on['programs']} / {on['instructions']}"
            for on in one["on"].values()
        ]
        spare = [f"{one['headroom'][card]:.1f}" for card in cards]
        lines.append(f"| `{one['kernel']}`, {one['form']} | " + " | ".join([*takes, *spare]) + " |")
    return "\n".join(lines)


def ladder(where: str) -> str:
    """A pass by card, as built and with fewer launches: milliseconds, and times what its bytes take."""
    rows: list[dict[str, Any]] = json.loads((ROOT / where).read_text(encoding="utf-8"))["ladder"]
    lines = ["| card | launches a layer | as built | " + " | ".join(rows[0]["then"]) + " |"]
    lines += ["|---|" + "---|" * (len(rows[0]["then"]) + 2)]
    for row in rows:
        each = [f"{one['ms']:.2f} ({one['over']:.2f})" for one in (row, *row["then"].values())]
        lines.append("| " + " | ".join([row["card"], str(row["launches"]), *each]) + " |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[str], str]] = {
    "run": run,
    "commands": commands,
    "slash": slash,
    "keys": keys,
    "profiles": profiles,
    "exists": exists,
    "source": source,
    "exits": exits,
    "codes": codes,
    "bench": bench,
    "glance": glance,
    "bounds": bounds,
    "families": families,
    "census": census,
    "catalog": catalog,
    "losses": losses,
    "workloads": workloads,
    "example": example,
    "fused": fused,
    "forms": forms,
    "ladder": ladder,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
