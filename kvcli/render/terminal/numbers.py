"""Number formats for people: counts, sizes, times, and the sparkline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

KIB, UNITS = 1024, "KMGTP"
BARS = "▁▂▃▄▅▆▇█"
FEW = 6  # passes in the sparkline
ORDERS = {"chunks": "chunk by chunk", "layers": "layer by layer"}


def count(n: int) -> str:
    return f"{n:,}"


def plural(n: int, noun: str) -> str:
    """Return `1 line`, `1,024 lines`."""
    return f"{count(n)} {noun}{'' if n == 1 else 's'}"


def _scaled(n: float) -> tuple[str, str]:
    """Return the value in the largest unit that keeps it above 1, and the unit's letter; the smallest unit is a KiB."""
    value, unit = n / KIB, UNITS[0]
    for unit in UNITS:
        # 999.5, not 1024: "1,012M" is wider than any other figure and would make the layout jump
        if value < 999.5 or unit == UNITS[-1]:
            break
        value /= KIB
    digits = 1 if unit != "K" and value < 99.95 else 0
    return f"{value:.{digits}f}", unit


def short_size(n: float) -> str:
    """Return `17.1M`, `431M`, `312K`, for the live row."""
    value, unit = _scaled(n)
    return value + unit


def long_size(n: float) -> str:
    """Return `17.1 MiB`, for sentences and tables."""
    value, unit = _scaled(n)
    return f"{value} {unit}iB"


def tiers(kv: Mapping[str, int]) -> str:
    """Return `17.1M` for one tier, `4.4M+12.0M cpu` for several; the first is the one that the model reads from."""
    used = [(name, size) for name, size in kv.items() if size]
    if not used:
        return short_size(0)
    parts = [short_size(used[0][1])] + [f"{short_size(size)} {name}" for name, size in used[1:]]
    return "+".join(parts)


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
    """Return `24.1/s` below a thousand, `1,760/s` above."""
    return f"{per_second:.1f}/s" if per_second < 999.95 else f"{per_second:,.0f}/s"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def spark(recent: Sequence[int]) -> str:
    """Draw tokens gained by the last passes as bars; the lowest bar is the minimum of one token."""
    last = recent[-FEW:]
    top = max(last, default=0)
    if top < 2:
        return BARS[0] * len(last)
    return "".join(BARS[max(0, (n - 1) * (len(BARS) - 1) // (top - 1))] for n in last)
