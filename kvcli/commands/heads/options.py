"""Options of `kvcli profile-heads`."""

from __future__ import annotations

from typing import Literal

from kvcli.commands.common import flags as o
from kvcli.commands.common.options import Options, choice

Criterion = Literal["cvar10", "mean", "p05"]

_PROMPT = "Text for the measurement. Repeatable. Default: a field report."
_PROBE = "prompt, ablate, needle, reason, repeat, or all. Default prompt."
_CRITERION = "Recovery over tokens: cvar10 (mean of the worst 10 %), mean, or p05 (5th percentile)."
_CONTEXT = "Prompt length; further values: context lengths for the memory estimate. Default 2k."
_RECOVERY = "Share of attention that the policy of a head must keep."
_SHOW = "Values in the grid: policy, retrieval, or any scalar of profile.json."
_COMPARE = "Compare with an earlier run or a DuoAttention table."
_EMIT = "Files to write: html, json, npz, tsv, md, toml, or none. Default json,html."


class HeadsOptions(Options):
    """Options of `kvcli profile-heads`."""

    model: o.ModelName = None
    prompts: list[str] | None = choice("--prompt", metavar="FILE", help=_PROMPT)
    probe: str = choice(default="prompt", metavar="NAME,..", help=_PROBE)
    criterion: Criterion | None = choice(metavar="NAME", help=_CRITERION, rare=True)
    recovery: float | None = choice(metavar="F", help=_RECOVERY, rare=True)
    keep: float | None = choice(metavar="F", help="Instead: share of tokens that all heads keep.", rare=True)
    contexts: str = choice("--context", default="2k", metavar="N,..", help=_CONTEXT)
    layers: str | None = choice(metavar="A-B", help="Layers to measure. Default: all.", rare=True)
    show: str | None = choice(metavar="NAME", help=_SHOW, rare=True)
    top: int = choice(default=10, metavar="N", help="Heads listed below the grid. Default 10.", rare=True)
    stability: int = choice(default=0, metavar="K", help="Repeat the probe every K generated tokens.", rare=True)
    compare: str | None = choice(metavar="RUN", help=_COMPARE, rare=True)
    texts: int | None = choice(metavar="N", help="Texts with four hidden facts each. Default 4.", rare=True)
    seed: int = choice(default=0, metavar="N", help="Random seed of the texts. Default 0.", rare=True)
    out: str | None = choice(metavar="DIR", help="Output folder. Default ./heads-MODEL/.")
    emit: str = choice(default="json,html", metavar="A,..", help=_EMIT, rare=True)
    weights: o.Weights
    allow_pickle: o.Pickle = False
