"""Number formats for people: counts, sizes and times."""

from __future__ import annotations

from collections.abc import Mapping

KIB, UNITS = 1024, "KMGTP"
TIERS = {"cpu": "host", "cuda": "GPU", "mps": "GPU", "packed": "quantized", "packed cuda": "quantized GPU"}
ORDERS = {"chunks": "in chunks", "layers": "layer by layer"}


def count(n: int) -> str:
    return f"{n:,}"


def plural(n: int, noun: str) -> str:
    """Return `1 line`, `1,024 lines`."""
    return f"{count(n)} {noun}{'' if n == 1 else 's'}"


def long_size(n: float) -> str:
    """Return `17.1 MiB` in the largest unit that keeps the value above 1; the smallest unit is a KiB."""
    value, unit = n / KIB, UNITS[0]
    for unit in UNITS:
        # 999.5, not 1024: "1,012 MiB" is wider than any other figure and would make the layout jump
        if value < 999.5 or unit == UNITS[-1]:
            break
        value /= KIB
    digits = 1 if unit != "K" and value < 99.95 else 0
    return f"{value:.{digits}f} {unit}iB"


def tiers(kv: Mapping[str, int]) -> str:
    """Return `17.1 MiB` for one tier, `4.4 MiB GPU + 12.0 MiB host` for several."""
    used = [(TIERS.get(name, name), size) for name, size in kv.items() if size]
    if len(used) < 2:
        return long_size(sum(size for _, size in used))
    return " + ".join(f"{long_size(size)} {name}" for name, size in used)


def seconds(s: float) -> str:
    """Return `0.88 s`, `2.9 s`, `2 min 05 s`."""
    if s < 0.995:
        return f"{s:.2f} s"
    if s < 99.95:
        return f"{s:.1f} s"
    minutes, rest = divmod(round(s), 60)
    return f"{minutes} min {rest:02d} s"


def clock(s: float) -> str:
    """Return the remaining time: `0:07`, `12:05`, `1:00:09`."""
    minutes, rest = divmod(max(0, round(s)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def rate(per_second: float) -> str:
    """Return `24.1 tok/s` below a thousand, `1,760 tok/s` above."""
    return f"{per_second:.1f} tok/s" if per_second < 999.95 else f"{per_second:,.0f} tok/s"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"
