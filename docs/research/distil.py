"""Convert a model to recurrences fitted by gradient descent, as the RTF paper distils filters (section 4.4, table 3).

    minimise  mean_d ||k_d - h_d||^2 / ||k_d||^2,    h_d the taps of channel d, of order N

    gradient          h_d the taps of b_d(z) / a_d(z), over a_d, b_d and h0_d                        RTF
    modal-gradient    h_d,k = 2 Re sum_q r_q lambda_q^k (and d more at k = 0), over lambda, r and d  Laughing Hyena

D channels, m taps, N order, Q = N / 2 modes. Every channel has its own poles. The direct fit of `to_recurrent` shares
them within a layer, and is reported too. (Massaroli et al., "Laughing Hyena Distillery", NeurIPS 2023, fits the modal
form.) The options are those of `tnn to-recurrent`, and --fit, --steps and --learning_rate.

Example:
    python docs/research/distil.py --model_name_or_path outputs/demo --output_dir outputs/rtf --fit gradient --order 16
"""

import copy
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from tnn_programs.cli.errors import report_errors

import torch
from torch import nn
from transformers import PreTrainedModel

from modeling_tnn.numerics import compute_dtype
from modeling_tnn.tno import ToeplitzOperator
from modeling_tnn.tno_auto import build_tno
from modeling_tnn.tools.recurrent import fit_layer, kernel_to_fit, own_weights
from tnn_programs.cli.atomic import check_overwriting, claim
from tnn_programs.plotting.reading import poles_of
from tnn_programs.to_recurrent import parser, run, summary

COLUMNS = (
    "order", "taps", "l2_layer", "l2_worst", "mse", "largest_pole", "direct_l2_layer", "direct_l2_worst", "direct_mse",
)  # fmt: skip


@dataclass(frozen=True)
class GradientFit:
    """A form of recurrence that is fitted by gradient descent.

    Attributes:
        tno_type: the operator.
        fields: the fields of the configuration for an order.
        start: writes the initial values of an operator for kernels of so many taps.
        trained: names of the parameters that are trained.
        scaled: those of them that the taps are linear in.
    """

    tno_type: str
    fields: Callable[[int], dict]
    start: Callable[[ToeplitzOperator, int], None]
    trained: tuple[str, ...]
    scaled: tuple[str, ...]


def start_rational(operator: ToeplitzOperator, length: int):
    """All coefficients at zero: every pole is at zero."""
    for parameter in (operator.denominator, operator.numerator, operator.direct):
        parameter.zero_()
    operator.slack.fill_(0.1)


def start_modal(operator: ToeplitzOperator, length: int):
    """Poles whose rates are spread from 1 / m to 1 on a logarithmic scale, and whose angles from 0 to pi; residues 0.

    The angles are squares, so that more of them are low: the kernels of language models are smooth. Rates and angles
    are paired in another random order in each channel. With angles in equal steps, or in the order of the rates, fits
    of some orders were several times worse.
    """
    filters, modes = operator.log_real.shape
    generator = torch.Generator().manual_seed(0)
    orders = torch.rand(filters, modes, generator=generator).argsort(dim=1)  # (D, Q)
    places = (torch.arange(modes, dtype=torch.float64) + 0.5) / modes  # (Q,)
    operator.log_real.copy_((places - 1) * math.log(length))
    operator.imag.copy_(math.pi * places[orders].square())
    for parameter in (operator.log_step, operator.weights, operator.direct):
        parameter.zero_()


FITS = {
    "gradient": GradientFit(
        "rtf",
        lambda order: {"rtf_state_size": order, "rtf_num_denominators": None, "rtf_constraint": "l1_montel"},
        start_rational,
        trained=("denominator", "numerator", "direct", "slack"),
        scaled=("numerator", "direct"),
    ),
    "modal-gradient": GradientFit(
        "s4d",
        lambda order: {"s4d_state_size": order, "s4d_discretization": "zoh"},
        start_modal,
        trained=("log_real", "imag", "weights", "direct"),  # with the step, poles would have two scales
        scaled=("weights", "direct"),
    ),
}


def fitted_config(config, fit: GradientFit, order: int, length: int):
    """The configuration of a model whose kernels of `length` taps become recurrences."""
    fitted = copy.deepcopy(config)
    fitted.tno_type, fitted.converted_from = fit.tno_type, config.tno_type
    fitted.rtf_truncation_length = length
    for name, value in fit.fields(order).items():
        setattr(fitted, name, value)
    return fitted


def fit_kernel(
    taps: torch.Tensor, operator: ToeplitzOperator, fit: GradientFit, steps: int, learning_rate: float
) -> torch.Tensor:
    """Train an operator to match `taps` `(D, m)`; the relative l2 error of each channel, `(D,)`.

    The optimizer is AdamW with a cosine schedule. The kernels are fitted at unit norm, so that all channels learn at
    the same rate, and what the taps are linear in is scaled afterwards.
    """
    scale = taps.norm(dim=1, keepdim=True).clamp(min=torch.finfo(taps.dtype).tiny)
    target = taps / scale  # (D, m)
    with torch.no_grad():
        fit.start(operator, taps.shape[1])
    parameters: list[nn.Parameter] = [getattr(operator, name) for name in fit.trained]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        loss = (operator.coefficients(taps.shape[1]) - target).square().sum(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        error = (operator.coefficients(taps.shape[1]) - target).norm(dim=1)
        for name in fit.scaled:
            parameter = getattr(operator, name)
            parameter.mul_(scale.view(-1, *[1] * (parameter.dim() - 1)))
    return error


def fit_operator(
    original: ToeplitzOperator, config, fit: GradientFit, order: int, window: int, steps: int, learning_rate: float
) -> tuple[ToeplitzOperator, dict]:
    """An operator fitted to `original`, and a report with its errors and those of the direct fit."""
    taps = kernel_to_fit(original, window)
    operator = build_tno(fitted_config(config, fit, order, taps.shape[1]), original.layer_idx).double()
    start = time.perf_counter()
    error = fit_kernel(taps, operator, fit, steps, learning_rate)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    direct = fit_layer(original, order, window, None)[2]
    absolute = error * taps.norm(dim=1)  # (D,)
    return operator, {
        "layer": original.layer_idx,
        "order": order,
        "taps": taps.shape[1],
        "l2_layer": (absolute.norm() / taps.norm()).item(),
        "l2_median": error.median().item(),
        "l2_worst": error.max().item(),
        "mse": (absolute.square().sum() / taps.numel()).item(),
        "mse_of_unit_kernels": (error.square().mean() / taps.shape[1]).item(),
        "largest_pole": poles_of(operator).abs().max().item(),
        "seconds": seconds,
        "direct_l2_layer": direct.l2_layer,
        "direct_l2_median": direct.l2_median,
        "direct_l2_worst": direct.l2_worst,
        "direct_mse": (direct.l2_layer**2 * taps.square().mean()).item(),
        "direct_seconds": time.perf_counter() - start,
    }


def convert_by_gradient(
    model: PreTrainedModel, order: int, window: int, steps: int, learning_rate: float, fit: str = "gradient"
) -> tuple[PreTrainedModel, list[dict]]:
    """A copy of a causal model whose operators are recurrences, and a report of each layer.

    Args:
        fit: a name in `FITS`.

    Raises:
        ValueError: the model is bidirectional, or already a recurrence, the fit is unknown, or the weights cannot be
            copied, as for `to_recurrent`.
    """
    config = model.config
    if fit not in FITS:
        raise ValueError(f"`fit` must be one of {', '.join(FITS)}, got {fit!r}")
    operators = [layer.mixer.tno for layer in model.base_model.layers if layer.mixer is not None]
    if not config.causal or any(operator.is_recurrence for operator in operators):
        raise ValueError(
            "The model must be causal and not a recurrence already, got "
            f"tno_type={config.tno_type!r} with causal={config.causal}"
        )
    weights = own_weights(model)
    fits = [fit_operator(operator, config, FITS[fit], order, window, steps, learning_rate) for operator in operators]
    longest = max(report["taps"] for _, report in fits)
    converted = type(model)(fitted_config(config, FITS[fit], order, longest)).to(model.device, model.dtype)
    converted.load_state_dict(converted.state_dict() | weights)
    mixers = [layer.mixer for layer in converted.base_model.layers if layer.mixer is not None]
    for mixer, (operator, _) in zip(mixers, fits, strict=True):
        mixer.tno.to(compute_dtype(model.dtype)).load_state_dict(operator.state_dict())
    converted.tie_weights()
    converted.generation_config = copy.deepcopy(model.generation_config)
    return converted.train(model.training), [report for _, report in fits]


@report_errors
def main():
    options = parser()
    options.description = __doc__
    options.add_argument("--fit", choices=FITS, default="gradient", help="Form of the recurrence.")
    options.add_argument("--steps", type=int, default=2000, help="Steps of the fit, for each layer.")
    options.add_argument("--learning_rate", type=float, default=0.02)
    args = options.parse_args()

    def convert(model, args):
        return convert_by_gradient(model, args.order, args.window, args.steps, args.learning_rate, args.fit)

    with claim(args.output_dir):
        check_overwriting(args.output_dir, args.overwrite_output_dir, args.model_name_or_path)
        result = run(args, convert)
    sys.stdout.write(summary(result, COLUMNS) + f"\nsaved in {args.output_dir}\n")


if __name__ == "__main__":
    main()
