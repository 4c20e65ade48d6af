"""Conditions of `--fail-if`, checked on every row, absolute or relative to the baseline."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from kvcli.errors import UsageError
from kvcli.schemas.bench import BenchRow, Check

Figure = Callable[["BenchRow"], float | None]

_SPEED = {"": 1, "/s": 1}
_BYTES = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 1e3, "MB": 1e6, "GB": 1e9}
# name -> the figure of a row, and the units of its limit
FIGURES: Mapping[str, tuple[Figure, Mapping[str, float]]] = {
    "tok_s": (lambda row: row.median.tok_s, _SPEED),
    "read_tok_s": (lambda row: row.median.read_tok_s, _SPEED),
    "first_token": (lambda row: row.median.first_token, {"": 1, "s": 1, "ms": 1e-3}),
    "same": (lambda row: row.same.share if row.same else None, {"": 1, "%": 0.01}),
    "peak": (lambda row: row.peak_bytes, _BYTES),
    "kv": (lambda row: row.kv_bytes, _BYTES),
    "accept": (lambda row: row.accept.mean_acceptance_length if row.accept else None, {"": 1}),
}
OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
EXAMPLES = ["--fail-if 'tok_s<-10%'", "--fail-if 'tok_s<20'", "--fail-if 'same<100%'", "--fail-if 'peak>600MiB'"]
FORM = re.compile(r"\s*([A-Za-z_]+)\s*(<=|>=|<|>)\s*([+-]?)(\d+(?:\.\d+)?|\.\d+)\s*(%|/s|[A-Za-z]*)\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition. A relative condition limits the change against the baseline's row."""

    text: str
    name: str
    sign: str  # a key of OPERATORS
    limit: float
    is_relative: bool

    @classmethod
    def of(cls, text: str) -> Condition:
        """Parse `tok_s<-10%`: a figure, a comparison, a number with its unit. A signed percentage is a change."""
        match = FORM.fullmatch(text)
        if not match:
            raise UsageError(f"--fail-if cannot be read: {text!r}", try_=EXAMPLES)
        name, sign, direction, number, unit = match.groups()
        if name not in FIGURES:
            near = get_close_matches(name, FIGURES, 1)
            known = f"figures: {', '.join(FIGURES)}"
            better = [f"--fail-if '{n}{text.strip().removeprefix(name)}'" for n in near]
            raise UsageError(f"--fail-if has no figure {name!r}", lines=[known], try_=better or EXAMPLES)
        value = float(direction + number)
        if unit == "%" and direction:
            return cls(text, name, sign, value / 100, True)
        units = FIGURES[name][1]
        if unit not in units or direction == "-":
            raise UsageError(f"--fail-if {text}: {_why(name, unit, number)}", try_=EXAMPLES)
        return cls(text, name, sign, value * units[unit], False)

    def check(self, row: BenchRow, base: BenchRow | None) -> Check | None:
        """Check the condition on a row; None if it does not apply to the row."""
        if self.is_relative:
            if base is row:
                return None
            value = self._change(row, base) if base is not None else None
        elif row.exactness is None or (self.name == "same" and row.same is None and row.error is None):
            return None  # a baseline that is no kvcli profile, or the row that others are compared with
        elif self.name == "accept" and row.accept is None and row.error is None:
            return None
        else:
            value = FIGURES[self.name][0](row)
        failed = value is None or OPERATORS[self.sign](value, self.limit)
        return Check.from_attributes(row, expression=self.text, value=value, limit=self.limit, failed=failed)

    def _change(self, row: BenchRow, base: BenchRow) -> float | None:
        ratio = row.ratio.tok_s if self.name == "tok_s" else row.ratio.read_tok_s if self.name == "read_tok_s" else None
        if ratio is not None:
            return ratio.median - 1
        figure, _ = FIGURES[self.name]
        mine, theirs = figure(row), figure(base)
        return mine / theirs - 1 if mine is not None and theirs else None


def words(check: Check) -> str:
    """Message for a failed check."""
    condition = Condition.of(check.expression)
    if check.value is None:
        value = "no result to compare with" if condition.is_relative else "the result has no such figure"
    elif condition.is_relative:
        value = f"it changed by {100 * check.value:+.1f} %"
    elif condition.name == "same":
        value = f"it is {100 * check.value:.1f} %"
    elif condition.name in ("peak", "kv"):
        value = f"it is {check.value / 2**20:,.1f} MiB"
    else:
        value = f"it is {check.value:,.3f}".rstrip("0").rstrip(".")
    return f"{check.profile}, {check.workload} {check.ctx:,}: {check.expression} ({value})"


def _why(name: str, unit: str, number: str) -> str:
    if unit == "%":
        return f"a change has a sign, as in -{number}% or +{number}%"
    if not unit:
        return f"a limit is positive, and a change is in per cent, as in -{number}%"
    units = ", ".join(filter(None, FIGURES[name][1]))
    return f"the unit of {name} is {units}" if units else f"{name} has no unit and is positive"
