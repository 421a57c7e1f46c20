"""The options of `finetune_glue.py`."""

from dataclasses import dataclass, field

from tnn_scripts.common.declared import declared_keys
from tnn_scripts.common.model_path import check_model_path, check_path
from tnn_scripts.common.parser import check_counts
from tnn_scripts.common.training_arguments import GroupArguments
from tnn_scripts.data.files import check_file

# Where the program differs from Trainer: a rate that follows from the model, and a loss in the bar.
TRAINING = {"learning_rate": None, "logging_steps": 10}
TASKS = declared_keys("tnn_scripts.data.glue", "TASKS")


@dataclass(kw_only=True)
class GlueArguments(GroupArguments):
    """The options for the model and the data."""

    model_name_or_path: str
    task_name: list[str] | None = field(default=None, metadata={"help": f"all, or some of: {', '.join(TASKS)}."})
    config_overrides: str | None = None
    dataset_path: str | None = None
    train_file: str | None = None
    validation_file: str | None = None
    test_file: str | None = field(default=None, metadata={"help": "File to predict; it needs no labels."})
    sentence1_key: str | None = field(default=None, metadata={"help": "Column of the files with the first sentences."})
    sentence2_key: str | None = field(default=None, metadata={"help": "Column with the second sentences of pairs."})
    max_seq_length: int = field(default=128, metadata={"help": "Longer texts are cut."})
    pad_to_max_length: bool = field(default=False, metadata={"help": "Pad all texts to max_seq_length."})
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    max_predict_samples: int | None = field(default=None, metadata={"help": "Predict the first so many rows."})
    from_scratch: bool = field(default=False, metadata={"help": "Random weights instead of the trained ones."})
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Draw a new head if the model is a classifier of other classes."}
    )
    sweep: bool = field(default=False, metadata={"help": "Train with each learning rate and seed; keep the best."})
    sweep_learning_rates: list[float] = field(default_factory=lambda: [1e-5, 3e-5, 6e-5, 1e-4])  # of the TNN paper
    sweep_seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "Seeds of the sweep."})
    trust_remote_code: bool = False
    overwrite_output_dir: bool = False
    dry_run: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_model_path(self.model_name_or_path, tokenizer=True)
        if self.dataset_path is not None:
            check_path(self.dataset_path, "--dataset_path")
        files = (self.train_file is not None) + (self.validation_file is not None)
        if (self.task_name is None) == (files == 0) or files == 1:
            raise ValueError("either --task_name or both --train_file and --validation_file must be given")
        if self.sentence2_key is not None and self.sentence1_key is None:
            raise ValueError(f"--sentence2_key must be given with --sentence1_key, got only {self.sentence2_key}")
        if self.sentence1_key is not None and not files:
            raise ValueError("--sentence1_key and --sentence2_key must be given with --train_file, not with a task")
        for file in filter(None, (self.train_file, self.validation_file, self.test_file)):
            check_file(file, whole=False)
        if self.task_name == ["all"]:
            self.task_name = list(TASKS)
        for task in self.task_name or []:
            if task not in TASKS:
                raise ValueError(f"--task_name must be all or one of {', '.join(TASKS)}, got {task}")
        check_counts(self, "max_train_samples", "max_eval_samples", "max_predict_samples", "max_seq_length")
        if self.dry_run and len(self.task_name or []) > 1:
            raise ValueError(f"--dry_run must be given with one task, got {', '.join(self.task_name)}")

    def number_of_runs(self) -> int:
        """How many models of a task are trained."""
        return len(self.sweep_learning_rates) * len(self.sweep_seeds) if self.sweep else 1

    @property
    def sentence_keys(self) -> tuple[str, ...]:
        """The columns of text that the options name."""
        return tuple(key for key in (self.sentence1_key, self.sentence2_key) if key is not None)
