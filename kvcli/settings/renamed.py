"""Former names of settings, options and commands. A former name is refused, and the error gives the present one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FORMER: Mapping[str, str] = {
    "recall": "sparse", "form": "kv_format", "keep": "prefix_cache", "steps": "reasoning_steps",
    "kv.halves": "kv.split_codes", "memory.disposition": "memory.evicted", "memory.ladder": "memory.fallbacks",
    "memory.lose": "memory.max_loss", "memory.on_shortage": "memory.on_oom", "memory.reach": "memory.host_access",
    "memory.texts": "memory.sequences", "policy.every": "policy.compression_interval", "policy.guard": "policy.recent",
    "policy.reprofile_every": "policy.reprofile_interval", "prune.least": "prune.min_prompt",
    "prune.revive_every": "prune.revive_interval", "reuse.least": "reuse.min_span",
    "sparse.every": "sparse.selection_interval", "spec.cascade": "spec.lookup_verify",
    "spec.kill_below": "spec.min_speedup", "spec.local": "spec.recent", "spec.looks": "spec.scored_layers",
    "spec.probe_every": "spec.baseline_interval", "spec.promise": "spec.min_gain", "spec.shelf": "spec.chunk_device",
    "spec.strict": "spec.require_batch_invariance", "spec.wide": "spec.tree_width", "keep_kv": "prefix_cache_size",
    "--fresh": "--no-cache", "--mode map": "--mode parts", "/sessions": "/chats",
}  # fmt: skip


def new_name(keys: Sequence[str]) -> str:
    """Return the present dotted name of a setting that was renamed; "" if it never had another name."""
    now = ".".join([FORMER.get(keys[0], keys[0]), *keys[1:]])
    now = FORMER.get(now, now)
    return now if now != ".".join(keys) else ""
