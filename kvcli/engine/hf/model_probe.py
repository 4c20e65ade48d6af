"""Probe how a loaded model's layers call attention, then compare our logits with its own; refuse the model if they
differ.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import logging

from kvcli.engine.engine import run
from kvcli.engine.forward import PLACE, attention_params_of
from kvcli.engine.forward_request import Draft, ForwardRequest, Rows
from kvcli.engine.hf.cache_shim import call
from kvcli.engine.hf.lm import LM, ModelLayout
from kvcli.engine.hf.mla import LatentProjection, latent_of
from kvcli.engine.hf.recurrent_layers import RecurrentLayerFinder
from kvcli.engine.sequence.commit import commit
from kvcli.errors import BadModel
from kvcli.kernels import triton_support
from kvcli.kernels.module_probe import first_and_last, group_by_kind, kind
from kvcli.kv.recurrent_state import RecurrentStates, StateCheckpoint, apart_by
from kvcli.kv.slots import AttentionParams, LayerShape
from kvcli.kv.tiers.dense import Dense
from kvcli.models.refusals import blame_files

# A reduced model that runs only a few layers of each kind, because layers that differ only in their weights need one
# test.
#
# The tests (whether a fused layer computes the same, whether a row is batch invariant) depend on code, shapes and
# settings. The first and last layer of each kind run, as models differ there if anywhere.


def kinds(lm: LM, layers: Sequence[nn.Module]) -> list[list[int]]:
    """Group the layers of a model by kind: module types, attention parameters, stored shapes, and per-layer config
    entries."""
    config = vars(lm.model.config.get_text_config()).values()
    listed = [of for of in config if isinstance(of, list | tuple) and len(of) == len(layers)]

    def kind_of(i: int) -> Hashable:
        return (
            kind(layers[i]),
            lm.attention_params[i],
            lm.shapes[i],
            lm.sinks[i] is None,
            *(str(of[i]) for of in listed),
        )

    return group_by_kind(range(len(layers)), kind_of)


@contextmanager
def reduced_model(lm: LM, layers: Sequence[nn.Module]) -> Iterator[list[int]]:
    """Within the block, only the first and last layer of each kind run. The layers between pass on their input.

    Yields the indices of the layers that run.
    """
    tried = {i for group in kinds(lm, layers) for i in first_and_last(group)}
    tried |= {shape.shared_from for shape in lm.shapes if shape.shared_from is not None}
    # a fused layer's forward is also called directly
    ways: list[Any] = [vars(layer).get("forward") for layer in layers]
    # forwards replaced by others
    tried |= {i for i, way in enumerate(ways) if way is not None and not hasattr(way, "run")}
    fused = [way for i, way in enumerate(ways) if i not in tried and way is not None]
    plain = [layer for i, layer in enumerate(layers) if i not in tried and ways[i] is None]
    rest: tuple[Any, ...] | None = None  # further outputs of a layer; None = hidden states alone

    def note(layer: nn.Module, args: object, gave: Any) -> None:
        nonlocal rest
        rest = gave[1:] if isinstance(gave, tuple) else None

    def hand_on(hidden_states: Tensor, *args: object, **told: object) -> Any:
        return hidden_states if rest is None else (hidden_states, *rest)

    def run(x: Tensor, *args: object) -> Tensor:
        return x

    hook = layers[0].register_forward_hook(note) if plain else None
    for way in fused:
        way.run = run
    for layer in plain:
        layer.forward = hand_on
    try:
        yield sorted(tried)
    finally:
        if hook is not None:
            hook.remove()
        for way in fused:
            del way.run
        for layer in plain:
            del layer.forward


_PROBE = "kvcli_probe"  # name of the probe in transformers' registries
_SERVED = {"position_ids", "cache_position", "position_embeddings", "s_aux"}  # tensors that our attention accepts
# Relative RMS of a row's logits. Stock attention takes its softmax in float32 even in a float64 model.
WITHIN = {torch.float64: 1e-5, torch.float32: 3e-4, torch.float16: 0.02, torch.bfloat16: 0.05}


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """The arguments that one layer passed to the attention function."""

    module: nn.Module
    index: int
    heads: tuple[int, int, int, int]  # H, K, key size, value size
    params: AttentionParams
    mask: int | None  # index of the model's mask that it passed; None = none, -1 = a mask changed on the way
    sink: Tensor | None  # [H] sink logits, which take attention but have no value
    extras: tuple[str, ...]  # arguments of attention that are not supported
    kv: tuple[Tensor, Tensor]  # as passed: layers that share keys and values pass the same tensors


MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(slots=True)
class Probe:
    """A stand-in for a forward pass that notes the arguments of each layer."""

    layers: list[ProbedLayer] = field(default_factory=list)
    masks: list[MaskRule] = field(default_factory=list)

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **asked: Any
    ) -> tuple[Tensor, None]:
        """The attention function that is registered with transformers during the probe."""
        extras = [k for k, v in asked.items() if k not in _SERVED and isinstance(v, Tensor)]
        if asked.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            extras.append("is_causal=False")
        heads = (query.shape[1], key.shape[1], key.shape[3], value.shape[3])
        index = int(getattr(module, "layer_idx", -1))
        params = attention_params_of(query, asked.get("scaling"), asked.get("softcap"), asked.get("sliding_window"))
        which = None if attention_mask is None else self._which(attention_mask)
        self.layers.append(
            ProbedLayer(module, index, heads, params, which, asked.get("s_aux"), tuple(extras), (key, value))
        )
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    def mask(self, *_: Any, mask_function: MaskRule, device: torch.device | str = "cpu", **__: Any) -> Tensor:
        """Return a mask whose only entry is the index of the rule that made it."""
        self.masks.append(mask_function)
        # on the CPU, because meta tensors cannot be read
        where = "cpu" if torch.device(device).type == "meta" else device
        return torch.full((1, 1, 1, 1), len(self.masks) - 1, device=where)

    def _which(self, mask: Tensor) -> int:
        mark = float(mask) if mask.numel() == 1 and not mask.is_meta else -1.0
        return int(mark) if mark in range(len(self.masks)) else -1


def probed(model: Any, n_layers: int, limit: int, name: str) -> ModelLayout:
    """Run one row to find out how the layers call attention; raises BadModel for unsupported calls."""
    probe = Probe()
    AttentionInterface.register(_PROBE, probe.attention)
    AttentionMaskInterface.register(_PROBE, probe.mask)
    try:
        with attention_set(model, _PROBE):
            return _probe_layers(model, probe, n_layers, limit, name)
    finally:
        probe.layers.clear()  # transformers' registry keeps the probe, so the probe must not keep the model alive


@contextmanager
def attention_set(model: Any, name: str) -> Iterator[None]:
    """Set another attention function for the length of a block."""
    # an outer class may have another setting, which it keeps
    before = model.config.get_text_config()._attn_implementation
    with quiet():
        model.set_attn_implementation(name)
        try:
            yield
        finally:
            model.set_attn_implementation(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the progress bars and warnings of transformers. Relevant ones are reported as a note or an error."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _probe_layers(model: Any, probe: Probe, n_layers: int, limit: int, name: str) -> ModelLayout:
    """Run one row through the model with `probe` in place; raises BadModel if a layer needs an unsupported feature."""
    kind = f"{name} ({model.config.model_type})"
    finder = RecurrentLayerFinder()
    with blame_files(lambda said: refusal(kind, "a forward pass of one token fails", [said])), finder.watching(model):
        call(model, [0], [0], [0], cache_shim=finder)
    layers, recurrent_layers = probe.layers, finder.recurrent_layers()
    if not layers and recurrent_layers:
        _refuse(kind, "none of its layers has attention", ["kvcli needs an attention layer beside recurrent ones"])
    if not layers:
        _refuse(kind, "its attention does not go through transformers' attention interface", [type(model).__name__])
    seen = [at.index for at in layers]
    if seen != list(range(n_layers)) and (not recurrent_layers or seen != sorted({*seen})):
        n = len({*seen})
        why = f"only {n} of its {n_layers} layers attend" if n < n_layers else "its layers attend more than once"
        _refuse(kind, why, ["kvcli stores one key and one value per head, layer and token"])
    for place, at in enumerate(layers if recurrent_layers else ()):
        setattr(at.module, PLACE, place)
    for at in layers:
        _check_layer(at, probe, limit, kind)
    heads, attention_params, sinks, modules = zip(
        *((at.heads[0], at.params, at.sink, at.module) for at in layers), strict=True
    )
    with torch.inference_mode():
        found = {at.index: latent_of(at.module, finder.given.get(at.index), *at.kv) for at in layers}
    latents = {layer: of.latent for layer, of in found.items() if of.latent is not None}
    lacks = Counter(of.why_not for of in found.values() if of.why_not)
    notes = tuple(f"{n} layers store keys and values instead of latents: {why}" for why, n in lacks.items())
    stored = tuple(_stored(at, latents.get(at.index), layers[:place]) for place, at in enumerate(layers))
    decoder = _decoder_layers(model, modules, has_others=bool(recurrent_layers))
    return ModelLayout(heads, attention_params, sinks, modules, stored, recurrent_layers, latents, decoder, notes)


def _decoder_layers(model: nn.Module, attentions: Sequence[nn.Module], *, has_others: bool) -> nn.ModuleList | None:
    """Return the list of decoder layers, if the model has one. It excludes embeddings, output layer and vision
    modules. `has_others`: some layers have no attention."""
    for part in model.modules():
        if not isinstance(part, nn.ModuleList) or len(part) < len(attentions):
            continue
        attend = [layer for layer in part if any(module in attentions for module in layer.modules())]
        if len(attend) == len(attentions) and (len(attend) == len(part) or has_others):
            return part
    return None


def _stored(at: ProbedLayer, latent: LatentProjection | None, before: Sequence[ProbedLayer]) -> LayerShape:
    if latent is None:
        return LayerShape(*at.heads[1:], _owner(at, before))
    size = latent.rank + latent.turned
    return LayerShape(1, size, size, rank=latent.rank)


def _owner(at: ProbedLayer, before: Sequence[ProbedLayer]) -> int | None:
    """Return the first earlier layer that passed the same keys and values; None = the layer has its own."""
    same = (i for i, of in enumerate(before) if all(a is b for a, b in zip(of.kv, at.kv, strict=True)))
    return next(same, None)


def _check_layer(at: ProbedLayer, probe: Probe, limit: int, kind: str) -> None:
    h, k, *_ = at.heads
    if h % k:
        _refuse(kind, f"layer {at.index} has {h} heads over {k} KV heads", ["kvcli needs a multiple of the KV heads"])
    if at.extras:
        _refuse(kind, f"layer {at.index} gives its attention {', '.join(at.extras)}", ["which kvcli does not support"])
    if at.mask == -1:
        _refuse(kind, f"layer {at.index} builds its own mask", ["kvcli supports full and sliding-window attention"])
    if at.mask is None:
        return
    with blame_files(
        lambda said: refusal(kind, f"the mask of layer {at.index} depends on more than positions", [said])
    ):
        is_causal = _is_causal(probe.masks[at.mask], at.params.window, limit)
    if not is_causal:
        what = "causal" if at.params.window is None else f"a sliding window of {at.params.window}"
        _refuse(kind, f"the mask of layer {at.index} is not {what}", ["as in chunked or bidirectional attention"])


def _is_causal(rule: MaskRule, window: int | None, limit: int) -> bool:
    """True if the model's own mask, far into a sequence, equals ours: all earlier positions, or the window."""
    last = max(limit - 1, 2 * (window or 0), 2)
    first = 0 if window is None else last - window + 1
    seen, hidden = [last, (first + last) // 2, first], [last + 1, *([] if window is None else [first - 1, 0])]

    def sees(at: int) -> bool:
        zero = torch.tensor(0)
        return bool(rule(zero, zero, torch.tensor(last), torch.tensor(at)))

    return all(map(sees, seen)) and not any(map(sees, hidden))


def verify_logits(lm: Any, stock: Callable[[], AbstractContextManager[object]], name: str) -> None:
    """Run random tokens with the model's own attention, in place during `stock()`, and with ours. Raises BadModel if
    logits differ.

    In half precision, rounding alone may send a token to another expert, which changes its row and what later rows
    attend to. An error in our attention changes most rows of every sequence. So in half precision, half of the rows and
    two of three sequences may differ.
    """
    is_half = lm.dtype in (torch.bfloat16, torch.float16)
    kind, bound = f"{name} ({lm.info.family})", WITHIN.get(lm.dtype, 0.05)
    small = [w for w in lm.windows if w is not None and w <= 64]
    n = min(max([16, *(3 * w for w in small)]), lm.limit)  # most rows are longer than a small window
    noise = torch.Generator().manual_seed(0)
    for _ in range(3 if is_half else 1):
        ids = torch.randint(0, lm.vocab, (n,), generator=noise).tolist()
        with stock(), blame_files(lambda said: refusal(kind, "its own forward fails", [said])):
            reference = _stock(lm, ids)
        if not bool(reference.isfinite().all()):
            _refuse(kind, f"its own forward gives NaN or infinity in {lm.info.dtype}", [], ["--set load.dtype=fp32"])
        ours, known = _ours(lm, ids)
        worst, folded = relative_rms(ours, reference, n // 2 if is_half else 0), _folded(lm, ids, known)
        if worst <= bound and folded <= max(bound, 1e-3):
            return
    largest = float((ours - reference).abs().nan_to_num(torch.inf).max())
    _refuse(
        kind,
        "kvcli's forward pass gives other logits than transformers'",
        [
            f"{n} tokens: logits off by up to {largest:.3g} on a scale of {float(reference.abs().max()):.3g}",
            f"relative error {worst:.2g}, allowed in {lm.info.dtype}: {bound:g}",
            *[f"recurrent states after them off by {folded:.2g} from those of one pass"] * bool(lm.recurrent_layers),
        ],
        ["report it with the output of kvcli doctor", "--set load.verify=false runs it anyway: expect wrong text"],
    )


def relative_rms(ours: Tensor, reference: Tensor, nth: int) -> float:
    """Return the relative RMS between rows of logits [N, V]: the largest of any row, after leaving out the `nth` worst
    rows."""
    off = ((ours - reference).square().mean(1) / reference.square().mean(1).clamp_min(1e-30)).sqrt()  # [N]
    return float(off.nan_to_num(torch.inf).sort(descending=True).values[nth])


def _stock(lm: Any, ids: Sequence[int]) -> Tensor:
    """Return the logits [N, V] of one call with the current attention."""
    return call(lm.model, ids).cpu().double()


def _ours(lm: Any, ids: Sequence[int]) -> tuple[Tensor, StateCheckpoint]:
    """Return the logits [N, V] of two passes, where the second reads what the first committed, and the recurrent states
    after them. For recurrent layers, one pass in between is accepted in part, and one has a single row."""
    kv, states = Dense(lm.shapes, lm.dtype, lm.device), RecurrentStates(lm.recurrent_layers.like)
    n, half = len(ids), len(ids) // 2
    logits = []
    passes = (
        [(half, half + 5, 2), (half + 2, half + 3, 1), (half + 3, n, n)]
        if lm.recurrent_layers and n > 9
        else [(half, n, n)]
    )
    for a, b, most in ((0, half, n), *passes)[half == 0 :]:  # a context window of one token has no half
        rows, taken = Rows.chain(ids[a:b], a), min(most, b - a)
        last_first = range(b - a - 1, -1, -1)  # a model that ignores `want` would return other rows
        (result,) = run([ForwardRequest(lm, rows, kv, want=last_first, states=states)])
        logits.append(result.logits[: b - a].flip(0)[:taken])
        commit(kv, rows, result, range(taken))
    return torch.cat(logits).cpu().double(), states.now


def _folded(lm: Any, ids: Sequence[int], known: StateCheckpoint) -> float:
    """Return the relative RMS between these recurrent states and those after one pass of the same tokens."""
    states, rows = RecurrentStates(lm.recurrent_layers.like), Rows.chain(ids, 0)
    if not lm.recurrent_layers:
        return 0.0
    (result,) = run([ForwardRequest(lm, rows, Dense(lm.shapes, lm.dtype, lm.device), states=states, is_prompt=True)])
    assert result.fold is not None, "the pass ran no recurrent layer"
    result.fold(len(ids))
    return apart_by(known, states.now)


def _refuse(kind: str, why: str, lines: Sequence[str], try_: Sequence[str] = ()) -> NoReturn:
    raise refusal(kind, why, lines, try_)


def refusal(kind: str, why: str, lines: Sequence[str], try_: Sequence[str] = ()) -> BadModel:
    return BadModel(
        f"{kind} is not supported: {why}",
        code="model_unsupported",
        lines=lines,
        try_=try_ or ["docs/models.md lists what runs", "vLLM or llama.cpp may serve this model"],
    )


# Test whether a loaded model is batch invariant, that is, whether a row has the same bits whatever else is in the pass.
#
# If it is, drafting gives the text of plain decoding in 16 bits too, and chunk sizes or other sequences in a pass
# change nothing. It depends on every operation of the model: our kernels are batch invariant, other operations can only
# be tested. On a GPU it is claimed for decoding rows only, in passes of few rows, as the fused kernels guarantee it.
# Prompt chunks use the fastest kernels there, and the chunks are the same with and without drafting. Operations without
# a kernel of ours select algorithms by a table of shapes there, so testing a few shapes would prove nothing.


STORED = 70  # tokens prefilled first: past the first block of native attention, not at the end of the second
# chunk size of the second prefill: fewer rows than torch processes at once, so that each element is computed alone
CHUNK = 14
DEPTH, WIDTH = 3, 5  # size of the tree; the text follows its last branches
WIDE = 11  # width of a tree that fills a tile of 32 rows and begins another


def is_batch_variant(lm: LM) -> bool:
    """True if logits differ when rows run in a draft tree or in other chunks. Uses fixed random tokens."""
    n = min(STORED, lm.limit - DEPTH)
    if n < 1 or (lm.is_on_accelerator and triton_support.why_not(lm.device, lm.dtype)):
        return True
    # a recurrence sums a chunk in another order than single rows, which 16 bits hide from a short test
    if lm.recurrent_layers.like.rec and not lm.recurrent_layers.are_by_row:
        return True
    ids = torch.randint(0, lm.vocab, (n + DEPTH,), generator=torch.Generator().manual_seed(0)).tolist()
    widths = (
        (1,) if lm.recurrent_layers else (WIDTH, WIDE) if lm.is_on_accelerator else (WIDTH,)
    )  # rows of recurrent layers are a chain
    return any(_differ(lm, ids, n, width) for width in widths)


def _differ(lm: LM, ids: list[int], n: int, width: int) -> bool:
    """True if rows after the first n tokens differ between plain decoding and a tree of this width."""
    (alone, of_alone), (cut, of_cut) = _past(lm, ids[:n], n), _past(lm, ids[:n], n if lm.is_on_accelerator else CHUNK)
    # compare all rows of a chunk: torch's sigmoid of one number per row, as in gates of experts, rounds by the row's
    # index
    for layer in () if lm.is_on_accelerator else lm.storing:
        its, other = alone.slots(layer), cut.slots(layer)
        if not (torch.equal(its.k, other.k) and torch.equal(its.v, other.v)):
            return True
    draft_ids, parent, on_path, last = list[int](), list[int](), [0], -1
    for token in ids[n + 1 :]:
        draft_ids += [*((token + wrong) % lm.vocab for wrong in range(1, width)), token]
        parent += [last] * width
        last = len(draft_ids) - 1
        on_path.append(last + 1)
    (among,) = run(
        [ForwardRequest(lm, Rows.build(ids[n], n, Draft(draft_ids, parent)), cut, want=on_path, states=of_cut)]
    )
    for i in range(DEPTH):
        row = Rows.chain(ids[n + i : n + i + 1], n + i)
        (result,) = run([ForwardRequest(lm, row, alone, want=[0], states=of_alone)])
        if not torch.equal(result.logits[0], among.logits[i]):
            return True
        commit(alone, row, result, [0])
    return False


def _past(lm: LM, ids: list[int], chunk: int) -> tuple[Dense, RecurrentStates]:
    """Prefill these ids in chunks of this size. Return the KV cache and the recurrent states."""
    kv, states = Dense(lm.shapes, lm.dtype, lm.device), RecurrentStates(lm.recurrent_layers.like)
    for start in range(0, len(ids), max(1, chunk)):
        some = ids[start : start + max(1, chunk)]
        rows = Rows.chain(some, start)
        (result,) = run([ForwardRequest(lm, rows, kv, want=[0], states=states)])
        commit(kv, rows, result, range(rows.n_rows))
    return kv, states
