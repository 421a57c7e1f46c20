"""Toeplitz coefficients as the impulse response of a rational transfer function (RTF paper).

    t_0 = h_0,  t_k = [z^-k] b(z)/a(z)  for k > 0,    a(z) = 1 + a_1 z^-1 + .. + a_N z^-N

D channels, L length, N order, T = `rtf_truncation_length` the truncation length.

One transform on T points (T + 1 if T is odd) computes the taps, as in the released code, but in float64: for poles
near the unit circle float32 loses all digits. Beyond T the same filter continues (see `rational.py`). A bidirectional
operator has a second filter for negative lags, t_{-k} = its tap k - 1 (its h_0 is the tap of lag -1).
`rtf_constraint="l1_montel"` divides each denominator by sum|a_i| + |s| + 1e-6 with a learned s. Then sum|a_i| < 1, and
all poles lie inside the unit circle (RTF paper, section 3.4, with the scaling of its code).

`companion.py` decodes it token by token.

Without a constraint poles may leave the unit circle in training. The operator then warns, see `RtfOperator.train`.
"""

import logging

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init

from .companion import CompanionForm, CompanionRecurrence
from .numerics import compute_dtype, float64_or_widest, is_exported, is_fused, is_traced, is_transformed
from .rational import (
    RationalTaps,
    companion_matrix,
    extend_kernel,
    is_stable,
    kernel_of_any_length,
    per_filter,
    rational_kernel,
    recurrence_numerator,
)
from .tno import ToeplitzOperator

logger = logging.getLogger(__name__)

OUTSIDE = (
    "Their kernels grow beyond the trained length, and generation from a cache may fail. Train with "
    "rtf_constraint='l1_montel', the default of new configurations, or keep the poles inside: "
    "`PoleCallback(max_radius=0.99)` in a Trainer, `--max_pole_radius 0.99` with `tnn pretrain`. "
    "`project_poles(model, 0.99)` moves those of a trained model."
)


def l1_montel(denominator: torch.Tensor, slack: torch.Tensor) -> torch.Tensor:
    """Denominators `(Q, N)` scaled to sum|a_i| < 1, with the slacks s `(A,)`; row i has the slack i mod A."""
    slack = slack.repeat(len(denominator) // len(slack))[:, None]  # (Q, 1)
    return denominator / (denominator.abs().sum(-1, keepdim=True) + slack.abs() + 1e-6)


CONSTRAINTS = {None: lambda denominator, slack: denominator, "l1_montel": l1_montel}

# Numbers of `train()` calls without an `eval()` between them after which poles are looked for.
WATCHED = {2**power for power in range(3, 40)}

INITIAL_BOUNDS = {"zeros": lambda order: 0.0, "xavier": lambda order: order**-0.5, "montel": lambda order: 1 / order}


class RtfOperator(ToeplitzOperator):
    """The operator of rational transfer functions.

    Attributes:
        has_warned: whether it has warned of poles outside the unit circle.
    """

    # In bfloat16 the poles would move by more than their distance from the unit circle.
    fp32_parameters = ("denominator", "numerator", "direct", "slack")
    is_recurrence = True
    has_warned = False
    _train_calls = 0

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

    def channel_parameters(self) -> dict[str, int]:
        sides = 1 if self.causal else 2
        return {"denominator": sides, "numerator": sides, "direct": sides, "slack": 1}

    def reset_parameters(self):
        init.uniform_(self.denominator, -self.initial_bound, self.initial_bound)
        init.uniform_(self.numerator, -self.initial_bound, self.initial_bound)
        init.ones_(self.direct)
        if self.slack is not None:
            init.uniform_(self.slack)

    def train(self, mode: bool = True) -> "RtfOperator":
        """Set the mode as in PyTorch, and warn once of poles outside the unit circle.

        They are looked for when a training ends, at the first call of `eval()` after it. A Trainer may end without
        one, but calls `train()` in each step: they are also looked for at steps 8, 16, 32, 64, ..
        """
        ends = self.training and not mode
        self._train_calls = self._train_calls + 1 if mode else 0
        if ends or self._train_calls in WATCHED:
            self._warn_of_poles()
        return super().train(mode)

    def _warn_of_poles(self):
        whole = type(self.denominator.data) is torch.Tensor and self.denominator.numel() > 0  # not a shard
        if self.constraint is not None or self.has_warned or not whole or self.denominator.is_meta:
            return
        outside = int((~is_stable(self.denominator.detach())).sum())
        if outside:
            self.has_warned = True
            logger.warning(
                "Layer %d: %d of %d denominators have poles outside the unit circle. %s",
                self.layer_idx,
                outside,
                len(self.denominator),
                OUTSIDE,
            )

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        if is_fused(self.implementation) and length <= self.size:
            kernel = RationalTaps.apply(  # (D, L) or (2D, L)
                self._constrained(),
                self.numerator,
                self.direct,
                self.size,
                length,
                float64_or_widest(self.direct.device),
            )
        else:
            kernel = self._kernel(length).to(compute_dtype(self.numerator.dtype))  # (D, L) or (2D, L)
        kernel = kernel.to(device or kernel.device)
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

    def denominators(self) -> torch.Tensor:
        """The denominator of each filter in float64, `(D, N)` (`(2D, N)` if bidirectional)."""
        dtype = float64_or_widest(self.numerator.device)
        return per_filter(self._constrained().to(dtype), len(self.numerator))

    def companion_form(self) -> CompanionForm:
        """The coefficients of the recurrence in float64. Its impulse response is exactly `coefficients`.

        Raises:
            ValueError: the operator is not causal.
        """
        self.require_causal()
        denominator, taps = self._taps()
        numerator = recurrence_numerator(denominator, taps)
        return CompanionForm(per_filter(denominator, len(taps)), numerator, taps[:, 0])

    def _constrained(self) -> torch.Tensor:
        """The denominators `(Q, N)` after the constraint, which scales them in float64."""
        if self.constraint is None:
            return self.denominator
        dtype = float64_or_widest(self.denominator.device)

        def constrained(a, s):
            return CONSTRAINTS[self.constraint](a.to(dtype), s.to(dtype))

        if is_transformed() or is_exported():  # neither torch.func nor torch.export has checkpoints
            return constrained(self.denominator, self.slack)
        # Computed again in the backward pass: at high orders its saved tensors would exceed all others.
        return checkpoint(constrained, self.denominator, self.slack, use_reentrant=False, preserve_rng_state=False)

    def _taps(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The constrained denominators `(Q, N)` and the taps of the transform `(D, F)`, h_0 included, in float64."""
        dtype = float64_or_widest(self.numerator.device)
        denominator = self._constrained().to(dtype)
        taps = rational_kernel(denominator, self.numerator.to(dtype), self.size)
        first = taps[:, :1] + self.direct.to(dtype)[:, None]
        return denominator, torch.cat([first, taps[:, 1:]], dim=1)

    def _kernel(self, length: int) -> torch.Tensor:
        denominator, taps = self._taps()
        if not is_exported() and length <= self.size:
            return taps[:, :length]  # (D, L)
        # One graph cannot record the iteration of `extend_kernel`: its number of steps depends on the length.
        return (kernel_of_any_length if is_traced() else extend_kernel)(denominator, taps, length)  # (D, L)
