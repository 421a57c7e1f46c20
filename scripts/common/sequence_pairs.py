"""Classification of pairs of sequences, each encoded alone: the head of LRA's Retrieval task.

    logits = head([a, b, a * b, a - b]),    a and b the pooled vectors of the two sequences

B batch, L length, d hidden size. Neither sequence sees the other before the head, so a sequence can be encoded once
and compared with many others.
"""

import torch
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from modeling_tnn.configuration_tnn import TnnConfig
from modeling_tnn.inputs import check_class_labels, check_tensor, require_tensor
from modeling_tnn.modeling_tnn import TnnClassificationHead, TnnModel, TnnPreTrainedModel
from modeling_tnn.padding import pool_tokens, real_tokens


class TnnForSequencePairClassification(TnnPreTrainedModel):
    """A TNN that encodes two sequences, and classifies or rates the pair."""

    # The loss is a mean over pairs: Trainer must divide it by the accumulation steps itself.
    accepts_loss_kwargs = False

    def __init__(self, config: TnnConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.loss_type = "ForSequenceClassification"
        self.model = TnnModel(config)
        self.classifier = TnnClassificationHead(config, 4 * config.hidden_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """The logits `(B, num_labels)`, and with `labels` the loss.

        Args:
            input_ids: `(B, 2, L)`, both sequences of each pair.
            attention_mask: `(B, 2, L)`, 0 at padding, on any side.
            labels: as for [`TnnForSequenceClassification`].

        Raises:
            TypeError, ValueError: the ids are not pairs, or the errors of [`TnnModel.forward`].
        """
        check_tensor("input_ids", input_ids, "(B, 2, L)", 3, (torch.int64, torch.int32))
        if input_ids.shape[1] != 2:
            shape = tuple(input_ids.shape)
            raise ValueError(f"`input_ids` must have shape (B, 2, L), both sequences of each pair, got {shape}")
        if attention_mask is not None:
            require_tensor("attention_mask", attention_mask, "(B, 2, L)")
            if attention_mask.shape != input_ids.shape:
                shape = tuple(input_ids.shape)
                raise ValueError(f"`attention_mask` must have shape {shape}, got {tuple(attention_mask.shape)}")
        flat_mask = None if attention_mask is None else attention_mask.flatten(0, 1)
        outputs = self.model(input_ids.flatten(0, 1), flat_mask, use_cache=False, return_dict=True, **kwargs)
        if flat_mask is None and self.config.causal:
            flat_mask = real_tokens(input_ids.flatten(0, 1), self.config.pad_token_id)
        pooled = pool_tokens(self.config.pooling, outputs.last_hidden_state, flat_mask)  # (2B, d)
        a, b = pooled.unflatten(0, (-1, 2)).unbind(dim=1)  # (B, d) each
        logits = self.classifier(torch.cat([a, b, a * b, a - b], dim=-1))
        loss = None
        if labels is not None:
            check_class_labels(labels, logits)
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)
