"""Conversion of an RPE or FD kernel into a recurrence of low order: one set of poles per layer, residues per channel.

    k_j ~ Re sum_q r_q lambda_q^(j-w)  for j >= w,    the first w taps exact

D channels, m taps, w window, r order, c columns of the Hankel matrices. All channels of a layer are combinations of a
few functions of the lag (the hidden features of the position encoder), so they share their poles.

The poles come from a state-space realisation of the stacked Hankel matrices of all channels (Kung 1978; Juang and
Pappa 1985): their right factor has the Gram matrix G_{jk} = sum_i sum_d k_{d,i+j} k_{d,i+k}, its leading r
eigenvectors V span the observable space, and V shifted by one row is V times the transition matrix, whose eigenvalues
are the poles. Residues follow by linear least squares. All in float64; poles are kept inside the unit circle.
"""

import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..extensions import extensions
from ..tno_rpe import RpeOperator

ORDERS = (8, 16, 32, 64, 128)
SMALLEST_RADIUS, LARGEST_RADIUS = 1e-8, 1 - 1e-6
# Largest number of fitted taps and of columns of the Hankel matrices, and smallest number of taps after the window.
MOST_TAPS, MOST_COLUMNS, LEAST_TAPS = 4096, 600, 4


@dataclass
class LayerReport:
    """The errors of the recurrence that was fitted to the kernel of one layer."""

    layer: int  # its index
    order: int  # number of real states per channel
    window: int  # number of first taps that are kept exactly
    taps: int  # number of taps that the fit has seen
    l2_layer: float  # relative l2 error of the taps of all channels
    l2_median: float  # its median over the channels
    l2_worst: float  # its maximum over the channels
    tail_bound: float  # bound on the l1 error beyond the fitted taps, relative to the l1 norm, of the worst channel
    largest_pole: float  # largest magnitude of a pole, below 1


class RecurrenceFit(NamedTuple):
    """A fitted recurrence: complex poles `(Q,)` and residues `(D, Q)`. Its taps are Re(residues @ poles^n)."""

    poles: torch.Tensor
    residues: torch.Tensor

    def taps(self, length: int) -> torch.Tensor:
        """Return the first taps, `(D, length)`."""
        basis = powers(self.poles, length)  # (Q, length)
        return self.residues.real @ basis.real - self.residues.imag @ basis.imag


def powers(poles: torch.Tensor, length: int) -> torch.Tensor:
    """Return the powers poles^0 .. poles^(length-1), `(Q, length)`."""
    return torch.exp(torch.log(poles)[:, None] * torch.arange(length, device=poles.device))


def hankel_eigenvectors(taps: torch.Tensor, order: int) -> torch.Tensor:
    """Return the leading eigenvectors V `(c, order)` of the Gram matrix G of `taps` `(D, m)`."""
    length = taps.shape[1]
    columns = min(length // 2, MOST_COLUMNS)
    products = taps.t() @ taps  # (m, m): sum over channels of k_i k_j
    for row in range(1, length):
        products[row, 1:] += products[row - 1, :-1]  # sums along diagonals
    rows = length - columns + 1
    gram = products[rows - 1 :, rows - 1 :].clone()  # (c, c)
    gram[1:, 1:] -= products[: columns - 1, : columns - 1]
    return torch.linalg.eigh(gram).eigenvectors.flip(1)[:, :order]


def fit_poles(vectors: torch.Tensor) -> torch.Tensor:
    """Return the eigenvalues of the transition matrix of `vectors` `(c, r)`, one of each conjugate pair, `(Q,)`."""
    transition = torch.linalg.lstsq(vectors[:-1], vectors[1:], driver="gelsd").solution  # (r, r)
    poles = torch.linalg.eigvals(transition)
    poles = poles[poles.imag >= 0]
    return torch.polar(poles.abs().clamp(SMALLEST_RADIUS, LARGEST_RADIUS), poles.angle())


def fit_residues(poles: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Return the residues `(D, Q)` that fit `taps` `(D, m)` by least squares."""
    basis = powers(poles, taps.shape[1])  # (Q, m)
    rows = torch.cat([basis.real, -basis.imag])  # (2Q, m); the imaginary part of a real pole is 0
    solution = torch.linalg.lstsq(rows.t(), taps.t(), driver="gelsd").solution.t()  # (D, 2Q)
    return torch.complex(*solution.chunk(2, dim=1))


def fit_recurrence(taps: torch.Tensor, order: int) -> RecurrenceFit:
    """Return a recurrence of `order` states that fits `taps` `(D, m)`, float64 on the CPU."""
    normalized = taps / taps.norm(dim=1, keepdim=True).clamp(min=torch.finfo(taps.dtype).tiny)
    poles = fit_poles(hankel_eigenvectors(normalized, order))
    return RecurrenceFit(poles, fit_residues(poles, taps))


def kernel_to_fit(operator, window: int) -> torch.Tensor:
    """Return the taps `(D, m)` of a causal operator that a fit uses, in float64 on the CPU.

    They cover the effective length of the kernel, and at least a few taps beyond the window. A kernel that ends
    without decaying is followed by as many zeros; otherwise the fitted recurrence would continue beyond its end.
    """
    wide = copy.deepcopy(operator).double().cpu()
    bound = operator.kernel_length(exact=True)
    length = MOST_TAPS if bound is None else min(bound if slowest_decay(operator) else 2 * bound, MOST_TAPS)
    with torch.no_grad():
        return wide.coefficients(max(length, window + LEAST_TAPS))


def slowest_decay(operator) -> float | None:
    """Return the largest decay rate of all channels, or None for a kernel that does not decay, or ends before."""
    return operator.slowest_decay() if isinstance(operator, RpeOperator) and operator.window is None else None


def report_fit(operator, taps: torch.Tensor, fit: RecurrenceFit, order: int, window: int) -> LayerReport:
    """Return the errors of a fit on the taps `(D, m)`, and a bound on the error beyond them."""
    error = fit.taps(taps.shape[1] - window) - taps[:, window:]  # (D, m - w)
    l2 = error.norm(dim=1) / taps.norm(dim=1).clamp(min=1e-300)
    radius = fit.poles.abs()
    faded = radius ** (taps.shape[1] - window) / (1 - radius)  # (Q,)
    beyond = (fit.residues.abs() * faded).sum(dim=1) + own_tail(operator, taps)  # (D,)
    tail = beyond / taps.abs().sum(dim=1).clamp(min=1e-300)
    errors = error.norm() / taps.norm(), l2.median(), l2.max(), tail.max(), radius.max()
    return LayerReport(operator.layer_idx, order, window, taps.shape[1], *(one.item() for one in errors))


def own_tail(operator, taps: torch.Tensor) -> float:
    """Return a bound on the sum of |taps| beyond the fitted ones; infinite if the kernel neither decays nor ends."""
    end = operator.kernel_length(exact=True)
    if end is None:
        return float("inf")
    slowest = slowest_decay(operator)
    if slowest is None:
        return 0.0 if end <= taps.shape[1] else float("inf")
    powers_of_decay = slowest ** torch.arange(taps.shape[1] + 1, dtype=taps.dtype)
    undecayed = (taps / powers_of_decay[:-1]).abs().max()
    return (undecayed * powers_of_decay[-1] / (1 - slowest)).item()


def fit_layer(operator, order: int, window: int, tolerance: float | None) -> tuple:
    """Return the taps, the `RecurrenceFit` and the `LayerReport` of one layer.

    Without a `tolerance` the fit has `order` states; with one, it has the smallest of `ORDERS` whose `l2_layer` is
    within the tolerance.

    Raises:
        ValueError: no order meets the tolerance.
    """
    taps = kernel_to_fit(operator, window)
    for candidate in (order,) if tolerance is None else ORDERS:
        fit = fit_recurrence(taps[:, window:], candidate)
        report = report_fit(operator, taps, fit, candidate, window)
        if tolerance is None or report.l2_layer <= tolerance:
            return taps, fit, report
    raise ValueError(
        f"`tolerance` must be at least {report.l2_layer:.1e}, the relative error of layer {operator.layer_idx} "
        f"at the highest order {ORDERS[-1]}, got {tolerance}. Give a larger tolerance or a larger window."
    )


@torch.no_grad()
def fill_operator(target, taps: torch.Tensor, fit: RecurrenceFit):
    """Write a fit into a `ModalOperator`. Modes that the layer does not need get residues of 0."""
    count = len(fit.poles)
    for parameter in (target.residues, target.log_rate, target.angle):
        parameter.zero_()
    target.head.copy_(taps[:, : target.window])
    target.residues[:, :count].copy_(torch.view_as_real(fit.residues))
    target.log_rate[:count].copy_(torch.log(-torch.log(fit.poles.abs())))
    target.angle[:count].copy_(fit.poles.angle())


def own_weights(model) -> dict[str, torch.Tensor]:
    """Return the weights of a model except those of its operators, by name.

    Raises:
        ValueError: adapters, parametrizations, quantizers or offloading have replaced weights.
    """
    with torch.device("meta"):
        wanted = type(model)(model.config).state_dict()
    given = model.state_dict()
    replaced = sorted(given.keys() ^ wanted.keys())
    replaced += [name for name, value in given.items() if type(value) is not torch.Tensor or value.is_meta]
    for name in replaced:
        if ".mixer.tno." not in name:
            raise ValueError(
                f"The weights must be plain tensors for to_recurrent, got {name}, which is adapted, offloaded, "
                "quantized or sharded. Merge adapters (merge_and_unload), remove parametrizations, and load the model "
                "without device_map and quantization_config first."
            )
    return {name: value for name, value in given.items() if ".mixer.tno." not in name}


def to_recurrent(model, order: int = 64, window: int = 16, tolerance: float | None = None):
    """Compute `TnnPreTrainedModel.to_recurrent`, which documents it."""
    config = model.config
    if not config.causal:
        raise ValueError("`causal` must be True for to_recurrent (only a causal model decodes), got False")
    operators = [layer.mixer.tno for layer in model.base_model.layers if layer.mixer is not None]
    if all(operator.is_recurrence for operator in operators):
        return model, []
    for name, value in {"order": order, "window": window}.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` must be a whole number from 1 up, got {value!r}")
    weights = own_weights(model)
    fits = [fit_layer(operator, order, window, tolerance) for operator in operators]
    modal = copy.deepcopy(config)
    modal.update({"tno_type": "modal", "converted_from": config.tno_type, "modal_window": window})
    modal.num_modes = max(len(fit.poles) for _, fit, _ in fits)
    converted = type(model)(modal).to(device=model.device, dtype=model.dtype)
    converted.load_state_dict(converted.state_dict() | weights)
    mixers = [layer.mixer for layer in converted.base_model.layers if layer.mixer is not None]
    for mixer, (taps, fit, _) in zip(mixers, fits, strict=True):
        fill_operator(mixer.tno, taps, fit)
    converted.tie_weights()
    if hasattr(model, "generation_config"):
        converted.generation_config = copy.deepcopy(model.generation_config)
    return converted.train(model.training), [report for _, _, report in fits]


extensions.register(to_recurrent=to_recurrent)
