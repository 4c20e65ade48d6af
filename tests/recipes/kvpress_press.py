"""Parser for the press of kvpress and its compression ratio: `kvpress`, `kvpress:SnapKV`, `kvpress:SnapKV:0.75`."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from kvcli.errors import UsageError

# The presses of kvpress 0.5 that need only a compression ratio: no weights of their own, no downloads, no attention
# other than sdpa, no randomness (Compactor, LeverageScore and Random write another text each time).
PRESSES = (
    "CUR", "ExpectedAttention", "KeyDiff", "Knorm", "LagKV", "NonCausalAttn", "PyramidKV", "SnapKV", "StreamingLLM",
    "TOVA",
)  # fmt: skip
DEFAULT = "StreamingLLM"
RATIO = 0.5


@dataclass(frozen=True, slots=True)
class Press:
    """A press class of kvpress, and the share of the prompt's KV that it evicts."""

    kind: str
    ratio: float

    @classmethod
    def of(cls, name: str) -> Press:
        """Parse the name of a side. The suffix `Press` may be left out, and so may both parts."""
        _, _, rest = name.partition(":")
        kind, colon, ratio = rest.partition(":")
        kind = kind.strip() or DEFAULT
        known = {f"{press.lower()}{end}": press for press in PRESSES for end in ("", "press")}
        if kind.lower() not in known:
            near = get_close_matches(kind.lower(), known, 1)
            raise UsageError(
                f"--baseline {name}: there is no press {kind!r}",
                lines=[f"presses: {', '.join(PRESSES)}"],
                try_=[f"--baseline kvpress:{known[n]}" for n in near] or ["--baseline kvpress:SnapKV:0.5"],
            )
        return cls(f"{known[kind.lower()]}Press", _share(name, kind, ratio) if colon else RATIO)

    def asked(self) -> dict[str, object]:
        """Settings as sent to the worker."""
        return {"press": self.kind, "ratio": self.ratio}


def _share(name: str, kind: str, text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio < 1:
        raise UsageError(
            f"--baseline {name}: {text!r} is not a share of the prompt to drop",
            lines=["expected a number above 0 and below 1"],
            try_=[f"--baseline kvpress:{kind}:0.5"],
        )
    return ratio
