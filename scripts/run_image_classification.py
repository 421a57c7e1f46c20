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

from tnn_scripts.common.errors import importing, report_errors

from tnn_scripts.common.arguments import parse_arguments, training_options
from tnn_scripts.common.declared import changed
from tnn_scripts.options.images import ImageArguments


@report_errors
def main():
    args, options = parse_arguments([ImageArguments, training_options()], __doc__)
    with importing("training"):
        from tnn_scripts.runs.run_image_classification import start
    start(args, changed(options))


if __name__ == "__main__":
    main()
