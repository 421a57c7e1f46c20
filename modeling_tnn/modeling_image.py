"""Classification of images: patches as tokens, mixed along rows and columns (the ImageNet models of the TNN paper).

    x = W_patch patch,    x = blocks(x),    logits = W_head norm(mean(x))

B batch, C channels, H and W sides in pixels, P patch size, S = H/P tokens on a side, L = S^2 tokens, d hidden size. No
position embedding: the operators know distances. Any square size goes, whatever the model was trained on.
"""

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, ImageClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .blocks import TnnBlock
from .configuration_tnn import TnnConfig
from .inputs import check_class_labels, check_keywords
from .modeling_tnn import TnnPreTrainedModel
from .norms import build_norm


class TnnPatchEmbedding(nn.Module):
    """One linear map of every patch."""

    def __init__(self, config: TnnConfig):
        super().__init__()
        self.channels, self.size = config.num_channels, config.patch_size
        self.projection = nn.Conv2d(self.channels, config.hidden_size, self.size, stride=self.size)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """`(B, C, H, W)` to `(B, L, d)`, row by row.

        Raises:
            ValueError: the image is not square, has a side that is no multiple of P, or another number of channels.
        """
        if not isinstance(pixel_values, torch.Tensor):
            raise TypeError(f"pixel_values must be a tensor, not {type(pixel_values).__name__}.")
        if pixel_values.is_complex():
            raise TypeError(f"pixel_values must hold real numbers, not {pixel_values.dtype}.")
        shape = tuple(pixel_values.shape)
        fits = len(shape) == 4 and shape[1] == self.channels and shape[2] == shape[3] and shape[2] % self.size == 0
        if not fits or shape[2] == 0:
            raise ValueError(
                f"pixel_values must have shape (B, {self.channels}, side, side), the side a multiple of "
                f"patch_size={self.size}, not {shape}."
            )
        weight = self.projection.weight
        # The weights of an offloaded model are there while they are used, by a hook of accelerate.
        if pixel_values.is_meta != weight.is_meta and not hasattr(self.projection, "_hf_hook"):
            raise ValueError(f"pixel_values is on the device {pixel_values.device}, the model on {weight.device}.")
        return self.projection(pixel_values.to(weight.dtype)).flatten(2).transpose(1, 2)


class TnnImageModel(TnnPreTrainedModel):
    """The stack of blocks between pixels and hidden states."""

    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _input_embed_layer = "patch_embedding"

    def __init__(self, config: TnnConfig):
        super().__init__(config)
        self.patch_embedding = TnnPatchEmbedding(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.layers = nn.ModuleList([TnnBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers)])
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(self, pixel_values: torch.Tensor, **kwargs: Unpack[TransformersKwargs]) -> BaseModelOutput:
        """Hidden states of the last layer, `(B, L, d)`, for `pixel_values` `(B, C, H, W)`."""
        hidden_states = self.dropout(self.patch_embedding(pixel_values))
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return BaseModelOutput(last_hidden_state=hidden_states)


class TnnForImageClassification(TnnPreTrainedModel):
    """A TNN over the patches of an image with a linear head on the norm of their mean.

    Raises:
        ValueError: the configuration is causal, or its number of positions is not that of its patches.
    """

    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _input_embed_layer = "patch_embedding"
    # The loss is a mean over images: Trainer must divide it by the accumulation steps itself.
    accepts_loss_kwargs = False

    def __init__(self, config: TnnConfig):
        _check_patches(config)
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = TnnImageModel(config)
        self.norm = build_norm(config.norm_type, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """Logits `(B, num_labels)`.

        Args:
            pixel_values: `(B, C, H, W)`, what an image processor gives.
            labels: `(B,)` classes or values, or `(B, num_labels)` for several labels at once; the loss follows
                `config.problem_type` as everywhere in transformers.

        Raises:
            ValueError: there are no pixels, or they have another shape.
        """
        if pixel_values is None:
            raise ValueError("pixel_values must be given.")
        check_keywords(kwargs)
        outputs = self.model(pixel_values, return_dict=True, **kwargs)
        pooled = outputs.last_hidden_state.mean(dim=1)  # (B, d)
        logits = self.classifier(self.norm(pooled[:, None])[:, 0])
        loss = None
        if labels is not None:
            check_class_labels(labels, logits)
            loss = self.loss_function(labels, logits, self.config)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


def _check_patches(config: TnnConfig):
    if config.causal:
        raise ValueError("causal=True is not possible: TnnForImageClassification needs causal=False.")
    side = config.image_size // config.patch_size
    if config.image_size % config.patch_size or side**2 != config.max_position_embeddings:
        raise ValueError(
            f"max_position_embeddings={config.max_position_embeddings} is not possible: it must be the number of "
            f"patches, (image_size / patch_size)^2 with image_size={config.image_size} a multiple of "
            f"patch_size={config.patch_size}."
        )


__all__ = ["TnnForImageClassification", "TnnImageModel"]
