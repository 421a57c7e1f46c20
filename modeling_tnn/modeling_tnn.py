"""Toeplitz neural networks: the base model and its heads, on the blocks of `blocks.py`.

B batch, L length, d hidden size. Names, outputs and losses are those of transformers.
"""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutputWithPast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .blocks import TnnBlock, build_final_norm
from .cache_tnn import check_cache
from .checkpoint import check_before_loading
from .configuration_tnn import TnnConfig
from .conversion import LayerReport, convert
from .documents import check_one_document, find_documents, forward_documents
from .heads import TnnClassificationHead, TnnPredictionHeadTransform, check_pooled_whole, pool_tokens
from .inputs import (
    can_be_read,
    check_attention_mask,
    check_class_labels,
    check_keywords,
    check_labels,
    check_logits_to_keep,
    check_prompt,
    check_tokens,
    real_tokens,
    require_tensor,
)
from .norms import GatedRMSNorm, LayerNorm, ScaleRMSNorm, with_mask
from .positions import sinusoidal_embedding, token_positions
from .tno import ToeplitzOperator


class TnnPreTrainedModel(PreTrainedModel):
    """What all TNN models share: configuration class, initialisation, abilities."""

    config_class = TnnConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TnnBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _can_record_outputs = {"hidden_states": TnnBlock}
    # What makes the kernels: not for float16, and not for quantizers, which go by this list. Patterns, from the start.
    _keep_in_fp32_modules = [r".+\.gtu\.tno"]

    def __init__(self, config: TnnConfig):
        config.check()
        super().__init__(config)
        # The poles of a modal kernel: in bfloat16 their angles lose the phase within a few lags.
        self._keep_in_fp32_modules_strict = ["log_rate", "angle"] if config.tno_type == "modal" else []

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, use_safetensors: bool = True, **kwargs):
        """As in transformers, with two precautions against checkpoints from anywhere.

        Weights are read from safetensors alone, unless `use_safetensors` is given: no pickle. Sizes that the
        configuration declares are compared with those of the weights before anything is allocated.

        Raises:
            CheckpointMismatchError: the configuration does not fit the weights.
        """
        if use_safetensors:
            check_before_loading(cls, pretrained_model_name_or_path, kwargs)
        return super().from_pretrained(
            pretrained_model_name_or_path, *model_args, use_safetensors=use_safetensors, **kwargs
        )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if self.config.initializer == "normal_gtu" and getattr(module, "is_gtu_projection", False):
            init.normal_(module.weight, std=self.config.initializer_range)
            init.normal_(module.bias, std=self.config.initializer_range)
        elif self.config.initializer != "normal" and isinstance(module, (nn.Linear, nn.Conv2d)):
            module.reset_parameters()
        if self.config.initializer != "normal" and isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.hidden_size**-0.5)
        if module is getattr(self, "lm_head", None) and module.bias is not None:
            init.zeros_(module.bias)
        if isinstance(module, GatedRMSNorm):
            init.ones_(module.gate)
        if isinstance(module, ScaleRMSNorm):
            init.ones_(module.weight)
        if isinstance(module, ToeplitzOperator):
            module.reset_parameters()

    def to_recurrent(
        self, order: int = 64, window: int = 16, tolerance: float | None = None
    ) -> tuple["TnnPreTrainedModel", list[LayerReport]]:
        """A copy of a causal model whose kernels are recurrences of low order (`tno_type="modal"`).

        Its state does not depend on the length of the text, nor does its cost per token. An RTF model is a
        recurrence already: it is returned as it is.

        Args:
            order: real states per channel.
            window: first taps of each kernel that are kept exactly.
            tolerance: instead of `order`: each layer takes the smallest of 8, 16, 32, 64 and 128 whose kernel has a
                relative l2 error within this number.

        Returns:
            The model, and what `conversion.LayerReport` says of each layer (nothing for RTF).

        Raises:
            ValueError: the model is bidirectional, or the tolerance cannot be met.
        """
        return convert(self, order, window, tolerance)


class TnnModel(TnnPreTrainedModel):
    """The stack of blocks between token ids and hidden states, causal or bidirectional by its configuration."""

    def __init__(self, config: TnnConfig):
        super().__init__(config)
        # No padding_idx: behind a row of zeros the gradient of an RMS norm is 1e8 times too large.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        eps = config.layer_norm_eps
        self.embed_norm = LayerNorm(config.hidden_size, eps=eps) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.layers = nn.ModuleList([TnnBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers)])
        self.norm = build_final_norm(config)
        self.embedding_scale = config.hidden_size**0.5 if config.scale_embedding else 1.0
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        position_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Hidden states of the last layer, `(B, L, d)`.

        Args:
            input_ids: `(B, L)` token ids.
            attention_mask: `(B, past + L)`, 0 at padding, on any side; absent means that all tokens are real.
            past_key_values: what a causal model returned for the tokens before these.
            inputs_embeds: `(B, L, d)` instead of `input_ids`, before `scale_embedding`.
            use_cache: whether to return `past_key_values` (causal models only).
            position_ids: `(B, L)`; where they are 0 again within a row, another document begins, which neither sees
                the ones before nor is seen by them. So do `seq_idx` and `cu_seq_lens_q`, see `documents.py`.

        Raises:
            TypeError: an argument is no tensor, holds other numbers, or is none of this model.
            ValueError: both or none of `input_ids` and `inputs_embeds`, an empty sequence, ids outside the
                vocabulary (looked for on CPU only: elsewhere the search would stall the device), a mask of another
                shape, several documents in a row together with a cache, or a cache of a bidirectional model.
        """
        check_keywords(kwargs)
        if not isinstance(use_cache, bool | None):
            raise TypeError(f"use_cache must be True, False or None, not {use_cache!r}.")
        check_tokens(input_ids, inputs_embeds, self.embed_tokens)
        if attention_mask is not None:
            require_tensor("attention_mask", attention_mask, "(B, past + L)")
        tokens = inputs_embeds if input_ids is None else input_ids
        offsets = kwargs.get("cu_seq_lens_q")
        documents = find_documents(tokens, attention_mask, position_ids, kwargs.get("seq_idx"), offsets)
        if documents is None:
            kwargs |= {"inputs_embeds": inputs_embeds, "past_key_values": past_key_values, "use_cache": use_cache}
            return self._forward(input_ids, attention_mask, return_dict=True, **kwargs)
        if self.config.causal and (use_cache or past_key_values is not None):
            raise ValueError(
                "A row holds several documents (by its position_ids, seq_idx or cu_seq_lens_q), but a cache continues "
                "one text: leave out past_key_values and use_cache, or pad instead of packing."
            )
        return forward_documents(self._forward, documents, input_ids, attention_mask, inputs_embeds, **kwargs)

    @merge_with_config_defaults
    @capture_outputs
    def _forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """One text a row."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if not self.config.causal:
            if past_key_values is not None:
                raise ValueError("past_key_values is for causal models, and this one has causal=False.")
        elif use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None:
            check_cache(past_key_values, self)
        past_length = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        whole_mask = attention_mask
        attention_mask = check_attention_mask(attention_mask, inputs_embeds, past_length)
        if whole_mask is None and past_length == 0 and input_ids is not None and can_be_read(input_ids):
            self.warn_if_padding_and_no_attention_mask(input_ids, None)
        if attention_mask is not None:
            # NaN at padding would reach gradients: 0 * NaN is NaN. Finite rows stay: behind a row of zeros the
            # gradient of an RMS norm is 1e8 times too large.
            inputs_embeds = inputs_embeds.masked_fill(~(attention_mask[..., None] | inputs_embeds.isfinite()), 0)

        hidden_states = inputs_embeds * self.embedding_scale
        if self.config.position_embedding == "sinusoidal":
            positions = token_positions(whole_mask, past_length, inputs_embeds)
            hidden_states = hidden_states + sinusoidal_embedding(
                positions, self.config.hidden_size, hidden_states.dtype
            )
        hidden_states = self.dropout(self.embed_norm(hidden_states))
        for layer in self.layers[: self.config.num_hidden_layers]:
            hidden_states = layer(hidden_states, attention_mask=attention_mask, past_key_values=past_key_values)
        return BaseModelOutputWithPast(
            last_hidden_state=with_mask(self.norm, attention_mask)(hidden_states),
            past_key_values=past_key_values if use_cache else None,
        )


class TnnForCausalLM(TnnPreTrainedModel, GenerationMixin):
    """A causal TNN with a language modelling head, as in the WikiText-103 experiments of the TNN paper.

    Raises:
        ValueError: `config.causal` is `False`.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: TnnConfig):
        _check_direction(self, config, causal=True)
        super().__init__(config)
        self.model = TnnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @staticmethod
    def create_masks_for_generate(config, inputs_embeds, attention_mask, past_key_values=None, **kwargs):
        """The padding mask as it is: a Toeplitz model has no attention pattern to prepare."""
        return attention_mask

    def generate(self, inputs: torch.LongTensor | None = None, *args, **kwargs):
        """As in transformers, after a check of the tokens; a batch without rows is returned as it is.

        Raises:
            TypeError, ValueError: those of [`TnnModel.forward`].
        """
        input_ids = kwargs.get("input_ids") if inputs is None else inputs
        inputs_embeds = kwargs.get("inputs_embeds")
        check_prompt(input_ids, inputs_embeds, kwargs.get("attention_mask"), self.get_input_embeddings())
        if input_ids is not None and len(input_ids) == 0:
            return input_ids
        # An assistant that exits early lowers it, and an error there leaves it so.
        layers = self.config.num_hidden_layers
        try:
            return super().generate(inputs, *args, **kwargs)
        finally:
            self.config.num_hidden_layers = layers

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        position_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Logits `(B, L, vocab_size)` of the next tokens.

        Args:
            labels: `(B, L)`, usually the `input_ids`; shifted inside; -100 is not counted.
            logits_to_keep: how many of the last positions (0: all), or which positions, get logits.
            shift_labels: `(B, L)`, the token after each position. They take the place of `labels`; a trainer that
                splits sequences over devices gives them.
            ignore_index: the label that is not counted, if not -100.

        The other arguments and the errors are those of [`TnnModel.forward`].

        Raises:
            TypeError: `labels` or `logits_to_keep` of another type.
            ValueError: `labels` of another shape, or together with `logits_to_keep`.
        """
        loss_options = take_options(kwargs, "shift_labels", "ignore_index")
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            position_ids=position_ids,
            return_dict=True,
            **kwargs,
        )
        check_logits_to_keep(logits_to_keep, outputs.last_hidden_state.shape[1], labels)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = language_model_loss(self, logits, labels, **loss_options | kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )


class TnnForMaskedLM(TnnPreTrainedModel):
    """A bidirectional TNN with a masked language modelling head.

    Raises:
        ValueError: `config.causal` is `True`.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: TnnConfig):
        _check_direction(self, config, causal=False)
        super().__init__(config)
        self.model = TnnModel(config)
        self.transform = TnnPredictionHeadTransform(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """Logits `(B, L, vocab_size)` of the tokens themselves.

        Args:
            labels: `(B, L)`, the tokens to predict; -100 is not counted.
            ignore_index: the label that is not counted, if not -100.

        The other arguments and the errors are those of [`TnnModel.forward`].
        """
        loss_options = take_options(kwargs, "ignore_index")
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(self.transform(outputs.last_hidden_state))
        loss = language_model_loss(self, logits, labels, **loss_options | kwargs)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class TnnForSequenceClassification(TnnPreTrainedModel):
    """A TNN with a classification or regression head on the mean of its real tokens (bidirectional) or on the
    last one of them (causal), unless `config.classifier_pooling` says which."""

    # The loss is a mean over sequences: Trainer must divide it by the accumulation steps itself.
    accepts_loss_kwargs = False

    def __init__(self, config: TnnConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = TnnModel(config)
        self.classifier = TnnClassificationHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutputWithPast:
        """Logits `(B, num_labels)`.

        Args:
            attention_mask: as for [`TnnModel.forward`]. Without one, a causal model answers from the last token that
                is not `config.pad_token_id`, as the models of transformers do.
            labels: `(B,)` classes or values, or `(B, num_labels)` for several labels at once; the loss follows
                `config.problem_type` as everywhere in transformers.

        The other arguments and the errors are those of [`TnnModel.forward`]; a cache that holds tokens is refused
        where the mean is read.
        """
        check_pooled_whole(self.config, past_key_values)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        check_one_document(input_ids if inputs_embeds is None else inputs_embeds, attention_mask, **kwargs)
        if attention_mask is None and self.config.causal:
            attention_mask = real_tokens(input_ids, self.config.pad_token_id)  # as in transformers
        logits = self.classifier(pool_tokens(self.config, outputs.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            check_class_labels(labels, logits)
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )


def take_options(keywords: dict, *names: str) -> dict:
    """Move the keyword arguments with these names out of `keywords`."""
    return {name: keywords.pop(name) for name in names if name in keywords}


def language_model_loss(
    model: TnnPreTrainedModel,
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None = None,
    ignore_index: int = -100,
    **kwargs,
) -> torch.Tensor | None:
    """The loss of `logits` `(B, L, V)`; None without labels."""
    for name, given in (("labels", labels), ("shift_labels", shift_labels)):
        if given is not None:
            check_labels(given, logits, name, ignore_index)
    if labels is None and shift_labels is None:
        return None
    shifted = {} if shift_labels is None else {"shift_labels": shift_labels}
    return model.loss_function(
        logits=logits, labels=labels, vocab_size=logits.shape[2], ignore_index=ignore_index, **shifted, **kwargs
    )


def _check_direction(model: PreTrainedModel, config: TnnConfig, causal: bool):
    if config.causal != causal:
        why = "it predicts from what comes before" if causal else "it predicts from both sides"
        raise ValueError(
            f"causal={config.causal} is not possible: {type(model).__name__} needs causal={causal}, since {why}. "
            f"A model with causal={config.causal} is for {'TnnForMaskedLM' if causal else 'TnnForCausalLM'}."
        )


# By this list of names Trainer's label smoothing knows whose labels are to be shifted.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TnnConfig.model_type] = TnnForCausalLM.__name__

__all__ = [
    "TnnForCausalLM",
    "TnnForMaskedLM",
    "TnnForSequenceClassification",
    "TnnModel",
    "TnnPreTrainedModel",
]
