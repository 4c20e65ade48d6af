"""Measure again what README and docs/ print: `python docs/benchmarks/run.py [NAME...]`, then `python docs/generate.py`.

Each result stands in docs/benchmarks/NAME.json, with its machine and commit. Without a name all are measured, one after
the other: leave the machine alone for some hours. A result that cannot be measured leaves the old one there.
The sides beside transformers need `pip install 'kvcli[llama]'`, results named gpu-... a card.

`--stale` measures nothing. It lists the results whose commit is not in the history of this branch or not recorded, and
those with a quarter of the code that they speak of changed since (docs/benchmarks/changes.py says what counts as such).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from docs.benchmarks.changes import share_changed  # noqa: E402
from kvcli.bench.run import refuse_unbuilt  # noqa: E402

RANDOM = "random-152M"  # a folder beside the command; written first where a command names it
CHECKOUT = "python tests/recipes/bench.py"  # `kvcli bench`, with llama.cpp on models that are no GGUF files
SEVERAL = "--baseline hf --baseline llama.cpp"
LISTED = "smollm2-135m"  # a name of kvcli's list; fetched first, by pip, where a command names it
OURS = f"kvcli bench {LISTED} --profiles exact,ngram,fafo -n 64 --reps 3 --warmup 0"
REAL = f"{OURS} {SEVERAL} --baseline hf-lookup"
TEXTS = "--workload prose,code,manual,article,rewrite,translate,talk"

RESULTS = {
    "versus": f"{CHECKOUT} {RANDOM} --profiles exact,ngram {SEVERAL} --ctx 512,4k,16k --new 24 --reps 3"
    " --workload random",
    "demo": f"{CHECKOUT} demo --profiles exact,ngram {SEVERAL} --baseline hf-lookup --ctx 2k,8k"
    " --workload summary,lookup,copy",
    "smollm2": f"{REAL} --no-memory --ctx 512 {TEXTS}",
    "smollm2-drawn": f"{OURS} --baseline exact --no-memory --ctx 512 {TEXTS} --set sample.temperature=0.8",
    "smollm2-4k": f"{REAL} --ctx 4k --workload manual",
    "quality": "kvcli bench demo --profiles exact,streaming --ctx 1k --reps 1 --no-memory --quality all"
    " --quality-lengths 2k",
    "decode": "python tests/bench/decode.py",
    "beside": "python tests/bench/beside.py --hf",
    "beside-2": "python tests/bench/beside.py --hf --threads 2",
    "beside-32k": "python tests/bench/beside.py --prompts 32640",
    "beside-32k-2": "python tests/bench/beside.py --prompts 32640 --threads 2",
    "beside-packed": "python tests/bench/beside.py --kinds int8,int4 --prompts 512,4096",
    "beside-packed-2": "python tests/bench/beside.py --kinds int8,int4 --prompts 512,4096 --threads 2",
    "together": "python tests/bench/together.py",
    "hybrid": "python tests/bench/hybrid.py",
    "ngram": "python tests/bench/ngram.py --reps 9",
    "ngram-replay": f"python tests/bench/ngram_replay.py --model {LISTED}",
    "live-row": "python tests/bench/live_row.py",
    "fit": "python tests/bench/fit.py",
    "start": "python tests/bench/start.py --reps 7",
    "reliability": "python tests/bench/reliability.py",
    "fafo": "python tests/bench/fafo.py --reps 4",
    "fafo-mix": "python tests/bench/fafo.py --reps 4 --sides exact,suffix,recycle,stand,ngram,fafo,fafo-paper",
    "drafters": "python tests/bench/drafters.py --models demo",
    "drafters-wide": "python tests/bench/drafters.py --models demo-wide --tasks lookup,summary,free"
    " --sides plain,ngram,fafo,small,small-full,small+copies,specextend,specextend-every",
    "scouts": "python tests/bench/scouts.py",
    "specextend": "python tests/bench/specextend.py",
    "specextend-wide": "python tests/bench/specextend.py --model demo-wide --tasks lookup,summary --cost="
    " --working 1024 --recent 256",  # as the profile has them
    "specextend-fixed": "python tests/bench/specextend.py --model demo-wide --tasks lookup,summary --cost= --fixed"
    " --working 1024 --recent 256",
    "growth": "python tests/bench/growth.py",
    "reading-order": "python tests/bench/reading_order.py --tokens 32768 --chunks 2048 --only memory",
    "row-cost": "python tests/bench/row_cost.py",
    "kv-memory": "python tests/bench/kv_memory.py",
    "kv-speed": "python tests/bench/kv_speed.py",
    "attend-packed": "python tests/bench/attend_quantized.py --seconds 0.6",
    "recall-tiers": "python tests/bench/recall_tiers.py",
    "kept": f"python tests/bench/kept.py --model {LISTED}",
    "resume": "python tests/bench/resume.py --reps 1",
    "reuse": "python tests/bench/reuse.py",
    "reuse-real": f"python tests/bench/reuse.py --model {LISTED} --tokens 2000 --texts 1"
    " --tasks passkey,niah_single,mqar --changes swapped",
    "prune": "python tests/bench/prune.py",
    "prune-smollm2": f"python tests/bench/prune.py --model {LISTED} --n 12 --sides lazy+cut+random",
    "prune-16k": f"python tests/bench/prune.py --model {RANDOM} --tokens 16384 --n 3 --hf 0 --sides lazy+cut+random",
    "kv-quality": "python tests/bench/kv_quality.py --shares 0.5,0.25,0.125",
    "kv-allocs": "python tests/bench/kv_quality.py --texts 48 --allocs",
    "kv-forms": "python tests/bench/kv_quality.py --forms --texts 24",
    "kv-field": "python tests/bench/kv_quality.py --field --texts 12 --shares 0.5,0.25,0.125,0.06",
    "kv-tasks": "python tests/bench/kv_quality.py --field --texts 6 --shares 0.5,0.25,0.125"
    " --tasks niah_single,niah_multikey,niah_multikey_all,passkey,mqar,late_questions,copy_span,json_extract",
    "kv-tasks-smollm2": f"python tests/bench/kv_quality.py --model {LISTED} --field --texts 1 --length 1024"
    " --shares 0.5,0.25,0.125 --tasks niah_single,niah_uuid,passkey,mqar",
    "kv-lose": "python tests/bench/kv_quality.py --texts 8 --losing",
    "kv-moved": "python tests/bench/kv_quality.py --moved --texts 200 --shares 0.125,0.05",
    "presses": "python tests/bench/presses.py",  # of the packages it names, installed
    "presses-smollm2": f"python tests/bench/presses.py --model {LISTED} --texts 2 --length 1024 --shares 0.25",
    "agreement": f"python tests/bench/agreement.py --model {LISTED}",
    "agreement-demo": "python tests/bench/agreement.py --windows 16",
    "agreement-long": f"python tests/bench/agreement.py --model {LISTED} --context 1024,2048,4096,7424 --windows 2"
    " --shares 0.5 --sides int8,4+4bits,fastgen,kvzip,streaming,random",
    "kv-quality-real": f"python tests/bench/kv_quality.py --model {LISTED} --texts 6"
    " --tasks niah_single,niah_uuid,passkey,mqar",
    "probe-rows": "python tests/bench/probe_rows.py",
    "retrieval-heads": "python tests/bench/retrieval_heads.py",
    "profiling": "python tests/bench/profiling.py --prompts 2048,8192,16384 --reps 2",
    "self-draft": "python tests/bench/itself.py",
    "draft-overhead": "python tests/bench/draft_overhead.py",
    "citations": "python tests/bench/citations.py --grid",
    "summarize": "python tests/bench/summarize.py --chunk 0,2500",
    "wordings": f"python tests/bench/wordings.py --model {LISTED}",  # of the packages it names, installed
    "steps": "python tests/bench/steps.py --model demo --workload summary --ends line --n 4 --ctx 1024 --new 160",
    "steps-smollm2": f"python tests/bench/steps.py --model {LISTED} --workload manual --ends sentence --n 1 --ctx 512"
    " --new 64",
    "gpu-model": "python tests/bench/gpu_model.py",  # a model of compiled kernels: nothing is measured
    "demo-model": "python -m tests.demo_model.evaluate --n 80 --free",
    **{
        f"gpu-{table}-{card}": f"python -m tests.gpu && python -m tests.gpu.tables {card}"  # writes all three
        for card in ("h100", "h200")
        for table in ("checks", "steps", "kernels")
    },
    "extract": "python tests/bench/extract.py",
    "pdf-text": "python tests/bench/pdf_text.py",  # of the packages it names, installed
}

NOT_AGAIN = {"gpu-past-h200": "the script that measured it was not kept"}  # they cannot be measured again
FAR = 0.25  # share of the measured code that has changed, from which on a result is old
MODEL = ("kernels", "kvcli/engine", "kvcli/kv", "kvcli/drafts", "kvcli/methods")  # what computes an answer
MEASURED = {  # the code that a result speaks of, where it is not that of MODEL
    "citations": ("kvcli/summarize",),
    "summarize": ("kvcli/summarize", "kvcli/documents"),
    "wordings": ("kvcli/summarize", "kvcli/documents"),
    "extract": ("kvcli/documents",),
    "pdf-text": ("kvcli/documents",),
    "fit": (*MODEL, "kvcli/fit"),
    "gpu-model": ("kernels",),
}


def measure(name: str) -> bool:
    """Run the command of one result in an empty folder; keep what it wrote if it went well."""
    with tempfile.TemporaryDirectory() as folder:
        first, _, then = RESULTS[name].partition(" && ")
        words = first.split()
        if RANDOM in words:
            subprocess.run([sys.executable, ROOT / "tests/bench/random_model.py", RANDOM], cwd=folder, check=True)
        home, out = Path(folder, "home"), Path(folder, "result.json")
        env = os.environ | {"PYTHONPATH": str(ROOT), "KVCLI_HOME": str(home)}
        if LISTED in words:
            subprocess.run([sys.executable, "-m", "kvcli", "models", "get", LISTED], env=env, check=True)
        print(f"{name}: {RESULTS[name]}", flush=True)
        command = [*program(words), "-o" if first.startswith(("kvcli ", CHECKOUT)) else "--out", str(out)]
        env["HF_HUB_OFFLINE"] = "1"
        if subprocess.run(command, cwd=folder, env=env, check=False).returncode or not out.is_file():
            return False
        if then:
            return not subprocess.run([*program(then.split()), str(out)], cwd=folder, env=env, check=False).returncode
        text = out.read_text(encoding="utf-8").replace(f"{ROOT}/", "").replace(f"{folder}/", "")  # nobody's folders
        (HERE / f"{name}.json").write_text(text, encoding="utf-8")
        return True


def program(words: list[str]) -> list[str]:
    """The command line, with this Python, from any folder."""
    if words[0] == "kvcli":
        return [sys.executable, "-m", *words]
    return [sys.executable, *(str(ROOT / word) if word.endswith(".py") else word for word in words[1:])]


def stale() -> Iterator[tuple[str, str]]:
    """Name of each result that is to be measured again, and why."""
    for path in sorted(HERE.glob("*.json")):
        commits = commits_in(path.read_text(encoding="utf-8"))
        if path.stem in NOT_AGAIN:
            yield path.stem, NOT_AGAIN[path.stem]
        elif not commits:
            yield path.stem, "no commit recorded"
        elif missing := {commit for commit in commits if not is_in_history(commit)}:
            yield path.stem, f"commit {', '.join(sorted(missing))} is not in the history"
        else:
            share, commit = max((share_changed(commit, MEASURED.get(path.stem, MODEL)), commit) for commit in commits)
            if share >= FAR:
                yield path.stem, f"commit {commit}: {share:.0%} of its code has changed"


def commits_in(text: str) -> set[str]:
    """Commits that a result names, in a field of that name or in words."""
    found = re.findall(r'"commit": ?"([0-9a-f]{7,40})\+?"|\b[Cc]ommit ([0-9a-f]{7,40}(?:, [0-9a-f]{7,40})*)', text)
    return {commit for pair in found for commit in "".join(pair).split(", ")}


def is_in_history(commit: str) -> bool:
    command = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
    return not subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode


def main(names: list[str]) -> int:
    if names == ["--stale"]:
        for name, why in stale():
            print(f"{name:<20} {why}")
        return 0
    if unknown := [name for name in names if name not in RESULTS]:
        print(f"there is no result {unknown[0]}: take {', '.join(RESULTS)}", file=sys.stderr)
        return 2
    refuse_unbuilt()
    failed = [name for name in names or RESULTS if not measure(name)]
    for name in failed:
        print(f"{name} was not measured, its old result stands", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
