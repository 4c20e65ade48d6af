"""What a decoding pass takes beside the model's layers and the kernels: this checkout, and earlier ones beside it.

    git worktree add /tmp/before COMMIT
    python tests/bench/overhead.py [CHECKOUT ..] [--layers 12] [--whole] [--passes 48] [--reps 25] [--out FILE]

Layers and kernels take nothing: a hollow model hands each layer's attention queries, keys and values that are there
already, and kernels answer with tensors that are there already. `--whole` runs a small random Llama and the kernels
instead, as they are: what lies between them then finds its caches as a pass leaves them.

Everything where work passes from one part to another carries a clock; what the clocks take themselves is measured
first and taken off. The text is the standard library's source, replayed as if the model had written it, and drafters
are told passes that cost 1 % more a row: so each turn makes the same passes. Sides take turns, each in a process of its
own. Of each part of each pass the least over the turns counts, which other programs on the machine do not reach; a
figure is the mean over the passes, in microseconds. `scouts` is fafo with scouts in every pass. Prints a table, then
JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HERE))

from tests.bench.clocks import VOCAB, Checkout, Parts, first, named

METHODS = ("off", "ngram", "fafo", "scouts")
FREE = ("model", "kernels", "bench")  # parts that are no overhead of the engine
CONTEXT = 1024


class Side:
    """One way to draft, at work on the text."""

    def __init__(self, tree: Checkout, parts: Parts, lm: Any, method: str, text: list[int]) -> None:
        config = {
            "off": lambda: tree.drafter.Off(),
            "ngram": lambda: first("kvcli.methods.drafts.ngram", "kvcli.drafts.ngram").Ngram(),
            "fafo": lambda: first("kvcli.methods.drafts.mix", "kvcli.drafts.mix").Mix(view="stream"),
            "scouts": lambda: first("kvcli.methods.drafts.mix", "kvcli.drafts.mix").Mix(view="stream", adaptive=False),
        }[method]()
        self._tree, self._parts = tree, parts
        kv = tree.dense.Dense(lm.shapes, lm.dtype) if hasattr(lm, "shapes") else _old_dense(tree, lm)
        drafter = Paced(parts, config.drafter())
        sampler = scripted(tree, parts, text)
        view = tree.build.view(lm, kv, drafter)
        self._session = named(tree.session, "GenerationSession", "Session")(lm, kv, drafter, sampler, view=view)
        self._session.seen.add = parts.timed("drawing", self._session.seen.add)
        self._fold = parts.timed("statistics", named(tree.stats.Stats(), "add_step", "fold"))
        for _ in tree.events(self._session.read(text[:CONTEXT])):
            pass

    def measure(self, passes: int) -> list[dict[str, float]]:
        """Microseconds by part, of each pass, and how many rows it had."""
        steps, found = self._tree.events(self._session.stream(10**9)), []
        for _ in range(passes):
            self._parts.begin()
            step = next(steps)
            self._fold(step)
            spent = {part: round(us, 2) for part, us in self._parts.end().items()}
            found.append(spent | {"rows": step.rows.n_rows})
        steps.close()
        return found


class Paced:
    """A drafter for which passes take what its decisions may rest on, whatever the machine does."""

    def __init__(self, parts: Parts, drafter: Any) -> None:
        self._drafter = drafter
        self.propose = parts.timed("drafter", drafter.propose)
        observe = parts.timed("drafter", drafter.observe)
        self.observe = parts.timed("bench", lambda step: observe(replace(step, seconds=1 + 0.01 * step.rows.n_rows)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


def scripted(tree: Checkout, parts: Parts, text: list[int]) -> Any:
    """A sampler that draws as its class does, and then says what the text has at that place."""

    @dataclass(frozen=True)
    class Scripted(tree.sample.Sampler):  # type: ignore[misc, name-defined]
        def __call__(self, logits: Any, pos: Any, seen: Any = None) -> Any:
            return says(drawn(self, logits, pos, seen), pos)

    drawn = tree.sample.Sampler.__call__
    says = parts.timed("bench", lambda _, pos: tree.torch.tensor([text[p + 1] for p in pos.tolist()]))
    return Scripted()


def _old_dense(tree: Checkout, lm: Any) -> Any:
    return tree.dense.Dense(lm.n_layers, lm.n_kv_heads, lm.head_dim, lm.dtype)


def words(n: int, vocab: int = VOCAB) -> list[int]:
    """So many tokens of the standard library's source, a number for each different word."""
    import re
    import sysconfig

    known: dict[str, int] = {}
    text: list[int] = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found = re.findall(r"\w+|\s+|[^\w\s]", file.read_text(encoding="utf-8", errors="ignore"))
        text += [known.setdefault(word, len(known) % vocab) for word in found]
        if len(text) >= n:
            break
    return text[:n]


def work(root: str, layers: int, *, hollow: bool) -> None:
    """A process that measures what it is told to, line by line."""
    tree = Checkout(root)
    parts, text = Parts(), words(30000)
    lm = tree.model(layers)
    tree.clock(parts, lm, hollow=hollow)
    for line in sys.stdin:
        method, passes = json.loads(line)
        print(json.dumps(Side(tree, parts, lm, method, text).measure(passes)), flush=True)


class Worker:
    """A checkout at work in a process of its own."""

    def __init__(self, checkout: Path, layers: int, what: str) -> None:
        git = ["git", "describe", "--always", "--dirty"]
        self.commit = subprocess.run(git, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(checkout), str(layers), what]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd="/", stdin=pipe, stdout=pipe, text=True)

    def measure(self, method: str, passes: int) -> list[dict[str, float]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, passes]) + "\n")
        self._process.stdin.flush()
        found: list[dict[str, float]] = json.loads(self._process.stdout.readline())
        return found


def summed(turns: list[list[dict[str, float]]]) -> dict[str, float]:
    """Of each part of each pass the least over the turns; the mean over the passes, and the sum of what is ours."""
    parts = sorted({part for turn in turns for each in turn for part in each} - {"rows"})
    mean = {}
    for part in (*parts, "rows"):
        least = [min(each.get(part, 0.0) for each in same) for same in zip(*turns, strict=True)]
        mean[part] = sum(least) / len(least)
    ours = sum(mean[part] for part in parts if part not in FREE)
    return {key: round(value, 1) for key, value in ({"overhead": ours} | mean).items()}


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], int(sys.argv[3]), hollow=sys.argv[4] == "hollow")
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="*")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--whole", action="store_true", help="a small model and the kernels, as they are")
    parser.add_argument("--passes", type=int, default=48, help="of one turn")
    parser.add_argument("--reps", type=int, default=25, help="turns")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    roots = [*(root.resolve() for root in args.before), HERE]
    what = "whole" if args.whole else "hollow"
    workers = [Worker(root, args.layers, what) for root in roots]
    rows: list[dict[str, Any]] = []
    for method in args.methods.split(","):
        turns: list[list[list[dict[str, float]]]] = [[] for _ in workers]
        for rep in range(args.reps + 1):
            for worker, found in list(zip(workers, turns, strict=True))[:: 1 if rep % 2 else -1]:
                found.append(worker.measure(method, args.passes))
        for worker, found in zip(workers, turns, strict=True):
            rows.append({"method": method, "commit": worker.commit, **summed(found[1:])})  # the first warms up
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    result = {"schema": "kvcli.bench.overhead/1", "model": what, "layers": args.layers, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
