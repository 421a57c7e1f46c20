"""Rational transfer functions fitted to kernels by gradient descent, as the RTF paper distils filters (section 4.4).

    minimise  mean_d ||k_d - h_d||^2 / ||k_d||^2    over a_d, b_d, h0_d,    h_d the taps of b_d(z)/a_d(z)

D channels, m taps, N order. Every channel has its own poles. The direct fit of `to_recurrent` shares them within a
layer.
"""

import copy
import time

import torch
from transformers import PreTrainedModel

from modeling_tnn.conversion import fit_layer, kernel_to_fit
from modeling_tnn.tno import ToeplitzOperator
from modeling_tnn.tno_auto import build_tno


def rtf_config(config, order: int, length: int):
    """The configuration of a model whose kernels of `length` taps become rational functions."""
    fitted = copy.deepcopy(config)
    fitted.tno_type, fitted.converted_from = "rtf", config.tno_type
    fitted.max_position_embeddings = fitted.rtf_truncation_length = length
    fitted.rtf_state_size = order
    fitted.rtf_num_denominators, fitted.rtf_constraint = None, "l1_montel"
    return fitted


def fit_kernel(taps: torch.Tensor, operator: ToeplitzOperator, steps: int, learning_rate: float) -> torch.Tensor:
    """Train an RTF operator to match `taps` `(D, m)`; the relative l2 error of each channel, `(D,)`.

    The optimizer is AdamW with a cosine schedule. The kernels are fitted at unit norm, so that all channels learn at
    the same rate, and the numerators are scaled afterwards.
    """
    scale = taps.norm(dim=1, keepdim=True).clamp(min=torch.finfo(taps.dtype).tiny)
    target = taps / scale  # (D, m)
    with torch.no_grad():
        operator.denominator.zero_(), operator.numerator.zero_(), operator.direct.zero_(), operator.slack.fill_(0.1)
    optimizer = torch.optim.AdamW(operator.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        loss = (operator.coefficients(taps.shape[1]) - target).square().sum(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        error = (operator.coefficients(taps.shape[1]) - target).norm(dim=1)
        operator.numerator.mul_(scale), operator.direct.mul_(scale[:, 0])
    return error


def fit_operator(
    original: ToeplitzOperator, config, order: int, window: int, steps: int, learning_rate: float
) -> tuple[ToeplitzOperator, dict]:
    """An RTF operator fitted to `original`, and a report with its errors and those of the direct fit."""
    taps = kernel_to_fit(original, window)
    operator = build_tno(rtf_config(config, order, taps.shape[1]), original.layer_idx).double()
    start = time.perf_counter()
    error = fit_kernel(taps, operator, steps, learning_rate)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    direct = fit_layer(original, order, window, None)[2]
    return operator, {
        "layer": original.layer_idx,
        "order": order,
        "taps": taps.shape[1],
        "l2_layer": ((error * taps.norm(dim=1)).norm() / taps.norm()).item(),
        "l2_median": error.median().item(),
        "l2_worst": error.max().item(),
        "largest_pole": operator.poles().abs().max().item(),
        "seconds": seconds,
        "direct_l2_layer": direct.l2_layer,
        "direct_l2_median": direct.l2_median,
        "direct_l2_worst": direct.l2_worst,
        "direct_seconds": time.perf_counter() - start,
    }


def convert_by_gradient(
    model: PreTrainedModel, order: int, window: int, steps: int, learning_rate: float
) -> tuple[PreTrainedModel, list[dict]]:
    """A copy of a causal model with `tno_type="rtf"`, and a report of each layer.

    Raises:
        ValueError: the model is bidirectional, or already a recurrence.
    """
    config = model.config
    if not config.causal or config.tno_type in ("rtf", "modal"):
        raise ValueError(
            "The model must be causal and not a recurrence already, got "
            f"tno_type={config.tno_type!r} with causal={config.causal}"
        )
    operators = [layer.gtu.tno for layer in model.base_model.layers if layer.gtu is not None]
    fits = [fit_operator(operator, config, order, window, steps, learning_rate) for operator in operators]
    converted = type(model)(rtf_config(config, order, max(report["taps"] for _, report in fits))).to(model.device)
    kept = {name: value for name, value in model.state_dict().items() if ".gtu.tno." not in name}
    converted.load_state_dict(kept, strict=False)
    mixers = [layer.gtu for layer in converted.base_model.layers if layer.gtu is not None]
    for mixer, (operator, _) in zip(mixers, fits, strict=True):
        mixer.tno.load_state_dict(operator.state_dict())
    converted.tie_weights()
    return converted.train(model.training), [report for _, report in fits]
