"""The kernels of a model, read from its operators."""

import copy
import dataclasses

import numpy as np
import torch
from transformers import PreTrainedModel

from modeling_tnn.tno_2d import TwoAxisOperator
from tnn_scripts.plotting.statistics import Kernel, Whole, summary

# Positions of a kernel without an end that are read at first, and at most.
FIRST, LONGEST = 2**10, 2**15
# A kernel has faded where the outer half of its lags has at most this share: what follows has far less again.
NEGLIGIBLE = 1e-3
# Filters with poles outside the unit circle grow beyond all numbers; sums of these do not.
LARGEST = 1e100


@torch.no_grad()
def read_kernel(operator, length: int, label: str) -> Kernel:
    """The coefficients of an operator for sequences of `length` positions."""
    taps = operator.coefficients(length).double().cpu().numpy()  # (D, M)
    taps = np.nan_to_num(taps, nan=LARGEST, posinf=LARGEST, neginf=-LARGEST).clip(-LARGEST, LARGEST)
    first = 0 if operator.causal else 1 - length
    poles = operator.poles()
    return Kernel(label, taps, np.arange(first, length), None if poles is None else poles.cpu().numpy())


def read_whole(operator, label: str, side: int | None = None) -> Kernel:
    """A kernel until it ends or has faded; `open` says which channels still go on after `LONGEST` positions.

    Args:
        side: of an image, which ends a kernel.
    """
    end = operator.effective_length() if side is None else side
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
    """The kernel of a layer, or those along the rows and the columns of an image of `side` patches a row.

    Each with its lags up to `length` and the figures of all its lags.
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
    """What the pictures of a kernel say of all of it; shares and response of an open channel are of what is drawn."""
    is_open = np.zeros(len(whole.taps), dtype=bool) if whole.open is None else whole.open
    frequency, magnitude = whole.response()
    return Whole(
        weights=np.where(is_open, drawn.weights(), whole.weights()),
        horizons=whole.horizons(),
        response=(frequency, np.where(is_open[:, None], drawn.response()[1], magnitude)),
    )


def read_model(model: PreTrainedModel, length: int) -> tuple[list[Kernel], list[dict]]:
    """The kernels of all layers of a model without its head, drawn at `length` positions, and the figures of each.

    They are computed in float32 at least: a kernel fades at the resolution of its dtype.
    """
    dtype = torch.promote_types(model.dtype, torch.float32)
    side = model.config.axis_length if model.config.spatial_dims == 2 else None
    operators = [layer.gtu.tno for layer in model.layers]
    if dtype != model.dtype:
        operators = [copy.deepcopy(operator).to(dtype) for operator in operators]
    layers = [read_layer(operator, length, index, side) for index, operator in enumerate(operators)]
    kernels, rows = (list(part) for part in zip(*(pair for layer in layers for pair in layer), strict=True))
    return kernels, rows
