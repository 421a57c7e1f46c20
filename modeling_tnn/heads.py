"""Heads for tagging, extractive question answering and multiple choice.

B sequences, L tokens, C labels or choices, d features.
"""

import torch
from torch import nn
from transformers.modeling_outputs import (
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    TokenClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from .configuration_tnn import TnnConfig
from .inputs import check_choices, check_class_labels, check_labels, check_spans
from .linear import apply_linear
from .modeling_tnn import TnnClassificationHead, TnnModel, TnnPreTrainedModel, head_dropout
from .packing import check_one_document
from .padding import pool_tokens, real_tokens


class TnnForTokenClassification(TnnPreTrainedModel):
    """A TNN with a linear head on each token, for tagging such as named entities.

    A causal model sees no token after the one it classifies. Rows may hold several documents, as those of a language
    model.
    """

    def __init__(self, config: TnnConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = TnnModel(config)
        self.dropout = head_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        """The logits `(B, L, num_labels)`, and with `labels` the mean cross-entropy.

        Args:
            labels: `(B, L)`, the class of each token; -100 is ignored.
            kwargs: `num_items_in_batch` is what the sum of the loss is divided by, instead of the number of labels.

        The other arguments and the errors are those of [`TnnModel.forward`].
        """
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs
        )
        logits = apply_linear(self.classifier, self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            check_labels(labels, logits, self.num_labels, limit="num_labels")
            count = kwargs.get("num_items_in_batch")
            loss = self.loss_function(logits, labels, self.config, num_items_in_batch=count)
        states = {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        return TokenClassifierOutput(loss=loss, logits=logits, **states)


class TnnForQuestionAnswering(TnnPreTrainedModel):
    """A TNN that finds the span of an answer in a text: a linear head gives each token two scores."""

    # The loss is a mean over sequences: Trainer must divide it by the accumulation steps itself.
    accepts_loss_kwargs = False

    def __init__(self, config: TnnConfig):
        super().__init__(config)
        self.model = TnnModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """The logits `(B, L)` of the first and of the last token of the answer, and with both positions the loss.

        At padding the logits are the lowest number of their dtype, so that neither the loss nor the answer depends
        on it.

        Args:
            start_positions: `(B,)`, the place of the first token of the answer; a place outside the text is ignored.
            end_positions: `(B,)`, the place of the last token of the answer.

        The other arguments and the errors are those of [`TnnModel.forward`]. Packed rows raise a ValueError.
        """
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs
        )
        check_one_document(tokens, attention_mask, **kwargs)
        logits = apply_linear(self.qa_outputs, outputs.last_hidden_state)  # (B, L, 2)
        if attention_mask is not None:
            hidden = attention_mask[:, -logits.shape[1] :, None].to(logits.device) == 0
            logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
        start_logits, end_logits = logits.unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            check_spans(start_positions, end_positions, start_logits)
            loss = self.loss_function(start_logits.float(), end_logits.float(), start_positions, end_positions)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits.contiguous(),
            end_logits=end_logits.contiguous(),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class TnnForMultipleChoice(TnnPreTrainedModel):
    """A TNN that chooses one of several texts: a classification head scores each text alone."""

    # The loss is a mean over sequences: Trainer must divide it by the accumulation steps itself.
    accepts_loss_kwargs = False

    def __init__(self, config: TnnConfig):
        super().__init__(config)
        self.model = TnnModel(config)
        self.classifier = TnnClassificationHead(config, num_labels=1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultipleChoiceModelOutput:
        """The logits `(B, C)` of C choices, and with `labels` the loss.

        Args:
            input_ids: `(B, C, L)`, or `inputs_embeds` `(B, C, L, d)`.
            attention_mask: `(B, C, L)`. Without a mask, a causal model uses the last token that is not
                `config.pad_token_id`.
            labels: `(B,)`, the right choices.

        The other arguments and the errors are those of [`TnnModel.forward`]. Packed rows raise a ValueError.
        """
        tokens, name = (inputs_embeds, "inputs_embeds") if input_ids is None else (input_ids, "input_ids")
        choices = check_choices(name, tokens, attention_mask)
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        given = {key: None if value is None else value.flatten(0, 1) for key, value in given.items()}
        outputs = self.model(**given, return_dict=True, **kwargs)
        mask = given["attention_mask"]
        check_one_document(tokens.flatten(0, 1), mask, **kwargs)
        if mask is None and self.config.causal:
            mask = real_tokens(given["input_ids"], self.config.pad_token_id)  # as in transformers
        pooled = pool_tokens(self.config.pooling, outputs.last_hidden_state, mask)  # (B * C, d)
        logits = self.classifier(pooled).view(-1, choices)
        loss = None
        if labels is not None:
            check_class_labels(labels, logits)
            loss = nn.functional.cross_entropy(logits.float(), labels.view(-1).to(logits.device))
        states = {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        return MultipleChoiceModelOutput(loss=loss, logits=logits, **states)


__all__ = ["TnnForMultipleChoice", "TnnForQuestionAnswering", "TnnForTokenClassification"]
