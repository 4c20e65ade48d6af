"""The bundled model answers about the bundled report under every shipped profile: text, speed and bytes by tier.

In float32, so that the text should be the CPU's; what an approximate profile rounds may yet send it elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kvcli
from kvcli.api import Turn
from kvcli.demo import report_path
from kvcli.settings.config import builtin_files
from kvcli.settings.profile import Profile
from tests.demo_model.example import SAMPLES
from tests.gpu.stage import On, Row, why


def _answer(profile: str, device: str, prompt: str, new: int) -> tuple[Turn, list[dict[str, Any]]]:
    load = {"device": device, "dtype": "fp32", "quant": "none"}
    chosen = Profile.load(profile).replace(load=load, sample={"temperature": 0.0})
    with kvcli.load("demo", chosen, offline=True) as model, model.open() as text:
        return text.generate(prompt, max_new_tokens=new), text.kv_table()


def run(on: On) -> Iterator[Row]:
    report, new = report_path().read_text(encoding="utf-8"), 48
    names = [file.profile for file in builtin_files()]
    if on.is_tiny:
        report, names, new = report[:1500], ["exact", "balanced"], 8
    prompt = f"{report}\n\n{SAMPLES[0].question}"
    tried = same = faults = 0
    for name in names:
        if on.left < 0:
            yield {"says": f"out of time at {name}"}
            return
        row: Row = {"profile": name}
        try:
            there, table = _answer(name, on.device, prompt, new)
            here, _ = _answer(name, "cpu", prompt, new)
        except Exception as error:
            faults += 1
            yield {**row, "fault": why(error)}
            continue
        tiers: dict[str, int] = {}
        for use in table:
            tiers[str(use["tier"])] = tiers.get(str(use["tier"]), 0) + int(use["nbytes"])
        tried, same = tried + 1, same + (there.ids == here.ids)
        yield {
            **row,
            "same": there.ids == here.ids,
            "text": there.text,
            "cpu_text": here.text,
            "prompt": there.stats.prompt,
            "read_seconds": there.stats.read,
            "decode_seconds": there.stats.decode,
            "new": there.stats.new,
            "passes": there.stats.passes,
            "accepted": there.stats.accepted_tokens,
            "bytes_by_tier": tiers,
        }
    yield {"says": f"{same} of {tried} texts are the CPU's, {faults} faults"}
