"""The options that programs of tasks share: of one classifier, or of a comparison of models."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tnn_programs.cli.model_path import find_config
from tnn_programs.cli.parser import check_counts, option, parse_overrides
from tnn_programs.cli.training_arguments import GroupArguments

if TYPE_CHECKING:  # a command line is read before these are imported
    from transformers import PreTrainedConfig


@dataclass(kw_only=True)
class ClassifierArguments(GroupArguments):
    """The options of programs that train one classifier of a preset."""

    config_name: str
    config_overrides: str | None = None
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    transformer: bool = False
    overwrite_output_dir: bool = False
    dry_run: bool = False

    def __post_init__(self):
        super().__post_init__()
        find_config(self.config_name)
        check_counts(self, "max_train_samples", "max_eval_samples")


@dataclass(kw_only=True)
class ComparisonArguments(GroupArguments):
    """The options of programs that compare variants of a model. A subclass builds one from fields (`build`)."""

    variants: list[str] = option([])
    config_overrides: str | None = None
    longer: list[int] = option([])
    seeds: list[int] | None = None
    dry_run: bool = False

    def __post_init__(self):
        super().__post_init__()
        names = [variant.partition(":")[0] for variant in self.variants]
        if len(set(names)) != len(names):
            raise ValueError(f"--variants must have different names, got {', '.join(names)}")

    def build(self, fields: dict) -> "PreTrainedConfig":
        """The configuration with these fields."""
        raise NotImplementedError

    def variant_config(self, variant: str) -> "PreTrainedConfig":
        """The configuration of a variant `name:field=value,field=value`."""
        name, _, changes = variant.partition(":")
        if "=" in name:
            raise ValueError(f"--variants must be NAME or NAME:FIELD=VALUE,..., got {variant}")
        try:
            shared = parse_overrides(self.config_overrides)
            return self.build(shared | parse_overrides(changes, option="changes"))
        except ValueError as error:
            raise ValueError(f"--variants {name}: {error}") from error
