"""Measure what causal models remember and find: Copying, Delay, Recall and Passkey.

Copying and Delay, of the RTF paper, compare state sizes, of RTF or, with --config_overrides tno_type=s4d, of S4D: the
accuracy on the tokens to copy, and the error of one operator relative to the signal. Recall and Passkey compare any
configurations, such as hybrids with attention, by the accuracy on the tokens to find. The recipes small-* run in
minutes on a CPU; copying and delay have the settings of the paper.

Example:
    python scripts/run_synthetic.py --recipe synthetic/small-copying --output_dir outputs/a
    python scripts/run_synthetic.py --recipe synthetic/small-recall --output_dir outputs/b
"""

from tnn_scripts.common.errors import importing, report_errors

from tnn_scripts.common.arguments import parse_arguments, training_options
from tnn_scripts.common.declared import changed
from tnn_scripts.options.synthetic import SyntheticArguments


@report_errors
def main():
    args, options = parse_arguments([SyntheticArguments, training_options()], __doc__)
    with importing("training"):
        from tnn_scripts.runs.run_synthetic import start
    start(args, changed(options))


if __name__ == "__main__":
    main()
