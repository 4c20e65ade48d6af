"""Last sections of a benchmark's HTML report: checks, command, machine, and setup of each side."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from kvcli.render.bench import table as b
from kvcli.render.html import Markup, data_table, join, number, section, tag
from kvcli.render.terminal.terminal import long_size

if TYPE_CHECKING:
    from kvcli.schemas.bench import BenchArgs, BenchDocument


def checks(document: BenchDocument) -> Markup:
    if not document.checks:
        return Markup("")
    lines = [
        [f"{check.expression}", check.profile, f"{check.workload} {check.ctx:,}",
         b.NONE if check.value is None else number(check.value), "failed" if check.failed else "passed"]
        for check in document.checks
    ]  # fmt: skip
    return section("Checks", data_table(["--fail-if", "profile", "at", "value", "result"], lines))


def fine_print(document: BenchDocument) -> Markup:
    env, model = document.env, document.model
    load = [
        f"{list_[0]:.2f} {when}" for list_, when in ((env.load_before, "before"), (env.load_after, "after")) if list_
    ]
    facts = {
        "machine": " · ".join([env.cpu or "", *env.gpus, f"{env.cores} cores", b.threads(document)]).strip(" ·"),
        "system": f"{env.system}, {long_size(env.memory_total)} of memory",
        "load": ", ".join(load) + ("" if env.quiet is not False else " (other programs were running)"),
        "model": f"{model.id}, {model.family}, {model.parameters:,} parameters, {model.dtype}, quant {model.quant}",
        "versions": ", ".join(f"{name} {found}" for name, found in env.versions.items() if found),
        "commit": env.commit or b.NONE,
        "date": env.date,
    }
    command = tag("pre", tag("code", f"$ {command_of(document)}"), tabindex="0")
    differences = [tag("li", line) for line in b.differences(document)]
    texts = [tag("h3", "First differences of texts"), tag("ul", differences)] if differences else []
    setups = {row.profile: row.setup for row in document.rows}
    sides = [tag("details", tag("summary", name), _pairs(setup)) for name, setup in setups.items()]
    return section("What was measured", command, _pairs(facts), texts, tag("h3", "Sides"), *sides)


def _pairs(facts: dict[str, str]) -> Markup:
    return tag("dl", [join([tag("dt", name), tag("dd", value)]) for name, value in facts.items()])


def command_of(document: BenchDocument) -> str:
    """Return the command that repeats this measurement, with defaults spelled out."""
    args = document.args
    words = ["kvcli", "bench", args.model, *_profiles(args)]
    words += [word for text in args.vary for word in ("--vary", text)]
    words += [word for name in args.baselines for word in ("--baseline", name)]
    words += ["--ctx", ",".join(map(str, args.ctx)), "--new", str(args.new), "--reps", str(args.reps)]
    words += ["--warmup", str(args.warmup), "--workload", ",".join(args.workloads), "--seed", str(args.seed)]
    words += [] if args.interleave else ["--no-interleave"]
    words += [] if args.memory else ["--no-memory"]
    for flag, value in (("--device", args.device), ("--dtype", args.dtype), ("--quant", args.quant)):
        words += [flag, value] if value else []
    words += ["--allow-pickle"] if args.allow_pickle else []
    words += ["--quality", args.quality]
    words += ["--query-visible"] if args.query_visible else []
    words += ["--quality-n", str(args.quality_n)] if args.quality_n else []
    words += ["--quality-lengths", args.quality_lengths] if args.quality_lengths else []
    words += [word for text in args.set for word in ("--set", text)]
    words += [word for text in args.fail_if for word in ("--fail-if", text)]
    return shlex.join(words)


def _profiles(args: BenchArgs) -> list[str]:
    """Return the profile options as the user named them.

    Varied entries have names of their own, and `--set` does not apply to an `exact` that the user did not name.
    """
    if args.named:
        return ["--profiles", ",".join(args.named)]
    if args.vary or args.set:
        return ["-P", args.current] if args.current else []
    return ["--profiles", ",".join(args.profiles)]
