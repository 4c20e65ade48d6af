"""Write the number of a list entry, a clause or a heading in the format of a word processor or a browser."""

from __future__ import annotations

import re

WHOLE = re.compile(r"\s*[-+]?\d{1,9}\s*")
# highest number of a format; higher numbers are written in digits
MOST = {"letter": 780, "roman": 3999, "han": 99, "circle": 20}
HAN = ("", *"一二三四五六七八九")
# names of the formats in DOCX, in `type` of HTML, and in `list-style-type` of CSS; all others write digits
FORMS = {"a": "letter", "lowerletter": "letter", "lower-alpha": "letter", "lower-latin": "letter"}
FORMS |= {"A": "LETTER", "upperletter": "LETTER", "upper-alpha": "LETTER", "upper-latin": "LETTER"}
FORMS |= {"i": "roman", "lowerroman": "roman", "lower-roman": "roman", "decimalzero": "zero"}
FORMS |= {"I": "ROMAN", "upperroman": "ROMAN", "upper-roman": "ROMAN", "decimal-leading-zero": "zero"}
FORMS |= dict.fromkeys(("chinesecounting", "chinesecountingthousand", "japanesecounting", "taiwanesecounting"), "han")
FORMS |= {"cjk-ideographic": "han", "decimalenclosedcircle": "circle", "none": "none", "bullet": "none"}
ROMAN = {1000: "m", 900: "cm", 500: "d", 400: "cd", 100: "c", 90: "xc", 50: "l", 40: "xl", 10: "x", 9: "ix", 5: "v"}
ROMAN |= {4: "iv", 1: "i"}


def whole(said: str | None, usual: int) -> int:
    """Return a number from a file, or `usual` if the text is no number."""
    return int(said) if said and WHOLE.fullmatch(said) else usual


def numeral(n: int, form: str, *, repeats: bool = False) -> str:
    """Return the number n in a format by any of its names; digits if the format has no such number.

    The letter after z is aa in both. The next one is bb with `repeats`, as in DOCX, and ab in HTML.
    """
    kind = FORMS.get(form) or FORMS.get(form.lower(), "")
    if kind == "none":
        return ""
    if kind == "zero":
        return f"{n:02d}"
    if not 0 < n <= MOST.get(kind.lower(), 0):
        return str(n)
    if kind == "han":
        return f"{HAN[n // 10] if n > 19 else ''}{'十' if n > 9 else ''}{HAN[n % 10]}"
    if kind == "circle":
        return chr(0x245F + n)
    written = ""
    if kind.lower() == "roman":
        for value, sign in ROMAN.items():
            written += sign * (n // value)
            n %= value
    elif repeats:
        written = chr(97 + (n - 1) % 26) * ((n - 1) // 26 + 1)
    else:
        while n:
            n, rest = divmod(n - 1, 26)
            written = chr(97 + rest) + written
    return written.upper() if kind.isupper() else written
