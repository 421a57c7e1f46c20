"""The table of operators: the names of `TnnConfig.tno_type`. Everything else that needs to know them reads it here."""

import copy

from .tno import ToeplitzOperator
from .tno_2d import TwoAxisOperator
from .tno_explicit import ExplicitOperator
from .tno_fd import FdOperator
from .tno_modal import ModalOperator
from .tno_rpe import RpeOperator
from .tno_rtf import RtfOperator
from .tno_ski import SkiOperator

OPERATORS: dict[str, type[ToeplitzOperator]] = {
    "rpe": RpeOperator,
    "fd": FdOperator,
    "ski": SkiOperator,
    "rtf": RtfOperator,
    "modal": ModalOperator,
    "explicit": ExplicitOperator,
}
BUILT_IN = frozenset(OPERATORS)


def register_operator(name: str, cls: type[ToeplitzOperator]):
    """Make `cls` the operator of `TnnConfig(tno_type=name)`.

    A checkpoint of such a model needs the same call before it is loaded, so put it into the module of the operator and
    import that. The code of the operator is not saved with a checkpoint.

    Args:
        name: not that of another operator.
        cls: built as `cls(config, layer_idx)`, see [`ToeplitzOperator`].

    Raises:
        TypeError: `name` is no text, or `cls` no subclass of `ToeplitzOperator`.
        ValueError: another operator has the name.
    """
    if not (isinstance(name, str) and name):
        raise TypeError(f"name must be a text, not {name!r}.")
    if not (isinstance(cls, type) and issubclass(cls, ToeplitzOperator)):
        raise TypeError(f"cls must be a subclass of ToeplitzOperator, not {cls!r}.")
    known = OPERATORS.get(name)
    # A module that is run again, as in a notebook, defines its class again.
    if known is not None and (name in BUILT_IN or qualified_name(known) != qualified_name(cls)):
        raise ValueError(f"tno_type={name!r} is already {qualified_name(known)}: choose another name.")
    OPERATORS[name] = cls


def qualified_name(cls: type) -> str:
    """The module and the name of a class, as an import statement has them."""
    return f"{cls.__module__}.{cls.__qualname__}"


def operator_class(tno_type: str, registered_as: str | None = None) -> type[ToeplitzOperator]:
    """The class of the operator `tno_type`.

    Args:
        registered_as: `qualified_name` of its class where the model was saved.

    Raises:
        ValueError: there is no such operator.
    """
    if tno_type in OPERATORS:
        return OPERATORS[tno_type]
    names = ", ".join(map(repr, OPERATORS))
    if registered_as is None:
        raise ValueError(f"tno_type={tno_type!r} is not possible: it must be one of {names}.")
    module, _, name = registered_as.rpartition(".")
    raise ValueError(
        f"tno_type={tno_type!r} is not possible: the model was saved with the operator {registered_as}, which is not "
        f"registered here. Import the module {module} first, or call register_operator({tno_type!r}, {name}). "
        f"Registered are {names}."
    )


def build_tno(config, layer_idx: int = 0) -> ToeplitzOperator:
    """The operator that `config.tno_type` names, one along each axis with `config.spatial_dims=2`.

    Raises:
        ValueError: there is no such operator.
    """
    cls = operator_class(config.tno_type)
    if config.spatial_dims == 1:
        return cls(config, layer_idx)
    axis = copy.copy(config)
    axis.spatial_dims, axis.max_position_embeddings = 1, config.axis_length
    return TwoAxisOperator(config, layer_idx, cls(axis, layer_idx), cls(axis, layer_idx))
