"""Classification of pairs of sequences, each encoded alone: the head of LRA's Retrieval task.

    logits = head([a, b, a * b, a - b]),    a and b the pooled vectors of the two sequences

B batch, L length, d hidden size. Neither sequence sees the other before the head, so a sequence can be encoded once
and compared with many others. The transformer that a TNN is compared with has the same head.
"""

import torch
from torch import nn
from transformers import ModernBertConfig, ModernBertModel, ModernBertPreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from ..configuration_tnn import TnnConfig
from ..inputs import IDS, check_class_labels, pool_tokens, require_tensor
from ..modeling_tnn import TnnClassificationHead, TnnModel, TnnPreTrainedClassifier


class SequencePairClassification:
    """Base class of the classifiers of pairs: the pass through `model` and `classifier`. A subclass pools (`pool`)."""

    reading = {}

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
        require_tensor("input_ids", input_ids, "(B, 2, L)", 3, IDS)
        if input_ids.shape[1] != 2:
            shape = tuple(input_ids.shape)
            raise ValueError(f"`input_ids` must have shape (B, 2, L), both sequences of each pair, got {shape}")
        ids, mask = input_ids.flatten(0, 1), None  # (2B, L)
        if attention_mask is not None:
            require_tensor("attention_mask", attention_mask, "(B, 2, L)", shapes=[input_ids.shape])
            mask = attention_mask.flatten(0, 1)
        outputs = self.model(ids, mask, return_dict=True, **self.reading, **kwargs)
        a, b = self.pool(ids, mask, outputs).unflatten(0, (-1, 2)).unbind(dim=1)  # (B, d) each
        logits, loss = self.classifier(torch.cat([a, b, a * b, a - b], dim=-1)), None
        if labels is not None:
            check_class_labels(labels, logits)
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class TnnForSequencePairClassification(SequencePairClassification, TnnPreTrainedClassifier):
    """A TNN that encodes two sequences, and classifies or rates the pair."""

    reading = {"use_cache": False}

    def __init__(self, config: TnnConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.loss_type = "ForSequenceClassification"
        self.model = TnnModel(config)
        self.classifier = TnnClassificationHead(config, 4 * config.hidden_size)
        self.post_init()


class ModernBertForSequencePairClassification(SequencePairClassification, ModernBertPreTrainedModel):
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

    def pool(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, outputs) -> torch.Tensor:
        return pool_tokens("mean", outputs.last_hidden_state, attention_mask)  # (2B, d)

    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, TnnClassificationHead):  # as that of a TNN starts
            module.dense.reset_parameters()
            module.out_proj.reset_parameters()
