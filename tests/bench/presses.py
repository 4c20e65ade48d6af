"""Which slots policies keep, beside kvpress's presses on the same keys and queries, and what is answered from either.

    python tests/bench/presses.py [--model demo] [--texts 8] [--length 2048] [--shares 0.5,0.25] [--out FILE]

The texts are those of kv_quality.py. Each is read once by transformers and once by kvcli, and settings are those of
kvpress, with what it always keeps. `same` is what both keep over what either keeps (Jaccard), averaged over heads and
texts; `lowest` is that of the layer where it is least. Right answers of both come from the same store, settled by one's
masks or the other's: they differ by the choice alone. `place` is that among the methods of this share. Lots drawn twice
show what chance makes. A name behind a comma is a variant without one difference, to show that it is the only one.

kvpress wants an older transformers than kvcli, so it is installed without what it asks for:

    pip install --no-deps kvpress==0.5.5 cachetools

Its presses are called at each layer as its own hook does, which newer transformers hand no `cache_position`; KVzip runs
as it is, with the cache under its older name. `datasets` and `fire`, which no press here uses, are stood in for. What
it does to attention functions, so that heads may keep different numbers, is undone: no answer is read through it.

"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.heads.sample import samples
from tests.bench.harness import Floats, Rows, Words, measurement
from tests.bench.kv_quality import HELD_OUT, Text, asked, opened

WINDOW, POOL = 64, 5  # kvpress's: newest queries that vote and stay, positions over which a vote is spread
CHUNK, PIECE, LEAD = 20, 512, 8  # tokens judged together; repeated in one pass, begun by those before it
BETA = 4.0  # of the pyramid: below this many tokens in its last layer kvpress gives all layers the same
PLAIN = {"protect": False, "sinks": 0, "recent": 1, "alloc": "uniform"}
SNAP = PLAIN | {"name": "snap", "queries": WINDOW, "pool": POOL, "pooling": "avg", "recent": WINDOW}
ZIP = PLAIN | {"name": "kvzip", "alloc": "global", "sinks": 4, "piece": PIECE}

Masks = list[Tensor]  # by layer, bool [K, n]


@dataclass(frozen=True)
class Pair:
    """A method as both have it: keys of `[policy]`, and a press of the share that goes."""

    ours: dict[str, Any]
    press: Callable[[Any, float], Any]
    is_share: bool = True  # does the policy take a share, instead of a number of tokens?


PAIRS: dict[str, Pair] = {
    "snapkv": Pair(SNAP, lambda k, r: k.SnapKVPress(r, WINDOW, POOL)),
    "adakv": Pair(SNAP | {"alloc": "ada"}, lambda k, r: k.AdaKVPress(k.SnapKVPress(r, WINDOW, POOL))),
    "pyramidkv": Pair(
        SNAP | {"alloc": "pyramid", "beta": BETA}, lambda k, r: k.PyramidKVPress(r, WINDOW, POOL, beta=BETA)
    ),
    "chunkkv": Pair(SNAP | {"unit": CHUNK}, lambda k, r: k.ChunkKVPress(k.SnapKVPress(r, WINDOW, POOL), CHUNK)),
    "chunkkv, by head": Pair(
        SNAP | {"unit": CHUNK}, lambda k, r: by_head(k.ChunkKVPress)(k.SnapKVPress(r, WINDOW, POOL), CHUNK)
    ),
    "criticalkv": Pair(SNAP | {"post": "critical"}, lambda k, r: k.CriticalKVPress(k.SnapKVPress(r, WINDOW, POOL))),
    "criticalkv, ada": Pair(
        SNAP | {"post": "critical", "alloc": "ada"},
        lambda k, r: k.CriticalAdaKVPress(k.SnapKVPress(r, WINDOW, POOL)),
    ),
    "expected": Pair(
        PLAIN | {"name": "expected", "sinks": 4, "samples": 1 << 20}, lambda k, r: k.ExpectedAttentionPress(r)
    ),
    "expected, no sinks": Pair(
        PLAIN | {"name": "expected", "samples": 1 << 20}, lambda k, r: k.ExpectedAttentionPress(r, n_sink=0)
    ),
    "kvzip": Pair(ZIP, lambda k, r: k.KVzipPress(r, chunk_size=PIECE)),
    "kvzip, unasked": Pair(ZIP, lambda k, r: unasked(k.KVzipPress)(r, chunk_size=PIECE)),
    "kvzip+": Pair(ZIP | {"plus": True}, lambda k, r: k.KVzipPress(r, chunk_size=PIECE, kvzip_plus_normalization=True)),
    "kvzip+, unasked": Pair(
        ZIP | {"plus": True}, lambda k, r: unasked(k.KVzipPress)(r, chunk_size=PIECE, kvzip_plus_normalization=True)
    ),
    "h2o": Pair(PLAIN | {"name": "h2o", "keep_new": 0, "queries": 1 << 20}, lambda k, r: k.ObservedAttentionPress(r)),
    "h2o, summed": Pair(
        PLAIN | {"name": "h2o", "keep_new": 0, "queries": 1 << 20}, lambda k, r: summed(k.ObservedAttentionPress)(r)
    ),
    "tova": Pair(PLAIN | {"name": "tova"}, lambda k, r: k.TOVAPress(r)),
    "curdkv": Pair(PLAIN | {"name": "curdkv", "sinks": 4}, lambda k, r: k.CURPress(r)),
    "keydiff": Pair(PLAIN | {"name": "keydiff"}, lambda k, r: k.KeyDiffPress(r)),
    "knorm": Pair(PLAIN | {"name": "knorm"}, lambda k, r: k.KnormPress(r)),
    "lagkv": Pair(PLAIN | {"name": "lag", "sinks": 4}, lambda k, r: k.LagKVPress(r)),
    "streaming": Pair({"name": "window", "sinks": 4}, lambda k, r: k.StreamingLLMPress(r), is_share=False),
    "lots": Pair({"name": "random", "sinks": 0, "window": 1}, lambda k, r: k.RandomPress(r, seed=0), is_share=False),
}


def summed(of: type) -> type:
    """ObservedAttention with the sums of H2O's paper, where it takes the mean over the queries that see a slot."""

    class Summed(of):  # type: ignore[misc]
        def score(self, module: Any, hidden: Tensor, keys: Tensor, *rest: Any) -> Tensor:
            found: Tensor = super().score(module, hidden, keys, *rest)
            return found * torch.arange(keys.shape[2], 0, -1)

    return Summed


def by_head(of: type) -> type:
    """ChunkKV that chooses in each head, where it has all heads of a layer keep the chunks that they like together."""

    class ByHead(of):  # type: ignore[misc]
        def compress(self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, seen: Any, given: Any) -> Any:
            scores = self.press.score(module, hidden, keys, values, seen, given)
            found = []
            for head in range(keys.shape[1]):
                alone = replace(self, press=Scored(self.press.compression_ratio, scores[:, head : head + 1]))
                part = slice(head, head + 1)
                found.append(of.compress(alone, module, hidden, keys[:, part], values[:, part], seen, given))
            return tuple(torch.cat(parts, 1) for parts in zip(*found, strict=True))

    from kvpress.presses.scorer_press import ScorerPress

    class Scored(ScorerPress):  # type: ignore[misc]
        def __init__(self, ratio: float, found: Tensor) -> None:
            self.compression_ratio, self.found = ratio, found

        def score(self, *_: Any) -> Tensor:
            return self.found

    return ByHead


def unasked(of: type) -> type:
    """KVzip that repeats as kvcli has it: no words ask for it, and a piece begins with the tokens before it. What a
    slot adds is held to the stream that goes into the layer, not to what its norm makes of that.
    """

    class Unasked(of):  # type: ignore[misc]
        def prepare(self, model: Any, tokenizer: Any, prev_postfix_size: int = LEAD) -> list[tuple[Tensor, Tensor]]:
            self.prefix_length, before = 0, prev_postfix_size
            super().prepare(model, tokenizer, before)
            starts = range(0, self.context_length, self.chunk_size)
            ids, size = self._context_ids, self.chunk_size
            return [(ids[:, at : at + size], ids[:, max(0, at - before) : at + size]) for at in starts]

        def _compute_cross_attention(self, module: Any, hidden: Tensor, keys: Tensor, given: Any) -> Tensor:
            found: Tensor = super()._compute_cross_attention(module, hidden, keys, given)
            if self.kvzip_plus_normalization:
                found = found * (hidden.norm(dim=-1) / module.stream.norm(dim=-1)).view(1, 1, 1, -1, 1)
            return found

    return Unasked


def kvpress_package() -> Any:
    """kvpress, with attention functions as they were."""
    for name in ("datasets", "fire"):
        try:
            __import__(name)
        except ImportError:
            sys.modules[name] = stand_in = ModuleType(name)
            stand_in.__spec__ = ModuleSpec(name, None)
            stand_in.load_dataset = None  # type: ignore[attr-defined]
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    try:
        import kvpress
    except ImportError as missing:
        sys.exit(f"this needs kvpress ({missing}): pip install --no-deps kvpress==0.5.5 cachetools")
    for name, function in before.items():
        ALL_ATTENTION_FUNCTIONS[name] = function
    return kvpress


def attention(module: Any, hidden: Tensor, keys: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """[1, H, n, n]: what every query of the text gives every slot, as eager attention has it."""
    from kvpress.utils import get_prerope_query_states

    q, _ = apply_rotary_pos_emb(get_prerope_query_states(module, hidden), keys[:, :1], *turn)
    mask = torch.full((1, 1, keys.shape[2], keys.shape[2]), -torch.inf).triu(1)
    found: Tensor = eager_attention_forward(module, q, keys, keys, mask, module.scaling)[1]
    return found


def left(module: Any, before: Tensor, after: Tensor) -> Tensor:
    """bool [K, n]: slots that a press left, by the bits of their keys, or by what it would mask."""
    if (masked := getattr(module, "masked_key_indices", None)) is not None:
        kept = torch.ones(before.shape[1:3], dtype=torch.bool)
        kept[masked[1], masked[2]] = False
        module.masked_key_indices = None
        return kept
    odd = 2 * torch.arange(before.shape[3]) + 1
    was, stays = ((k[0].contiguous().view(torch.int32).long() * odd**3).sum(2) for k in (before, after))
    return torch.stack([torch.isin(a, b) for a, b in zip(was, stays, strict=True)])


def renamed(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The cache by the name that kvpress knows it by."""
    return given, {"past_key_values" if key == "cache" else key: value for key, value in named.items()}


def streams(layer: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Left where a press finds it: what goes into a layer."""
    layer.self_attn.stream = named.get("hidden_states", given[0] if given else None)


@torch.inference_mode()
def theirs(hf: Any, asked_for: dict[Any, Any], ids: list[int]) -> dict[Any, Masks]:
    """What each press keeps of a text. One pass for all: a press is called where its hook would be."""
    from kvpress import KVzipPress

    found: dict[Any, Masks] = {name: [] for name in asked_for}
    at_layers = {name: press for name, press in asked_for.items() if not isinstance(press, KVzipPress)}
    cache, tokens = DynamicCache(), torch.tensor([ids])

    def here(module: Any, _: Any, given: dict[str, Any], out: Any) -> None:
        hidden, turn, layer = given["hidden_states"], given["position_embeddings"], cache.layers[module.layer_idx]
        seen = attention(module, hidden, layer.keys, turn)
        module.rotary_emb = hf.model.rotary_emb
        for name, press in at_layers.items():
            shown = seen if type(press).__name__ in ("ObservedAttentionPress", "Summed") else None
            k, _ = press.compress(module, hidden, layer.keys, layer.values, shown, given)
            found[name].append(left(module, layer.keys, k))

    attends = [layer.self_attn for layer in hf.model.layers]
    hooks = [module.register_forward_hook(here, with_kwargs=True) for module in attends]
    hf(tokens, cache=cache, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    for name, press in asked_for.items():
        if name in at_layers:
            continue
        cache = DynamicCache()
        hooks = [m.register_forward_pre_hook(renamed, with_kwargs=True) for m in (hf.model, *attends)]
        hooks += [layer.register_forward_pre_hook(streams, with_kwargs=True) for layer in hf.model.layers]
        with press(hf):
            hf(tokens, cache=cache, logits_to_keep=1)
        for hook in hooks:
            hook.remove()
        found[name] = [left(m, layer.keys, layer.keys) for m, layer in zip(attends, cache.layers, strict=True)]
    return found


def ours(session: Any, n: int) -> Masks:
    """What a session holds of n tokens."""
    found = []
    for layer in session.lm.storing:
        pos = session.cache.slots(layer).pos
        kept = torch.zeros(pos.shape[0], n + 1, dtype=torch.bool)
        found.append(kept.scatter_(1, pos.where(pos >= 0, n).long(), True)[:, :n])
    return found


def settled(model: Any, text: Text, masks: Masks) -> Any:
    """A session whose store was settled by these masks."""
    session = model.new_session()
    text.read_by(session)
    at = [session.cache.slots(layer).pos for layer in session.lm.storing]
    session.cache.compress(
        [(pos >= 0) & mask.gather(1, pos.clamp(min=0).long()) for pos, mask in zip(at, masks, strict=True)]
    )
    return session


def overlap(a: Masks, b: Masks) -> list[float]:
    """By layer, what both keep over what either keeps, averaged over heads."""
    return [float(((x & y).sum(1) / (x | y).sum(1)).mean()) for x, y in zip(a, b, strict=True)]


def share_of(masks: Masks) -> float:
    return fmean(float(mask.float().mean()) for mask in masks)


def policy(pair: Pair, share: float, n: int) -> dict[str, Any]:
    """The keys that keep as much as kvpress would."""
    kept = int(n * share)
    if pair.is_share:
        return pair.ours | {"keep": (kept + 0.25) / n}
    return pair.ours | ({"window": kept - pair.ours["sinks"]} if pair.ours["name"] == "window" else {"budget": kept})


ALL = tuple(name.replace(", ", " ") for name in PAIRS)


@measurement("Slots kept and right answers beside kvpress 0.5.5: {texts} texts of {length} tokens", is_counts=True)
def presses(
    model: str = "demo",
    texts: int = 8,
    length: Annotated[int, "tokens of a text, answers included"] = 2048,
    shares: Annotated[Floats, "of a text that stay"] = (0.5, 0.25),
    methods: Annotated[Words, "of " + "; ".join(PAIRS)] = ALL,
) -> Rows:
    warnings.simplefilter("ignore", FutureWarning)  # of that name
    kvpress, names = kvpress_package(), [name for name in PAIRS if name.replace(", ", " ") in methods]
    whole = opened(model, Path(tempfile.gettempdir(), "kvcli-kv-quality"), {"load.dtype": "fp32"})
    hf = AutoModelForCausalLM.from_pretrained(whole.lm.model.config._name_or_path, dtype=torch.float32).eval()
    rows = {(share, name): {"same": [], "ours": [], "theirs": [], "kept": []} for share in shares for name in names}
    full: list[float] = []
    asked_of = samples(whole, texts, length, HELD_OUT)
    for i, sample in enumerate(asked_of):
        text = Text(whole, sample.context)
        session = whole.new_session()
        text.read_by(session)
        full.append(fmean(asked(whole, sample, session)["right"]))
        made = {(share, name): PAIRS[name].press(kvpress, 1 - share) for share, name in rows}
        known: dict[str, tuple[Masks, float]] = {}  # variants are of theirs: ours is the same
        for (share, name), masks in theirs(hf, made, sample.context[:-1]).items():
            keys = policy(PAIRS[name], share, text.n)
            if (which := str(keys)) not in known:
                session = whole.with_profile(whole.profile.replace(exactness="approx", policy=keys)).new_session()
                text.read_by(session)
                known[which] = ours(session, text.n), fmean(asked(whole, sample, session)["right"])
            row, (held, right) = rows[share, name], known[which]
            row["same"].append(overlap(held, masks))
            row["kept"].append([share_of(held), share_of(masks)])
            row["ours"].append(right)
            row["theirs"].append(fmean(asked(whole, sample, settled(whole, text, masks))["right"]))
        print(f"\r{i + 1} of {len(asked_of)} texts", end="", file=sys.stderr, flush=True)
    for (share, name), of in rows.items():
        layers = [fmean(text[i] for text in of["same"]) for i in range(len(of["same"][0]))]
        mine, their = (fmean(kept[i] for kept in of["kept"]) for i in (0, 1))
        places = [
            sum(fmean(other[side]) > fmean(of[side]) for (at, _), other in rows.items() if at == share) + 1
            for side in ("ours", "theirs")
        ]
        row = {"method": f"{name} {share:.0%}", "kept": round(mine, 4), "kvpress keeps": round(their, 4)}
        row |= {"same": round(fmean(layers), 4), "lowest": round(min(layers), 4)}
        row |= {"right": round(fmean(of["ours"]), 4), "place": places[0]}
        row |= {"kvpress right": round(fmean(of["theirs"]), 4), "kvpress place": places[1]}
        yield row
    said = f"From all slots {fmean(full):.3f} are right."
    return {"note": f"{said} same: kept by both over kept by either; lowest: of a layer."}


if __name__ == "__main__":
    presses.main()
