"""Conversion of a kernel into a recurrence of low order: one set of poles per layer, residues per channel.

    k_j ~ Re sum_q r_q lambda_q^(j-w)  for j >= w,    the first w taps exact

D channels, m taps, w window, r order, c columns of the Hankel matrices. All channels of a layer are combinations of a
few functions of the lag (the hidden features of the position encoder), so they share their poles.

The poles come from a state-space realisation of the stacked Hankel matrices of all channels (Kung 1978; Juang and
Pappa 1985): their right factor has the Gram matrix G_{jk} = sum_i sum_d k_{d,i+j} k_{d,i+k}, its leading r
eigenvectors V span the observable space, and V shifted by one row is V times the transition matrix, whose eigenvalues
are the poles. No more eigenvectors are taken than the dtype of the operator resolves: others are noise. All this is
float64, but the operator stores rounded numbers. So residues r are fitted to the poles as they are stored, with a
penalty that is the error of rounding the residues (e is the resolution of the dtype), which keeps them small:

    minimise  sum_j (k_j - Re sum_q r_q lambda_q^(j-w))^2 + e^2 sum_q |r_q|^2 sum_j |lambda_q|^(2(j-w))

Poles are kept inside the unit circle, and those of a kernel that fades or ends fade too.

Kernels that are recurrences already are reduced by `balanced.py`. Any kernel h' in place of h changes the outputs of a
layer by at most ||h - h'||_1 max|x|, and an input with the signs of the reversed error reaches it.
"""

import copy
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..extensions import extensions, logger
from ..numerics import compute_dtype
from ..tno_modal import ModalOperator
from ..tno_rpe import RpeOperator
from ..tno_rtf import RtfOperator
from ..tno_s4d import DiagonalOperator
from .balanced import System, balance, doublings, system_of, truncate

ORDERS = (8, 16, 32, 64, 128)
SMALLEST_RADIUS, LARGEST_RADIUS = 1e-8, 1 - 1e-6
# Largest number of fitted taps and of columns of the Hankel matrices, and smallest number of taps after the window.
MOST_TAPS, MOST_COLUMNS, LEAST_TAPS = 4096, 600, 4
# Numbers of all filters up to which more taps than `MOST_TAPS` of a reduced recurrence are compared.
MOST_NUMBERS = 2**23
# Minimum decay of the poles of a finite kernel over the fitted taps: exp(-4). Number of further taps summed for the
# bound, in multiples of the fitted ones. Relative error at which a fit is accepted for a kernel without a known end.
LEAST_FADING, FURTHER, EXACT = 4.0, 4, 1e-6


@dataclass
class LayerReport:
    """The errors of the recurrence in place of the kernel of one layer: of its stored numbers, in their dtype."""

    layer: int  # its index
    order: int  # number of real states per channel; a kernel of lower numerical rank has fewer
    window: int  # number of first taps that are kept exactly
    taps: int  # number of taps that the fit has seen
    l2_layer: float  # relative l2 error of the taps of all channels
    l2_median: float  # its median over the channels
    l2_worst: float  # its maximum over the channels
    # Bound on the l1 error beyond the fitted taps, relative to the l1 norm, of the worst channel. Infinite if nothing
    # is known of the kernel there. If it equals the fit on as many further taps, it is taken for the fit.
    tail_bound: float
    largest_pole: float  # largest magnitude of a pole, below 1
    # Bound on |y - y'| of the operator's outputs for inputs of magnitude 1: the l1 error of all taps, worst channel.
    output_bound: float
    # Of a reduced recurrence: bound on the error of the frequency response, worst channel. See `balanced.py`.
    hankel_bound: float | None = None


class RecurrenceFit(NamedTuple):
    """A fitted recurrence, as a `ModalOperator` stores it. Its taps are Re(residues @ poles^n)."""

    log_rate: torch.Tensor  # (Q,)
    angle: torch.Tensor  # (Q,)
    residues: torch.Tensor  # (D, Q, 2)

    @property
    def poles(self) -> torch.Tensor:
        """The poles, complex `(Q,)` in float64."""
        return powers(self, 1, 2)[:, 0]

    def taps(self, length: int, first: int = 0) -> torch.Tensor:
        """Return the taps from `first` to `length` - 1 in float64, `(D, length - first)`."""
        basis = powers(self, first, length)
        real, imag = self.residues.double().unbind(-1)  # (D, Q) each
        return real @ basis.real - imag @ basis.imag


def powers(fit: RecurrenceFit, first: int, length: int) -> torch.Tensor:
    """Return the powers poles^first .. poles^(length-1) in float64, complex `(Q, length - first)`."""
    exponents = torch.arange(first, length, dtype=torch.float64)
    radius = torch.exp(-fit.log_rate.double().exp()[:, None] * exponents)
    return torch.polar(radius, fit.angle.double()[:, None] * exponents)


def hankel_eigenvectors(taps: torch.Tensor, order: int, resolution: float = 0.0) -> torch.Tensor:
    """Return the leading eigenvectors V `(c, order)` of the Gram matrix G of `taps` `(D, m)`.

    They are fewer if the Hankel matrices have fewer singular values above the `resolution` of the largest one, and
    than their columns: V without its last row still has their rank.
    """
    length = taps.shape[1]
    columns = min(length // 2, MOST_COLUMNS)
    products = taps.t() @ taps  # (m, m): sum over channels of k_i k_j
    for row in range(1, length):
        products[row, 1:] += products[row - 1, :-1]  # sums along diagonals
    rows = length - columns + 1
    gram = products[rows - 1 :, rows - 1 :].clone()  # (c, c)
    gram[1:, 1:] -= products[: columns - 1, : columns - 1]
    values, vectors = torch.linalg.eigh(gram)
    rank = int((values > resolution**2 * values[-1]).sum())
    return vectors.flip(1)[:, : max(1, min(order, rank, columns - 1))]


def fit_poles(vectors: torch.Tensor, largest: float = LARGEST_RADIUS) -> torch.Tensor:
    """Return the eigenvalues of the transition matrix of `vectors` `(c, r)`, one of each conjugate pair, `(Q,)`."""
    transition = torch.linalg.lstsq(vectors[:-1], vectors[1:], driver="gelsd").solution  # (r, r)
    poles = torch.linalg.eigvals(transition)
    poles = poles[poles.imag >= 0]
    return torch.polar(poles.abs().clamp(SMALLEST_RADIUS, largest), poles.angle())


def fit_residues(fit: RecurrenceFit, taps: torch.Tensor) -> torch.Tensor:
    """Return the residues `(D, Q, 2)` of the poles of a fit that minimise the sum above for `taps` `(D, m)`."""
    basis = powers(fit, 0, taps.shape[1])  # (Q, m)
    scale = basis.abs().norm(dim=1).repeat(2)[:, None]  # (2Q, 1)
    rows = torch.cat([basis.real, -basis.imag]) / scale  # (2Q, m); the imaginary part of a real pole is 0
    penalty = torch.finfo(fit.angle.dtype).eps * torch.eye(len(rows), dtype=rows.dtype)
    wanted = torch.cat([taps, taps.new_zeros(len(taps), len(rows))], dim=1)  # (D, m + 2Q)
    solution = torch.linalg.lstsq(torch.cat([rows.t(), penalty]), wanted.t(), driver="gelsd").solution
    return torch.stack((solution / scale).t().chunk(2, dim=1), dim=-1).to(fit.angle.dtype)


def fit_recurrence(taps: torch.Tensor, order: int, dtype=torch.float64, largest=LARGEST_RADIUS) -> RecurrenceFit:
    """Return a recurrence of `order` states in `dtype` that fits `taps` `(D, m)`, float64 on the CPU."""
    normalized = taps / taps.norm(dim=1, keepdim=True).clamp(min=torch.finfo(taps.dtype).tiny)
    poles = fit_poles(hankel_eigenvectors(normalized, order, torch.finfo(dtype).eps), largest)
    stored = RecurrenceFit(torch.log(-torch.log(poles.abs())).to(dtype), poles.angle().to(dtype), None)
    return stored._replace(residues=fit_residues(stored, taps))


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


def largest_radius(operator, fitted: int) -> float:
    """Return the largest radius of poles: if the kernel fades or ends, they fade over the `fitted` taps, or as it."""
    if operator.kernel_length(exact=True) is None:
        return LARGEST_RADIUS
    return min(LARGEST_RADIUS, max(slowest_decay(operator) or 0.0, math.exp(-LEAST_FADING / fitted)))


def report_fit(operator, taps: torch.Tensor, fit: RecurrenceFit, order: int, window: int) -> LayerReport:
    """Return the errors of a fit on `taps` `(D, m)`, those of the operator, and bounds on the error beyond them."""
    fitted = taps.shape[1] - window
    error = fit.taps(fitted).to(fit.angle.dtype) - taps[:, window:]  # (D, m - w)
    own, after = own_tail(operator, taps), fit_tail(fit, fitted)
    if own is None:
        own = after + further_error(operator, taps, fit, window)
    return report_errors(operator.layer_idx, order, window, taps, error, after + own, fit.poles.abs().max())


def report_errors(layer: int, order: int, window: int, taps, error, beyond, largest, hankel=None) -> LayerReport:
    """Return the report for the errors `(D, <= m)` of taps `(D, m)` and bounds on their sums beyond m, `(D,)`."""
    least = torch.finfo(taps.dtype).tiny
    l2 = error.norm(dim=1) / taps.norm(dim=1).clamp(min=least)
    tail = (beyond / taps.abs().sum(dim=1).clamp(min=least)).max()
    output = (error.abs().sum(dim=1) + beyond).max()
    figures = error.norm() / taps.norm().clamp(min=least), l2.median(), l2.max(), tail, largest, output
    bound = None if hankel is None else hankel.max().item()
    return LayerReport(layer, order, window, taps.shape[1], *(one.item() for one in figures), bound)


def fit_tail(fit: RecurrenceFit, fitted: int) -> torch.Tensor:
    """Return bounds on the sums of |taps| of a fit beyond the `fitted` ones, `(D,)`."""
    end = (1 + FURTHER) * fitted
    sums = (fit.taps(first + fitted, first).abs().sum(dim=1) for first in range(fitted, end, fitted))
    faded = powers(fit, end, end + 1)[:, 0].abs() / -torch.expm1(-fit.log_rate.double().exp())  # (Q,)
    return sum(sums) + fit.residues.double().norm(dim=-1) @ faded


def further_error(operator, taps: torch.Tensor, fit: RecurrenceFit, window: int) -> torch.Tensor:
    """Return the l1 errors on as many taps again, `(D,)`, infinite unless these and the first ones equal the fit."""
    count = taps.shape[1]
    error = fit.taps(2 * count - window) - operator.coefficients(2 * count)[:, window:].double().cpu()  # (D, 2m - w)
    known = error.norm() <= EXACT * taps.norm()
    return error[:, count - window :].abs().sum(dim=1) if known else error.new_full((), math.inf)


def own_tail(operator, taps: torch.Tensor) -> float | None:
    """Return a bound on the sum of |taps| beyond the fitted ones, None if the kernel neither decays nor ends.

    A decaying kernel is taken to be, before the decay, nowhere above its largest value at the fitted lags and at a
    dense geometric series of later ones.
    """
    end = operator.kernel_length(exact=True)
    slowest = slowest_decay(operator)
    if end is None or slowest is None:
        return None if end is None else 0.0 if end <= taps.shape[1] else math.inf
    powers_of_decay = slowest ** torch.arange(taps.shape[1] + 1, dtype=taps.dtype)
    undecayed = (taps / powers_of_decay[:-1].clamp(min=torch.finfo(taps.dtype).tiny)).abs().max()
    lags = taps.shape[1] * torch.logspace(0, 30, 1000, base=2, device=operator.rpe.in_proj.weight.device)
    later = operator.rpe.emit(operator.rpe.features(lags), torch.ones_like(lags, dtype=operator.rpe.dtype))
    return (torch.maximum(undecayed, later.abs().max().to(taps)) * powers_of_decay[-1] / (1 - slowest)).item()


@torch.no_grad()
def fit_layer(operator, order: int, window: int, tolerance: float | None, dtype: torch.dtype = torch.float64) -> tuple:
    """Return the taps of the kernel, the `RecurrenceFit` in `dtype` and the `LayerReport` of one layer.

    Without a `tolerance` the fit has `order` states; with one, it has the smallest of `ORDERS` whose `l2_layer` is
    within the tolerance. Poles and residues follow from the kernel in float64, errors are those of the taps that the
    operator has in its own dtype.
    """
    wide = kernel_to_fit(operator, window)
    taps = operator.coefficients(wide.shape[1]).double().cpu()
    largest = largest_radius(operator, wide.shape[1] - window)
    for candidate in (order,) if tolerance is None else ORDERS:
        fit = fit_recurrence(wide[:, window:], candidate, dtype, largest)
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
    count = len(fit.angle)
    for parameter in (target.residues, target.log_rate, target.angle):
        parameter.zero_()
    target.head.copy_(taps[:, : target.window])
    target.residues[:, :count].copy_(fit.residues)
    target.log_rate[:count].copy_(fit.log_rate)
    target.angle[:count].copy_(fit.angle)


@torch.no_grad()
def reduce_layer(operator, order: int, tolerance: float | None, dtype: torch.dtype) -> tuple:
    """Reduce an operator to `order` states, or to the fewest whose Hankel bound is within the `tolerance`.

    Returns:
        the balanced system of all states, the order, the modes of `truncate`, the number of taps to compare.
    """
    wide = copy.deepcopy(operator).double().cpu()
    system = system_of(wide)
    count = doublings(system.transition, operator.layer_idx)
    balanced, length = balance(system, count), min(2**count, max(MOST_TAPS, MOST_NUMBERS // operator.channels)) + 1
    if tolerance is not None:
        dropped = 2 * balanced.values.flip(1).cumsum(1).flip(1)  # (S, N), of order 0 and more
        order = max(1, int((dropped.norm(dim=0) > tolerance * wide.coefficients(length).norm()).sum()))
    return balanced, order, truncate(balanced, order, torch.finfo(dtype).eps ** 0.5), length


@torch.no_grad()
def fill_reduced(target, operator, modes: tuple):
    """Write modes into a `ModalOperator` or an `S4dOperator` of step 1. Modes that are not needed have no weight."""
    rate, angle, residues = modes
    head, count = operator.coefficients(target.window), rate.shape[1]  # (D, w)
    if isinstance(target, ModalOperator):
        return fill_operator(target, head, RecurrenceFit(rate[0].log(), angle[0], torch.view_as_real(residues[0])))
    for parameter in (target.log_real, target.imag, target.log_step, target.weights):
        parameter.zero_()
    target.log_real[:, :count].copy_(rate.log())
    target.imag[:, :count].copy_(angle)
    target.weights[..., 0].fill_(0.5)  # so that the residues are the gains of the poles as they are stored
    weights = residues[:, 0] / (2 * target.complex_residues()[:, :count].cpu())
    target.weights.zero_()
    target.weights[:, :count].copy_(torch.view_as_real(weights))
    target.direct.copy_(head[:, 0] - target.modes()[1].real.sum(dim=1))


@torch.no_grad()
def report_reduction(operator, target, balanced: System, order: int, modes: tuple, length: int) -> LayerReport:
    """Return the errors of a filled `target`: those of its stored numbers, in float64."""
    given, stored, exact = (copy.deepcopy(one).cpu().double() for one in (operator, target, target))
    fill_reduced(exact, given, modes)
    taps, found, unrounded = (one.coefficients(length) for one in (given, stored, exact))  # (D, m)
    radius = stored.powers(torch.ones(1))[..., 0].abs()  # (D, Q) or (Q,)
    after = (stored.complex_residues().abs() * radius ** (length - target.window) / (1 - radius)).sum(dim=1)
    rounding = (unrounded - found).abs().sum(dim=1) + 2 * after
    hankel = 2 * balanced.values[:, order:].sum(dim=1) + rounding
    errors = found - taps, balanced.tail(length - target.window) + after, radius.max(), hankel
    return report_errors(operator.layer_idx, order, target.window, taps, *errors)


def own_weights(model) -> dict[str, torch.Tensor]:
    """Return the weights of a model except those of its operators, by name; all must be plain tensors."""
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
    for name, value in {"order": order, "window": window}.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` must be a whole number from 1 up, got {value!r}")
    operators = [layer.mixer.tno for layer in model.base_model.layers if layer.mixer is not None]
    if all(is_small(operator, order, tolerance) for operator in operators):
        reason = f"tno_type={config.tno_types[0]!r} is a recurrence already" if operators else "no layer has a kernel"
        logger.warning(f"to_recurrent returns the model as it is, with an empty report: {reason}.")
        return model, []
    if config.is_heterogeneous:
        raise ValueError("`per_layer_config` must be None for to_recurrent, got layers that differ")
    weights, dtype = own_weights(model), compute_dtype(model.dtype)
    if operators[0].is_recurrence:
        found = [reduce_layer(operator, order, tolerance, dtype) for operator in operators]
        count = max(modes[0].shape[1] for _, _, modes, _ in found)
        fields = {"tno_type": "s4d", "s4d_state_size": 2 * count, "s4d_discretization": "zoh"}
        modal = isinstance(operators[0], ModalOperator)
        converted, targets = rebuild(model, {"num_modes": count} if modal else fields, weights)
        layers = list(zip(operators, targets, found, strict=True))
        for operator, target, (_, _, modes, _) in layers:
            fill_reduced(target, operator, modes)
        return converted, [report_reduction(operator, target, *one) for operator, target, one in layers]
    fits = [fit_layer(operator, order, window, tolerance, dtype) for operator in operators]
    count = max(len(fit.angle) for _, fit, _ in fits)
    converted, targets = rebuild(model, {"tno_type": "modal", "modal_window": window, "num_modes": count}, weights)
    for target, (taps, fit, _) in zip(targets, fits, strict=True):
        fill_operator(target, taps, fit)
    return converted, [report for _, _, report in fits]


def is_small(operator, order: int, tolerance: float | None) -> bool:
    """Whether an operator is a recurrence that needs no reduction."""
    if not isinstance(operator, RtfOperator | DiagonalOperator | ModalOperator):
        return operator.is_recurrence
    return tolerance is None and system_of(operator).transition.shape[1] <= order


def rebuild(model, fields: dict, weights: dict[str, torch.Tensor]) -> tuple:
    """Return a model with other `fields` of the configuration and the `weights`, and its operators, to be filled."""
    config = copy.deepcopy(model.config)
    config.update({"converted_from": config.converted_from or config.tno_type} | fields)
    converted = type(model)(config).to(device=model.device, dtype=model.dtype)
    converted.load_state_dict(converted.state_dict() | weights)
    converted.tie_weights()
    if hasattr(model, "generation_config"):
        converted.generation_config = copy.deepcopy(model.generation_config)
    layers = converted.train(model.training).base_model.layers
    return converted, [layer.mixer.tno for layer in layers if layer.mixer is not None]


extensions.register(to_recurrent=to_recurrent)
