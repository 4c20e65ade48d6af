"""Grid of a benchmark: context lengths, and profiles with a key varied."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product

from kvcli.errors import UsageError
from kvcli.settings.schema import tokens_of

MOST = 64  # lengths in one range


def contexts(text: str, flag: str = "--ctx") -> list[int]:
    """Parse context lengths: `1k,8k,32k`, and ranges as in llama-bench: `512-4k*2` (512, 1k, 2k, 4k), `1k-4k+1k`."""
    found: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"([^-*+]+)-([^-*+]+)(?:([*+])([^-*+]+))?", part)
        found += _range(flag, part, *match.groups()) if match else [_tokens(flag, part)]
    if not found:
        raise UsageError(f"{flag} names no length", try_=[f"{flag} 2k", f"{flag} 1k,8k"])
    return list(dict.fromkeys(found))


def _range(flag: str, part: str, first: str, last: str, kind: str | None, by: str | None) -> Iterator[int]:
    low, high = _tokens(flag, first), _tokens(flag, last)
    step = _tokens(flag, by) if by else 2 if kind is None else 0
    if low > high or (kind != "+" and step < 2):
        raise UsageError(f"{flag} {part}: the range has its end first", try_=[f"{flag} 512-4k*2", f"{flag} 1k-4k+1k"])
    count = 0
    while low <= high:
        yield low
        low = low + step if kind == "+" else low * step
        count += 1
        if count > MOST:
            raise UsageError(f"{flag} {part}: more than {MOST} lengths", try_=["a larger step"])


def _tokens(flag: str, text: str) -> int:
    if n := tokens_of(text):
        return n
    raise UsageError(f"{flag} takes tokens, not {text.strip()!r}", try_=[f"{flag} 2k", f"{flag} 512-4k*2"])


@dataclass(frozen=True, slots=True)
class Vary:
    """A `--vary KEY=V1,V2` option."""

    key: str
    values: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Vary:
        key, equals, rest = text.partition("=")
        values = tuple(value.strip() for value in rest.split(",") if value.strip())
        if not equals or not values or not key.strip():
            raise UsageError(f"--vary takes KEY=V1,V2, not {text!r}", try_=["--vary spec.max=2,4,8"])
        return cls(key.strip(), values)


def variants(varies: Sequence[Vary]) -> Iterator[tuple[str, list[str]]]:
    """Every combination: the suffix for the profile's name, and its `--set` items."""
    ends = [vary.key.rpartition(".")[2] for vary in varies]
    names = [vary.key if ends.count(end) > 1 else end for vary, end in zip(varies, ends, strict=True)]
    for values in product(*(vary.values for vary in varies)):
        label = " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        yield label, [f"{vary.key}={value}" for vary, value in zip(varies, values, strict=True)]


def check_keys(varies: Sequence[Vary], profiles: Mapping[str, Sequence[str]]) -> None:
    """Refuse a key that none of the profiles has; `profiles` maps names to their keys."""
    known = {key for keys in profiles.values() for key in keys}
    for vary in varies:
        if vary.key not in known:
            near = get_close_matches(vary.key, known, 1)
            raise UsageError(
                f"--vary {vary.key}: no such key in {', '.join(profiles)}",
                try_=[
                    *(f"--vary {key}={','.join(vary.values)}" for key in near),
                    f"kvcli profiles show {next(iter(profiles))}",
                ],
            )
        if vary.key.startswith(("sample.", "context.")):
            raise UsageError(
                f"--vary {vary.key}: all profiles sample in the same way, and --ctx sets the context",
                try_=["--set sample.temperature=0.8"],
            )
