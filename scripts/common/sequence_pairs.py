"""Classification of pairs of sequences, each encoded alone: the head of LRA's Retrieval task.

    logits = head([a, b, a * b, a - b]),    a and b the pooled vectors of the two sequences

B batch, L length, d hidden size. Neither sequence sees the other before the head, so a sequence can be encoded once
and compared with many others. The transformer that a TNN is compared with has the same head.
"""

import torch
from torch import nn
from transformers import ModernBertConfig, ModernBertModel, ModernBertPreTrainedModel, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from modeling_tnn.configuration_tnn import TnnConfig
from modeling_tnn.inputs import IDS, check_class_labels, pool_tokens, require_tensor
from modeling_tnn.modeling_tnn import TnnClassificationHead, TnnModel, TnnPreTrainedClassifier


class TnnForSequencePairClassification(TnnPreTrainedClassifier):
    """A TNN that encodes two sequences, and classifies or rates the pair."""

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
        ids, mask = flat_pairs(input_ids, attention_mask)
        outputs = self.model(ids, mask, use_cache=False, return_dict=True, **kwargs)
        return scores_of_pairs(self, self.pool(ids, mask, outputs), labels, outputs.hidden_states)


class ModernBertForSequencePairClassification(ModernBertPreTrainedModel):
    """A ModernBERT that encodes two sequences, each as the mean of its tokens, and classifies the pair."""

    accepts_loss_kwargs = False  # the loss is a mean over pairs

    def __init__(self, config: ModernBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.loss_type = "ForSequenceClassification"
        self.model = ModernBertModel(config)
        fields = {name: getattr(config, name) for name in ("hidden_size", "num_labels", "classifier_dropout")}
        self.classifier = TnnClassificationHead(TnnConfig(**fields), 4 * config.hidden_size)
        self.post_init()

    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, TnnClassificationHead):  # as that of a TNN starts
            module.dense.reset_parameters()
            module.out_proj.reset_parameters()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """As that of [`TnnForSequencePairClassification`]."""
        ids, mask = flat_pairs(input_ids, attention_mask)
        outputs = self.model(ids, mask, return_dict=True, **kwargs)
        pooled = pool_tokens("mean", outputs.last_hidden_state, mask)  # (2B, d)
        return scores_of_pairs(self, pooled, labels, outputs.hidden_states)


def flat_pairs(
    input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sequences of all pairs and their mask, `(B, 2, L)` to `(2B, L)`.

    Raises:
        TypeError, ValueError: the ids are not pairs, or the mask has another shape.
    """
    require_tensor("input_ids", input_ids, "(B, 2, L)", 3, IDS)
    if input_ids.shape[1] != 2:
        shape = tuple(input_ids.shape)
        raise ValueError(f"`input_ids` must have shape (B, 2, L), both sequences of each pair, got {shape}")
    if attention_mask is None:
        return input_ids.flatten(0, 1), None
    require_tensor("attention_mask", attention_mask, "(B, 2, L)", shapes=[input_ids.shape])
    return input_ids.flatten(0, 1), attention_mask.flatten(0, 1)


def scores_of_pairs(
    model: PreTrainedModel, pooled: torch.Tensor, labels: torch.Tensor | None, hidden_states: tuple | None
) -> SequenceClassifierOutput:
    """The logits of pairs from their pooled vectors `(2B, d)`, by `model.classifier`, and with labels the loss."""
    a, b = pooled.unflatten(0, (-1, 2)).unbind(dim=1)  # (B, d) each
    logits = model.classifier(torch.cat([a, b, a * b, a - b], dim=-1))
    loss = None
    if labels is not None:
        check_class_labels(labels, logits)
        loss = model.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=model.config)
    return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=hidden_states)
