"""Draw one head as a cell: a colour, a shade, a digit or a letter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvcli.render.terminal.terminal import Span

if TYPE_CHECKING:
    from kvcli.schemas.heads import HeadsDocument

WORDS = {
    "policy": "policy",
    "retrieval": "retrieval",
    "ablate": "loss when restricted",
    "needle": "weight on the needle",
    "reason": "weight on a fact that another fact points to",
    "repeat": "induction",
    "sink": "mass on first tokens",
    "local": "mass on the newest tokens",
    "far": "mass on all other tokens",
    "worst": "mass on all other tokens, worst tenth of rows",
    "entropy": "entropy in nats",
    "n50": "tokens for 50 % of the mass",
    "n90": "tokens for 90 % of the mass",
    "n95": "tokens for 95 % of the mass",
    "n99": "tokens for 99 % of the mass",
}
SHARES = {"retrieval", "needle", "repeat", "sink", "local", "far", "worst"}  # scalars that are shares from 0 to 1
SHADES = " ░▒▓█"
# Viridis, dark to light in equal steps: readable in grey and for colour-blind readers
RAMP = ("#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725")
# after Okabe and Ito, from cheap policies to the full cache
PALETTE = {
    "S": "#9aa0a8", "P": "#56b4e9", "L": "#0072b2", "H": "#e69f00", "B": "#cc79a7", "F": "#d55e00", "W": "#5c6067",
    "N": "#009e73", "h": "#f0e442", "b": "#7b3294",
}  # fmt: skip
_LETTER = {
    frozenset(): "S",
    frozenset({"punct"}): "P",
    frozenset({"local"}): "N",
    frozenset({"punct", "local"}): "L",
    frozenset({"frequent"}): "H",
    frozenset({"punct", "frequent"}): "H",
    frozenset({"local", "frequent"}): "B",
    frozenset({"punct", "local", "frequent"}): "B",
    frozenset({"full"}): "F",
}


def letters(document: HeadsDocument) -> list[str]:
    """Return a letter for each candidate policy; the second of two with the same letter is in lower case."""
    found: list[str] = []
    names = document.policy.candidates if document.policy is not None else []
    for name in names:
        letter = _LETTER.get(frozenset(name.split("+")) - {"special"}, "?")
        found.append(letter.lower() if letter in found else letter)
    return found


def mark(document: HeadsDocument, show: str, layer: int, head: int) -> str:
    """Return a letter of a policy, or a digit from 0 to 9."""
    if show == "policy" and document.policy is not None:
        chosen = document.policy.chosen[layer][head]
        return "W" if chosen < 0 else letters(document)[chosen]
    return str(min(9, int(10 * level(document, show, layer, head))))


def level(document: HeadsDocument, show: str, layer: int, head: int) -> float:
    """Return a value from 0 to 1, relative to the largest value if the scalar is no share."""
    table = document.scalars[show]
    return min(1.0, max(0.0, table[layer][head] / largest(document, show)))


def largest(document: HeadsDocument, show: str) -> float:
    """Return the value of a full cell."""
    if show in SHARES:
        return 1.0
    return max((value for row in document.scalars[show] for value in row), default=0.0) or 1.0


def cell(
    document: HeadsDocument, show: str, layer: int, head: int, look: Literal["truecolor", "shade", "digit"]
) -> list[Span]:
    """Return two columns and a gap."""
    if show == "policy":
        letter = mark(document, show, layer, head)
        if look == "truecolor":
            return [(f" {letter}", f"{ink(PALETTE[letter])} on {PALETTE[letter]}"), (" ", "")]
        return [(f" {letter} ", "bold" if letter == "F" else "")]
    value = level(document, show, layer, head)
    if look == "truecolor":
        return [("  ", f"on {RAMP[min(9, int(10 * value))]}"), (" ", "")]
    if look == "shade":
        return [(SHADES[min(4, int(value * 4 + 0.5))] * 2 + " ", "")]
    return [(f" {mark(document, show, layer, head)} ", "")]


def ink(colour: str) -> str:
    """Return black or white, whichever is readable on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 128 else "#ffffff"


def scale(document: HeadsDocument, show: str, look: Literal["truecolor", "shade", "digit"]) -> list[Span]:
    """Return the legend of the cells, from 0 to the largest value."""
    end = "1" if show in SHARES else f"{largest(document, show):.3g}"
    if look == "truecolor":
        return [("0 ", ""), *(("  ", f"on {colour}") for colour in RAMP), (f" {end}", "")]
    if look == "shade":
        return [(f"0 {' '.join(SHADES[1:])} {end}", "")]
    return [(f"0 to 9: from 0 to {end}", "")]


def kept(document: HeadsDocument, layer: int) -> str:
    """Return the share of tokens that a layer keeps, by its policies or else by the head map."""
    if (policy := document.policy) is not None:
        n = max(value for row in policy.cost[-1] for value in row) or 1.0
        tokens = [
            n if chosen < 0 else policy.cost[chosen][layer][head] for head, chosen in enumerate(policy.chosen[layer])
        ]
        return f"{sum(tokens) / (n * len(tokens)):.3f}"
    few = min(1.0, (document.suggest.sinks + document.suggest.window) / document.ctx)
    full = _full(document, layer)
    return f"{(full + few * (document.kv_heads - full)) / document.kv_heads:.3f}"


def margin(document: HeadsDocument, show: str, layer: int) -> str:
    """Return the right margin of a layer: the share it keeps, or its number of heads with a full cache."""
    if show == "policy":
        return f"{100 * float(kept(document, layer)):3.0f} %"
    full = _full(document, layer)
    return f"{full} of {document.kv_heads} full" if layer == document.probed[0] else str(full)


def _full(document: HeadsDocument, layer: int) -> int:
    return sum(at == layer for at, _ in document.suggest.full)
