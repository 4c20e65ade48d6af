"""Comparability of an earlier result with the current one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcli.schemas.bench import BenchDocument


def unlike(name: str, earlier: BenchDocument, now: BenchDocument) -> Iterator[str]:
    """Notes, a line each: different conditions, and rows that the earlier result lacks or measured on other prompts."""
    was, is_ = _conditions(earlier), _conditions(now)
    other = [f"{what} {was[what]}, not {is_[what]}" for what in was if was[what] != is_[what]]
    if other:
        yield f"{name} was measured with {'; '.join(other)}: × includes that difference"
    rows = {(row.profile, row.ctx, row.workload): row for row in earlier.rows}
    for row in now.rows:
        where = f"{row.profile}, {row.workload} {row.ctx:,}"
        base = rows.get((row.profile, row.ctx, row.workload))
        if base is None:
            yield f"{where}: {name} has no such result"
        elif base.prompt_hash != row.prompt_hash:
            yield f"{where}: {name} was measured with another prompt"


def _conditions(document: BenchDocument) -> Mapping[str, str]:
    env, model = document.env, document.model
    return {
        "model": model.id,
        "dtype": model.dtype,
        "quant": model.quant,
        "processor": str(env.machine),
        "device": env.device,
        "threads": str(env.threads),
        "torch": str(env.versions.get("torch")),
        "--new": str(document.args.new),
        "temperature": f"{document.args.temperature:g}",
    }
