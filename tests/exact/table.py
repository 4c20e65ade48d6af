"""The table of exactness: storages, policies, drafters and samplers, and the text that each of them writes.

Rows are storage x policy x drafter x sampler x precision, on any device; how a prompt gets there is a storage, too.
`test_table.py` holds them on a CPU, `tests/gpu` on a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from kvcli.engine.drafting.drafter import Drafter, ModelPair
from kvcli.engine.engine import Engine, EngineTask, iterate_events, run_to_end
from kvcli.engine.forward_request import Coroutine, ForwardRequest, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import install_kernels, wrap_lm
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.sequence.token_scores import score_tokens
from kvcli.kernels.native import native
from kvcli.kv.cache.precision_budget import PrecisionBudget
from kvcli.kv.slots import KVCache, alike
from kvcli.kv.tiers.dense import Dense
from kvcli.methods.decode.adadec import AdaDec
from kvcli.methods.decode.first_finish import FirstFinish
from kvcli.methods.decode.fork_writer import Decoding
from kvcli.methods.decode.patient_beam import PatientBeam
from kvcli.methods.decode.phi import PhiDecoding
from kvcli.methods.drafts.lookahead import Lookahead
from kvcli.methods.drafts.mix import Mix
from kvcli.methods.drafts.model import SeparateModelDraft
from kvcli.methods.drafts.ngram import Ngram
from kvcli.methods.drafts.off import Off
from kvcli.methods.policies.precision.policy import PrecisionBudgetPolicy
from kvcli.methods.policies.random import Random
from kvcli.methods.policies.snapkv import Snap
from kvcli.methods.policies.streaming import StreamingLLM as Stream
from kvcli.methods.prune.lazy import LazyLLM
from kvcli.methods.prune.spec_prefill import SpecPrefill
from kvcli.methods.reuse.cacheblend import CacheBlend
from kvcli.methods.sparse.segments import PromptSegments
from kvcli.models.retokenizer import TokenMapping
from kvcli.prefix_cache.prefix_cache import PrefixCache
from tests import drafters, families, hybrids, make, small_tokenizers
from tests.exact.half import Half
from tests.policies import KeepAll, Ragged

NEW = 40
STOP = 96  # drawn now and then by the sampled rows; greedy rows end by length

MODELS = {"dense": "llama", "sliding": "gemma3", "sinks": "gpt_oss", "rounded": "llama", "blocks": "llama"}
MODELS |= {"uneven": "gemma4_shared"}  # layers of two sizes, of which two read the keys of others
# what a policy lets go lies below: in full, in pages of which rows read a part, in 8 bits
LOWER = {"demoted": "llama", "recalled": "llama", "lowered": "llama"}
MODELS |= LOWER | {"given": "gemma3"}  # whose sliding layers give back what they hide
# no packed product is made in float64; what lies below is read alike in fp32 and fp64
NONE = {("rounded", "fp32"), ("blocks", "fp64"), *((name, "fp64") for name in LOWER)}
NONE |= {("given", "fp32"), ("given", "fp64")}  # tests/test_sliding_windows.py has them
STORAGES = [(name, dtype) for name in MODELS for dtype in ("fp32", "fp64") if (name, dtype) not in NONE]
# where rows are known to have the same bits alone and in company, 16 bits are a row like any other
# stores whose rows read a part of the KV cache, or some of it in other numbers or another place, or two KV caches
# on which a policy places slots; the last of them one in which rows find a part again
RUNGS = ("rungs", "rungs recalled")
SEGMENTS = ("segments", "segments below")  # rows of a prompt read a part of the KV cache, or of its lower tier
PARTS = (*make.INDEXES, *make.FORMS, "turned", "disk", "halves", "checked", "uneven turned", "rebuilt", *RUNGS)
PARTS += SEGMENTS
NATIVE = ("dense", "sliding", "uneven", "given", "blocks", *LOWER, *PARTS) if native() is not None else ()
STORAGES += [(name, "bf16") for name in NATIVE]
MODELS |= dict.fromkeys(PARTS, "llama") | {"uneven turned": "gemma4_shared"}
# old slots lie in host memory: each way to them gives the text of slots that never moved; packed ones are rounded
FAR = {"by kernel": ("dense", "fp64"), "by stream": ("sliding", "fp64"), "by rule": ("sliding", "fp32")}
STORAGES += [("by query", "fp32"), *((name, dtype) for name, (_, dtype) in FAR.items())]
PARTS += ("by query", *FAR)
MODELS |= {"by query": "llama", **{name: MODELS[twin] for name, (twin, _) in FAR.items()}}
# how a prompt gets into the store: from what another process kept, some of it left behind on the way, by layers, or
# taken over from another text and some of that read again; "lazy selected" selects anew while it answers, and of
# "chosen" a second model says what is read
READ = ("kept", "lazy", "lazy selected", "chosen", "layers", "blend")
MODELS |= dict.fromkeys(READ, "llama")
TWINS = {"kept": "dense", "layers": "dense"}  # whose text it is
# under no policy; these write heads together, or move slots that a policy has chosen among
UNJUDGED = (*TWINS, "blend", "lazy selected", "rotatekv", "cskv", "rebuilt")
STORAGES += [(name, dtype) for name in READ for dtype in (("fp32", "bf16") if native() is not None else ("fp32",))]
# rows go to two of five experts each, in full precision, in 8 and in 4 bits; no policy sees them
EXPERTS = {"experts": "none", "experts in 8 bits": "int8", "experts in 4 bits": "int4"}
MODELS |= dict.fromkeys(EXPERTS, "qwen3_moe")
UNJUDGED += tuple(EXPERTS)
STORAGES += [(name, "bf16") for name in EXPERTS if native() is not None] + [("experts in 4 bits", "fp32")]
WIDE = {"hidden_size": 64, "moe_intermediate_size": 32}  # which take a group of 32
# layers that store one vector a token, which is key and value of all heads
MODELS |= {"latents": "youtu"}
STORAGES += [("latents", dtype) for dtype in ("fp32", "fp64", *(("bf16",) if native() is not None else ()))]
# layers that fold the text into a state, so that drafts are chains
CHAINS = ("chain", "right", "wrong", "moody")
MODELS |= {"hybrid": "qwen3_5_text"}
if native() is not None:
    STORAGES += [("hybrid", "fp32"), ("hybrid", "bf16")]
BLOCKS = {"hidden_size": 96, "intermediate_size": 96, "head_dim": 24}  # linear layers in 4-bit groups of 32, as in GGUF
POLICIES = {"all": (None, None), "keepall": (KeepAll(), 16), "ragged": (Ragged(), 16)}
SPENT = PrecisionBudget("40%", 0, alike(3, 2, 16), 4, make.BITS, 16, [0.0] * 3)
SPENDS = {"budget": SPENT, "lose": replace(SPENT, asked="", lose=0.05)}
SPENDER: dict[str, int] = {"sinks": 2, "recent": 5, "compression_interval": 16}
POLICIES |= {name: (PrecisionBudgetPolicy(**SPENDER, spending=spent), 16) for name, spent in SPENDS.items()}
AWAY: dict[str, Any] = {"beyond": [18.0] * 3, "apart": [0.0] * 3}  # costs where sparse attention reads these slots
POLICIES |= {"window": (Stream(sinks=2, window=13), 11), "random": (Random(budget=17, sinks=2, window=5), 11)}
AHEAD = Snap(
    0.4, sinks=2, recent=5, queries=4, lookahead=3, keep_new=14, compression_interval=11, alloc="prefix", post="graph"
)
POLICIES |= {"ahead": (AHEAD, 11)}  # tests/test_score_stages.py and test_topk.py have the others
LAZY = LazyLLM(
    start_prune_layer=0.4, end_prune_layer=0.7, num_prune=2, recent=3, sinks=1, min_prompt=8
)  # two of three layers
CHOSEN = SpecPrefill(model="sibling", keep=0.5, chunk=4, ahead=2, pool=3, recent=3, sinks=1, min_prompt=8)
PRUNED = {
    "chosen": CHOSEN,
    "lazy": LAZY,
    "lazy selected": replace(LAZY, scope="prefill+decode", attend_to="selected", revive_interval=5),
}
SAMPLERS = {
    "greedy": Sampler(),
    "sampled": Sampler(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=3),
    "penalty": Sampler(temperature=0.7, repetition_penalty=1.3, seed=11),
    "held": Sampler(temperature=0.8, top_k=40, repetition_penalty=1.2, seed=5),  # to a constraint
}
# all further penalties, and all further truncations; they meet few storages and policies, as they see logits and ids
FURTHER = {
    "counted": Sampler(
        presence_penalty=0.4, frequency_penalty=0.2, dry_multiplier=0.8, dry_allowed_length=1, dry_range=40,
        dry_breakers=frozenset(range(0, 97, 5)), logit_bias=((7, 1.5), (11, -1.0)), temperature=0.6, seed=13,
    ),
    "cut": Sampler(
        temperature=1.2, top_n_sigma=2.2, min_p=0.01, typical_p=0.9, xtc_probability=0.5, xtc_threshold=0.05, seed=17,
    ),
    "sparse": Sampler(temperature=1.1, bregman_lambda=0.01, bregman_alpha=1.7, seed=19),
}  # fmt: skip
SAMPLERS |= FURTHER
TOP = {"sampled": 3, "held": 0, "cut": 20}  # likely tokens in the scores of the answer's tokens
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
NUMBERS = {**DTYPES, "bf16": torch.bfloat16}

# decoding methods, which write several forks over one KV cache; drafts of the forks change no answer
DECODERS: dict[str, Decoding] = {
    "first-finish": FirstFinish(forks=3),
    "beam": PatientBeam(forks=3, patience=2.0),
    "adadec": AdaDec(forks=3, entropy=2.0, ahead=3),
    "phi": PhiDecoding(forks=3, step=6, ahead=4),
}

Make = Callable[[Sequence[int]], Drafter]
DRAFTERS: dict[str, Make] = {
    "ngram": lambda truth: Ngram().drafter(),
    "lookahead": lambda truth: Lookahead(adaptive=False, window=3, ngram=4, seeded=True).drafter(),
    "fafo": lambda truth: Lookahead(adaptive=False, view="stream", sinks=2, recent=5, refresh=3).drafter(),
    "blind": lambda truth: Lookahead(adaptive=False, view="stream", sinks=0, recent=1, refresh=1).drafter(),
    "pages": lambda truth: Lookahead(
        adaptive=False, view="quest", page=3, pages=2, sinks=1, recent=4, refresh=4
    ).drafter(),
    "mix": lambda truth: Mix(adaptive=False, view="stream", sinks=2, recent=9).drafter(),
    # a second model, which names tokens that the other does not have, over what that one looks at;
    # tests/drafts/test_model.py and test_retrieval.py have more of them
    "model": lambda truth: SeparateModelDraft(
        adaptive=False,
        depth=4,
        working=23,
        sinks=2,
        recent=5,
        chunk=2,
        retrieval="every:2",
        positions="contiguous",
        copies=False,
    ).drafter([STOP], ModelPair(lm("dense", "fp32"), sibling())),
    # one of another vocabulary, and one that knows a single word
    **{
        name: (
            lambda truth, name=name: SeparateModelDraft(adaptive=False, depth=4, copies=False, branches=2).drafter(  # type: ignore[misc]
                [STOP],
                ModelPair(lm("dense", "fp32"), sibling(name == "constant"), respelled() if name == "foreign" else None),
            )
        )
        for name in ("foreign", "constant")
    },
    # itself, over what the store shows to drafts, by two of three layers; tests/drafts/test_self_draft.py has more
    "self": lambda truth: drafters.Itself(skip="clasp", skipped=1.0, sources=("token-recycling",)),
    # the same without its last layers, and without those that an earlier text of the table did not need
    "self-early": lambda truth: drafters.Itself(skip="early", skipped=1.0),
    "self-knn": lambda truth: drafters.Itself(skip="knn", skipped=1.0),
    # an MTP layer over its hidden states, that drafts well and that is at random
    "mtp": lambda truth: drafters.Headed(truth, depth=4, branches=2),
    "mtp-random": lambda truth: drafters.Headed(branches=3, sources=("token-recycling",)),
    # an assistant that reads what the model has stored, in whichever way that lies
    "assistant": lambda truth: drafters.Assisted(truth, depth=4, branches=2),
    "assistant-random": lambda truth: drafters.Assisted(branches=3, sources=("token-recycling",)),
    # an EAGLE-3 head, which reads hidden states of three layers and knows a part of the vocabulary
    "eagle3": lambda truth: drafters.Eagled(truth, depth=4, branches=2),
    "eagle3-random": lambda truth: drafters.Eagled(branches=3, sources=("token-recycling",)),
    "model-tree": lambda truth: trees(TREES[sum(truth) % len(TREES)]),  # each cell has one of the kinds
    # a second model, copies and what the model that writes thought likely, in one tree
    "model-mix": lambda truth: SeparateModelDraft(
        adaptive=False, depth=2, branches=2, sources=("stand", "token-recycling")
    ).drafter([STOP], ModelPair(lm("dense", "fp32"), sibling())),
    "chain": lambda truth: Ngram(adaptive=False, branches=1, min_match=1).drafter(),
    # one some of whose layers keep a state: copies in its passes come true in part
    "model-states": lambda truth: SeparateModelDraft(
        adaptive=False, depth=4, working=23, sinks=2, lookup_verify=3, min_match=1
    ).drafter([STOP], ModelPair(lm("dense", "fp32"), folding())),
    "eager": lambda truth: Ngram(adaptive=False, max=7).drafter(),  # drafts from the first pass on, whatever it costs
    **{
        kind.__name__.lower(): (lambda truth, kind=kind: kind(truth, 97, STOP))  # type: ignore[misc]
        for kind in drafters.ADVERSARIES
    },
}


def add(kind: str, name: str, method: type) -> None:
    """Add a method of another package: an eviction policy, a KV format or a drafter, small enough for this prompt."""
    global PARTS
    size = {**SPENDER, "keep": 0.4, "keep_new": 14, "adaptive": False}
    settings = method(**{key.name: size[key.name] for key in fields(method) if key.name in size})
    if kind == "policy":
        POLICIES[name] = (settings, SPENDER["compression_interval"])
    elif kind == "kv_format":
        make.FORMS[name], MODELS[name], PARTS = settings, "llama", (*PARTS, name)
    else:
        DRAFTERS[name] = lambda truth: settings.drafter([STOP], ModelPair(lm("dense", "fp32"), sibling()))


TREES = ("opt", "best", "sequoia", "cape")


def trees(tree: Any) -> Drafter:
    """A second model and copies in one tree, copies behind its drafts, and its rows over what is copied."""
    config = SeparateModelDraft(
        adaptive=False, depth=4, tree=tree, tree_width=3, branches=4, lookup_verify=3, min_match=1
    )
    return config.drafter([STOP], ModelPair(lm("dense", "fp32"), sibling()))


@cache
def sibling(is_constant: bool = False) -> LM:
    model = families.build("qwen2", vocab_size=131)
    if is_constant:
        model.get_output_embeddings().weight.data.zero_()
    found = wrap_lm(model)
    install_kernels(found)
    return found


@cache
def folding() -> LM:
    return make.model("qwen3_5_text", kernels=True)


@cache
def respelled() -> TokenMapping:
    return TokenMapping(small_tokenizers.letters(97, 1), small_tokenizers.letters(131, 2))


def lm(storage: str, dtype: str, device: str = "cpu") -> LM:
    return _lm(storage, dtype, device)  # a cache distinguishes calls with and without a default


@cache
def _lm(storage: str, dtype: str, device: str) -> LM:
    if storage == "kept":
        return of_files(kept_in(dtype, device), dtype, device)
    quant = "int4" if storage == "blocks" else EXPERTS.get(storage, "none")
    sizes: dict[str, Any] = BLOCKS if storage == "blocks" else WIDE if storage in EXPERTS else {}
    if storage == "hybrid":
        model = hybrids.build(MODELS[storage], NUMBERS[dtype], vocab_size=97).to(device)
    else:
        model = families.build(MODELS[storage], NUMBERS[dtype], **sizes).to(device)
    found = wrap_lm(model, quant=quant, device=torch.device(device))
    if dtype != "fp64":
        install_kernels(found)
        assert found.is_row_invariant or device != "cpu"
    return found


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory()  # until this process ends


@cache
def kept_in(dtype: str, device: str) -> Path:
    """Weights, and beside them what a process of its own has read with them: the prompt."""
    place = Path(_folder().name, f"{dtype}-{device.replace(':', '-')}")
    place.mkdir()
    parameters = families.build(MODELS["kept"], NUMBERS[dtype]).named_parameters()
    save_file({name: p.detach().clone() for name, p in parameters}, place / "model.safetensors")
    asked = f"from tests.exact.table import put_by; put_by({str(place)!r}, {dtype!r}, {device!r})"
    subprocess.run([sys.executable, "-c", asked], cwd=Path(__file__).parents[2], check=True)
    return place


def of_files(place: Path, dtype: str, device: str) -> LM:
    found = wrap_lm(families.build(MODELS["kept"], NUMBERS[dtype]).to(device), path=str(place))
    install_kernels(found)
    return found


def put_by(place: str, dtype: str, device: str) -> None:
    """Read the prompt with these weights, and keep it."""
    model = of_files(Path(place), dtype, device)
    session = make.session(model, past("kept", model), chunk=13)
    run_to_end(session.read(prompt()))
    kept = shelf(Path(place), model).save(session)
    assert kept.nbytes, kept


def shelf(place: Path, model: LM) -> PrefixCache:
    return PrefixCache(place / "kv", 1 << 30, model, min_work=0)


def serves(storage: str, policy: str, drafter: str = CHAINS[0]) -> bool:
    """Without a policy nothing goes to a lower tier, and with one nothing is kept for others, or read by layers."""
    if storage == "hybrid" and (drafter not in CHAINS or policy == "ahead"):  # an answer that is tried is refused there
        return False
    if policy in SPENDS:
        return storage in RUNGS
    return policy == "all" if storage in UNJUDGED else policy != "all" or storage not in LOWER


def prompt(storage: str = "") -> list[int]:
    # a phrase that returns, so that n-grams match; longer than the sliding window
    phrase = families.prompt(9)
    before = families.prompt(77, seed=5) if storage == "given" else []  # a block that no row of the answer sees
    return before + families.prompt(17, seed=2) + phrase + families.prompt(5, seed=3) + phrase[:6]


def past(storage: str, model: LM) -> KVCache:
    """Empty."""
    stored = torch.float32 if storage == "rounded" else None  # kv.dtype below that of the model
    is_named = storage in (*PARTS, *LOWER, "given")
    return make.cache("turned" if storage == "uneven turned" else storage if is_named else "dense", model, stored)


def opened(
    storage: str,
    policy: str,
    sampler: str,
    dtype: str,
    drafter: Drafter,
    device: str = "cpu",
    seed: int = 0,
    chunk: int = 13,
) -> GenerationSession:
    """`seed`: of the constraint, where the sampler is held to one."""
    model = lm(storage, dtype, device)
    keep, every = POLICIES[policy]
    if storage == "rungs recalled" and policy in SPENDS:
        keep = PrecisionBudgetPolicy(**SPENDER, spending=replace(SPENDS[policy], **AWAY))
    kv, every = past(storage, model), every or (16 if storage in PARTS else None)
    session = make.session(
        model,
        kv,
        drafter,
        SAMPLERS[sampler],
        policy=keep,
        every=every,
        chunk=chunk,
        pruning=PRUNED.get(storage),
        pair=ModelPair(model, sibling() if storage == "chosen" else model),
        by_layers=storage == "layers",
        reusing=CacheBlend(8, 0.4) if storage == "blend" else None,
        companions=[PromptSegments(model, 11)] if storage in SEGMENTS else [],
    )
    if storage == "blend":
        run_to_end(session.read([*families.prompt(6, seed=7), *prompt()[2:], 5]))
        session.start_answer(prompt(), SAMPLERS[sampler])
    if sampler == "held":
        session.start_answer(prompt(storage), SAMPLERS[sampler], Half(97, seed))
    if storage == "kept":
        read = shelf(kept_in(dtype, device), model).load_prefix(session, prompt())
        assert read == len(prompt()) - 1, "all but the pending token"
    session.is_scored = sampler in TOP
    return session


class Written(list[int]):
    """Ids, and the scores of the answer's tokens if the sampler asks for them, to the last bit.

    Where kernels give a row other last bits in other company, the tokens alone are compared.
    """

    scores: Sequence[Sequence[float]] = ()

    def __eq__(self, other: object) -> bool:
        known = getattr(other, "scores", ())
        return super().__eq__(other) and (not known or not self.scores or self.scores == known)


def written(session: GenerationSession, storage: str = "", top: int | None = None) -> Coroutine[object, Written]:
    yield from session.read(prompt(storage)[len(session.ids) :])
    end, scores = len(session.ids) + NEW, list[Sequence[float]]()
    while not scores or (len(session.ids) < end and session.ids[-1] != STOP):
        step = yield from session.step({STOP}, end - len(session.ids))
        logits = step.logits
        new = torch.tensor(step.new, device=logits.device)
        scores += [()] * len(new) if top is None else score_tokens(logits[step.path], new, top).tolist()
        yield step
    text = Written(session.ids)
    has_bits = session.lm.is_row_invariant and (storage in SEGMENTS or not session.cache.batch_variant_reason)
    # FAR have the text of another storage; where a GPU is simulated, torch merges the parts of "by query", and a row's
    # place in a vector changes its last bits
    text.scores = scores if top is not None and has_bits and storage not in (*FAR, "by query") else ()
    return text


def forked(decoder: str, storage: str, sampler: str, dtype: str, draft: int) -> Coroutine[object, list[int]]:
    """The text that a decoding method writes."""
    session = opened(storage, "all", sampler, dtype, Off())
    yield from session.read(prompt(storage)[len(session.ids) :])
    writer, end = replace(DECODERS[decoder], draft=draft).writer(session.lm), len(session.ids) + NEW
    while len(session.ids) < end and session.ids[-1] != STOP:
        yield (yield from writer.step(session, {STOP}, end - len(session.ids)))
    return session.ids


def decode(
    storage: str, policy: str, sampler: str, dtype: str, drafter: Drafter, device: str = "cpu", seed: int = 0
) -> Written:
    session = opened(storage, policy, sampler, dtype, drafter, device, seed)
    said = iterate_events(written(session, storage, TOP.get(sampler)))
    while True:
        try:
            event = next(said)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        assert session.committed == len(session.ids) - 1 or isinstance(event, int)


@cache
def plain(storage: str, policy: str, sampler: str, dtype: str, device: str = "cpu", seed: int = 0) -> Written:
    if storage == "checked":  # whatever is kept beside the whole KV cache
        return plain("dense", "all", sampler, dtype, device, seed)
    if storage in FAR:
        return plain(FAR[storage][0], policy, sampler, dtype, device, seed)
    return decode(TWINS.get(storage, storage), policy, sampler, dtype, Off(), device, seed)


CANCELLED, BROKEN = 5, 3  # which of the texts side by side


def side_by_side(
    storage: str, policy: str, dtype: str, device: str = "cpu", longest: float = 0.25, apart: int = 0
) -> list[tuple[EngineTask[object, Written], Written]]:
    """Eight in one engine, by turns every drafter with every sampler, each with the text of plain decoding alone.

    One is cancelled, and one breaks on the way. `apart`: steps between two that join.
    """
    pairs = list(product([name for name in DRAFTERS if serves(storage, policy, name)], SAMPLERS))
    first = 7 * (list(POLICIES).index(policy) + len(POLICIES) * STORAGES.index((storage, dtype)))
    engine, texts = Engine(rows=40, longest=longest), []
    for at in range(8):
        drafter, sampler = pairs[(first + at) % len(pairs)]
        of = device, at if sampler == "held" else 0  # each is held to something else
        want = plain(storage, policy, sampler, dtype, *of)
        session = opened(storage, policy, sampler, dtype, DRAFTERS[drafter](want), *of)
        work = broken(session) if at == BROKEN else written(session, storage, TOP.get(sampler))
        texts.append((engine.add(work), want))
        for _ in range(apart):
            engine.step()
    for n in range(10_000):
        if not engine.step():
            break
        if n == 9:
            texts[CANCELLED][0].cancel()
    return texts


def broken(session: GenerationSession) -> Coroutine[object, Written]:
    """A text whose pass breaks, alone as among others."""
    yield from session.read(prompt())

    class Torn(Dense):
        def attend(self, *args: Any) -> Any:
            raise MemoryError("no room")

    model = session.lm
    torn = Torn(model.shapes, session.cache.dtype, model.device)
    yield ForwardRequest(session.lm, Rows.chain([1], session.committed), torn, want=[0], states=session.states)
    raise AssertionError("it went on")
