"""Hyena of order 2 with a Toeplitz operator as its long filter.

    p, q, v = split( S W x + b )                       S: a short filter for each channel, m taps
    y       = W_o( p * TNO(q * v) )                                                                              (1)
    y       = W_o gelu( W_r( p * TNO(q * v) ) )        with `hyena_rank`                                         (2)
    y       = W_o gelu( W_r norm( p * TNO(q * v) ) )   with `hyena_norm` too, as in the released code            (3)

B batch, L length, d hidden size, D = gtu_dim channels, m = short_conv_kernel taps, r = hyena_rank.

(1) is the operator of Poli et al., "Hyena Hierarchy" (ICML 2023), as the RTF paper has it in its equation 2; the
residual connection of that equation is the one of the block. (2) is the form of the RTF paper (appendix C.5.2, table
13): two maps of low rank with an activation in place of W_o. The activation is `hidden_act`, GELU in the paper.

(3) is the form of the released RTF code, which the paper does not mention. W, S, W_r and W_o have biases, as there.
Hyena adds a skip weight to its filter. Here the coefficient at lag 0 does that: an RTF filter has h_0 already, and a
second number would only add to it. (The released code adds h_0 twice.)

The convolution is causal in a causal model. The papers have no bidirectional Hyena; there the short filter reaches
(m - 1) / 2 positions to each side, so that operators of both directions can be its filter.

Padding: the projections are zero there before the short convolution, and q * v is zero there after it, because the
bias and the neighbours make it nonzero. So a text is mixed as if it stood alone.
"""

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.utils.generic import maybe_autocast

from .gating import NO_GATE, Gate
from .gtu import mix_tokens
from .linear import apply_channel_major, apply_linear
from .norms import RootRMSNorm, build_norm
from .numerics import compute_dtype
from .packing import Documents
from .tno import ToeplitzOperator
from .tno_auto import build_tno


class ShortConvolution(ToeplitzOperator):
    """A filter of m taps and a bias for each of the 3 D channels of the projections.

    It is a Toeplitz operator, so decoding, packed rows and caches treat it as one. Its state is that of a kernel of m
    taps, the last m - 1 inputs, in a layer beside that of the long filter (`TnnCacheLayer.beside`).
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        self.channels = 3 * config.gtu_dim
        self.taps = nn.Parameter(torch.empty(self.channels, config.short_conv_kernel))  # (3D, m), from the lowest lag
        self.bias = nn.Parameter(torch.empty(self.channels))
        self.first = 0 if self.causal else -(config.short_conv_kernel // 2)  # the lowest lag

    def reset_parameters(self):
        """As PyTorch initialises a depthwise convolution."""
        bound = self.taps.shape[1] ** -0.5
        for parameter in (self.taps, self.bias):
            init.uniform_(parameter, -bound, bound)

    def kernel_length(self) -> int:
        return self.taps.shape[1] + self.first

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        taps = self.taps.to(device or self.taps.device)
        taps = taps.to(compute_dtype(taps.dtype))
        lowest = 0 if self.causal else 1 - length
        return pad(taps, (self.first - lowest, length - self.kernel_length()))  # negative numbers cut

    def matmul(self, v: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        """The product by definition: m shifted copies. For so few taps a transform would take longer.

        In packed rows no copy goes beyond its document.
        """
        taps = self.taps.to(compute_dtype(torch.promote_types(v.dtype, self.taps.dtype)))
        length, count = v.shape[1], taps.shape[1]
        x = v.permute(2, 0, 1).to(taps.dtype)  # (3D, B, L), as `apply_channel_major` lays it
        around = (count - 1 + self.first, -self.first)
        begins = range(count - 1, -1, -1)  # of the copies, by their lag, among the L + m - 1 positions of `whole`
        whole = pad(x, around)
        copies = (whole[..., begin : begin + length] for begin in begins)
        terms = (copy * tap[:, None, None] for copy, tap in zip(copies, taps.unbind(1), strict=True))
        if documents is not None:
            own = documents.numbers(v.device)  # (B, L)
            numbers = pad(own, around)
            same = (numbers[:, begin : begin + length] == own for begin in begins)
            terms = (term.where(one, 0) for term, one in zip(terms, same, strict=True))
        return sum(terms).to(v.dtype).permute(1, 2, 0)

    def forward(
        self,
        v: torch.Tensor,
        past_key_values: Cache | None = None,
        gate: Gate = NO_GATE,
        kernel: Documents | None = None,
    ) -> torch.Tensor:
        """The filtered projections, `(B, L, 3D)` to `(B, L, 3D)`.

        Args:
            gate: holds the mask of padding.
            kernel: the documents of packed rows.

        Raises:
            ValueError: the cache is offloaded to the host between layers.
        """
        with maybe_autocast(device_type=v.device.type, enabled=False):
            if past_key_values is None:
                mixed = self.matmul(gate.inputs(v), kernel)
            else:
                # Not through `Cache.update`, which would take the layer to be done.
                if past_key_values.offloading:
                    raise ValueError(
                        "`past_key_values` must stay on the device with toeplitz_mixer='hyena', whose layers use it "
                        "twice, got an offloaded cache"
                    )
                layer = past_key_values.layers[self.layer_idx].beside()
                mixed = layer.update(v, None, self, gate, kernel)[0]
        return mixed + self.bias.to(mixed.dtype)


class TnnHyena(nn.Module):
    """The token mixer of the equations above. Its operator is at `tno`, as in the gated Toeplitz unit."""

    # Whether the inputs of its operator are those of a linear layer.
    projects_inputs = True

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        rank = config.hyena_rank
        self.in_proj = nn.Linear(config.hidden_size, 3 * config.gtu_dim)
        self.short = ShortConvolution(config, layer_idx)
        self.tno = build_tno(config, layer_idx)
        self.norm = build_norm(config.norm_type, config.gtu_dim) if config.gtu_norm else nn.Identity()
        self.norm = RootRMSNorm(config.gtu_dim) if config.hyena_norm else self.norm
        self.low_rank = None if rank is None else nn.Linear(config.gtu_dim, rank)
        self.act = None if rank is None else ACT2FN[config.hidden_act]
        self.o_proj = nn.Linear(rank or config.gtu_dim, config.hidden_size)
        for projection in (self.in_proj, self.low_rank, self.o_proj):
            if projection is not None:
                projection.is_gtu_projection = True  # transformers initialises linear layers without their parent

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        kernel: torch.Tensor | tuple | None = None,
    ) -> torch.Tensor:
        """`(B, L, d)` to `(B, L, d)`, with the arguments of the gated Toeplitz unit."""
        gate = Gate(mask=attention_mask)
        documents = kernel if isinstance(kernel, Documents) else None
        projected = apply_channel_major(self.in_proj, hidden_states)  # (B, L, 3D)
        projected = self.short(projected, past_key_values, gate, documents)
        p, q, v = projected.chunk(3, dim=-1)  # (B, L, D) each
        mixed = self.norm(p * mix_tokens(self.tno, q * v, gate, past_key_values, kernel))
        if self.low_rank is not None:
            mixed = self.act(apply_linear(self.low_rank, mixed))  # (B, L, r)
        return apply_linear(self.o_proj, mixed)
