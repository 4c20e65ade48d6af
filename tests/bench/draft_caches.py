"""What a draft model has to keep of a long prompt: accepted draft tokens by how its KV cache is chosen.

    python tests/bench/draft_caches.py [--model demo] [--draft demo-small] [--ctx 4096,8000] [--working 512]
        [--tasks lookup,summary] [--reports 1] [--out FILE]

All sides draft as profile specextend-paper does, a tree of 50 tokens in every pass, over `--working` tokens:

  window     the first tokens and the newest ones
  every:4    chunks to which the last layer of the target model attends, chosen every 4 passes (SpecExtend)
  ..., 4 layers  chunks to which its last four layers attend; adaptive: chosen when drafts fail
  snapkv     per KV head, the tokens that the draft model's own last 64 rows of the prompt attend to, pooled over 7
             (SnapKV, arXiv 2404.14469)
  h2o        per KV head, those that all rows of the prompt attended to (H2O, arXiv 2306.14048)
  all        everything

The last two choose once, when the prompt was read (H2O goes on choosing while it decodes), with the first 4 and newest
64 tokens besides, and keep the answer as well: they have up to its length more. Reports are those of specextend.py.
"accepted" is tokens a pass, the one that verification adds aside; "of facts" of passes that begin within the value that
was asked for. Each text has to be that of plain decoding, or the program ends with an error.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kvcli
from kvcli.drafts.draft_models.separate_model import CHUNK, SeparateDraftModel
from kvcli.engine.forward_request import ForwardRequest, Passes
from kvcli.engine.forward_request import Rows as PassRows
from kvcli.engine.sequence.commit import commit
from kvcli.kernels.attention_mass import attention_mass
from tests.bench.harness import Ints, Rows, Words, measurement, picked
from tests.bench.specextend import Side, prompts, within

SINKS, RECENT, WINDOW, POOL = 4, 64, 64, 7
RETRIEVED: dict[str, dict[str, Any]] = {
    "every:4": {},
    "every:4, 4 layers": {"scored_layers": 4},
    "adaptive, 4 layers": {"scored_layers": 4, "retrieval": "adaptive"},
}
SIDES = ("window", *RETRIEVED, "snapkv", "h2o", "all")
OF_CHUNKS = ("chunk", "recent", "scored_layers", "chunk_device")  # settings that a side without chunks has not


class KeptDraftModel(SeparateDraftModel):
    """A draft model that reads a whole prompt, then keeps of each KV head what that model's own queries attended to."""

    def __init__(self, lm: Any, kept: int, rule: Literal["snapkv", "h2o"]) -> None:
        assert rule in ("snapkv", "h2o"), f"no rule {rule!r}"
        super().__init__(lm, 0, sees=0)
        self._kept, self._rule = kept, rule

    def prefill(self) -> Passes[None]:
        mass: dict[int, Tensor] = {}  # [K, S] of all rows
        queries: dict[int, Tensor] = {}  # of the last rows
        self.discard_cache()  # a text that shares its beginning has left no whole one
        while self.n_uncovered > 1:
            ids = self._text[self._n : min(self._n + CHUNK, len(self._text) - 1)]
            rows = PassRows.chain(self._known(ids), self._n)
            made = yield ForwardRequest(self.lm, rows, self._kv, record_queries=range(rows.n_rows), is_prompt=True)
            commit(self._kv, rows, made, range(rows.n_rows))
            self._n += rows.n_rows
            for layer in self._layers:
                q = made.queries[layer]
                found = self._mass(layer, q) * rows.n_rows
                found[:, : self._n - rows.n_rows] += mass.get(layer, found[:, :0])
                mass[layer] = found
                queries[layer] = torch.cat([queries.get(layer, q[:, :0]), q], 1)[:, -WINDOW:]
        if self._n > self._kept:
            self._kv.compress([self._mask(layer, mass[layer], queries[layer]) for layer in range(self.lm.n_layers)])

    def _mass(self, layer: int, q: Tensor) -> Tensor:
        """Mean attention mass [K, S] of the newest rows q [H, w, D]."""
        s, params = self._kv.slots(layer), self.lm.attention_params[layer]
        at = torch.arange(self._n - q.shape[1], self._n)
        return attention_mass(q, at, s.k, s.pos, params.scale, softcap=params.softcap, window=params.window)

    def _mask(self, layer: int, mass: Tensor, queries: Tensor) -> Tensor:
        score = mass
        if self._rule == "snapkv":
            score = torch.nn.functional.max_pool1d(self._mass(layer, queries), POOL, 1, POOL // 2)
        score[:, :SINKS] = score[:, -RECENT:] = torch.inf
        best = score.topk(self._kept, 1).indices
        return torch.zeros_like(score, dtype=torch.bool).scatter(1, best, True)


def side(model: Any, draft: str, name: str, working: int) -> Side:
    paper = asdict(kvcli.Profile.load("specextend-paper").spec.settings) | {"method": "model", "model": draft}
    without = {key: value for key, value in paper.items() if key not in OF_CHUNKS}
    if name in RETRIEVED:
        return Side(model, paper | {"working": working} | RETRIEVED[name])
    if name == "window":
        return Side(model, without | {"working": working, "retrieval": "off"})
    whole = {key: value for key, value in without.items() if key not in ("sinks", "positions")}
    made = Side(model, whole | {"working": 0, "retrieval": "off", "prefill": "full"})
    if name != "all":
        chain: Any = made.session.drafter._chain  # type: ignore[attr-defined]
        chain.draft_model = KeptDraftModel(chain.draft_model.lm, working, name)  # type: ignore[arg-type]
    return made


@measurement(
    "Tokens accepted a pass by what {draft} keeps of a prompt to {model}, {reports} reports",
    columns=["task", "context", "working", "side", "accepted", "of facts", "passes", "same text"],
    is_counts=True,
    is_right=lambda rows: all(row["same text"] for row in rows),
)
def draft_caches(
    model: str = "demo",
    draft: str = "demo-small",
    ctx: Ints = (4096, 8000),
    working: Ints = (512,),
    tasks: Words = ("lookup", "summary"),
    sides: Words = SIDES,
    reports: int = 1,
) -> Rows:
    loaded = kvcli.load(model, profile="exact")
    plain = Side(loaded, {"method": "off"})
    for task, n in product(tasks, ctx):
        asked = [one for seed in range(reports) for one in prompts(loaded, task, n, seed)]
        texts = [plain.answer(one.ids)[0] for one in asked]
        for size, name in product(working, picked(sides, SIDES)):
            if name == "all" and size != working[0]:
                continue
            drafted, of_all, of_facts, is_same = side(loaded, draft, name, size), [], [], True
            for one, text in zip(asked, texts, strict=True):
                ids, steps, _ = drafted.answer(one.ids)
                is_same &= ids == text
                span, at = within(loaded, ids, one.value), 0
                for step in steps:
                    of_all.append(step.n_accepted)
                    of_facts += [step.n_accepted] if at in span else []
                    at += len(step.new)
            row = {"task": task, "context": n, "working": None if name == "all" else size, "side": name}
            row["accepted"] = round(sum(of_all) / len(of_all), 3)
            row["of facts"] = round(sum(of_facts) / len(of_facts), 3) if of_facts else None
            yield row | {"passes": len(of_all), "same text": is_same}
    return None


if __name__ == "__main__":
    draft_caches.main()
