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

LISTED = "smollm2-135m"  # a name of kvcli's list; fetched first, by pip, where a command names it
REAL = (
    f"kvcli bench {LISTED} --profiles exact,ngram,fafo -n 64 --reps 3 --warmup 0"
    " --baseline hf --baseline llama.cpp --baseline hf-lookup"
)

RESULTS = {
    "smollm2": f"{REAL} --no-memory --ctx 512 --workload prose,code,manual,article,rewrite,translate,talk",
    "smollm2-4k": f"{REAL} --ctx 4k --workload manual",
    "beside-packed-2": "python tests/bench/beside.py --kinds int8,int4 --prompts 512,4096 --threads 2",
    "together": "python tests/bench/together.py",
    "forks": "python tests/bench/forks.py",
    "forks-smollm2": f"python tests/bench/forks.py --model {LISTED} --task documents",
    "ragged-smollm2": f"python tests/bench/ragged.py --model {LISTED} --contexts 16,1024 --reps 11",
    "fafo-together": "python tests/bench/fafo_together.py",
    "fafo-together-smollm2": f"python tests/bench/fafo_together.py --model {LISTED} --tasks article,rewrite --texts 1,4"
    " --ctx 192 --new 24 --reps 1",
    "hybrid": "python tests/bench/hybrid.py",
    "ngram-replay": f"python tests/bench/ngram_replay.py --model {LISTED}",
    "fit": "python tests/bench/fit.py",
    "reliability": "python tests/bench/reliability.py",
    "drafters-wide": "python tests/bench/drafters.py --models demo-wide --tasks lookup,summary,free --temperatures 0"
    " --sides plain,ngram,fafo,small,small-full,small+copies,specextend,specextend-every",
    "drafters-smollm2": f"python tests/bench/drafters.py --models {LISTED} --reps 1 --tasks open,list,short,code,french"
    " --sides ngram,eagle3,eagle3+copies,eagle3-always --head /tmp/head",  # made as docs/design/draft-models.md says
    "drafters-int4": "python tests/bench/drafters.py --models demo-wide --reps 1 --tasks free --temperatures 0"
    " --sides int4,int4-always",
    "scouts": "python tests/bench/scouts.py",
    "quest-view": "python tests/bench/quest_view.py",
    "attend-packed": "python tests/bench/attend_quantized.py --seconds 0.6",
    "across-layers": "python tests/bench/across_layers.py",
    "across-layers-smollm2": f"python tests/bench/across_layers.py --model {LISTED} --texts 16 --length 1024",
    "bits-by-importance": "python tests/bench/bits_by_importance.py --texts 8 --windows 4",
    "bits-by-importance-smollm2": f"python tests/bench/bits_by_importance.py --model {LISTED} --texts 2 --length 768",
    "recall-choice": "python tests/bench/recall_choice.py",
    "recall-choice-smollm2": f"python tests/bench/recall_choice.py --model {LISTED} --texts 2 --length 1024",
    "draft-caches": "python tests/bench/draft_caches.py",
    "recall-units": "python tests/bench/recall_units.py --texts 12",
    "recall-units-smollm2": f"python tests/bench/recall_units.py --model {LISTED} --texts 4 --length 1024",
    "segment-choice": "python tests/bench/segment_choice.py",
    "segment-choice-smollm2": f"python tests/bench/segment_choice.py --model {LISTED} --texts 4 --length 1024",
    "overlap": "python tests/bench/overlap.py --seconds 1 --reps 4",
    "recall-tiers": "python tests/bench/recall_tiers.py",
    "kept": f"python tests/bench/kept.py --model {LISTED}",
    "kv-quality": "python tests/bench/kv_quality.py --shares 0.5,0.25,0.125",
    "fastgen": "python tests/bench/fastgen.py",
    "fastgen-smollm2": f"python tests/bench/fastgen.py --model {LISTED} --texts 4 --length 1024",
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
    "agreement": f"python tests/bench/agreement.py --model {LISTED} --windows 1"
    " --sides int8,4+4bits,4+2bits,sketch,minmax --shares 0.5",
    "probe-rows": "python tests/bench/probe_rows.py --texts 8",
    "prune": f"python tests/bench/prune.py --model {LISTED} --tokens 600 --min-prompt 256 --n 2 --kinds lookup --hf 0"
    " --budgets lazy-paper,lazy"
    " --sides lazy+random+lazy-paper:static+lazy-paper:compressed+lazy:lazy-back+lazy:lazy-peakof5",
    "spec-prefill": "python tests/bench/spec_prefill.py --model demo-wide --n 2 --sides draft --times",
    "spec-prefill-demo": "python tests/bench/spec_prefill.py --n 8",
    "spec-prefill-smollm2": f"python tests/bench/spec_prefill.py --model {LISTED} --draft {LISTED} --tokens 600 --n 2"
    " --sides draft,lots,lazy",
    "paper-profiles": f"python tests/bench/paper_profiles.py --model {LISTED} --n 3",
    "lookahead-rows": f"python tests/bench/lookahead_rows.py --model {LISTED} --only times",
    "prompt-segments": "python tests/bench/prompt_segments.py --model demo --only answers --tokens 2048 --n 8",
    "retrieval-heads": "python tests/bench/retrieval_heads.py",
    "citations": "python tests/bench/citations.py --grid --folder /usr/share",
    "summarize": "python tests/bench/summarize.py --chunk 0,2500",
    "wordings": f"python tests/bench/wordings.py --model {LISTED}"  # of Debian packages that it names, in /usr/share
    " --names bashref,libtasn1,debian-faq,crc-doc,users-and-groups,python-policy,GPL-3,RelNotes",
    "gpu-model": "python tests/bench/gpu_model.py",  # a model of compiled kernels: nothing is measured
    "gpu-compiled": "python tests/bench/compiled_kernels.py",  # an hour of one core
    **{
        f"gpu-{one}": f"python -m tests.gpu && python -m tests.gpu.tables {one.rpartition('-')[2]}"  # writes all tables
        for one in ("checks-h100", "steps-h100", "kernels-h100", "checks-h200", "steps-h200")
    },
    "extract": "python tests/bench/extract.py",
    "pdf-text": "python tests/bench/pdf_text.py",  # of the packages it names, installed
}

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
    "gpu-compiled": ("kernels",),
}


def measure(name: str) -> bool:
    """Run the command of one result in an empty folder; keep what it wrote if it went well."""
    with tempfile.TemporaryDirectory() as folder:
        first, _, then = RESULTS[name].partition(" && ")
        words = first.split()
        home, out = Path(folder, "home"), Path(folder, "result.json")
        env = os.environ | {"PYTHONPATH": str(ROOT), "KVCLI_HOME": str(home)}
        if LISTED in words:
            subprocess.run([sys.executable, "-m", "kvcli", "models", "get", LISTED], env=env, check=True)
        print(f"{name}: {RESULTS[name]}", flush=True)
        command = [*program(words), "-o" if words[0] == "kvcli" else "--out", str(out)]
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
        if not commits:
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
