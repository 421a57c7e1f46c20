"""Compute Toeplitz coefficients by the implicit filter of Hyena: an MLP of sines over complex exponentials.

    t_k = h_k (exp(-s_k |delta|) + 0.05),    and d more at k = 0                                             (1)
    x = sin(q (W_0 z_k + b_0)),    x = sin(q (W_i x + b_i)) for i = 1 .. n,    h_k = W_out x                 (2)
    z_k = [s_k, cos(f w_k), -sin(f w_k)],    s_k = k / (M - 1),    w_k = 2 pi k / M                          (3)

D channels, L length, M positions `hyena_filter_length`, E numbers in z `hyena_filter_emb_dim`, F units of a layer
`hyena_filter_order`, n = `hyena_filter_inner_mlps`. The (E - 1) / 2 frequencies f are spread evenly from 1e-4 on, the
D rates delta from ln(0.01) / 1.5 to ln(0.01) / 0.3. All layers share q, a number per unit, at first
`hyena_filter_freq`. A bidirectional operator has a second filter for negative lags: t_{-k} is its tap k - 1, without
d. (Poli et al., "Hyena Hierarchy", ICML 2023, section 3.3, with the numbers of "HyenaDNA", Nguyen et al., 2023.)

Coefficients depend on M, not on L. s, z and delta are constants that are stored with the weights, as in the released
checkpoints, in which z may have been trained. Lags from M on are zero. Unless `hyena_filter_beyond="zeros"`, reading
more than M positions is an error.
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from transformers import initialization as init

from .extensions import extensions
from .numerics import by_parts, compute_dtype, is_exported
from .packing import Documents
from .position_encoder import CastingLinear
from .tno import ToeplitzOperator
from .toeplitz import fit_lags, fit_taps

# The part of a filter that does not decay.
FLOOR = 0.05


def exponential_features(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """s `(M,)` and z `(M, E)` of equation (3) for M = `count` positions and E = `size`, in float64."""
    bands = (size - 1) // 2
    times = torch.linspace(0, 1, count, dtype=torch.float64)
    frequencies = torch.linspace(1e-4, bands - 1, bands, dtype=torch.float64)
    turns = 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
    angles = turns[:, None] * frequencies  # (M, (E-1)/2)
    return times, torch.cat([times[:, None], angles.cos(), -angles.sin()], dim=1)


def modulation(times: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
    """exp(-s |delta|) + 0.05, `(D, L)`, at the times s `(L,)`."""
    return (-times * rates.abs()[:, None]).exp_().add_(FLOOR)  # in place: gigabytes for a million positions


class ChannelLinear(CastingLinear):
    """A linear map without a bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(L, F)` to `(L, D)`, channel-major in memory."""
        return (self.weight.to(x.dtype) @ x.t()).t()


class HyenaOperator(ToeplitzOperator):
    """The operator of Hyena's implicit filter, equation (1)."""

    fp32_parameters = ("freq", "times", "features", "rates")  # bfloat16 has the same number for many positions

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        sides, size = (1 if self.causal else 2), config.hyena_filter_order
        self.longest, self.beyond = config.hyena_filter_length, config.hyena_filter_beyond
        self.first_freq = config.hyena_filter_freq
        inner = [CastingLinear(size, size) for _ in range(config.hyena_filter_inner_mlps)]
        out = ChannelLinear(size, sides * self.channels, bias=False)
        self.layers = nn.ModuleList([CastingLinear(config.hyena_filter_emb_dim, size), *inner, out])
        self.freq = nn.Parameter(torch.empty(size))
        self.direct = nn.Parameter(torch.empty(self.channels))
        # Without values, so that a configuration alone takes no memory on the meta device.
        self.register_buffer("times", torch.zeros(self.longest))
        self.register_buffer("features", torch.zeros(self.longest, config.hyena_filter_emb_dim))
        self.register_buffer("rates", torch.zeros(self.channels))
        if not self.times.is_meta:
            self.fill_constants(torch.Tensor.copy_)
        self.channel_parameters = {f"layers.{len(inner) + 1}.weight": sides, "direct": 1, "rates": 1}

    def reset_parameters(self):
        init.constant_(self.freq, self.first_freq)
        init.normal_(self.direct)
        self.fill_constants(init.copy_)

    def fill_constants(self, copy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
        """Write s, z and delta into the buffers by `copy`."""
        times, features = exponential_features(*self.features.shape)
        copy(self.times, times)
        copy(self.features, features)
        # A channel falls to 0.01 between 0.3 and 1.5 times the M positions, but for the floor.
        slow, fast = math.log(0.01) / 1.5, math.log(0.01) / 0.3
        copy(self.rates, torch.linspace(slow, fast, len(self.rates), dtype=torch.float64))

    def require_positions(self, count: int):
        if self.beyond == "error" and count > self.longest:
            raise ValueError(
                f"`hyena_filter_length` must be at least {count}, the length of the sequence, got {self.longest}. "
                "hyena_filter_beyond='zeros' reads longer sequences, without the lags beyond."
            )

    def kernel_length(self, exact: bool = False) -> int:
        return self.longest

    def matmul_of_documents(self, v: torch.Tensor, documents: Documents) -> torch.Tensor:
        """As for every operator. The filter limits documents, whose lengths are known when the graph runs."""
        if self.beyond == "error":
            starts = extensions.limit_documents(documents.starts, self.longest, "hyena_filter_length")
            documents = documents._replace(starts=starts)
        kernel = self.coefficients(min(v.shape[1], self.longest), v.device)
        return documents.convolve(v, kernel, self.causal, self.implementation)

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        ends, own = is_exported() or length > self.longest, self.freq.device
        reach, dtype = self.longest if ends else length, compute_dtype(self.freq.dtype)
        constants = (self.features[:reach], self.times[:reach], self.rates)
        features, times, rates = (one.to(own, dtype) for one in constants)
        *hidden, out = self.layers

        def taps(chosen: slice) -> torch.Tensor:  # (1 or 2, D, L) for the L chosen positions
            x = features[chosen]
            for layer in hidden:
                x = torch.sin(self.freq.to(dtype) * layer(x))  # (L, F)
            return out(x).t().unflatten(0, (-1, self.channels)) * modulation(times[chosen], rates)

        kernel = by_parts(taps, reach, max(out.weight.shape), features, dim=-1)
        first = (torch.arange(reach, device=own) == 0).to(dtype)  # (L,)
        positive = kernel[0] + self.direct.to(dtype)[:, None] * first  # (D, L)
        # Not negative[:, : L - 1]: L - 1 may be 1, which torch.export would rule out.
        both = positive if self.causal else torch.cat([kernel[1].flip(1), positive], dim=1)[:, 1:]  # or (D, 2L-1)
        both = both.to(device or own)
        return (fit_taps if self.causal else fit_lags)(both, length) if ends else both
