"""The text of real PDFs held against poppler's `pdftotext`: which words are there, and in which order.

    apt-get download PACKAGE...; dpkg -x ...   (or install them: the PDFs then lie in /usr/share)
    python tests/bench/pdf_text.py [--folder /usr/share] [--every] [--names NAME,NAME] [--sides kvcli,pdftext,...]
        [--before CHECKOUT] [--python PYTHON] [--out FILE]

The files of FILES come from Debian packages of documentation; `--every` takes whatever PDF the folder holds instead.
Each side reads in a process of its own; one whose library is not installed is left out, and that is said. `before` is
kvcli of another checkout. The others need `pip install pdftext pdfplumber pypdf liteparse pdf-inspector pdf-oxide
kreuzberg edgeparse`, in an environment beside the one of this project, whose interpreter `--python` names.

A word is a run of letters and digits, a letter of Chinese or Japanese one of its own; ligatures, case, hyphens, signs
that nobody sees, and those that kvcli writes before what is raised (`10^6`, `word[3]`) play no part. Page by page:

- recall: the share of the words of `pdftotext` that are there as well. Running heads and page numbers are missed on
  purpose, so it does not reach 1 where they go.
- precision: the share of our words that `pdftotext` has.
- order: of the words that both have, the share in the longest sequence which stands in both in the same order (the
  longest common subsequence). Where `pdftotext` itself is in doubt (a formula between two columns, a table), the better
  of its two readings counts: by its layout analysis, or as the file draws it (`-raw`); `strict` is the first alone.

A file's figures are those of all of its pages together.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.harness import ROOT, Rows, Words, measurement, picked

FILES = {
    "sample-sigconf": ("texlive-publishers-doc", 2, "ACM, proceedings"),
    "sample-sigplan": ("texlive-publishers-doc", 2, "ACM, other margins"),
    "sample-acmtog": ("texlive-publishers-doc", 2, "ACM, journal"),
    "revtex/sample/aps/apssamp": ("texlive-publishers-doc", 2, "REVTeX"),
    "revtex4-1/sample/aip/aipsamp": ("texlive-publishers-doc", 2, "REVTeX, a table beside references"),
    "aapmsamp": ("texlive-publishers-doc", 2, "REVTeX, medical physics"),
    "asmeconf-template": ("texlive-publishers-doc", 2, "wide equations, tables"),
    "elstest-5p": ("texlive-publishers-doc", 2, "Elsevier"),
    "IEEEconf": ("texlive-publishers-doc", 2, "IEEE, code between columns"),
    "ieeepes_doc": ("texlive-publishers-doc", 2, "IEEE power engineering"),
    "JACoW_LaTeX_A4": ("texlive-publishers-doc", 2, "accelerator conferences"),
    "PRTEC19-template": ("texlive-publishers-doc", 2, "mechanical engineering"),
    "mnras_guide": ("texlive-publishers-doc", 2, "astronomy, tables across columns"),
    "sample631": ("texlive-publishers-doc", 1, "AASTeX, sideways tables"),
    "refcard-a4": ("octave-doc", 3, "a reference card"),
    "asyRefCard": ("asymptote-doc", 3, "a reference card"),
    "TeXShopAndAsymptote": ("asymptote-doc", 1, "a short article"),
    "emisa": ("texlive-publishers-doc", 1, "a class with its code"),
    "tugboat": ("texlive-publishers-doc", 1, "a class with its code"),
    "developers-reference": ("developers-reference", 1, "Sphinx"),
    "valgrind_manual": ("valgrind", 1, "DocBook, wide tables, a running head for each chapter"),
    "UMFPACK_UserGuide": ("libsuitesparse-doc", 1, "mathematics and code"),
    "atlas_contrib": ("libatlas-doc", 1, "code"),
    "maximabook-19-Sept-2004": ("maxima-doc", 1, "a book with formulas"),
    "bash": ("bash-doc", 1, "a manual page"),
    "debian-faq.en": ("debian-faq", 1, "English"),
    "debian-faq.de": ("debian-faq-de", 1, "German"),
    "debian-faq.ru": ("debian-faq-ru", 1, "Russian"),
    "gmpl_es": ("glpk-doc", 1, "Spanish"),
    "these": ("texlive-publishers-doc", 1, "French"),
    "thuthesis": ("texlive-publishers-doc", 1, "Chinese, code with line numbers"),
    "debian-reference.ja": ("debian-reference-ja", 1, "Japanese, wide tables"),
    "yazd-thesis": ("texlive-publishers-doc", 1, "Persian"),
}
# what each side runs: `pages` becomes the text of every page of the file in sys.argv[1]
SIDES = {
    "kvcli": """
from kvcli import read_document
found = read_document(sys.argv[1])
texts = {section.number: section.text for section in found.sections}
pages = [texts.get(i, "") for i in range(1, found.n_pages + 1)]
""",
    "pdftext": """
from pdftext.extraction import plain_text_output
import pypdfium2
n = len(pypdfium2.PdfDocument(sys.argv[1]))
pages = [plain_text_output(sys.argv[1], sort=False, hyphens=True, page_range=[i]) for i in range(n)]
""",
    "pdfplumber": """
import pdfplumber
with pdfplumber.open(sys.argv[1]) as file:
    pages = [page.extract_text() or "" for page in file.pages]
""",
    "pdfminer": """
from pdfminer.high_level import extract_text
pages = extract_text(sys.argv[1]).split("\\f")[:-1]
""",
    "pypdf": """
from pypdf import PdfReader
pages = [page.extract_text(extraction_mode="layout") for page in PdfReader(sys.argv[1]).pages]
""",
    "liteparse": """
from liteparse import LiteParse
pages = [page.text for page in LiteParse(ocr_enabled=False).parse(sys.argv[1]).pages]
""",
    "pdf-inspector": """
from pdf_inspector import extract_pages_markdown
pages = [page.markdown or "" for page in extract_pages_markdown(sys.argv[1]).pages]
""",
    "pdf-oxide": """
from pdf_oxide import PdfDocument
file = PdfDocument(sys.argv[1])
pages = [file.extract_text(i) for i in range(file.page_count())]
""",
    "kreuzberg": """
from kreuzberg import ExtractionConfig, PageConfig, extract_file_sync
found = extract_file_sync(sys.argv[1], config=ExtractionConfig(pages=PageConfig(extract_pages=True)))
pages = [page["content"] if isinstance(page, dict) else page.content for page in found.pages]
""",
    "edgeparse": """
from edgeparse import convert
import pypdfium2
n = len(pypdfium2.PdfDocument(sys.argv[1]))
pages = [convert(sys.argv[1], format="text", pages=str(i + 1), raster_table_ocr=False) for i in range(n)]
""",
    "pdfium": """
import pypdfium2
pages = [page.get_textpage().get_text_range() for page in pypdfium2.PdfDocument(sys.argv[1])]
""",
}
ALONE = "\u2e80-\u312f\u31a0-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # letters that are a word each
WORD = re.compile(f"[{ALONE}]|(?:(?![{ALONE}])[^\\W_])+")
HYPHEN = re.compile(r"(?<=\w)[-\u2010\u2011\u00ad]\s*(?=\w)")
RAISED = re.compile(r"\^\(?|(?<=\w)\[(?=\d)|(?<=\w[.,;:])\[(?=\d)")


def words(text: str) -> list[str]:
    """The words of a page, alike however a reader writes them."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = "".join(c for c in text if unicodedata.category(c) != "Cf" or c == "\u00ad")
    return WORD.findall(HYPHEN.sub("", RAISED.sub("", text)))


def common(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence; a bit for each word of `a` (Hyyrö 2004)."""
    places: dict[str, int] = {}
    for i, word in enumerate(a):
        places[word] = places.get(word, 0) | 1 << i
    left = every = (1 << len(a)) - 1
    for word in b:
        here = left & places.get(word, 0)
        left = (left + here | left - here) & every
    return len(a) - left.bit_count()


def pdftotext(path: Path, *options: str) -> list[str]:
    run = ["pdftotext", *options, "-enc", "UTF-8", str(path), "-"]
    done = subprocess.run(run, capture_output=True, check=True)
    return done.stdout.decode("utf-8", "replace").split("\f")[:-1]


def read(side: str, path: Path, tree: Path, python: str) -> tuple[list[str], float] | str:
    """The pages by one side and the seconds it took, or why there are none."""
    code = "import json, sys\n" + SIDES["kvcli" if side == "before" else side] + "\nprint('\\n' + json.dumps(pages))"
    env = os.environ | {"PYTHONPATH": str(tree)}
    run = [python, "-c", code, str(path.resolve())]  # started in the checkout, as Python looks there first
    began = time.perf_counter()
    done = subprocess.run(run, cwd=tree, env=env, capture_output=True, check=False)
    if done.returncode:
        return done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]
    return json.loads(done.stdout.rpartition(b"\n")[0].rpartition(b"\n")[2] or done.stdout), time.perf_counter() - began


def compared(ours: Sequence[str], theirs: Sequence[str], drawn: Sequence[str]) -> dict[str, Any]:
    """Recall, precision and order of a file, and its worst page with its order."""
    total: Counter[str] = Counter()
    pages = []
    for number, texts in enumerate(zip(ours, theirs, drawn, strict=True), 1):
        mine, layout, raw = map(words, texts)
        found = (Counter(mine) & Counter(layout)).total()
        strict = common(mine, layout)
        # what both have differs a little between the two readings: words broken at the end of a line
        other = common(mine, raw) / max(1, (Counter(mine) & Counter(raw)).total()) * found
        total.update(mine=len(mine), theirs=len(layout), found=found, strict=strict)
        total["order"] += max(strict, other)  # type: ignore[assignment]
        pages.append((number, round(max(strict, other) / max(1, found), 3), len(layout)))
    worst = min(pages, key=lambda page: (page[1] - 1) * page[2])
    return {
        "recall": round(total["found"] / max(1, total["theirs"]), 4),
        "precision": round(total["found"] / max(1, total["mine"]), 4),
        "order": round(total["order"] / max(1, total["found"]), 4),
        "strict": round(total["strict"] / max(1, total["found"]), 4),
        "words": total["theirs"],
        "worst page": f"{worst[0]}: {worst[1]:.3f}",
    }


def wanted(folder: Path, names: Sequence[str], every: bool) -> Iterator[tuple[str, Path]]:
    """The files by name, each once."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.pdf*"), key=lambda p: (len(p.parts), str(p))):
        whole = str(path).removesuffix(".gz").removesuffix(".pdf")
        name = next((key for key in FILES if whole.endswith(f"/{key}")), path.name if every else "")
        if path.is_file() and path.name.endswith((".pdf", ".pdf.gz")) and name:
            found.setdefault(name, path)
    for name in [name for name in FILES if name in found] + sorted(found.keys() - FILES):
        if not names or name in names:
            yield name, found[name]


def plain(path: Path, folder: str) -> Path:
    """The file itself, unpacked where it is packed."""
    if path.suffix != ".gz":
        return path
    out = Path(folder, path.stem)
    out.write_bytes(gzip.decompress(path.read_bytes()))
    return out


@measurement(
    "Words of real PDFs compared with `pdftotext`: recall, precision, share in its order",
    columns=["file", "side", "columns", "pages", "recall", "precision", "order", "strict", "worst page"],
    note="order: of the better of pdftotext's two readings, page by page; strict: of the first alone.",
)
def pdf_text(
    folder: Path = Path("/usr/share"),
    every: Annotated[bool, "all PDFs of the folder"] = False,
    names: Annotated[Words, "only these"] = (),
    sides: Words = ("kvcli",),
    before: Annotated[Path | None, "another checkout, whose kvcli is a side too"] = None,
    python: Annotated[str, "the interpreter of the sides that are not kvcli"] = sys.executable,
) -> Rows:
    asked = picked(sides, SIDES) + (["before"] if before else [])
    files = list(wanted(folder, names, every))
    if not files:
        sys.exit(f"no PDF of {', '.join(sorted({package for package, *_ in FILES.values()}))} in {folder}")
    for name, path in files:
        package, columns, what = FILES.get(name, ("", 0, ""))
        with tempfile.TemporaryDirectory() as unpacked:
            file = plain(path, unpacked)
            theirs, drawn = pdftotext(file), pdftotext(file, "-raw")
            for side in list(asked):
                tree = before if before and side == "before" else ROOT
                got = read(side, file, tree, sys.executable if side in ("kvcli", "before") else python)
                if isinstance(got, str) or len(got[0]) != len(theirs):
                    why = got if isinstance(got, str) else f"{len(got[0])} pages of {len(theirs)}"
                    print(f"{name}, {side}, failed: {why}", file=sys.stderr, flush=True)
                    if "No module named" in why:
                        asked.remove(side)
                    continue
                row = {"file": name, "side": side, "package": package, "what": what, "columns": columns}
                yield row | {"pages": len(theirs), "seconds": round(got[1], 2)} | compared(got[0], theirs, drawn)


if __name__ == "__main__":
    pdf_text.main()
