"""Options of optimizers, read without PyTorch: names, and parameters with a rate or weight decay of their own."""

import re
from dataclasses import dataclass, field

from tnn_scripts.common.declared import enum_values

OPERATOR = r"(^|\.)tno\."
SETTINGS = {"learning_rate": "lr", "weight_decay": "weight_decay"}
# They choose the layers themselves, and need what only Trainer has.
OF_TRAINER = ("galore", "apollo", "lomo", "adalomo")
MUON = "muon"
# They follow measured losses or gradients, which the loop of `pretrain.py` does not give them.
OF_METRICS = ("reduce_lr_on_plateau", "greedy")
SCHEDULERS = enum_values("transformers.trainer_utils", "SchedulerType")
SCHEDULES = [name for name in SCHEDULERS if not name.startswith(OF_METRICS)]
OF_TRANSFORMERS = enum_values("transformers.training_args", "OptimizerNames")
OPTIMIZERS = [name for name in OF_TRANSFORMERS if not name.startswith(OF_TRAINER)] + [MUON]


@dataclass(kw_only=True)
class GroupArguments:
    """What parameters have other settings than the rest."""

    operator_learning_rate: float | None = None
    operator_weight_decay: float | None = None
    parameter_groups: list[str] = field(default_factory=list)

    def __post_init__(self):
        for name in ("operator_learning_rate", "operator_weight_decay"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"`{name}` must be at least 0, got {value}.")
        for text in self.parameter_groups:
            parse_group(text)

    def groups(self) -> dict[str, dict[str, float]]:
        """Regular expressions of parameter names -> settings; the first one that finds a parameter counts."""
        groups = dict(parse_group(text) for text in self.parameter_groups)
        operator = {"lr": self.operator_learning_rate, "weight_decay": self.operator_weight_decay}
        if self.operator_learning_rate is not None and self.operator_weight_decay is None:
            operator["weight_decay"] = 0.0
        operator = {name: value for name, value in operator.items() if value is not None}
        return groups | ({OPERATOR: operator} if operator else {})


def parse_group(text: str) -> tuple[str, dict[str, float]]:
    """`PATTERN:learning_rate=X,weight_decay=X` as a regular expression and the settings of an optimizer.

    Raises:
        ValueError: it cannot be read so.
    """
    pattern, _, given = text.rpartition(":")
    try:
        re.compile(pattern)
        pairs = [pair.split("=") for pair in given.split(",")]
        settings = {SETTINGS[name.strip()]: float(value) for name, value in pairs}
    except (KeyError, ValueError, re.error) as error:
        raise ValueError(
            f"`parameter_groups` must be of the form PATTERN:{'=X,'.join(SETTINGS)}=X, got {text!r}."
        ) from error
    if not pattern or min(settings.values()) < 0:
        raise ValueError(f"`parameter_groups` must have a pattern and numbers of at least 0, got {text!r}.")
    return pattern, settings
