"""Multi-token prediction layers of a model (arXiv 2404.19737) as a draft model of one layer. A row is a token and the
hidden state of the token before it.

Layer, projection and norms are transformers' `MtpModel`. Embedding, rotary table and output layer are shared with the
target model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, modeling_layers
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_outputs import CausalLMOutput

from kvcli.engine.hf.cache_shim import target_hidden_states
from kvcli.engine.hf.lm import LM
from kvcli.engine.hf.model_probe import quiet
from kvcli.engine.loading.open_lm import capture_like, wrap_lm
from kvcli.engine.resources import drop_pages
from kvcli.errors import BadModel
from kvcli.kv.out_of_memory import CacheFull, as_cache_full
from kvcli.models.gguf import convert
from kvcli.models.refusals import blame_files


class Mtp(PreTrainedModel):  # type: ignore[misc]
    """The first MTP layer alone, because each further layer would need the one before it to have run the same rows."""

    _supports_sdpa = True

    def __init__(self, layers: modeling_layers.MtpModel) -> None:
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


class MtpModel(modeling_layers.MtpModel):  # type: ignore[misc]  # Any to mypy, as all of transformers
    """MTP layers with the weights of a GGUF file quantized as there."""

    _keys_to_ignore_on_load_missing = (r"^shared_head\.", r"^embed_tokens\.")  # the model's, which may be quantized

    def __init__(self, model: PreTrainedModel, n: int) -> None:
        super().__init__(model, n)
        stated, names = getattr(model.config, "quantization_config", None), self.state_dict()
        changes = self.get_weight_conversions(model)
        each = [[c for c in changes if isinstance(c, kind)] for kind in (WeightRenaming, WeightConverter)]
        here = {
            rename_source_key(name, *each, self.base_model_prefix, names)[0]: how
            for name, how in convert.kept_in(model.config, stated, of_mtp=True).items()
        }
        self.quantized = {name: how for name, how in here.items() if name in names}  # no head or embedding of its own
        convert.expect_(self, self.quantized)

    def is_custom_code(self) -> bool:
        """Return False, for transformers finds the names of the tensors by those of its own classes."""
        return False

    @classmethod
    def loaded(cls, lm: LM) -> MtpModel:
        """Return the layers in the files of a model, on its device."""
        found: MtpModel = cls.from_pretrained(lm.model, device_map={"": lm.device})
        convert.attach_(found, found.quantized, lm.device, drop_pages)
        return found


def mtp_of(lm: LM) -> LM:
    """Return the MTP layers in the files of this model, loaded once. Raises BadModel if there are none that can be
    used, CacheFull if memory is too small."""
    if Mtp not in lm.remembers:
        config = lm.model.config.get_text_config()
        with quiet(), blame_files(lambda said: _refusal(lm, said)):
            _name_layers(config)
            try:
                lm.remembers[Mtp] = wrap_layers(lm, MtpModel.loaded(lm))
            except Exception as error:
                if (lack := as_cache_full(error)) is None:
                    raise
                why = f"not enough memory for the MTP layers of {lm.info.id}"
                raise CacheFull(why, lines=lack.lines, try_=["--spec ngram", f"kvcli fit {lm.info.id}"]) from None
    found: LM = lm.remembers[Mtp]
    return found


def wrap_layers(lm: LM, layers: modeling_layers.MtpModel) -> LM:
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
