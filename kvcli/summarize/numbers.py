"""Normalize numbers for comparison, with sign and scale, and also with their unit."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from kvcli.summarize.units import CURRENCIES, LETTER, MEASURES, measure, unit_at

COUNTED = {
    w: str(n)
    for n, w in enumerate(
        """two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
        eighteen nineteen""".split(),
        2,
    )
} | {
    w: str(n)
    for n, w in zip(range(20, 100, 10), "twenty thirty forty fifty sixty seventy eighty ninety".split(), strict=True)
}
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "mn": 6, "billion": 9, "bn": 9, "trillion": 12}
LETTERS = {"k": 3, "m": 6, "b": 9, "t": 12}  # scales, as in $1.2M

_GAP = "[ \u00a0\u2009\u202f'’]"  # between groups of three digits
_NO_ROW = "".join(rf"(?<!\b\d{{{n}}}{_GAP})" for n in (1, 2, 3))  # "12 340 7" in a table is three numbers
_GROUPED = rf"{_NO_ROW}(?!0)\d{{1,3}}(?:{_GAP}\d{{3}}(?!\d)){{1,6}}(?!{_GAP}\d)(?:[.,]\d+)?"
_DIGITS = rf"{_GROUPED}|\d+(?:[.,]\d+)*|(?<![\w.,])\.\d+"
_POWER = r"\^[-\u2212]?\d+|[\u207a\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+"
_MONEY = rf"(?:US)?\$|[{CURRENCIES}]|(?:USD|EUR|GBP|JPY|INR|CHF)[ \u00a0]?"
# 1990s is no number of seconds
_GLUED = "|".join(sorted(map(re.escape, {*MEASURES, *SCALES, *LETTERS} - {"s"}), key=len, reverse=True))
_COUNTED = "|".join(sorted(COUNTED, key=len, reverse=True))
_ONE = rf"(?:(?P<half>half[ -])?an?|one)(?=[ -](?:{'|'.join(SCALES)})(?!{LETTER}))"
NUMBER = (
    rf"(?:(?P<money>{_MONEY})?(?P<below>[-\u2212](?=[\d.])(?<=[{CURRENCIES}].))?(?P<digits>{_DIGITS})(?P<power>{_POWER})?"
    rf"(?![.,]\d)(?:(?!{LETTER})|(?=(?:{_GLUED})(?!{LETTER})))"
    rf"|(?P<counted>{_COUNTED})(?!{LETTER})|(?P<one>{_ONE}))(?:['’]s(?!{LETTER}))?"
)
_ONES = re.compile(r"[-\u2010\u2011](one|two|three|four|five|six|seven|eight|nine)\b", re.IGNORECASE)  # twenty-five
_SCALE = re.compile(rf"[ \t\n\u00a0-]{{0,3}}({'|'.join(SCALES)})(?!{LETTER})", re.IGNORECASE)
_LETTER_SCALE = re.compile(rf"([kKMB])(?!{LETTER})")
_MONEY_SCALE = re.compile(rf"[ \u00a0]?([kmbt])(?!{LETTER})", re.IGNORECASE)
_MINUS = re.compile(r"(?<![^\s(\[])(?:[-\u2013\u2212]|minus\s)\Z", re.IGNORECASE)
_CELL = re.compile(r"[ \t]*(?:[|\t]|\Z|\n(?!\s{0,9}[a-z])|[-+\u2212]?\.?\d)")


@dataclass(frozen=True, slots=True)
class Amount:
    """A number, and also with its unit if it has one; the end of the number, and the end of its unit.

    `is_bare`: the number has no unit and is in a line or column of numbers, whose header may have the unit.
    """

    keys: tuple[str, ...]
    end: int
    over: int
    is_bare: bool


def read(match: re.Match[str]) -> Amount:
    """Return the amount of a match of NUMBER.

    5 million equals 5,000,000, and 5 m equals 5 metres. 5 differs from 5 million, and 5 g from 5 mg.
    """
    text, money = match.string, (match["money"] or "").strip()
    number, end = _first(match)
    number, end = _scaled(number, text, end, bool(money))
    if match["below"] or _MINUS.search(text, max(0, match.start() - 8), match.start()):
        number = f"-{number}"
    unit, over = unit_at(text, end) or ("", end)
    if money and unit != measure(money):
        unit, over = measure(money), end
    keys = (number, f"{number} {unit}") if unit else (number,)
    return Amount(keys, end, over, not unit and _CELL.match(text, end) is not None)


def _first(match: re.Match[str]) -> tuple[str, int]:
    """Return the number before its scale (digits, or words up to ninety-nine), and its end."""
    if match["digits"]:
        power = unicodedata.normalize("NFKC", match["power"] or "").lstrip("^+").replace("\u2212", "-")
        return plain(match["digits"]) + (f"^{power}" if power else ""), match.end()
    if match["one"]:
        return ("0.5" if match["half"] else "1"), match.end()
    number = COUNTED[match["counted"].lower()]
    if len(number) == 2 and number >= "20" and (ones := _ONES.match(match.string, match.end())):
        return f"{number[0]}{COUNTED.get(ones[1].lower(), '1')}", ones.end()
    return number, match.end()


def _scaled(number: str, text: str, end: int, is_money: bool) -> tuple[str, int]:
    """Return the number with the scales after it. A letter is a scale if it touches the number, or with a currency."""
    if number.count(".") > 1 or "^" in number:
        return number, end
    letter = (_MONEY_SCALE if is_money else _LETTER_SCALE).match(text, end)
    if letter:
        return _shifted(number, LETTERS[letter[1].lower()]), letter.end()
    while scale := _SCALE.match(text, end):
        number, end = _shifted(number, SCALES[scale[1].lower()]), scale.end()
    return number, end


def _shifted(number: str, zeros: int) -> str:
    """Return a number times a power of ten, exactly."""
    whole, _, rest = number.partition(".")
    digits = rest.ljust(zeros, "0")
    return _joined(whole + digits[:zeros], digits[zeros:])


def plain(digits: str) -> str:
    """Return one spelling of a number: 1,234 and 1 234 and 1234, 3,5 and 3.50, .5 and 0.5.

    0.125 differs from 125, and 1.2.3 is unchanged.
    """
    text = unicodedata.normalize("NFKC", digits)
    closed = re.sub(_GAP, "", text)
    marks = re.findall(r"[.,]", closed)
    *whole, rest = re.split(r"[.,]", closed)
    if not marks:
        return _joined(rest, "")
    is_grouped = 1 <= len(whole[0]) <= 3 and whole[0][0] != "0" and all(len(group) == 3 for group in whole[1:])
    if is_grouped and closed == text and len(rest) == 3 and len(set(marks)) == 1:
        return _joined("".join([*whole, rest]), "")
    if len(marks) == 1 or (is_grouped and marks[-1] not in marks[:-1] and len(set(marks[:-1])) == 1):
        return _joined("".join(whole), rest)
    return closed.replace(",", ".")


def _joined(whole: str, rest: str) -> str:
    rest = rest.rstrip("0")
    return (whole.lstrip("0") or "0") + (f".{rest}" if rest else "")
