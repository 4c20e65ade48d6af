"""Numbers as they are compared: with their sign and scale, and again with their unit."""

from __future__ import annotations

import re

_DIGITS = re.compile(r"\d+(?:[.,]\d+)*")
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
_ONES = re.compile(r"[-\u2010\u2011](one|two|three|four|five|six|seven|eight|nine)\b", re.IGNORECASE)  # twenty-five
_SCALE = re.compile(r"[ \t\n\u00a0-]{0,3}(hundred|thousand|million|billion|trillion|mn|bn)\b", re.IGNORECASE)
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "mn": 6, "billion": 9, "bn": 9, "trillion": 12}
_MEASURE = re.compile(r"[\s-]{0,3}(%|per\s?cent\b|[°µμ]?[a-z]{1,12}\b)", re.IGNORECASE)
_MINUS = re.compile(r"(?<![^\s(\[])(?:[-\u2013\u2212]|minus\s)[$€£]?\Z", re.IGNORECASE)
MEASURES = {
    name: names.strip().split("|")[0]
    for names in """%|percent|pct|per cent;m|metre|meter;km|kilometre|kilometer;cm|centimetre|centimeter;
    mm|millimetre|millimeter;mi|mile;ft|foot|feet;kg|kilogram|kilo;g|gram;mg|milligram;µg|μg|ug|mcg|microgram;
    t|tonne|ton;l|litre|liter;ml|millilitre|milliliter;s|sec|second;h|hr|hour;min|minute;ms|millisecond;kw|kilowatt;
    mw|megawatt;gw|gigawatt;w|watt;v|volt;c|°c;f|°f;k;b|byte;gb|gigabyte;mb|megabyte;kb|kilobyte;hz|hertz""".split(";")
    for name in names.strip().split("|")
}


def number_of(word: str) -> str | None:
    """The number that a word in small letters is: 1,234 and 1234 are one, so are 3,5 and 3.5, and 3 and three."""
    return _plain(word) if _DIGITS.fullmatch(word) else COUNTED.get(word)


def amount(number: str, text: str, match: re.Match[str]) -> tuple[list[str], int, int]:
    """A number with its sign and scale, and again with its unit if it has one; where it ends, and where its unit does.

    5 million and 5,000,000 are one, so are 5 m and 5 metres; 5 and 5 million are not, nor are 5 g and 5 mg.
    """
    end = match.end()
    if not match[0][0].isdigit() and len(number) == 2 and number >= "20" and (ones := _ONES.match(text, end)):
        number, end = f"{number[0]}{COUNTED.get(ones[1].lower(), '1')}", ones.end()
    while number.count(".") <= 1 and (scale := _SCALE.match(text, end)):
        number, end = _shifted(number, SCALES[scale[1].lower()]), scale.end()
    if _MINUS.search(text, max(0, match.start() - 8), match.start()):
        number = f"-{number}"
    measure = _MEASURE.match(text, end)
    name = " ".join(measure[1].lower().split()) if measure else ""
    unit = MEASURES.get(name) or (len(name) > 3 and MEASURES.get(name.removesuffix("s"))) or ""
    return ([number, f"{number} {unit}"], end, measure.end()) if measure and unit else ([number], end, end)


def _shifted(number: str, zeros: int) -> str:
    """A number times a power of ten, exactly."""
    whole, _, rest = number.partition(".")
    digits = rest.ljust(zeros, "0")
    rest = digits[zeros:].rstrip("0")
    return ((whole + digits[:zeros]).lstrip("0") or "0") + (f".{rest}" if rest else "")


def _plain(text: str) -> str:
    whole = re.fullmatch(r"[1-9]\d{0,2}(?:[.,]\d{3})+", text)  # 0.125 is no 125
    text = re.sub(r"[.,]", "", text) if whole else text.replace(",", ".")
    digits = text.lstrip("0") or "0"
    return "0" + digits if digits.startswith(".") else digits
