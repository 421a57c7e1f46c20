"""The options of `run_lra.py`."""

from dataclasses import dataclass, field

from tnn_scripts.common.declared import declared_keys
from tnn_scripts.common.model_path import check_path
from tnn_scripts.common.names import find_config
from tnn_scripts.common.parser import check_counts
from tnn_scripts.common.training_arguments import GroupArguments

TASKS = declared_keys("tnn_scripts.data.lra", "TASKS")


@dataclass(kw_only=True)
class LraArguments(GroupArguments):
    """The task, its data and the model."""

    task: str = field(metadata={"choices": tuple(TASKS)})
    config_name: str
    config_overrides: str | None = None
    dataset_path: str | None = None
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    max_length: int | None = field(
        default=None, metadata={"help": "Largest number of tokens. Longer texts are cut; ListOps has shorter samples."}
    )
    pair_column: str | None = field(
        default=None,
        metadata={"help": "Retrieval: column of --dataset_path; the passages of a pair have one value in it, or two."},
    )
    extra_test: str | None = field(
        default=None, metadata={"help": "Another configuration of --dataset_path whose test split is evaluated too."}
    )
    transformer: bool = False
    overwrite_output_dir: bool = False
    dry_run: bool = False

    def __post_init__(self):
        super().__post_init__()
        find_config(self.config_name)
        check_counts(self, "max_train_samples", "max_eval_samples", "max_length")
        if self.dataset_path is not None:
            check_path(self.dataset_path, "--dataset_path")
        if self.pair_column is not None and self.task != "retrieval":
            raise ValueError(f"--pair_column must be given for retrieval alone, got {self.task}")
        if self.extra_test is not None and self.dataset_path is None:
            raise ValueError(f"--extra_test must be given with --dataset_path, got only {self.extra_test}")
