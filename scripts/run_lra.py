"""Train and evaluate a classifier on a task of the Long Range Arena with transformers' Trainer.

The recipes have the sizes and settings of the papers; options on the command line override them. Without
--dataset_path, the data come from the Hub (text, image) or are generated (listops, pathfinder, path-x). Retrieval
needs the files of the LRA release, or other pairs of texts.

Example:
    python scripts/run_lra.py --recipe lra/tnn-listops --output_dir outputs/listops
    python scripts/run_lra.py --recipe lra/small-image --output_dir outputs/image \\
        --config_overrides tno_type=fd
"""

from dataclasses import dataclass

from tnn_programs.cli.errors import report_errors

from tnn_programs.cli.declared import NAMES, start
from tnn_programs.cli.model_path import check_path
from tnn_programs.cli.parser import check_counts, option
from tnn_programs.cli.task_arguments import ClassifierArguments


@dataclass(kw_only=True)
class LraArguments(ClassifierArguments):
    """The task, its data and the model."""

    task: str = option(choices=NAMES["tnn_programs.data.lra.TASKS"])
    dataset_path: str | None = None
    max_length: int | None = option(None, "Most tokens. Longer texts are cut; ListOps has shorter samples.")

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, "max_length")
        if self.dataset_path is not None:
            check_path(self.dataset_path, "--dataset_path")


@report_errors
def main():
    start(LraArguments, __doc__, "run_lra")


if __name__ == "__main__":
    main()
