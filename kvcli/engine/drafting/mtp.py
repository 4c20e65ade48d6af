"""Multi-token prediction layers of a model (arXiv 2404.19737) as a draft model of one layer. A row is a token and the
hidden state of the token before it.

Layer, projection and norms are transformers' `MtpModel`. Embedding, rotary table and output layer are shared with the
target model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.modeling_outputs import CausalLMOutput

from kvcli.engine.hf.cache_shim import target_hidden_states
from kvcli.engine.hf.lm import LM
from kvcli.engine.hf.model_probe import quiet
from kvcli.engine.loading.open_lm import capture_like, wrap_lm
from kvcli.errors import BadModel
from kvcli.kv.out_of_memory import CacheFull, as_cache_full
from kvcli.models.refusals import blame_files


class Mtp(PreTrainedModel):  # type: ignore[misc]
    """The first MTP layer alone, because each further layer would need the one before it to have run the same rows."""

    _supports_sdpa = True

    def __init__(self, layers: MtpModel) -> None:
        layers.layers = layers.layers[:1]
        layers.config.num_hidden_layers = 1
        super().__init__(layers.config)
        self.mtp = layers

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def get_output_embeddings(self) -> Any:
        return self.mtp.shared_head

    def get_input_embeddings(self) -> Any:
        return self.mtp.embed_tokens

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        cache: Any = None,
        logits_to_keep: Tensor | None = None,
        use_cache: bool = False,
    ) -> CausalLMOutput:
        """Run the layer: input_ids, position_ids [1, N] -> logits [1, n, V]. The pass supplies hidden states [N, E]."""
        embedded = self.mtp.embed_tokens(input_ids)  # [1, N, E]
        before = target_hidden_states(embedded)
        x = self.mtp.forward_layer(0, before, position_ids, cache, inputs_embeds=embedded)
        return CausalLMOutput(logits=self.mtp._project_to_logits(x if logits_to_keep is None else x[:, logits_to_keep]))


def mtp_of(lm: LM) -> LM:
    """Return the MTP layers in the files of this model, loaded once. Raises BadModel if there are none that can be
    used, CacheFull if memory is too small."""
    if Mtp not in lm.remembers:
        config = lm.model.config.get_text_config()
        with quiet(), blame_files(lambda said: _refusal(lm, said)):
            _name_layers(config)
            try:
                lm.remembers[Mtp] = wrap_layers(lm, MtpModel.from_pretrained(lm.model, device_map={"": lm.device}))
            except Exception as error:
                if (lack := as_cache_full(error)) is None:
                    raise
                why = f"not enough memory for the MTP layers of {lm.info.id}"
                raise CacheFull(why, lines=lack.lines, try_=["--spec ngram", f"kvcli fit {lm.info.id}"]) from None
    found: LM = lm.remembers[Mtp]
    return found


def wrap_layers(lm: LM, layers: MtpModel) -> LM:
    """Wrap layers that are built already. Raises BadModel if their attention is not supported."""
    name, info = f"{lm.info.id} (MTP)", lm.info
    return capture_like(wrap_lm(Mtp(layers), id=name, path=info.path, revision=info.revision), lm)


def _name_layers(config: Any) -> None:
    """Set transformers' config keys for the MTP layers of Qwen3.5 and Qwen3-Next, whose count has another name there.
    The layers use full attention, like the last layer of the model, and their files are named like those of known
    families."""
    n = getattr(config, "mtp_num_hidden_layers", None)
    if n and getattr(config, "num_mtp_layers", None) is None:
        config.num_mtp_layers, config.mtp_layer_types = n, ["full_attention"] * n


def _refusal(lm: LM, said: str) -> BadModel:
    return BadModel(
        f"the MTP layers of {lm.info.id} cannot be used",
        code="no_draft_head",
        lines=[said, "quantized copies of a model may lack them, or store them in another format"],
        try_=[f"kvcli models show {lm.info.id}", "--draft auto", "--spec ngram"],
    )
