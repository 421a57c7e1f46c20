"""Train and evaluate an image classifier, a TNN that mixes patches along rows and columns, with transformers' Trainer.

The data are a Hub id or a folder that `datasets` reads, such as one folder of pictures for each class. The program
uses the first column with pictures and the first with classes. `--augmentation` changes the training pictures at
random; evaluation sees them as they are.

Example:
    python scripts/run_image_classification.py --recipe images/small-cifar10 \\
        --output_dir outputs/cifar10
    python scripts/run_image_classification.py --config_name tnn-image-tiny --dataset_name pictures --max_steps 1000 \\
        --output_dir outputs/mine
"""

from dataclasses import dataclass

from tnn_programs.cli.errors import report_errors

from tnn_programs.cli.declared import start
from tnn_programs.cli.parser import option
from tnn_programs.cli.task_arguments import ClassifierArguments


@dataclass(kw_only=True)
class ImageArguments(ClassifierArguments):
    """The model and the pictures."""

    dataset_name: str = "uoft-cs/cifar10"
    dataset_config_name: str | None = None
    label_column_name: str | None = option(None, "Column of the classes, if not the first.")
    augmentation: str = option("flip", "flip: mirror half of the training pictures.", choices=("none", "flip"))


@report_errors
def main():
    start(ImageArguments, __doc__, "run_image_classification")


if __name__ == "__main__":
    main()
