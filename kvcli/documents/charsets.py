"""Find the encoding of a page by byte order mark, declared label, UTF-8, or a guess from its letters (with a note).

Labels are mapped as browsers map them (encoding.spec.whatwg.org): `iso-8859-1` is decoded as windows-1252.
"""

# ruff: noqa: RUF001 - letters of many alphabets

from __future__ import annotations

import codecs
import re
from shlex import quote

from kvcli.documents.decode import MARKS
from kvcli.errors import BadInput

BEYOND = bytes(range(128, 256))
SAMPLE = 1 << 16  # bytes that the guess reads, from the first one beyond ASCII
# smallest share of a language's common letters among the characters beyond ASCII, and its lead over the second
LEAST, APART = 0.4, 0.04
ISO = re.compile(r"iso[-_]?8859[-_]?(\d+)(?:[-_]?[ei])?")
# labels that Python does not know; codecs where browsers read a wider encoding; all other labels that browsers read
OTHER = {"koi": "koi8-r", "koi8": "koi8-r", "koi8-ru": "koi8-u", "mac": "mac-roman", "macintosh": "mac-roman"}
OTHER |= {"dos-874": "cp874", "windows-874": "cp874", "logical": "iso8859-8", "visual": "iso8859-8", "cn-big5": "big5"}
OTHER |= dict.fromkeys("windows-949 iso-ir-149 ksc_5601 ks_c_5601-1989 ksc56011987".split(), "cp949")
OTHER |= {"gb_2312": "gbk", "gb_2312-80": "gbk", "windows-31j": "cp932", "sun_eu_greek": "iso8859-7"}
OTHER |= {"isolatin9": "iso8859-15", "mac-ukrainian": "mac-cyrillic", "user-defined": "cp1252", "unicode": "utf-8"}
WIDER = {"ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874", "tis-620": "cp874"}
WIDER |= {"gb2312": "gb18030", "gbk": "gb18030", "big5": "big5hkscs", "euc_kr": "cp949", "shift_jis": "cp932"}
WIDER |= {"euc_jp": "euc_jis_2004", "utf-16": "utf-8", "utf-16-le": "utf-8", "utf-16-be": "utf-8"}
SINGLE = re.compile(r"cp(125\d|8\d\d)|iso8859-\d+|koi8-[ru]|mac-(roman|cyrillic)")  # one byte per character
SEVERAL = ("utf-8", "cp932", "cp949", "gb18030", "big5hkscs", "iso2022_jp", "euc_jis_2004")
# encodings that the guess tries, with the letters that make up most characters beyond ASCII in a language, or in each
# of several languages; the first encoding is the browsers' default
ALPHABETS = {
    "windows-1252": "éèàêçôâîûùëïœ äöüß áéíóúñü ãáâàçéêíóôõú åäöæø àèéìòù áéíóúýþðæö àçèéíïòóúü",
    "windows-1250 iso-8859-2": "ąćęłńóśźż áčďéěíňřšťúůýž áéíóöőúüű ăâîşţ čćšžđ áäčďéíľĺňóôŕšťúýž",
    "windows-1254": "çğıöşü",
    "windows-1257": "ąčęėįšųūž āčēģīķļņšūž äõöüšž",
    "windows-1251 koi8-u ibm866 iso-8859-5": "оеаинтсрвлкмдпуяыізьбгчй",
    "windows-1253": "αοιετνσρκπυηλμςόίάέήώύθγδ",
    "windows-1255": "יוהלאתרבמשנדםקחעפט",
    "windows-1256": "اليمنترهوبسعدقفةكحپیک",
    "windows-874": "านรกอเงมยวลดทสต่้ัิีะแคหปขโไบ",
    "shift_jis euc-jp": "のにたいをはとるがしでてなかっれらもすりこさんくまあスントルイー、。・「」",
    "gbk": "的一是不了在人有我他这中大来上个国到说们以时要和就出会可也你对生能而子那得于下自之年过发后作里，。：、“",
    "big5": "的一是不了在人有我他這中大來上個國到說們以時要和就出會可也你對生能而子那得於下自之年過發後作裡，。：、「",
    "euc-kr": "이다는에의을가고를한은하로지기사도인어서자나대아그시리으일해정수있전라보부들제여만과장주상적조게스구원",
}
LETTERS = {label: letters for labels, letters in ALPHABETS.items() for label in labels.split()}
SIGNS = "“”„‘’‚–—…«»€£§°©®·\u00a0"
ALONG = r"(?<=[a-zA-Z])[{0}]|[{0}](?=[a-zA-Z])|(?<!\w)([{0}](?!\w)|[{1}](?=[a-z]))|[{2}]"  # letters of a Latin word
# letters of any other alphabet
APART_FROM = r"(?<=[^\W\d_a-zA-Z])[{0}](?![a-zA-Z])|(?<![a-zA-Z])[{0}](?=[^\W\d_a-zA-Z])|[{2}]"


def page_text(data: bytes, name: str, said: str = "") -> tuple[str, list[str]]:
    """Return the text of a page, and notes on a guessed encoding or undecodable bytes; `said` is its declared label."""
    for mark, encoding in MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, "replace"), []
    codec, notes = codec_of(said), []
    if codec is None and b"\x1b$" in data[:SAMPLE]:
        codec = "iso2022_jp"
    text = data.decode("utf-8", "replace")
    beyond = len(data) - len(data.translate(None, BEYOND))
    lost = text.count("\ufffd") - data.count("\ufffd".encode())
    if codec in (None, "utf-8") and lost * 50 <= beyond:
        codec = "utf-8"  # a few broken bytes do not rule out UTF-8
    elif codec in (None, "utf-8"):
        why = f"declares {said[:40]!r}, but has another encoding" if said else "does not declare its encoding"
        label, codec = _guessed(data, name)
        notes.append(f"{name} {why}; read as {label}, guessed from its letters")
    elif beyond and not lost and SINGLE.fullmatch(codec):
        codec = "utf-8"
        notes.append(f"{name} declares {said[:40]!r}, but is valid UTF-8; read as UTF-8")
    if codec != "utf-8":
        text = data.decode(codec, "replace")
        lost = text.count("\ufffd")
    if lost:
        notes.append(f"{name} has bytes that are not valid {codec.upper()}; {lost:,} became \ufffd")
    return text, notes


def codec_of(label: str) -> str | None:
    """Return the codec for a declared label, or None if browsers do not know the label."""
    plain = re.sub(r"^(x-)+", "", label.strip().lower())
    for key in (plain, plain.removeprefix("cs")):
        iso = ISO.fullmatch(key)
        try:
            known = codecs.lookup(f"iso8859-{iso[1]}" if iso else OTHER.get(key, key)).name
        except (LookupError, ValueError):
            continue
        codec = WIDER.get(known, known)
        return codec if SINGLE.fullmatch(codec) or codec in SEVERAL else None
    return None


def _guessed(data: bytes, name: str) -> tuple[str, str]:
    """Return the label whose letters fit the text best, and its codec; refuse if no alphabet is clearly ahead."""
    start = next(re.finditer(rb"[\x80-\xff]", data)).start()
    sample = b" ".join(part.rpartition(b">")[2] for part in data[start : start + SAMPLE].split(b"<"))
    tried = sorted(((_share(sample, label), label) for label in LETTERS), reverse=True)
    share, label = tried[0]
    second = next(other for other, with_ in tried if not (_is_latin(label) and _is_latin(with_)) and with_ != label)
    if share < LEAST or share - second < APART:
        raise BadInput(
            f"{name} does not declare its encoding, and the encoding could not be guessed",
            code="bad_encoding",
            lines=[f"byte {start:,} is 0x{data[start]:02x}, which is not valid UTF-8"],
            detail={"offset": start},
            try_=[f"iconv -f ENCODING -t utf-8 {quote(name)} > utf8.html"],
        )
    return label, codec_of(label) or "utf-8"


def _is_latin(label: str) -> bool:
    return LETTERS[label] < "\u0250"


def _share(sample: bytes, label: str) -> float:
    """Return the share of non-ASCII characters that are letters of a label, in fitting words; 0 if undecodable."""
    try:
        text = codecs.getincrementaldecoder(codec_of(label) or "")().decode(sample)
    except UnicodeDecodeError:
        return 0.0
    is_cjk = LETTERS[label] > "\u2e80"
    where = "[{0}]" if is_cjk else ALONG if _is_latin(label) else APART_FROM
    found = max(
        sum(1 for _ in re.finditer(where.format(each, each.upper(), SIGNS), text)) for each in LETTERS[label].split()
    )
    share = found / max(1, sum(c > "\x7f" for c in text))
    # common signs make up half of a Chinese text; windows-1252 wins a tie
    return min(1.0, 2 * share if is_cjk else share) + APART * (label == "windows-1252")
