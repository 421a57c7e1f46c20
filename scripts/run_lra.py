"""Train and evaluate a classifier on a task of the Long Range Arena with transformers' Trainer.

The recipes have the sizes and settings of the papers; options on the command line override them. Without
--dataset_path, the data come from the Hub (text, image) or are generated (listops, pathfinder, path-x). Retrieval
needs the files of the LRA release, or any texts: with --pair_column title the question is whether two passages are of
one book.

Example:
    python scripts/run_lra.py --recipe lra/tnn-listops --output_dir outputs/listops
    python scripts/run_lra.py --recipe lra/small-image --output_dir outputs/image \\
        --config_overrides tno_type=fd
"""

from tnn_scripts.common.errors import importing, report_errors

from tnn_scripts.common.arguments import parse_arguments, training_options
from tnn_scripts.common.declared import changed
from tnn_scripts.options.lra import LraArguments


@report_errors
def main():
    args, options = parse_arguments([LraArguments, training_options()], __doc__)
    with importing("training"):
        from tnn_scripts.runs.run_lra import start
    start(args, changed(options))


if __name__ == "__main__":
    main()
