"""Toeplitz coefficients as the impulse response of a rational transfer function (RTF paper, section 3).

    t_0 = h_0,  t_k = [z^-k] b(z)/a(z)  for k > 0,    a(z) = 1 + a_1 z^-1 + .. + a_N z^-N

D channels, L length, N order, T = `rtf_truncation_length` the truncation length. The taps are computed by one
transform on T points (T + 1 if T is odd), as in the released code, but in float64: near the unit circle float32
loses all digits. Beyond that length the same filter goes on (see `rational.py`).

Bidirectional: a second filter for negative lags, t_{-k} = its tap k - 1 (its h_0 is the tap of lag -1).

`rtf_constraint="l1_montel"` divides each denominator by sum|a_i| + |s| + 1e-6 with a learned s: then sum|a_i| < 1
and all poles lie inside the unit circle (RTF paper, section 3.4, with the scaling of its code).
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init

from .rational import (
    RationalTaps,
    companion_matrix,
    extend_kernel,
    kernel_of_any_length,
    per_filter,
    rational_kernel,
    recurrence_numerator,
)
from .recurrence_companion import CompanionForm, CompanionRecurrence
from .tno import ToeplitzOperator
from .toeplitz import transform_dtype, widest_dtype
from .tracing import is_exported, is_traced, is_transformed, needs_plain


def l1_montel(denominator: torch.Tensor, slack: torch.Tensor) -> torch.Tensor:
    """Denominators `(Q, N)` scaled to an absolute sum below 1, with one slack for every A of the Q rows `(A,)`."""
    slack = slack.repeat(len(denominator) // len(slack))[:, None]  # (Q, 1)
    return denominator / (denominator.abs().sum(-1, keepdim=True) + slack.abs() + 1e-6)


CONSTRAINTS = {None: lambda denominator, slack: denominator, "l1_montel": l1_montel}
INITIAL_BOUNDS = {"zeros": lambda order: 0.0, "xavier": lambda order: order**-0.5, "montel": lambda order: 1 / order}


class RtfOperator(ToeplitzOperator):
    """The rational transfer function operator."""

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        sides, order = (1 if self.causal else 2), config.rtf_state_size
        num_denominators = config.rtf_num_denominators or self.channels
        self.constraint = config.rtf_constraint
        self.initial_bound = INITIAL_BOUNDS[config.rtf_initializer](order)
        self.size = config.rtf_truncation_length + config.rtf_truncation_length % 2
        self.denominator = nn.Parameter(torch.empty(sides * num_denominators, order))
        self.numerator = nn.Parameter(torch.empty(sides * self.channels, order))
        self.direct = nn.Parameter(torch.empty(sides * self.channels))
        self.slack = nn.Parameter(torch.empty(num_denominators)) if self.constraint == "l1_montel" else None

    def reset_parameters(self):
        init.uniform_(self.denominator, -self.initial_bound, self.initial_bound)
        init.uniform_(self.numerator, -self.initial_bound, self.initial_bound)
        init.ones_(self.direct)
        if self.slack is not None:
            init.uniform_(self.slack)

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        if self.product == "chunked" and not needs_plain() and length <= self.size:
            kernel = RationalTaps.apply(  # (D, L) or (2D, L)
                self._constrained(), self.numerator, self.direct, self.size, length, widest_dtype(self.direct.device)
            )
        else:
            kernel = self._kernel(length).to(transform_dtype(self.numerator.dtype))  # (D, L) or (2D, L)
        if self.causal:
            return kernel
        positive, negative = kernel.chunk(2)  # (D, L) each
        # Not negative[:, : L - 1]: L - 1 may be 1, which torch.export would rule out.
        return torch.cat([negative.flip(1), positive], dim=1)[:, 1:]  # (D, 2L-1)

    def recurrence(self) -> CompanionRecurrence:
        self.require_causal()
        return CompanionRecurrence(self, self.numerator.shape[1], self.size)

    def poles(self, most: int = 64) -> torch.Tensor:
        denominator = self._taps()[0]  # (Q, N)
        chosen = denominator[:: -(-len(denominator) // most)]  # (M, N)
        return torch.linalg.eigvals(companion_matrix(chosen))

    def companion_form(self) -> CompanionForm:
        """The recurrence whose impulse response is `coefficients`, exactly, in float64.

        Raises:
            ValueError: the operator is not causal.
        """
        self.require_causal()
        denominator, taps = self._taps()
        numerator = recurrence_numerator(denominator, taps)
        return CompanionForm(per_filter(denominator, len(taps)), numerator, taps[:, 0])

    def _constrained(self) -> torch.Tensor:
        """The denominators `(Q, N)` as they are used; in float64 where a constraint scales them."""
        if self.constraint is None:
            return self.denominator
        dtype = widest_dtype(self.denominator.device)

        def constrained(a, s):
            return CONSTRAINTS[self.constraint](a.to(dtype), s.to(dtype))

        if is_transformed() or is_exported():  # neither torch.func nor torch.export has checkpoints
            return constrained(self.denominator, self.slack)
        # Computed again in the backward pass: what it keeps would be larger than all the rest at high orders.
        return checkpoint(constrained, self.denominator, self.slack, use_reentrant=False, preserve_rng_state=False)

    def _taps(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The constrained denominators `(Q, N)` and the taps of the transform `(D, F)`, h_0 included, in float64."""
        dtype = widest_dtype(self.numerator.device)
        denominator = self._constrained().to(dtype)
        taps = rational_kernel(denominator, self.numerator.to(dtype), self.size)
        first = taps[:, :1] + self.direct.to(dtype)[:, None]
        return denominator, torch.cat([first, taps[:, 1:]], dim=1)

    def _kernel(self, length: int) -> torch.Tensor:
        denominator, taps = self._taps()
        if not is_exported() and length <= self.size:
            return taps[:, :length]  # (D, L)
        # The iteration of `extend_kernel` has as many steps as the length asks for: no graph for all of them.
        return (kernel_of_any_length if is_traced() else extend_kernel)(denominator, taps, length)  # (D, L)
