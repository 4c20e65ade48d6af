"""EAGLE-3 head (Li et al., 2025, arXiv 2503.01840): one layer whose rows are a token and a hidden state made of the
target model's hidden states at three layers, of the token before. Draft tokens continue from the head's own states.

Checkpoints are read as SGLang, vLLM and the authors' code read them: `fc`, `midlayer`, `norm` and `lm_head` over a part
of the vocabulary, which `d2t` names. The KV cache is that of an MTP layer (mtp_head.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama import modeling_llama as llama

from kvcli.drafts.draft_models.mtp_head import MtpHead
from kvcli.engine.forward_request import NeededTensors, Passes
from kvcli.engine.hf.cache_shim import RunningPass, target_hidden_states
from kvcli.engine.hf.direct_forward import DirectForward, RopeTable
from kvcli.engine.hf.lm import LM
from kvcli.engine.hf.model_probe import quiet
from kvcli.engine.loading.open_lm import capture_like, install_kernels, wrap_lm
from kvcli.errors import BadModel
from kvcli.kernels.decoder_layer import Layer, after
from kvcli.kernels.gated_mlp import NativeMlp, product_of
from kvcli.kernels.rms_norm import NativeNorm, Norm
from kvcli.kv.slots import AttentionParams
from kvcli.models.family import read_config, unreadable
from kvcli.models.refusals import blame_files
from kvcli.models.source import Source
from kvcli.settings.schema import Load


class EagleLayer(nn.Module):
    """The decoder layer: attention reads the normed token and the normed hidden state side by side."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        e, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = llama.LlamaAttention(config, 0), llama.LlamaMLP(config)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * e, old.out_features, bias=old.bias is not None))
        self.hidden_norm, self.input_layernorm = llama.LlamaRMSNorm(e, eps), llama.LlamaRMSNorm(e, eps)
        self.post_attention_layernorm = llama.LlamaRMSNorm(e, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, **of: Any) -> Tensor:
        """Return the hidden states after the layer, all [1, N, E]."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        x = hidden + self.self_attn(both, attention_mask=None, **of)[0]
        after: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return after


class EagleOutput(nn.Module):
    """Norm and output layer. Its input is the state that the next draft token continues from, so that is recorded."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.lm_head.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [1, n, draft vocabulary]."""
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


class Eagle3(PreTrainedModel):  # type: ignore[misc]
    """The head as a model, made of Llama's parts."""

    _supports_sdpa = True

    def __init__(self, config: Any, width: int, embeds: nn.Module | None) -> None:
        """`width`: of the target model's hidden states; `embeds`: its embedding table, None = the head has its own."""
        super().__init__(config)
        self.fc = nn.Linear(3 * width, config.hidden_size, bias=False)
        self.midlayer, self.says = EagleLayer(config), EagleOutput(config)
        self.__dict__["embeds"] = embeds  # not a submodule: neither moved nor counted with it
        if embeds is None:
            self.embeds = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers_read: tuple[int, ...] = ()  # layers of the target model whose inputs it gets
        self.words: list[int] = []  # token id by output of the head

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    def get_output_embeddings(self) -> Any:
        return self.says

    def get_input_embeddings(self) -> Any:
        return self.embeds

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        cache: Any = None,
        logits_to_keep: Tensor | None = None,
        use_cache: bool = False,
    ) -> CausalLMOutput:
        """Run the head: input_ids, position_ids [1, N] -> logits [1, n, V]. The pass supplies hidden states [N, E]."""
        embedded = self.embeds(input_ids).to(self.dtype)
        turns = self.rotary(embedded, position_ids)
        x = self.midlayer(embedded, target_hidden_states(embedded), position_embeddings=turns, cache=cache)
        return CausalLMOutput(logits=self.says(x if logits_to_keep is None else x[:, logits_to_keep]))


class DirectEagle(DirectForward):
    """The head's pass on a CPU without calls of modules, which take longer than what they compute: equal to the bit."""

    def __init__(self, head: LM) -> None:
        eagle, layer = head.model, head.model.midlayer
        self._rotary = RopeTable(eagle.rotary, torch.empty(0, dtype=head.dtype))
        super().__init__(eagle.embeds, self._rotary, (), eagle.says.norm.forward, eagle.says.lm_head)
        attn, mlp = layer.self_attn, layer.mlp.forward
        self._norms = layer.input_layernorm.forward, layer.hidden_norm.forward
        self._qkv, self._params = (attn.q_proj, attn.k_proj, attn.v_proj), AttentionParams(attn.scaling)
        products, self._keeps = zip(*map(product_of, (*self._qkv, attn.o_proj)), strict=True)
        norm, empty = layer.post_attention_layernorm.forward, Norm()  # the first states the width of a row
        self._native = Layer(norm.norm, norm.norm, *[empty] * 4, *products, mlp.mlp, attn.head_dim)
        self._after = norm, mlp  # they own its memory

    @staticmethod
    def serves(head: LM) -> bool:
        """True if the modules of this head run by native kernels."""
        layer = head.model.midlayer
        norms = layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, head.model.says.norm
        kinds = {type(vars(module).get("forward")) for module in (layer.mlp, *norms)}
        return kinds == {NativeMlp, NativeNorm}

    def __call__(
        self, ids: Any, pos: Any, want: Any, its_pass: RunningPass, layers: Any = None, hidden: Tensor | None = None
    ) -> Tensor:
        """Return logits as `DirectForward` does. `hidden` [N, E]: the states beside the embedded tokens."""
        with torch.inference_mode():
            embedded = self._embedded(ids)
            x = torch.zeros_like(embedded) if hidden is None else hidden
            both = torch.cat([norm(of) for norm, of in zip(self._norms, (embedded, x), strict=True)], -1)
            d = self._native.D
            q, k, v = (part.forward(both).view(len(both), -1, d).transpose(0, 1) for part in self._qkv)
            q, k = llama.apply_rotary_pos_emb(q, k, *self._rotary(pos), unsqueeze_dim=0)
            x = after(self._native, x, its_pass.attend(0, q, k, v, self._params, None).transpose(0, 1))
            x = x if want is None else x[want]
            if its_pass.shows:
                its_pass.hidden_states[-1] = x
            logits: Tensor = self._head.forward(self._norm(x))
        return logits


class Eagle3Head(MtpHead):
    """Draft head that fuses three hidden states of each accepted token, and knows a part of the vocabulary."""

    def __init__(self, lm: LM, head: LM) -> None:
        self._eagle: Eagle3 = head.model
        self.needs = NeededTensors(self._eagle.layers_read)
        super().__init__(lm, head)

    def _given(self, states: Tensor) -> Tensor:
        with torch.inference_mode():
            fused: Tensor = self._eagle.fc(states.to(self._head.dtype))
        return fused

    def catch_up(self, want: int = 1, most: float = math.inf) -> Passes[list[list[float]]]:
        return self._named((yield from super().catch_up(want, most)))

    def continue_from(self, ids: Sequence[int], parents: Sequence[int]) -> Passes[list[list[float]]]:
        return self._named((yield from super().continue_from(ids, parents)))

    def _named(self, found: list[list[float]]) -> list[list[float]]:
        """Return hook outputs with the target model's token ids."""
        half = len(found[0]) // 2 if found else 0
        return [[*(float(self._eagle.words[int(i)]) for i in one[:half]), *one[half:]] for one in found]


def load(target: LM, source: Source, wants: Load) -> LM:
    """Load a head on the device of `target`. Raises BadModel if it was made for another model, or is not complete."""
    with quiet(), blame_files(partial(unreadable, source, "it is no readable EAGLE-3 head")):
        config = read_config(source, trust_remote_code=False)
        tensors = chain.from_iterable(load_file(file.path).items() for file in source.files)
        return wrap_head(target, config, dict(tensors), id=source.id, path=str(source.path))


def wrap_head(target: LM, config: Any, tensors: dict[str, Tensor], **about: Any) -> LM:
    """Build a head of the tensors of a checkpoint. `about`: as in `wrap_lm`. Raises BadModel as `load`."""
    tensors, n = {_ours(name): t for name, t in tensors.items()}, len(target.layers or ())
    shifts, knows = tensors.pop("d2t", None), tensors.pop("t2d", None)
    config.draft_vocab_size = len(tensors.get("says.lm_head.weight", ()))
    places = torch.arange(config.draft_vocab_size)
    ids = places if shifts is None else (shifts + places if shifts.shape == places.shape else places[:0]).long()
    stated = getattr(config, "eagle_config", None)
    stated = stated.get("eagle_aux_hidden_state_layer_ids") if isinstance(stated, dict) else None
    # stated as SGLang does, by output
    layers = tuple(i + 1 for i in stated if type(i) is int) if isinstance(stated, list) else (2, n // 2, n - 3)
    is_rising = len(ids) > 0 and bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < target.vocab
    width = target.model.config.get_text_config().hidden_size
    with torch.device("meta"):
        embeds = None if "embeds.weight" in tensors else target.model.get_input_embeddings()
        model = Eagle3(config, width, embeds)
    here, there = ({name: [*t.shape] for name, t in of.items()} for of in (model.state_dict(), tensors))
    misfits = [
        f"{name}: {there.get(name, 'missing')} in its files, {here.get(name, 'not used')} for this model"
        for name in sorted(here | there)
        if here.get(name) != there.get(name)
    ]
    checks = {
        f"its vocabulary has {config.vocab_size:,} tokens, that of the model {target.vocab:,}": (
            target.vocab == config.vocab_size == (config.vocab_size if knows is None else len(knows))
        ),
        f"it has hidden size {config.hidden_size} and no embedding of its own; that of the model has {width}": (
            embeds is None or config.hidden_size == width
        ),
        f"it reads the layers {layers}, and the model has {n}": len(layers) == 3 and {*layers} <= {*range(n)},
        "the layers of the model are on two devices": not target.is_split,
        "d2t does not name rising token ids": is_rising,
    }
    if misfits := [*misfits, *(why for why, fits in checks.items() if not fits)]:
        raise BadModel(
            f"{about['id']} is an EAGLE-3 head that does not fit {target.info.id}",
            code="draft_head",
            lines=misfits[:6],
            try_=["the model that it was made for, after -m", "--spec ngram"],
        )
    model.load_state_dict({name: t.to(target.device, target.dtype) for name, t in tensors.items()}, assign=True)
    model.rotary, model.layers_read, model.words = llama.LlamaRotaryEmbedding(config), layers, ids.tolist()
    head = wrap_lm(model.to(target.device), device=target.device, **about)
    install_kernels(head)
    if DirectEagle.serves(head):
        head.direct_forward = DirectEagle(head)
    return capture_like(head, target)


def _ours(name: str) -> str:
    """Return the name here of a tensor of a checkpoint."""
    name = name.removeprefix("model.").replace("layers.0.", "midlayer.").replace("embed_tokens.", "embeds.")
    return f"says.{name}" if name.startswith(("norm.", "lm_head.")) else name
