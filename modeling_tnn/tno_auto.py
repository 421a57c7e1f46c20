"""Build the operator that `TnnConfig.tno_type` names, for sequences or along both axes of an image.

    (R v)_{a,b} = sum_c r_{b-c} v_{a,c},    (C v)_{a,b} = sum_c k_{a-c} v_{c,b}
    product     y = C R v + R C v = 2 C R v           the Long Range Arena models of the TNN paper
    sum         y = R v + C v                         its ImageNet models

B batch, S side of the image, L = S^2 tokens in row-major order, D channels. R and C are linear and act on different
axes, so they commute. The kernels along the two axes are two operators of one variant.
"""

import copy
import math

import torch

from .configuration_tnn import BUILT_IN, OPERATORS, qualified_name, require_operator
from .numerics import compute_dtype
from .tno import LayerContext, ToeplitzOperator
from .tno_exponential import ExponentialOperator
from .tno_fd import FdOperator
from .tno_hyena import HyenaOperator
from .tno_modal import ModalOperator
from .tno_rpe import ExplicitOperator, RpeOperator
from .tno_rtf import RtfOperator
from .tno_s4d import S4dOperator
from .tno_ski import SkiOperator


class TwoAxisOperator(ToeplitzOperator):
    """An operator on a square image, made of one operator along rows and one along columns. Bidirectional only."""

    def __init__(self, config, layer_idx: int, rows: ToeplitzOperator, columns: ToeplitzOperator):
        super().__init__(config, layer_idx)
        self.rows, self.columns, self.mixing = rows, columns, config.spatial_mixing
        if rows.channel_parameters is not None:
            known, axes = rows.channel_parameters.items(), ("rows", "columns")
            self.channel_parameters = {f"{axis}.{name}": count for axis in axes for name, count in known}

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """Raise a ValueError: the matrix of an image is Toeplitz in blocks."""
        raise ValueError("`spatial_dims` must be 1 for coefficients, got 2: `rows` and `columns` have coefficients")

    def matmul(self, v: torch.Tensor, kernels: tuple = (None, None)) -> torch.Tensor:
        """The product with an image, `(B, S^2, D)` to `(B, S^2, D)`; a ValueError for another number of tokens."""
        side = math.isqrt(v.shape[1])
        if side**2 != v.shape[1]:
            got = f"a square with spatial_dims=2, got {v.shape[1]}"
            raise ValueError(f"The number of tokens in a sequence must be {got}")
        image = v.unflatten(1, (side, side))  # (B, S, S, D)
        of_rows, of_columns = (LayerContext(kernel=kernel) for kernel in kernels)

        def rows(x: torch.Tensor) -> torch.Tensor:
            return self.rows(x.flatten(0, 1), context=of_rows).unflatten(0, x.shape[:2])

        def columns(x: torch.Tensor) -> torch.Tensor:
            x = x.transpose(1, 2)
            return self.columns(x.flatten(0, 1), context=of_columns).unflatten(0, x.shape[:2]).transpose(1, 2)

        return COMBINATIONS[self.mixing](rows, columns, image).flatten(1, 2)


# From R and C, as functions, and an image v to y.
COMBINATIONS = {
    "product": lambda rows, columns, image: 2 * columns(rows(image)),
    "sum": lambda rows, columns, image: rows(image) + columns(image),
}


OPERATORS.update(rpe=RpeOperator, explicit=ExplicitOperator, fd=FdOperator, ski=SkiOperator)
OPERATORS.update(rtf=RtfOperator, s4d=S4dOperator, modal=ModalOperator, hyena=HyenaOperator)
OPERATORS.update(exponential=ExponentialOperator)


def register_operator(name: str, cls: type[ToeplitzOperator]):
    """Make `cls` the operator of `TnnConfig(tno_type=name)`.

    A checkpoint of such a model needs the same call before it is loaded: put it into the module of the operator, and
    import this module. Saved folders carry the module for places where the package is not installed, see `hub.py`.

    Args:
        name: a name that no other operator has.
        cls: the class, which is built as `cls(config, layer_idx)`, see [`ToeplitzOperator`].

    Raises:
        TypeError: `name` is not a non-empty string, or `cls` is not a subclass of `ToeplitzOperator`.
        ValueError: another operator has the name.
    """
    if not (isinstance(name, str) and name):
        raise TypeError(f"`name` must be a non-empty string, got {name!r}")
    if not (isinstance(cls, type) and issubclass(cls, ToeplitzOperator)):
        raise TypeError(f"`cls` must be a subclass of ToeplitzOperator, got {cls!r}")
    known = OPERATORS.get(name)
    # A module that runs again, as in a notebook, redefines its class.
    if known is not None and (name in BUILT_IN or qualified_name(known) != qualified_name(cls)):
        raise ValueError(f"`name` must not be that of another operator, got {name!r} of {qualified_name(known)}")
    OPERATORS[name] = cls


def build_tno(config, layer_idx: int = 0) -> ToeplitzOperator:
    """The operator that `config.tno_type` names. With `config.spatial_dims=2` there is one for each axis."""
    require_operator(config.tno_type)
    if config.spatial_dims == 2:
        axis = copy.copy(config)
        axis.spatial_dims, axis.max_position_embeddings = 1, config.axis_length
        return TwoAxisOperator(config, layer_idx, build_tno(axis, layer_idx), build_tno(axis, layer_idx))
    operator = OPERATORS[config.tno_type](config, layer_idx)
    if all(parameter.dtype == compute_dtype(parameter.dtype) for parameter in operator.parameters()):
        return operator
    return operator._apply(lambda parameter: parameter)  # `fp32_parameters` of a model built in half precision
