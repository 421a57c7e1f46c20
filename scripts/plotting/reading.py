"""The kernels of a model, read from its operators."""

import copy
import dataclasses

import numpy as np
import torch
from transformers import PreTrainedModel

from modeling_tnn.tno_auto import TwoAxisOperator
from modeling_tnn.tno_modal import ModalOperator
from modeling_tnn.tno_rtf import RtfOperator, companion_matrix
from modeling_tnn.tno_s4d import S4dOperator
from tnn_scripts.plotting.statistics import Kernel, Whole, summary

# Number of positions of an unbounded kernel that are read first, and at most.
FIRST, LONGEST = 2**10, 2**15
# A kernel has decayed if the outer half of its lags has at most this share; later lags have even less.
NEGLIGIBLE = 1e-3
# Filters with poles outside the unit circle overflow. This limit keeps their sums finite.
LARGEST = 1e100


@torch.no_grad()
def read_kernel(operator, length: int, label: str) -> Kernel:
    """The coefficients of an operator for sequences of `length` positions."""
    taps = operator.coefficients(length).double().cpu().numpy()  # (D, M)
    taps = np.nan_to_num(taps, nan=LARGEST, posinf=LARGEST, neginf=-LARGEST).clip(-LARGEST, LARGEST)
    first = 0 if operator.causal else 1 - length
    poles = poles_of(operator)
    return Kernel(label, taps, np.arange(first, length), None if poles is None else poles.cpu().numpy())


def poles_of(operator) -> torch.Tensor | None:
    """The poles of at most 64 kernels of `rtf`, `s4d` or `modal`, complex `(<= 64, N)`; None for other operators."""
    if isinstance(operator, RtfOperator):
        denominators = operator.denominators()  # (D, N)
        return torch.linalg.eigvals(companion_matrix(denominators[:: -(-len(denominators) // 64)]))
    if isinstance(operator, ModalOperator | S4dOperator):
        one = torch.ones(1, device=next(operator.parameters()).device)
        return torch.atleast_2d(operator.powers(one)[..., 0])[:64]
    return None


def read_whole(operator, label: str, side: int | None = None) -> Kernel:
    """The kernel up to its end, or until it has decayed. `open` marks channels that are longer than `LONGEST`.

    Args:
        side: number of patches along a side of an image, which ends a kernel.
    """
    end = operator.kernel_length(exact=True) if side is None else side
    length = FIRST if end is None else min(end, LONGEST)
    while True:
        kernel = read_kernel(operator, length, label)
        if length == end:
            return kernel
        kernel.open = kernel.outer_shares() > NEGLIGIBLE
        if length == LONGEST or not kernel.open.any():
            return kernel
        length = min(4 * length, LONGEST)


def read_layer(operator, length: int, index: int, side: int | None = None) -> list[tuple[Kernel, dict]]:
    """The kernel of a layer, or the two along the rows and the columns of an image of `side` patches a row.

    Each has its lags up to `length`, and the figures of all its lags.
    """
    parts = {"": operator}
    if isinstance(operator, TwoAxisOperator):
        parts = {" rows": operator.rows, " columns": operator.columns}
    read = []
    for name, part in parts.items():
        whole = read_whole(part, f"layer {index}{name}", side)
        drawn = read_kernel(part, length, whole.label)
        read.append((dataclasses.replace(drawn, open=whole.open, whole=known_of(whole, drawn)), summary(whole)))
    return read


def known_of(whole: Kernel, drawn: Kernel) -> Whole:
    """The figures of a whole kernel for its pictures. For open channels, shares and response cover the drawn lags."""
    is_open = np.zeros(len(whole.taps), dtype=bool) if whole.open is None else whole.open
    frequency, magnitude = whole.response()
    shares = np.where(is_open[:, None], 0, whole.shares()).mean(axis=0)  # (M,)
    return Whole(
        beyond=(shares[whole.lags < drawn.lags[0]].sum(), shares[whole.lags > drawn.lags[-1]].sum()),
        weights=np.where(is_open, drawn.weights(), whole.weights()),
        horizons=whole.horizons(),
        response=(frequency, np.where(is_open[:, None], drawn.response()[1], magnitude)),
    )


def read_model(model: PreTrainedModel, length: int) -> tuple[list[Kernel], list[dict]]:
    """The kernels of all layers of a model without its head, drawn at `length` positions, and the figures of each.

    They are computed in float32 or float64, because the resolution of the dtype limits the decay. Attention has none.

    Raises:
        ValueError: all layers are attention.
    """
    dtype = torch.promote_types(model.dtype, torch.float32)
    side = model.config.axis_length if model.config.spatial_dims == 2 else None
    operators = {index: layer.mixer.tno for index, layer in enumerate(model.layers) if layer.mixer is not None}
    if not operators:
        raise ValueError(f"`layer_types` must have a 'toeplitz' layer to draw, got {model.config.layer_types}")
    if dtype != model.dtype:
        operators = {index: copy.deepcopy(operator).to(dtype) for index, operator in operators.items()}
    layers = [read_layer(operator, length, index, side) for index, operator in operators.items()]
    kernels, rows = (list(part) for part in zip(*(pair for layer in layers for pair in layer), strict=True))
    return kernels, rows
