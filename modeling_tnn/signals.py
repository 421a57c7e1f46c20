"""Real-valued input, signals and time series: the embedding, scaling and losses where values may be missing.

    embedding:  x = W [values, observed] + b,    with 0 for a missing value, and observed in {0, 1}
    scaling:    (values - loc) / scale,          loc the mean and scale the deviation of a channel's observed values
    loss:       mean of (predictions - (future values - loc) / scale)^2

With values c times as large, loc, scale and forecasts are c times as large, and the loss is the same.

B batch, L length, C channels, d hidden size, H prediction length. A value that is not finite, such as NaN, is missing.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import ModelOutput
from transformers.utils.generic import maybe_autocast

from .inputs import FLOATS, check_attention_mask, require_tensor
from .numerics import compute_dtype, parameter_dtype
from .position_encoder import CastingLinear

# Roundings of the largest value of a channel. With a deviation of less, the channel is taken to be constant.
ROUNDINGS = 64


@dataclass
class TimeSeriesPredictionOutput(ModelOutput):
    """The output of [`TnnForTimeSeriesPrediction`], with the names of transformers' `PatchTSTForPredictionOutput`.

    Args:
        loss: mean squared error of the scaled predictions, of channels that vary; None without `future_values`.
        prediction_outputs: `(B, H, C)` predictions, in the units of the values.
        hidden_states: `(B, L, d)` for the embeddings and each layer, with `output_hidden_states=True`.
        attentions: weights of each layer of attention, with `output_attentions=True`.
        loc: `(B, 1, C)` mean of the observed past values.
        scale: `(B, 1, C)` standard deviation of the observed past values; of a constant channel, a small number.
    """

    loss: torch.FloatTensor | None = None
    prediction_outputs: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None
    loc: torch.FloatTensor | None = None
    scale: torch.FloatTensor | None = None


class TnnValueEmbedding(nn.Module):
    """A linear map from the values at a position, and which of them are observed, to its embedding."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.channels = config.input_channels
        self.projection = CastingLinear(2 * config.input_channels, config.hidden_size)
        self.projection.maps_zeros = True  # of missing values, to a row that a norm can divide by its length

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """`(B, L, C)`, or `(B, L)` of one channel, to `(B, L, d)`."""
        values = values.unflatten(-1, (-1, 1)) if values.dim() == 2 else values
        observed, kind = values.isfinite(), values.device.type
        dtype = parameter_dtype(self, values)
        if dtype == torch.float32 and kind != "meta" and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        read = torch.cat([values.masked_fill(~observed, 0), observed.to(values.dtype)], dim=-1)
        if dtype != torch.float16 or type(self.projection) is not CastingLinear:  # but a wrapper of it
            return self.projection(read.to(dtype))
        with maybe_autocast(device_type=kind, enabled=False):
            x = self.projection(read.float())
        # Half has no numbers beyond 65,504. A row of larger ones keeps its direction, which is what norms let through.
        bound = torch.finfo(dtype).max / 2
        return (x * (bound / x.abs().amax(dim=-1, keepdim=True).clamp(min=bound))).to(dtype)


def standardize(values: torch.Tensor, observed: torch.Tensor | None, attention_mask: torch.Tensor | None) -> tuple:
    """Return the scaled values `(B, L, C)`, not finite where they are missing, and their loc and scale `(B, 1, C)`.

    They are float32, or float64 for such values. A channel without observed values has loc 0; a constant one has a
    scale that is small beside its value. `observed` `(B, L, C)` is 0 at missing values, the mask `(B, L)` at padding.
    """
    values, missing = values.to(compute_dtype(values.dtype)), ~values.isfinite()
    if observed is not None:
        require_tensor("past_observed_mask", observed, "(B, L, C)", shapes=[values.shape])
        missing = missing | (observed == 0)
    real = check_attention_mask(attention_mask, values, past_length=0)
    if real is not None:
        missing = missing | ~real[..., None]
    values = values.masked_fill(missing, 0)  # the gradient of a product with NaN is NaN
    count = (~missing).sum(dim=1, keepdim=True).clamp(min=1)
    numbers = torch.finfo(values.dtype)
    largest = values.detach().abs().amax(dim=1, keepdim=True).clamp(min=numbers.tiny)
    values = values / largest  # whose squares are numbers in any units
    loc = values.sum(dim=1, keepdim=True) / count
    centred = (values - loc).masked_fill(missing, 0)
    variance = centred.square().sum(dim=1, keepdim=True) / count
    scale = variance.clamp(min=(ROUNDINGS * numbers.eps) ** 2).sqrt()
    return (centred / scale).masked_fill(missing, torch.nan), loc * largest, (scale * largest).clamp(min=numbers.tiny)


def squared_error(predictions: torch.Tensor, targets: torch.Tensor, name: str, loc=None, scale=None) -> torch.Tensor:
    """Return the mean squared error over the targets that are finite; 0 if there is none.

    `name` is that of the targets, which have the shape of the predictions, of which a last dimension of 1 may be left
    out. With `loc` and `scale` `(B, 1, C)`, the targets are scaled by them, and channels that do not vary add nothing.
    """
    shapes = [predictions.shape] + ([predictions.shape[:-1]] if predictions.shape[-1] == 1 else [])
    require_tensor(name, targets, "of the predictions", dtypes=FLOATS, shapes=shapes)
    dtype = compute_dtype(predictions.dtype)
    targets = targets.reshape(predictions.shape).to(predictions.device)
    missing = ~targets.isfinite()
    count = (~missing).sum().clamp(min=1)
    if scale is not None:
        numbers = torch.finfo(scale.dtype)
        missing = missing | (scale <= 2 * (ROUNDINGS * numbers.eps * loc.abs() + numbers.tiny))  # as `standardize` has
        targets = (targets.to(loc.dtype) - loc) / scale
    errors = (predictions.to(dtype) - targets.to(dtype).masked_fill(missing, 0)).masked_fill(missing, 0)
    return errors.square().sum() / count
