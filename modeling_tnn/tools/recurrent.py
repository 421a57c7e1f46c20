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
from dataclasses import asdict, dataclass

import torch

from ..extensions import extensions
from ..tno_rpe import RpeOperator

ORDERS = (8, 16, 32, 64, 128)

LARGEST_RADIUS = 1 - 1e-6

SMALLEST_RADIUS = 1e-8

# Largest number of fitted taps, and of columns of the Hankel matrices.
MOST_TAPS = 4096

MOST_COLUMNS = 600

# Smallest number of taps after the window for a fit of poles.
LEAST_TAPS = 4


@dataclass
class LayerReport:
    """The errors of the recurrence that was fitted to the kernel of one layer.

    Attributes:
        layer: index of the layer.
        order: number of real states per channel.
        window: number of first taps that are kept exactly.
        taps: number of taps that the fit has seen.
        l2_layer, l2_median, l2_worst: relative l2 error of the taps of all channels, and its median and maximum over
            the channels.
        l1_median, l1_worst: the same for the l1 error.
        tail_bound: bound on the l1 error beyond the fitted taps, relative to the l1 norm, of the worst channel.
        largest_pole: largest magnitude of a pole, below 1.
    """

    layer: int
    order: int
    window: int
    taps: int
    l2_layer: float
    l2_median: float
    l2_worst: float
    l1_median: float
    l1_worst: float
    tail_bound: float
    largest_pole: float

    def as_dict(self) -> dict:
        """The report as a dictionary, for JSON."""
        return asdict(self)


@dataclass
class RecurrenceFit:
    """A fitted recurrence: complex poles `(Q,)` and residues `(D, Q)`. Its taps are Re(residues @ poles^n)."""

    poles: torch.Tensor
    residues: torch.Tensor

    def taps(self, length: int) -> torch.Tensor:
        """The first taps of the recurrence, `(D, length)`."""
        basis = powers(self.poles, length)  # (Q, length)
        return self.residues.real @ basis.real - self.residues.imag @ basis.imag


def powers(poles: torch.Tensor, length: int) -> torch.Tensor:
    """The powers poles^0 .. poles^(length-1), `(Q, length)`."""
    return torch.exp(torch.log(poles)[:, None] * torch.arange(length, device=poles.device))


def hankel_eigenvectors(taps: torch.Tensor, order: int) -> torch.Tensor:
    """The leading eigenvectors V `(c, order)` of the Gram matrix G of `taps` `(D, m)`."""
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
    """The eigenvalues of the transition matrix of `vectors` `(c, r)`, one of each conjugate pair, `(Q,)`."""
    transition = torch.linalg.lstsq(vectors[:-1], vectors[1:], driver="gelsd").solution  # (r, r)
    poles = torch.linalg.eigvals(transition)
    poles = poles[poles.imag >= 0]
    return torch.polar(poles.abs().clamp(SMALLEST_RADIUS, LARGEST_RADIUS), poles.angle())


def fit_residues(poles: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """The residues `(D, Q)` that fit `taps` `(D, m)` by least squares."""
    basis = powers(poles, taps.shape[1])  # (Q, m)
    rows = torch.cat([basis.real, -basis.imag])  # (2Q, m); the imaginary part of a real pole is 0
    solution = torch.linalg.lstsq(rows.t(), taps.t(), driver="gelsd").solution.t()  # (D, 2Q)
    return torch.complex(*solution.chunk(2, dim=1))


def fit_recurrence(taps: torch.Tensor, order: int) -> RecurrenceFit:
    """A recurrence of `order` states that fits `taps` `(D, m)`, float64 on the CPU."""
    normalized = taps / taps.norm(dim=1, keepdim=True).clamp(min=torch.finfo(taps.dtype).tiny)
    poles = fit_poles(hankel_eigenvectors(normalized, order))
    return RecurrenceFit(poles, fit_residues(poles, taps))


def kernel_to_fit(operator, window: int) -> torch.Tensor:
    """The taps `(D, m)` of a causal operator that a fit uses, in float64 on the CPU.

    They cover the effective length of the kernel, and at least a few taps beyond the window. A kernel that ends
    without decaying is followed by as many zeros; otherwise the fitted recurrence would continue beyond its end.
    """
    wide = copy.deepcopy(operator).double().cpu()
    bound = operator.kernel_length(exact=True)
    if bound is not None and slowest_decay(operator) is None:
        bound *= 2
    length = MOST_TAPS if bound is None else min(bound, MOST_TAPS)
    with torch.no_grad():
        return wide.coefficients(max(length, window + LEAST_TAPS))


def slowest_decay(operator) -> float | None:
    """The largest decay rate of all channels, or None for a kernel that ends without decaying, as at a window."""
    return operator.slowest_decay() if isinstance(operator, RpeOperator) and operator.window is None else None


def report_fit(layer: int, taps: torch.Tensor, fit: RecurrenceFit, order: int, window: int, operator) -> LayerReport:
    """The report on a fit: its errors on the taps `(D, m)`, and a bound on the error beyond them."""
    error = fit.taps(taps.shape[1] - window) - taps[:, window:]  # (D, m - w)
    l2 = error.norm(dim=1) / taps.norm(dim=1).clamp(min=1e-300)
    scale = taps.abs().sum(dim=1).clamp(min=1e-300)
    l1 = error.abs().sum(dim=1) / scale
    radius = fit.poles.abs()
    faded = radius ** (taps.shape[1] - window) / (1 - radius)  # (Q,)
    tail = (fit.residues.abs() * faded).sum(dim=1) / scale + own_tail(operator, taps) / scale
    return LayerReport(
        layer=layer,
        order=order,
        window=window,
        taps=taps.shape[1],
        l2_layer=(error.norm() / taps.norm()).item(),
        l2_median=l2.median().item(),
        l2_worst=l2.max().item(),
        l1_median=l1.median().item(),
        l1_worst=l1.max().item(),
        tail_bound=tail.max().item(),
        largest_pole=radius.max().item(),
    )


def own_tail(operator, taps: torch.Tensor) -> float:
    """A bound on the sum of |taps| of the kernel beyond the fitted ones; infinite for a kernel without decay."""
    if operator.kernel_length(exact=True) is None:
        return float("inf")
    slowest = slowest_decay(operator)
    if slowest is None:
        return 0.0  # the kernel ends
    length = taps.shape[1]
    undecayed = taps / slowest ** torch.arange(length, dtype=taps.dtype)
    return (undecayed.abs().max() * slowest**length / (1 - slowest)).item()


def fit_layer(
    operator, order: int, window: int, tolerance: float | None
) -> tuple[torch.Tensor, RecurrenceFit, LayerReport]:
    """The taps, the fit and the report of one layer.

    Without a `tolerance` the fit has `order` states; with one, it has the smallest of `ORDERS` whose `l2_layer` is
    within the tolerance.

    Raises:
        ValueError: no order meets the tolerance.
    """
    taps = kernel_to_fit(operator, window)
    best = None
    for candidate in (order,) if tolerance is None else ORDERS:
        fit = fit_recurrence(taps[:, window:], candidate)
        best = taps, fit, report_fit(operator.layer_idx, taps, fit, candidate, window, operator)
        if tolerance is not None and best[2].l2_layer <= tolerance:
            return best
    if tolerance is not None:
        raise ValueError(
            f"`tolerance` must be at least {best[2].l2_layer:.1e}, the relative error of layer {operator.layer_idx} "
            f"at the highest order {ORDERS[-1]}, got {tolerance}. Give a larger tolerance or a larger window."
        )
    return best


def fill_operator(target, taps: torch.Tensor, fit: RecurrenceFit):
    """Write a fit into a `ModalOperator`. Modes that the layer does not need get residues of 0."""
    count = len(fit.poles)
    with torch.no_grad():
        target.head.copy_(taps[:, : target.window])
        target.residues.zero_()
        target.residues[:, :count].copy_(torch.view_as_real(fit.residues))
        target.log_rate.zero_()
        target.angle.zero_()
        target.log_rate[:count].copy_(torch.log(-torch.log(fit.poles.abs())))
        target.angle[:count].copy_(fit.poles.angle())


def own_weights(model) -> dict[str, torch.Tensor]:
    """The weights of a model except those of its operators, by name.

    Raises:
        ValueError: adapters, parametrizations, quantizers or offloading have replaced weights.
    """
    with torch.device("meta"):
        plain = type(model)(model.config)
    given, wanted = (
        {name: value for name, value in one.state_dict().items() if ".mixer.tno." not in name}
        for one in (model, plain)
    )
    needs = "The weights must be plain tensors for to_recurrent"
    if different := sorted(given.keys() ^ wanted.keys()):
        raise ValueError(
            f"{needs}, but {different[0]} is {'added' if different[0] in given else 'replaced'}. Merge adapters "
            "(merge_and_unload) and remove parametrizations (weight norm) first."
        )
    for name, value in given.items():
        if value.is_meta or type(value) is not torch.Tensor:
            raise ValueError(
                f"{needs}, but {name} is offloaded, quantized or sharded. Load the model without device_map and "
                "quantization_config first."
            )
    return given


def to_recurrent(model, order: int = 64, window: int = 16, tolerance: float | None = None):
    """The function behind `TnnPreTrainedModel.to_recurrent`, which documents it."""
    config = model.config
    if not config.causal:
        raise ValueError("`causal` must be True for to_recurrent (only a causal model decodes), got False")
    operators = [layer.mixer.tno for layer in model.base_model.layers if layer.mixer is not None]
    if all(operator.is_recurrence for operator in operators):
        return model, []
    for name, value in {"order": order, "window": window}.items():
        if not isinstance(value, int):
            raise TypeError(f"`{name}` must be an integer, got {value!r}")
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}")
    if tolerance is not None and not (isinstance(tolerance, int | float) and tolerance > 0):
        raise ValueError(f"`tolerance` must be a number above 0 or None, got {tolerance!r}")
    weights = own_weights(model)
    fits = [fit_layer(operator, order, window, tolerance) for operator in operators]
    converted_config = copy.deepcopy(config)
    converted_config.tno_type = "modal"
    converted_config.converted_from = config.tno_type
    converted_config.modal_window = window
    converted_config.num_modes = max(len(fit.poles) for _, fit, _ in fits)
    converted = type(model)(converted_config).to(device=model.device, dtype=model.dtype)
    converted.load_state_dict(converted.state_dict() | weights)
    mixers = [layer.mixer for layer in converted.base_model.layers if layer.mixer is not None]
    for mixer, (taps, fit, _) in zip(mixers, fits, strict=True):
        fill_operator(mixer.tno, taps, fit)
    converted.tie_weights()
    converted.train(model.training)
    if getattr(model, "generation_config", None) is not None:
        converted.generation_config = copy.deepcopy(model.generation_config)
    return converted, [layer_report for _, _, layer_report in fits]


extensions.register(to_recurrent=to_recurrent)
