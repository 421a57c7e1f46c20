"""A causal kernel as an exact head and a sum of exponentials shared by all channels: what `to_recurrent` makes.

    t_j = head_j,                                   j < w
    t_j = Re sum_q r_q lambda_q^(j - w),            j >= w,        lambda_q = exp(-exp(nu_q) + i theta_q)

D channels, L length, w window, Q modes. A complex mode is an order-2 block of a real diagonal recurrence. Its poles
lie inside the unit circle by construction, whatever the parameters.
"""

import torch
from torch import nn
from transformers import initialization as init

from .recurrence_modal import ModalRecurrence
from .tno import ToeplitzOperator
from .toeplitz import fit_taps, transform_dtype, widest_dtype
from .tracing import is_exported


class ModalOperator(ToeplitzOperator):
    """The compressed operator, causal only."""

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        self.window = config.modal_window
        self.head = nn.Parameter(torch.empty(self.channels, config.modal_window))
        self.residues = nn.Parameter(torch.empty(self.channels, config.num_modes, 2))
        self.log_rate = nn.Parameter(torch.empty(config.num_modes))
        self.angle = nn.Parameter(torch.empty(config.num_modes))

    def reset_parameters(self):
        init.normal_(self.head, std=self.window**-0.5)
        init.normal_(self.residues, std=self.log_rate.numel() ** -0.5)
        init.uniform_(self.log_rate, -6.0, 0.0)
        init.uniform_(self.angle, 0.0, torch.pi)

    def powers(self, exponents: torch.Tensor) -> torch.Tensor:
        """lambda_q^n for `(M,)` exponents, complex `(Q, M)`, computed in float64."""
        dtype = widest_dtype(self.angle.device)
        exponents = exponents.to(dtype)
        radius = torch.exp(-torch.exp(self.log_rate.to(dtype))[:, None] * exponents)  # (Q, M)
        return torch.polar(radius, self.angle.to(dtype)[:, None] * exponents)

    def poles(self, most: int = 64) -> torch.Tensor:
        return self.powers(torch.ones(1, device=self.angle.device)).t()  # (1, Q)

    def complex_residues(self) -> torch.Tensor:
        """r_q of each channel, `(D, Q)`."""
        return torch.view_as_complex(self.residues.to(widest_dtype(self.angle.device)).contiguous())

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        if is_exported():
            return self._exported_coefficients(length)
        head = self.head[:, :length].to(transform_dtype(self.head.dtype))  # (D, <= w)
        beyond = torch.arange(max(0, length - self.window), device=head.device)
        tail = (self.complex_residues() @ self.powers(beyond)).real.to(head.dtype)  # (D, L - w)
        return torch.cat([head, tail], dim=1)

    def _exported_coefficients(self, length: int) -> torch.Tensor:
        """`coefficients` without a branch on the length and in real numbers, which ONNX knows alone."""
        position = torch.arange(length, device=self.head.device)
        work = widest_dtype(self.angle.device)
        age = (position - self.window).clamp(min=0).to(work)  # (L,)
        radius = torch.exp(-torch.exp(self.log_rate.to(work))[:, None] * age)  # (Q, L)
        turn = self.angle.to(work)[:, None] * age  # (Q, L)
        real, imag = self.residues.to(work).unbind(-1)  # (D, Q) each
        tail = real @ (radius * turn.cos()) - imag @ (radius * turn.sin())  # (D, L)
        head = self.head.to(transform_dtype(self.head.dtype))  # (D, w)
        return torch.where(position < self.window, fit_taps(head, length), tail.to(head.dtype))

    def recurrence(self) -> ModalRecurrence:
        return ModalRecurrence(self, self.stagger)
