"""The operators by the names of `TnnConfig.tno_type`: the table that the configuration declares is filled here."""

import copy

from .configuration_tnn import BUILT_IN, OPERATORS, qualified_name, require_operator
from .numerics import compute_dtype
from .tno import ToeplitzOperator
from .tno_2d import TwoAxisOperator
from .tno_explicit import ExplicitOperator
from .tno_fd import FdOperator
from .tno_modal import ModalOperator
from .tno_rpe import RpeOperator
from .tno_rtf import RtfOperator
from .tno_s4d import S4dOperator
from .tno_ski import SkiOperator

OPERATORS.update(
    {
        "rpe": RpeOperator,
        "fd": FdOperator,
        "ski": SkiOperator,
        "rtf": RtfOperator,
        "s4d": S4dOperator,
        "modal": ModalOperator,
        "explicit": ExplicitOperator,
    }
)


def register_operator(name: str, cls: type[ToeplitzOperator]):
    """Make `cls` the operator of `TnnConfig(tno_type=name)`.

    A checkpoint of such a model needs the same call before it is loaded. Put the call into the module of the operator,
    and import this module. The code of the operator is not saved with a checkpoint.

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
    """The operator that `config.tno_type` names. With `config.spatial_dims=2` there is one for each axis.

    Raises:
        ValueError: `config.tno_type` is unknown.
    """
    require_operator(config.tno_type)
    cls = OPERATORS[config.tno_type]
    if config.spatial_dims == 1:
        return with_fp32_parameters(cls(config, layer_idx))
    axis = copy.copy(config)
    axis.spatial_dims, axis.max_position_embeddings = 1, config.axis_length
    pair = (with_fp32_parameters(cls(axis, layer_idx)) for _ in range(2))
    return TwoAxisOperator(config, layer_idx, *pair)


def with_fp32_parameters(operator: ToeplitzOperator) -> ToeplitzOperator:
    """The operator with its `fp32_parameters` in float32, also where the model is built in half precision."""
    if all(parameter.dtype == compute_dtype(parameter.dtype) for parameter in operator.parameters()):
        return operator
    return operator._apply(lambda parameter: parameter)
