"""Clocks between the parts of a pass, and a model whose layers take nothing, for any tree of this project."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

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

    def __init__(self, torch: Any) -> None:
        self._torch, self._held = torch, dict[Any, Any]()

    def tensor(self, *shape: int) -> Any:
        if shape not in self._held:
            self._held[shape] = self._torch.rand(shape, generator=self._torch.Generator().manual_seed(1))
        return self._held[shape]

    def part(self, q: Any, *_: Any) -> tuple[Any, Any]:
        """What a kernel makes of queries [H, N, D]."""
        h, n, d = q.shape
        return self.tensor(h, n, d), self.tensor(h, n)

    def merged(self, parts: Any) -> Any:
        return self.tensor(*parts[0].out.shape)

    def layer(self, module: Any, attention: Any, sight: Any) -> Callable[..., Any]:
        """A decoder layer that does nothing but attend, as native layers do it where there are such."""

        def forward(hidden: Any, **told: Any) -> Any:
            n = hidden.shape[1]
            q, kv = self.tensor(1, 4, n, 16), self.tensor(1, 2, n, 16)
            attention(module, q, kv, kv, None, dropout=0.0, scaling=0.25, sliding_window=None, **told)
            return hidden

        def native(hidden: Any, kvcli_pass: Any) -> Any:
            n = hidden.shape[1]
            q, kv = self.tensor(4, n, 16), self.tensor(2, n, 16)
            kvcli_pass.attend(module.layer_idx, q, kv, kv, sight, None)
            return hidden

        return (
            forward
            if first("kvcli.engine.hf.fused_layers", "kvcli.engine.fused", "kvcli") is sys.modules["kvcli"]
            else native
        )


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
        if kvcli_pass is None:  # it stands on a stack, where it was handed on before
            kvcli_pass = first("kvcli.engine.hf.cache_shim", "kvcli.engine.trial").current()
        return SimpleNamespace(logits=self.straight(range(n), (), logits_to_keep, kvcli_pass).unsqueeze(0))

    def straight(self, ids: Any, pos: Any, want: Any, kvcli_pass: Any, *_: Any) -> Any:
        """As of a model without transformers' own loop."""
        hidden = self._answer.tensor(1, len(ids), 64)
        for layer in self._layers:
            layer(hidden, kvcli_pass=kvcli_pass)
        return self._answer.tensor(len(ids) if want is None else len(want), VOCAB)


class Checkout:
    """The names of one tree, wherever a file lay when it was committed."""

    def __init__(self, root: str) -> None:
        sys.path.insert(0, root)
        import torch
        from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig

        torch.set_num_threads(1)
        self.torch, self._interface = torch, AttentionInterface
        self._build, self._config = AutoModelForCausalLM.from_config, LlamaConfig
        self.forward = first("kvcli.engine.forward", "kvcli.forward")
        self.session = first("kvcli.engine.sequence.session", "kvcli.engine.session", "kvcli.session")
        self.sample = first("kvcli.engine.sequence.sampler", "kvcli.engine.sample", "kvcli.sample")
        self.lm = first("kvcli.engine.hf.lm", "kvcli.engine.lm", "kvcli.model")
        self.stats = first("kvcli.engine.stats", "kvcli.stats")
        self.drafter = first(
            "kvcli.methods.drafts.off", "kvcli.drafts.off", "kvcli.engine.drafter", "kvcli.drafts.base"
        )
        self.build = first("kvcli.assemble", "kvcli.build")
        self.dense = first("kvcli.kv.tiers.dense", "kvcli.kv.dense")

    def model(self, layers: int) -> Any:
        config = self._config(
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
        self.torch.manual_seed(0)
        lm = self.lm.LM.of(self._build(config, dtype=self.torch.float32, attn_implementation="sdpa").eval())
        named(lm, "install_kernels", "lay_out", "block")()
        return lm

    def clock(self, parts: Parts, lm: Any, *, hollow: bool) -> None:
        """Put clocks where work passes from one part to another."""
        answer = Prepared(self.torch)
        for op in ("attend", "attend_new_tokens", "merge_attention"):
            package = first(f"kvcli.kernels.{op}", "kvcli.kernels.merge")
            for inner in iter_modules(package.__path__):
                module = import_module(f"{package.__name__}.{inner.name}")
                if hasattr(module, op):
                    own = answer.part if hollow else getattr(module, op)
                    setattr(module, op, parts.timed("kernels", own))
        import_module("kvcli.kernels.dispatch").choose.cache_clear()
        slab = first("kvcli.kv.tiers.dense_uniform", "kvcli.kv.slab")
        read = "attend_stored_and_new" if hasattr(slab, "attend_stored_and_new") else "read"
        if hasattr(slab, read):
            part = named(first("kvcli.kernels.merge_attention", "kvcli.kernels.merge"), "PartialAttention", "Part")
            own = getattr(slab, read)
            setattr(slab, read, parts.timed("kernels", (lambda q, *_, **__: part(*answer.part(q))) if hollow else own))
            one = named(self.forward, "ForwardPass", "Pass")
            one.attend = parts.timed("attention", one.attend)
        merge = "merge_attention" if hasattr(self.forward, "merge_attention") else "merge"
        setattr(self.forward, merge, parts.timed("kernels", answer.merged if hollow else getattr(self.forward, merge)))
        attention = parts.timed("attention", self.forward.attention)
        self._interface.register("kvcli", attention)
        for layer in lm.model.model.layers:
            own = answer.layer(layer.self_attn, attention, lm.attention_params[0]) if hollow else None
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
            lm.model.forward = parts.timed("model", lm.model.forward)
        if hasattr(lm, "straight"):
            lm.straight = parts.timed("model", lm.model.straight if hollow else lm.straight)
        walk = "accepted_path" if hasattr(self.session, "accepted_path") else "walk"
        if hasattr(self.session, walk):
            setattr(self.session, walk, parts.timed("drawing", getattr(self.session, walk)))
            self.session.commit = parts.timed("store", self.session.commit)
            engine = import_module("kvcli.engine.engine")
            engine.run = parts.timed("engine", engine.run)
        else:  # before sessions yielded feeds
            self.session.exact = parts.timed("drawing", self.session.exact)
            self.session.run = parts.timed("engine", self.session.run)
            one = named(self.forward, "ForwardPass", "Pass")
            one.commit = parts.timed("store", one.commit)

    def events(self, work: Any) -> Iterator[Any]:
        """The engine's, which an earlier session did without."""
        engine = sys.modules.get("kvcli.engine.engine")
        return iter(named(engine, "iterate_events", "events")(work) if engine else work)


def named(owner: Any, *names: str) -> Any:
    """The attribute by the first of its names, of now and of earlier trees, that is there."""
    return next(getattr(owner, name) for name in names if hasattr(owner, name))


def first(*names: str) -> Any:
    for name in names[:-1]:
        try:
            return import_module(name)
        except ModuleNotFoundError:
            pass
    return import_module(names[-1])
