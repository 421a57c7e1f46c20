"""The options that programs of tasks share: of one classifier, or of a comparison of models."""

import re
from dataclasses import dataclass
from operator import attrgetter
from pydoc import locate
from typing import TYPE_CHECKING

from tnn_programs.cli.errors import importing

from tnn_programs.cli.model_path import find_config
from tnn_programs.cli.parser import check_counts, load_config, option, parse_overrides
from tnn_programs.cli.text_files import check_source
from tnn_programs.cli.training_arguments import GroupArguments

if TYPE_CHECKING:  # a command line is read before these are imported
    from transformers import PreTrainedConfig

# The change of a variant that names another model, with the comma behind it.
MODEL = re.compile(r"(?<![^,])model=([^,]+),?")
# What another model gets of the TNN that the options describe, where it has such a field.
SHARED = ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")


@dataclass(kw_only=True)
class ClassifierArguments(GroupArguments):
    """The options of programs that train one classifier of a preset."""

    config_name: str
    config_overrides: str | None = None
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    transformer: bool = False
    overwrite_output_dir: bool = False

    def __post_init__(self):
        super().__post_init__()
        find_config(self.config_name)
        check_counts(self, "max_train_samples", "max_eval_samples")


@dataclass(kw_only=True)
class ComparisonArguments(GroupArguments):
    """The options of programs that compare variants (`compared`). A subclass builds one from fields (`build`)."""

    name, compared = "text", property(attrgetter("variants"))
    variants: list[str] = option([])
    config_overrides: str | None = None
    equal_parameters: bool = option(False, "Give all variants the parameters of the first, by their inner width.")
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    documents: str | None = None
    eval_tokens: int = option(65_536, "Validation tokens to read, at least one row.")
    longer: list[int] = option([])
    sweep_learning_rates: list[float] = option([])
    seeds: list[int] | None = None
    seeds_at_best: bool = option(False, "Train with all but the first of the seeds at the best learning rate alone.")
    contexts: list[int] = option([])
    max_pole_radius: float | None = None

    def __post_init__(self):
        super().__post_init__()
        names = [variant.partition(":")[0] for variant in self.variants]
        if len(set(names)) != len(names):
            raise ValueError(f"--variants must have different names, got {', '.join(names)}")
        if self.dataset_name is not None:
            check_source(self.dataset_name)

    def build(self, fields: dict) -> "PreTrainedConfig":
        """The configuration with these fields."""
        raise NotImplementedError

    def base_config(self) -> "PreTrainedConfig":
        """The configuration without the changes of a variant."""
        return self.build(parse_overrides(self.config_overrides))

    def tasks(self) -> "list[tuple[ComparisonArguments, dict]]":
        """Of each task the arguments for it alone, and its own options of Trainer."""
        return [(self, {})]

    def variant_config(self, variant: str) -> "PreTrainedConfig":
        """The configuration of a variant `name:field=value,field=value`, or `name:model=MODEL,field=value`."""
        name, _, changes = variant.partition(":")
        if "=" in name:
            raise ValueError(f"--variants must be NAME or NAME:FIELD=VALUE,..., got {variant}")
        try:
            if found := MODEL.search(changes):
                return other_model(found[1], self.base_config(), MODEL.sub("", changes, count=1))
            return self.build(parse_overrides(self.config_overrides) | parse_overrides(changes, option="changes"))
        except ValueError as error:
            raise ValueError(f"--variants {name}: {error}") from error


def other_model(name: str, like: "PreTrainedConfig", changes: str) -> "PreTrainedConfig":
    """The configuration of a preset, a folder, a Hub id or a class by its module, with the sizes of another one."""
    with importing():
        from transformers import PreTrainedConfig

    found = locate(name) if "." in name else None
    is_class = isinstance(found, type) and issubclass(found, PreTrainedConfig)
    known = found() if is_class else load_config(name)
    sizes = {field: getattr(like, field) for field in SHARED} | {"pad_token_id": None}  # no token is padding
    fields = {field: value for field, value in sizes.items() if hasattr(known, field)}
    fields |= parse_overrides(changes, known, option="changes")
    return found(**fields) if is_class else load_config(name, fields)
