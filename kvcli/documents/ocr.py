"""Recognize the text in a picture of a PDF page (OCR), by the models in the wheel of RapidOCR.

Imported in the worker process before it enters the sandbox, so the models are loaded here and now.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import rapidocr

from kvcli.documents.dehyphenate import clean
from kvcli.documents.reading_order import LinePiece

PIXELS = 1700  # along the longer side of a page as drawn; with 2,000, twice as many words are joined
THREADS = 4  # at most; each takes address space
SURE = 0.8  # mean confidence below which the page may be turned
TALL = 1.5  # height of a box, in widths, from which its text runs down or up


def load_engine() -> Any:
    """Return the recognizer with its three models, each run once, because later no file can be opened."""
    folder = Path(rapidocr.__file__).parent / "models"
    settings: dict[str, Any] = {
        f"{step}.model_path": str(next(folder.glob(f"*_{step.lower()}_*.onnx"))) for step in ("Det", "Cls", "Rec")
    }  # named, so that nothing is downloaded
    threads = max(1, min(THREADS, os.cpu_count() or 1))
    settings |= {f"EngineConfig.onnxruntime.{pool}_op_num_threads": threads for pool in ("intra", "inter")}
    cv2.setNumThreads(1)
    engine = rapidocr.RapidOCR(params=settings | {"Global.log_level": "critical"})
    blank = np.full((64, 320, 3), 255, np.uint8)
    engine(blank)
    engine(blank, use_det=False, use_cls=True, use_rec=True)
    return engine


ENGINE = load_engine()


def recognize(document: Any, number: int) -> list[LinePiece]:
    """Return the lines in a picture of page `number` of a `pypdfium2.PdfDocument`, in points from its top left."""
    with closing(document[number - 1]) as page:
        scale = PIXELS / max(page.get_size())
        picture = page.render(scale=scale, may_draw_forms=False).to_numpy()[..., :3]
    found = _read(picture)
    if found is not None and (_is_sideways(found) or np.mean(found.scores) < SURE):
        # perhaps scanned sideways or upside down: read it in the direction whose words are surest, in half the size
        turns = max(range(4), key=lambda k: _confidence(_read(np.rot90(picture[::2, ::2], k))))
        found = _read(np.rot90(picture, turns)) if turns else found
    pieces = []
    for box, text in zip(found.boxes, found.txts, strict=True) if found is not None else ():
        (x0, top, x1, bottom), words = _edges(box) / scale, clean(text).strip()
        if words:
            size = 0.75 * (bottom - top)
            pieces.append(LinePiece(words, x0, top, x1, bottom, size, base=bottom - 0.2 * (bottom - top)))
    return pieces


def _read(picture: Any) -> Any:
    """Return the recognizer's result, or None if there is no text."""
    found = ENGINE(np.ascontiguousarray(picture), use_det=True, use_cls=False, use_rec=True)
    return found if found.boxes is not None and len(found.boxes) else None


def _edges(box: Any) -> Any:
    """Return left, top, right and bottom of a box with four corners, which may be slightly inclined."""
    (a, b, c, d) = np.asarray(box, dtype=float)
    return np.array([min(a[0], d[0]), (a[1] + b[1]) / 2, max(b[0], c[0]), (c[1] + d[1]) / 2])


def _is_sideways(found: Any) -> bool:
    edges: Sequence[Any] = [_edges(box) for box in found.boxes]
    return sum(bool(e[3] - e[1] > TALL * (e[2] - e[0])) for e in edges) > len(edges) / 2


def _confidence(found: Any) -> float:
    if found is None:
        return 0.0
    upright = 0.1 if _is_sideways(found) else 1.0
    return upright * float(sum(score * len(text) for score, text in zip(found.scores, found.txts, strict=True)))
