"""Time and memory of one mixing of n positions by length: the columns of TNN table 1, measured.

    convolution          y_i = sum_k w_k x_(i-k), e taps a channel                  n e d
    recurrent            Elman's network                                            n d^2
    attention            softmax(q k^T) v, heads of 64 channels, SDPA               n^2 d
    linear attention     f(q) (f(k)^T v), f = 1 + elu, heads of 64 channels         n d^2 (here 64 n d)
    mlp                  a free matrix of positions, as in gMLP                     n^2 d
    fourier              Re F_n x F_d, as in FNet                                   n d log n
    state space          `s4d`, its kernel included                                 n d log n
    toeplitz             `rpe`, its coefficients included                           n d log n
    coefficients         those alone

All see both directions but `recurrent` and `state space`. Projections, gates and norms around them are left out. The
recurrent one takes its steps one by one; the others are parallel.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from suites.memory import saved_bytes
from torch import nn
from torch.nn.functional import elu, scaled_dot_product_attention

from modeling_tnn import TnnConfig
from modeling_tnn.tno_auto import build_tno
from tnn_programs.benchmarks.measure import markdown, measure, ratio

HEAD, TAPS = 64, 31
FORMATS = {"length": "", "way": "", "milliseconds": ".1f", "over_toeplitz": ".2f", "saved_mebibytes": ".1f"}


def heads(x: torch.Tensor) -> torch.Tensor:
    """`(B, n, d)` to `(B, H, n, 64)`."""
    return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


def attention(x: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(heads(x), heads(x), heads(x)).transpose(1, 2).flatten(2)


def linear_attention(x: torch.Tensor) -> torch.Tensor:
    """Katharopoulos et al., 2020, in both directions: sums over all positions, and their normaliser."""
    value, feature = heads(x), 1 + elu(heads(x))  # (B, H, n, 64)
    total = feature.sum(dim=2, keepdim=True)  # (B, H, 1, 64)
    mixed = feature @ (feature.mT @ value) / (feature * total).sum(-1, keepdim=True)
    return mixed.transpose(1, 2).flatten(2)


def fourier(x: torch.Tensor) -> torch.Tensor:
    return torch.fft.fft2(x).real


class AlongPositions(nn.Module):
    """A layer of `(B, d, n)` for `(B, n, d)`."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.mT).mT


def operator(tno_type: str, length: int, channels: int) -> nn.Module:
    causal = tno_type == "s4d"
    sizes = {"hidden_size": channels, "gtu_expansion": 1, "max_position_embeddings": length}
    return build_tno(TnnConfig(tno_type=tno_type, causal=causal, num_hidden_layers=1, **sizes))


def build(way: str, length: int, channels: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layer from `(B, n, d)` to the same."""
    if way in ("state space", "toeplitz"):
        return operator("s4d" if way == "state space" else "rpe", length, channels)
    if way == "coefficients":
        encoder = operator("rpe", length, channels)
        return lambda x: encoder.to(x.device).coefficients(x.shape[1])
    if way == "convolution":
        return AlongPositions(nn.Conv1d(channels, channels, TAPS, padding=TAPS // 2, groups=channels))
    if way == "mlp":
        return AlongPositions(nn.Linear(length, length))
    if way == "recurrent":
        layer = nn.RNN(channels, channels, batch_first=True)
        return lambda x: layer(x)[0]
    return {"attention": attention, "linear attention": linear_attention, "fourier": fourier}[way]


def forward_and_backward(mix: Callable[[], torch.Tensor]):
    mix().sum().backward()


def run(args) -> list[dict]:
    """One row for each length and way: a forward and a backward pass, over that of `toeplitz`."""
    rows = []
    for length in args.lengths:
        torch.manual_seed(0)
        x = torch.randn(args.batch_size, length, args.channels, device=args.device, requires_grad=True)
        layers = {way: build(way, length, args.channels) for way in dict.fromkeys(["toeplitz", *args.ways])}
        for layer in layers.values():
            if isinstance(layer, nn.Module):
                layer.to(args.device)
        passes = {way: partial(layer, x) for way, layer in layers.items()}
        times = measure({way: partial(forward_and_backward, mix) for way, mix in passes.items()}, args)
        for way, seconds in times.items():
            row = {"length": length, "way": way, "milliseconds": 1000 * statistics.median(seconds)}
            row["over_toeplitz"] = ratio(seconds, times["toeplitz"])
            rows.append(row | {"saved_mebibytes": saved_bytes(passes[way]) / 2**20})
    return rows


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table."""
    return markdown(rows, FORMATS)
