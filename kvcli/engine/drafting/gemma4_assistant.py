"""Gemma 4 assistant: a small draft model that comes with Gemma 4 and stores no KV. A row is a token, embedded by the
target model, and the hidden state of the token before it.

Its layers compute queries only and read the slots of the target model's last layer of the same kind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from kvcli.engine.hf.cache_shim import target_hidden_states
from kvcli.engine.hf.lm import LM
from kvcli.engine.hf.model_probe import quiet
from kvcli.engine.loading import weights
from kvcli.engine.loading.open_lm import capture_like, wrap_lm
from kvcli.errors import BadModel
from kvcli.models.checkpoint import CheckpointFormat
from kvcli.models.family import read_config
from kvcli.models.refusals import refuse_quant
from kvcli.models.source import Source
from kvcli.settings.schema import Load


class Output(nn.Module):
    """The output layer. It also gets the hidden state that the next draft token continues from, so that this state can
    be recorded."""

    def __init__(self, assistant: Any) -> None:
        super().__init__()
        self.table, self.masked = assistant.lm_head, assistant.masked_embedding
        self.weight = self.table.weight

    def forward(self, _: Tensor, x: Tensor) -> Tensor:
        """Return logits [1, n, V]."""
        logits: Tensor = self.table(x) if self.masked is None else self.masked(x, self.table.weight)
        return logits


class Assistant(PreTrainedModel):  # type: ignore[misc]
    """The assistant as a model, made of transformers' layers and projections."""

    _supports_sdpa = True

    def __init__(self, assistant: Any, embeds: nn.Module) -> None:
        """`embeds`: the embedding table, which belongs to the target model."""
        super().__init__(assistant.config)
        self.it, self.says = assistant, Output(assistant)
        self.__dict__["embeds"] = embeds  # not a submodule: neither moved nor counted with it

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    def get_output_embeddings(self) -> Any:
        return self.says

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        cache: Any = None,
        logits_to_keep: Tensor | None = None,
        use_cache: bool = False,
    ) -> CausalLMOutput:
        """Run the assistant: input_ids, position_ids [1, N] -> logits [1, n, V]. The pass supplies hidden states [N,
        E]."""
        embedded = self.embeds(input_ids).to(self.dtype)  # [1, N, E]
        before = target_hidden_states(embedded)
        text = self.config.get_text_config()
        nothing = {kind: self._nothing(embedded, of) for kind, of in _kinds(text).items()}
        x = self.it.model(
            inputs_embeds=self.it.pre_projection(torch.cat([embedded, before], -1)),
            position_ids=position_ids,
            attention_mask=dict.fromkeys(nothing),  # no mask: attention reads the KV cache
            shared_kv_states=nothing,
            use_cache=False,
        ).last_hidden_state
        x = x if logits_to_keep is None else x[:, logits_to_keep]
        return CausalLMOutput(logits=self.says(self.it.post_projection(x), x))

    @staticmethod
    def _nothing(like: Tensor, of: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return placeholder keys and values [1, K, N, D], because the rows have none."""
        none = like.new_zeros(1, of[0], like.shape[1], of[1])
        return none, none


def _kinds(text: Any) -> dict[str, tuple[int, int]]:
    """Return the KV heads and the head size, by kind of layer."""
    each = zip(text.layer_types, text.per_layer_config, strict=False)
    return {kind: (of.num_key_value_heads, of.head_dim) for kind, of in each}


def kv_source_layers(target: LM, head: LM) -> list[int]:
    """Return, for each layer of `head`, the layer of `target` whose slots it reads: the last one of the same kind that
    stores KV."""
    last = {target.windows[layer] is not None: layer for layer in target.storing}
    return [last[window is not None] for window in head.windows]


def load_assistant(target: LM, source: Source, wants: Load) -> LM:
    """Load an assistant on the device of `target`. Raises BadModel if it was made for another model."""
    packing = CheckpointFormat.of(source.config)
    refuse_quant(source.id, wants.quant, target.device.type, is_quantized=packing.stays(target.device.type))
    with quiet():
        config = read_config(source, trust_remote_code=False)
        _refuse_misfit(target, config, source.id)
        model, notes = weights.load_weights(source, config, wants.dtype, target.device, False, wants.quant)
        # moved before the first probe, because the embedding table is on that device
        if model.device.type != target.device.type:
            model.to(target.device)
        return wrap_layers(target, model, id=source.id, path=str(source.path), quant=wants.quant, notes=notes)


def wrap_layers(target: LM, assistant: Any, **about: Any) -> LM:
    """Wrap an assistant that is built already. `about`: as in `wrap_lm`. Raises BadModel if it was made for another
    model."""
    name = about.setdefault("id", "assistant")
    _refuse_misfit(target, assistant.config, name)
    head = Assistant(assistant, target.model.get_input_embeddings())
    return capture_like(wrap_lm(head, device=target.device, **about), target)


def _refuse_misfit(target: LM, config: Any, name: str) -> None:
    """Raise BadModel if the assistant cannot read the KV of `target`."""
    if target.is_split:
        raise BadModel(
            f"{name} cannot read the KV cache of {target.info.id}: its layers are on two devices",
            code="draft_head",
            try_=["--quant int4", "--spec ngram"],
        )
    text, its = config.get_text_config(), target.model.config.get_text_config()
    wanted = {
        "model_type": (text.model_type, its.model_type),
        "backbone_hidden_size": (config.backbone_hidden_size, its.hidden_size),
        "vocab_size": (text.vocab_size, target.vocab),
        "sliding_window": (text.sliding_window, getattr(its, "sliding_window", None)),
    }
    stored = {target.windows[layer] is not None: target.shapes[layer] for layer in target.storing}
    for kind, (heads, size) in _kinds(text).items():
        of = stored.get(kind == "sliding_attention")
        wanted[f"KV heads of {kind}, and head size"] = ((heads, size), of and (of.n_kv_heads, of.k_dim))
    if misfits := [f"{what}: {a} here, {b} there" for what, (a, b) in wanted.items() if a != b]:
        raise BadModel(
            f"{name} drafts only for the Gemma 4 that it was made for, not for {target.info.id}",
            code="draft_head",
            lines=misfits,
            try_=[
                "--draft MODEL, a small model of the same family: kvcli models show MODEL lists them",
                "--spec ngram",
            ],
        )
