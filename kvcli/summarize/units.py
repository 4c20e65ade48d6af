"""Units of measure: names after a number, and alone in the header of a column."""

from __future__ import annotations

import re

CJK = r"[\u3040-\u30ff\u3400-\u9fff]"  # Chinese and Japanese have no spaces: each character is a word
LETTER = rf"(?:(?!{CJK})\w)"

# Ambiguous words (pound, for money and weight) are left out: without a unit, the number alone is compared.
MEASURES = {
    name: names.strip().split("|")[0]
    for names in """%|\uff05|percent|pct|per cent;percentage point|percent point|per cent point|% point;ppm;ppb;
    m|metre|meter;km|kilometre|kilometer;cm|centimetre|centimeter;mm|millimetre|millimeter;mi|mile;ft|foot|feet;
    kg|kilogram|kilo;g|gram;mg|milligram;µg|μg|ug|mcg|microgram;t|tonne|ton;l|litre|liter;dl|decilitre|deciliter;
    cl|centilitre|centiliter;ml|millilitre|milliliter;s|sec|second;h|hr|hour;min|minute;ms|millisecond;
    milliwatt;kw|kilowatt;mw|megawatt;gw|gigawatt;w|watt;v|volt;c|°c;f|°f;k;b|byte;gb|gigabyte;mb|megabyte;kb|kilobyte;
    hz|hertz;$|us$|usd|dollar;€|eur|euro;£|gbp;¥|jpy|yen;₹|inr|rupee;chf|franc""".split(";")
    for name in names.strip().split("|")
}
_BY_CASE = {"mW": "milliwatt"}  # otherwise merged with MW
CURRENCIES = "$€£¥₹"
UNIT = (
    rf"(?:%|per\s?cent(?:age)?)[\s-]{{1,3}}points?(?!{LETTER})|per\s?cent(?!{LETTER})|[%\uff05{CURRENCIES}]"
    rf"|[°µμ]?[a-z]{{1,12}}(?!{LETTER})"
)
_UNIT = re.compile(rf"[\s-]{{0,3}}({UNIT})", re.IGNORECASE)
# in brackets or in a separate cell; a percent sign also between spaces
_HEAD = re.compile(rf"[(\[|][ \t]?(?:in[ \t])?({UNIT})(?=[ \t]?[)\]|])|(?<!\S)(%)(?!\S)", re.IGNORECASE)
_NUMBERED = re.compile(r"\d\s{0,15}\Z")


def unit_at(text: str, at: int) -> tuple[str, int] | None:
    """Return the unit after a number that ends at `at`, by its first name, and the end of the unit."""
    match = _UNIT.match(text, at)
    name = measure(match[1]) if match else ""
    return (name, match.end()) if match and name else None


def measure(said: str) -> str:
    """Return the first name of a unit, or "" if the word is no unit."""
    name = re.sub(r"[\s-]+", " ", said.lower())
    if said in _BY_CASE:
        return _BY_CASE[said]
    return MEASURES.get(name) or (len(name) > 3 and MEASURES.get(name.removesuffix("s"))) or ""


def heads(text: str) -> frozenset[str]:
    """Return units without a number, as above a column of numbers."""
    alone = [m for m in _HEAD.finditer(text) if not _NUMBERED.search(text, max(0, m.start() - 16), m.start())]
    return frozenset(filter(None, (measure(match[1] or match[2]) for match in alone)))
