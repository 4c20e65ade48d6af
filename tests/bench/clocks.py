"""Clocks between the parts of a pass, and a model whose layers take nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig

from kvcli.engine import engine, forward
from kvcli.engine.hf.cache_shim import current
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import install_kernels, wrap_lm
from kvcli.engine.sequence import session
from kvcli.kernels import dispatch
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.tiers import dense_layer

VOCAB = 1024


class Parts:
    """Nanoseconds by part, each moment counted to one: whoever was called last and has not returned."""

    def __init__(self) -> None:
        self._stack, self._mark = ["session"], 0
        self._spent: dict[str, int] = defaultdict(int)
        self._calls: dict[tuple[str, str], int] = defaultdict(int)  # (from, to)
        self._leaks = 0.0, 0.0  # of one call: what its clock takes outside, and inside
        self._leaks = self._calibrated()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, on this part's account."""
        spent, calls, stack = self._spent, self._calls, self._stack

        def counted(*args: Any, **more: Any) -> Any:
            outer = stack[-1]
            stack.append(part)
            calls[outer, part] += 1
            now = perf_counter_ns()
            spent[outer] += now - self._mark
            self._mark = perf_counter_ns()
            try:
                return function(*args, **more)
            finally:
                now = perf_counter_ns()
                spent[part] += now - self._mark
                stack.pop()
                self._mark = perf_counter_ns()

        return counted

    def begin(self) -> None:
        self._spent.clear()
        self._calls.clear()
        self._mark = perf_counter_ns()

    def end(self) -> dict[str, float]:
        """Microseconds since the beginning, without what the clocks took."""
        self._spent[self._stack[-1]] += perf_counter_ns() - self._mark
        found = dict(self._spent)
        outside, inside = self._leaks
        for (outer, inner), n in self._calls.items():
            found[outer] -= n * outside
            found[inner] -= n * inside
        return {part: ns / 1000 for part, ns in found.items()}

    def _calibrated(self, n: int = 50, reps: int = 2000) -> tuple[float, float]:
        def nothing(*args: Any, **more: Any) -> None:
            return

        def loop(function: Callable[..., Any]) -> int:
            began = perf_counter_ns()
            for i in range(n):
                function(i, one=i, two=i)
            return perf_counter_ns() - began

        nothing_timed, found = self.timed("inside", nothing), list[tuple[float, float, float]]()
        for _ in range(reps):
            bare = loop(nothing)
            self.begin()
            loop(nothing_timed)
            spent = self.end()
            found.append((bare / n, 1000 * spent["session"] / n, 1000 * spent["inside"] / n))
        bare, outside, inside = map(min, zip(*found, strict=True))
        return outside - bare, inside


class Prepared:
    """Tensors that are there already, by their shapes."""

    def __init__(self) -> None:
        self._held = dict[Any, Any]()

    def tensor(self, *shape: int) -> Any:
        if shape not in self._held:
            self._held[shape] = torch.rand(shape, generator=torch.Generator().manual_seed(1))
        return self._held[shape]

    def part(self, q: Any, *_: Any) -> tuple[Any, Any]:
        """What a kernel makes of queries [H, N, D]."""
        h, n, d = q.shape
        return self.tensor(h, n, d), self.tensor(h, n)

    def merged(self, parts: Any) -> Any:
        return self.tensor(*parts[0].out.shape)

    def layer(self, module: Any, sight: Any) -> Callable[..., Any]:
        """A decoder layer that does nothing but attend, as native layers do it."""

        def forward(hidden: Any, kvcli_pass: Any) -> Any:
            n = hidden.shape[1]
            q, kv = self.tensor(4, n, 16), self.tensor(2, n, 16)
            kvcli_pass.attend(module.layer_idx, q, kv, kv, sight, None)
            return hidden

        return forward


class Hollow:
    """Stands in for a model: its layers attend, one after the other."""

    def __init__(self, parts: Parts, model: Any, answer: Prepared) -> None:
        self._model, self._answer = model, answer
        self._layers = [layer.forward for layer in model.model.layers]
        self._run = parts.timed("model", self._through)

    @property
    def device(self) -> Any:
        return self._model.device  # which has to look for it

    def __call__(self, **told: Any) -> Any:
        return self._run(**told)

    def _through(self, input_ids: Any, kvcli_pass: Any = None, logits_to_keep: Any = None, **_: Any) -> Any:
        n = input_ids.shape[1]
        return SimpleNamespace(logits=self.straight(range(n), (), logits_to_keep, kvcli_pass or current()).unsqueeze(0))

    def straight(self, ids: Any, pos: Any, want: Any, kvcli_pass: Any, *_: Any) -> Any:
        """As of a model without transformers' own loop."""
        hidden = self._answer.tensor(1, len(ids), 64)
        for layer in self._layers:
            layer(hidden, kvcli_pass=kvcli_pass)
        return self._answer.tensor(len(ids) if want is None else len(want), VOCAB)


def small_model(layers: int) -> LM:
    """A random Llama of 64 numbers a row, in float32."""
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        intermediate_size=128,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    lm = wrap_lm(model.eval())
    install_kernels(lm)
    return lm


def clock(parts: Parts, lm: Any, *, hollow: bool) -> None:
    """Put clocks where work passes from one part to another."""
    answer = Prepared()

    def put(owner: Any, name: str, part: str, instead: Any = None) -> None:
        setattr(owner, name, parts.timed(part, instead if hollow and instead else getattr(owner, name)))

    for op in ("attend", "attend_new_tokens", "merge_attention"):
        package = import_module(f"kvcli.kernels.{op}")
        for inner in iter_modules(package.__path__):
            module = import_module(f"{package.__name__}.{inner.name}")
            if hasattr(module, op):
                put(module, op, "kernels", answer.part)
    dispatch.choose.cache_clear()
    put(dense_layer, "attend_stored_and_new", "kernels", lambda q, *_, **__: PartialAttention(*answer.part(q)))
    put(forward.ForwardPass, "attend", "attention")
    put(forward, "merge_attention", "kernels", answer.merged)
    attention = parts.timed("attention", forward.attention)
    AttentionInterface.register("kvcli", attention)
    for layer in lm.model.model.layers:
        own = answer.layer(layer.self_attn, lm.attention_params[0]) if hollow else None
        if hasattr(vars(layer).get("forward"), "_forward"):  # a gate
            gate = layer.forward
            inner = parts.timed("model", own or gate._forward())
            gate._forward = lambda inner=inner: inner
            layer.forward = parts.timed("gates", gate)
        elif own:
            layer.forward = own
    if hollow:
        lm.model = Hollow(parts, lm.model, answer)
    else:
        put(lm.model, "forward", "model")
    lm.direct_forward = parts.timed("model", lm.model.straight if hollow else lm.direct_forward)
    put(session, "accepted_path", "drawing")
    put(session, "commit", "store")
    put(engine, "run", "engine")
