"""The encoding of a page: its byte order mark, what it declares, UTF-8, or a guess by its letters, which a note says.

Labels mean what they mean to browsers (encoding.spec.whatwg.org): a page that declares `iso-8859-1` is windows-1252.
"""

from __future__ import annotations

import codecs
import re
from shlex import quote

from kvcli.documents.decode import MARKS
from kvcli.errors import BadInput

SAMPLE = 1 << 16  # bytes that a guess looks at, from the first one beyond ASCII
LEAST, APART = 0.4, 0.04  # share of the characters beyond ASCII that a language's common letters make, and its lead
ISO = re.compile(r"iso[-_]?8859[-_]?(\d+)(?:[-_]?[ei])?")
# labels that Python does not know; then its names of encodings in which browsers read another, and of all those they read
OTHER = dict.fromkeys(("koi", "koi8"), "koi8-r") | dict.fromkeys(("dos-874", "windows-874"), "cp874")
OTHER |= dict.fromkeys(("logical", "visual"), "iso8859-8") | dict.fromkeys(("cn-big5", "big5-eten"), "big5")
OTHER |= dict.fromkeys(("gb_2312", "gb_2312-80", "chinese"), "gbk") | dict.fromkeys(("mac", "macintosh"), "mac-roman")
OTHER |= dict.fromkeys("windows-949 iso-ir-149 ksc_5601 ks_c_5601-1989 ksc56011987".split(), "cp949")
OTHER |= {"koi8-ru": "koi8-u", "sun_eu_greek": "iso8859-7", "isolatin9": "iso8859-15", "windows-31j": "cp932"}
OTHER |= {"mac-ukrainian": "mac-cyrillic", "user-defined": "cp1252", "unicode": "utf-8"}
WIDER = dict.fromkeys(("ascii", "iso8859-1"), "cp1252") | dict.fromkeys(("iso8859-11", "tis-620"), "cp874")
WIDER |= {"iso8859-9": "cp1254", "gb2312": "gb18030", "gbk": "gb18030", "big5": "big5hkscs", "euc_kr": "cp949"}
WIDER |= {"shift_jis": "cp932", "euc_jp": "euc_jis_2004"} | dict.fromkeys(("utf-16", "utf-16-le", "utf-16-be"), "utf-8")
SINGLE = re.compile(r"cp(125\d|8\d\d)|iso8859-\d+|koi8-[ru]|mac-(roman|cyrillic)")  # a byte a character
SEVERAL = ("utf-8", "cp932", "cp949", "gb18030", "big5hkscs", "iso2022_jp", "euc_jis_2004")
# what a guess tries, with letters that are most of those beyond ASCII in its languages
LATIN = {  # which stand among letters of ASCII; the first is what browsers take where they know nothing
    "windows-1252": "éèàêçôâîûùëïœ äöüß áéíóúñü ãáâàçéêíóôõú åäöæø àèéìòù áéíóúýþðæö àçèéíïòóúü",
    "windows-1250": "ąćęłńóśźż áčďéěíňřšťúůýž áéíóöőúüű ăâîşţ čćšžđ áäčďéíľĺňóôŕšťúýž",
    "iso-8859-2": "ąćęłńóśźż áčďéěíňřšťúůýž áéíóöőúüű čćšžđ áäčďéíľĺňóôŕšťúýž",
    "windows-1254": "çğıöşü",
    "windows-1257": "ąčęėįšųūž āčēģīķļņšūž äõöüšž",
}
LETTERS = dict.fromkeys(("windows-1251", "koi8-u", "ibm866", "iso-8859-5"), "оеаинтсрвлкмдпуяыізьбгчй")
LETTERS |= {"windows-1253": "αοιετνσρκπυηλμςόίάέήώύθγδ", "windows-1255": "יוהלאתרבמשנדםקחעפט"}
LETTERS |= {"windows-1256": "اليمنترهوبسعدقفةكحپیک", "windows-874": "านรกอเงมยวลดทสต่้ัิีะแคหปขโไบ"}
CJK = dict.fromkeys(
    ("shift_jis", "euc-jp"), "のにたいをはとるがしでてなかっれらもすりこさんくまあスントルイー、。・「」"
)
CJK |= {
    "gbk": "的一是不了在人有我他这中大来上个国到说们以时要和就出会可也你对生能而子那得于下自之年过发后作里用道行所"
    "然家事成方多经去法学如同现没动面看定天分还进好小部其些主样理心她本前开但因只从想实，。：、“”？",
    "big5": "的一是不了在人有我他這中大來上個國到說們以時要和就出會可也你對生能而子那得於下自之年過發後作裡用道行所"
    "然家事成方多經去法學如同現沒動面看定天分還進好小部其些主樣理心她本前開但因只從想實，。：、「」？",
    "euc-kr": "이다는에의을가고를한은하로지기사도인어서자나대아그시리으일해정수있전라보부들제여만과장주상적조게스구원모경마",
}
SIGNS = "“”„‘’‚–—…«»€£§°©®·\u00a0"


def page_text(data: bytes, name: str, said: str = "") -> tuple[str, list[str]]:
    """The text of a page, and in notes what was guessed or could not be decoded; `said` is the label it came with."""
    for mark, encoding in MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, "replace"), []
    codec, notes = codec_of(said), []
    if b"\x1b$" in data[:SAMPLE] and codec is None:
        codec = "iso2022_jp"
    if codec is None or (codec != "utf-8" and SINGLE.fullmatch(codec) and not data.isascii()):
        try:
            text = data.decode()
        except UnicodeDecodeError:
            pass
        else:
            return text, [f"{name} declares {said[:40]}, but is UTF-8 throughout: it was read so"] if codec else []
    if codec is None:
        label, codec = _guessed(data, name)
        unknown = f"declares {said[:40]!r}, which no browser knows" if said else "does not declare its encoding"
        notes.append(f"{name} {unknown}: it was read as {label}, a guess by its letters")
    text = data.decode(codec, "replace")
    if (lost := text.count("\ufffd") - data.count(b"\xef\xbf\xbd")) > 0:
        notes.append(f"{name}: {lost:,} places are no {codec.upper()} and stand as \ufffd")
    return text, notes


def codec_of(label: str) -> str | None:
    """What decodes a page that declares this label, None where browsers do not know it."""
    key = re.sub(r"^(x-)+", "", label.strip().lower())
    for key in (key, key.removeprefix("cs")):
        iso = ISO.fullmatch(key)
        try:
            known = codecs.lookup(f"iso8859-{iso[1]}" if iso else OTHER.get(key, key)).name
        except (LookupError, ValueError):
            continue
        codec = WIDER.get(known, known)
        return codec if SINGLE.fullmatch(codec) or codec in SEVERAL else None
    return None


def _guessed(data: bytes, name: str) -> tuple[str, str]:
    """The label whose letters most of the text is in, and its codec; refuses where none is clearly ahead."""
    high = re.search(rb"[\x80-\xff]", data)
    start = high.start() if high else 0
    sample = b" ".join(part.rpartition(b">")[2] for part in data[start : start + SAMPLE].split(b"<"))
    latin = max(((_share(sample, label, LATIN[label]), label) for label in LATIN), key=lambda pair: pair[0])
    rest = [(_share(sample, label, letters), label) for label, letters in (LETTERS | CJK).items()]
    (share, label), (second, _), *_ = sorted([latin, *rest], key=lambda pair: -pair[0])
    if share < LEAST or share - second < APART:
        raise BadInput(
            f"{name} does not say its encoding, and its letters do not show it",
            code="bad_encoding",
            lines=[f"byte {start:,} is 0x{data[start]:02x}, which is no UTF-8"],
            try_=[f"iconv -f ENCODING -t utf-8 {quote(name)} > utf8.html"],
        )
    return label, codec_of(label) or "utf-8"


def _share(sample: bytes, label: str, letters: str) -> float:
    """How much of what is beyond ASCII are these letters where they may stand; 0 where the bytes are none of it."""
    try:
        text = codecs.getincrementaldecoder(codec_of(label) or "")().decode(sample)
    except UnicodeDecodeError:
        return 0.0
    beyond, most = max(1, sum(c > "\x7f" for c in text)), 0.0
    for each in letters.split():
        if label in LATIN:
            where = rf"(?<=[a-zA-Z])[{each}]|[{each}](?=[a-zA-Z])|(?<!\w)([{each}](?!\w)|[{each.upper()}](?=[a-z]))"
        elif label in CJK:
            where = f"[{each}]"
        else:
            where = rf"(?<=[^\W\d_a-zA-Z])[{each}](?![a-zA-Z])|(?<![a-zA-Z])[{each}](?=[^\W\d_a-zA-Z])"
        found = sum(1 for _ in re.finditer(where if label in CJK else f"{where}|[{SIGNS}]", text))
        # common signs are half of a Chinese text
        most = max(most, min(1.0, (1 + (label in CJK)) * found / beyond))
    return most + APART * (label == "windows-1252")
