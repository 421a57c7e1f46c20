"""Fine-tune a model on GLUE tasks, or on files and data sets of the same form, with transformers' Trainer.

The options are those of run_glue.py of transformers. --sweep trains with each learning rate and seed, and keeps the
model with the best validation score for each task.

Example:
    python scripts/finetune_glue.py --model_name_or_path outputs/masked --task_name sst2 --do_train --do_eval \\
        --learning_rate 1e-3 --num_train_epochs 3 --output_dir outputs/sst2
    python scripts/finetune_glue.py --model_name_or_path outputs/masked --task_name all --sweep \\
        --output_dir outputs/glue
    python scripts/finetune_glue.py --model_name_or_path outputs/masked --train_file train.csv \\
        --validation_file validation.csv --do_train --do_eval --output_dir outputs/mine
    python scripts/finetune_glue.py --model_name_or_path outputs/genome --do_train --do_eval --do_predict \\
        --dataset_name katarinagresova/Genomic_Benchmarks_human_enhancers_cohn --output_dir outputs/enhancers
"""

from dataclasses import dataclass

from tnn_programs.cli.errors import report_errors

from tnn_programs.cli.declared import NAMES, start
from tnn_programs.cli.model_path import check_model_path, check_path
from tnn_programs.cli.parser import check_counts, option, require
from tnn_programs.cli.text_files import check_file
from tnn_programs.cli.training_arguments import GroupArguments

TASKS = NAMES["tnn_programs.data.glue.TASKS"]
METRICS = NAMES["tnn_programs.data.glue.FUNCTIONS"]


@dataclass(kw_only=True)
class GlueArguments(GroupArguments):
    """The options for the model and the data."""

    model_name_or_path: str
    task_name: list[str] | None = option(None, f"all, or some of: {', '.join(TASKS)}.")
    config_overrides: str | None = None
    dataset_path: str | None = None
    dataset_name: str | None = None
    dataset_config_name: list[str] = option([], "Configurations of the data set, or values of its column task.")
    metric_name: str | None = option(None, f"Metric of files or a data set: {', '.join(METRICS)}.")
    train_file: str | None = None
    validation_file: str | None = None
    test_file: str | None = option(None, "File to predict; it needs no labels.")
    sentence1_key: str | None = option(None, "Column of the files with the first sentences.")
    sentence2_key: str | None = option(None, "Column with the second sentences of pairs.")
    label_key: str = option("label", "Column of the files with the labels.")
    class_weights: str | None = option(None, "balanced: rare classes count as much as frequent ones in the loss.")
    max_seq_length: int = option(128, "Longer texts are cut.")
    pad_to_max_length: bool = option(False, "Pad all texts to max_seq_length.")
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    max_predict_samples: int | None = option(None, "Predict the first N rows.")
    from_scratch: bool = option(False, "Random weights instead of the trained ones.")
    ignore_mismatched_sizes: bool = option(False, "Draw a new head if the model is a classifier of other classes.")
    sweep: bool = option(False, "Train with each learning rate and seed; keep the best.")
    sweep_learning_rates: list[float] = option([1e-5, 3e-5, 6e-5, 1e-4])  # of the TNN paper
    sweep_seeds: list[int] = option([0, 1, 2], "Seeds of the sweep.")
    trust_remote_code: bool = False
    overwrite_output_dir: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_model_path(self.model_name_or_path, tokenizer=True)
        if self.dataset_path is not None:
            check_path(self.dataset_path, "--dataset_path")
        files = [file for file in (self.train_file, self.validation_file) if file is not None]
        named = [name for name in (self.task_name, self.dataset_name) if name is not None]
        if (len(named), len(files)) not in ((1, 0), (0, 2)):
            raise ValueError("--task_name, --dataset_name, or --train_file and --validation_file must be given")
        of_set = self.dataset_name is not None or not self.dataset_config_name
        require(self, "dataset_config_name", of_set, "given with --dataset_name")
        of_rows, of_own = self.task_name is None, "given with --train_file or --dataset_name"
        of_pairs = self.sentence2_key is None or self.sentence1_key is not None
        require(self, "sentence1_key", not self.sentence_keys or of_rows, of_own)
        require(self, "sentence2_key", of_pairs, "given with --sentence1_key")
        require(self, "label_key", of_rows or self.label_key == "label", of_own)
        require(self, "class_weights", self.class_weights in (None, "balanced"), "balanced")
        known = self.metric_name is None or (of_rows and self.metric_name in METRICS)
        require(self, "metric_name", known, f"absent with --task_name, and one of {', '.join(METRICS)}")
        for file in filter(None, (*files, self.test_file)):
            check_file(file, whole=False)
        if self.task_name == ["all"]:
            self.task_name = list(TASKS)
        for task in self.task_name or []:
            if task not in TASKS:
                raise ValueError(f"--task_name must be all or one of {', '.join(TASKS)}, got {task}")
        check_counts(self, "max_train_samples", "max_eval_samples", "max_predict_samples", "max_seq_length")

    @property
    def sentence_keys(self) -> tuple[str, ...]:
        """The columns of text that the options name."""
        return tuple(filter(None, (self.sentence1_key, self.sentence2_key)))


@report_errors
def main():
    # Other defaults than Trainer's: a rate that follows from the model, and the loss more often.
    start(GlueArguments, __doc__, "finetune_glue", "scipy", "sklearn", learning_rate=None, logging_steps=10)


if __name__ == "__main__":
    main()
