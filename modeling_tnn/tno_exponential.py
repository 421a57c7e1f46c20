"""Compute a kernel of real exponentials, each filter with poles and residues of its own: the long filter of Evo 2.

    t_k  = sum_q r_q exp(p_q k),   k >= 0                           (causal)
    t_k  = the same with r'_q and p'_q, and -k - 1 for k,   k < 0   (bidirectional)

D filters, Q = num_modes exponentials, L length, log-poles p and residues r. The kernel and the recurrence are those of
`tno_s4d.py` for poles without a phase. Poles with p > 0 grow; nothing keeps training from them.

Source: StripedHyena 2, "Systems and Algorithms for Convolutional Multi-Hybrid Language Models at Scale" (Ku et al.,
2025), where the long filters of Evo 2 have a skip weight besides (`hyena_skip`).
"""

import torch
from torch import nn
from transformers import initialization as init

from .numerics import float64_or_widest
from .tno_modal import Poles
from .tno_s4d import DiagonalOperator
from .toeplitz import Pair


class ExponentialOperator(DiagonalOperator):
    """The operator of real exponentials."""

    fp32_parameters = ("log_poles", "residues")  # as in released checkpoints: a rounded pole is another time constant

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        sides, self.num_modes, self.longest = (1 if self.causal else 2), config.num_modes, config.axis_length
        self.log_poles = nn.Parameter(torch.empty(sides * self.channels, self.num_modes))
        self.residues = nn.Parameter(torch.empty(sides * self.channels, self.num_modes))
        self.direct = None
        self.channel_parameters = {"log_poles": sides, "residues": sides}

    def reset_parameters(self):
        """Begin with time constants from 1 to the trained length, and random residues of equal energy."""
        rates = torch.logspace(0, 1, self.num_modes, base=1 / self.longest, dtype=torch.float64)  # (Q,)
        energy = -torch.expm1(-2 * rates)  # 1 / sum_k exp(-2 rate k)
        init.copy_(self.log_poles, -rates.expand_as(self.log_poles))
        init.normal_(self.residues, std=self.num_modes**-0.5)
        init.copy_(self.residues, self.residues * energy.sqrt().to(self.residues))
        if self.slow_start:
            self.start_slowly()

    def start_slowly(self):
        """Begin with one exponential for each filter; the others have no weight."""
        constants = self.time_constants(self.channels).repeat(len(self.residues) // self.channels)  # (D,) or (2D,)
        first = torch.arange(self.num_modes, device=self.residues.device) == 0  # (Q,)
        slow = (-1 / constants).to(self.log_poles)[:, None]
        init.copy_(self.log_poles, self.log_poles.where(~first, slow))
        init.copy_(self.residues, first.expand_as(self.residues).to(self.residues))

    def modes(self) -> tuple[Poles, Pair]:
        """The poles and the residues of all filters, `(D, Q)` or `(2D, Q)` each, in float64."""
        rate, residues = (one.to(float64_or_widest(one.device)) for one in (-self.log_poles, self.residues))
        return Poles(rate, torch.zeros_like(rate)), Pair(residues, torch.zeros_like(residues))
