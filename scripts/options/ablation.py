"""The options of `run_ablation.py`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tnn_scripts.common.arguments import load_config, parse_overrides
from tnn_scripts.common.names import find_config
from tnn_scripts.common.training_arguments import GroupArguments
from tnn_scripts.data.files import check_source

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from modeling_tnn import TnnConfig


@dataclass(kw_only=True)
class AblationArguments(GroupArguments):
    """The variants and the settings that they share."""

    variants: list[str]
    config_name: str = "tnn-tiny"
    config_overrides: str | None = None
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    documents: str | None = None
    longer: list[int] = field(default_factory=list)
    eval_tokens: int = field(default=65_536, metadata={"help": "Validation tokens to read, at least one row."})
    max_pole_radius: float | None = None
    seeds: list[int] | None = None
    sweep_learning_rates: list[float] = field(default_factory=list)
    dry_run: bool = False

    def __post_init__(self):
        super().__post_init__()
        names = [variant.partition(":")[0] for variant in self.variants]
        if len(set(names)) != len(names):
            raise ValueError(f"--variants must have different names, got {', '.join(names)}")
        find_config(self.config_name)
        if self.dataset_name is not None:
            check_source(self.dataset_name)
        for variant in self.variants:
            self.variant_config(variant)

    def learning_rates(self, training: "TrainingArguments") -> list[float]:
        """Those that each variant is trained with."""
        return self.sweep_learning_rates or [training.learning_rate]

    def variant_config(self, variant: str) -> "TnnConfig":
        """The configuration of a variant.

        Raises:
            ValueError: a field is unknown, or has a value outside its limits.
        """
        name, _, changes = variant.partition(":")
        if "=" in name:
            raise ValueError(f"--variants must be NAME or NAME:FIELD=VALUE,..., got {variant}")
        try:
            return load_config(
                self.config_name, parse_overrides(self.config_overrides), parse_overrides(changes, option="changes")
            )
        except ValueError as error:
            raise ValueError(f"--variants {name}: {error}") from error
