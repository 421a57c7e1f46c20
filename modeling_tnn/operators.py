"""The table of operators: the names of `TnnConfig.tno_type`."""

import copy

from .tno import ToeplitzOperator
from .tno_fd import FdOperator
from .tno_free import FreeOperator
from .tno_grid import GridOperator
from .tno_modal import ModalOperator
from .tno_rpe import RpeOperator
from .tno_rtf import RtfOperator
from .tno_ski import SkiOperator

TNO_TYPES = {
    "rpe": RpeOperator,
    "fd": FdOperator,
    "ski": SkiOperator,
    "rtf": RtfOperator,
    "modal": ModalOperator,
    "free": FreeOperator,
}


def build_tno(config, layer_idx: int = 0) -> ToeplitzOperator:
    """The operator that `config.tno_type` names, one along each axis with `config.num_axes=2`.

    Raises:
        ValueError: there is no such operator.
    """
    if config.tno_type not in TNO_TYPES:
        raise ValueError(f"tno_type={config.tno_type!r} is not possible: it must be one of {', '.join(TNO_TYPES)}.")
    if config.num_axes == 1:
        return TNO_TYPES[config.tno_type](config, layer_idx)
    axis = copy.copy(config)
    axis.num_axes, axis.max_position_embeddings = 1, config.axis_length
    return GridOperator(config, layer_idx, build_tno(axis, layer_idx), build_tno(axis, layer_idx))
