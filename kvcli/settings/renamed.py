"""Former names of settings. An old name is refused, and the error gives the new one."""

from __future__ import annotations

from collections.abc import Sequence

TABLES = {"recall": "sparse", "form": "kv_format", "keep": "prefix_cache", "steps": "reasoning_steps"}
KEYS = {
    "kv.halves": "split_codes",
    "memory.disposition": "evicted",
    "memory.ladder": "fallbacks",
    "memory.lose": "max_loss",
    "memory.on_shortage": "on_oom",
    "memory.reach": "host_access",
    "memory.texts": "sequences",
    "policy.every": "compression_interval",
    "policy.guard": "recent",
    "policy.reprofile_every": "reprofile_interval",
    "prune.least": "min_prompt",
    "prune.revive_every": "revive_interval",
    "reuse.least": "min_span",
    "sparse.every": "selection_interval",
    "spec.cascade": "lookup_verify",
    "spec.kill_below": "min_speedup",
    "spec.local": "recent",
    "spec.looks": "scored_layers",
    "spec.probe_every": "baseline_interval",
    "spec.promise": "min_gain",
    "spec.shelf": "chunk_device",
    "spec.strict": "require_batch_invariance",
    "spec.wide": "tree_width",
    "keep_kv": "prefix_cache_size",
}


def new_name(keys: Sequence[str]) -> str:
    """Return the present dotted name of a setting that was renamed; "" if it never had another name."""
    table = TABLES.get(keys[0], keys[0])
    now = ".".join([table, *keys[1:]])
    now = ".".join([*now.split(".")[:-1], KEYS[now]]) if now in KEYS else now
    return now if now != ".".join(keys) else ""
