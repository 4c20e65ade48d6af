"""Drafters that try to break the engine: always right, always wrong, a bush of noise, nothing but end tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from kvcli.drafts.tree.tree_drafter import TreeDrafter
from kvcli.engine.drafting.drafter import Costs, ModelPair
from kvcli.engine.drafting.gemma4_assistant import Assistant
from kvcli.engine.drafting.mtp import Mtp, wrap_layers
from kvcli.engine.forward_request import Draft, LogitsHook, Passes, await_passes
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import wrap_lm
from kvcli.engine.policy.policy import Policy
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.stats import DraftReport, Step
from kvcli.kv.slots import Usage
from kvcli.methods.drafts.assistant import AssistantDraft
from kvcli.methods.drafts.eagle3 import Eagle3Draft
from kvcli.methods.drafts.eagle3_head import Eagle3, wrap_head
from kvcli.methods.drafts.mtp import MtpDraft
from kvcli.methods.drafts.self_draft import SelfDraft
from tests import families
from tests.bench import eagle3


class Scripted:
    """A drafter that knows the text plain decoding gives (prompt included)."""

    view: Policy | None = None
    logits_hook = None

    def __init__(self, truth: Sequence[int], vocab: int, stop: int) -> None:
        self.truth, self.vocab, self.stop = list(truth), vocab, stop
        self.random = random.Random(7)
        self.steps: list[Step] = []

    def start(self, ids: Sequence[int], sampler: object = None) -> None:
        return

    def observe(self, step: Step) -> None:
        self.steps.append(step)

    def usage(self) -> list[Usage]:
        return []

    def report(self) -> None:
        return None

    def ahead(self, ids: Sequence[int], n: int) -> list[int]:
        return self.truth[len(ids) : len(ids) + n]


class Right(Scripted):
    """Drafts the truth, up to seven tokens."""

    def propose(self, ids: Sequence[int], room: int, past: object) -> Draft:
        return Draft.chain(self.ahead(ids, min(7, room)))


class Wrong(Scripted):
    """Drafts anything but the truth."""

    def propose(self, ids: Sequence[int], room: int, past: object) -> Draft:
        return Draft.chain([(t + 1) % self.vocab for t in self.ahead(ids, min(5, room))])


class EndSpam(Scripted):
    """Drafts that the text ends, in the middle of a true path and everywhere else."""

    def propose(self, ids: Sequence[int], room: int, past: object) -> Draft:
        true = self.ahead(ids, min(2, room))
        if len(true) < 2:
            return Draft.chain([self.stop] * min(room, 4))
        nodes, parent = [true[0], self.stop, true[1], self.stop], [-1, 0, 0, -1]
        seen: set[tuple[int, int]] = set()
        kept = [i for i in range(4) if (parent[i], nodes[i]) not in seen and not seen.add((parent[i], nodes[i]))]
        return Draft([nodes[i] for i in kept], [parent[i] for i in kept])


class Bush(Scripted):
    """A random tree of noise with the truth hidden somewhere in it, never as the first child."""

    def propose(self, ids: Sequence[int], room: int, past: object) -> Draft:
        nodes: list[int] = []
        parent: list[int] = []
        at = -1
        for token in self.ahead(ids, min(4, room)):
            noise = self.random.sample([t for t in range(self.vocab) if t != token], self.random.randint(1, 3))
            for t in [*noise, token]:
                nodes.append(t)
                parent.append(at)
            at = len(nodes) - 1
        return Draft(nodes, parent)


class Moody(Scripted):
    """A chain that is right for a random length: any accept length, at any compression point."""

    def propose(self, ids: Sequence[int], room: int, past: object) -> Draft:
        true = self.ahead(ids, min(9, room))
        good = self.random.randint(0, len(true)) if true else 0
        return Draft.chain([t if i < good else (t + 1) % self.vocab for i, t in enumerate(true)])


ADVERSARIES = (Right, Wrong, EndSpam, Bush, Moody)


class Itself:
    """The model of whichever session it is given to."""

    def __init__(self, **settings: Any) -> None:
        config = SelfDraft(adaptive=False, depth=3, copies=False, **settings)
        self._config: SelfDraft | MtpDraft | AssistantDraft | Eagle3Draft = config
        self.view = config.glance()
        self._truth: Sequence[int] = ()
        self._mixer: TreeDrafter | None = None
        self._text: tuple[Sequence[int], Sampler | None] = ((), None)

    @property
    def logits_hook(self) -> LogitsHook | None:
        return self._mixer.logits_hook if self._mixer is not None else None

    def expect(self, costs: Costs) -> None:
        return

    def start(self, ids: Sequence[int], sampler: Sampler | None = None) -> Passes[None] | None:
        self._text = ids, sampler
        return self._mixer.start(ids, sampler) if self._mixer is not None else None

    def propose(self, ids: Sequence[int], room: int, session: GenerationSession) -> Passes[Draft]:
        if self._mixer is None:
            self._mixer = self._config.drafter(pair=ModelPair(session.lm, self._prepare(session.lm)))
            yield from await_passes(self._mixer.start(*self._text))
        return (yield from await_passes(self._mixer.propose(ids, room, session)))

    def _prepare(self, lm: LM) -> LM:
        return lm

    def observe(self, step: Step) -> Passes[None] | None:
        return self._mixer.observe(step) if self._mixer is not None else None

    def usage(self) -> list[Usage]:
        return []

    def report(self) -> DraftReport | None:
        return self._mixer.report() if self._mixer is not None else None


class Headed(Itself):
    """A random MTP layer over the hidden states of whichever session it is given to; with `truth` it is right of most
    positions, with `of` it is of another kind."""

    def __init__(self, truth: Sequence[int] = (), of: type[Mtp] = Mtp, **settings: Any) -> None:
        super().__init__()
        self._config = MtpDraft(**{"adaptive": False, "depth": 3, "copies": False, **settings})
        self._truth, self._of = truth, of

    def _prepare(self, lm: LM) -> LM:
        lm.remembers[Mtp] = head_of(lm, self._truth, self._of)
        return lm


class Knowing(Mtp):
    """Knows of a text what comes next, but for each seventh position."""

    truth: Sequence[int] = ()

    def forward(self, input_ids: Any, position_ids: Any = None, logits_to_keep: Any = None, **told: Any) -> Any:
        out = super().forward(input_ids, position_ids, logits_to_keep=logits_to_keep, **told)
        if self.truth and position_ids is not None:
            at = position_ids[0] if logits_to_keep is None else position_ids[0, logits_to_keep]
            for i, p in enumerate(at.tolist()):
                if p + 1 < len(self.truth) and p % 7:
                    out.logits[0, i, self.truth[p + 1]] = 1e3
        return out


def head_of(lm: LM, truth: Sequence[int] = (), of: type[Mtp] = Mtp) -> LM:
    """Llama's layer, with words of its own, for a model of any family."""
    text = lm.model.config.get_text_config()
    model = families.build("llama", hidden_size=text.hidden_size, vocab_size=lm.vocab)
    model.config.num_mtp_layers = 1
    layers = MtpModel(model, 1)
    families.sharpen(layers, seed=5)
    found = wrap_layers(lm, layers.to(lm.dtype).to(lm.device))
    if truth or of is not Mtp:
        found.model.__class__ = Knowing if truth else of
        found.model.truth = truth
    return found


class Assisted(Itself):
    """A random assistant over the KV cache of the session it is given to; with `truth` it is mostly right."""

    def __init__(self, truth: Sequence[int] = (), **settings: Any) -> None:
        super().__init__()
        self._config = AssistantDraft(**{"adaptive": False, "depth": 3, "copies": False, **settings})
        self._truth = truth

    def _prepare(self, lm: LM) -> LM:
        found = wrap_lm(Assistant(assistant_of(lm).to(lm.device), lm.model.get_input_embeddings()), id="assistant")
        if self._truth:
            found.model.__class__ = Told
            found.model.__dict__["truth"] = dict(pairwise(self._truth))
        return found


class Eagled(Itself):
    """A random EAGLE-3 head over hidden states of the session it is given to; with `truth` it is mostly right."""

    def __init__(self, truth: Sequence[int] = (), **settings: Any) -> None:
        super().__init__()
        self._config = Eagle3Draft(**{"adaptive": False, "depth": 3, "copies": False, **settings})
        self._truth = truth

    def _prepare(self, lm: LM) -> LM:
        found = wrap_head(lm, *eagle3_of(lm), id="head")
        if self._truth:
            found.model.__class__, found.direct_forward = Hinted, None
            found.model.__dict__["truth"] = self._truth
        return found


class Hinted(Eagle3):
    """Knows of a text what comes next, where it has a word for it."""

    def forward(self, input_ids: Any, position_ids: Any = None, logits_to_keep: Any = None, **told: Any) -> Any:
        out = super().forward(input_ids, position_ids, logits_to_keep=logits_to_keep, **told)
        at = position_ids[0] if logits_to_keep is None else position_ids[0, logits_to_keep]
        for i, p in enumerate(at.tolist()):
            if p + 1 < len(self.truth) and self.truth[p + 1] in self.words:
                out.logits[0, i, self.words.index(self.truth[p + 1])] = 1e3
        return out


def eagle3_of(lm: LM, **changes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Config and tensors of a random one that lacks each tenth token of this model."""
    words = torch.tensor([token for token in range(lm.vocab) if token % 10 != 7])
    config = {**eagle3.config_of(lm, len(words)), "intermediate_size": 64, **changes}
    head = eagle3.Plain(config)
    noise = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(p.shape, generator=noise) * 0.25 + (p.ndim == 1) for name, p in head.named_parameters()
    }
    tensors |= {"d2t": words - torch.arange(len(words)), "t2d": torch.isin(torch.arange(lm.vocab), words)}
    return AutoConfig.for_model(**config), tensors


class Told(Assistant):
    """Knows which token follows which in a text: its rows all stand in one place."""

    def forward(self, input_ids: Any, position_ids: Any = None, logits_to_keep: Any = None, **told: Any) -> Any:
        out = super().forward(input_ids, position_ids, logits_to_keep=logits_to_keep, **told)
        ids = input_ids[0] if logits_to_keep is None else input_ids[0, logits_to_keep]
        for i, token in enumerate(ids.tolist()):
            if token in self.truth:
                out.logits[0, i, self.truth[token]] = 1e3
        return out


def assistant_config(lm: LM, **changes: Any) -> Any:
    """Of two or four layers that read what layers of this model store, whatever its family."""
    text = lm.model.config.get_text_config()
    of = {lm.windows[layer] is not None: lm.shapes[layer] for layer in lm.storing}
    full, near = of[False], of.get(True, of[False])
    kinds = ["sliding_attention", "full_attention"] * 2 if True in of else ["full_attention"] * 2
    inner = {
        "model_type": text.model_type if text.model_type.startswith("gemma4") else "gemma4_text",
        **families.COMMON,
        "vocab_size": lm.vocab, "hidden_size": 40, "num_hidden_layers": len(kinds), "layer_types": kinds,
        "sliding_window": max((w for w in lm.windows if w), default=11), "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0, "num_attention_heads": 4, "num_key_value_heads": near.n_kv_heads,
        "head_dim": near.k_dim, "global_head_dim": full.k_dim, "num_global_key_value_heads": full.n_kv_heads,
        "attention_k_eq_v": True, "num_kv_shared_layers": len(kinds), **changes.pop("text_config", {}),
    }  # fmt: skip
    return AutoConfig.for_model(
        inner["model_type"].replace("_text", "_assistant"),
        **{"backbone_hidden_size": text.hidden_size, "text_config": inner, **changes},
    )


def assistant_of(lm: LM, **changes: Any) -> Any:
    """A random one for this model."""
    found = AutoModelForCausalLM.from_config(assistant_config(lm, **changes), attn_implementation="eager")
    families.sharpen(found, seed=5)
    return found.to(lm.dtype).eval().requires_grad_(False)
